"""A start after another takes its programs from disk: the same, and no others."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.covering import exhaustive, nightly, only
from tests.kit.ranks import ranks_fixture, start  # noqa: F401
from tests.kit.step_forms.form import FORMS, step_with
from tests.kit.step_forms.training import built, rank_and_world_size, run, state_of, zero
from zerofx import backend, compat, hardware
from zerofx.capture import step, substitutes
from zerofx.compat import compile_cache
from zerofx.compiler.program import Program
from zerofx.errors import StepError
from zerofx.ir import key as program_key
from zerofx.ir.mesh import Mesh
from zerofx.runtime.comm import measure
from zerofx.runtime.optimizer import update

STEPS = 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / compile_cache.PROGRAMS


@dataclasses.dataclass
class Start:
    """Holds the results of a start, and counts what it traced and which programs it made."""

    results: object
    traced: int
    ran_passes: int


def started(train, *arguments, is_kept: bool = True, **options) -> Start:
    """Train as a process does that has just begun: with handles that begin anew."""
    torch._dynamo.reset()
    gc.collect()  # what is gone has no programs any more
    were_kept: list[bool] = []

    def made(*of):
        program = Program(*of)
        were_kept.append(program.rewritten.was_kept)
        return program

    with (
        mock.patch.dict(os.environ, {"ZEROFX_PROGRAM_CACHE": str(int(is_kept))}),
        mock.patch.object(substitutes, "_next_handle", itertools.count(1000)),
        mock.patch.object(
            compat.aot, "trace_to_aten", side_effect=compat.aot.trace_to_aten
        ) as traces,
        mock.patch.object(backend, "Program", side_effect=made),
    ):
        results = train(*arguments, **options)
    return Start(results, traces.call_count, were_kept.count(False))


def assert_alike(one, other):
    leaves = [torch.utils._pytree.tree_leaves(results) for results in (one, other)]
    for expected, actual in zip(*leaves, strict=True):
        values = torch.as_tensor(expected), torch.as_tensor(actual)
        torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


def train_form(name: str, stage: int, **options):
    rank, world_size = rank_and_world_size()
    training = built(name, zero(stage, validate=False, **options), rank)
    results = run(name, training, range(STEPS), world_size, rank)
    return results, state_of(training)


NOT_KEPT = (
    "batches_whose_shape_changes",
    "batches_marked_dynamic",
    "parameters_of_a_class_of_their_own",
)
"""Forms of which nothing is kept: sizes in symbols, and tensor subclasses."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FORMS if not FORMS[name].only_exhaustive])
@pytest.mark.parametrize("stage", (0, 1, 3))
@pytest.mark.parametrize("lowering", ("eager", exhaustive("inductor")))
def test_the_next_start_captures_nothing_and_trains_alike(name, stage, lowering, monkeypatch):
    if lowering == "inductor":
        monkeypatch.setattr(update, "FEWEST_ELEMENTS", 1)  # kernels of all updates are compiled
    without = started(train_form, name, stage, is_kept=False, lowering=lowering)
    cold, warm = (started(train_form, name, stage, lowering=lowering) for _ in range(2))
    assert_alike(without.results, cold.results)
    assert_alike(without.results, warm.results)
    if name not in NOT_KEPT:
        assert cold.traced and cold.ran_passes
        assert (warm.traced, warm.ran_passes) == (0, 0)


def on_a_rank(folder: str, name: str, stage: int, **options) -> list[Start]:
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        return [started(train_form, name, stage, **options) for _ in range(2)]


@pytest.mark.slow(reason="ranks compile twice")
@pytest.mark.parametrize(
    "name, stage", [nightly("tied_weights_autocast_and_clipping", 3), ("plain", 1)]
)
def test_ranks_share_what_they_captured_and_have_programs_of_their_own(
    ranks,  # noqa: F811
    name,
    stage,
    tmp_path,
):
    of_ranks = ranks(2).run(on_a_rank, str(tmp_path), name, stage)
    for cold, warm in of_ranks:
        assert (warm.traced, warm.ran_passes) == (0, 0)
        assert_alike(cold.results, warm.results)
    num_programs = of_ranks[0][0].ran_passes
    assert sum(cold.traced for cold, _ in of_ranks) == num_programs  # one waits for the other
    kept = list((tmp_path / compile_cache.PROGRAMS).iterdir())
    assert len(kept) == num_programs * 3  # what was captured, and of it a program for each rank


def keeping_nothing(folder: str) -> list[Start]:
    with mock.patch.object(compile_cache, "keep"):
        return on_a_rank(folder, "plain", 1)


def refused(folder: str) -> str:
    tracing = mock.patch.object(compat.aot, "trace_to_aten", side_effect=StepError("refused"))
    with tracing, pytest.raises(Exception, match="refused") as error:
        on_a_rank(folder, "plain", 1)
    return str(error.value)


@pytest.mark.slow(reason="ranks compile four times")
def test_a_rank_that_keeps_nothing_or_fails_lets_the_other_trace(ranks, tmp_path):  # noqa: F811
    assert all("refused" in words for words in ranks(2).run(refused, str(tmp_path)))
    for starts in ranks(2).run(keeping_nothing, str(tmp_path)):
        assert all(one.traced for one in starts)
    assert not (tmp_path / compile_cache.PROGRAMS).exists()


def in_folders(shared: str, own: tuple[str, str], lowering: str) -> list[Start]:
    """Train with a folder that ranks share, and then with this rank's own."""
    starts = []
    for folder in (shared, own[rank_and_world_size()[0]]):
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
            starts.append(started(train_form, "plain", 3, lowering=lowering))
    return starts


@pytest.mark.nightly
@pytest.mark.parametrize("lowering", ("eager", "inductor"))
@pytest.mark.parametrize("empty", (0, 1))
def test_a_rank_whose_folder_is_empty_compiles_what_others_find(empty, lowering, ranks, tmp_path):  # noqa: F811
    full, new = str(tmp_path / "full"), str(tmp_path / "empty")
    own = (new, full) if empty == 0 else (full, new)
    found = ranks(2).run(in_folders, full, own, lowering, timeout_s=300.0)
    for rank, (first, second) in enumerate(found):
        assert_alike(first.results, second.results)
        assert bool(second.traced) == bool(second.ran_passes) == (rank == empty)


def with_figures(folder: str, kept: bool) -> list[tuple]:
    found = []
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder, "ZEROFX_HARDWARE": ""}):
        os.environ.pop("ZEROFX_HARDWARE")
        for _ in range(2):
            measure._known.clear()
            with mock.patch.object(measure, "own_figures", side_effect=measure.own_figures) as own:
                started(train_form, "plain", 3, is_kept=kept)
            functions = sorted(backend.zero.functions, key=lambda function: function.number)
            found.append((own.call_count, functions[-1].figures))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kept", [True, False])
def test_figures_of_the_last_day_are_not_measured_again(ranks, kept, tmp_path):  # noqa: F811
    for (times, figures), (times_then, figures_then) in ranks(2).run(
        with_figures, str(tmp_path), kept
    ):
        assert (times, times_then) == (1, 0 if kept else 1)
        assert figures == figures_then or not kept


class OneRank:
    """Stands for a group of one rank that measures."""

    mesh, world_size, group, rank = Mesh.flat(1), 1, None, 0

    def __init__(self, backend="cpu:gloo", peers=True):
        self.backend, self.peers = backend, peers

    def parts(self):
        return [self]

    def takes_pieces(self, like):
        return self.peers

    def gather_whole(self, tensor):
        return tensor


def times_measured(communicator=None) -> int:
    """How often a rank measures whose group this is."""
    communicator = communicator or OneRank()
    with (
        mock.patch.object(measure, "Communicator", lambda group: communicator),
        mock.patch.object(measure.dist, "get_backend_config", lambda group: communicator.backend),
        mock.patch.object(measure, "own_figures", return_value=hardware.NOMINAL) as own,
    ):
        measure._measure(communicator, torch.device("cpu"), is_kept=True)
    return own.call_count


def test_figures_are_those_of_a_backend_and_of_peer_memory():
    others = [OneRank(), OneRank(peers=False), OneRank(backend="cpu:mpi")]
    assert [times_measured(one) for one in others] == [1, 1, 1]
    assert [times_measured(one) for one in others] == [0, 0, 0]


def test_figures_are_those_of_one_version_of_the_package(monkeypatch):
    assert (times_measured(), times_measured()) == (1, 0)
    with monkeypatch.context() as another:
        another.setattr(measure, "described_package", lambda: "another version")
        assert times_measured() == 1
    assert times_measured() == 0
    monkeypatch.setattr(program_key, "_IMPORTED_S", 0.0)
    program_key.described_package.cache_clear()
    assert (times_measured(), times_measured()) == (1, 1)


class Unreadable:
    def __setstate__(self, state):
        raise AttributeError("of another version")


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", pickle.dumps(None), pickle.dumps((1.0, 2)), "an object"]
)
def test_figures_that_cannot_be_read_are_measured(data, folder):
    assert times_measured() == 1
    (path,) = folder.iterdir()
    if data == "an object":
        unreadable = Unreadable()
        unreadable.state = 1
        data = pickle.dumps((time.time(), unreadable))
    compile_cache.keep(path.name, data)
    assert times_measured() == 1
    assert times_measured() == 0


# Near misses: another step than the one before, by a little.


class Tiny(nn.Module):
    def __init__(self, width=4, **changed):
        super().__init__()
        self.at = {"eps": 1e-5, "factor": 2.0, "power": 2, "dropout": 0.0, "act": F.gelu, **changed}
        self.body = nn.Linear(6, width, bias=self.at.get("bias", True))
        self.norm = nn.LayerNorm(width, eps=self.at["eps"])
        self.head = nn.Linear(width, 3)
        self.register_buffer("table", torch.ones(self.at.get("rows", 3)))

    def forward(self, x):
        y = self.norm(self.at["act"](self.body(x)) * self.at["factor"])
        y = F.dropout(y ** self.at["power"], self.at["dropout"], self.training)
        return self.head(y) * self.table[:3]


def mean_loss(model, x, y):
    return F.mse_loss(model(x), y)


def train_tiny(
    model=Tiny,
    loss=mean_loss,
    optimizer=None,
    between=None,
    rows=4,
    dtype=torch.float32,
    prepare=lambda model: model,
    around=contextlib.nullcontext,
    **options,
):
    torch.manual_seed(0)
    net = prepare(model().to(dtype))
    optimizer = optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    updates = optimizer([p for p in net.parameters() if p.requires_grad])
    step = step_with(loss, between=between)
    options = {"lowering": "eager", "stage": 3, **options}
    compiled = torch.compile(step, backend="zero", options=options)
    found = []
    with around():
        for number in range(STEPS):
            batch = models.features(number, rows)
            torch.manual_seed(number)
            found.append(compiled(net, updates, *(each.to(dtype) for each in batch)))
    return found, [p.detach().clone() for p in net.state_dict().values()]


@pytest.mark.nightly
def test_the_next_start_clips_in_the_updates_kernel_too(monkeypatch):
    monkeypatch.setattr(update, "FEWEST_ELEMENTS", 1)
    cold, warm = (started(train_tiny, between=clipped(0.1), lowering="inductor") for _ in range(2))
    assert (warm.traced, warm.ran_passes) == (0, 0)
    assert_alike(cold.results, warm.results)


def tiny(**changed):
    return {"model": functools.partial(Tiny, **changed)}


def frozen(model):
    model.body.weight.requires_grad_(False)
    return model


def tied(model):
    model.norm.bias = model.norm.weight
    return model


def evaluating(model):
    return model.eval()


def transposed(model):
    model.body.weight.data = model.body.weight.data.t().contiguous().t()
    return model


def clipped(norm):
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def scaled(factor):
    def between(model):
        for p in model.parameters():
            p.grad.mul_(factor)

    return between


def another_gelu(x, *args):
    return F.relu(x) * 0.5


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class DoubledOtherwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def of_torch(name, function):
    return lambda: mock.patch.object(F, name, function)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def closing_over(function, name, value):
    cell = function.__closure__[function.__code__.co_freevars.index(name)]
    own, cell.cell_contents = cell.cell_contents, value
    yield
    cell.cell_contents = own


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


NEAR_MISSES = {
    "eps of a norm": tiny(eps=1e-6),
    "eps by one digit": tiny(eps=1.1e-5),
    "a constant": tiny(factor=2.5),
    "a constant of another type": tiny(factor=2),
    "a negative constant": tiny(factor=-2.0),
    "a power": tiny(power=3),
    "dropout": tiny(dropout=0.5),
    "other dropout": tiny(dropout=0.25),
    "relu": tiny(act=F.relu),
    "gelu's approximation": tiny(act=functools.partial(F.gelu, approximate="tanh")),
    "silu": tiny(act=F.silu),
    "a function of the user's": tiny(act=another_gelu),
    "an autograd function": tiny(act=Doubled.apply),
    "another backward alone": tiny(act=DoubledOtherwise.apply),
    "no bias": tiny(bias=False),
    "width": tiny(width=5),
    "a buffer's rows": tiny(rows=4),
    "sum for mean": {"loss": lambda m, x, y: F.mse_loss(m(x), y, reduction="sum")},
    "another loss": {"loss": lambda m, x, y: F.l1_loss(m(x), y)},
    "a weighted loss": {"loss": lambda m, x, y: 0.5 * F.mse_loss(m(x), y)},
    "a loss by one digit": {"loss": lambda m, x, y: 1.0000001 * F.mse_loss(m(x), y)},
    "a part of the batch": {"loss": lambda m, x, y: F.mse_loss(m(x[:2]), y[:2])},
    "another part": {"loss": lambda m, x, y: F.mse_loss(m(x[2:]), y[2:])},
    "a transposed product": {"loss": lambda m, x, y: (m(x).t() @ y).mean()},
    "a detached part": {"loss": lambda m, x, y: F.mse_loss(m(x), y) + m(x).detach().mean()},
    "clipping": {"between": clipped(1.0)},
    "other clipping": {"between": clipped(0.5)},
    "scaled gradients": {"between": scaled(0.5)},
    "otherwise scaled": {"between": scaled(0.25)},
    "Adam": {"optimizer": functools.partial(torch.optim.Adam, lr=0.1)},
    "AdamW": {"optimizer": functools.partial(torch.optim.AdamW, lr=0.1)},
    "a learning rate": {"optimizer": functools.partial(torch.optim.SGD, lr=0.2)},
    "momentum": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "nesterov": {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    },
    "decay": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)},
    "maximize": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, maximize=True)},
    "more rows": {"rows": 6},
    "double": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"around": autocast},
    "a frozen weight": {"prepare": frozen},
    "tied weights": {"prepare": tied},
    "eval": {"model": functools.partial(Tiny, dropout=0.5), "prepare": evaluating},
    "a weight in another order": {"prepare": transposed},
    "a replaced gelu": {"around": of_torch("gelu", another_gelu), **tiny(act=lambda x: F.gelu(x))},
    "a replaced linear": {"around": of_torch("linear", lambda x, w, b=None: (x @ w.t()) * 0.5 + b)},
    "a replaced norm": {
        "around": of_torch(
            "layer_norm",
            functools.wraps(F.layer_norm)(lambda x, *rest: torch.tanh(x)),
        )
    },
    "a builtin that another calls": {
        "around": lambda: mock.patch.object(torch, "relu", torch.sigmoid),
        **tiny(act=F.relu),
    },
    "a method": {
        "around": lambda: mock.patch.object(torch.Tensor, "pow", torch.Tensor.mul),
    },
    "an operator that torch's function calls": {
        "around": lambda: mock.patch.object(torch._C._nn, "silu", torch._C._nn.gelu),
        **tiny(act=F.silu),
    },
    "an operator of tensors": {
        "around": lambda: mock.patch.object(torch.Tensor, "__mul__", torch.Tensor.add),
    },
    "a default": {
        "around": lambda: mock.patch.object(F.mse_loss, "__defaults__", (None, None, "sum", None)),
    },
    "what a function closes over": {
        "around": lambda: closing_over(F.max_pool1d, "if_false", F.avg_pool1d),
        **tiny(act=lambda x: F.max_pool1d(x, 3, 1, 1)),
    },
    "a partial's keyword": {
        "around": of_torch("gelu", functools.partial(F.leaky_relu, negative_slope=0.5)),
        **tiny(act=lambda x: F.gelu(x)),
    },
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "no buckets": {"bucket": False},
    "small buckets": {"bucket_bytes": 8},
    "narrow reductions": {"reduce_dtype": torch.bfloat16},
    "deterministic": {"around": deterministic},
}


@pytest.fixture(scope="module")
def of_the_plain_step(tmp_path_factory):
    """A folder with what a start keeps of the step that all others nearly are."""
    folder = tmp_path_factory.mktemp("kept")
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder)}):
        plain, warm = (started(train_tiny) for _ in range(2))
        assert (warm.traced, warm.ran_passes) == (0, 0)
    return folder, plain.results


@pytest.mark.slow(reason="steps are compiled twice")
@pytest.mark.parametrize("name", only(("eps of a norm",), NEAR_MISSES))
def test_a_near_miss_is_none_of_the_plain_step(name, of_the_plain_step, monkeypatch):
    folder, plain = of_the_plain_step
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    changed = NEAR_MISSES[name]
    expected = started(train_tiny, **changed, is_kept=False).results
    assert_alike(expected, started(train_tiny, **changed).results)
    assert_alike(expected, started(train_tiny, **changed).results)
    again = started(train_tiny)
    assert again.traced == 0
    assert_alike(plain, again.results)


def test_the_order_that_einsum_takes_products_in_is_told(monkeypatch):
    before = compat.aot.settings()
    library = types.SimpleNamespace(__version__="3")
    order = {"is_available": lambda: True, "get_opt_einsum": lambda: library, "enabled": True}
    found = []
    for strategy in ("auto", "greedy"):
        einsum = types.SimpleNamespace(**order, strategy=strategy)
        monkeypatch.setattr(torch.backends, "opt_einsum", einsum)
        found.append(compat.aot.settings())
    assert before != found[0] != found[1]


def described_functional() -> str:
    return program_key.described_code([F])


def test_what_functions_keep_is_told():
    """By its values and by its names; and no text is that of the functions as they are."""
    texts = [described_functional()]
    for value in (torch.Tensor.add, torch.Tensor.sub, functools.partial(torch.add, alpha=2)):
        with mock.patch.object(torch.Tensor, "__mul__", value):
            texts.append(program_key.described_code([torch]))
    for value in ((None, None, "sum", None), (None, None, "mean", 1.0)):
        with mock.patch.object(F.mse_loss, "__defaults__", value):
            texts.append(described_functional())
    named = F.triplet_margin_with_distance_loss.__kwdefaults__
    for changed in ({"margin": 2.0}, {"swap": True}, {"other": 1.0}):
        with mock.patch.object(
            F.triplet_margin_with_distance_loss, "__kwdefaults__", named | changed
        ):
            texts.append(described_functional())
    recursive: list = [1]
    recursive.append(recursive)
    for value in (
        *(1, 1.0, "1", None, F.relu, F.relu6, torch.relu, torch.float16, torch.float32, torch),
        *([1], (1,), {1}, {1: 2}, recursive, [1, [1, []]], nn.Linear, nn.Linear(1, 1)),
        *(nn.Linear(1, 2), functools.partial(F.relu, 1), functools.partial(F.relu, input=1)),
        functools.partial(F.relu, inplace=1),
    ):
        with closing_over(F.max_pool1d, "default", value):
            texts.append(described_functional())
    assert len(set(texts)) == len(texts)
    assert described_functional() == texts[0]


def test_a_function_of_the_users_that_one_of_torchs_keeps_has_no_text():
    for value in (another_gelu, [another_gelu], functools.partial(another_gelu, 1), Doubled.apply):
        with closing_over(F.max_pool1d, "default", value), pytest.raises(program_key.NoKeyError):
            described_functional()


def test_a_file_of_the_package_that_has_changed_since_it_was_imported_has_no_text(monkeypatch):
    try:
        program_key.described_package.cache_clear()
        monkeypatch.setattr(
            program_key, "_IMPORTED_S", os.stat(program_key.__file__).st_ctime - 1.0
        )
        with pytest.raises(program_key.NoKeyError, match="has changed since it was imported: .*py"):
            program_key.described_package()
    finally:
        program_key.described_package.cache_clear()


@pytest.mark.slow(reason="steps are compiled")
def test_nothing_is_kept_of_a_package_that_has_changed(monkeypatch, folder, caplog):
    def changed():
        raise program_key.NoKeyError("a file that has changed since it was imported: a.py")

    monkeypatch.setattr(step, "described_package", changed)
    with caplog.at_level(logging.INFO, "zerofx"):
        assert started(train_tiny).traced
    assert not folder.exists()
    assert "a start after this one captures the step anew: it has a file that" in caplog.text


A_START = """
import pickle, sys
from tests.compiler.test_program_cache import started, train_tiny
print(pickle.dumps(started(train_tiny)).hex())
"""


@pytest.mark.nightly
def test_a_start_in_a_process_that_hashes_otherwise_takes_what_is_kept(folder):
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        told = subprocess.run(
            [sys.executable, "-c", A_START], env=environment, stdout=subprocess.PIPE, check=True
        )
        found.append(pickle.loads(bytes.fromhex(told.stdout.decode())))
    first, second = found
    assert first.traced and (second.traced, second.ran_passes) == (0, 0)
    assert_alike(first.results, second.results)


def test_there_are_many_near_misses():
    assert len(NEAR_MISSES) >= 50


@pytest.mark.nightly
def test_other_options_take_what_was_captured():
    started(train_tiny)
    expected = started(train_tiny, is_kept=False, stage=1, bucket=False)
    other = started(train_tiny, stage=1, bucket=False)
    assert (other.traced, other.ran_passes) == (0, 1)
    assert_alike(expected.results, other.results)


class WithBatchNorm(Tiny):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(self.body, nn.BatchNorm1d(self.body.out_features))


@pytest.mark.slow(reason="a step is captured, and its passes run twice")
def test_every_start_warns_once_of_what_it_takes(monkeypatch, caplog):
    monkeypatch.setenv("ZEROFX_LOSS", "global")
    for stage, kept in ((3, (1, 1)), (3, (0, 0)), (2, (0, 1))):
        caplog.clear()
        begun = started(train_tiny, model=WithBatchNorm, chunk_loss=3, stage=stage)
        assert (begun.traced, begun.ran_passes) == kept
        assert caplog.text.count("statistics of batch norm stay each rank's own") == 1
        assert caplog.text.count("chunk_loss=3: no loss is computed in chunks") == 1


class WideHead(Tiny):
    """Its head is in float32, whatever is around it."""

    def __init__(self):
        super().__init__(width=2)

    def forward(self, x):
        y = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(y.float())


def dtypes_of_the_last_program() -> list[tuple]:
    function = max(backend.zero.functions, key=lambda function: function.number)
    nodes = function.programs[-1].gm.graph.nodes
    return [(node.name, getattr(node.meta.get("val"), "dtype", None)) for node in nodes]


@pytest.mark.nightly
def test_passes_compute_without_the_autocast_around_what_was_captured():
    loss = lambda m, x, y: F.cross_entropy(m(x), y.argmax(-1))  # noqa: E731
    step = {"model": WideHead, "loss": loss, "around": autocast, "chunk_loss": 2}
    started(train_tiny, **step, stage=1)
    expected = started(train_tiny, **step, is_kept=False)
    program = dtypes_of_the_last_program()
    other = started(train_tiny, **step)
    assert (other.traced, other.ran_passes) == (0, 1)
    assert_alike(expected.results, other.results)
    assert dtypes_of_the_last_program() == program


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"dump": "dumped"}, {"validate": True}])
def test_who_looks_at_passes_sees_them_run(options, tmp_path):
    options = {name: tmp_path / "dumped" if name == "dump" else True for name in options}
    for _ in range(2):
        once = started(train_tiny, **options)
        assert once.traced and once.ran_passes


# Folders that fail.


def test_what_is_kept_is_found_whole_or_not_at_all(folder):
    compile_cache.keep("key", b"contents")
    assert compile_cache.kept("key") == b"contents" and compile_cache.kept("other") is None
    path = folder / "key"
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:-1], whole[:-1] + b"?", b"?" + whole[1:], whole + b"?"):
        path.write_bytes(damaged)
        assert compile_cache.kept("key") is None
        assert not path.exists()
        compile_cache.keep("key", b"contents")
        assert compile_cache.kept("key") == b"contents"


def test_those_go_first_that_were_not_used_for_longest(folder, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 3 * 132 + 10)
    for number, key in enumerate("abc"):
        compile_cache.keep(key, bytes(100))
        os.utime(folder / key, (number, number))
    assert compile_cache.kept("a") is not None  # which is now the last that was used
    compile_cache.keep("d", bytes(100))
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c", "d"]


@pytest.mark.nightly
@pytest.mark.parametrize("fails", ["full", "no folder"])
def test_a_folder_that_takes_nothing_is_said_once(fails, folder, caplog, monkeypatch):
    if fails == "full":
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(compile_cache.os, "replace", mock.Mock(side_effect=full))
    else:
        folder.write_text("a file")
    monkeypatch.setattr(compile_cache, "_failed", set())
    with caplog.at_level(logging.WARNING, "zerofx"):
        first, second = (started(train_tiny) for _ in range(2))
    assert second.traced
    assert_alike(first.results, second.results)
    said = [record.message for record in caplog.records if "compiled anew" in record.message]
    assert len(said) == 1
    if fails == "full":
        assert "No space left on device" in said[0] and not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_a_miss_and_said_once(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compile_cache, "_failed", set())
    with caplog.at_level(logging.WARNING, "zerofx"):
        for _ in range(2):
            assert compile_cache.kept("key") is None
            compile_cache.keep("key", b"contents")
    (said,) = (record.message for record in caplog.records)
    assert "compiled anew" in said and "Not a directory" in said


def test_a_folder_that_is_only_read_has_what_is_kept(monkeypatch):
    compile_cache.keep("key", b"contents")
    read_only = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(compile_cache.os, "utime", mock.Mock(side_effect=read_only))
    assert compile_cache.kept("key") == b"contents"


@pytest.mark.nightly
def test_what_cannot_be_read_is_compiled(folder):
    started(train_tiny)
    for path in folder.iterdir():
        path.write_bytes(b"of another kind")
    again = started(train_tiny)
    assert again.traced and again.ran_passes
    assert started(train_tiny).traced == 0


@pytest.mark.nightly
def test_another_version_takes_nothing(monkeypatch):
    started(train_tiny)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert started(train_tiny).traced


def keep_forever(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    for number in itertools.count():
        compile_cache.keep(str(number % 3), bytes([number % 256]) * 2_000_000)


@pytest.mark.nightly
def test_processes_that_are_killed_leave_nothing_half_written(tmp_path):
    context = multiprocessing.get_context("fork")
    draw = random.Random(0)
    for _ in range(30):
        process = context.Process(target=keep_forever, args=(str(tmp_path),))
        process.start()
        time.sleep(draw.uniform(0.0, 0.05))
        process.kill()
        process.join()
        for key in "012":
            data = compile_cache.kept(key)
            assert data is None or (len(data), len(set(data))) == (2_000_000, 1)


def tell(folder: str, pipe, is_kept: bool) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    found = started(train_tiny, is_kept=is_kept, lowering="inductor", stage=1)
    pipe.send(pickle.dumps(found))  # else tensors would travel in memory that this process shares


def begun(folder: str, is_kept: bool = True):
    """Return a process that starts to train, and where it tells its results."""
    mine, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=tell, args=(folder, its, is_kept))
    start(process, 0)
    its.close()
    return process, mine


def finished(*arguments) -> Start:
    process, pipe = begun(*arguments)
    found = pickle.loads(pipe.recv())
    process.join()
    return found


@pytest.mark.nightly
def test_a_start_after_thirty_that_were_killed_is_right(tmp_path):
    folder, other = str(tmp_path / "killed"), str(tmp_path / "other")
    began = time.perf_counter()
    expected = finished(other, False)
    whole_s = time.perf_counter() - began
    draw = random.Random(0)
    for _ in range(30):
        process, pipe = begun(folder)
        time.sleep(draw.uniform(0.0, whole_s))
        process.kill()
        process.join()
        pipe.close()
    assert_alike(expected.results, finished(folder).results)
    again = finished(folder)
    assert (again.traced, again.ran_passes) == (0, 0)
    assert_alike(expected.results, again.results)
