"""Every command in docs/checkpoints.md runs, one after the other, as a newcomer would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_the_walk_can_be_walked(tmp_path):
    scripts = re.findall(r"`(\w+\.py)`[^`]*?(?:`resume`[^`]*?)?```python\n(.*?)```", PAGE, re.S)
    assert [name for name, _ in scripts] == ["train.py", "read.py"]
    for name, script in scripts:
        (tmp_path / name).write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = []
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    for command in [line[2:] for block in blocks for line in block.splitlines()]:
        line = re.sub(r"\btorchrun\b", f"{sys.executable} -m torch.distributed.run", command)
        line = re.sub(r"^python\b", sys.executable, line)
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    first, listed, more, again, read, _ = outputs
    assert "resumed" not in first and listed.split() == ["step-4", "step-6"]
    assert "resumed at step 6" in more
    # The write behind step 9 may have been complete when the rank died at step 10, or not.
    resumed = re.findall(r"resumed at step (\d+)", again)
    assert resumed[0] == "8" and resumed[-1] in ("8", "10")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-10", "step-12"]
    assert re.search(r"norm \d", read) and (tmp_path / "whole.pt").exists()
