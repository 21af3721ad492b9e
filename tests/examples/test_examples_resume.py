"""``examples/train_gpt.py --checkpoints`` under torchrun: killed, it goes on where it was saved."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerofx

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
NUM_STEPS, SAVED_EVERY = 40, 5
SIZES = {"layers": 1, "width": 48, "seq": 16}
PATIENCE_S = 300.0

pytestmark = pytest.mark.nightly


class Launch:
    """One command of torchrun's, which trains into a folder.  For ``contextlib.closing``."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        arguments = {
            **SIZES,
            "steps": NUM_STEPS,
            "batch": 12,
            "save-every": SAVED_EVERY,
            "checkpoints": folder / "checkpoints",
            "out": folder,
            "sample-bytes": 1,
            "target-loss": 9,
        }
        options = [f"--{name}={value}" for name, value in arguments.items()]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.log = (folder / f"log-{len(list(folder.glob('log-*')))}").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, EXAMPLE, *options],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "ZEROFX_LOWERING": "eager",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **environment,
            },
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait_for_step(self, number: int) -> None:
        """Return when it has saved this step or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while last_step(self.folder) < number:
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()
            time.sleep(2e-3)

    def workers(self) -> dict[int, int]:
        """The process of each rank that is this agent's."""
        found = {}
        for child in children(self.process.pid):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(one[5:]): child for one in variables if one.startswith(b"RANK=")}
        return found

    def kill(self) -> None:
        """End the agent and its workers, none of which can do anything about it."""
        workers = self.workers() if self.process.poll() is None else {}
        for pid in (self.process.pid, *workers.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def resumed_after(self) -> list[int]:
        return [int(number) for number in re.findall(r"resumed after step (\d+)", self.said())]

    def check_ends_well(self) -> None:
        assert self.process.wait(PATIENCE_S) == 0, self.said()

    def close(self) -> None:
        self.kill()
        self.log.close()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def last_step(folder: Path) -> int:
    last = zerofx.latest(folder / "checkpoints")
    return int(last.name.partition("-")[2]) if last else 0


def result(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps, and the parameters in the end."""
    assert last_step(folder) == NUM_STEPS
    model = train_gpt.GPT(
        seq=SIZES["seq"], num_layers=SIZES["layers"], width=SIZES["width"], recompute=False
    )
    extra = zerofx.load(folder / "checkpoints" / f"step-{NUM_STEPS}", model)
    assert len(extra["losses"]) == NUM_STEPS
    return extra["losses"], model.state_dict()


def load_example():
    """Import the example, which finds its neighbours next to itself."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        spec = importlib.util.spec_from_file_location("examples_train_gpt", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    return module


train_gpt = load_example()


@pytest.fixture(scope="module", name="undisturbed")
def undisturbed_fixture(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with contextlib.closing(Launch(folder, "--nproc-per-node=2")) as launch:
        launch.check_ends_well()
        assert launch.resumed_after() == []
    yield folder


def check_same_to_rounding(one: Path, other: Path) -> None:
    (losses, state), (other_losses, other_state) = result(one), result(other)
    assert losses == pytest.approx(other_losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(value, other_state[name], rtol=1e-3, atol=1e-4)


def test_a_rank_that_is_killed_changes_no_bit(tmp_path, undisturbed):
    with contextlib.closing(
        Launch(tmp_path / "run", "--nproc-per-node=2", "--max-restarts=3")
    ) as launch:
        launch.wait_for_step(10)
        os.kill(launch.workers()[1], signal.SIGKILL)
        launch.check_ends_well()
        (resumed,) = launch.resumed_after()
        assert 10 <= resumed < NUM_STEPS
    (losses, state), (expected, expected_state) = result(tmp_path / "run"), result(undisturbed)
    assert losses == expected
    assert all(torch.equal(value, expected_state[name]) for name, value in state.items())


def test_other_numbers_of_processes_go_on_to_rounding(tmp_path, undisturbed):
    folder = tmp_path / "run"
    for workers, until in ((2, 10), (3, 25)):
        with contextlib.closing(Launch(folder, f"--nproc-per-node={workers}")) as launch:
            launch.wait_for_step(until)
            launch.kill()
    with contextlib.closing(Launch(folder, "--nproc-per-node=1")) as launch:
        launch.check_ends_well()
        (resumed,) = launch.resumed_after()
        assert 25 <= resumed < NUM_STEPS
    check_same_to_rounding(folder, undisturbed)


def test_a_finished_training_is_not_trained_again(tmp_path, undisturbed):
    before = (undisturbed / "checkpoints" / f"step-{NUM_STEPS}").stat()
    with contextlib.closing(Launch(undisturbed, "--nproc-per-node=1")) as launch:
        launch.check_ends_well()
        assert launch.resumed_after() == [NUM_STEPS] and "nothing is left" in launch.said()
    assert (undisturbed / "checkpoints" / f"step-{NUM_STEPS}").stat() == before


def test_an_agent_that_is_killed_leaves_the_other_to_go_on(tmp_path, undisturbed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def agent(is_host: bool) -> Launch:
        return Launch(
            tmp_path / "run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=run",
            f"--rdzv-conf=is_host={is_host},last_call_timeout=10,keep_alive_interval=1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    with contextlib.closing(agent(True)) as stays, contextlib.closing(agent(False)) as goes:
        stays.wait_for_step(10)
        assert stays.workers().keys() | goes.workers().keys() == {0, 1}
        goes.kill()
        stays.check_ends_well()
        (resumed,) = stays.resumed_after()
        assert 10 <= resumed < NUM_STEPS and "over 1 rank(s)" in stays.said()
    check_same_to_rounding(tmp_path / "run", undisturbed)
