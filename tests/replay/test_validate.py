"""``validate``: every pass's program is run beside the one before it, and a fault has a name."""

import functools
import re

import pytest
import torch
from torch import fx, nn

import zerofx
from tests.kit import models
from tests.kit.coded_reductions import wide_mlp
from tests.kit.covering import each_pair, each_value, first, only
from tests.kit.programs import capture, clone, context_of, mlp_step
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.replay.test_dumped_programs import two_optimizers_step
from zerofx.capture import substitutes
from zerofx.errors import ValidationError
from zerofx.options import OPTIONAL_PASSES
from zerofx.passes.base import Pass
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.replay.validate import Validator
from zerofx.report.optimizers import describe

FILES = {"offload_tier": "nvme", "offload_dir": "scratch"}
OFFLOADS = {
    "nothing": {},
    "optimizer": {"offload": "optimizer"},
    "params": {"offload": "optimizer,params"},
    "activations": {"offload": "activations"},
    "everything": {"offload": "optimizer,params,activations"},
    "everything in files": {"offload": "optimizer,params,activations", **FILES},
}
OFF = {"none": (), "all": OPTIONAL_PASSES, **{name: (name,) for name in OPTIONAL_PASSES}}


@functools.cache
def gathering_step():
    """Micro-batches in a loop under autocast, summed, clipped by value; the gradients stay."""
    torch.manual_seed(0)
    model = models.Mlp()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)

    def step(*batch):
        for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = models.squared_loss(model, *part)
            loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    return capture(step, *models.features(0, 4), world_size=2)


@functools.cache
def short_language_step():
    """A checkpointed block with a tied head under autocast, clipped by norm."""
    torch.manual_seed(0)
    model = models.Gpt(checkpoint=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))

    def step(*batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.language_loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *models.tokens(0, 2), world_size=2)


STEPS = {
    "mlp": mlp_step,
    "language": short_language_step,
    "two optimizers": two_optimizers_step,
    "gathering": gathering_step,
}


PLACES = [(stage, "nothing") for stage in range(4)] + [(stage, "activations") for stage in range(4)]
PLACES += [(stage, "optimizer") for stage in (1, 2, 3)]
PLACES += [(3, "params"), (3, "everything"), (3, "everything in files")]
"""Stages and what leaves the device at them."""


def validated(step, pipeline=PIPELINE, **options):
    """Run these passes over a copy of a captured step, and compare behind each."""
    program = clone(step)
    names = {id(t): info.name for t, info in zip(step.tensors, program.table, strict=True)}
    described = {h: describe(substitutes.optimizer_of(h), names) for h in step.optimizers}
    ctx = context_of(program, **{"bucket": True, "lowering": "inductor", **options})
    validator = Validator(program.gm, ctx, pipeline, described)
    compared = []

    def check(name, gm, report):
        validator(name, gm, report)
        compared.append(name)

    reports = run_pipeline(program.gm, ctx, pipeline, check)
    assert compared == ["captured", *(r.name for r in reports if not r.skipped)]
    return compared


def check_that_no_pass_changes(name, stage, offload, off, world_size):
    passes = {name: name not in OFF[off] for name in OPTIONAL_PASSES}
    options = {**passes, "stage": stage, **OFFLOADS[offload]}
    assert len(validated(clone(STEPS[name](), world_size), **options)) > 1


def test_a_frozen_parameter_of_whole_numbers_is_one_there_too():
    model = nn.Linear(4, 3)
    model.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)

    def step(x):
        model(x * model.mask).square().mean().backward()
        optimizer.step()

    options = {"validate": True, "lowering": "eager"}
    before = model.weight.detach().clone()
    torch.compile(step, backend="zero", options=options)(torch.randn(2, 4))
    with zerofx.full_params(model):
        assert not torch.equal(model.weight, before)


@pytest.mark.slow(reason="a pipeline validated pass by pass on three ranks")
@pytest.mark.parametrize(
    ("place", "off", "world_size", "name"),
    only(
        [
            ((0, "nothing"), "none", 1, "mlp"),
            ((1, "nothing"), "all", 2, "gathering"),
            ((3, "nothing"), "hoist_casts", 1, "mlp"),
            ((0, "activations"), "bucket", 2, "gathering"),
        ],
        each_value(PLACES, OFF, (1, 2, 3), ("mlp", "gathering", "language")),
    ),
)
def test_no_pass_changes_what_a_step_computes(place, off, world_size, name):
    check_that_no_pass_changes(name, *place, off, world_size)


@pytest.mark.parametrize(
    ("stage", "off", "world_size"),
    only([(1, "update_in_backward", 2)], each_value(range(4), OFF, (1, 2))),
)
def test_no_pass_changes_what_muon_computes(stage, off, world_size):
    check_that_no_pass_changes("two optimizers", stage, "nothing", off, world_size)


def planted(change, name="planted", **declared):
    """The pipeline with a pass behind ``shard_gradients`` that makes this of the program."""

    def run(gm: fx.GraphModule, ctx) -> dict:
        change(gm.graph)
        return {}

    at = [step.name for step in PIPELINE].index("shard_gradients") + 1
    return (*PIPELINE[:at], Pass(run, name, **declared), *PIPELINE[at:])


def doubled(graph, target):
    node = next(node for node in graph.nodes if node.target is target)
    with graph.inserting_after(node):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    twice.meta = dict(node.meta)
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)


def activation_doubled(graph):
    doubled(graph, torch.ops.aten.gelu.default)


def backward_doubled(graph):
    doubled(graph, torch.ops.aten.gelu_backward.default)


@pytest.mark.parametrize("change", (activation_doubled, backward_doubled))
def test_a_fault_is_told_with_its_pass_and_the_first_node_that_differs(change):
    with pytest.raises(ValidationError) as told:
        validated(mlp_step(), planted(change), stage=2)
    message = str(told.value)
    assert "pass 'planted' has changed what the step computes" in message
    assert "on rank 0 is not what it was" in message and "should be bitwise" in message
    line = "loss = model(x)" if change is activation_doubled else "loss.backward()"
    assert re.search(rf"that node '\w+', of .*programs.py:\d+ {re.escape(line)}", message), message


@pytest.mark.nightly
def test_what_rounds_otherwise_is_told_from_what_is_wrong():
    """A norm of shards is summed in another order: the pass says so, and is believed that far."""
    clipped = short_language_step()
    assert "shard_optimizer" in validated(clipped, stage=1)


def micro_batches_step(make_optimizer):
    """A layer wide enough for some gradients to be nearly zero, summed over micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = make_optimizer(model.parameters())

    def step(x):
        for part in x.chunk(4):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(16, 256), world_size=2)


@pytest.mark.nightly
def test_rounding_that_an_update_amplifies_is_no_fault():
    """Adam's first step is as large for a gradient that is rounding alone as for any other."""
    step = micro_batches_step(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    assert "data_parallel" in validated(step, stage=0)


@pytest.mark.slow(reason="a pipeline validated pass by pass")
@pytest.mark.parametrize("make_optimizer", first(1, (torch.optim.AdamW, torch.optim.SGD)))
def test_a_pass_that_may_round_may_not_change_a_gradient(make_optimizer):
    """Not even one that moves no parameter by more than its rounding."""
    step = micro_batches_step(lambda parameters: make_optimizer(parameters, lr=1e-7))
    pipeline = planted(backward_doubled, preserves_numerics=False)
    with pytest.raises(
        ValidationError, match=r"the gradient that \w+ is given for 0\.weight"
    ) as told:
        validated(step, pipeline, stage=2)
    assert "should be but for rounding" in str(told.value)


@pytest.mark.slow(reason="a pipeline validated pass by pass")
@pytest.mark.parametrize("name", first(1, ("gathering", "mlp", "language")))
def test_what_is_rounded_to_travel_is_told_from_what_is_wrong(name):
    compared = validated(STEPS[name](), stage=3, gather_dtype="int8")
    assert "quantize_gathers" in compared and "form_regions" in compared


@pytest.mark.slow(reason="a pipeline validated pass by pass")
@pytest.mark.parametrize("code", first(1, ("int4", "int8", "bfloat16")))
def test_gradients_that_are_rounded_to_travel_are_told_from_wrong_ones(code):
    compared = validated(wide_mlp(), stage=3, reduce_wire=code, error_feedback=1)
    assert "quantize_reductions" in compared and "form_regions" in compared


def test_a_pass_that_quantises_may_not_double_a_gradient():
    pipeline = planted(backward_doubled, preserves_numerics=False, quantizes="gather_dtype")
    with pytest.raises(ValidationError, match="should be but for rounding"):
        validated(mlp_step(), pipeline, stage=2)


@functools.cache
def goes_on_step(clip=False):
    """A step that adds to gradients that have come in, and leaves the sums."""
    torch.manual_seed(0)
    model = models.Mlp()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(*batch):
        models.squared_loss(model, *batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return capture(step, *models.features(0, 4), world_size=2)


@pytest.mark.parametrize("accumulate", first(1, ("local", "sharded")))
@pytest.mark.parametrize(
    ("stage", "clip"),
    each_pair(range(4), (False, True), default=[(1, False), (3, True)]),
)
def test_gradients_that_come_in_and_stay_are_compared(accumulate, clip, stage):
    assert len(validated(goes_on_step(clip), stage=stage, accumulate=accumulate)) > 1


# Where shards come in, the verifier lets nothing but their readers read them.
@pytest.mark.parametrize(
    "accumulate, stage",
    only(
        (("local", 2), ("sharded", 1)), [*(("local", stage) for stage in range(4)), ("sharded", 1)]
    ),
)
def test_a_gradient_that_comes_in_may_not_be_forgotten(accumulate, stage):
    pipeline = planted(what_came_in_forgotten)
    with pytest.raises(ValidationError, match=r"the gradient of \w+\.\w+ on rank 0"):
        validated(goes_on_step(), pipeline, stage=stage, accumulate=accumulate)


def what_came_in_forgotten(graph):
    """Nothing is read of the first gradient that has come in."""
    came_in = next(node for node in graph.nodes if node.name.startswith("gradient_"))
    reader = next(user for user in came_in.users if user.op == "call_function")
    with graph.inserting_before(reader):
        forgotten = graph.call_function(torch.ops.aten.mul.Tensor, (came_in, 0.0))
    forgotten.meta = {key: value for key, value in came_in.meta.items() if key == "val"}
    position = 1 if reader.target is torch.ops.aten.copy_.default else 0
    reader.update_arg(position, forgotten)


def test_nothing_but_nan_is_no_proof(caplog):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x - x.abs() - 1).log().sum().mul(float("nan")).backward()
        optimizer.step()

    validated(capture(step, torch.ones(2, 4), world_size=2), stage=0)
    assert "validate has nothing to compare" in caplog.text


def test_more_ranks_than_a_process_runs_are_refused():
    model = nn.Linear(4, 4)

    def step(x):
        model(x).sum().backward()

    captured = capture(step, torch.ones(2, 4), world_size=9)
    with pytest.raises(
        ValidationError, match=r"all 9 ranks .* up to 8\. Validate the step on fewer"
    ):
        validated(captured, stage=0)


def test_an_optimizer_that_nothing_can_import_is_stood_in_for():
    class Local(torch.optim.SGD):
        pass

    model = nn.Linear(4, 4)
    optimizer = Local(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()

    assert len(validated(capture(step, torch.ones(2, 4), world_size=2), stage=3)) > 2


def train(validate):
    """A ragged model on these ranks, the last batch longer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"lowering": "eager", "validate": validate}
    compiled = torch.compile(step, backend="zero", options=options)
    return [compiled(torch.randn(rows, 5)).item() for rows in (4, 4, 6)]


@pytest.mark.nightly
def test_the_option_validates_and_changes_nothing(ranks):
    (without, other), (with_it, other_too) = (ranks(2).run(train, on) for on in (False, True))
    assert with_it == without and other_too == other


def train_across_calls(validate):
    """Two functions, between which a gradient is left as each rank has computed it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def collect(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def finish(x):
        loss = collect(x)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"lowering": "eager", "accumulate": "local", "validate": validate}
    steps = [torch.compile(step, backend="zero", options=options) for step in (collect, finish)]
    rank = torch.distributed.get_rank()
    return [step(torch.full((4, 5), 1.0 + rank + n)).item() for n in range(2) for step in steps]


@pytest.mark.nightly
def test_gradients_that_cross_calls_unreduced_are_validated(ranks):
    (without, other), (with_it, other_too) = (
        ranks(2).run(train_across_calls, on) for on in (False, True)
    )
    assert with_it == without and other_too == other
