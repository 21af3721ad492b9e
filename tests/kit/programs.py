"""Trace, rewrite, print and run programs in one process: no process group, no collectives.

``capture`` takes the path a user's step takes, up to the passes.  ``execute`` runs a program with
``replay.reference`` for all ranks, and adds what that leaves out: what goes on beside a program
takes until its wait.  What a correct program never looks at holds NaN: freed memory, a collective's
result before its wait, the padding of shards, and ranges of a bucket that nobody has filled.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep, StepCapture
from zerofx.compiler.facts import state_bytes, whole_updates
from zerofx.hardware import NOMINAL
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import copied, updated_by
from zerofx.ir.interface import InputRole, input_role, placeholders, recorded
from zerofx.ir.mesh import EVERY_RANK, Mesh
from zerofx.ir.offload import copies_activation, is_fetch, is_staged, slot_of
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import Role, provenance, role
from zerofx.ir.rules import argument
from zerofx.ir.sizes import value_bytes
from zerofx.options import Options, resolve
from zerofx.passes.base import PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.passes.normalize import normalize
from zerofx.passes.pipeline import PIPELINE, rewrites
from zerofx.replay.in_process_group import Exchange, in_turns
from zerofx.replay.reference import Interpreter, Reference, Updates

aten = torch.ops.aten


# Capture


@dataclass(frozen=True)
class Captured(CapturedStep):
    """A captured step and what capture saw as its inputs.

    ``live`` keeps optimizers alive, ``after_passes`` what ``rewritten`` has made of this step.
    ``axes`` are those of its ranks' mesh, if they have several.
    """

    inputs: tuple[Any, ...] = ()
    world_size: int = 1
    axes: tuple[tuple[str, int], ...] = ()
    outer_stage: int = 0
    live: Any = None
    after_passes: dict[str, Captured] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def mesh_of(self, rank: int = 0) -> Mesh:
        return (
            Mesh(self.axes, rank, self.outer_stage)
            if self.axes
            else Mesh.flat(self.world_size, rank)
        )


class _Stop(Exception):
    """Ends a call of a captured step where its program would run."""

    def __init__(self, step: CapturedStep, inputs: Sequence[Any]):
        super().__init__()
        self.step, self.inputs = step, tuple(inputs)


class _CapturingBackend:
    """The zero backend up to the passes."""

    __name__ = "capturing"

    def __init__(self, mesh: Mesh, options: Options):
        compat.tracing.forward_call_context()
        self.mesh, self.options = mesh, options

    def call_context(self, _arguments) -> Callable:
        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with compat.tracing.whole_step_tracing(self, substitutes.SUBSTITUTES):
                yield

        return context

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_arguments) -> Callable:
        def stop_before_running(step: CapturedStep) -> Callable:
            def run(inputs: list[Any]):
                raise _Stop(step, inputs)

            run._boxed_call = True
            return run

        try:
            capture = StepCapture(gm, inputs, self.mesh, self.options)
            return capture.lower(stop_before_running)
        except Exception as error:
            raise compat.dynamo.pass_through_dynamo(error) from error.__cause__


def capture(
    step: Callable,
    *args: Any,
    world_size: int = 4,
    axes: tuple[tuple[str, int], ...] = (),
    outer_stage: int = 0,
    **options: Any,
) -> Captured:
    """Trace ``step(*args)`` as the zero backend does, and normalize it; nothing of it runs."""
    torch.compiler.reset()
    mesh = Mesh(axes, 0, outer_stage) if axes else Mesh.flat(world_size)
    try:
        torch.compile(step, backend=_CapturingBackend(mesh, Options(**options)))(*args)
    except _Stop as stop:
        captured, inputs = stop.step, stop.inputs
    else:
        raise AssertionError("the step was not compiled")
    normalize(captured.gm, None)
    captured.gm.recompile()
    fields = {field.name: getattr(captured, field.name) for field in dataclasses.fields(captured)}
    live = [substitutes.optimizer_of(handle) for handle in captured.optimizers]
    return Captured(
        **fields,
        inputs=inputs,
        world_size=mesh.world_size,
        axes=axes,
        outer_stage=outer_stage,
        live=live,
    )


def clone(captured: Captured, world_size: int | None = None) -> Captured:
    """A copy whose program can be rewritten by itself, for another world size if given.

    That is for captured programs: places in buckets are laid out for one world size.
    """
    copies: dict[fx.Node, fx.Node] = {}
    graph = copied(captured.graph, copies)
    world_size = world_size or captured.world_size
    num_shards = captured.mesh_of().num_shards if captured.axes else world_size
    infos = [dataclasses.replace(info, world_size=num_shards) for info in captured.table]
    return dataclasses.replace(
        captured,
        traced=lambda: fx.GraphModule(captured.gm, graph),
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


PLAIN = {"lowering": "eager", "bucket": False, "update_in_backward": False}


def context_of(captured: Captured, rank: int = 0, stage: int = 3, **options: object) -> PassContext:
    """The facts that a pass is given.  Without buckets unless asked for: one story at a time."""
    resolved = resolve({**PLAIN, "stage": stage, **options}, {})
    on_host = frozenset(info.index for info in captured.table if "params" in resolved.offload)
    return PassContext(
        resolved,
        captured.table,
        captured.mesh_of(rank),
        captured.num_backwards,
        figures=resolved.hardware or NOMINAL,
        whole_updates=whole_updates(captured, stage, captured.mesh_of(rank)),
        state_bytes=state_bytes(captured, resolved),
        host_parameters=on_host,
        filed_parameters=on_host if resolved.offload_tier == "nvme" else frozenset(),
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
    pipeline = PIPELINE[: names.index(until) + 1] if until else rewrites(PIPELINE)
    table = captured.table
    shard = captured.mesh_of(rank).shard
    table.parameters = tuple(dataclasses.replace(info, rank=shard) for info in table)
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


def rewritten_by_rank(
    captured: Captured, world_size: int | None = None, **arguments
) -> tuple[Captured, ...]:
    """Every rank's own copy after its passes, with buckets unless ``bucket=False``."""
    arguments = {"bucket": True, **arguments}
    ranks = range(world_size or captured.world_size)
    return tuple(rewritten(captured, world_size, rank=rank, **arguments) for rank in ranks)


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
            if node.target in (ops.fetch_start, ops.evict) and node.args[1] == "states":
                arguments[3] = type(substitutes.optimizer_of(node.args[3])).__name__
            if updated_by(node) or node.target is ops.on_owners:
                arguments[2] = type(substitutes.optimizer_of(node.args[2])).__name__
            arguments += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
            target = name_of(node.target)
            called = f"{target}({', '.join(arguments)})"
            if node.target is ops.free or (node.target is ops.evict and not node.users):
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
    """The program's calls of these operators, or of what these functions accept, in order."""
    operators = [one for one in targets if isinstance(one, torch._ops.OpOverload)]
    others: list[Any] = [one for one in targets if one not in operators]
    return [
        node
        for node in captured.graph.nodes
        if node.target in operators or any(accepts(node) for accepts in others)
    ]


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
        if ops.rules(node).gathers:
            alive += value_bytes(node)
        elif node.target is ops.free:
            alive -= value_bytes(node.args[0])
        timeline.append(alive)
    return timeline


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


def execute(
    programs: Captured | Sequence[Captured], inputs: Sequence[Sequence[Any]] | None = None
) -> Execution:
    """Run one program for all ranks, or each rank's own, in lock-step.

    A gradient that no pass has averaged yet is averaged where it is marked: the meaning of a
    captured program under data parallelism.

    Raises: AssertionError if a collective's input changes between its start and its wait, if
    a parameter or an averaged gradient comes out different on two ranks, or if the ranks'
    programs differ in more than sizes.
    """
    if isinstance(programs, Captured):
        shares = any(info.shares_bucket for info in programs.table)
        assert not shares or programs.world_size == 1, "buckets need each rank's own program"
        programs = [programs] * programs.world_size
    assert len(programs) == programs[0].world_size, f"{len(programs)} programs"
    _check_lock_step(programs)
    inputs = inputs or rank_inputs(programs[0])

    def run(rank: int, exchange: Exchange) -> _Rank:
        machine = _Rank(programs[rank], rank, exchange)
        machine.run_to_end(inputs[rank])
        return machine

    ranks = in_turns([functools.partial(run, rank) for rank in range(len(programs))])
    by_name = [
        {name: [rank.left[kind][name] for rank in ranks] for name in ranks[0].left[kind]}
        for kind in ("parameter", "gradient", "buffer")
    ]
    for tensors in by_name[:2]:
        for name, values in tensors.items():
            for rank, value in enumerate(values):
                assert_bitwise(value, values[0], f"{name} on rank {rank} is not rank 0's")
    parameters, gradients, buffers = by_name
    return Execution([rank.results for rank in ranks], parameters, gradients, [*buffers.values()])


class _Updates(Updates):
    """The optimizers themselves, copied, over parameters that take any shape."""

    def __init__(self, captured: Captured, table: ParameterTable):
        super().__init__(table, functools.partial(optimizer_over, captured))

    def step(self, optimizer, parameters, values, grads, *others, **named) -> None:
        for value, grad in zip(values, grads, strict=True):
            assert value.shape == grad.shape, (value.shape, grad.shape)
        super().step(optimizer, parameters, values, grads, *others, **named)


def optimizer_over(
    captured: Captured, handle: int, stand_ins: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of one of the step's optimizers, over other parameters."""
    replaced = dict(zip(map(id, captured.tensors), stand_ins, strict=True))
    return copy.deepcopy(substitutes.optimizer_of(handle), replaced)


class _Reference(Reference):
    """The operators' meaning, with poison for integers too, and what they may rely on asserted."""

    def __init__(self, captured: Captured, rank: int, exchange: Exchange):
        def exchange_alike(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
            values = exchange(tensor)
            assert len({value.shape for value in values}) == 1, "tensors of unequal sizes"
            return values

        updates = _Updates(captured, captured.table)
        super().__init__(captured.table, captured.mesh_of(rank), exchange_alike, updates)

    def poison(self, dtype: torch.dtype) -> float:
        if dtype.is_floating_point:
            return math.nan
        return 1 if dtype == torch.bool else torch.iinfo(dtype).max

    def filled(self, value: torch.Tensor) -> torch.Tensor:
        return value.fill_(self.poison(value.dtype))

    def take_shard(self, whole, parameter, shard_numel, **over):
        assert shard_numel == self.table.cut(parameter, *over.values()).shard_numel
        return super().take_shard(whole, parameter, shard_numel, **over)

    def pack(self, shards, parameters, numel, **over):
        places = [self.table.cut(index, *over.values()).place for index in parameters]
        assert {(p.bucket, p.shard_numel) for p in places} == {(places[0].bucket, numel)}
        return super().pack(shards, parameters, numel, **over)

    def flatten_bucket(self, wholes, parameters, numel):
        for whole, index in zip(wholes, parameters, strict=True):
            info = self.table[index]
            assert whole.shape == info.shape
            assert numel == info.place.shard_numel * info.world_size
        return super().flatten_bucket(wholes, parameters, numel)

    def update(self, values, grad, optimizer, parameter, found_inf=None):
        if (optimizer, parameter) in self._wholes:
            assert grad.isnan().all(), "an owner's result belongs to its update"
        return super().update(values, grad, optimizer, parameter, found_inf)

    def on_owners(self, values, grads, optimizer, parameters, owners, *others, **named):
        assert set(owners) <= {*range(self.table[0].world_size)} or {*owners} == {EVERY_RANK}
        assert len(owners) == len(parameters)
        return super().on_owners(values, grads, optimizer, parameters, owners, *others, **named)


@dataclass
class _Started:
    """What goes on beside the program: what it reads, its result, and where that will be."""

    reads: Callable[[], list[torch.Tensor]]
    were: list[torch.Tensor]
    results: list[torch.Tensor]
    there: list[torch.Tensor]


class _Rank(Interpreter):
    """One rank.  Where something is on its way is poison until the wait."""

    def __init__(self, captured: Captured, rank: int, exchange: Exchange):
        super().__init__(captured.gm, captured.graph, _Reference(captured, rank, exchange))
        self.reference: _Reference
        self.rank = rank
        self.started: dict[fx.Node, _Started] = {}
        self.staging: dict[int, torch.Tensor] = {}
        self.buckets: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        fetches = [node for node in captured.graph.nodes if node.target is ops.fetch_start]
        self.keeps_states = not any(is_fetch(node, "states") for node in fetches)
        self.states_there: set[tuple[int, int]] = set()
        self.filed = {i for node in fetches if is_fetch(node, "shards") for i in node.args[2]}
        # By parameter: the shard, its values while it is in a file, and how many use it now.
        self.filed_shards: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.entries: dict[fx.Node, Any] = {}
        self.left: dict[str, dict[str, torch.Tensor]] = {
            "parameter": {},
            "gradient": {},
            "buffer": {},
        }
        self.results: list[Any] = []

    def run_to_end(self, inputs: Sequence[Any]) -> None:
        """Run it, and note the ``results`` and all that is ``left``; what is sharded, whole."""
        torch.manual_seed(self.rank)
        with torch.no_grad():
            returned = self.run(*inputs)
            table = self.reference.table
            for shard, values, num_uses in self.filed_shards.values():
                assert not num_uses, "shards have been read that nobody let go of"
                shard.copy_(values)
            for node, value in self.entries.items():
                role = input_role(node)
                if role.kind in ("parameter", "buffer"):
                    name = table[role.parameter].name if role.kind == "parameter" else node.name
                    whole_value = self.reference.whole_value
                    whole = whole_value(value, role.parameter) if role.sharded else value
                    self.left[role.kind][name] = whole
            slots, shards = recorded(self.graph).gradients, recorded(self.graph).sharded
            replaced = recorded(self.graph).written_gradients
            newest = {index: position for position, index in (slots | replaced).items()}
            for index, position in newest.items():
                value, is_shard = returned[position], position in shards
                unreduced = recorded(self.graph).unreduced.get(position, "")
                if is_shard or unreduced == self.reference.mesh.outer:
                    value = self.reference.average(value, index, is_shard, unreduced)
                self.left["gradient"][table[index].name] = value
        output = self.graph.output_node().args[0]
        self.results = [
            None if _stands_for_an_input(output[position]) else value
            for position, value in enumerate(returned)
            if position not in slots
        ]

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._enter(node, super().run_node(node))
        if node.op == "get_attr":
            return super().run_node(node).clone()
        if ops.is_wait(node):
            return self._wait(node)
        if ops.starts(node):
            return self._start(node)
        if node.target is ops.evict:
            self._let_go(node)
        return super().run_node(node)

    def _enter(self, node: fx.Node, value: Any) -> Any:
        """An input as this rank has it: a shard in memory of its own, or a part of its bucket's."""
        role, mesh = input_role(node), self.reference.mesh
        if role.unreduced and role.unreduced == mesh.outer:
            value = value * mesh.size(mesh.inner)  # given the average, it is a sum inside
        if role.sharded:
            info, over = self.reference.table[role.parameter], self._cut_of(role)
            info = info.kept if over else info
            value = shard = self.reference.take_shard(value, info.index, info.shard_numel, **over)
            if role.kind == "parameter" and info.shares_bucket:
                unfilled = self.reference.filled(shard.new_empty(info.place.shard_numel))
                memory = self.buckets.setdefault((info.place.bucket, shard.dtype), unfilled)
                value = memory[info.position_in_shard :][: info.shard_numel].copy_(shard)
        if role.kind == "parameter" and role.parameter in self.filed:
            self.filed_shards[role.parameter] = value, value.clone(), 0
            self.reference.filled(value)
        self.entries[node] = value
        return value

    def _cut_of(self, role: InputRole) -> Mapping[str, str]:
        """The keyword for what an input is cut over, if that is not what states are."""
        info = self.reference.table[role.parameter]
        is_kept = role.kind == "parameter" or role.unreduced
        return self.reference.mesh.cut_in(info.kept.world_size) if is_kept else {}

    def _start(self, node: fx.Node) -> Any:
        """Do it with copies of what it reads; what it writes to is poison until the wait."""
        self._check_states(node)
        operands: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies, and what they are of

        def copied(source: fx.Node) -> torch.Tensor:
            value = self.env[source]
            is_coming = ops.updates_on_host(node) and source in self.started
            copy = (self.started[source].results[0] if is_coming else value).clone()
            operands.append((copy, value))
            return copy

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copied)

        def reads() -> list[torch.Tensor]:
            return [self._sent(node, operand) for _, operand in operands]

        if ops.rules(node).gathers:
            args = (*reads(), *args[1:])
        results = self.call_function(node.target, args, kwargs)
        is_list = isinstance(results, list)
        results = results if is_list else [results]
        there = []
        for result in results:
            written_to = [operand for copy, operand in operands if copy is result]
            memory = written_to[0] if written_to else self._memory(node, result)
            there.append(self.reference.filled(memory))
        were = [value.clone() for value in reads()]
        self.started[node] = _Started(reads, were, results, there)
        return there if is_list else there[0]

    def _sent(self, start: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """What is read of an operand: ranges of a bucket that nothing has packed are anyone's."""
        if not ops.rules(start).gathers:
            return value
        pack = start.args[0]
        if role(pack) == Role.GATHER_SHARD:
            return value
        origin = provenance(pack)
        if origin and origin.role == "gather_cast":
            pack = pack.args[0]
        if pack.target is not ops.pack:
            return value
        sent = torch.full_like(value, self.reference.poison(value.dtype))
        for index in pack.args[1]:
            info = self.reference.table.cut(index, argument(pack, "axis"))
            part = slice(info.position_in_shard, info.position_in_shard + info.shard_numel)
            sent[part] = value[part]
        return sent

    def _memory(self, start: fx.Node, result: torch.Tensor) -> torch.Tensor:
        """Memory for a result: its own, or a staging buffer that is given out again."""
        if not is_staged(start):
            return torch.empty_like(result)
        known = self.staging.get(slot_of(start), torch.empty(0, dtype=torch.uint8))
        if known.numel() < result.nbytes:
            known = torch.empty(result.nbytes, dtype=torch.uint8)
        self.staging[slot_of(start)] = known
        flat = known[: result.nbytes].view(result.dtype)
        return flat.as_strided(result.shape, result.stride())

    def _wait(self, node: fx.Node) -> Any:
        start = node.args[0]
        self._check_states(start)
        started = self.started[start]
        for value, before in zip(started.reads(), started.were, strict=True):
            message = f"the input of {start.name} changed before {node.name}"
            assert_bitwise(value, before, message)
        if copies_activation(start) or not is_staged(start):  # updates read what is on its way
            for place, result in zip(started.there, started.results, strict=True):
                place.copy_(result)
        if copies_activation(start) and is_staged(start):
            self.reference.filled(started.reads()[0])
        if is_fetch(start, "states"):
            self.states_there |= _states_of(start)
        elif is_fetch(start, "shards"):
            for index in start.args[2]:
                shard, values, num_uses = self.filed_shards[index]
                if not num_uses:
                    shard.copy_(values)
                self.filed_shards[index] = shard, values, num_uses + 1
        return self.env[start]

    def _let_go(self, node: fx.Node) -> None:
        """What is read of shards is poison from here on, if nobody else uses them."""
        what = node.args[1]
        if what == "states":
            gone = _states_of(node)
            assert gone <= self.states_there, f"{node.name} lets go of what is not there"
            self.states_there -= gone
        for index in node.args[2] if what == "shards" else ():
            shard, values, num_uses = self.filed_shards[index]
            assert num_uses > 0, f"{node.name} lets go of what is not there"
            if num_uses == 1:
                values = shard.clone()
                self.reference.filled(shard)
            self.filed_shards[index] = shard, values, num_uses - 1

    def _check_states(self, start: fx.Node) -> None:
        if ops.updates_on_host(start) and not self.keeps_states:
            there = _states_of(start) <= self.states_there
            assert there, f"{start.name}: its states are in files"


def _states_of(node: fx.Node) -> set[tuple[int, int]]:
    """The states that a node is about, by optimizer and parameter."""
    if ops.updates_on_host(node):
        return {(node.args[2], index) for index in node.args[3]}
    return {(node.args[3], index) for index in node.args[2]}


def _stands_for_an_input(result: Any) -> bool:
    """Whether a result stands for a parameter object, whatever it holds."""
    if not isinstance(result, fx.Node):
        return False
    return result.op == "placeholder" or result.target is aten.copy_.default


def _check_lock_step(programs: Sequence[Captured]) -> None:
    """The programs have the same operators, operands and collectives, side by side.

    Only sizes may differ: of shards, and where in a bucket's they begin.
    """
    assert len({schedule(p.gm, p.table, stage=0) for p in programs}) == 1, "schedules differ"
    if len(set(map(id, programs))) == 1:
        return
    for rank, program in enumerate(programs):
        shard = program.mesh_of(rank).shard
        assert {info.rank for info in program.table} <= {shard}, "programs are not by rank"
    rows = list(zip(*(program.graph.nodes for program in programs), strict=True))
    number = {node: position for position, row in enumerate(rows) for node in row}
    for row in rows:
        assert len({(node.op, _operator(node)) for node in row}) == 1, row
        assert len({tuple(number[s] for s in node.all_input_nodes) for node in row}) == 1, row


def _operator(node: fx.Node) -> object:
    return node.target if node.op == "call_function" else None


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
