"""``validate``: every pass's program is run beside the one before it, and a fault has a name."""

import re

import pytest
import torch
from torch import fx, nn

from tests.programs import capture, clone, context_of, mlp_step
from tests.ranks import ranks_fixture  # noqa: F401
from tests.test_dumped_programs import EVERYTHING, language_step, two_optimizers_step
from zerofx import traced
from zerofx.errors import ValidationError
from zerofx.optimizer_facts import describe
from zerofx.passes.base import Pass
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.validate import Validator

FILES = {"offload_tier": "nvme", "offload_dir": "scratch"}
EVERYWHERE = {"offload": "optimizer,params,activations", "prefetch_across_steps": False, **FILES}
FORMS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "across calls": {"stage": 3, "accumulate": "local"},
    "files": {"stage": 3, **EVERYWHERE},
}
STEPS = {"mlp": mlp_step, "language": language_step, "two optimizers": two_optimizers_step}
QUICK = [("mlp", "files"), ("mlp", "stage 2"), ("language", "stage 3"), ("mlp", "across calls")]
QUICK += [("two optimizers", "stage 1"), ("mlp", "stage 0")]


def validated(step, pipeline=PIPELINE, **options):
    """Run these passes over a copy of a captured step, and compare behind each."""
    program = clone(step)
    names = {id(t): info.name for t, info in zip(step.tensors, program.table, strict=True)}
    described = {h: describe(traced.optimizer_of(h), names) for h in step.optimizers}
    ctx = context_of(program, bucket=True, **options)
    validator = Validator(program.gm, ctx, pipeline, described)
    compared = []

    def check(name, gm, report):
        validator(name, gm, report)
        compared.append(name)

    reports = run_pipeline(program.gm, ctx, pipeline, check)
    assert compared == ["captured", *(r.name for r in reports if not r.skipped)]
    return compared


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.long)
        for pair in [(name, form) for name in STEPS for form in FORMS]
        # Muon's updates cannot run on the host.
        if pair != ("two optimizers", "files")
    ],
)
def test_no_pass_changes_what_a_step_computes(name, form):
    options = {**EVERYTHING, **FORMS[form]}
    options.pop("bucket")
    assert len(validated(STEPS[name](), **options)) > 2


def planted(change, name="planted"):
    """The pipeline with a pass behind ``shard_gradients`` that makes this of the program."""

    def run(gm: fx.GraphModule, ctx) -> dict:
        change(gm.graph)
        return {}

    at = [step.name for step in PIPELINE].index("shard_gradients") + 1
    return (*PIPELINE[:at], Pass(name, run), *PIPELINE[at:])


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


def test_what_rounds_otherwise_is_told_from_what_is_wrong():
    """A norm of shards is summed in another order: the pass says so, and is believed that far."""
    clipped = language_step()
    assert "shard_optimizer" in validated(clipped, stage=1)


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
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"lowering": "eager", "accumulate": "local", "validate": validate}
    steps = [torch.compile(step, backend="zero", options=options) for step in (collect, finish)]
    rank = torch.distributed.get_rank()
    return [step(torch.full((4, 5), 1.0 + rank + n)).item() for n in range(2) for step in steps]


def refused_across_calls():
    with pytest.raises(Exception, match="accumulate='local' has left unreduced"):
        train_across_calls(True)
    return True


def test_gradients_that_cross_calls_unreduced_are_refused_with_words(ranks):
    assert ranks(2).run(refused_across_calls) == [True, True]
