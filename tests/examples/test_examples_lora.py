"""``examples/finetune_lora.py``, small, as its users start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--steps=6 --base-steps=6 --layers=1 --width=32 --seq=16 --target-loss=9".split()


@pytest.mark.nightly
def test_adapters_are_trained_saved_loaded_and_merged(tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    example = [ROOT / "examples" / "finetune_lora.py", *SMALL, f"--out={tmp_path}"]
    done = subprocess.run(
        [*torchrun, *example],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "ZEROFX_LOWERING": "eager",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = re.search(r"on prose ([\d.]+), with adapters ([\d.]+)", done.stdout).groups()
    assert float(after) < float(before)
    assert f"loaded beside the base: {after}; merged into it: {after}" in done.stdout
    adapters = sum(file.stat().st_size for file in (tmp_path / "finetune_lora/adapters").iterdir())
    assert f"{adapters / 1e6:.2f} MB of adapters" in done.stdout
