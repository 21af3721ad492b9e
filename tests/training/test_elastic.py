"""torchrun starts a training again, on as many processes as are left or have come: it goes on.

The agents are torchrun's own; they and their workers are forked from a server of the tests.  With
torchrun's command: ``test_examples_resume.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tests.conftest  # noqa: F401  # the workers need the backend's name too
import zerofx
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.ranks import ranks_fixture, start, use_own_server  # noqa: F401
from zerofx.runtime.comm.rendezvous import store_of_this_start

SAVED_AT = 4  # the steps after this many are done once more
HELD_AT = 6  # where a worker waits for what is done to it
NUM_STEPS = 8
PATIENCE_S = 120.0


def step(model, optimizer, inputs, targets):
    loss = squared_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(root: str, num_steps: int, rank: int, size: int, hold: bool) -> None:
    """Go on with a training until a step; each rank logs its losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager"})
    extra = zerofx.resume(Path(root) / "checkpoints", model, optimizer)
    if extra:
        scheduler.load_state_dict(extra["scheduler"])
    for number in range(extra.get("step", 0), num_steps):
        while hold and number == HELD_AT:
            (Path(root) / f"held-{rank}-of-{size}").touch()
            time.sleep(0.01)
        inputs, targets = (part.chunk(size)[rank] for part in features(number, 12))
        loss = compiled(model, optimizer, inputs, targets).item()
        with open(Path(root) / "log", "a") as log:
            log.write(f"{number} {rank} {size} {loss.hex()}\n")
        scheduler.step()
        if (number + 1) % SAVED_AT == 0:
            extra = {"step": number + 1, "scheduler": scheduler.state_dict()}
            zerofx.save(Path(root) / f"checkpoints/step-{number + 1}", model, optimizer, extra)


def train_as_worker(
    root: str, num_steps: int, held: tuple[int, int] | None, makes_group: bool
) -> None:
    """What a worker of torchrun's does; the first of this rank and world size waits at a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hold = held == (rank, size) and not (Path(root) / f"held-{rank}-of-{size}").exists()
    (Path(root) / f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    (Path(root) / f"pid-{rank}-of-{size}").write_text(str(os.getpid()))
    if makes_group:
        dist.init_process_group("gloo")
    train(root, num_steps, rank, size, hold)


def train_as_rank(root: str) -> None:
    train(root, NUM_STEPS, dist.get_rank(), dist.get_world_size(), hold=False)


def losses_in(root: Path) -> dict[int, dict[int, float]]:
    """Each step's loss by rank, of its last execution."""
    found: dict[int, tuple[str, dict[int, float]]] = {}
    for line in (root / "log").read_text().splitlines():
        number, rank, size, loss = line.split()
        if found.setdefault(int(number), (size, {}))[0] != size:
            found[int(number)] = size, {}
        found[int(number)][1][int(rank)] = float.fromhex(loss)
    return {number: losses for number, (_, losses) in sorted(found.items())}


def steps_in(root: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in (root / "log").read_text().splitlines())


def means_in(root: Path) -> list[float]:
    return [sum(losses.values()) / len(losses) for losses in losses_in(root).values()]


def run_agent(environment, worker_arguments, **config) -> None:
    use_own_server()
    os.environ.update(environment)
    sys.stderr = open(os.devnull, "w")  # torchrun's words about workers that were killed
    launch = elastic_launch(
        LaunchConfig(
            max_restarts=3,
            run_id="run",
            rdzv_backend="c10d",
            start_method="forkserver",
            monitor_interval=0.05,
            **config,
        ),
        train_as_worker,
    )
    launch(*worker_arguments)


class Agents:
    """torchrun's agents over one folder.  For ``contextlib.closing``."""

    def __init__(self, root: Path, environment: dict[str, str] | None = None) -> None:
        self.root = root
        self.environment = environment or {}
        # Kept by this process: an agent that is killed does not take it along.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[multiprocessing.process.BaseProcess] = []

    def add(
        self,
        *,
        workers: int = 1,
        nodes: tuple[int, int] = (1, 1),
        num_steps: int = NUM_STEPS,
        held: tuple[int, int] | None = None,
        makes_group: bool = False,
    ) -> multiprocessing.process.BaseProcess:
        settings = {
            "min_nodes": nodes[0],
            "max_nodes": nodes[1],
            "nproc_per_node": workers,
            "rdzv_endpoint": f"127.0.0.1:{self.store.port}",
            "rdzv_configs": {"is_host": False, "last_call_timeout": 1, "keep_alive_interval": 1},
            "local_addr": f"127.0.0.{len(self.processes) + 1}",  # which orders them
        }
        agent = multiprocessing.get_context("forkserver").Process(
            target=run_agent,
            args=(self.environment, (str(self.root), num_steps, held, makes_group)),
            kwargs=settings,
        )
        start(agent, 0)
        self.processes.append(agent)
        return agent

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.root / name).exists():
            assert time.monotonic() < deadline, f"no {name}: {sorted(os.listdir(self.root))}"
            time.sleep(0.005)

    def signal_worker(self, rank: int, size: int, number: signal.Signals) -> None:
        os.kill(int((self.root / f"pid-{rank}-of-{size}").read_text()), number)

    def join(self, *agents: multiprocessing.process.BaseProcess) -> list[int | None]:
        for agent in agents:
            agent.join(PATIENCE_S)
        return [agent.exitcode for agent in agents]

    def close(self) -> None:
        for agent in self.processes:
            agent.kill()
        for path in self.root.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module", name="undisturbed")
def undisturbed_fixture(ranks, tmp_path_factory):  # noqa: F811
    """``undisturbed(n)``: where n ranks have trained without being disturbed."""
    folders: dict[int, Path] = {}

    def of(size: int) -> Path:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp("undisturbed")
            ranks(size).run(train_as_rank, str(folders[size]))
        return folders[size]

    return of


ONE_STORE_FOR_EACH_START = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("environment", "makes_group"),
    [
        pytest.param({}, False, id="group_of_zerofx"),
        pytest.param(
            ONE_STORE_FOR_EACH_START, True, id="group_of_the_user", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(
    environment, makes_group, tmp_path, undisturbed
):
    with contextlib.closing(Agents(tmp_path, environment)) as agents:
        agent = agents.add(workers=2, held=(1, 2), makes_group=makes_group)
        agents.wait_for("held-1-of-2")
        agents.signal_worker(1, 2, signal.SIGKILL)
        assert agents.join(agent) == [0]
    assert losses_in(tmp_path) == losses_in(undisturbed(2))
    assert steps_in(tmp_path) == [0, 0, 1, 1, 2, 2, 3, 3, *[4] * 4, *[5] * 4, 6, 6, 7, 7]


@pytest.mark.nightly
def test_other_numbers_of_ranks_go_on_to_rounding(tmp_path, undisturbed):
    for number, workers in enumerate((3, 1), 1):
        with contextlib.closing(Agents(tmp_path)) as agents:
            assert agents.join(agents.add(workers=workers, num_steps=number * SAVED_AT)) == [0]
    expected = means_in(undisturbed(2))
    assert means_in(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert steps_in(tmp_path) == sorted([*range(4)] * 3 + [*range(4, 8)])


@pytest.mark.nightly
def test_within_one_launch_an_agent_may_be_killed_and_another_come(tmp_path, undisturbed):
    # Or agents of torch 2.13 send their workers to different stores.
    with contextlib.closing(Agents(tmp_path, ONE_STORE_FOR_EACH_START)) as agents:
        goes = agents.add(nodes=(1, 2), held=(0, 2))
        stays = agents.add(nodes=(1, 2), held=(0, 1))
        agents.wait_for("held-0-of-2")
        goes.kill()
        agents.signal_worker(0, 2, signal.SIGKILL)
        agents.wait_for("held-0-of-1")
        comes = agents.add(nodes=(1, 2))
        assert agents.join(stays, comes) == [0, 0]
    assert losses_in(tmp_path) == losses_in(undisturbed(2))
    alone = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    alone = [float.fromhex(loss) for _, _, size, loss in alone if size == "1"]
    assert alone == pytest.approx(means_in(undisturbed(2))[4:6], rel=1e-5)


@pytest.mark.nightly
def test_agents_that_count_restarts_differently_go_on(tmp_path, undisturbed):
    with contextlib.closing(Agents(tmp_path)) as agents:
        both = [agents.add(nodes=(2, 2)), agents.add(nodes=(2, 2), held=(1, 2))]
        agents.wait_for("held-1-of-2")
        # Its agent learns of the restart from the other, and that is none of its worker's failures.
        agents.signal_worker(0, 2, signal.SIGSTOP)
        agents.signal_worker(1, 2, signal.SIGKILL)
        time.sleep(1)
        agents.signal_worker(0, 2, signal.SIGCONT)
        assert agents.join(*both) == [0, 0]
    assert losses_in(tmp_path) == losses_in(undisturbed(2))
    counts = {path.name[-1] for path in tmp_path.glob("start-*")}
    assert counts == {"0", "1"}


# Keys of each start's own.


@pytest.fixture(scope="module", name="store")
def store_fixture() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def agreed(port: int, ranks: Iterable[int], size: int, timeout_s: float = 60.0) -> list[int]:
    """What ranks that come to a start count there, of those that have been there."""

    def come(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        own = store_of_this_start(store, rank, size, timeout_s)
        found[rank] = own.add("ranks that came", 1)

    found: dict[int, int] = {}
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(come, rank) for rank in ranks]:
            future.result()
    return sorted(found.values())


def test_each_start_has_keys_of_its_own(store):
    for size in (2, 3, 1, 4):
        assert agreed(store.port, reversed(range(size)), size) == list(range(1, size + 1))


def test_a_rank_that_was_killed_on_its_way_is_not_taken_for_one_of_the_next_start(store):
    store.set("zerofx/question/1", "of one that is gone")
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1, 2\] of 3 have not come"):
        agreed(store.port, [0], 3, timeout_s=0.1)
    assert agreed(store.port, range(3), 3) == [1, 2, 3]
