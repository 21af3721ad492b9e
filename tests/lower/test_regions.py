"""What a program becomes when it is compiled: regions, and whose memory they may use."""

import contextlib
import operator
import weakref
from unittest import mock

import pytest
import sympy
import torch
import torch._inductor.config
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention.flex_attention import flex_attention

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx  # noqa: F401 - makes the backend known
from tests.kit.coded_reductions import NODES, wide_mlp
from tests.kit.covering import first, nightly
from tests.kit.programs import capture, mlp_step, rewritten
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.small_regions import every_region_is_compiled  # noqa: F401
from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.lower.lowering import lower
from zerofx.lower.regions import CompiledRegion
from zerofx.passes.fuse.form_regions import form_regions

aten = torch.ops.aten


def lowered_with_regions(gm):
    for node in gm.graph.find_nodes(op="placeholder"):
        set_input_role(node, node.meta.get("zerofx_input", InputRole("other")))
    form_regions(gm, None)
    return lower(gm, {})


@pytest.fixture
def program():
    """``sin`` between two operators that end a region, as communication does."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    sine = graph.call_function(aten.sin.default, (x,))
    sine.meta["val"] = torch.empty(4)
    written = graph.call_function(aten.copy_.default, (x, sine))
    written.meta["val"] = torch.empty(4)
    cosine = graph.call_function(aten.cos.default, (sine,))
    cosine.meta["val"] = torch.empty(4)
    graph.output((cosine,))
    return fx.GraphModule({}, graph)


@pytest.mark.slow(reason="kernels are compiled")
def test_a_region_is_the_last_to_hold_what_nobody_reads_later(program):
    lowered = lowered_with_regions(program)
    (first, second) = lowered.children()
    x = torch.randn(4)
    (sine,) = first([x])
    expected = sine.cos()
    values, gone = [sine], weakref.ref(sine)
    del sine
    (cosine,) = second(values)
    assert values == [] and gone() is None
    torch.testing.assert_close(cosine, expected)


def test_the_program_has_no_name_for_a_region_s_inputs_while_it_runs(program):
    lowered = lowered_with_regions(program)
    calls = [node for node in lowered.graph.nodes if node.op == "call_module"]
    assert len(calls) == 2
    for call in calls:
        (box,) = call.args
        assert box.target is not operator.getitem and list(box.users) == [call]
    x = torch.randn(4)
    torch.testing.assert_close(lowered(x.clone())[0], x.sin().cos())


def test_a_region_may_read_a_view_of_a_larger_tensor():
    """Sizes are no symbols: the offset of a view would be one that no input defines."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.empty(8, 6).chunk(2)[1], torch.empty(6, 3)
    product = graph.call_function(aten.mm.default, (x, weight))
    product.meta["val"] = torch.empty(4, 3)
    loss = graph.call_function(aten.mean.default, (product,))
    loss.meta["val"] = torch.empty(())
    graph.output((product, loss))
    batch, weight = torch.randn(8, 6), torch.randn(6, 3)
    lowered = lowered_with_regions(fx.GraphModule({}, graph))
    found, mean = lowered(batch.chunk(2)[1], weight)
    torch.testing.assert_close(found, batch[4:] @ weight)
    torch.testing.assert_close(mean, (batch[4:] @ weight).mean())


def computed_alike(captured, **options):
    """The operators of regions that replicas have alike."""
    regions = lowered_with_regions(rewritten(captured, **options).gm).children()
    marked = [one for one in regions if compat.inductor.ALIKE in one.text]
    return {node.target for one in marked for node in one.gm.graph.nodes}


@pytest.mark.parametrize(
    ("stage", "axes"), [(0, ()), nightly(1, ()), (3, ()), nightly(1, NODES), (3, NODES)]
)
def test_regions_that_replicas_have_alike_add_up_in_one_order(stage, axes):
    """Norms of averaged gradients: Inductor would time its configurations on each rank."""
    targets = computed_alike(wide_mlp(axes=axes, clip=True), stage=stage)
    assert (aten.linalg_vector_norm.default in targets) is (stage == 0 or bool(axes))
    assert aten.mm.default not in targets, "nothing of forward and backward"


def test_so_do_those_of_gradients_that_travel_in_buckets():
    captured = mlp_step(num_layers=1, clip=True)
    targets = {node.target for node in rewritten(captured, stage=0, bucket=True).graph.nodes}
    assert ops.all_reduce_bucket_start in targets and ops.all_reduce_start not in targets
    found = computed_alike(captured, stage=0, bucket=True)
    assert aten.linalg_vector_norm.default in found and aten.mm.default not in found


@pytest.mark.parametrize("is_before", [True, False])
def test_replicas_normalise_their_weights_alike(is_before):
    """Those of a step before the update, which are of no gradient, and those after it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    @torch.no_grad()
    def normalise():
        model.weight.div_(model.weight.norm(dim=1, keepdim=True))

    def step(x):
        if is_before:
            normalise()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not is_before:
            normalise()

    captured = capture(step, torch.randn(3, 6), world_size=2)
    for stage in (0, 3):
        found = computed_alike(captured, stage=stage, bucket=True)
        assert (aten.linalg_vector_norm.default in found) is (stage == 0)


def test_they_try_no_configurations_on_an_accelerator():
    patches, meta = compat.inductor._patches, [torch.empty(2, device="meta")]
    graph = fx.Graph()
    graph.output(values := graph.placeholder("values"))
    gm = fx.GraphModule({}, graph)
    assert "deterministic" not in patches(gm, meta)
    compat.inductor.mark_alike(values)
    assert patches(gm, meta)["deterministic"]
    assert "deterministic" not in patches(gm, [torch.empty(2)]), "numbers on a CPU stay as they are"


# Memory that dies in a region is its results'.  A write, as of ``box``, ends one.


def compiled(function, *inputs):
    return lowered_with_regions(make_fx(function, tracing_mode="fake")(*inputs))


def dies(x, box):
    sine = x.sin()
    box.zero_()
    return sine.view(-1) * 2


def is_read_by_an_earlier_region_too(x, box):
    sine = x.sin()
    box.zero_()
    cosine = sine.t().cos()
    box.zero_()
    return cosine.t() + sine * 2


def is_returned(x, box):
    sine = x.sin()
    box.zero_()
    return sine * 2, sine


def has_a_view_that_is_returned(x, box):
    sine = x.sin()
    box.zero_()
    return sine * 2, sine[3:]


def has_a_view_that_is_read_later(x, box):
    sine = x.sin()
    part = sine[3:]
    box.zero_()
    double = sine * 2
    box.zero_()
    return double[3:] + part


def is_read_by_what_is_no_region(x, box):
    sine = x.sin()
    box.copy_(sine)
    return sine * 2


def is_an_input(x, box):
    box.zero_()
    return x * 2


def is_a_view_of_an_input(x, box):
    part = x.t()
    box.zero_()
    return part * 2


def equals_another(x, box):
    one, other = x.sin(), x.sin()
    box.zero_()
    double = one * 2
    box.zero_()
    return double + other


# Operators that Inductor leaves out, as they change nothing.


def is_cloned_twice(x, box):
    sine = x.sin()
    one, other = sine.clone(), sine.clone()
    box.zero_()
    double = one * 2
    box.zero_()
    return double + other


def equals_another_but_for_zeros(x, box):
    sine = x.sin()
    same = sine + torch.zeros_like(sine)
    box.zero_()
    double = sine * 2
    box.zero_()
    return double + same


def is_an_input_but_for_zeros(x, box):
    old = box + torch.zeros_like(box)
    box.zero_()
    return old * x, old


def is_one_of_three_but_for_zeros_and_ones(x, box):
    mean, rows = x.mean(0, keepdim=True), box[1:]
    same = mean + torch.zeros_like(mean)
    old = rows * torch.ones_like(rows)
    box.zero_()
    return mean * 2, same, old


def is_one_of_several_results(x, box):
    mean = torch.var_mean(x, 0)[1]
    box.zero_()
    return mean * 2


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    ("function", "donations"),
    first(
        5,
        (
            (dies, 1),
            (is_read_by_an_earlier_region_too, 2),
            (is_returned, 0),
            (has_a_view_that_is_returned, 0),
            (has_a_view_that_is_read_later, 2),
            (is_read_by_what_is_no_region, 0),
            (is_an_input, 0),
            (is_a_view_of_an_input, 0),
            (equals_another, 3),
            (is_cloned_twice, 3),
            (equals_another_but_for_zeros, 3),
            (is_an_input_but_for_zeros, 0),
            (is_one_of_three_but_for_zeros_and_ones, 1),
            (is_one_of_several_results, 1),
        ),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_read_later_is_not_written_to(function, donations):
    inputs = torch.randn(64, 64), torch.randn(64, 64)
    expected = function(*(value.clone() for value in inputs))
    lowered = compiled(function, *inputs)
    assert sum(len(region.donated) for region in lowered.children()) == donations
    for _ in range(2):
        torch.testing.assert_close(lowered(*(value.clone() for value in inputs)), expected)


def test_results_are_copied_only_where_inductor_returns_one_tensor_for_two():
    """Inputs that are freed in the first run leave their places to results: that is no sharing."""

    def consumes(x, box):
        box.zero_()
        sine = x.sin()
        product = sine @ sine
        return product, product @ sine

    sizes = 64, 64
    (region,) = compiled(consumes, torch.randn(sizes), torch.randn(sizes)).children()
    values = [torch.randn(sizes)]
    region(values)
    assert values == [] and [one.copied for one in region.compiled] == [[]]
    (first, *_) = compiled(is_cloned_twice, torch.randn(sizes), torch.randn(sizes)).children()
    first([torch.randn(sizes)])
    assert [one.copied for one in first.compiled] == [[1]]


def test_a_result_takes_the_memory_of_what_dies():
    x, box = torch.randn(64, 64), torch.randn(64, 64)
    first, second = compiled(dies, x, box).children()
    (sine,) = first([x])
    place = sine.data_ptr()
    values = [sine.view(-1)]  # as the program gives it
    del sine
    (double,) = second(values)
    assert double.data_ptr() == place
    torch.testing.assert_close(double, x.sin().view(-1) * 2)


def test_regions_that_may_not_write_are_not_taken_for_equal_ones_that_may():
    inputs = torch.randn(32, 128), torch.randn(32, 128)
    for function in (dies, is_returned, dies, is_returned):
        torch._dynamo.reset()
        found = compiled(function, *inputs)(*(value.clone() for value in inputs))
        torch.testing.assert_close(found, function(*(value.clone() for value in inputs)))


@pytest.mark.slow(reason="kernels are compiled")
def test_regions_exchange_whole_memory_and_take_their_own_views():
    def views(x, box):
        sine = x.sin()
        rows, columns = sine.view(-1), sine.t()
        box.zero_()
        return rows.sum() + columns.cos().sum()

    inputs = torch.randn(8, 4), torch.randn(8, 4)
    lowered = compiled(views, *inputs)
    (_, second) = [node for node in lowered.graph.nodes if node.op == "call_module"]
    assert len(second.args[0].args) == 1
    torch.testing.assert_close(lowered(*inputs), views(*inputs))


@pytest.mark.nightly
def test_the_user_s_settings_of_inductor_hold_in_regions(every_region_is_compiled):  # noqa: F811
    """They are a context's own in some versions, and regions are compiled in another thread."""
    seen = []
    x, box = torch.randn(5, 7), torch.randn(5, 7)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=seen.append):
        compiled(dies, x, box)(x, box)
    assert len(seen) == 2


# Whole steps, against plain eager torch


def trained(step_of, batches, make=lambda: nn.Linear(6, 4), compiles=True):
    """Losses of training on these batches, and the parameters at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = step_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = torch.compile(step, backend="zero") if compiles else step
    losses = [run(batch) for batch in batches]
    return losses, list(model.state_dict().values())


def assert_trains_as_eagerly(step_of, batches, **options):
    expected = trained(step_of, batches, compiles=False, **options)
    torch.testing.assert_close(trained(step_of, batches, **options), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "loss_of",
    first(
        1,
        [
            lambda model, x: model(x).flatten().sin().view(-1, 4).square().mean(),
            lambda model, x: torch.cat([model(x), model(x.flip(0))]).cumsum(0).softmax(0).norm(),
            lambda model, x: (model(x) @ model(x).t()).diagonal().sum() / x.shape[0],
        ],
    ),
)
def test_a_region_is_compiled_twice_however_many_sizes_come(loss_of, monkeypatch):
    """With the first sizes, and in symbols for all others; one row is another program."""
    compiled, counts = [], []
    monkeypatch.setattr(CompiledRegion, "_known", {})
    for name in ("compile_with_inductor", "compile_for_sizes"):
        original = getattr(compat.inductor, name)

        def counted(*arguments, original=original):
            compiled.append(original)
            return original(*arguments)

        monkeypatch.setattr(compat.inductor, name, counted)
    batches = [torch.randn(size, 6) for size in (3, 5, 4, 9, 2, 16, 7, 1, 6)]

    def noted():
        for batch in batches:
            counts.append(len(compiled))
            yield batch

    torch.testing.assert_close(trained(loss_of, noted()), trained(loss_of, batches, compiles=False))
    assert 0 == counts[0] < counts[1] < counts[2] == counts[7], counts
    assert compiled[0] is not compiled[counts[1]], "the second time in symbols"


@pytest.fixture
def sine(monkeypatch, every_region_is_compiled):  # noqa: F811
    """Return what makes one region of ``sin``, compiled by nothing that takes time."""
    monkeypatch.setattr(CompiledRegion, "_known", {})
    monkeypatch.setattr(
        compat.inductor, "compile_with_inductor", lambda gm, inputs, donated: gm.forward
    )

    def made():
        graph = fx.Graph()
        value = graph.call_function(operator.getitem, (graph.placeholder("values"), 0))
        value.meta["val"] = torch.ones(2)
        graph.output((graph.call_function(aten.sin.default, (value,)),))
        return CompiledRegion(fx.GraphModule({}, graph), [])

    return made


def test_equal_regions_with_inputs_of_other_dtypes_are_compiled_apart(sine):
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        sine()([torch.ones(2, dtype=dtype)])
    assert len(sine().compiled) == 2


@contextlib.contextmanager
def tf32_by_its_new_name():
    """Set it as ``TrainingArguments(tf32=True)`` does: torch raises for the old name then."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("setting", ["deterministic", "threads", "inductor", "tf32"])
def test_what_was_compiled_with_other_settings_is_not_taken(setting, sine):
    one = sine()
    one.compile_ahead()
    assert not sine().is_to_compile
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if setting == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        elif setting == "threads":
            torch.set_num_threads(threads + 1)
            stack.callback(torch.set_num_threads, threads)
        elif setting == "tf32":
            stack.enter_context(tf32_by_its_new_name())
        else:
            stack.enter_context(torch._inductor.config.patch(epilogue_fusion=False))
        other = sine()
        assert other.is_to_compile
        assert other.text == one.text, "which ranks call it by"
    assert not sine().is_to_compile


def test_tf32_by_its_new_name_goes_to_the_process_that_compiles():
    with tf32_by_its_new_name():
        found = compat.inductor.settings()
        assert compat.aot.settings() is not None, "a later start takes the program"
    compat.inductor.set_settings(found)
    try:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        compat.inductor.set_settings(found)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_what_inductor_has_assumed_of_sizes_is_checked():
    """A symbol that it takes for a number is no symbol: other sizes are compiled anew."""
    shapes = ShapeEnv()
    fakes = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    like = fakes.from_tensor(torch.empty(6), symbolic_context=dynamic)
    graph = fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    x = graph.call_function(operator.getitem, (values, 0))
    six = graph.call_function(aten.arange.default, (6,))
    graph.output((graph.call_function(aten.add.Tensor, (x, six)),))
    gm = fx.GraphModule({}, graph)
    like = [compat.inductor.Like.of(like)]
    run, holds_for = compat.inductor.compile_for_sizes(gm, [torch.ones(6)], like)
    assert holds_for([torch.ones(6)]) and not holds_for([torch.ones(7)])
    assert run([torch.ones(6)])[0].equal(torch.arange(6.0) + 1)
    part = torch.ones(7)[1:]  # as queries and values are of what one layer computes
    assert holds_for([part]), "where it lies in a storage does not matter"
    assert run([part])[0].equal(torch.arange(6.0) + 1)
    assert compat.inductor.compile_for_sizes(gm, [torch.ones(12)[::2]], like) is None


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize("times, more", ((1, -1), (1, 3), (2, 1)))
def test_a_symbol_is_found_in_what_is_linear_in_it(times, more):
    """As of `tokens[:, :-1]`, of which no input of a region has all columns."""
    shapes = ShapeEnv()
    fakes = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    given = fakes.from_tensor(torch.empty(8), symbolic_context=dynamic)
    with fakes:
        like = torch.empty(times * given.shape[0] + more, 2)
    graph = fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    x = graph.call_function(operator.getitem, (values, 0))
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    gm = fx.GraphModule({}, graph)
    first = torch.randn(times * 8 + more, 2)
    found = compat.inductor.compile_for_sizes(gm, [first], [compat.inductor.Like.of(like)])
    assert found is not None
    run, holds_for = found
    for size in (8, 11, 200):
        x = torch.randn(times * size + more, 2)
        assert holds_for([x])
        torch.testing.assert_close(run([x])[0], x.sin())
    assert times == 1 or not holds_for([torch.randn(2 * times + more + 1, 2)]), "no whole number"


def test_what_is_linear_in_a_symbol_is_read_off_its_expression():
    s, t = sympy.symbols("s t", integer=True, positive=True)
    read = compat.inductor._linear_in
    assert read(s) == (s, 1, 0) and read(3 * s) == (s, 3, 0) and read(2 * (s - 1)) == (s, 2, -2)
    nothing = (sympy.Integer(3), 3, s * t, s**2, sympy.Max(1, s - 1), s // 2, s / 2, s + t)
    assert not any(map(read, nothing))


class Gated(nn.Module):
    """Splits what a layer computes: another layer reads one part, and what follows it the other."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 600), nn.Linear(300, 300)

    def forward(self, x):
        values, gates = self.into(x).sin().chunk(2, -1)
        return self.out(values) * gates


def compilations_of_sizes():
    """How often regions have been compiled when each batch has come; on one of several ranks."""
    compiled, counts = [], []
    original = CompiledRegion._compile

    def counted(region, values):
        compiled.append(region)
        return original(region, values)

    def noted():
        for size in (3, 5, 4, 9, 2, 7):
            yield torch.randn(size, 6)
            counts.append(len(compiled))

    with mock.patch.object(CompiledRegion, "_compile", counted):
        trained(lambda model, x: model(x).square().mean(), noted(), Gated)
    return counts


@pytest.mark.nightly
def test_ranks_that_gather_compile_for_no_third_size(ranks):  # noqa: F811
    for counts in ranks(2).run(compilations_of_sizes, timeout_s=200.0):
        assert 0 < counts[0] < counts[1] == counts[-1], counts


@pytest.mark.nightly
def test_a_batch_may_lie_otherwise_in_memory_every_time():
    """Columns of wider and wider tensors: of one shape, but with a stride that is a symbol."""
    widths = (6, 8, 10, 13, 11)
    batches = [torch.randn(3, width)[:, :6] for width in widths]
    assert_trains_as_eagerly(lambda model, x: model(x * 2).square().mean() + x.sin().sum(), batches)


@pytest.mark.nightly
def test_equal_regions_with_inputs_that_lie_otherwise_are_compiled_apart():
    def sine(x, box):
        box.zero_()
        return x.sin() + 1

    straight, turned = torch.randn(5, 7), torch.randn(7, 5).t()
    region = next(compiled(sine, straight, straight.clone()).children())
    other = next(compiled(sine, straight, straight.clone()).children())
    for one, x in ((region, straight), (other, turned), (region, straight)):
        torch.testing.assert_close(one([x])[0], x.sin() + 1)


@pytest.mark.slow(reason="kernels are compiled")
@pytest.mark.parametrize(
    "joined",
    first(
        1,
        [
            lambda y: torch.cat([torch.empty(0), y.t()]).flatten(),
            lambda y: torch.cat([y.t()]).reshape(-1),
        ],
    ),
)
def test_views_of_what_inductor_lays_out_otherwise_may_be_copies(joined):
    """It makes a clone of ``cat`` of one tensor, with that one's strides."""
    weights = torch.arange(12.0)
    batches = [torch.randn(3, 6) for _ in range(2)]
    assert_trains_as_eagerly(lambda model, x: (joined(model(x)) * weights).sum(), batches)


@pytest.mark.nightly
def test_a_flex_attention_is_not_fused_and_a_line_says_so(caplog):
    torch._dynamo.reset()
    model = nn.Linear(16, 16)

    def evaluate(x):
        with torch.no_grad():
            q = model(x).view(1, 8, 2, 8).transpose(1, 2)
            return flex_attention(q, q, q)

    x = torch.randn(8, 16)
    expected = evaluate(x)
    found = torch.compile(evaluate, backend="zero", options={"lowering": "inductor"})(x)
    torch.testing.assert_close(found, expected)
    assert caplog.text.count("flex_attention runs operator by operator") == 1


@pytest.mark.nightly
def test_branches_on_a_tensor_run_beside_the_regions():
    def loss_of(model, x):
        y = model(x).sin()
        chosen = torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y.cos(), (y,))
        return chosen.square().mean()

    batches = [torch.full((3, 6), value) for value in (-2.0, 2.0, -1.0, 0.5)]
    assert_trains_as_eagerly(loss_of, batches)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, angles, mask):
        query, key, value = self.heads(self.norm(x)).chunk(3, dim=-1)
        query, key = query * angles.cos() + query.roll(1, -1) * angles.sin(), key * angles.cos()
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        return x + self.out(scores.softmax(-1) @ value)


class WithAngles(nn.Module):
    """Layers that share angles and a mask of the batch, as those of Llama."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("frequencies", torch.arange(1.0, 9.0))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, tokens):
        x, length = self.embedding(tokens), tokens.shape[1]
        positions = torch.arange(length)
        mask = (positions[:, None] >= positions) & (tokens >= 0)[:, None, :]
        for layer in self.layers:
            x = layer(x, positions[:, None] * self.frequencies, mask)
        return self.head(self.norm(x))


@pytest.mark.parametrize("layers", [3, 4])
def test_layers_that_share_angles_and_a_mask_have_equal_regions(layers, monkeypatch):
    texts = []
    init = CompiledRegion.__init__

    def noted(self, gm, donated):
        init(self, gm, donated)
        texts.append(self.text)

    monkeypatch.setattr(CompiledRegion, "__init__", noted)
    monkeypatch.setattr(CompiledRegion, "is_to_compile", False)
    monkeypatch.setattr(CompiledRegion, "forward", lambda self, values: self.run_operators(values))
    torch.manual_seed(0)
    model = WithAngles(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="zero")
    def step(tokens):
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(torch.randint(16, (2, 5)))
    of_layers = [text for text in texts if "aten._softmax.default" in text]
    backward = [text for text in texts if "aten._softmax_backward_data" in text]
    assert len(of_layers) == len(backward) == layers
    assert len(set(of_layers)) == len(set(backward)) == 1


def test_a_region_takes_a_product_as_the_shape_it_reads():
    """Its own is of two dimensions; that of another layer, which is a sum, of three."""

    def twice(x, box):
        product = x @ x
        box.zero_()
        first = product.view(2, 2, 4).sin()
        box.zero_()
        return first.sin()

    x = torch.randn(4, 4)
    program = compiled(twice, x, torch.randn(4))
    _, first, second = program.children()
    assert first.text == second.text
    out = program(x, torch.randn(4))
    torch.testing.assert_close(out, (x @ x).view(2, 2, 4).sin().sin())


def adds(x, box):
    first = x @ x
    box.zero_()
    return first + x


def adds_to_a_view(x, box):
    first = x @ x
    box.zero_()
    return first.t() + x


def looks_up(x, box):
    table = x @ x
    box.zero_()
    return torch.nn.functional.embedding(box.long()[0], table), table


def multiplies_matrices(x, box):
    first = x @ x
    box.zero_()
    return first @ x


def adds_to_itself(x, box):
    first = x @ x
    box.zero_()
    return first + first


def adds_to_itself_turned(x, box):
    first = x @ x
    box.zero_()
    return first + first.t()


def subtracts_from_a_part_of_an_input(x, box):
    first = x[:2] @ x
    box.zero_()
    return x.chunk(2)[1] - first


def adds_what_is_read_later(x, box):
    first = x @ x
    box.zero_()
    second = first + x
    box.zero_()
    return second.sin() + first


@pytest.mark.parametrize(
    ("function", "is_one", "writes"),
    [
        (adds, True, True),
        (adds_to_a_view, False, False),  # which it could not write to in order
        (dies, True, True),
        (adds_to_itself, True, True),
        (adds_to_itself_turned, False, False),  # which is written to where it is still read
        (subtracts_from_a_part_of_an_input, True, True),  # to the product, and not to the part
        (adds_what_is_read_later, True, False),
        (looks_up, False, False),  # of what another operator makes
        (multiplies_matrices, False, False),  # which a user may have tuned
    ],
)
def test_a_region_of_one_operator_is_not_compiled(function, is_one, writes):
    """It writes to the memory of what dies, if that lies as the result does."""
    x = torch.randn(4, 4)
    program = compiled(function, x, torch.randn(4))
    _, region, *_ = program.children()
    assert region.is_one_operator == is_one and region.is_to_compile != is_one
    assert any(node.kwargs.get("out") for node in region.gm.graph.nodes) == writes
    if is_one:
        given = x.clone()
        found, expected = program(given, torch.randn(4)), function(x, torch.randn(4))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(given, x, rtol=0, atol=0)


def test_a_region_of_one_operator_takes_the_memory_of_what_dies():
    x = torch.randn(4, 4)
    program = compiled(adds, x, torch.randn(4))
    _, region = program.children()
    product = x @ x
    place = product.data_ptr()
    positions = [at for at in (0, 1) if at in region.donated]
    values = [product, x.clone()] if positions == [0] else [x.clone(), product]
    del product
    (total,) = region(values)
    assert total.data_ptr() == place and values == []
    torch.testing.assert_close(total, x @ x + x)


def test_a_result_in_the_memory_of_an_input_is_no_view():
    """A user may write to it, and detach it."""
    linear, add = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    @torch.compile(backend="zero")
    def evaluate(x):
        with torch.no_grad():
            return linear(x) + add

    result = evaluate(torch.randn(2, 5, 8))
    assert not result._is_view()
    result.detach_().mul_(2)
