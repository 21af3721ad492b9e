"""``python -m zerofx``: its commands, and what it says when one cannot be done."""

import argparse
import io
import runpy
import sys

import pytest

import zerofx.__main__ as command_line
from zerofx.cli import COMMANDS
from zerofx.errors import CommandError


def test_help_lists_every_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerofx", "--help"])
    monkeypatch.delitem(sys.modules, command_line.__name__)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("zerofx", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "python -m zerofx" in printed
    subparsers = argparse.ArgumentParser().add_subparsers()
    for add_to in COMMANDS:
        add_to(subparsers)
    for name in subparsers.choices:
        assert f"\n    {name} " in printed or f"\n    {name}\n" in printed


def test_a_missing_or_unknown_command_is_told_from_the_usage(capsys):
    for arguments in ([], ["no-such-command"]):
        with pytest.raises(SystemExit) as stop:
            command_line.main(arguments)
        assert stop.value.code == 2
        assert "usage: python -m zerofx" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", (CommandError("it is of another version"), FileNotFoundError(2, "No such file", "x"))
)
def test_what_cannot_be_done_is_said_in_a_line(error, monkeypatch, capsys):
    def fail(_chosen):
        raise error

    def add_to(subparsers):
        subparsers.add_parser("fail").set_defaults(run=fail)

    monkeypatch.setattr(command_line, "COMMANDS", (add_to,))
    assert command_line.main(["fail"]) == 1
    assert capsys.readouterr().err == f"zerofx: {error}\n"


def test_names_in_any_alphabet_can_be_printed_to_any_terminal(monkeypatch):
    def add_to(subparsers):
        subparsers.add_parser("name").set_defaults(
            run=lambda _chosen: print("gr\u00f6\u00dfe") or 0
        )

    monkeypatch.setattr(command_line, "COMMANDS", (add_to,))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert command_line.main(["name"]) == 0
    sys.stdout.flush()
    assert printed.getvalue() == rb"gr\xf6\xdfe" + b"\n"
