"""``examples/two_ranks.ipynb``: its cells run from top to bottom, without a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_cells_run_and_ranks_train_as_one_process(tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = {"PYTHONPATH": path, "ZEROFX_LOWERING": "eager", "OMP_NUM_THREADS": "1"}
    given["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cells = json.loads((ROOT / "examples" / "two_ranks.ipynb").read_text())["cells"]
    printed = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], "the notebook is kept without results"
        first, _, rest = text.partition("\n")
        if first.startswith("%%writefile "):
            (tmp_path / first.split()[1]).write_text(rest)
            continue
        command = text[1:].split() if text.startswith("!") else [sys.executable, "-c", text]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert all(f"rank {rank} keeps" in printed[2] for rank in (0, 1))
    assert "losses are apart by" in printed[-1]
