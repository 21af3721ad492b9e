"""Translation validation: the programs before and after a pass give the same on the same inputs.

Source: Pnueli, Siegel and Singerman 1998, "Translation Validation".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat, ops
from zerofx.dumped import DumpedProgram, parsed
from zerofx.dumped_run import random_inputs
from zerofx.errors import CommandError, ValidationError
from zerofx.exchange import MOST_RANKS_IN_TURNS, Exchange, in_turns
from zerofx.graph import copied, source_line
from zerofx.minimal import cut_out
from zerofx.optimizer_facts import rebuild
from zerofx.passes.base import Pass, PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.plan import ParameterTable
from zerofx.program_text import program_text
from zerofx.reference import Reference, Updates
from zerofx.visible import Visible, sources, visible

logger = logging.getLogger("zerofx")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a result may be from the one before, of a pass that sums in another order: of the
largest element's size."""


@dataclass(frozen=True)
class _Program:
    """One rank's program as it was behind a pass."""

    gm: fx.GraphModule
    facts: DumpedProgram
    optimizers: Mapping[int, Mapping[str, Any]]

    def run(
        self, exchange: Exchange, watch: Callable[[fx.Node, Any], None] | None = None
    ) -> dict[Visible, Any]:
        """What a run on random inputs leaves."""
        table = self.facts.table()
        inputs = random_inputs(self.facts, table, seed=0)

        def optimizer(handle: int, stand_ins: list[nn.Parameter]) -> torch.optim.Optimizer:
            names = {info.name: one for info, one in zip(table, stand_ins, strict=True)}
            try:
                return rebuild(self.optimizers[handle], names)
            except CommandError:  # all programs are compared with the same one
                return torch.optim.SGD(stand_ins, lr=0.01)

        updates = Updates(table, optimizer)
        reference = Reference(table, self.facts.rank, exchange, updates)
        torch.manual_seed(self.facts.rank)
        with torch.no_grad():
            returned = _Run(self.gm, reference, watch).run(*inputs.values())
            return dict(visible(self.facts, self.gm, reference, inputs, returned))


class _Run(fx.Interpreter):
    """Runs a graph with the reference's kernels, and shows who ``watch`` is each result."""

    def __init__(
        self,
        gm: fx.GraphModule,
        reference: Reference,
        watch: Callable[[fx.Node, Any], None] | None,
    ) -> None:
        super().__init__(gm)
        self.reference, self.watch = reference, watch

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if ops.is_ours(target):
            target = getattr(self.reference, target._schema.name.split("::")[1])
        return super().call_function(target, args, kwargs)

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if self.watch is not None:
            self.watch(node, result)
        return result


class Validator:
    """Compares each program that a pass leaves with the one before it, on all ranks.

    Every rank runs the passes of all, and their programs in turns: nobody waits for anybody.
    Inputs are random, of the sizes that the step was captured with; optimizers have no states yet.
    ``write_minimal`` is given the part before and behind a pass that shows a difference, and says
    where it has written it.

    Raises: ValidationError for more ranks than ``MOST_RANKS_IN_TURNS``.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        ctx: PassContext,
        pipeline: Sequence[Pass],
        optimizers: Mapping[int, Mapping[str, Any]],
        write_minimal: Callable[[fx.GraphModule, fx.GraphModule], str] | None = None,
    ) -> None:
        if ctx.world_size > MOST_RANKS_IN_TURNS:
            raise ValidationError(
                f"validate runs the programs of all {ctx.world_size} ranks in each of them, and "
                f"does so for up to {MOST_RANKS_IN_TURNS}. Validate the step on fewer ranks."
            )
        self.ctx, self.optimizers, self.write_minimal = ctx, optimizers, write_minimal
        self.is_bitwise = {step.name: step.preserves_numerics for step in pipeline}
        self._others = {
            rank: self._programs_of(rank, gm, pipeline)
            for rank in range(ctx.world_size)
            if rank != ctx.rank
        }
        self.programs: list[_Program] = []
        self.results: list[dict[Visible, Any]] = []

    def _programs_of(
        self, rank: int, gm: fx.GraphModule, pipeline: Sequence[Pass]
    ) -> dict[str, _Program]:
        """Another rank's programs, as it would make them of this one's captured step."""
        table = ParameterTable(tuple(replace(info, rank=rank) for info in self.ctx.table))
        ctx = replace(self.ctx, rank=rank, table=table)
        found: dict[str, _Program] = {}

        def keep(name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
            found[name] = self._kept(name, gm, table, rank)

        run_pipeline(fx.GraphModule(gm, copied(gm.graph)), ctx, pipeline, keep)
        return found

    def _kept(self, name: str, gm: fx.GraphModule, table: ParameterTable, rank: int) -> _Program:
        ctx = self.ctx
        header = f"RANK = {rank}\nWORLD_SIZE = {ctx.world_size}\nSTAGE = {ctx.options.stage}\n"
        text = header + program_text(gm, table, self.optimizers, {})
        facts = parsed(Path(name), text, torch.__version__, name)
        if any(of.get("unreduced") for of in facts.facts["INPUTS"].values()):
            raise ValidationError(
                "validate cannot compare a step that goes on with gradients that accumulate='local'"
                " has left unreduced: before data_parallel they are averages, and behind it each "
                "rank's own. Validate it with accumulate='sharded', or turn validate off."
            )
        return _Program(fx.GraphModule(gm, copied(gm.graph)), facts, self.optimizers)

    def __call__(self, name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
        """Run one more program, and compare.

        Raises: ValidationError with the pass and the first node that computes something else.
        """
        with compat.real_tensors():  # whoever compiles has everything made fake
            self._compare(name, self._kept(name, gm, self.ctx.table, self.ctx.rank))

    def _compare(self, name: str, mine: _Program) -> None:
        programs = [
            self._others[rank][name] if rank != self.ctx.rank else mine
            for rank in range(self.ctx.world_size)
        ]
        results = in_turns([program.run for program in programs])
        if self.programs:
            for rank, (before, after) in enumerate(zip(self.results, results, strict=True)):
                for what in {**before, **after}:
                    if not self.same(name, before.get(what), after.get(what)):
                        raise self._differs(name, what, rank, programs)
        self.programs, self.results = programs, results

    def same(self, name: str, one: Any, other: Any) -> bool:
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return type(one) is type(other) and one == other
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return _bitwise(one, other) if self.is_bitwise[name] else _close(one, other)

    def _differs(
        self, name: str, what: Visible, rank: int, programs: Sequence[_Program]
    ) -> ValidationError:
        found = self._difference(name, rank, programs)
        where = "of none that both programs have"
        if found.first is not None:
            line = source_line(found.first)
            where = f"node {found.first.name!r}{f', of {line}' if line else ''}"
        how = "bitwise" if self.is_bitwise[name] else "but for rounding"
        return ValidationError(
            f"pass {name!r} has changed what the step computes: {what} on rank {rank} is not "
            f"what it was before the pass, and should be {how}. The first result that differs is "
            f"that {where}.{self._written_minimal(name, what, found, programs)} This is a fault of "
            "zerofx: please report it with the dump (ZEROFX_DUMP), and turn the pass off meanwhile "
            "if it has a switch."
        )

    def _difference(self, name: str, rank: int, programs: Sequence[_Program]) -> _Difference:
        """Run both programs again, and compare what has the same name in them."""
        before: list[dict[str, torch.Tensor]] = [{} for _ in programs]
        alike: list[set[str]] = [set() for _ in programs]
        first: list[fx.Node] = []

        def note(of: int, node: fx.Node, result: Any) -> None:
            if isinstance(result, torch.Tensor) and node.op == "call_function":
                before[of][node.name] = result.detach().clone()

        def compare(of: int, node: fx.Node, result: Any) -> None:
            known = before[of].get(node.name)
            if known is None or not isinstance(result, torch.Tensor):
                return
            if (known.shape, known.dtype) != (result.shape, result.dtype):
                return
            if _bitwise(known, result):
                alike[of].add(node.name)
            elif of == rank and not first and not self.same(name, known, result):
                first.append(node)

        for everyone, watch in ((self.programs, note), (programs, compare)):
            in_turns(
                [partial(one.run, watch=partial(watch, of)) for of, one in enumerate(everyone)]
            )
        given = {
            node: all(
                one[node].shape == before[0][node].shape and _bitwise(one[node], before[0][node])
                for one in before
            )
            for node in set.intersection(*alike)
        }
        return _Difference(first[0] if first else None, given)

    def _written_minimal(
        self, name: str, what: Visible, found: _Difference, programs: Sequence[_Program]
    ) -> str:
        """Cut out where the programs differ, if a part shows it; in words, where it is written."""
        if self.write_minimal is None:
            return ""
        for given in (found.given, {}):
            try:
                pairs = [
                    [self._cut(one, what, found.first, given) for one in everyone]
                    for everyone in (self.programs, programs)
                ]
                results = [in_turns([one.run for one in everyone]) for everyone in pairs]
            except Exception as error:  # a part need not run: the whole has been told
                logger.debug("no minimal program: %s", error)
                continue
            if any(
                not self.same(name, before.get(key), after.get(key))
                for before, after in zip(*results, strict=True)
                for key in {**before, **after}
            ):
                mine = [everyone[self.ctx.rank].gm for everyone in pairs]
                return f" {self.write_minimal(*mine)}"
        return ""

    def _cut(
        self, program: _Program, what: Visible, first: fx.Node | None, given: Mapping[str, bool]
    ) -> _Program:
        ends = sources(program.facts, program.gm, what)
        if first is not None:
            ends = [node for node in program.gm.graph.nodes if node.name == first.name]
        cut = cut_out(program.gm, ends, given)
        return self._kept("minimal", cut, program.facts.table(), program.facts.rank)


@dataclass(frozen=True)
class _Difference:
    """The first node of the new program that computes something else than its namesake.

    ``given`` are the names of those that compute the same on every rank, and whether that is the
    same on all of them.
    """

    first: fx.Node | None
    given: Mapping[str, bool]


def _bitwise(one: torch.Tensor, other: torch.Tensor) -> bool:
    data = [value.detach().contiguous().view(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*data)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.abs().amax().nan_to_num(posinf=0.0).item() if one.numel() else 0.0
    tolerance = TOLERANCE[one.dtype]
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
