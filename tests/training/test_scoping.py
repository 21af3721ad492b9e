"""What capture changes in torch is changed for zero-compiled functions only, and put back."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.callback
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable, constant
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from tests.kit import models
from tests.kit.models import Mlp, squared_loss

ROOT = Path(__file__).parents[2]
WAIT_S = 30
PATCHED_CLASSES = (
    OptimizerVariable,
    UserDefinedObjectVariable,
    TensorVariable,
    OutputGraph,
    SideEffects,
    InstructionTranslator,
    WrapBackendDebug,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    nn.Module,
    nn.Parameter,
    torch.Tensor,
    torch.autograd.Function,
)
CONFIGS = {
    "dynamo": torch._dynamo.config,
    "functorch": torch._functorch.config,
    "inductor": torch._inductor.config,
}


def state_of_torch() -> dict[str, Any]:
    """All of torch that a capture of whole steps might change, by name."""
    found: dict[str, Any] = {}
    for patched in PATCHED_CLASSES:
        found |= {f"{patched.__name__}.{name}": value for name, value in vars(patched).items()}
    for name, config in CONFIGS.items():
        found |= {f"{name} {key}": value for key, value in config.get_config_copy().items()}
    handler = torch._dynamo.callback.callback_handler
    found["start callbacks"] = tuple(handler.start_callbacks)
    found["end callbacks"] = tuple(handler.end_callbacks)
    for value in (None, True, False):
        found[f"source of {value}"] = constant.ConstantVariable.create(value).source
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name) and before.get(name) != after.get(name)
    ]


@pytest.fixture(scope="module", autouse=True)
def first_compilation():
    """Let Dynamo change of torch what it changes by itself."""
    torch.compile(squared_loss, backend="eager")(Mlp(), *models.features(0, 4))


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def zero(step, stage: int = 3, **options):
    return torch.compile(
        step, backend="zero", options={"stage": stage, "lowering": "eager", **options}
    )


def train_step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    return loss


def scaled_step(model, optimizer, scaler, x, y):
    scaler.scale(squared_loss(model, x, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def prints(model, optimizer, x, y):
    print(x)
    return train_step(model, optimizer, x, y)


def returns_a_view(model, optimizer, x, y):
    train_step(model, optimizer, x, y)
    return model.head.weight[0]


def built(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(step: Callable, seed: int = 0, steps: int = 4) -> list[float]:
    model, optimizer = built(seed)
    return [step(model, optimizer, *models.features(i, 4)).item() for i in range(steps)]


@pytest.mark.slow(reason="torch's whole configuration is compared")
def test_calls_leave_torch_as_it_was():
    before = state_of_torch()
    assert train(zero(train_step)) == train(train_step)
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu")
    zero(scaled_step)(model, optimizer, scaler, *models.features(0, 4))
    with torch.no_grad():
        zero(squared_loss)(model, *models.features(0, 4))
    assert differences(before, state_of_torch()) == []


@pytest.mark.parametrize("step, error", [(prints, Unsupported), (returns_a_view, ValueError)])
def test_refused_calls_leave_torch_as_it_was(step, error):
    before = state_of_torch()
    with pytest.raises(error):
        train(zero(step))
    assert differences(before, state_of_torch()) == []


def test_a_failing_call_leaves_torch_as_it_was():
    model, optimizer = built()
    step = zero(train_step)
    step(model, optimizer, *models.features(0, 4))
    before = state_of_torch()
    with pytest.raises(Exception, match="shape|size|dimension|multiplied"):
        step(model, optimizer, torch.ones(4, 5), torch.ones(4, 3))
    assert differences(before, state_of_torch()) == []
    step(model, optimizer, *models.features(0, 4))


IMPORT_ONLY = """
import sys
from tests.training.test_scoping import differences, state_of_torch
assert "zerofx" not in sys.modules
before = state_of_torch()
import zerofx.backend
print(*differences(before, state_of_torch()))
"""


@pytest.mark.nightly
def test_importing_changes_nothing_but_how_a_backend_is_wrapped():
    done = python(IMPORT_ONLY, {"PYTHONPATH": str(ROOT)}, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["WrapBackendDebug.__init__"]


def python(code: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


# Other backends.


class Watcher:
    """A backend that runs what it is given and remembers torch as it was meanwhile."""

    def __init__(self):
        self.seen: list[dict[str, Any]] = []
        self.graphs: list[list[str]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs) -> Callable:
        self.seen.append(state_of_torch())
        self.graphs.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward


def observed(prepare: Callable[[], Any] = lambda: None) -> tuple[Watcher, list[float], int]:
    """Compile a whole step with a backend of our own: what it saw, losses, graph breaks."""
    torch._dynamo.reset()
    prepare()
    torch._dynamo.utils.counters.clear()
    watcher = Watcher()
    losses = train(torch.compile(train_step, backend=watcher))
    return watcher, losses, sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.nightly
def test_another_backend_compiles_the_same_before_and_after_zero():
    before, losses, breaks = observed()
    assert breaks > 0  # plain Dynamo cannot trace backward()
    after, other_losses, other_breaks = observed(lambda: train(zero(train_step)))
    assert after.graphs == before.graphs
    assert other_losses == losses and other_breaks == breaks
    for one, other in zip(before.seen, after.seen, strict=True):
        assert differences(one, other) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_a_backend_of_torchs_own_trains_beside_zero(name):
    expected = train(train_step)
    other, mine = torch.compile(train_step, backend=name), zero(train_step)
    models_and_optimizers = [built(), built()]
    for number in range(4):
        batch = models.features(number, 4)
        one, two = (
            step(*pair, *batch).item()
            for step, pair in zip((other, mine), models_and_optimizers, strict=True)
        )
        assert two == expected[number]
        assert one == pytest.approx(expected[number], rel=1e-5)


@pytest.mark.nightly
def test_an_optimizer_compiled_by_another_backend_is_traced_by_torchs_own_rules():
    train(zero(train_step))
    torch._dynamo.reset()
    watcher = Watcher()
    model, optimizer = built()
    squared_loss(model, *models.features(0, 4)).backward()
    torch.compile(optimizer.step, backend=watcher)()
    assert watcher.graphs and not any("zerofx" in name for name in sum(watcher.graphs, []))


@pytest.mark.nightly
def test_none_means_none_to_a_backend_that_compiles_after_zero():
    train(zero(train_step))
    for expected in (None, True, False):
        compiled = torch.compile(lambda x, expected=expected: (x + 1, expected), backend="eager")
        assert compiled(torch.ones(2))[1] is expected


# Functions side by side.


@pytest.mark.nightly
def test_two_functions_with_their_own_options_train_side_by_side(tmp_path):
    steps = (
        zero(train_step, 0),
        zero(train_step, 3, dump=str(tmp_path), prefetch=False),
        zero(train_step, 2),
    )
    trainings = [built(seed) for seed in range(3)]
    losses: list[list[float]] = [[], [], []]
    for number in range(4):
        for mine, step, training in zip(losses, steps, trainings, strict=True):
            mine.append(step(*training, *models.features(number, 4)).item())
    assert losses == [train(train_step, seed) for seed in range(3)]
    sharded = [type(model.head.weight).__name__ for model, _ in trainings]
    assert sharded == ["Parameter", "ShardedParameter", "Parameter"]
    assert len(list(tmp_path.glob("rank0/*"))) == 1
    assert not list(tmp_path.glob("rank0/*/*prefetch*"))


@pytest.mark.nightly
def test_the_environment_is_read_at_each_functions_first_call(monkeypatch):
    first, second = zero(train_step, 3), zero(train_step, 3)
    trainings = [built(), built()]
    first(*trainings[0], *models.features(0, 4))
    monkeypatch.setenv("ZEROFX_STAGE", "1")
    second(*trainings[1], *models.features(0, 4))
    first(*trainings[0], *models.features(1, 4))
    kinds = [type(model.head.weight).__name__ for model, _ in trainings]
    assert kinds == ["ShardedParameter", "Parameter"]


# Threads.


def in_thread(function: Callable, *arguments) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result(WAIT_S)


@pytest.mark.nightly
def test_a_second_thread_compiles_and_trains():
    assert in_thread(train, zero(train_step)) == train(train_step)


@pytest.mark.nightly
def test_a_step_moves_between_threads():
    model, optimizer = built()
    step = zero(train_step)
    losses = []
    for number in range(4):
        batch = models.features(number, 4)
        call = in_thread if number % 2 else lambda function, *arguments: function(*arguments)
        losses.append(call(step, model, optimizer, *batch).item())
    assert losses == train(train_step)


# A step that stops in the middle, running or being compiled, until the test lets it go on.
paused, go_on = threading.Event(), threading.Event()


@torch.library.custom_op("zerofx_tests::pause", mutates_args=())
def pause(x: torch.Tensor) -> torch.Tensor:
    paused.set()
    go_on.wait(WAIT_S)
    return x.clone()


@pause.register_fake
def _(x):
    return torch.empty_like(x)


@torch.compiler.assume_constant_result
def pause_tracing() -> int:
    paused.set()
    go_on.wait(WAIT_S)
    return 1


def pausing_step(model, optimizer, x, y):
    return train_step(model, optimizer, pause(x), y)


def step_slow_to_trace(model, optimizer, x, y):
    return train_step(model, optimizer, pause_tracing() * x, y)


@pytest.fixture
def pausing():
    paused.clear()
    go_on.clear()
    yield
    go_on.set()


@pytest.mark.nightly
def test_a_call_that_ends_while_another_thread_compiles_takes_nothing_from_it(pausing):
    before = state_of_torch()
    running, compiling = zero(pausing_step), zero(step_slow_to_trace)
    trainings = [built(), built()]
    batch = models.features(0, 4)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(running, *trainings[0], *batch)
        assert paused.wait(WAIT_S)
        paused.clear()
        second = pool.submit(compiling, *trainings[1], *batch)
        assert paused.wait(WAIT_S)
        go_on.set()  # the first has only to finish its run, the other most of its compilation
        results = [first.result(WAIT_S).item(), second.result(WAIT_S).item()]
    assert results == [train(train_step, 0, 1)[0]] * 2
    assert differences(before, state_of_torch()) == []


# The entry point.


def entry_point() -> str:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    return project["entry-points"]["torch_dynamo_backends"]["zero"]


def test_the_entry_point_names_the_backend():
    import zerofx.backend

    point = importlib.metadata.EntryPoint("zero", entry_point(), "torch_dynamo_backends")
    assert point.load() is zerofx.backend.zero


WITHOUT_IMPORT = """
import sys, torch
from torch import nn
assert "zero" in torch._dynamo.list_backends()
assert "zerofx" not in sys.modules
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@torch.compile(backend="zero", options={"lowering": "eager"})
def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = [step(model, optimizer, torch.ones(4, 3)).item() for _ in range(3)]
assert losses[2] < losses[0]
print(type(model.weight).__name__)
"""


@pytest.mark.nightly
def test_an_installed_backend_is_found_without_importing_it(tmp_path):
    # What an installer would write, and nothing else.
    metadata = tmp_path / "site" / "zerofx-0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zerofx\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nzero = {entry_point()}\n")
    path = os.pathsep.join([str(metadata.parent), str(ROOT)])
    script = tmp_path / "train.py"  # Dynamo reads sources, and -c has none
    script.write_text(WITHOUT_IMPORT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ShardedParameter"]


@pytest.mark.nightly
def test_a_default_device_changes_nothing():
    expected = train(train_step)
    torch.set_default_device("cpu")
    try:
        assert train(zero(train_step)) == expected
    finally:
        torch.set_default_device(None)
