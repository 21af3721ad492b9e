"""The program of a captured step on given ranks, and what it keeps, sends and takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from zerofx.capture.step import CapturedStep
from zerofx.compiler.choices import attempts, first_that_fits
from zerofx.compiler.facts import bytes_kept, context_of
from zerofx.compiler.rewrite import Rewritten, in_parameters, rewritten
from zerofx.cost.outside import COMPILING, Row, Span, outside_bytes
from zerofx.cost.own import own_bytes
from zerofx.cost.program import Own, Rehearsal, live_bytes
from zerofx.cost.timeline import (
    StepTime,
    Timeline,
    Work,
    count_collectives,
    predict,
    step_time,
    works_of,
)
from zerofx.cost.traffic import wire_bytes
from zerofx.deferred.ledger import LEDGER
from zerofx.garbage import collecting_once
from zerofx.hardware import Hardware
from zerofx.ir import ops
from zerofx.ir.graph import Copies, copied_module
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import Place
from zerofx.lower.rehearsal import rehearsals_of
from zerofx.options import Options
from zerofx.passes.base import PassContext
from zerofx.passes.manager import why_skipped
from zerofx.passes.pipeline import PIPELINE, lowerings
from zerofx.report.memory import Piece, alive, pieces_of


@dataclass(frozen=True)
class Forecast:
    """Predicts what one rank keeps, sends and waits for, from a program that nobody runs.

    ``state_bytes`` is what optimizers keep per element, by (optimizer, parameter).  ``at_first``
    says how parameters come about: ``whole``, before the first call cuts them, ``deferred``, made
    as they are kept, or ``there`` if they have.
    """

    rewritten: Rewritten
    state_bytes: Mapping[tuple[int, int], float]
    at_first: str = "there"

    @property
    def mesh(self) -> Mesh:
        return self.rewritten.ctx.mesh

    @property
    def options(self) -> Options:
        return self.rewritten.ctx.options

    @property
    def schedule(self) -> tuple[str, ...]:
        """The lines that ranks agree on: collectives, and what decides on them."""
        return self.rewritten.schedule

    @cached_property
    def _pieces(self) -> list[Piece]:
        ctx = self.rewritten.ctx
        return pieces_of(
            self._program.graph,
            ctx.table,
            ctx.world_size,
            self._in_parameters,
            sockets=not ctx.options.peer_memory,
            state_bytes=self.state_bytes,
            largest=True,
            own=self._own(),
            rehearsals=self._rehearsals,
        )

    @property
    def _program(self) -> fx.GraphModule:
        """The program whose memory counts: with its regions, if they are compiled."""
        return self._with_regions[0]

    @cached_property
    def _with_regions(self) -> tuple[fx.GraphModule, Copies]:
        if self.options.lowering != "inductor":
            return self.rewritten.gm, {}
        copies: Copies = {}
        gm = copied_module(self.rewritten.gm, copies)
        for step in lowerings(PIPELINE):
            if step.name in _OF_REGIONS and not why_skipped(step, self.rewritten.ctx):
                step.run(gm, self.rewritten.ctx)
        return gm, copies

    @cached_property
    def _in_parameters(self) -> set[fx.Node]:
        _, copies = self._with_regions
        return {copies.get(node, node) for node in in_parameters(self.rewritten)}

    @cached_property
    def _rehearsals(self) -> list[Rehearsal]:
        is_compiled = self.options.lowering == "inductor"
        return list(rehearsals_of(self._program)) if is_compiled else []

    def _own(self) -> Mapping[fx.Node, Own]:
        """Return what operators allocate for themselves, as far as that is known."""
        if any(info.device.type != "cpu" for info in self.rewritten.ctx.table):
            return {}
        nodes = self._program.graph.nodes
        if self.options.lowering != "inductor":
            return own_bytes(nodes)
        inside = {node for of in self._rehearsals for node in of.nodes}
        # An update is one kernel, which needs nothing beside its results.
        updates = {node: Own(0) for node in nodes if node.target is ops.update}
        return {**own_bytes(node for node in nodes if node not in inside), **updates}

    @property
    def _num_nodes(self) -> int:
        return len(self._program.graph.nodes)

    @cached_property
    def kept(self) -> Mapping[str, int]:
        """Bytes on the device between steps, by kind."""
        columns = alive(self._pieces, self._num_nodes)
        first = {kind: column[0] for kind, column in columns.items() if kind != "inputs"}
        return {kind: nbytes for kind, nbytes in first.items() if nbytes}

    @cached_property
    def peak(self) -> Mapping[str, int]:
        """Bytes on the device by kind, at the moment when they are most together."""
        columns = alive(self._pieces, self._num_nodes)
        at = max(range(self._num_nodes), key=lambda at: sum(of[at] for of in columns.values()))
        return {kind: column[at] for kind, column in columns.items() if column[at]}

    def at_least(self, away: Collection[str] = (), *, more_ranks: bool = False) -> int:
        """Return the bytes of the peak that stay with a budget, and with these targets ``away``.

        Buckets that are gathered or reduced at other times do not free them, and ``more_ranks`` do
        not divide them.  What a budget or offload has already decided on does not count.
        """
        kinds: set[str] = {"inputs", *(_DIVIDED_AT if self.options.memory_budget is None else ())}
        kinds -= {_MOVED_BY[target] for target in (*away, *self.options.offload)}
        if more_ranks:
            kinds -= {kind for kind, at in _DIVIDED_AT.items() if at <= self.options.stage}
        return sum(nbytes for kind, nbytes in self.peak.items() if kind in kinds)

    @property
    def budgeted(self) -> int:
        """The most bytes that a ``memory_budget`` counts: what the program allocates."""
        ctx = self.rewritten.ctx
        alive = live_bytes(
            self.rewritten.gm.graph,
            ctx.world_size,
            in_parameters(self.rewritten),
            sockets=not ctx.options.peer_memory,
            table=ctx.table,
            hinted=True,
        )
        return max(alive, default=0)

    @cached_property
    def outside(self) -> Mapping[str, Row]:
        """Bytes of the process beside its program's, by what they are for."""
        ctx, is_one = self.rewritten.ctx, self.mesh.world_size == 1
        pieces = [piece for piece in self._pieces if piece.place == "device"]
        infos = tuple(ctx.table)
        compiled, each = COMPILING[ctx.options.lowering]
        return outside_bytes(
            [Span(of.begin, of.end, of.nbytes) for of in pieces],
            infos[0].device.type if infos else "cpu",
            buffers=[
                Span(of.begin, of.end, of.nbytes)
                for of in pieces
                if not is_one and (ops.is_collective(of.node) or of.node.target in _REUSED)
            ],
            num_communicators=sum(size > 1 for _, size in self.mesh.axes),
            kept=sum(self.kept.values()),
            deferred=self.kept.get("parameters", 0) if self.at_first == "deferred" else 0,
            largest_deferred=max((info.nbytes for info in infos), default=0),
            whole=sum(info.nbytes for info in infos) if self.at_first == "whole" else 0,
            file_cache=max((ctx.options.offload_cache_bytes or 0) - self.on_host, 0),
            compiling=compiled + each * len(self.rewritten.gm.graph.nodes),
        )

    @property
    def device_bytes(self) -> int:
        """The most bytes of the whole process on the device: the peak, and what lies outside."""
        beside = sum(row.nbytes for row in self.outside.values() if row.place == "device")
        return sum(self.peak.values()) + beside

    @cached_property
    def on_host(self) -> int:
        """The most bytes in host memory at once."""
        columns = alive(self._pieces, self._num_nodes, "host").values()
        return max((sum(at) for at in zip(*columns, strict=True)), default=0)

    @cached_property
    def sent(self) -> Mapping[str, int]:
        """Bytes that the rank sends in a step along each axis, and between all ranks at once."""
        mesh = self.mesh
        along = {axis: wire_bytes(self.rewritten.gm, mesh.world_size, axis) for axis in mesh.names}
        return {axis: sent.total for axis, sent in along.items()}

    @cached_property
    def _works(self) -> Mapping[fx.Node, Work]:
        ctx = self.rewritten.ctx
        return works_of(self.rewritten.gm.graph, ctx.figures, ctx.table, ctx.world_size)

    @cached_property
    def timeline(self) -> Timeline:
        """The step's predicted seconds by the figures that it was planned with."""
        ctx = self.rewritten.ctx
        of = self.rewritten.gm.graph, ctx.figures, ctx.table, ctx.world_size
        return predict(*of, works=self._works)

    @cached_property
    def step_time(self) -> StepTime:
        """The seconds of a step, with an interval of what is unknown of its figures."""
        ctx = self.rewritten.ctx
        of = self.rewritten.gm.graph, ctx.figures, ctx.table, ctx.world_size
        return step_time(*of, works=self._works, whole=ctx.figures.whole(ctx.options.lowering))

    @property
    def expected_s(self) -> float:
        """The seconds of a step as ``step_time`` has them, without the interval."""
        ctx = self.rewritten.ctx
        number = count_collectives(self._works, ctx.world_size)
        return ctx.figures.whole(ctx.options.lowering).seconds(number, self.timeline.step_s)

    @property
    def facts(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "keeps": dict(self.kept),
            "peak": dict(self.peak),
            "outside": {name: row._asdict() for name, row in self.outside.items()},
            "device_bytes": self.device_bytes,
            "on_host": self.on_host,
            "sends": dict(self.sent),
            "step_s": [self.step_time.low_s, self.step_time.high_s],
            "expected_s": self.step_time.expected_s,
            "confidence": self.step_time.confidence,
            "bound_s": self.timeline.bound_s,
            "waits_s": self.timeline.exposed_s,
            "limited_by": self.timeline.busiest,
            "lanes_s": {lane: each_s for lane, each_s in self.timeline.lanes.items() if each_s},
        }


_OF_REGIONS = ("fold_gradient_norms", "fold_gradient_work", "form_regions")
"""Lowerings that say what is compiled together.  Others spare copies, of which ``in_parameters``
and reductions' own bytes know, or calls."""

_DIVIDED_AT = {"parameters": 3, "optimizer states": 0, "activations": math.inf}
"""The first stage at which ranks divide what a form keeps."""

_MOVED_BY = {"params": "parameters", "optimizer": "optimizer states", "activations": "activations"}
"""Each target of offload moves one kind of memory off the device."""

_REUSED = (ops.flatten_bucket, ops.take_shard)
"""What makes buffers that a CPU keeps to use them again, beside collectives."""


@dataclass(frozen=True)
class Ranks:
    """Stands for the ranks of a step: their axes, the inner one last, and what is known of them.

    Forecasts are of the first one, which holds most: all ranks come to the same.  ``make_whole``
    says that they are still to make the parameters, and do so in one piece.
    """

    axes: tuple[tuple[str, int], ...]
    figures: Hardware
    make_whole: bool = False

    def __len__(self) -> int:
        return math.prod(size for _, size in self.axes)

    def mesh_for(self, options: Options) -> Mesh:
        """Return the mesh as a communicator has it: axes count where they differ."""
        if len(self.axes) > 1 and options.stage_outside is not None and self.axes[0][1] > 1:
            return Mesh(self.axes, 0, options.stage_outside)
        return Mesh.flat(len(self))

    def figures_for(self, options: Options) -> Hardware:
        """Return the figures that a program with these options is planned with."""
        if self.figures.links and not self.mesh_for(options).outer:
            named = [axis for axis, size in self.axes if size > 1]
            return self.figures.on_one_axis(named)
        return self.figures

    def forecast(
        self, step: CapturedStep, options: Options, known: Mapping[int, Place | None] | None = None
    ) -> Forecast:
        """Make the program that the first rank would run of a captured step.

        ``known`` are the places of parameters, by index, that another program has given them.

        Raises: BudgetError if it does not fit ``memory_budget``; what passes refuse.
        """
        with collecting_once():
            return self._forecast(step, options, known or {})

    def _forecast(
        self, step: CapturedStep, options: Options, known: Mapping[int, Place | None]
    ) -> Forecast:
        mesh, figures = self.mesh_for(options), self.figures_for(options)
        own = step.on(mesh)

        def context(options: Options) -> PassContext:
            return context_of(own, options, mesh, figures, kept_gathered={}, known=known)

        if "auto" in options.offload:
            tried = attempts(options, own.table, mesh)
            options = tried[first_that_fits(own, [context(attempt) for attempt in tried])]
            own = step.on(mesh)
        is_deferred = any(LEDGER.memory_of(tensor) is not None for tensor in step.tensors)
        at_first = "whole" if self.make_whole else "deferred" if is_deferred else "there"
        return Forecast(rewritten(own.gm, context(options)), bytes_kept(own, options), at_first)
