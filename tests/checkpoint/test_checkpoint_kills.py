"""Processes are killed at every moment of saving, loading and exporting, and nothing is lost.

Each is killed before one operation on files, as ``tests/kit/moments.py`` counts them; then another
run goes on from what is left.  Or that operation fails, and the same run goes on.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import exhaustive, nightly
from tests.kit.moments import Moments, failing, killing
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401

LAST = 4  # what a training is run to
WRITES = ("save", "save behind", "export")
WAYS = (*WRITES, "load", "resume")


def step(model, optimizer, inputs):
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Training:
    """One that saves after each step, of which the last two are kept."""

    def __init__(self, root: str | Path) -> None:
        self.folder = Path(root) / "checkpoints"
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = {"stage": 3, "lowering": "eager"}
        self.compiled = torch.compile(step, backend="zero", options=options)

    def resume(self) -> int:
        return zerofx.resume(self.folder, self.model, self.optimizer).get("step", 0)

    def step(self, number: int) -> float:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        return self.compiled(self.model, self.optimizer, inputs).item()

    def save(self, number: int, **how) -> zerofx.Saving:
        path = self.folder / f"step-{number}"
        return zerofx.save(path, self.model, self.optimizer, {"step": number}, keep=2, **how)

    def go_on(self, last: int = LAST) -> dict[int, float]:
        """Resume and train; the losses by the step's number."""
        losses = {}
        for number in range(self.resume(), last):
            losses[number] = self.step(number)
            self.save(number + 1)
        return losses

    def do(self, way: str, watch: Callable[[], Moments]) -> None:
        """Do what processes are killed in: from where ``watch`` is called."""
        if way == "load":
            self.step(7)  # it has shards
            moments = watch()
            zerofx.load(self.folder / "step-2", self.model, self.optimizer)
        elif way == "resume":
            moments = watch()
            self.resume()
        else:
            number = self.resume()
            self.step(number)
            moments = watch()
            if way == "export":
                zerofx.export_safetensors(self.folder / "export", self.model, file_bytes=40)
            else:
                saving = self.save(number + 1, asynchronous=way == "save behind")
                if way == "save behind":
                    self.step(number + 1)
                saving.wait()
        moments.here("return")

    def recover(self, way: str, expected: dict[int, float]) -> None:
        """Be the run after one that was killed, to the end; raises for what is not as it should."""
        visible = {path.name for path in self.folder.iterdir() if path.name[0] != "."}
        saved = sorted(int(name.partition("-")[2]) for name in visible - {"export"})
        assert saved in ([1, 2], [1, 2, 3], [2, 3]), saved
        for number in saved[:-1]:  # whatever has its name is whole
            zerofx.load(self.folder / f"step-{number}", self.model, self.optimizer)
        start = self.resume()
        assert start == saved[-1]
        if way == "export":
            assert self.go_on(3) == {2: expected[2]}
            self.check_export()
            start = 3
        assert self.go_on() == {number: expected[number] for number in range(start, LAST)}
        together()
        left = {f"step-{LAST - 1}", f"step-{LAST}"} | ({"export"} if way == "export" else set())
        assert set(os.listdir(self.folder)) == left

    def check_export(self) -> None:
        """Export, if that was not done; what is there is what is here."""
        path = self.folder / "export"
        is_there = path.exists()
        together()
        if not is_there:
            zerofx.export_safetensors(path, self.model, file_bytes=40)
        files = sorted(path.glob("*.safetensors"))
        found = {name: value for file in files for name, value in load_file(file).items()}
        values = dict(self.model.state_dict())
        assert found.keys() == values.keys() and len(files) == 2
        assert all(torch.equal(found[name], value) for name, value in values.items())


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def start_at(root: Path) -> None:
    """Have two checkpoints, beside what killed processes have left."""
    Training(root).go_on(2)
    together()
    folder = root / "checkpoints"
    if not dist.is_initialized() or dist.get_rank() == 0:
        for leftover, of in ((".step-0.removing", "step-1"), (".step-9.saving", "step-2")):
            shutil.copytree(folder / of, folder / leftover)
        (folder / ".step-0.removing" / ".metadata").unlink()


def undisturbed(root: Path) -> dict[int, float]:
    torch._dynamo.reset()
    return Training(root).go_on()


@pytest.fixture(scope="module")
def tally(request):
    """Kills, and after how many a training went on: printed when the module is done."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    yield found
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        for way in sorted({way for way, _ in found}):
            words = f"{way}: {found[way, 'killed']} kills, went on after {found[way, 'survived']}"
            print(f"\n{words}", end="")


# One process, at every moment.  Each try is a fork of one that has compiled its step.


class Forks:
    """Tries of one process; what was wrong after kills is kept in words."""

    def __init__(self, root: str) -> None:
        dist.destroy_process_group()
        self.root = Path(root)
        self.expected = undisturbed(self.root / "undisturbed")
        start_at(self.root / "start")
        self.training = Training(self.root / "start")
        self.training.step(0)
        self.wrong: list[str] = []

    def is_killed(self, way: str, number: int, every_write: int) -> bool:
        """Be killed at a moment, if there is such a one, and go on."""
        training, folder = self.training, self.root / f"{way} {number}"
        shutil.copytree(self.root / "start", folder)
        training.folder = folder / "checkpoints"

        def die() -> None:
            act = killing(number, os.getpid())
            training.do(way, lambda: Moments(training.folder, act, every_write))

        code, words = in_fork(die)
        is_killed = code == -signal.SIGKILL
        if is_killed:
            code, words = in_fork(lambda: training.recover(way, self.expected))
        if code:
            self.wrong.append(f"{way}, killed at moment {number}: {words}")
        shutil.rmtree(folder)
        return is_killed

    def fails(self, way: str, number: int, every_write: int) -> bool:
        """Have a moment fail, if there is such a one; what was there stays, and more is saved."""
        training, folder = self.training, self.root / f"{way} {number}"
        shutil.copytree(self.root / "start", folder)
        training.folder = folder / "checkpoints"
        found: list[Moments] = []

        def watch() -> Moments:
            found.append(Moments(training.folder, failing(number), every_write))
            return found[0]

        def work() -> None:
            with contextlib.suppress(zerofx.CheckpointError):
                training.do(way, watch)
            if found[0].count <= number:
                os._exit(THERE_IS_NONE)
            training.recover(way, self.expected)

        code, words = in_fork(work)
        if code == 1:
            self.wrong.append(f"{way}, failed at moment {number}: {words}")
        shutil.rmtree(folder)
        return code != THERE_IS_NONE


THERE_IS_NONE = 2


def failed_in_forks(root: str, every: int) -> tuple[dict[str, int], list[str]]:
    """How often one process's disk was full for one operation, and what was wrong then."""
    forks = Forks(root)
    failures = dict.fromkeys(WRITES, 0)
    for place, way in enumerate(failures):
        for number in itertools.count(place % every, every):
            if not forks.fails(way, number, every_write=40):
                break
            failures[way] += 1
    return failures, forks.wrong


def killed_in_forks(root: str, ways: list[str], every: int, every_write: int) -> tuple[dict, list]:
    """How often one process was killed, by the way, and what was wrong then.

    At every moment, or at one in ``every``.
    """
    forks = Forks(root)
    kills = dict.fromkeys(ways, 0)
    for place, way in enumerate(ways):
        for number in itertools.count(place % every, every):
            if not forks.is_killed(way, number, every_write):
                break
            kills[way] += 1
    return kills, forks.wrong


def in_fork(work: Callable[[], object]) -> tuple[int, str]:
    """Do ``work`` in a fork of this process: its exit code, and its error."""
    out, into = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os.write(into, traceback.format_exc()[-4000:].encode())
            os._exit(1)
    os.close(into)
    with open(out, "rb") as words:
        text = words.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ways", "every", "every_write"), [(WAYS, 24, 40), nightly(WAYS, 6, 40), exhaustive(WAYS, 1, 1)]
)
def test_one_process_killed_at_any_moment_loses_nothing(ways, every, every_write, tmp_path, tally):
    with contextlib.closing(Ranks(1)) as one:
        arguments = (str(tmp_path), list(ways), every, every_write)
        ((kills, wrong),) = one.run(killed_in_forks, *arguments, timeout_s=1800)
    for way, count in kills.items():
        tally["one process: " + way, "killed"] += count
        tally["one process: " + way, "survived"] += count - sum(
            w.startswith(way + ",") for w in wrong
        )
    assert min(kills.values()) >= 24 / every and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("every", [nightly(30), nightly(6), exhaustive(1)])
def test_whatever_fails_of_a_save_leaves_what_was_there_and_the_next_succeeds(every, tmp_path):
    with contextlib.closing(Ranks(1)) as one:
        ((failures, wrong),) = one.run(failed_in_forks, str(tmp_path), every, timeout_s=900)
    assert min(failures.values()) >= 30 / every and not wrong, "\n".join(wrong)


# Two ranks, of which one or both are killed.


def killed_once(root: str, way: str, watching: int, number: int, victims: list[int]) -> int:
    """How many moments there are on this rank, if it lives; the ``victims`` are killed at one."""
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    training, rank = Training(root), dist.get_rank()
    found = []

    def watch():
        act = killing(number if rank == watching else -1, *(processes[one] for one in victims))
        found.append(Moments(training.folder, act, every_write=40))
        return found[0]

    training.do(way, watch)
    together()  # nobody has answered yet when the last moment comes
    return found[0].count


def recovered(root: str, way: str, expected: list[dict[int, float]]) -> None:
    torch._dynamo.reset()
    Training(root).recover(way, expected[dist.get_rank()])


VICTIMS = {
    "itself": lambda rank: [rank],
    "the other": lambda rank: [1 - rank],
    "both": lambda _: [0, 1],
}


def attempt(start: Path, now: Path, *arguments) -> list[int]:
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(start, now)
    with contextlib.closing(Ranks(2)) as two:
        return two.run(killed_once, str(now), *arguments)


@pytest.fixture(scope="module")
def two(ranks, tmp_path_factory):  # noqa: F811
    """Where all of two ranks start from, and the losses of those that nobody kills."""
    root = tmp_path_factory.mktemp("two")
    ranks(2).run(start_at, root / "start")
    return root / "start", ranks(2).run(undisturbed, root / "undisturbed")


def kill_and_go_on(way, watching, number, who, two, ranks, tmp_path, tally):
    start, expected = two
    with pytest.raises(RuntimeError):  # one has died, or the other has noticed
        attempt(start, tmp_path / "now", way, watching, number, VICTIMS[who](watching))
    tally[f"two ranks: {way}", "killed"] += 1
    ranks(2).run(recovered, str(tmp_path / "now"), way, expected)
    tally[f"two ranks: {way}", "survived"] += 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "watching", "number", "who"),
    [("save behind", 0, 20, "the other"), ("export", 1, 3, "itself"), ("resume", 1, 10, "both")],
)
def test_of_two_ranks_any_may_be_killed(
    way,
    watching,
    number,
    who,
    two,
    ranks,  # noqa: F811
    tmp_path,
    tally,
):
    kill_and_go_on(way, watching, number, who, two, ranks, tmp_path, tally)


@pytest.mark.parametrize("way", [exhaustive(way) for way in WAYS])
def test_of_two_ranks_any_may_be_killed_at_any_moment(way, two, ranks, tmp_path, tally):  # noqa: F811
    counts = attempt(two[0], tmp_path / "now", way, 0, -1, [])
    moments = [(rank, number) for rank in (0, 1) for number in range(counts[rank])]
    for (rank, number), who in zip(moments, itertools.cycle(VICTIMS), strict=False):
        kill_and_go_on(way, rank, number, who, two, ranks, tmp_path, tally)
