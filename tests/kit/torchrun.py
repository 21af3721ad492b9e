"""Starts programs as users do, on ranks of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: object, ranks: int = 2) -> str:
    """Run a script, or a module behind ``-m``, on ranks without Inductor; return what it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*start, *map(str, arguments)],
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
    return done.stdout
