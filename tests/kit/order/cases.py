"""Runs to watch: forms of steps, stages, what is offloaded where to, and saves beside a training.

A case and its outcome travel to ranks by pickle.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit import checkpoints, trainings
from tests.kit.models import features
from tests.kit.order.history import History
from tests.kit.order.plants import Place, planted, races_in
from tests.kit.order.watching import Watched, watching
from tests.kit.step_forms import training as step_forms
from tests.kit.step_forms.form import FORMS
from tests.kit.trainings import SLOW
from zerofx.runtime.parameters.snapshots import SNAPSHOTS, Snapshot
from zerofx.runtime.storage import ring
from zerofx.runtime.storage.copies import Copies

NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A run: of a form of ``tests.kit.step_forms``, or one of the ``RUNS``.

    Those with ``files`` have a folder.
    """

    run: str
    stage: int
    options: Mapping[str, Any] = field(default_factory=dict)
    files: bool = False

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.run}, stage {self.stage}{options}{', files' if self.files else ''}"


@dataclass(frozen=True)
class Outcome:
    """What has come of a case: ``planted`` says of each place the race without it, if any."""

    case: str
    num_entries: int
    races: list[str]
    planted: Mapping[Place, str | None]


def watched(case: Case, folder: str) -> History:
    """Run a case."""
    torch._dynamo.reset()
    gc.collect()
    options = dict(case.options)
    if case.files:
        options |= {"offload_tier": "nvme", "offload_dir": [folder]}
    with _environment(options), watching() as run:
        if case.run in FORMS:
            _form(case, options)
        else:
            RUNS[case.run](run, case.stage, options, folder)
        gc.collect()
    return run.history


def outcome_of(case: Case, folder: str, plants: bool = True) -> Outcome:
    """Run a case, and judge what was noted."""
    history = watched(case, folder)
    races = list(map(str, races_in(history)))
    bugs = planted(history) if plants else {}
    return Outcome(
        str(case),
        len(history.entries),
        races,
        {place: race and str(race) for place, race in bugs.items()},
    )


@contextlib.contextmanager
def _environment(options: Mapping[str, Any]) -> Iterator[None]:
    if "activations" not in options.get("offload", ""):
        yield
        return
    with trainings.moving_small_values():
        yield


def _form(case: Case, options: Mapping[str, Any]) -> None:
    rank, world_size = step_forms.rank_and_world_size()
    wrap = step_forms.zero(case.stage, validate=False, **options)
    training = step_forms.built(case.run, wrap, rank)
    step_forms.run(case.run, training, range(NUM_STEPS), world_size, rank)


def _step_of(name: str) -> Any:
    def run(_watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
        trainings.SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)]
        step = getattr(trainings, name)
        compiled = trainings.zero(step, stage, **options)
        trainings.run(compiled, trainings.built(), range(NUM_STEPS))

    return run


def _save(watched: Watched, stage: int, options: Mapping[str, Any], folder: str) -> None:
    """Save beside a training, whose next steps change what is being saved."""
    pair, compiled = checkpoints.built(), checkpoints.zero(stage, **options)
    checkpoints.train(compiled, pair, range(2))
    with watched.operators():
        saving = zerofx.save(f"{folder}/saved", *pair, asynchronous=True)
    while SNAPSHOTS.active:  # has its thread be done before the next step: it is no wait for it
        time.sleep(0.001)
    checkpoints.train(compiled, pair, range(2, 4))
    with watched.operators():
        saving.wait()
        assert zerofx.latest(folder) == saving.path
        zerofx.save(f"{folder}/again", *pair, asynchronous=True)
        zerofx.save(f"{folder}/at last", *pair)  # behind the one under way


def _save_late(watched: Watched, stage: int, options: Mapping[str, Any], folder: str) -> None:
    """The same, where updates come to what is saved before its thread, through little memory."""
    pair, compiled, may_run = checkpoints.built(), checkpoints.zero(stage, **options), []
    run = Snapshot.run

    def waiting(snapshot: Snapshot) -> None:
        while not may_run:  # no wait that counts
            time.sleep(0.001)
        run(snapshot)

    checkpoints.train(compiled, pair, range(2))
    with (
        mock.patch.object(Snapshot, "run", waiting),
        mock.patch.multiple(ring, RING_BYTES=1024, CHUNK_BYTES=256),
    ):
        with watched.operators():
            saving = zerofx.save(f"{folder}/saved", *pair, asynchronous=True)
        checkpoints.train(compiled, pair, range(2, 3))
        may_run.append(True)
        while SNAPSHOTS.active:
            time.sleep(0.001)
        checkpoints.train(compiled, pair, range(3, 4))
        with watched.operators():
            saving.wait()


def _write(watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """Write to parameters and states between steps, in every way that is allowed."""
    pair, compiled = trainings.built(), trainings.zero(stage=stage, **options)
    trainings.run(compiled, pair, range(2))
    with watched.operators(), zerofx.full_params(pair[0]), torch.no_grad():
        pair[0].head.weight.fill_(0.25)
    trainings.run(compiled, pair, range(2, 3))
    with watched.operators():
        on_host = {name: v.to("cpu", copy=True) for name, v in pair[0].state_dict().items()}
        pair[0].load_state_dict({name: value + 0.125 for name, value in on_host.items()})
    trainings.run(compiled, pair, range(3, 5))
    with watched.operators():
        saved = pair[1].state_dict()
        pair[1].load_state_dict(saved)
    trainings.run(compiled, pair, range(5, 7))
    with watched.operators():
        zerofx.unshard(*pair)
    trainings.run(compiled, pair, range(7, 9))


def evaluation(model, x, y):
    """The loss, and nothing that changes."""
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y)


def _evaluated(watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """Evaluate between steps, write to parameters behind that, and drop the model behind it."""
    pair, compiled = trainings.built(), trainings.zero(stage=stage, **options)
    evaluate = trainings.zero(evaluation, stage, **options)
    trainings.run(compiled, pair, range(2))
    with watched.operators():
        saved = {name: v.to("cpu", copy=True) for name, v in pair[0].state_dict().items()}
    evaluate(pair[0], *features(2, 8))
    with watched.operators():
        pair[0].load_state_dict(saved)
    trainings.run(compiled, pair, range(3, 4))
    evaluate(pair[0], *features(4, 8))
    with watched.operators():
        del pair
        gc.collect()


def _growing(_watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """Train on batches that grow, and what is moved with them."""
    pair, compiled = trainings.built(), trainings.zero(stage=stage, **options)
    for number, rows in enumerate((4, 8, 12)):
        compiled(*pair, *features(number, rows))


def sensitivity(model, x, y):
    """The loss's gradient by the batch: of parameters that nothing changes."""
    (gradient,) = torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), x)
    return gradient


def _streams(watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """Call what writes to nothing on two streams in turn, which nobody has wait for each other."""
    model = trainings.built()[0].requires_grad_(False)
    compiled = trainings.zero(sensitivity, stage, **options)
    batches = [(x.requires_grad_(), y) for x, y in (features(number, 8) for number in range(4))]
    compiled(model, *batches[0])  # binds the parameters
    streams = [watched.device.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(watched.device.current_stream())
    found = []
    for number, batch in enumerate(batches):
        with watched.device.stream(streams[number % 2]):
            found.append(compiled(model, *batch))
    watched.device.synchronize()


class Failure(Exception):
    pass


def _failed(_watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """Go on after a step that has failed with an update under way, and with copies."""
    pair, compiled = trainings.built(), trainings.zero(stage=stage, **options)
    trainings.run(compiled, pair, range(1))
    start, started = Copies.to_host_start, []

    def fails(copies: Copies, *args: Any) -> torch.Tensor:
        started.append(start(copies, *args))
        if len(started) == 2:
            raise Failure
        return started[-1]

    with mock.patch.object(Copies, "to_host_start", fails), contextlib.suppress(Failure):
        compiled(*pair, *features(1, 8))
    assert len(started) == 2
    started.clear()
    trainings.run(compiled, pair, range(2, 4))


def _wide(_watched: Watched, stage: int, options: Mapping[str, Any], _folder: str) -> None:
    """A model whose updates are worth a kernel, its compute compiled."""
    torch.manual_seed(0)
    model = trainings.Wide()
    pair = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = trainings.zero(trainings.clipped, stage, lowering="inductor", **options)
    trainings.run(compiled, pair, range(NUM_STEPS))


STEPS = ("plain", "clipped", "accumulated", "gradients_stay", "read_after", "scaled")
MORE_STEPS = (*STEPS, "stepped_twice")
NEVER_DELAYED = ("gradients_stay", "read_after", "stepped_twice")
"""Runs that need what an update makes in the same call: refused with ``delayed_update``."""

RUNS = {
    **{name: _step_of(name) for name in MORE_STEPS},
    "save": _save,
    "save_late": _save_late,
    "write": _write,
    "wide": _wide,
    "evaluated": _evaluated,
    "growing": _growing,
    "streams": _streams,
    "failed": _failed,
}


def _offloads() -> Iterator[tuple[dict[str, Any], int, bool]]:
    """Yield what is offloaded, from which stage on, and whether to files."""
    activations = {"recompute": False, "hardware": SLOW}
    for is_filed in (False, True):
        yield {"offload": "optimizer"}, 1, is_filed
        yield {"offload": "params"}, 3, is_filed
        yield {"offload": "optimizer,params"}, 3, is_filed
        yield {"offload": "activations", **activations}, 0, is_filed
        yield {"offload": "optimizer,params,activations", **activations}, 3, is_filed
    small = {"bucket_bytes": 256}
    yield {"offload": "optimizer", **small, "offload_cache_bytes": 16384}, 1, True
    yield {"offload": "params", **small, "offload_cache_bytes": 8192}, 3, True
    yield {"offload": "optimizer,params", **small, "offload_cache_bytes": 28672}, 3, True
    yield {"offload": "activations", **activations, "offload_cache_bytes": 8192}, 0, True
    yield {"offload": "optimizer", "delayed_update": True}, 3, False


def cases() -> list[Case]:
    """Every form at every stage; steps, saves and writes with every offload from its stage on.

    And what needs a certain offload.
    """
    found = [Case(name, stage) for name in FORMS for stage in range(4)]
    for run in (*MORE_STEPS, "save", "save_late", "write", "wide"):
        found += [Case(run, stage) for stage in range(4)]
        for options, first, is_filed in _offloads():
            if "delayed_update" in options and run in NEVER_DELAYED:
                continue
            if "offload_cache_bytes" in options and run == "wide":
                continue  # its buckets are larger
            found += [Case(run, stage, options, is_filed) for stage in range(first, 4)]
    activations = {"offload": "activations", "recompute": False, "hardware": SLOW}
    for stage in range(4):
        found += [Case(run, stage, activations) for run in ("growing", "streams")]
        found += [Case("growing", stage, activations, files=True)]
    for offload in ("params", "optimizer,params"):
        found += [
            Case("evaluated", 3, {"offload": offload}, is_filed) for is_filed in (False, True)
        ]
    small = {"bucket_bytes": 256}
    found += [Case("failed", stage, {"offload": "optimizer", **small}) for stage in range(1, 4)]
    return [*found, Case("failed", 3, {"offload": "optimizer,params", **small})]
