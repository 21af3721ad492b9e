"""What the tests of Triton kernels run in Triton's interpreter.

The interpreter is chosen by the environment when Triton is imported, for a whole process: these
functions run in one of their own.  They check, and return figures where there are any.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.codegen import work
from tests.codegen.updates import OPTIMIZERS, Shards, kept
from zerofx.codegen.rewrite.storage import Stored

LENGTHS = (1, 3, 127, 1024, 1025)
BF16 = torch.bfloat16


def start():
    torch.set_num_threads(1)
    _round_casts_to_nearest()


def _round_casts_to_nearest():
    """Casts to bf16 round as on a GPU, to nearest even; the interpreter's own truncate."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cast(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return self.cast_impl(source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(BF16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), dtype.scalar)

    InterpreterBuilder.create_fp_trunc = cast


def kernels(update, **variant):
    """A kernel for an update, or the error that says why there is none."""
    from zerofx.codegen.pointwise import pointwise_program
    from zerofx.codegen.triton.launch import TritonKernel

    return TritonKernel(pointwise_program(update, **variant))


class Pair:
    """An optimizer on whole parameters, and its kernels on shards that start as they do."""

    def __init__(
        self, name, length, *, seed=0, dtype=torch.float32, make=None, device="cpu", **variant
    ):
        self.generator = torch.Generator().manual_seed(seed)
        start = torch.randn(length, generator=self.generator).to(device, dtype)
        make = make or OPTIMIZERS[name]
        self.plain, self.own = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.exact = nn.Parameter(start.double())
        self.optimizer, self.exact_optimizer = make([self.plain]), make([self.exact])
        self.shards = Shards(make([self.own]), kernels, variant)

    def gradient(self):
        return torch.randn(self.own.shape, generator=self.generator).to(self.own)

    def step(self, gradient=None, **options):
        gradient = self.gradient() if gradient is None else gradient
        self.plain.grad = gradient.to(self.plain.dtype, copy=True)
        self.exact.grad = gradient.double()
        self.optimizer.step()
        self.exact_optimizer.step()
        self.shards.step(gradient, **options)

    def states(self):
        """(name, the kernel's, torch.optim's, float64's) of each tensor with elements."""
        yield "param", self.own.detach(), self.plain.detach(), self.exact.detach()
        exact = self.exact_optimizer.state[self.exact]
        plain, own = self.optimizer.state[self.plain], self.shards.optimizer.state[self.own]
        assert plain.keys() == own.keys()
        for name, value in plain.items():
            if isinstance(value, torch.Tensor):
                yield name, own[name], value, exact[name]
            else:
                assert own[name] == value, name


def errors_against_float64(name, steps=20, device="cpu"):
    """Train each length, all by one launch a step; the worst error of a kernel and torch.optim's.

    Returns {tensor: (kernel's error, torch.optim's, largest value)} over all lengths.
    """
    from zerofx.codegen.triton.launch import Launches

    pairs = [Pair(name, length, seed=length, device=device) for length in LENGTHS]
    for pair in pairs[1:]:  # one trace serves all
        pair.shards.known, pair.shards.changing = pairs[0].shards.known, pairs[0].shards.changing
    for _ in range(steps):
        launches = Launches()
        for pair in pairs:
            pair.step(launches=launches)
        launches.run()
    worst = {}
    for pair in pairs:
        for tensor, own, plain, exact in pair.states():
            figures = (
                (own.double() - exact).abs().max().item(),
                (plain.double() - exact).abs().max().item(),
                exact.abs().max().item(),
            )
            worst[tensor] = tuple(map(max, zip(worst.get(tensor, (0, 0, 0)), figures, strict=True)))
    return worst


def errors_of_one_launch(name, length):
    pair = Pair(name, length)
    pair.step()
    return {
        tensor: ((own - exact).abs().max().item(), (plain - exact).abs().max().item())
        for tensor, own, plain, exact in pair.states()
    }


def excess(name, length):
    """``exact.excess``: it imports Triton, so that it has to be imported here."""
    from tests.codegen import exact

    return exact.excess(name, length)


def check_not_finite(name):
    """NaN and inf gradients end up where they do with torch.optim."""
    pair = Pair(name, 9)
    for _ in range(2):
        pair.step()
    gradient = pair.gradient()
    gradient[1], gradient[4], gradient[6], gradient[8] = float("nan"), torch.inf, -torch.inf, 0.0
    pair.step(gradient)
    assert any(not own.isfinite().all() for _, own, _, _ in pair.states())
    for _ in range(2):
        for tensor, own, plain, _ in pair.states():
            torch.testing.assert_close(own, plain, equal_nan=True, rtol=1e-5, atol=1e-6, msg=tensor)
        pair.step()


def check_groups_in_one_launch():
    """Two groups with hyperparameters of their own are updated together, each with its own."""
    from zerofx.codegen.triton.launch import Launches, TritonKernel

    calls = []
    launch = TritonKernel._launch

    def counted(self, segments, *rest):
        calls.append(len(segments))
        return launch(self, segments, *rest)

    TritonKernel._launch = counted
    try:
        one, other = Pair("adamw", 9000), Pair("adamw", 130)
        one.shards.known = other.shards.known
        for optimizer in (other.optimizer, other.exact_optimizer, other.shards.optimizer):
            optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2, betas=(0.5, 0.6))
        for _ in range(3):
            launches = Launches()
            one.step(launches=launches)
            other.step(launches=launches)
            launches.run()
    finally:
        TritonKernel._launch = launch
    assert calls == [2, 2, 2]
    for pair in (one, other):
        for tensor, own, plain, _ in pair.states():
            torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6, msg=tensor)


def check_tables_are_sent_when_they_say_something_new():
    from zerofx.codegen.program import Bound
    from zerofx.codegen.triton import launch

    pair = Pair("adamw", 300)
    pair.step()
    pair.step()
    kernel = pair.shards.trace()[1]
    own = pair.shards.optimizer.state[pair.own]
    tensors = [pair.own.detach(), pair.gradient(), own["exp_avg"], own["exp_avg_sq"]]
    values = [0.99, 0.1, 0.999, 0.001, 0.5, 1e-8, 0.01]
    numbers = dict(zip(kernel.program.numbers, values, strict=True))
    moved = [tensor.clone() for tensor in tensors]
    changed = dict.fromkeys(numbers, 0.25)

    def sent(*segment):
        before = launch._sent.cache_info().misses
        kernel.launch([Bound(*segment)])
        return launch._sent.cache_info().misses - before

    launch._sent.cache_clear()  # other checks have numbers like these
    assert [sent(tensors, numbers), sent(tensors, numbers)] == [2, 0]
    assert [sent(tensors, changed), sent(moved, changed), sent(tensors, numbers)] == [1, 1, 0]


def check_a_default_device_changes_nothing():
    from zerofx.codegen.program import Bound
    from zerofx.codegen.triton import launch

    pair = Pair("sgd_momentum", 1500)
    pair.step()
    kernel = pair.shards.trace()[1]
    buffer = pair.shards.optimizer.state[pair.own]["momentum_buffer"]
    tensors = [pair.own.detach(), pair.gradient(), buffer]
    copies = [tensor.clone() for tensor in tensors]
    numbers = dict.fromkeys(kernel.program.numbers, 0.5)
    kernel.launch([Bound(tensors, numbers)])
    launch._sent.cache_clear()
    launch._segment_of_chunk.cache_clear()
    with torch.device("meta"):
        kernel.launch([Bound(copies, numbers)])
        launch._sent(b"", torch.device("cpu"))
    assert all(map(torch.equal, copies, tensors))


def check_neighbours_are_left_alone(offset, length):
    """A segment anywhere in memory, aligned or not, is updated and nothing around it."""
    from zerofx.codegen.program import Bound

    pair = Pair("adamw", length)
    pair.step()
    pair.step()
    kernel = pair.shards.trace()[1]
    own = pair.shards.optimizer.state[pair.own]
    tensors = [pair.own.detach(), pair.gradient(), own["exp_avg"], own["exp_avg_sq"]]
    buffers = [torch.full((offset + length + 20,), 7.0) for _ in tensors]
    pieces = [buffer[offset : offset + length] for buffer in buffers]
    for piece, tensor in zip(pieces, tensors, strict=True):
        piece.copy_(tensor)
    values = [0.99, 0.1, 0.999, 0.001, 0.5, 1e-8, 0.01]
    numbers = dict(zip(kernel.program.numbers, values, strict=True))
    kernel.launch([Bound(tensors, numbers)])
    kernel.launch([Bound(pieces, numbers)])
    for piece, tensor in zip(pieces, tensors, strict=True):
        assert torch.equal(piece, tensor)
    for buffer in buffers:
        assert (buffer[:offset] == 7).all() and (buffer[offset + length :] == 7).all()


def check_an_empty_shard():
    pair = Pair("adamw", 0)
    pair.shards.step(torch.empty(0))
    state = pair.shards.optimizer.state[pair.own]
    assert state["step"] == 1 and state["exp_avg"].shape == (0,)


def check_work_on_the_gradient(function, dtype, *coefficients):
    """As when the work is done before the kernel, one operation after the other: bitwise."""
    fused, apart = (Pair("sgd_nesterov", 1025, dtype=dtype) for _ in range(2))
    fused.shards.work = work.traced(function, dtype, *(item.dtype for item in coefficients))
    for _ in range(3):
        gradient = fused.gradient()
        gradient[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
        before = gradient.clone()
        fused.shards.step(gradient, coefficients)
        assert torch.equal(gradient.nan_to_num(), before.nan_to_num())
        apart.shards.step(function(gradient, *coefficients).to(dtype))
        states = [pair.shards.optimizer.state[pair.own] for pair in (fused, apart)]
        for one, other in zip(*(state.values() for state in states), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(fused.own, apart.own, rtol=0, atol=0, equal_nan=True)


def check_bf16_gradient():
    pair = Pair("adamw", 1025, gradient_dtype=BF16)
    for _ in range(3):
        pair.step(pair.gradient().to(BF16))
    torch.testing.assert_close(pair.own, pair.plain, rtol=1e-5, atol=1e-6)


def check_bf16_parameters(name):
    """Parameters and moments in bf16: each step rounds once, where torch.optim rounds often."""
    pair = Pair(name, 127, dtype=BF16)
    for _ in range(5):
        pair.step()
    for tensor, own, plain, _ in pair.states():
        assert own.dtype == plain.dtype, tensor
        torch.testing.assert_close(own, plain, rtol=0.05, atol=0.05, msg=tensor)


def check_float64(name):
    pair = Pair(name, 127, dtype=torch.float64)
    for _ in range(5):
        pair.step()
    for tensor, own, plain, _ in pair.states():
        torch.testing.assert_close(own, plain, rtol=1e-13, atol=1e-14, msg=tensor)


def check_bits_and_integers():
    """Rounding to bf16 with integer operations gives the bits that they give in torch."""

    def update(p, grad, state):
        bits = p.sub(grad, alpha=0.5).view(torch.int32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        state["low"] = (bits ^ rounded).bitwise_or(3).to(torch.int16)
        p.copy_(rounded.view(torch.float32))
        p.mul_(torch.where(p > 1, 2.0, 1.0)).masked_fill_(p.isnan() | (p < -3).logical_not(), 5.0)

    check_custom(update, exact=True)


def check_a_number_that_changes_after_its_use():
    """What is done with a number comes before what is done to it, as in the optimizer's step."""

    def update(p, grad, state):
        scale = state.setdefault("scale", torch.tensor(0.5))
        p.mul_(scale)
        scale.mul_(0.5)
        p.sub_(grad * scale)
        scale.add_(0.125)

    check_custom(update)


def check_functions():
    def update(p, grad, state):
        p.sub_(grad.exp().add(1).log() * torch.sigmoid(p) + grad.abs().rsqrt().clamp(max=3))
        p.add_(grad.square().add(2).reciprocal() - grad.floor() * 0.01 + p.sin().cos() * p.erf())
        p.mul_(2 - grad.pow(2).minimum(grad.pow(-2)).clamp_min(0.1)).div_(3)

    check_custom(update)


def check_an_update_that_makes_up_for_its_rounding():
    """Kahan 1965: as operator by operator, where the correction is a rounding error."""

    class Corrected(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                left = self.state[p].setdefault("left", torch.zeros_like(p))
                left.sub_(p.grad)
                before = p.clone()
                p.add_(left)
                left.add_(before.sub_(p))

    plain, own = (nn.Parameter(torch.linspace(1, 2, 300).to(BF16)) for _ in range(2))
    shards = Shards(Corrected([own]), kernels)
    optimizer, start = Corrected([plain]), plain.detach().clone()
    for _ in range(20):
        plain.grad = torch.full_like(plain, 2**-12)
        optimizer.step()
        shards.step(plain.grad.clone())
        torch.testing.assert_close(own, plain, rtol=0, atol=0)
    assert 0 < (start - own).float().mean() < 2 * 20 * 2**-12


def check_custom(update, exact=False):
    class Custom(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                update(p, p.grad, self.state[p])

    torch.manual_seed(0)
    plain, own = (nn.Parameter(torch.linspace(-4, 4, 300)) for _ in range(2))
    optimizer, shards = Custom([plain]), Shards(Custom([own]), kernels)
    for _ in range(3):
        plain.grad = torch.randn(300)
        gradient = plain.grad.clone()
        optimizer.step()
        shards.step(gradient)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(own, plain, equal_nan=True, **tolerance)
        for name, value in optimizer.state[plain].items():
            torch.testing.assert_close(shards.optimizer.state[own][name], value, **tolerance)


def check_streams_that_do_not_fit_are_refused():
    from zerofx.codegen.program import Bound

    pair = Pair("sgd", 16)
    kernel = pair.shards.trace()[1]
    good = torch.zeros(16)
    for bad in (good.double(), torch.zeros(15), torch.zeros(32)[::2]):
        try:
            kernel.launch([Bound([good, bad], dict.fromkeys(kernel.program.numbers, 0.1))])
        except ValueError as error:
            assert "'grad'" in str(error) and "torch.float32[16]" in str(error)
        else:
            raise AssertionError(f"{bad.dtype}{list(bad.shape)} was taken")


def check_the_runtime_updates_a_bucket(name):
    """On the device that Triton is for, a bucket's pieces take one launch for each update."""
    from tests.runtime.optimizer import test_joined_updates as joined
    from zerofx.codegen import kernels as choice
    from zerofx.codegen.triton.launch import TritonKernel
    from zerofx.runtime.optimizer import update as updates

    launched = []
    launch = TritonKernel.launch

    def counted(self, segments, *rest):
        launched.append(len(segments))
        return launch(self, segments, *rest)

    for module in (choice, updates):
        module.runs_triton = lambda device: True
    TritonKernel.launch = counted
    try:
        one = joined.Bucket(OPTIMIZERS[name], together=True)
        other = joined.Bucket(OPTIMIZERS[name], together=False)
        one.data[3] = one.data[3].clone()  # a hole in memory: two pieces are left, and it
        whole, its = (joined.Wholes(OPTIMIZERS[name], together) for together in (True, False))
        for seed in range(3):
            for bucket in (one, other, whole, its):
                bucket.step(seed)
    finally:
        TritonKernel.launch = launch
    joined.assert_alike(one, other)
    joined.assert_alike(whole, its)
    assert launched == [3, 5] * 3  # of whole parameters, all that have elements


def check_the_runtime_sums_a_buckets_squares():
    """The sum of one launch for all pieces; in float32 of what a step does to bf16 gradients."""
    from tests.runtime.optimizer import test_joined_updates as joined
    from zerofx.codegen import kernels as choice
    from zerofx.runtime.optimizer import update as updates

    for module in (choice, updates):
        module.runs_triton = lambda device: True
    half = work.traced(work.clip, BF16, torch.float32), [torch.tensor(0.5)]
    for dtype, done in ((torch.float32, (None, ())), (BF16, half)):
        bucket = joined.Bucket(OPTIMIZERS["adamw"], together=True)
        bucket.data[3] = bucket.data[3].clone()  # a hole in memory
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            total = sum(len(data) for data in bucket.data)
            gradient = torch.randn(total, generator=generator).to(dtype)
            bucket.runner.begin()
            given = (bucket.data, bucket.cut(gradient), bucket.order)
            fused = updates.Fused(*done, gives_squares=True)
            squares = bucket.runner.run_together(*given, fused)
            bucket.runner.end()
            expected = (gradient.double() * (0.5 if done is half else 1)).square().sum()
            torch.testing.assert_close(sum(squares).double(), expected, rtol=1e-6, atol=0)


def check_precision(name, options, not_finite=False):
    """What is kept narrower, or with a master, is as the same update makes it operator by operator.

    To the last bit but for a few roundings: an operation that rounds otherwise may tip one.
    Pieces of a bucket take one launch, but where new states are rounded.  With ``not_finite``
    gradients have a NaN and infinities in the second step.
    """
    from tests.kit.optimizers import VARIANTS
    from tests.runtime.optimizer import test_precision
    from zerofx.codegen import kernels as choice
    from zerofx.codegen.rewrite import storage
    from zerofx.codegen.triton.launch import TritonKernel
    from zerofx.runtime.optimizer import update as updates

    launched = []
    launch = TritonKernel.launch

    def counted(self, segments, *rest):
        launched.append(len(segments))
        return launch(self, segments, *rest)

    TritonKernel.launch = counted
    storage.FEWEST_CODED = 0
    make, precision = VARIANTS[name], storage.Precision(**options)
    wholes = test_precision.randoms(300, 1025, 3)
    one, other = (test_precision.Training(make, precision, wholes) for _ in range(2))
    _, _, _, data = one.ranks[0]
    data[1] = data[1].clone()  # a hole in memory
    try:
        for seed in range(1, 4):
            gradients = test_precision.randoms(300, 1025, 3, seed=seed, dtype=BF16)
            if not_finite and seed == 2:
                gradients[1][[1, 300, 301]] = NOT_FINITE.to(BF16)
            for module in (choice, updates):
                module.runs_triton = lambda device: True
            one.step(gradients)
            for module in (choice, updates):
                module.runs_triton = lambda device: False
            other.step(gradients)
    finally:
        TritonKernel.launch = launch
    assert launched == [*([1, 1, 1] if precision.draws else [3]), 3, 3]
    for index in range(3):
        assert_same_but_for_roundings(one.whole(index), other.whole(index))
        states = one.state(index), other.state(index)
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            if torch.is_tensor(value):
                assert_same_but_for_roundings(value, states[1][key])
    assert one.whole(1).isnan().sum() == (2 * 256 if not_finite else 0)  # of two blocks


NOT_FINITE = torch.tensor([torch.nan, torch.inf, -torch.inf])


def assert_same_but_for_roundings(own, expected):
    """Equal in float32 up to its own, and else but for one in fifty that is tipped by one step."""
    assert own.dtype == expected.dtype and own.shape == expected.shape
    if own.dtype is torch.float32:
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        return
    if own.dtype is torch.int8:
        assert ((own.short() - expected.short()).abs() <= 1).all()
    else:
        torch.testing.assert_close(own, expected, rtol=2**-7, atol=1e-6, equal_nan=True)
    differ = (own != expected) & ~(own.isnan() & expected.isnan())
    assert differ.sum() <= 0.02 * own.numel()


def check_blocks_of_codes(offset, stored):
    """Moments in eight bits, of any length and anywhere in memory, in one launch.

    As operator by operator, the gradient clipped first; what lies beside them stays.
    """
    from zerofx.codegen.kernel import UpdateKernel
    from zerofx.codegen.rewrite.storage import narrow
    from zerofx.codegen.triton.launch import Launches

    p = nn.Parameter(torch.ones(7))
    optimizer, made = OPTIMIZERS["adamw"]([p]), []
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    Shards(optimizer, lambda update: made.append(kept(update, stored))).trace()
    (update,), clipping = made, work.traced(work.clip, BF16, torch.float32)
    clip = torch.tensor(0.3)
    run = kernels(update, work=clipping)
    expected_run = UpdateKernel.of(update, is_compiled=False, work=clipping)
    generator = torch.Generator().manual_seed(0)
    numbers = [0.9, 0.999, 1e-8, 1e-2, 0.01, 2.0]
    launches, checks = Launches(), []
    for length in (0, 1, 255, 256, 257, 1024, 1025, 2600):
        param, grad, first, second = (
            torch.randn(length, generator=generator) for _ in ("param", "grad", "first", "second")
        )
        bits = torch.randint(2**16, (length,), generator=generator, dtype=torch.int32)
        coded = narrow(first, torch.int8, bits), narrow(second.square(), torch.int8, bits)
        (first, first_scale), (second, second_scale) = coded
        tensors = [param.to(BF16), grad.to(BF16), first, second, first_scale, second_scale]
        buffers = [tensor.new_full((offset + len(tensor) + 20,), 7) for tensor in tensors]
        pieces = [buffer[offset:-20] for buffer in buffers]
        for piece, tensor in zip(pieces, tensors, strict=True):
            piece.copy_(tensor)

        def values(streams, numel=length):
            param, grad, first, second, *scales = streams
            draw = [torch.tensor(2**32 - 5 + numel), torch.tensor(99, dtype=torch.int32)]
            step = torch.tensor(2.0)
            return [param, grad, step, first, second, *numbers, *scales, *draw, clip]

        expected_run(*values(tensors))
        run(*values(pieces), launches=launches)
        checks.append((buffers, pieces, tensors))
    launches.run()
    for buffers, pieces, tensors in checks:
        for piece, tensor in zip(pieces, tensors, strict=True):
            assert_same_but_for_roundings(piece, tensor)
        for buffer in buffers:
            assert (buffer[:offset] == 7).all() and (buffer[-20:] == 7).all()


def check_squares(name, dtype):
    """Pieces of all lengths, anywhere in memory, give the sum of all their gradients' squares.

    The update is bitwise what it is without, and partial sums are always in the same memory.
    """
    from zerofx.codegen.triton.launch import Launches

    summing, plain = (
        [Pair(name, length, seed=length, gradient_dtype=dtype) for length in (0, *LENGTHS, 9000)]
        for _ in range(2)
    )
    for pair in summing:
        pair.shards.squares, pair.shards.known = True, summing[0].shards.known
    held = set()
    for _ in range(3):
        launches, total = Launches(), 0.0
        for place, (one, other) in enumerate(zip(summing, plain, strict=True)):
            gradient = one.gradient().to(dtype)
            moved = torch.cat([torch.zeros(place, dtype=dtype), gradient])[place:]  # or not aligned
            one.shards.step(moved, launches=launches)
            other.shards.step(moved)
            total += gradient.double().square().sum()
        sums = launches.run()
        assert len(sums) == 1 and sums[0].dtype is torch.float32
        torch.testing.assert_close(sums[0].double(), total, rtol=1e-6, atol=0)
        kernel = summing[0].shards.trace()[1]
        held |= {(id(kernel), partials.data_ptr()) for partials in kernel._partials.values()}
        for one, other in zip(summing, plain, strict=True):
            assert torch.equal(one.own, other.own)
            states = [pair.shards.optimizer.state[pair.own].values() for pair in (one, other)]
            for mine, its in zip(*states, strict=True):
                assert mine is its is None or torch.equal(mine, its)
    assert len(held) == len({kernel for kernel, _ in held})


def check_squares_of_what_is_not_finite():
    """A NaN anywhere makes the sum NaN, an infinity infinite; what is too large overflows."""
    pair = Pair("adamw", 1025)
    pair.shards.squares = True
    for place in (0, 1024):
        for value, expected in (
            (torch.nan, torch.nan),
            (torch.inf, torch.inf),
            (-torch.inf, torch.inf),
            (1e20, torch.inf),
            (1e-30, 0.0),
        ):
            gradient = torch.zeros(1025)
            gradient[place] = value
            *_, squares = pair.shards.step(gradient)
            torch.testing.assert_close(squares, torch.tensor(expected), equal_nan=True)


def check_squares_of_nothing():
    pair = Pair("adamw", 0)
    pair.shards.squares = True
    *_, squares = pair.shards.step(torch.empty(0))
    assert squares.shape == () and squares == 0


def check_squares_of_work():
    """The squares are of the gradient as the step makes it: unscaled, and rounded as there."""
    pair = Pair("sgd_momentum", 1025)
    pair.step()  # makes the momentum
    scale = torch.tensor(0.3)
    gradient = pair.gradient().to(BF16)
    pair.shards.known, pair.shards.squares = {}, True
    pair.shards.work = work.traced(work.clip, BF16, torch.float32)
    expected = (gradient * scale).double().square().sum()
    *_, squares = pair.shards.step(gradient, [scale])
    torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0)


def check_functions_in_a_rewritten_graph():
    """Python functions in a graph, and an element's number, give the bits that they give there."""
    rounded = Stored(
        parameter=BF16,
        gradient=BF16,
        compute=torch.float32,
        keeps_master=False,
        has_master=False,
        rounds_parameter=True,
        moments=(),
    )
    shards = Shards(OPTIMIZERS["sgd_plain"]([nn.Parameter(torch.randn(7))]), lambda update: None)
    traced, *_ = shards.trace()
    update = kept(traced, rounded)
    run = kernels(update)
    assert "begin + lane" in run.source and "# round_stochastically" in run.source
    for length in (1, 1030):
        start, gradient = (torch.randn(length).to(BF16) for _ in range(2))
        drawn_by = torch.tensor(2**40 + 5), torch.tensor(-77, dtype=torch.int32)
        numbers = [*[0.1] * (len(traced.inputs) - 2), *drawn_by]
        expected, own = start.clone(), start.clone()
        update.graph_module(expected, gradient, *numbers)
        run(own, gradient, *numbers)
        assert torch.equal(own, expected) and not torch.equal(own, start)


class _Tuner:
    """Runs a kernel many times whenever it meets other dtypes, as Triton's own tuner does."""

    def __init__(self, configurations, function):
        self.configurations, self.function, self.known = configurations, function, set()

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.best_config = self.configurations[-1]
            kinds = tuple(str(value.dtype) for value in arguments if hasattr(value, "dtype"))
            for _ in range(1 if kinds in self.known else 4):
                self.function[grid](*arguments, **constants, **self.best_config.kwargs)
            self.known.add(kinds)

        return run


def check_a_steps_memory_is_not_tuned_on():
    """Tuned as on a GPU with float32 numbers, then given a coefficient in bfloat16: one update."""
    from unittest import mock

    import triton

    from zerofx.codegen.triton import launch

    tuners = []

    def autotune(configurations, **settings):
        return lambda function: tuners.append(_Tuner(configurations, function)) or tuners[-1]

    with (
        mock.patch.object(launch, "_on_gpu", lambda device: True),
        mock.patch.object(launch, "_TUNED_ON_ELEMENTS", 16),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(triton, "autotune", autotune),
    ):
        check_work_on_the_gradient(work.clip, BF16, torch.tensor(0.3, dtype=BF16))
    assert tuners and all(len(tuner.known) == 1 for tuner in tuners)


def check_wires(dtype, code, numel, parts):
    """Kernels make the same bits of a flat buffer, and of its wire, as plain torch does."""
    import math
    from unittest import mock

    from zerofx.codegen.wires import blocks, kernels

    generator = torch.Generator().manual_seed(numel)
    flat = torch.randn(numel * parts, generator=generator).double()
    flat *= torch.randn(numel * parts, generator=generator).mul(3).exp()
    if numel > 600:
        flat[100], flat[300], flat[520:530] = math.nan, math.inf, 0.0
    flat = flat.to(dtype)
    with mock.patch.object(kernels, "runs_triton", lambda device: True):
        found = kernels.WireKernels()
        wire = found.quantize(flat, code, parts)
        assert torch.equal(wire, blocks.quantize(flat, code, parts))
        values = found.dequantize(wire, code, parts, numel, dtype)
        assert len(found._known) == 2
    wanted = blocks.dequantize(wire, code, parts, numel, dtype)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)


def check_sums_and_errors(code, numel, parts):
    """Kernels sum wires, and find what they have lost, in the bits of plain torch."""
    from unittest import mock

    from zerofx.codegen.wires import blocks, errors, kernels, sums
    from zerofx.ir.wires import NARROW

    flat = torch.randn(numel * parts, generator=torch.Generator().manual_seed(numel))
    if numel > 300:
        flat[100], flat[300] = float("nan"), float("inf")
    wire = flat.bfloat16() if code == NARROW else blocks.quantize(flat, code, parts)
    with mock.patch.object(kernels, "runs_triton", lambda device: True):
        found = kernels.WireKernels()
        for dtype in (torch.float32, torch.bfloat16):
            given = wire, code, parts, numel, parts, dtype
            total, wanted = found.dequantize_sum(*given), sums.dequantize_sum(*given)
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)
        for scale in (None, torch.tensor(3.0)):
            lost = found.rounding_error(flat, wire, code, parts, scale)
            assert torch.equal(lost, errors.rounding_error(flat, wire, code, parts, scale))
        assert all(kernel is not None for kernel in found._known.values()) and found._known
