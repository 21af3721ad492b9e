"""``examples/torchtitan_job.py``: torchtitan's trainer with our step, beside torchtitan's own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.torchrun import ROOT, torchrun

MISSING = [one for one in ("torchtitan", "torchdata") if not importlib.util.find_spec(one)]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: see CONTRIBUTING.md, libraries"),
]


def logged(kind: str, folder: Path, steps: int, ranks: int = 2) -> list[list[float]]:
    """Train; return what rank 0 logs of each step: number, mean loss, largest, norm, tokens."""
    out = torchrun("-m", "tests.kit.torchtitan_on_cpu", kind, folder, steps, ranks=ranks)
    (line,) = [line for line in out.splitlines() if line.startswith("[[")]
    return json.loads(line)


def test_it_logs_what_torchtitans_own_trainer_does_and_resumes(tmp_path):
    """Two micro-batches a step, ranks with unlike numbers of labels."""
    own, here = logged("own", tmp_path / "own", 4), logged("zero", tmp_path / "zero", 4)
    assert [one[0] for one in here] == [1, 2, 3, 4]
    for mine, its in zip(here, own, strict=True):
        assert mine == pytest.approx(its, rel=1e-6)
    shutil.rmtree(tmp_path / "zero" / "checkpoint" / "step-4")
    assert logged("zero", tmp_path / "zero", 4) == here[2:]
    shutil.rmtree(tmp_path / "zero" / "checkpoint" / "step-4")
    alone = logged("zero", tmp_path / "zero", 4, ranks=1)
    assert [one[0] for one in alone] == [3, 4], "another number of ranks goes on too"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("config.parallelism.tensor_parallel_degree = 2", "tensor_parallel_degree is 2, and this"),
        ("config.validator.enable = True", "calls the model outside of the step"),
        ("config.checkpoint.load_step = 3", "checkpoint.load_step is 3, which zerofx's"),
        ("config.model_spec = moe('debugmodel')", "the model is deepseek_v3 debugmodel, and this"),
        ("config.model_spec = qwen('debugmodel_moe')", "qwen3 debugmodel_moe, and this script is"),
    ],
)
def test_what_it_cannot_do_is_refused(change, words):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "examples")!r})
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.deepseek_v3 import model_registry as moe
from torchtitan.models.qwen3 import model_registry as qwen
from torchtitan_job import ZeroTrainer
config = llama3_debugmodel()
{change}
ZeroTrainer(config)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "ValueError: " in done.stderr, done.stderr
    assert words in done.stderr
