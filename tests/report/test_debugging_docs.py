"""Every command in docs/debugging.md runs, one after the other, as a newcomer would run them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import zerofx.__main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")


def commands():
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.nightly
def test_the_walk_can_be_walked(tmp_path, monkeypatch, capsys):
    """Trainings in processes of their own; what looks at their dumps here, which imports once."""
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"Save this as `train.py`:\n\n```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment["ZEROFX_HARDWARE"] = "latency_s=2.5e-4 bytes_per_s=1e9"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # for what bisect runs
    outputs = {}
    for command in commands():
        line = re.sub(r"\btorchrun\b", f"{sys.executable} -m torch.distributed.run", command)
        if command.startswith("python -m zerofx "):
            no_pass_is_named = " bisect " in command
            assert command_line.main(shlex.split(line)[3:]) == no_pass_is_named, command
            printed = capsys.readouterr()
            outputs[command] = printed.out + printed.err
            continue
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
    _, summary, explained, sharded, moved, captured, last, _, turned_off, drawn, bisected = (
        outputs.values()
    )
    (peak,) = re.findall(r"```\n(The peak is .*?)```", PAGE, re.S)
    for line in peak.splitlines():
        # Of when, the line depends on what the machine is taken for.
        assert re.sub(r" at \S+ µs, \d+%", "", line) in re.sub(r" at \S+ µs, \d+%", "", drawn)
    pictures = re.findall(r"^dumps/.*11_prefetch\.png", drawn, re.M)
    assert len(pictures) == 2 and all((tmp_path / picture).exists() for picture in pictures)
    shown = re.findall(r"^(0\d  \w+ .*)$", PAGE, re.M)
    without_seconds = [re.sub(r"0\.\d{4}", "", line).split() for line in summary.splitlines()]
    assert len(shown) == 4
    for row in shown:
        assert re.sub(r"0\.\d{4}", "", row).split() in without_seconds
    (quoted,) = re.findall(r"```\n(a rank keeps .*?)```", PAGE, re.S)
    assert quoted in explained
    (quoted,) = re.findall(r"```\n(zerofx: no run differs.*?)```", PAGE, re.S)
    assert " ".join(quoted.split()) in " ".join(bisected.split())
    gather = (
        r"\+    # shard_parameters: gather 0.weight.* for forward\n\+    gather_start_bucket0_1: "
    )
    assert re.search(gather, sharded)
    (quoted,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert quoted in moved and quoted.replace("+    ", "-    ") in moved
    results = [text.split("what it returns:")[1] for text in (captured, last)]
    assert "parameter 2.bias" in results[0] and results[0] == results[1]
    assert re.search(r"0 inserted, 0 removed, [1-9]\d* moved, 0 changed", turned_off)
    program = (tmp_path / "dumps/rank0/step0_0/10_shard_parameters.py").read_text()
    (quoted,) = re.findall(r"```text\n(    # from /home/me/train.py.*?)```", PAGE, re.S)
    place, *statements = quoted.splitlines(keepends=True)
    assert place.replace("/home/me/train.py", str(tmp_path / "train.py")) in program
    assert "".join(statements) in program
