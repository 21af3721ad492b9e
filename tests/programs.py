"""Trace, rewrite, print and run programs in one process: no process group, no collectives.

``capture`` takes the path a user's step takes, up to the passes.  ``execute`` is an independent
reference: it interprets a program node by node for all ranks at once and runs the optimizers'
own ``step``.  What a correct program never looks at holds NaN: freed memory, a collective's
result before its wait, and the padding of shards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat, ops, traced
from zerofx.capture import CapturedStep, StepCapture
from zerofx.graph import gradient_outputs, input_role, placeholders
from zerofx.options import resolve
from zerofx.passes.base import PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.plan import ParameterInfo, ParameterTable

aten = torch.ops.aten


# Capture


@dataclass(frozen=True)
class Captured(CapturedStep):
    """A captured step and what capture saw as its inputs.

    ``live`` keeps optimizers alive, ``after_passes`` what ``rewritten`` has made of this step.
    """

    inputs: tuple[Any, ...] = ()
    world_size: int = 1
    live: Any = None
    after_passes: dict[str, Captured] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph


class _Stop(Exception):
    """Ends a call of a captured step where its program would run."""

    def __init__(self, step: CapturedStep, inputs: Sequence[Any]):
        super().__init__()
        self.step, self.inputs = step, tuple(inputs)


class _CapturingBackend:
    """The zero backend up to the passes."""

    __name__ = "capturing"

    def __init__(self, world_size: int):
        compat.forward_call_context()
        self.world_size = world_size

    def call_context(self, _arguments) -> Callable:
        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with compat.whole_step_tracing(self, traced.SUBSTITUTES):
                yield

        return context

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_arguments) -> Callable:
        def stop_before_running(step: CapturedStep) -> Callable:
            def run(inputs: list[Any]):
                raise _Stop(step, inputs)

            run._boxed_call = True
            return run

        try:
            capture = StepCapture(gm, inputs, 0, self.world_size, lambda tensor: None)
            return capture.lower(stop_before_running)
        except Exception as error:
            raise compat.pass_through_dynamo(error) from error.__cause__


def capture(step: Callable, *args: Any, world_size: int = 4) -> Captured:
    """Trace ``step(*args)`` as the zero backend does; nothing of it runs."""
    torch.compiler.reset()
    try:
        torch.compile(step, backend=_CapturingBackend(world_size))(*args)
    except _Stop as stop:
        captured, inputs = stop.step, stop.inputs
    else:
        raise AssertionError("the step was not compiled")
    fields = {field.name: getattr(captured, field.name) for field in dataclasses.fields(captured)}
    live = [traced.optimizer_of(handle) for handle in captured.optimizers]
    return Captured(**fields, inputs=inputs, world_size=world_size, live=live)


def clone(captured: Captured, world_size: int | None = None) -> Captured:
    """A copy whose program can be rewritten by itself, for another world size if given."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(captured.graph, copies)
    graph.output(results)
    graph.output_node().meta = dict(captured.graph.output_node().meta)
    world_size = world_size or captured.world_size
    infos = [dataclasses.replace(info, world_size=world_size) for info in captured.table]
    return dataclasses.replace(
        captured,
        gm=fx.GraphModule(captured.gm, graph),
        table=ParameterTable(tuple(infos)),
        world_size=world_size,
        after_passes={},
    )


def keeping_result(captured: Captured, position: int) -> Captured:
    """A copy that returns only one of the step's results, without what only the others needed."""
    result = clone(captured)
    output = result.graph.output_node()
    output.args = ((output.args[0][position],),)
    result.graph.eliminate_dead_code()
    return result


def context_of(captured: Captured, rank: int = 0, stage: int = 3, **options: object) -> PassContext:
    """The facts that a pass is given.  Without buckets unless asked for: one story at a time."""
    return PassContext(
        resolve({"stage": stage, "bucket": False, **options}, {}),
        captured.table,
        rank,
        captured.world_size,
        captured.num_backwards,
    )


def run_passes(
    captured: Captured,
    rank: int = 0,
    world_size: int | None = None,
    stage: int = 3,
    until: str | None = None,
    on_program: Callable | None = None,
    **options: object,
) -> dict[str, PassReport]:
    """Rewrite the captured program in place, up to and with the pass ``until``; reports by name.

    ``world_size`` is the one it was captured for; another needs ``clone(captured, world_size)``.
    """
    if world_size not in (None, captured.world_size):
        raise ValueError(f"captured for {captured.world_size} ranks, not {world_size}")
    names = [step.name for step in PIPELINE]
    pipeline = PIPELINE[: names.index(until) + 1] if until else PIPELINE
    ctx = context_of(captured, rank, stage, **options)
    return {report.name: report for report in run_pipeline(captured.gm, ctx, pipeline, on_program)}


def rewritten(captured: Captured, world_size: int | None = None, **arguments) -> Captured:
    """A copy of the captured step after its passes; takes what ``run_passes`` takes."""
    key = f"{world_size or captured.world_size} {sorted(arguments.items())}"
    if key not in captured.after_passes:
        result = clone(captured, world_size)
        run_passes(result, **arguments)
        captured.after_passes[key] = result
    return clone(captured.after_passes[key])


# Steps that several tests look at


@functools.cache
def smallest_step() -> Captured:
    """One matrix, one product, plain SGD, on two ranks."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 4), world_size=2)


@functools.cache
def mlp_step(num_layers: int = 3, width: int = 5, clip: bool = False) -> Captured:
    """Linear layers with GELU between them, AdamW, maybe clipped by the global norm."""
    torch.manual_seed(0)
    layers = [[nn.Linear(width, width), nn.GELU()] for _ in range(num_layers)]
    model = nn.Sequential(*sum(layers, [])[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, width), world_size=2)


@functools.cache
def evaluation() -> Captured:
    """A forward pass without gradients or updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def evaluate(x):
        with torch.no_grad():
            return model(x).sum()

    return capture(evaluate, torch.randn(2, 5), world_size=2)


# Reading


def name_of(target: object) -> str:
    """``mm`` for an aten operator, ``zerofx.wait`` for one of ours."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
        return f"zerofx.{name}" if ops.is_ours(target) else name
    return getattr(target, "__name__", str(target))


def listing(captured: Captured) -> str:
    """The program, one statement per line, with names that no torch version chooses.

    An input is called after its parameter, an optimizer after its class, everything else after
    its operator, numbered in program order.
    """
    names: dict[fx.Node, str] = {}
    taken: Counter[str] = Counter()

    def give_name(node: fx.Node, wish: str) -> str:
        names[node] = f"{wish}_{taken[wish]}" if taken[wish] else wish
        taken[wish] += 1
        return names[node]

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    lines = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            role = input_role(node)
            what = "shard of " if role.sharded else ""
            if role.parameter < 0:
                name = give_name(node, "input" if role.kind == "other" else role.kind)
            else:
                of = captured.table[role.parameter].name.replace(".", "_")
                name = give_name(node, of if role.kind == "parameter" else f"{of}_grad")
            lines.append(f"{name}: {what}{role.kind} {list(node.meta['val'].shape)}")
        elif node.op == "output":
            lines.append(f"return {show(node.args[0])}")
        else:
            arguments = [show(argument) for argument in node.args]
            if node.target in (ops.optimizer_step, ops.update):
                arguments[2] = type(traced.optimizer_of(node.args[2])).__name__
            arguments += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
            target = name_of(node.target)
            called = f"{target}({', '.join(arguments)})"
            if target == "zerofx.free":
                lines.append(called)
            else:
                lines.append(f"{give_name(node, target.removeprefix('zerofx.'))} = {called}")
    return "\n".join(lines) + "\n"


def assert_program(captured: Captured, expected: str) -> None:
    """The listing consists of exactly these statements; a line ``...`` stands for any others."""
    pattern = ""
    for line in textwrap.dedent(expected).strip().splitlines():
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.strip()) + r"\n"
    program = listing(captured)
    assert re.fullmatch(pattern, program), f"expected:\n{expected}\nbut the program is:\n{program}"


def nodes_of(captured: Captured, *targets: object) -> list[fx.Node]:
    """The program's calls of these operators, in order."""
    return [node for node in captured.graph.nodes if node.target in targets]


def parameter_named(captured: Captured, name: str) -> ParameterInfo:
    """The parameter's entry of the table."""
    (info,) = [info for info in captured.table if info.name == name]
    return info


def gathers_of(captured: Captured, name: str) -> list[fx.Node]:
    """The starts of the all-gathers of one parameter."""
    index = parameter_named(captured, name).index
    starts = nodes_of(captured, ops.all_gather_start)
    return [node for node in starts if node.meta["zerofx"].parameter == index]


def gathered_bytes(captured: Captured) -> list[int]:
    """Gathered bytes alive after each node: from an all-gather's start to its free.

    Memory that is never freed is alive to the end.
    """
    alive, timeline = 0, []
    for node in captured.graph.nodes:
        if node.target is ops.all_gather_start:
            alive += _bytes_of(node)
        elif node.target is ops.free:
            alive -= _bytes_of(node.args[0])
        timeline.append(alive)
    return timeline


def _bytes_of(node: fx.Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].element_size()


# Running


@dataclass
class Execution:
    """What a program left behind, by rank; sharded values put together.

    ``gradients`` are the results that become some ``p.grad``.
    """

    results: list[list[Any]]
    parameters: dict[str, list[torch.Tensor]]
    gradients: dict[str, list[torch.Tensor]]
    buffers: list[list[torch.Tensor]]

    def tensors(self) -> list[torch.Tensor]:
        found = [t for per_rank in self.results for t in per_rank if isinstance(t, torch.Tensor)]
        for by_name in (self.parameters, self.gradients):
            found += [tensor for per_rank in by_name.values() for tensor in per_rank]
        return found + [tensor for per_rank in self.buffers for tensor in per_rank]


def rank_inputs(captured: Captured) -> list[list[Any]]:
    """Inputs for every rank: rank 0's are the captured ones, the others get another batch."""
    everyone = []
    for rank in range(captured.world_size):
        generator = torch.Generator().manual_seed(1000 + rank)
        values: list[Any] = []
        for node, value in zip(placeholders(captured.graph), captured.inputs, strict=True):
            own_batch = input_role(node).kind == "other" and rank > 0
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
                if own_batch and value.dim() > 0:
                    value = _another(value, generator)
            values.append(value)
        everyone.append(values)
    return everyone


def _another(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    order = torch.randperm(value.numel(), generator=generator)
    return value.flatten()[order].view(value.shape)


def execute(captured: Captured, inputs: Sequence[Sequence[Any]] | None = None) -> Execution:
    """Run the program for all ranks in lock-step.

    A gradient that no pass has averaged yet is averaged where it is marked: the meaning of a
    captured program under data parallelism.

    Raises: AssertionError if a collective's input changes between its start and its wait, or if
    a parameter or an averaged gradient comes out different on two ranks.
    """
    with torch.no_grad():
        return _Machine(captured).run(inputs or rank_inputs(captured))


def shards_of(whole: torch.Tensor, info: ParameterInfo, padding: float) -> list[torch.Tensor]:
    """Every rank's flat shard, cut from the definition: flatten in storage order, pad, chunk."""
    flat = whole.permute(info.storage_order).reshape(-1)
    fill = flat.new_full((info.place.extent - info.numel,), padding)
    return [shard.clone() for shard in torch.cat([flat, fill]).chunk(info.world_size)]


def whole_of(shards: Sequence[torch.Tensor], info: ParameterInfo) -> torch.Tensor:
    """The tensor that every rank holds a shard of."""
    flat = torch.cat(list(shards))[: info.numel]
    shape = [info.shape[dim] for dim in info.storage_order]
    back = [info.storage_order.index(dim) for dim in range(len(shape))]
    return flat.view(shape).permute(back)


def _reduce(values: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    combine = {"max": torch.maximum, "min": torch.minimum}.get(reduction, torch.add)
    total = values[0].clone()
    for value in values[1:]:
        total = combine(total, value)
    if reduction == "mean":
        return total / len(values)
    assert reduction in ("sum", "max", "min"), reduction
    return total


def _poison(dtype: torch.dtype) -> float:
    """What memory holds that no correct program looks at: freed, or still in flight."""
    if dtype.is_floating_point:
        return math.nan
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


class _Machine:
    """W ranks, one instruction at a time."""

    def __init__(self, captured: Captured):
        self.captured = captured
        self.ranks = range(captured.world_size)
        self.memory: list[dict[fx.Node, Any]] = [{} for _ in self.ranks]
        self.started: dict[fx.Node, list[torch.Tensor]] = {}
        self.optimizers = [self._own_optimizers() for _ in self.ranks]
        self.random_states = []
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(rank)
            self.random_states.append(generator.get_state())

    def _own_optimizers(self) -> dict[int, tuple[torch.optim.Optimizer, list[nn.Parameter]]]:
        """A copy of every optimizer, over parameters that take any shape."""
        stand_ins = [nn.Parameter(torch.zeros(0)) for _ in self.captured.tensors]
        replaced = dict(zip(map(id, self.captured.tensors), stand_ins, strict=True))
        return {
            handle: (copy.deepcopy(traced.optimizer_of(handle), dict(replaced)), stand_ins)
            for handle in self._handles()
        }

    def _handles(self) -> set[int]:
        targets = (ops.optimizer_step, ops.update)
        return {node.args[2] for node in nodes_of(self.captured, *targets)}

    def run(self, inputs: Sequence[Sequence[Any]]) -> Execution:
        table = self.captured.table
        entries = placeholders(self.captured.graph)
        for position, node in enumerate(entries):
            role = input_role(node)
            values = [inputs[rank][position] for rank in self.ranks]
            if role.sharded:
                info = table[role.parameter]
                values = [shards_of(v, info, math.nan)[rank] for rank, v in enumerate(values)]
            for rank, value in enumerate(values):
                self.memory[rank][node] = value.clone() if role.sharded else value
        for node in self.captured.graph.nodes:
            if node.op == "get_attr":
                constant = getattr(self.captured.gm, node.target)
                for rank in self.ranks:
                    self.memory[rank][node] = constant.clone()
            elif node.op == "call_function":
                for rank, value in enumerate(self._call(node)):
                    self.memory[rank][node] = value
        return self._harvest(entries)

    def _argument(self, rank: int, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: self.memory[rank][node])

    def _everywhere(self, argument: Any) -> list[Any]:
        return [self._argument(rank, argument) for rank in self.ranks]

    def _call(self, node: fx.Node) -> list[Any]:
        special = {
            ops.gradient: lambda n: self._same(_reduce(self._everywhere(n.args[0]), "mean")),
            ops.wait: self._wait,
            ops.free: self._free,
            ops.take_shard: self._take_shard,
            ops.mask_padding: self._mask_padding,
            ops.optimizer_step: self._optimizer_step,
            ops.update: self._update,
        }
        if node.target in special:
            return special[node.target](node)
        if node.target in ops.STARTS:
            self.started[node] = self._collective(node)
            return [torch.full_like(result, _poison(result.dtype)) for result in self.started[node]]
        assert not ops.is_ours(node.target), f"nobody runs {node.target}"
        return [self._call_on(rank, node) for rank in self.ranks]

    def _call_on(self, rank: int, node: fx.Node) -> Any:
        arguments = self._argument(rank, node.args), self._argument(rank, dict(node.kwargs))
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            return node.target(*arguments[0], **arguments[1])
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_states[rank])
            result = node.target(*arguments[0], **arguments[1])
            self.random_states[rank] = torch.get_rng_state()
        return result

    def _same(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value.clone() for _ in self.ranks]

    def _collective(self, start: fx.Node) -> list[torch.Tensor]:
        values = self._everywhere(start.args[0])
        if start.target is ops.all_gather_start:
            return self._same(torch.cat(values))
        total = _reduce(values, start.args[1])
        if start.target is ops.all_reduce_start:
            return self._same(total)
        return [piece.clone() for piece in total.chunk(len(self.ranks))]

    def _wait(self, node: fx.Node) -> list[torch.Tensor]:
        """Complete a collective.  Its inputs belong to it until here."""
        start = node.args[0]
        results = self._everywhere(start)
        for rank, result in enumerate(self._collective(start)):
            message = f"the input of {start.name} changed before {node.name}"
            assert_bitwise(result, self.started[start][rank], message)
            results[rank].copy_(result)
        return results

    def _free(self, node: fx.Node) -> list[None]:
        for value in self._everywhere(node.args[0]):
            value.fill_(_poison(value.dtype))
        return [None for _ in self.ranks]

    def _take_shard(self, node: fx.Node) -> list[torch.Tensor]:
        info = self.captured.table[node.args[1]]
        wholes = self._everywhere(node.args[0])
        return [shards_of(whole, info, math.nan)[rank] for rank, whole in enumerate(wholes)]

    def _mask_padding(self, node: fx.Node) -> list[torch.Tensor]:
        info, identity = self.captured.table[node.args[1]], node.args[2]
        masked = []
        for rank, shard in enumerate(self._everywhere(node.args[0])):
            position = torch.arange(info.shard_numel) + rank * info.shard_numel
            masked.append(shard.masked_fill(position >= info.numel, identity))
        return masked

    def _optimizer_step(self, node: fx.Node) -> list[list[torch.Tensor]]:
        updated = []
        for rank in self.ranks:
            values, gradients, handle, found_inf, indices = self._argument(rank, node.args)
            copies = [value.clone() for value in values]
            self._step(rank, handle, indices, copies, gradients, found_inf)
            updated.append(copies)
        return updated

    def _update(self, node: fx.Node) -> list[torch.Tensor]:
        results = []
        for rank in self.ranks:
            values, gradient, handle, index, *rest = self._argument(rank, node.args)
            found_inf = rest[0] if rest else None
            self._step(rank, handle, [index], [values], [gradient], found_inf)
            results.append(values)
        return results

    def _step(self, rank, handle, indices, values, gradients, found_inf) -> None:
        """Let torch's own optimizer write to ``values``."""
        if found_inf is not None and found_inf.item():
            return
        optimizer, stand_ins = self.optimizers[rank][handle]
        for index, value, gradient in zip(indices, values, gradients, strict=True):
            assert value.shape == gradient.shape, (value.shape, gradient.shape)
            stand_ins[index].data = value.detach()
            stand_ins[index].grad = gradient.to(value.dtype)
        with torch.enable_grad():
            optimizer.step()
        for index in indices:
            stand_ins[index].grad = None

    def _harvest(self, entries: list[fx.Node]) -> Execution:
        table = self.captured.table
        parameters: dict[str, list[torch.Tensor]] = {}
        buffers: list[list[torch.Tensor]] = []
        for node in entries:
            role, values = input_role(node), self._everywhere(node)
            if role.kind == "parameter":
                parameters[table[role.parameter].name] = self._put_together(values, node)
            elif role.kind == "buffer":
                buffers.append(values)
        slots = gradient_outputs(self.captured.graph)
        results = self._everywhere(self.captured.graph.output_node().args[0])
        gradients: dict[str, list[torch.Tensor]] = {}
        for position, index in slots.items():
            values = [results[rank][position] for rank in self.ranks]
            if values[0].shape != table[index].shape:
                values = self._same(whole_of(values, table[index]))
            gradients[table[index].name] = values
        for by_name in (parameters, gradients):
            for name, values in by_name.items():
                for rank, value in enumerate(values):
                    assert_bitwise(value, values[0], f"{name} on rank {rank} is not rank 0's")
        visible = [
            [
                None if self._is_an_input(position) else value
                for position, value in enumerate(results[rank])
                if position not in slots
            ]
            for rank in self.ranks
        ]
        return Execution(visible, parameters, gradients, buffers)

    def _is_an_input(self, position: int) -> bool:
        """Whether a result stands for a parameter object, whatever it holds."""
        result = self.captured.graph.output_node().args[0][position]
        if not isinstance(result, fx.Node):
            return False
        return result.op == "placeholder" or result.target is aten.copy_.default

    def _put_together(self, values: list[torch.Tensor], node: fx.Node) -> list[torch.Tensor]:
        role = input_role(node)
        if not role.sharded:
            return values
        return self._same(whole_of(values, self.captured.table[role.parameter]))


# Comparing


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, message: str | None = None):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=message)


def assert_same_numerics(before: Execution, after: Execution, *, bitwise: bool = True) -> None:
    """Results, updated parameters, gradients and buffers agree, and none of it is NaN."""
    assert before.parameters.keys() == after.parameters.keys()
    assert before.gradients.keys() == after.gradients.keys()
    pairs = list(zip(before.tensors(), after.tensors(), strict=True))
    for expected, actual in pairs:
        if bitwise:
            assert_bitwise(actual, expected)
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)
        assert not expected.is_floating_point() or not expected.isnan().any()
