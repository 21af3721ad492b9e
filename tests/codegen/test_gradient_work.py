"""Work on the gradient in front of an update: one kernel does bitwise what two passes did."""

import pickle

import pytest
import torch
from torch import nn

from tests.codegen import work as works
from tests.codegen.test_kernel import ONE_NUMBER_BYTES, bytes_allocated
from tests.kit.covering import first, nightly, only
from tests.runtime.optimizer.test_update import layout
from zerofx import compat
from zerofx.codegen import kernel
from zerofx.codegen.rewrite.gradient_work import may_be_work
from zerofx.codegen.rewrite.rounding import round_to
from zerofx.codegen.rewrite.storage import Precision
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PLAIN = Precision()
MASTERS = Precision(master_weights=True)
CODED = Precision(moment_dtype=torch.int8)


def number(value, dtype=FP32):
    return torch.tensor(value, dtype=dtype)


CASES = {
    "clipped": (works.clip, FP32, FP32, [number(0.3)], PLAIN),
    "clipped, in bf16": (works.clip, BF16, BF16, [number(0.3, BF16)], PLAIN),
    "clipped, by a number of more bits": (works.clip, BF16, BF16, [number(0.3)], PLAIN),
    "clipped, in fp16": (works.clip, FP16, FP16, [number(0.3, FP16)], PLAIN),
    "clipped, in float64": (works.clip, FP64, FP64, [number(0.3)], PLAIN),
    "clipped, with a master": (works.clip, BF16, BF16, [number(0.3, BF16)], MASTERS),
    "clipped, moments in eight bits": (works.clip, FP32, FP32, [number(0.3)], CODED),
    "unscaled": (works.unscale_and_clip, FP16, FP32, [number(0.3), number(0.7)], PLAIN),
    "dropped": (
        works.clamp_and_drop,
        BF16,
        BF16,
        [number(0.3, BF16), number(False, torch.bool)],
        PLAIN,
    ),
}
# Compiled by default; the others in another tier.
DEFAULT = ("clipped", "clipped, by a number of more bits")
LENGTHS = (5000, 37, 263)


class Training:
    """Neighbouring shards, whose gradients are worked on by the kernel or before it."""

    def __init__(self, dtype, precision, work=None):
        generator = torch.Generator().manual_seed(0)
        self.work = work
        self.parameters = [
            nn.Parameter(torch.randn(length, generator=generator).to(dtype)) for length in LENGTHS
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        table = {i: (p, layout(p, 1, i)) for i, p in enumerate(self.parameters)}
        self.runner = OptimizerRunner(
            self.optimizer, table, UpdateSettings(rank=0, sharded=True, precision=precision)
        )
        self.data = torch.cat([p.detach() for p in self.parameters])

    def step(self, gradient, coefficients=()):
        self.runner.begin()
        data, grads = self.data.split(LENGTHS), gradient.split(LENGTHS)
        self.runner.run_together(
            data, grads, range(len(data)), updates.Fused(self.work, coefficients)
        )
        self.runner.end()

    @property
    def values(self):
        states = [self.optimizer.state[p] for p in self.parameters]
        tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        return [self.data, *tensors]


@pytest.fixture
def kernels(monkeypatch):
    """A kernel whatever the length; which ones ran."""
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 0)
    calls = []
    ready = kernel.UpdateKernel.ready

    def counted(self, *values):
        calls.append(self)
        return ready(self, *values)

    monkeypatch.setattr(kernel.UpdateKernel, "ready", counted)
    return calls


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    "name",
    first(
        1,
        [
            name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive)
            for name in CASES
        ],
    ),
)
def test_the_kernel_does_bitwise_what_is_done_before_it(name, kernels):
    assert_bitwise_alike(name)
    assert kernels


@pytest.mark.parametrize("name", only(("clipped, in bf16",), CASES))
def test_split_it_does_so_too(name, kernels, monkeypatch):
    monkeypatch.setattr(compat.inductor, "CompiledForAnyLength", lambda gm: gm)
    assert_bitwise_alike(name)
    assert kernels


def assert_bitwise_alike(name):
    function, gradient_dtype, dtype, coefficients, precision = CASES[name]
    work = works.traced(function, gradient_dtype, *(item.dtype for item in coefficients))
    fused, apart = Training(dtype, precision, work), Training(dtype, precision)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        gradient = (8 * torch.randn(sum(LENGTHS), generator=generator)).to(gradient_dtype)
        if step == 1 and precision is not CODED:
            gradient[::50] = torch.nan
            gradient[7::50] = torch.inf
        given = gradient.clone()
        fused.step(given, coefficients)
        torch.testing.assert_close(given, gradient, rtol=0, atol=0, equal_nan=True)
        apart.step(function(gradient, *coefficients))
        for one, other in zip(fused.values, apart.values, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_pieces_too_small_for_a_kernel_are_worked_on_apart(kernels, monkeypatch):
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 10**6)
    fused, apart = (Training(FP32, PLAIN, w) for w in (works.traced(works.clip, FP32, FP32), None))
    gradient, coefficient = torch.randn(sum(LENGTHS)), number(0.3)
    fused.step(gradient, [coefficient])
    apart.step(gradient * coefficient)
    assert torch.equal(fused.data, apart.data) and not kernels


def test_coefficients_are_read_at_every_step(kernels, monkeypatch):
    monkeypatch.setattr(compat.inductor, "CompiledForAnyLength", lambda gm: gm)
    fused, apart = (Training(FP32, PLAIN, w) for w in (works.traced(works.clip, FP32, FP32), None))
    for value in (0.5, 1.0, 0.0, float("nan")):
        gradient = torch.randn(sum(LENGTHS))
        fused.step(gradient, [number(value)])
        apart.step(gradient * value)
        torch.testing.assert_close(fused.data, apart.data, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(("dtype", "precision"), [(FP32, PLAIN), nightly(BF16, MASTERS)])
def test_a_clipped_update_allocates_nothing_beyond_states(dtype, precision, kernels, tmp_path):
    """Nor does what is gathered, of a parameter with a master: it is written by the kernel."""
    run = Training(dtype, precision, works.traced(works.clip, dtype, dtype))
    gradient, coefficient = torch.randn(sum(LENGTHS)).to(dtype), number(0.3, dtype)
    run.step(gradient, [coefficient])
    run.step(gradient, [coefficient])
    allocated = bytes_allocated(lambda: run.step(gradient, [coefficient]), tmp_path)
    assert max(allocated, default=0) <= ONE_NUMBER_BYTES
    run.work = None  # that the instrument works
    allocated = bytes_allocated(lambda: run.step(gradient * coefficient), tmp_path)
    assert max(allocated) >= dtype.itemsize * sum(LENGTHS)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_is_that_of_a_cast(dtype):
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 65519.9, 65520.0, 1e-45, 1e-7]
    value = torch.cat([torch.tensor(special), 1e3 * torch.randn(10_000)])
    expected = value.to(dtype).to(FP32)
    rounded = round_to(value, dtype)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded[:2].signbit(), torch.tensor([False, True]))
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    assert torch.equal(round_to(ties, dtype), ties.to(dtype).to(FP32))
    compiled = torch.compile(round_to, fullgraph=True)(value, dtype)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0, equal_nan=True)


def works_of(function, gradient_dtype, *coefficient_dtypes):
    """Whether the last operation of a function may be work."""
    examples = [torch.empty(5, dtype=gradient_dtype, device="meta")]
    examples += [torch.empty((), dtype=dtype, device="meta") for dtype in coefficient_dtypes]
    *_, last, _ = compat.scalars.trace_operations(function, examples).graph.nodes
    return may_be_work(last)


def test_work_that_another_start_finds_is_the_same():
    work = works.traced(works.unscale_and_clip, BF16, FP32, FP32)
    found = pickle.loads(pickle.dumps(work))
    assert found.computation == work.computation and found.text == work.text
    assert [node.meta["val"].shape for node in found.inputs] == [(2,), (), ()]


def test_what_a_kernel_would_round_otherwise_is_no_work():
    assert works_of(lambda g, c: g * c, BF16, FP32)
    assert works_of(lambda g, c: g > c, FP32, FP32)
    assert not works_of(lambda g, c: g > c, BF16, FP32)  # rounds the number first
    assert not works_of(lambda g: g > 0.3, BF16)
    assert not works_of(lambda g, c: torch.maximum(g, c), BF16, FP32)
    assert not works_of(lambda g: g.div(3, rounding_mode="floor"), FP32)
    assert not works_of(torch.tanh, FP32)
    assert not works_of(lambda g: g.sum(), FP32)
    assert not works_of(lambda g: g[:4].clone().add_(1), FP32)
