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
from torch import fx

from zerofx import compat
from zerofx.errors import ValidationError
from zerofx.ir.graph import copied_module
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.source import source_line
from zerofx.passes.base import Pass, PassContext
from zerofx.passes.manager import PassReport, run_pipeline
from zerofx.replay.in_process_group import MOST_RANKS_IN_TURNS, in_turns
from zerofx.replay.minimal import bitwise, compare_by_name, minimal
from zerofx.replay.replayed import ObservedProgram

logger = logging.getLogger("zerofx")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a result may be from the one before, of a pass that sums in another order: of the
largest element's size."""

COARSEST = 0.25
"""The same for every other dtype, and of a pass that quantises."""

MOST_AMPLIFIED = 0.01
"""The share of a parameter's elements that may be farther off where only the update differs."""

Observed = list[dict[str, Any]]
"""The visible results of one run of all ranks' programs, by rank."""


@dataclass(frozen=True)
class Observation:
    """All ranks' programs as they were behind a pass, and what can be seen of them."""

    programs: Sequence[ObservedProgram]
    seen: Observed

    @classmethod
    def of(cls, programs: Sequence[ObservedProgram]) -> Observation:
        """Run the programs.  Raises: what a program raises."""
        return cls(programs, _seen(programs))


class Validator:
    """Compares each program that a pass leaves with the one before it, on all ranks.

    Every rank runs the passes of all, and their programs in turns: nobody waits for anybody.
    Inputs are random, of the sizes that the step was captured with; optimizers have no states yet.
    ``before`` and ``after`` are what was compared last.  ``write_minimal`` is given the least part
    of both programs that shows a difference, and says where it has written it.

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
        self.quantizes = {step.name for step in pipeline if step.quantizes}
        self._errors: dict[int, Exception] = {}
        self._others = {
            rank: self._programs_of(rank, gm, pipeline)
            for rank in range(ctx.world_size)
            if rank != ctx.rank
        }
        self.before: Observation | None = None
        self.after: Observation | None = None

    def _programs_of(
        self, rank: int, gm: fx.GraphModule, pipeline: Sequence[Pass]
    ) -> dict[str, ObservedProgram]:
        """Another rank's programs, as it would make them of this one's captured step.

        They end before one that breaks a rule.
        """
        mesh = replace(self.ctx.mesh, rank=rank)
        table = ParameterTable(tuple(replace(info, rank=mesh.shard) for info in self.ctx.table))
        ctx = replace(self.ctx, mesh=mesh, table=table)
        found: dict[str, ObservedProgram] = {}

        def keep(name: str, gm: fx.GraphModule, report: PassReport | None) -> None:
            found[name] = ObservedProgram.of(gm, ctx, self.optimizers)

        try:
            run_pipeline(copied_module(gm), ctx, pipeline, keep)
        except Exception as error:
            self._errors[rank] = error
        return found

    def __call__(
        self, name: str, gm: fx.GraphModule, report: PassReport | None, path: Path | None = None
    ) -> None:
        """Run one more program, which is in the file ``path`` if it is in one, and compare.

        Raises: ValidationError with the pass and the first node that computes something else.
        """
        with compat.tensors.real_tensors():  # whoever compiles has everything made fake
            mine = ObservedProgram.of(gm, self.ctx, self.optimizers)
            programs = []
            for rank in range(self.ctx.world_size):
                program = mine if rank == self.ctx.rank else self._others[rank].get(name)
                if program is None:  # the pass has ended the other rank's, and not this one's
                    raise self._errors[rank]
                programs.append(program)
            self.before, self.after = self.after, Observation.of(programs)
            if self.before is None:
                _warn_of_nothing_seen(self.after.seen)
            elif found := self.difference(name, self.before, self.after):
                raise self._differs(name, *found, path)

    def difference(
        self, name: str, before: Observation, after: Observation
    ) -> tuple[str, int] | None:
        """Return the first result that a pass has wrongly changed, and its rank, or None."""
        found = self._first_apart(name, before.seen, after.seen)
        return None if found and self._is_amplified_rounding(name, before, after) else found

    def _first_apart(self, name: str, before: Observed, after: Observed) -> tuple[str, int] | None:
        for rank, (one, other) in enumerate(zip(before, after, strict=True)):
            for what in {**one, **other}:
                if not self._same(name, one.get(what), other.get(what)):
                    return what, rank
        return None

    def _is_amplified_rounding(self, name: str, before: Observation, after: Observation) -> bool:
        """Return whether all that differs is what an update has made of a rounding.

        Adam's first step, for one, is as large for a gradient of nearly zero as for any other.
        With plain SGD in its place nothing differs then, and with it but few elements.
        """
        if self.is_bitwise[name]:
            return False
        linear = [_seen(those.programs, linear=True) for those in (before, after)]
        if self._first_apart(name, *linear):
            return False
        return all(
            _share_apart(value, other[what], self._tolerance(name, value.dtype)) <= MOST_AMPLIFIED
            for one, other in zip(before.seen, after.seen, strict=True)
            for what, value in one.items()
            if what.startswith("parameter ")
        )

    def _same(self, name: str, one: Any, other: Any) -> bool:
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return type(one) is type(other) and (one == other or one != one and other != other)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if self.is_bitwise[name]:
            return bitwise(one, other)
        return _share_apart(one, other, self._tolerance(name, one.dtype)) == 0

    def _tolerance(self, name: str, dtype: torch.dtype) -> float:
        if name in self.quantizes:
            return COARSEST
        dtypes = {dtype, self.ctx.options.reduce_dtype or dtype}
        return max(TOLERANCE.get(each, COARSEST) for each in dtypes)

    def _differs(self, name: str, what: str, rank: int, path: Path | None) -> ValidationError:
        assert self.before is not None and self.after is not None
        before, after, same = self.before.programs, self.after.programs, partial(self._same, name)
        first, given = compare_by_name(before, after, rank, same)
        where, written = "of none that both programs have", ""
        if first is not None:
            line = source_line(first)
            where = f"node {first.name!r}{f', of {line}' if line else ''}"
            parts = minimal(before, after, first, given, same) if self.write_minimal else None
            if self.write_minimal and parts:
                mine = (everyone[self.ctx.rank].module() for everyone in parts)
                written = f" {self.write_minimal(*mine)}"
        how = "bitwise" if self.is_bitwise[name] else "but for rounding"
        dump = f"{path} and the program before it" if path else "the dump (ZEROFX_DUMP)"
        return ValidationError(
            f"pass {name!r} has changed what the step computes: {what} on rank {rank} is not "
            f"what it was before the pass, and should be {how}. The first result that differs is "
            f"that {where}.{written} This is a fault of zerofx: please report it with {dump}, and "
            "turn the pass off meanwhile if it has a switch."
        )


def _seen(programs: Sequence[ObservedProgram], linear: bool = False) -> Observed:
    return in_turns([partial(program.run, linear=linear) for program in programs])


def _share_apart(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> float:
    """The share of elements that are farther from each other than rounding takes them."""
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return (one != other).double().mean().item()
    if one.dtype.itemsize == 1:  # which torch compares in nothing
        one, other = one.float(), other.float()
    largest = one.abs().amax().nan_to_num(posinf=0.0).item()
    close = torch.isclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
    return (~close).double().mean().item()


def _warn_of_nothing_seen(seen: Observed) -> None:
    """Two programs that give nothing but NaN agree whatever they compute."""
    values = {
        what: value
        for what, value in seen[0].items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
    }
    gradients = {what: value for what, value in values.items() if what.startswith("the gradient")}
    compared = gradients or values
    if compared and not any(value.isfinite().any() for value in compared.values()):
        logger.warning(
            "validate has nothing to compare: on random inputs, %s and all others like it are "
            "infinite or no numbers.",
            next(iter(compared)),
        )
