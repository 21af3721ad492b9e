"""Trace, rewrite, print and run programs in one process: no process group, no collectives.

``capture`` takes the path a user's step takes, up to the passes.  ``execute`` is an independent
reference: it interprets a program node by node for all ranks at once and runs the optimizers'
own ``step``.  What a correct program never looks at holds NaN: freed memory, a collective's
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep, StepCapture
from zerofx.compiler.program import state_bytes, whole_updates
from zerofx.hardware import NOMINAL
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import updated_by
from zerofx.ir.interface import gradient_outputs, input_role, placeholders
from zerofx.ir.offload import changes_files, copies_activation, is_fetch, is_staged, slot_of
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import provenance
from zerofx.options import resolve
from zerofx.passes.base import PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.passes.normalize import normalize
from zerofx.passes.pipeline import PIPELINE, rewrites

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
            with compat.whole_step_tracing(self, substitutes.SUBSTITUTES):
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
    """Trace ``step(*args)`` as the zero backend does, and normalize it; nothing of it runs."""
    torch.compiler.reset()
    try:
        torch.compile(step, backend=_CapturingBackend(world_size))(*args)
    except _Stop as stop:
        captured, inputs = stop.step, stop.inputs
    else:
        raise AssertionError("the step was not compiled")
    normalize(captured.gm, None)
    captured.gm.recompile()
    fields = {field.name: getattr(captured, field.name) for field in dataclasses.fields(captured)}
    live = [substitutes.optimizer_of(handle) for handle in captured.optimizers]
    return Captured(**fields, inputs=inputs, world_size=world_size, live=live)


def clone(captured: Captured, world_size: int | None = None) -> Captured:
    """A copy whose program can be rewritten by itself, for another world size if given.

    That is for captured programs: places in buckets are laid out for one world size.
    """
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


PLAIN = {"lowering": "eager", "bucket": False, "update_in_backward": False}


def context_of(captured: Captured, rank: int = 0, stage: int = 3, **options: object) -> PassContext:
    """The facts that a pass is given.  Without buckets unless asked for: one story at a time."""
    resolved = resolve({**PLAIN, "stage": stage, **options}, {})
    on_host = frozenset(info.index for info in captured.table if "params" in resolved.offload)
    return PassContext(
        resolved,
        captured.table,
        rank,
        captured.world_size,
        captured.num_backwards,
        figures=resolved.hardware or NOMINAL,
        whole_updates=whole_updates(captured),
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
    table.parameters = tuple(dataclasses.replace(info, rank=rank) for info in table)
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
            if node.target in _WITHOUT_RESULT or (node.target is ops.evict and not node.users):
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
    with torch.no_grad():
        return _Machine(programs).run(inputs or rank_inputs(programs[0]))


def cut(flat: torch.Tensor, info: ParameterInfo, rank: int) -> torch.Tensor:
    """What a rank owns of a flat parameter and its padding, by the definition of a bucket."""
    assert flat.shape == (info.place.extent,)
    bucket = flat.new_zeros(info.place.shard_numel * info.world_size)
    bucket[info.place.offset : info.place.offset + info.place.extent] = flat
    return bucket.view(info.world_size, info.place.shard_numel)[rank][owned(info, rank)]


def owned(info: ParameterInfo, rank: int) -> torch.Tensor:
    """Which elements of a rank's shard of the bucket are the parameter's or its padding."""
    bucket = torch.zeros(info.place.shard_numel * info.world_size, dtype=torch.bool)
    bucket[info.place.offset : info.place.offset + info.place.extent] = True
    return bucket.view(info.world_size, info.place.shard_numel)[rank]


def shards_of(whole: torch.Tensor, info: ParameterInfo, padding: float) -> list[torch.Tensor]:
    """Every rank's flat shard, cut from the definition: flatten in storage order, pad, cut."""
    flat = whole.permute(info.storage_order).reshape(-1)
    fill = flat.new_full((info.place.extent - info.numel,), padding)
    return [cut(torch.cat([flat, fill]), info, rank) for rank in range(info.world_size)]


def whole_of(shards: Sequence[torch.Tensor], info: ParameterInfo) -> torch.Tensor:
    """The tensor that every rank holds a shard of."""
    flat = torch.cat(list(shards))
    assert flat.shape == (info.place.extent,), f"{info.name}: {[len(s) for s in shards]}"
    shape = [info.shape[dim] for dim in info.storage_order]
    back = [info.storage_order.index(dim) for dim in range(len(shape))]
    return flat[: info.numel].view(shape).permute(back)


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


def _moved(start: fx.Node, values: list[torch.Tensor]) -> torch.Tensor:
    """Return the copied value as it arrives: as it lay in memory, or as pieces on a line."""
    return values[0].clone() if copies_activation(start) else torch.cat(values)


_WITHOUT_RESULT = (ops.free,)

Row = tuple[fx.Node, ...]
"""One instruction: the node of every rank's program, by rank."""


class _Machine:
    """W ranks, one instruction at a time."""

    def __init__(self, programs: Sequence[Captured]):
        self.programs = programs
        self.captured = programs[0]
        self.ranks = range(self.captured.world_size)
        assert len(programs) == len(self.ranks), f"{len(programs)} of {len(self.ranks)} programs"
        self.rows = _in_lock_step(programs)
        self.memory: list[dict[fx.Node, Any]] = [{} for _ in self.ranks]
        self.started: dict[Row, list[torch.Tensor]] = {}
        self.staging: list[dict[int, torch.Tensor]] = [{} for _ in self.ranks]
        in_files = any(is_fetch(node, "states") for node in programs[0].graph.nodes)
        self.states_there: set[tuple[int, int]] | None = set() if in_files else None
        # By parameter: the shard, its values while it is in a file, and how many use it now.
        self.filed_shards: list[dict[int, tuple[torch.Tensor, torch.Tensor, int]]] = [
            {} for _ in self.ranks
        ]
        self.buckets: list[dict[tuple[int, torch.dtype], torch.Tensor]] = [{} for _ in self.ranks]
        self.optimizers = [self._own_optimizers() for _ in self.ranks]
        self.whole_updates: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in self.ranks]
        self.random_states = []
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(rank)
            self.random_states.append(generator.get_state())

    def _own_optimizers(self) -> dict[int, tuple[torch.optim.Optimizer, list[nn.Parameter]]]:
        """A copy of every optimizer, over parameters that take any shape."""
        stand_ins = [nn.Parameter(torch.zeros(0)) for _ in self.captured.tensors]
        replaced = dict(zip(map(id, self.captured.tensors), stand_ins, strict=True))
        return {
            handle: (copy.deepcopy(substitutes.optimizer_of(handle), dict(replaced)), stand_ins)
            for handle in self._handles()
        }

    def _handles(self) -> set[int]:
        return {node.args[2] for node in self.captured.graph.nodes if updated_by(node)}

    def run(self, inputs: Sequence[Sequence[Any]]) -> Execution:
        entries = [row for row in self.rows if row[0].op == "placeholder"]
        for position, row in enumerate(entries):
            for rank, node in enumerate(row):
                value = inputs[rank][position]
                if input_role(node).sharded:
                    value = self._shard_input(rank, node, value)
                self.memory[rank][node] = value
        self._file_shards()
        for row in self.rows:
            if row[0].op == "get_attr":
                for rank, node in enumerate(row):
                    self.memory[rank][node] = getattr(self.programs[rank].gm, node.target).clone()
            elif row[0].op == "call_function":
                for rank, value in enumerate(self._call(row)):
                    self.memory[rank][row[rank]] = value
        return self._harvest(entries)

    def _file_shards(self) -> None:
        """Have poison in the shards that the program reads from files."""
        filed = {
            index
            for node in self.captured.graph.nodes
            if is_fetch(node, "shards")
            for index in node.args[2]
        }
        for rank in self.ranks:
            for node, value in self.memory[rank].items():
                role = input_role(node)
                if role.kind == "parameter" and role.parameter in filed:
                    self.filed_shards[rank][role.parameter] = value, value.clone(), 0
                    value.fill_(_poison(value.dtype))

    def _shard_input(self, rank: int, node: fx.Node, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard: memory of its own, or a part of its bucket's."""
        info = self._info(rank, input_role(node).parameter)
        shard = shards_of(whole, info, math.nan)[rank]
        if input_role(node).kind != "parameter" or not info.shares_bucket:
            return shard
        key = info.place.bucket, shard.dtype
        memory = self.buckets[rank].setdefault(key, _unfilled(shard, info))
        view = self._part(memory, rank, info)
        view.copy_(shard)
        return view

    def _part(self, memory: torch.Tensor, rank: int, info: ParameterInfo) -> torch.Tensor:
        """Where in a rank's shard of a bucket the shard of a parameter lies."""
        positions = owned(info, rank).nonzero().flatten().tolist()
        start = positions[0] if positions else 0
        return memory[start : start + len(positions)]

    def _info(self, rank: int, index: int) -> ParameterInfo:
        return self.programs[rank].table[index]

    def _argument(self, rank: int, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: self.memory[rank][node])

    def _operands(self, row: Row, position: int = 0) -> list[Any]:
        """One argument of an instruction, on every rank."""
        return [self._argument(rank, node.args[position]) for rank, node in enumerate(row)]

    def _call(self, row: Row) -> list[Any]:
        target = row[0].target
        special = {
            ops.gradient: lambda row: self._same(_reduce(self._operands(row), "mean")),
            ops.free: self._free,
            ops.take_shard: self._take_shard,
            ops.mask_padding: self._mask_padding,
            ops.pack: self._pack,
            ops.flatten_bucket: self._flatten_bucket,
            ops.optimizer_step: self._optimizer_step,
            ops.on_owners: self._on_owners,
            ops.update: self._update,
            ops.copy_start: self._move_start,
            ops.update_start: self._update_on_host_start,
            ops.update_start_shards: self._update_kept_start,
            ops.copy_start_shards: self._store_start,
            ops.fetch_start: self._fetch_start,
            ops.evict: self._evict,
        }
        waits = {
            ops.copy_start: self._wait_move,
            ops.update_start: self._wait_update,
            ops.update_start_shards: self._wait_kept,
            ops.copy_start_shards: self._wait_store,
            ops.fetch_start: self._wait_file,
        }
        if ops.is_wait(row[0]):
            return waits.get(row[0].args[0].target, self._wait)(row)
        if target in special:
            return special[target](row)
        if ops.is_collective(row[0]):
            self.started[row] = self._collective(row)
            return [torch.full_like(result, _poison(result.dtype)) for result in self.started[row]]
        assert not ops.is_ours(target), f"nobody runs {target}"
        return [self._call_on(rank, node) for rank, node in enumerate(row)]

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

    def _collective(self, start: Row) -> list[torch.Tensor]:
        values = self._operands(start)
        assert len({value.shape for value in values}) == 1, f"{start[0].name} of unequal sizes"
        if ops.rules(start[0]).gathers:
            pieces = [
                self._packed(rank, *pair)
                for rank, pair in enumerate(zip(start, values, strict=True))
            ]
            return self._same(torch.cat(pieces))
        total = _reduce(values, start[0].args[1])
        if start[0].target is ops.all_reduce_start:
            return self._same(total)
        per_rank = len(total) // len(self.ranks)
        return [piece.clone() for piece in total.view(len(self.ranks), per_rank)]

    def _packed(self, rank: int, start: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """What a rank sends of its bucket: ranges that the program has not packed are anyone's."""
        pack = start.args[0]
        origin = provenance(pack)
        if origin and origin.role == "gather_cast":
            pack = pack.args[0]
        if pack.target is not ops.pack:
            return value
        packed = sum(owned(self._info(rank, index), rank) for index in pack.args[1]).bool()
        return value.masked_fill(~packed, _poison(value.dtype))

    def _wait(self, row: Row) -> list[torch.Tensor]:
        """Complete a collective.  Its inputs belong to it until here."""
        start = tuple(node.args[0] for node in row)
        results = self._operands(row)
        for rank, result in enumerate(self._collective(start)):
            message = f"the input of {start[rank].name} changed before {row[rank].name}"
            assert_bitwise(result, self.started[start][rank], message)
            results[rank].copy_(result)
        return results

    def _free(self, row: Row) -> list[None]:
        for value in self._operands(row):
            value.fill_(_poison(value.dtype))
        return [None for _ in self.ranks]

    def _take_shard(self, row: Row) -> list[torch.Tensor]:
        shards = []
        for rank, whole in enumerate(self._operands(row)):
            shard = shards_of(whole, self._info(rank, row[rank].args[1]), math.nan)[rank]
            assert shard.shape == (row[rank].args[2],)
            shards.append(shard)
        return shards

    def _mask_padding(self, row: Row) -> list[torch.Tensor]:
        masked = []
        for rank, shard in enumerate(self._operands(row)):
            _, index, identity = row[rank].args
            info = self._info(rank, index)
            is_padding = cut(torch.arange(info.place.extent) >= info.numel, info, rank)
            masked.append(shard.masked_fill(is_padding, identity))
            if not shard.numel():
                masked[-1] = shard.new_full((1,), identity)
        return masked

    def _pack(self, row: Row) -> list[torch.Tensor]:
        """The bucket's own memory if the shards are all parts of it, else a copy of each."""
        packed = []
        for rank, shards in enumerate(self._operands(row)):
            _, indices, numel = row[rank].args
            infos = [self._info(rank, index) for index in indices]
            assert {(i.place.bucket, i.place.shard_numel) for i in infos} == {
                (infos[0].place.bucket, numel)
            }
            own = self.buckets[rank].get((infos[0].place.bucket, shards[0].dtype))
            if own is None or not self._is_made_of(own, rank, shards, infos):
                own = _unfilled(shards[0], infos[0])
                for shard, info in zip(shards, infos, strict=True):
                    self._part(own, rank, info).copy_(shard)
            packed.append(own)
        return packed

    def _is_made_of(self, memory, rank, shards, infos) -> bool:
        parts = [self._part(memory, rank, info) for info in infos]
        return all(
            shard.shape == part.shape and shard.data_ptr() == part.data_ptr()
            for shard, part in zip(shards, parts, strict=True)
        )

    def _flatten_bucket(self, row: Row) -> list[torch.Tensor]:
        flats = []
        for rank, wholes in enumerate(self._operands(row)):
            _, indices, numel = row[rank].args
            flat = wholes[0].new_full((numel,), _poison(wholes[0].dtype))
            for whole, index in zip(wholes, indices, strict=True):
                info = self._info(rank, index)
                assert whole.shape == info.shape
                assert numel == info.place.shard_numel * info.world_size
                in_storage_order = whole.permute(info.storage_order).reshape(-1)
                flat[info.place.offset :][: info.numel] = in_storage_order
            flats.append(flat)
        return flats

    def _move_start(self, row: Row) -> list[torch.Tensor]:
        """Poison until the wait, in a staging buffer that the program may give out again."""
        values = [_moved(*of) for of in zip(row, self._operands(row), strict=True)]
        self.started[row] = values
        if not is_staged(row[0]):
            return [torch.full_like(value, _poison(value.dtype)) for value in values]
        results = []
        for rank, (node, value) in enumerate(zip(row, values, strict=True)):
            nbytes = value.nbytes
            known = self.staging[rank].get(slot_of(node), torch.empty(0, dtype=torch.uint8))
            if known.numel() < nbytes:
                known = torch.empty(nbytes, dtype=torch.uint8)
            self.staging[rank][slot_of(node)] = known
            flat = known[:nbytes].view(value.dtype).fill_(_poison(value.dtype))
            results.append(flat.as_strided(value.shape, value.stride()))
        return results

    def _wait_move(self, row: Row) -> list[torch.Tensor]:
        """Complete a move.  Its pieces belong to it until here, and an activation's memory then."""
        start = tuple(node.args[0] for node in row)
        results = self._operands(row)
        for rank, operand in enumerate(self._operands(start)):
            message = f"a piece of {start[rank].name} changed before {row[rank].name}"
            assert_bitwise(_moved(start[rank], operand), self.started[start][rank], message)
            is_activation = copies_activation(start[0])
            if is_activation or not is_staged(start[0]):  # what is on its way there updates read
                results[rank].copy_(self.started[start][rank])
            if is_activation and is_staged(start[0]):
                operand[0].fill_(_poison(operand[0].dtype))
        return results

    def _store_start(self, row: Row) -> list[list[torch.Tensor]]:
        """Poison in the shards until the wait."""
        self.started[row] = [[p.clone() for p in pieces] for pieces in self._operands(row)]
        results = self._operands(row, 2)
        for shards in results:
            for shard in shards:
                shard.fill_(_poison(shard.dtype))
        return results

    def _wait_store(self, row: Row) -> list[list[torch.Tensor]]:
        start = tuple(node.args[0] for node in row)
        results = self._operands(row)
        for rank, pieces in enumerate(self._operands(start)):
            for piece, stored, shard in zip(
                pieces, self.started[start][rank], results[rank], strict=True
            ):
                assert_bitwise(piece, stored, f"a piece of {start[rank].name} changed")
                shard.copy_(stored)
        return results

    def _wait_file(self, row: Row) -> list[torch.Tensor]:
        """From here on updates of these parameters have their states, or moves their shards."""
        start = tuple(node.args[0] for node in row)
        if is_fetch(start[0], "value"):
            for rank, there in enumerate(self._operands(row)):
                there.copy_(self.started[start][rank])
        elif is_fetch(start[0], "shards"):
            for rank, node in enumerate(start):
                for index in node.args[2]:
                    shard, values, num_uses = self.filed_shards[rank][index]
                    if not num_uses:
                        shard.copy_(values)
                    self.filed_shards[rank][index] = shard, values, num_uses + 1
        else:
            assert self.states_there is not None
            indices, optimizer = start[0].args[2:4]
            self.states_there |= {(optimizer, index) for index in indices}
        return self._operands(row)

    def _evict(self, row: Row) -> list[torch.Tensor]:
        if row[0].args[1] == "states":
            self._states_to_file(row)
        elif row[0].args[1] == "shards":
            self._shards_to_file(row)
        elif changes_files(row[0]):
            return self._value_to_file(row)
        else:
            self._free(row)
        return self._operands(row)

    def _fetch_start(self, row: Row) -> list[torch.Tensor]:
        if row[0].args[1] == "value":
            return self._value_from_file_start(row)
        return [torch.empty(0) for _ in row]

    def _shards_to_file(self, row: Row) -> None:
        """What is read of these shards is poison from here on, if nobody else uses them."""
        for rank, node in enumerate(row):
            for index in node.args[2]:
                shard, values, num_uses = self.filed_shards[rank][index]
                assert num_uses > 0, f"{node.name} lets go of what is not there"
                if num_uses == 1:
                    values = shard.clone()
                    shard.fill_(_poison(shard.dtype))
                self.filed_shards[rank][index] = shard, values, num_uses - 1

    def _value_to_file(self, row: Row) -> list[torch.Tensor]:
        """The value in a file; whoever reads the memory that it was in gets poison."""
        filed = [value.clone() for value in self._operands(row)]
        for value in self._operands(row):
            value.fill_(_poison(value.dtype))
        return filed

    def _value_from_file_start(self, row: Row) -> list[torch.Tensor]:
        self.started[row] = self._operands(row)
        return [torch.full_like(value, _poison(value.dtype)) for value in self.started[row]]

    def _states_to_file(self, row: Row) -> None:
        assert self.states_there is not None
        indices, optimizer = row[0].args[2:4]
        there = {(optimizer, index) for index in indices}
        assert there <= self.states_there, f"{row[0].name} lets go of what is not there"
        self.states_there -= there

    def _optimizer_step(self, row: Row) -> list[list[torch.Tensor]]:
        updated = []
        for rank, node in enumerate(row):
            values, gradients, handle, found_inf, indices = self._argument(rank, node.args)
            copies = [value.clone() for value in values]
            self._step(rank, handle, indices, copies, gradients, found_inf)
            updated.append(copies)
        return updated

    def _on_owners(self, row: Row) -> list[list[torch.Tensor]]:
        """Update whole tensors on every rank; ``update`` then only keeps what a rank owns of it."""
        operands = [self._argument(rank, node.args) for rank, node in enumerate(row)]
        _, _, handle, indices, owners, _, *found_inf = operands[0]
        assert set(owners) <= set(self.ranks) and len(owners) == len(indices)
        wholes: list[list[torch.Tensor]] = [[], []]
        for position, index in enumerate(indices):
            for values, kind in zip(wholes, (0, 1), strict=True):
                shards = [operands[rank][kind][position] for rank in self.ranks]
                values.append(whole_of(shards, self._info(0, index)))
        for rank in self.ranks:
            values = [value.clone() for value in wholes[0]]
            self._step(rank, handle, indices, values, wholes[1], *(found_inf or [None]))
            for index, value in zip(indices, values, strict=True):
                self.whole_updates[rank][handle, index] = value
        return [[torch.full_like(g, math.nan) for g in operands[rank][1]] for rank in self.ranks]

    def _update(self, row: Row) -> list[torch.Tensor]:
        results = []
        for rank, node in enumerate(row):
            values, gradient, handle, index, *rest = self._argument(rank, node.args)
            found_inf = rest[0] if rest else None
            whole = self.whole_updates[rank].pop((handle, index), None)
            if whole is not None:
                assert gradient.isnan().all(), "an owner's result belongs to its update"
                values.copy_(shards_of(whole, self._info(rank, index), math.nan)[rank])
                results.append(values)
                continue
            self._step(rank, handle, [index], [values], [gradient], found_inf)
            results.append(values)
        return results

    def _check_states(self, row: Row) -> None:
        handle, indices = row[0].args[2:4]
        for index in indices if self.states_there is not None else ():
            assert (handle, index) in self.states_there, f"{row[0].name}: its states are in files"

    def _update_on_host_start(self, row: Row) -> list[torch.Tensor]:
        """Poison until the wait.  Values and gradients belong to the update until there."""
        self._check_states(row)
        updated = []
        for rank, node in enumerate(row):
            _, _, handle, indices, *rest = self._argument(rank, node.args)
            values, gradients = (
                self.started[tuple(other.args[position] for other in row)][rank].clone()
                for position in (0, 1)
            )
            updated.append(values)
            lengths = [self._info(rank, index).shard_numel for index in indices]
            pieces = (values.split(lengths), gradients.split(lengths))
            for index, value, gradient in zip(indices, *pieces, strict=True):
                self._step(rank, handle, [index], [value], [gradient], rest[0] if rest else None)
        self.started[row] = updated
        return self._operands(row)

    def _update_kept_start(self, row: Row) -> list[list[torch.Tensor]]:
        """The same, for shards that each are a tensor."""
        self._check_states(row)
        updated = []
        for rank, node in enumerate(row):
            shards, _, handle, indices, *rest = self._argument(rank, node.args)
            gradients = self.started[tuple(other.args[1] for other in row)][rank].clone()
            updated.append([shard.clone() for shard in shards])
            pieces = gradients.split([len(shard) for shard in shards])
            for index, value, gradient in zip(indices, updated[rank], pieces, strict=True):
                self._step(rank, handle, [index], [value], [gradient], rest[0] if rest else None)
            for shard in shards:
                shard.fill_(_poison(shard.dtype))
        self.started[row] = updated
        return self._operands(row)

    def _wait_update(self, row: Row) -> list[torch.Tensor]:
        start = tuple(node.args[0] for node in row)
        self._check_states(start)
        results = self._operands(row)
        for rank, operands in enumerate(zip(results, self._operands(start, 1), strict=True)):
            for operand in operands:
                poison = torch.full_like(operand, _poison(operand.dtype))
                message = f"what {start[rank].name} reads changed before {row[rank].name}"
                assert_bitwise(operand, poison, message)
            results[rank].copy_(self.started[start][rank])
        return results

    def _wait_kept(self, row: Row) -> list[list[torch.Tensor]]:
        start = tuple(node.args[0] for node in row)
        self._check_states(start)
        results = self._operands(row)
        for rank in self.ranks:
            for shard, new in zip(results[rank], self.started[start][rank], strict=True):
                assert shard.isnan().all(), f"a shard changed before {row[rank].name}"
                shard.copy_(new)
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

    def _harvest(self, entries: list[Row]) -> Execution:
        table = self.captured.table
        for filed in self.filed_shards:
            for shard, values, num_uses in filed.values():
                assert not num_uses, "shards have been read that nobody let go of"
                shard.copy_(values)
        parameters: dict[str, list[torch.Tensor]] = {}
        buffers: list[list[torch.Tensor]] = []
        for row in entries:
            role = input_role(row[0])
            values = [self.memory[rank][node] for rank, node in enumerate(row)]
            if role.kind == "parameter":
                if role.sharded:
                    values = self._same(whole_of(values, table[role.parameter]))
                parameters[table[role.parameter].name] = values
            elif role.kind == "buffer":
                buffers.append(values)
        slots = gradient_outputs(self.captured.graph)
        results = self._operands(self.rows[-1])
        gradients: dict[str, list[torch.Tensor]] = {}
        for position, index in slots.items():
            values = [results[rank][position] for rank in self.ranks]
            if any(value.shape != table[index].shape for value in values):
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


def _unfilled(like: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """A rank's shard of a parameter's bucket, before anyone has written to it."""
    return like.new_full((info.place.shard_numel,), _poison(like.dtype))


def _in_lock_step(programs: Sequence[Captured]) -> list[Row]:
    """The programs' instructions side by side: the same operators, operands and collectives.

    Only sizes may differ: of shards, and where in a bucket's they begin.
    """
    assert len({schedule(p.gm, p.table, stage=0) for p in programs}) == 1, "schedules differ"
    rows = list(zip(*(program.graph.nodes for program in programs), strict=True))
    if len(set(map(id, programs))) == 1:
        return rows
    for rank, program in enumerate(programs):
        assert {info.rank for info in program.table} <= {rank}, "programs are not by rank"
    number = {node: position for position, row in enumerate(rows) for node in row}
    for row in rows:
        assert len({(node.op, _operator(node)) for node in row}) == 1, row
        assert len({tuple(number[s] for s in node.all_input_nodes) for node in row}) == 1, row
    return rows


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
