"""Bugs planted behind every pass are found by the verifier or by validation, or are none."""

import pytest

import zerofx.__main__ as command_line
from tests.kit.planted import training
from tests.kit.planted.steps import FORMS
from tests.kit.planted.verdicts import verdicts
from zerofx.cli.training_runs import Command

SOME = 12
"""One bug of so many is planted in a night, all in an exhaustive run."""

QUICK = ("layers, everything in files", "convolutions, two optimizers")


def survivors_without_a_reason(name, is_chosen):
    form = FORMS[name]
    with form.captured() as step:
        found = list(verdicts(step, is_chosen, **form.arguments))
    assert len(found) > 20 and any(not one.survived for one in found)
    return [str(one) for one in found if one.survived and not one.why]


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUICK)
def test_some_bugs_are_found_or_are_none(name):
    assert survivors_without_a_reason(name, lambda number: number % SOME == 0) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMS)
def test_every_bug_is_found_or_is_none(name):
    assert survivors_without_a_reason(name, lambda number: True) == []


def named(bug, folder, monkeypatch, capsys):
    """What bisect says of a training with this bug; a rank stands in for the command's process."""

    def run(command, variables, file):
        return training.status(bug, str(folder), variables, file.name)

    monkeypatch.setattr(Command, "_status", run)
    monkeypatch.chdir(folder)
    assert command_line.main(["bisect", "--metric", training.LOSS, "--", "train"]) == 0
    return capsys.readouterr().out


OF_A_PASS_WITH_A_SWITCH = [
    (name, kind, number)
    for name in ("recompute", "hoist_casts")
    for kind, number in (("delete", 0), ("swap", 1))
]
OF_A_PASS_WITHOUT = [
    (name, kind, number)
    for name in ("shard_optimizer", "shard_parameters", "place_offload", "place_files")
    for kind, number in (("delete", 2), ("swap", 0), ("constant", 1))
]
TRIED = [("shard_optimizer", "constant", 1), ("recompute", "delete", 0)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug, marks=() if bug in TRIED else pytest.mark.exhaustive, id=" ".join(map(str, bug))
        )
        for bug in OF_A_PASS_WITH_A_SWITCH + OF_A_PASS_WITHOUT
    ],
)
def test_bisect_names_the_pass_of_a_bug(bug, tmp_path, monkeypatch, capsys):
    text = named(bug, tmp_path, monkeypatch, capsys)
    assert f"Behind {bug[0]} the run " in text, text
