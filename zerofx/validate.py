"""Translation validation: the programs before and after a pass give the same on the same inputs.

Source: Pnueli, Siegel and Singerman 1998, "Translation Validation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat, ops
from zerofx.dumped import DumpedProgram, parsed
from zerofx.dumped_run import left_behind, random_inputs
from zerofx.errors import CommandError, ValidationError
from zerofx.exchange import MOST_RANKS_IN_TURNS, Exchange, in_turns
from zerofx.graph import copied, source_line, unreduced_results
from zerofx.optimizer_facts import rebuild
from zerofx.passes.base import Pass, PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.plan import ParameterTable
from zerofx.program_text import program_text
from zerofx.reference import Reference, Updates

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
    ) -> dict[str, Any]:
        """What a run on random inputs leaves, by name: results, parameters, buffers, states."""
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
            return dict(self._visible(reference, inputs, returned))

    def _visible(
        self, reference: Reference, inputs: Mapping[str, Any], returned: Sequence[Any]
    ) -> Iterator[tuple[str, Any]]:
        facts = self.facts.facts
        indices = {name: index for index, name in enumerate(facts["PARAMETERS"])}
        unreduced = set(unreduced_results(self.gm.graph))
        others = 0
        for position, value in enumerate(returned):
            of = facts["GRADIENTS"].get(position)
            if of is None:
                yield f"result {others}", value
                others += 1
                continue
            if position in facts["SHARDED_RESULTS"] and value is not None:
                value = reference.whole(value, indices[of])
            if position in unreduced and value is not None:
                value = torch.stack(list(reference.exchange(value))).mean(0)
            yield f"the gradient of {of}", value
        yield from left_behind(self.facts, reference, inputs).items()
        # Updates may hide what is wrong with gradients: Adam's first has the size of none.
        yield from reference.states().items()


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

    Raises: ValidationError for more ranks than ``MOST_RANKS_IN_TURNS``.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        ctx: PassContext,
        pipeline: Sequence[Pass],
        optimizers: Mapping[int, Mapping[str, Any]],
    ) -> None:
        if ctx.world_size > MOST_RANKS_IN_TURNS:
            raise ValidationError(
                f"validate runs the programs of all {ctx.world_size} ranks in each of them, and "
                f"does so for up to {MOST_RANKS_IN_TURNS}. Validate the step on fewer ranks."
            )
        self.ctx, self.optimizers = ctx, optimizers
        self.is_bitwise = {step.name: step.preserves_numerics for step in pipeline}
        self._others = {
            rank: self._programs_of(rank, gm, pipeline)
            for rank in range(ctx.world_size)
            if rank != ctx.rank
        }
        self.programs: list[_Program] = []
        self.results: list[dict[str, Any]] = []

    def _programs_of(
        self, rank: int, gm: fx.GraphModule, pipeline: Sequence[Pass]
    ) -> dict[str, _Program]:
        """Another rank's programs, as it would make them of this one's captured step."""
        table = ParameterTable(tuple(replace(info, rank=rank) for info in self.ctx.table))
        ctx = replace(self.ctx, rank=rank, table=table)
        found: dict[str, _Program] = {}

        def keep(name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
            found[name] = self._kept(name, gm, ctx)

        run_pipeline(fx.GraphModule(gm, copied(gm.graph)), ctx, pipeline, keep)
        return found

    def _kept(self, name: str, gm: fx.GraphModule, ctx: PassContext) -> _Program:
        header = f"RANK = {ctx.rank}\nWORLD_SIZE = {ctx.world_size}\nSTAGE = {ctx.options.stage}\n"
        text = header + program_text(gm, ctx.table, self.optimizers, {})
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
            self._compare(name, self._kept(name, gm, self.ctx))

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
        self, name: str, what: str, rank: int, programs: Sequence[_Program]
    ) -> ValidationError:
        node = self._first_different(name, rank, programs)
        where = "of none that both programs have"
        if node is not None:
            line = source_line(node)
            where = f"node {node.name!r}{f', of {line}' if line else ''}"
        how = "bitwise" if self.is_bitwise[name] else "but for rounding"
        return ValidationError(
            f"pass {name!r} has changed what the step computes: {what} on rank {rank} is not "
            f"what it was before the pass, and should be {how}. The first result that differs is "
            f"that {where}. This is a fault of zerofx: please report it with the dump "
            "(ZEROFX_DUMP), and turn the pass off meanwhile if it has a switch."
        )

    def _first_different(
        self, name: str, rank: int, programs: Sequence[_Program]
    ) -> fx.Node | None:
        """The first node of the new program whose namesake in the old one gave something else."""
        before: dict[str, Any] = {}
        found: list[fx.Node] = []

        def note(node: fx.Node, result: Any) -> None:
            if isinstance(result, torch.Tensor) and node.op == "call_function":
                before[node.name] = result.detach().clone()

        def compare(node: fx.Node, result: Any) -> None:
            known = before.get(node.name)
            if known is None or not isinstance(result, torch.Tensor) or found:
                return
            if known.shape == result.shape and not self.same(name, known, result):
                found.append(node)

        for everyone, watch in ((self.programs, note), (programs, compare)):
            runs = [program.run for program in everyone]
            runs[rank] = partial(everyone[rank].run, watch=watch)
            in_turns(runs)
        return found[0] if found else None


def _bitwise(one: torch.Tensor, other: torch.Tensor) -> bool:
    data = [value.detach().contiguous().view(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*data)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.abs().amax().nan_to_num(posinf=0.0).item() if one.numel() else 0.0
    tolerance = TOLERANCE[one.dtype]
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
