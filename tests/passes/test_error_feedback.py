"""Error feedback: what wires lose of a rank's gradients is added to those that it sends next."""

import functools
import math

import pytest
import torch
from torch import nn

from tests.kit import programs
from tests.kit.coded_reductions import AXES, NODES, by_the_formula, wide_mlp
from tests.kit.covering import each_pair, nightly
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    execute,
    nodes_of,
    parameter_named,
    rewritten,
    rewritten_by_rank,
    run_passes,
)
from zerofx import GraphError
from zerofx.compiler.choices import choose, stopped
from zerofx.ir import ops
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.roles import Role, role
from zerofx.verify.verifier import verify

FACTS = frozenset({"averaged_gradients", "sharded_updates"})
STEPS = 3


def on(code, **options):
    return {"reduce_wire": code, "error_feedback": 1, "process_group": AXES, **options}


def assert_is_the_formula(captured, monkeypatch, codes, feedback, **options):
    stage = options.pop("stage", 3)
    found = execute(rewritten_by_rank(captured, stage=stage, **options))
    plain = {k: v for k, v in options.items() if k == "accumulate"}
    wanted = by_the_formula(captured, monkeypatch, codes, feedback, stage=stage, **plain)
    assert_same_numerics(wanted, found)


@pytest.mark.parametrize(
    ("code", "stage"),
    each_pair(("bfloat16", "int8", "int4"), (1, 2, 3), default=[("int4", 3)]),
)
def test_computes_the_formula(code, stage, monkeypatch):
    captured = wide_mlp(num_steps=STEPS)
    options = on(code, process_group=None)
    assert_is_the_formula(captured, monkeypatch, {"data": code}, ["data"], stage=stage, **options)


@pytest.mark.parametrize(
    ("codes", "stages"),
    each_pair(
        ({"node": "int4"}, {"gpu": "int8", "node": "int4"}, {"gpu": "int4"}),
        [(1, 0), (3, 0), (2, 1), (3, 3)],
        default=[({"gpu": "int8", "node": "int4"}, (3, 0))],
    ),
    ids=str,
)
def test_each_axis_of_a_mesh_keeps_its_own(codes, stages, monkeypatch):
    stage, outer_stage = stages
    captured = wide_mlp(axes=NODES, outer_stage=outer_stage, num_steps=2)
    options = on(codes, stage=stage)
    assert_is_the_formula(captured, monkeypatch, codes, codes, **options)


@pytest.mark.nightly
def test_shards_that_nodes_do_not_divide_keep_theirs(monkeypatch):
    captured = wide_mlp(axes=(("node", 3), ("gpu", 2)), num_steps=2)
    codes = {"gpu": "int8", "node": "int8"}
    found = execute(rewritten_by_rank(captured, stage=3, **on("int8")))
    wanted = by_the_formula(captured, monkeypatch, codes, codes, stage=3)
    assert_same_numerics(wanted, found, bitwise=False)  # a product by six is rounded


@pytest.mark.nightly
def test_micro_batches_are_corrected_by_what_those_before_have_lost(monkeypatch):
    captured = wide_mlp(num_batches=2, num_steps=2)
    options = on("int8", process_group=None, bucket=False, accumulate="sharded")
    program = rewritten(captured, stage=2, **options)
    corrected = nodes_of(program, ops.correct)
    assert len(corrected) == 2 * len(nodes_of(program, ops.keep_error))
    assert sum(ops.argument(node, "rest") is not None for node in corrected) == len(corrected) / 2
    found = execute(rewritten_by_rank(captured, stage=2, **options))
    plain = {"bucket": False, "accumulate": "sharded", "stage": 2}
    wanted = by_the_formula(captured, monkeypatch, {"data": "int8"}, ["data"], **plain)
    assert_same_numerics(wanted, found)


def test_what_is_lost_is_found_while_the_wire_travels():
    assert_program(
        rewritten(one_matrix(), stage=2, **on("int4", process_group=None)),
        """
        ...
        correct = zerofx.correct(view, [0], 1600)
        quantize = zerofx.quantize(correct, 'int4', 2, [])
        all_to_all_start = zerofx.all_to_all_start(quantize, 2)
        rounding_error = zerofx.rounding_error(correct, quantize, 'int4', 2)
        keep_error = zerofx.keep_error(rounding_error, [], [0])
        wait = zerofx.wait(all_to_all_start)
        ...
        """,
    )


@functools.cache
def one_matrix(
    world_size=2, axes=(), outer_stage=0, num_steps=1, scale=None, interval=2000, sets=None
):
    """A gradient that is the batch's, whatever the parameter is; maybe scaled.

    The scale doubles behind ``interval`` updates; or else the step ``sets`` it.
    """
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(40, 40))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=interval
    )

    def step(x):
        for _ in range(num_steps):
            scaler.scale((x * w).sum()).backward()
            scaler.step(optimizer)
            scaler.update(sets)
            optimizer.zero_grad()

    return capture(
        step, torch.randn(40, 40), world_size=world_size, axes=axes, outer_stage=outer_stage
    )


class Kept(programs._Reference):
    """Keeps errors from run to run, for each rank."""

    BY_RANK: dict[int, dict] = {}

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.errors = self.BY_RANK.setdefault(self.mesh.rank, {})


@pytest.fixture
def kept(monkeypatch):
    """What ranks keep: it lasts as long as a test."""
    monkeypatch.setattr(Kept, "BY_RANK", {})
    monkeypatch.setattr(programs, "_Reference", Kept)
    return Kept.BY_RANK


def batch_in(captured, values):
    """The batch among a rank's inputs."""
    found = [
        value
        for node, value in zip(placeholders(captured.graph), values, strict=True)
        if input_role(node).kind == "other" and value.shape == (40, 40)
    ]
    (batch,) = found
    return batch


def error_of_mean(kept, captured) -> torch.Tensor:
    """What all ranks have yet to bring, as their gradient's mean, of the only parameter."""
    mesh = captured.mesh_of()
    inside = mesh.size(mesh.inner)
    total = torch.zeros(1600)
    for rank, errors in kept.items():
        for (_, axis), error in errors.items():
            if axis != mesh.inner:  # a shard of the inner axis
                numel = 1600 // inside
                total[rank % inside * numel :][:numel] += error[:numel]
            else:
                total += error
    return total.view(40, 40) / captured.world_size


@pytest.mark.parametrize(
    ("codes", "outer_stage"),
    each_pair(
        ({"node": "int4"}, {"gpu": "int4", "node": "int4"}),
        (0, 1, 2),
        default=[({"node": "int4"}, 1), ({"gpu": "int4", "node": "int4"}, 0)],
    ),
    ids=str,
)
def test_nothing_is_lost_for_good(kept, codes, outer_stage):
    """All that has been applied, and what is kept, are the sum of all exact gradients."""
    captured = one_matrix(4, NODES, outer_stage, num_steps=STEPS)
    program = rewritten_by_rank(captured, stage=2, **on(codes))
    inputs = programs.rank_inputs(captured)
    exact = -STEPS * sum(batch_in(captured, values) for values in inputs) / 4
    (found, *_) = execute(program, inputs).parameters["w"]
    assert (found - exact).abs().max() > 0.01, "it was rounded"
    torch.testing.assert_close(found - error_of_mean(kept, captured), exact, rtol=0, atol=1e-5)


def test_errors_do_not_grow(kept):
    captured = one_matrix(num_steps=1)
    program = rewritten_by_rank(captured, stage=2, **on("int4", process_group=None))
    sizes = []
    for _ in range(12):
        execute(program)
        sizes.append(max(e.abs().max().item() for of in kept.values() for e in of.values()))
    inputs = programs.rank_inputs(captured)
    largest = max(batch_in(captured, values).abs().max().item() for values in inputs)
    assert max(sizes) <= 2 * largest / 14 / (1 - 1 / 14)


# Scaled losses


def test_the_loss_scale_is_known():
    captured = one_matrix(scale=8.0)
    (scale,) = [n for n in placeholders(captured.graph) if input_role(n).is_loss_scale]
    assert scale.meta["val"].dim() == 0
    program = rewritten(captured, stage=2, **on("int4", process_group=None))
    for node in nodes_of(program, ops.correct, ops.rounding_error):
        assert ops.argument(node, "scale").op == "placeholder"
    (keep,) = nodes_of(program, ops.keep_error)
    (update,) = nodes_of(program, ops.update)
    assert ops.argument(keep, "found_inf") is ops.argument(update, "found_inf")
    assert keep < update


def test_a_number_that_a_module_calls_its_scale_is_none():
    model = nn.Linear(4, 3)
    model._scale = torch.tensor(0.5)

    def step(x):
        (model(x).square().mean() * model._scale).backward()

    captured = programs.capture(step, torch.randn(2, 4), world_size=2)
    assert not any(input_role(node).is_loss_scale for node in placeholders(captured.graph))


@pytest.mark.parametrize(("axes", "interval"), each_pair(((), NODES), (2000, 1), default=[((), 1)]))
def test_errors_are_in_units_of_gradients_that_are_not_scaled(kept, axes, interval):
    """By a power of two all is the same, bitwise; also if the scale grows within the step."""
    found = []
    for scale, grows_in in ((1.0, 2000), (1024.0, interval)):
        kept.clear()
        captured = one_matrix(4, axes, num_steps=2, scale=scale, interval=grows_in)
        program = rewritten_by_rank(captured, stage=2, **on("int4"))
        inputs = programs.rank_inputs(captured)
        generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
        for values, generator in zip(inputs, generators, strict=True):
            batch_in(captured, values).copy_(torch.randn(40, 40, generator=generator))
        (parameter, *_) = execute(program, inputs).parameters["w"]
        errors = {(r, *k): e for r, of in kept.items() for k, e in of.items()}
        found.append((parameter, errors))
    (one, its), (other, others) = found
    assert torch.equal(one, other) and its.keys() == others.keys() and its
    for key, error in its.items():
        assert error.any() and torch.equal(error, others[key])


@pytest.mark.parametrize("axes", [nightly(()), NODES])
@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_a_step_that_is_skipped_keeps_what_was_kept(kept, axes, value):
    captured = one_matrix(4, axes, scale=8.0)
    program = rewritten_by_rank(captured, stage=2, **on("int4"))
    execute(program)
    before = {(r, *k): e.clone() for r, of in kept.items() for k, e in of.items()}
    inputs = programs.rank_inputs(captured)
    batch_in(captured, inputs[2])[3, 3] = value
    for parameter in execute(program, inputs).parameters["w"]:
        assert not parameter.any(), "it was zero, and the step was skipped"
    after = {(r, *k): e for r, of in kept.items() for k, e in of.items()}
    assert before.keys() == after.keys() and before
    for key, error in before.items():
        assert error.any() and torch.equal(error, after[key])


def test_without_a_scaler_what_is_no_number_is_not_kept(kept):
    captured = one_matrix()
    program = rewritten_by_rank(captured, stage=2, **on("int4", process_group=None))
    inputs = programs.rank_inputs(captured)
    batch_in(captured, inputs[1])[3, 3] = math.inf
    execute(program, inputs)
    for errors in kept.values():
        assert all(error.isfinite().all() for error in errors.values())


@functools.cache
def two_matrices():
    """One with a loss scale, and before and behind it one without, computed with the other's."""
    w, v = nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(40, 40))
    scaled, plain = torch.optim.SGD([w], lr=1.0), torch.optim.SGD([v], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        scaler.scale((x * w).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        (x * v * w.detach()).sum().backward()
        plain.step()
        plain.zero_grad()

    return capture(step, torch.randn(40, 40), world_size=2)


@pytest.mark.parametrize("stage", (2, 3))
def test_a_gradient_that_no_scaler_has_scaled_is_corrected_as_it_is(stage):
    program = rewritten(two_matrices(), stage=stage, **on("int4", process_group=None))
    scales = {
        tuple(ops.argument(node, "parameters")): ops.argument(node, "scale")
        for node in nodes_of(program, ops.correct)
    }
    of_w, of_v = (parameter_named(program, name).index for name in "wv")
    assert scales[of_w,].op == "placeholder" and scales[of_v,] is None
    for node in nodes_of(program, ops.rounding_error):
        assert ops.argument(node, "scale") is ops.argument(node.args[0], "scale")


def test_a_scale_that_the_step_sets_is_counted():
    captured = clone(one_matrix(scale=8.0, sets=4.0))
    options = {"reduce_wire": "int8", "error_feedback": 1}
    counts = run_passes(captured, stage=2, **options)["quantize_reductions"].counts
    assert counts["without feedback: a loss scale that the step sets"] == 1
    assert not nodes_of(captured, ops.correct)


# Options


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"reduce_wire": "int4"}, (False, True)),
        ({"reduce_wire": {"gpu": "int8"}}, (False, False)),
        ({"reduce_wire": {"node": "bfloat16"}}, (False, False)),
        ({"reduce_wire": "int8", "error_feedback": 0}, (False, False)),
        ({"reduce_wire": "int8", "error_feedback": True}, (True, True)),
        ({"reduce_wire": {"node": "int8"}, "error_feedback": 1}, (False, True)),
        ({"reduce_wire": {"gpu": "int8"}, "error_feedback": 1}, (True, False)),
        ({"reduce_wire": "int8", "error_feedback": {"gpu": 1, "node": 0}}, (True, False)),
        ({"reduce_wire": "int8", "error_feedback": "gpu:1"}, (True, True)),
    ],
    ids=str,
)
def test_it_is_on_between_nodes_by_default(options, expected):
    assert choose({"process_group": AXES, **options}, {}).feeds_back == expected


def test_the_environment_has_it_too():
    environ = {"ZEROFX_ERROR_FEEDBACK": "node:0,gpu:1", "ZEROFX_REDUCE_WIRE": "int8"}
    assert choose({"process_group": AXES}, environ).feeds_back == (True, False)
    environ["ZEROFX_ERROR_FEEDBACK"] = "0"
    assert choose({"process_group": AXES}, environ).feeds_back == (False, False)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"error_feedback": 1}, "error_feedback keeps what a reduce_wire loses"),
        (
            {"error_feedback": {"gpu": 1}, "reduce_wire": {"node": "int8"}},
            "is on over an axis that has none",
        ),
        ({"error_feedback": {"rack": 1}, "reduce_wire": "int8"}, "names rack, and the mesh"),
        ({"error_feedback": 2, "reduce_wire": "int8"}, "error_feedback must be one of 0, 1"),
        (
            {"error_feedback": {"gpu": "maybe"}, "reduce_wire": "int8"},
            "error_feedback of axis 'gpu' must be one of 0, 1",
        ),
        ({"error_feedback": {0: 1}, "reduce_wire": "int8"}, "must give axes of a mesh, by name"),
        ({"error_feedback": 1.5, "reduce_wire": "int8"}, "error_feedback must be 0 or 1, or a"),
    ],
    ids=range(7),
)
def test_what_cannot_be_is_refused_in_words(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        choose({"process_group": AXES, **options}, {})


def test_a_step_that_stops_before_the_pass_keeps_nothing():
    options = choose({"reduce_wire": "int8", "error_feedback": 1, "stop_after": "bucket"}, {})
    assert stopped(options).feeds_back == (False, False)


def test_what_cannot_be_corrected_is_counted():
    captured = wide_mlp(num_batches=2)
    options = {"accumulate": "sharded", "bucket": True, "reduce_wire": "int8", "error_feedback": 1}
    counts = run_passes(clone(captured), stage=2, **options)["quantize_reductions"].counts
    assert counts["without feedback: reduced in several ways"] == 3
    program = rewritten(captured, stage=2, **options)
    assert len(nodes_of(program, ops.correct)) == 2


# Bugs


def planted(axes=NODES, **options):
    captured = wide_mlp(axes=axes)
    program = rewritten(captured, stage=2, bucket=True, **on("int8", **options))
    verify(program.gm, program.table, FACTS)
    return program


def refused(program, words):
    with pytest.raises(GraphError, match=words):
        verify(program.gm, program.table, FACTS)


def test_an_error_that_is_not_added_is_refused():
    program = planted()
    corrected = nodes_of(program, ops.correct)[0]
    with program.graph.inserting_before(corrected):
        given = (corrected.args[0], corrected.args[1], corrected.args[2])
        filled = program.graph.call_function(ops.fill_up, given)
        filled.meta = dict(corrected.meta)
    corrected.replace_all_uses_with(filled)
    program.graph.erase_node(corrected)
    refused(program, "to which no error was added before")


def test_an_error_that_is_added_to_what_is_not_sent_is_refused():
    program = planted()
    corrected = nodes_of(program, ops.correct)[0]
    (wire,) = [reader for reader in corrected.users if role(reader) == Role.GRADIENT_WIRE]
    wire.replace_input_with(corrected, corrected.args[0])
    refused(program, "is sent by 0 wires|is not of what .* was made of")


def test_an_error_that_is_not_kept_is_refused():
    program = planted()
    program.graph.erase_node(nodes_of(program, ops.keep_error)[0])
    refused(program, "is lost for good: nothing keeps it")


def test_an_error_that_is_not_found_is_refused():
    program = planted()
    keep = nodes_of(program, ops.keep_error)[0]
    rest, sums = keep.args[:2]
    program.graph.erase_node(keep)
    for node in (rest, *sums):
        program.graph.erase_node(node)
    refused(program, "0 of whose errors are found")


def test_an_error_of_another_bucket_is_refused():
    program = planted()
    for node in nodes_of(program, ops.correct):
        node.update_arg(1, [2] if node.args[1] != [2] else [0, 1])
    refused(program, "adds errors of other parameters than")
    program = planted()
    keep = nodes_of(program, ops.keep_error)[0]
    keep.update_arg(2, [0] if keep.args[2] == [2] else [2])
    refused(program, "is kept of other parameters than it was lost of")


def test_an_error_over_another_axis_is_refused():
    program = planted()
    corrected = nodes_of(program, ops.correct)[0]
    corrected.kwargs = {**corrected.kwargs, "axis": "node"}
    refused(program, "adds errors over node to what is sent over gpu")
    program = planted()
    keep = nodes_of(program, ops.keep_error)[0]
    other = {"gpu": "node", "node": "gpu"}[keep.kwargs["axis"]]
    keep.kwargs = {**keep.kwargs, "axis": other}
    refused(program, "what is corrected over another axis")


def test_a_sums_error_that_is_not_kept_is_refused():
    program = planted()
    keep = next(node for node in nodes_of(program, ops.keep_error) if node.args[1])
    keep.update_arg(1, [])
    refused(program, "is lost for good|does not keep what sums have lost")


@pytest.mark.parametrize("position, value", ((2, "int4"), (3, 4)))
def test_an_error_in_another_code_is_refused(position, value):
    program = planted()
    lost = nodes_of(program, ops.rounding_error)[0]
    lost.update_arg(position, value)
    refused(program, "reads .* as .* in . parts")


def test_an_error_in_other_units_is_refused():
    program = rewritten(one_matrix(scale=8.0), stage=2, **on("int4", process_group=None))
    verify(program.gm, program.table, FACTS)
    (lost,) = nodes_of(program, ops.rounding_error)
    lost.kwargs = {}
    refused(program, "is not by the scale that gradients have been multiplied by")
