"""Long runs end as they should: every bit right, every process with exit code 0.

One corrupted buffer in thousands of collectives is enough to fail: the ranks are compared bit by
bit with one eager process that computes each rank's gradients in turn and adds them in rank order.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import exhaustive
from tests.kit.models import Gpt, language_loss
from tests.kit.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
ROWS = 2  # of one rank's batch

Run = tuple[list[float], dict[str, torch.Tensor]]
"""One rank's losses, and the parameters at the end."""


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rows(number: int, rank: int, world_size: int) -> list[torch.Tensor]:
    return [part.chunk(world_size)[rank] for part in models.tokens(number, ROWS * world_size)]


def train_on_a_rank(stage: int, steps: int) -> Run:
    def step(model, optimizer, *batch):
        loss = language_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    compiled = torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})
    losses = [
        compiled(model, optimizer, *rows(number, rank, world_size)).item()
        for number in range(steps)
    ]
    return losses, model.state_dict()


def train_for_all_ranks(world_size: int, steps: int) -> list[Run]:
    """What each rank should have seen."""
    model, optimizer = build()
    parameters = list(model.parameters())
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for number in range(steps):
        gradients = []
        for rank in range(world_size):
            loss = language_loss(model, *rows(number, rank, world_size))
            losses[rank].append(loss.item())
            gradients.append(torch.autograd.grad(loss, parameters))
        for index, parameter in enumerate(parameters):
            total = gradients[0][index]
            for rank in range(1, world_size):
                total = total + gradients[rank][index]
            parameter.grad = total / world_size
        optimizer.step()
    return [(losses[rank], model.state_dict()) for rank in range(world_size)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in the ranks: more threads may add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def soak(world_size: int, steps: int) -> None:
    with one_thread():
        expected = train_for_all_ranks(world_size, steps)
    ranks = Ranks(world_size)
    with contextlib.closing(ranks):
        runs = ranks.run(train_on_a_rank, 3, steps, timeout_s=300 + 2.0 * steps)
        exit_codes = ranks.close()
    for rank, ((losses, state), (expected_losses, expected_state)) in enumerate(
        zip(runs, expected, strict=True)
    ):
        wrong = [number for number in range(steps) if losses[number] != expected_losses[number]]
        assert not wrong, f"rank {rank}: {len(wrong)} wrong losses, the first at step {wrong[0]}"
        assert state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            assert torch.equal(state[name], value), f"{name} on rank {rank}"
    assert losses[-1] < losses[0]
    assert exit_codes == [0] * world_size


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (2, exhaustive(4)))
def test_a_hundred_steps_are_right_to_the_last_bit(world_size):
    soak(world_size, 100)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_thousand_steps_are_right_to_the_last_bit(world_size):
    soak(world_size, 2000)


# Exit.


SCRIPT = """
import os
import sys

import torch

import tests.conftest
import zerofx
from tests.kit.models import Mlp, features, squared_loss


def step(model, optimizer, *batch):
    loss = squared_loss(model, *batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


torch.set_num_threads(1)
model = Mlp()
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(step, backend="zero", options={"lowering": "eager"})
for number in range(3):
    step(model, optimizer, *features(number, 2))
if "save" in sys.argv:
    path = f"{__file__}.{os.environ['MASTER_PORT']}"
    zerofx.save(path, model, optimizer, asynchronous=True).wait()
if "destroy" in sys.argv:
    torch.distributed.destroy_process_group()
"""


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", script, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def check_exit(folder: Path, *arguments: str) -> None:
    ended = run_script(folder, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


EXITS = pytest.mark.parametrize(
    "arguments", [(), ("destroy",), ("save",), ("save", "destroy")], ids=" ".join
)


@pytest.mark.nightly
@EXITS
def test_a_script_ends_without_a_word(tmp_path, arguments):
    check_exit(tmp_path, *arguments)


@pytest.mark.nightly
@EXITS
def test_a_script_ends_without_a_word_ten_times_out_of_ten(tmp_path, arguments):
    for _ in range(10):
        check_exit(tmp_path, *arguments)
