"""A CPU's kernel sums its gradient's squares beside the update: one loop, the same update."""

import pytest
import torch
from torch import nn

from tests.codegen import work
from tests.codegen.test_kernel import bytes_allocated
from tests.codegen.updates import OPTIMIZERS, Shards
from tests.kit.covering import first
from zerofx.codegen.kernel import UpdateKernel
from zerofx.codegen.rewrite.gradient_work import squares_of

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def pair(name, known, length, dtype, function=None):
    """Shards whose kernel sums, and others whose kernel does not."""
    made = []
    for sums in (True, False):
        generator = torch.Generator().manual_seed(length)
        start = nn.Parameter(torch.randn(length, generator=generator).to(dtype))
        done = work.traced(function, dtype, torch.float32) if function else None
        shards = Shards(OPTIMIZERS[name]([start]), UpdateKernel.of, work=done, squares=sums)
        shards.known = known.setdefault(sums, {})
        made.append(shards)
    return made


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    ("name", "dtype", "function"),
    first(
        1,
        [
            ("sgd_nesterov", torch.float32, None),  # which writes to its gradient
            ("adamw", torch.float32, None),
            ("rmsprop", BF16, None),
            ("adamw", BF16, work.clip),
        ],
    ),
)
def test_the_update_is_bitwise_what_it_is_without(name, dtype, function):
    known = {}
    for length in (1, 3, 127, 1024, 1025, 0):
        one, other = pair(name, known, length, dtype, function)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            gradient = torch.randn(length, generator=generator).to(dtype)
            coefficients = [torch.tensor(0.3)] if function else []
            *_, squares = one.step(gradient, coefficients)
            other.step(gradient, coefficients)
            seen = function(gradient, *coefficients) if function else gradient
            expected = seen.double().square().sum()
            torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)
            assert torch.equal(one.parameter, other.parameter)
            states = [shards.optimizer.state[shards.parameter].values() for shards in (one, other)]
            for mine, its in zip(*states, strict=True):
                assert mine is its is None or torch.equal(mine, its)


def test_many_squares_are_summed_without_losing_the_last(tmp_path):
    length = 2**22 + 7
    one, _ = pair("adamw", {}, length, torch.float32)
    gradient = torch.rand(length, generator=torch.Generator().manual_seed(0))
    expected = gradient.double().square().sum()
    one.step(gradient)  # its first makes states
    for squares in (one.step(gradient)[-1], squares_of(gradient)):
        torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)
    assert max(bytes_allocated(lambda: one.step(gradient), tmp_path)) <= 8
    narrow = gradient.to(BF16)
    assert max(bytes_allocated(lambda: squares_of(narrow), tmp_path)) <= 4 * 2**16


@pytest.mark.parametrize("value", first(1, [torch.nan, torch.inf, -torch.inf]))
def test_what_is_not_finite_makes_the_sum_so(value):
    one, _ = pair("adamw", {}, 37, torch.float32)
    gradient = torch.ones(37)
    gradient[36] = value
    *_, squares = one.step(gradient)
    for found in (squares, squares_of(gradient)):
        torch.testing.assert_close(found, torch.tensor(value).square(), equal_nan=True)


@pytest.mark.nightly
def test_the_sum_is_in_the_updates_loop(caplog, monkeypatch, tmp_path):
    """Inductor's source goes through the gradient once, whichever of the two is asked for."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what is found is not written
    torch._logging.set_logs(output_code=True)
    try:
        for shards in pair("adamw", {}, 5, torch.float32):
            shards.step(torch.ones(5))
            caplog.clear()
            shards.step(torch.ones(5))  # its states are there: compiled anew
            logged = [record.getMessage() for record in caplog.records]
            source = next(text for text in logged if 'extern "C"' in text)
            assert source.count("for(int64_t x0=") == 1
            assert ("acc0" in source) == shards.squares
    finally:
        torch._logging.set_logs()
