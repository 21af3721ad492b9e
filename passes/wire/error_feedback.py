"""Bring later what wires of gradients lose: each rank keeps it, and adds it to its next ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder, updated_by
from zerofx.ir.loss_scale import is_set_by_step, loss_scales_of
from zerofx.ir.roles import Role
from zerofx.passes.base import PassContext

WITHOUT = "without feedback: "


@dataclass
class _Open:
    """An error of these parameters' gradients over an axis that no ``keep_error`` keeps yet."""

    axis: str
    indices: tuple[int, ...]
    rest: fx.Node
    sums: list[fx.Node] = field(default_factory=list)


class Feedback:
    """Inserts what corrects gradients in front of their wires, and keeps what these lose.

    ::

        corrected = zerofx.correct(flat, [0, 1], n)
        wire = zerofx.quantize(corrected, "int4", 2)
        start = zerofx.all_to_all_start(wire, 2)
        rest = zerofx.rounding_error(corrected, wire, "int4", 2)
        ...
        zerofx.keep_error(rest, [], [0, 1])

    Errors are of unscaled gradients: what a ``GradScaler`` has scaled is corrected by as much, and
    they are kept when it is known whether the step is skipped.  A gradient is scaled by what it is
    computed of: that may be another scale behind an update, or none.  Parameters that are reduced
    again before their update are corrected by what has been lost since.
    Source: error feedback, Seide et al. 2014; Karimireddy et al. 2019.
    """

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, builder: Builder) -> None:
        self.builder = builder
        self.mesh, self.options = ctx.mesh, ctx.options
        self._is_set = is_set_by_step(gm.graph)
        self.counts: Counter[str] = Counter()
        self._open: list[_Open] = []

    def is_on(self, axis: str) -> bool:
        """Return whether what is lost over an axis is to be kept."""
        inside, outside = self.options.feeds_back
        return outside if self.mesh.outer and axis == self.mesh.outer else inside

    def why_not(
        self, flat: fx.Node, indices: Sequence[int], together: Iterable[Sequence[int]]
    ) -> str:
        """Return why these cannot be corrected; ``together`` are all that are reduced together."""
        if len(loss_scales_of(flat)) > 1:
            return "several loss scales"
        if self._is_set and loss_scales_of(flat):
            return "a loss scale that the step sets"
        mine = set(indices)
        if any(mine & set(other) and mine != set(other) for other in together):
            return "reduced in several ways"
        return ""

    def correct(
        self, call: Any, flat: fx.Node, indices: Sequence[int], numel: int, axis: str
    ) -> fx.Node:
        """Insert what a wire is made of in place of the gradients of these parameters."""
        previous = self._find(axis, tuple(indices))
        if previous is not None and _update_between(previous.rest, flat, indices):
            self._keep(previous)
            previous = None
        rest = {} if previous is None else {"rest": previous.rest}
        over = self.mesh.over(axis)
        scale = {"scale": found[0]} if (found := loss_scales_of(flat)) else {}
        origin = {**over, **scale, **rest, "role": Role.GRADIENT_WIRE}
        return call(ops.correct, flat, list(indices), numel, **origin)

    def lost(
        self,
        call: Any,
        corrected: fx.Node,
        wire: fx.Node,
        code: str,
        parts: int,
        indices: Sequence[int],
        axis: str,
    ) -> None:
        """Insert what a wire loses, to be kept."""
        rest = _rounding_error(call, corrected, corrected, wire, code, parts)
        found = self._find(axis, tuple(indices))
        if found is None:
            self._open.append(_Open(axis, tuple(indices), rest))
        else:
            found.rest = rest

    def lost_of_sum(
        self, call: Any, total: fx.Node, wire: fx.Node, code: str, indices: Sequence[int], axis: str
    ) -> None:
        """Insert what is lost of a sum that all ranks are sent, to be kept by who has summed it."""
        found = self._find(axis, tuple(indices))
        assert found is not None, "it was corrected"
        corrected = found.rest.args[0]
        found.sums.append(_rounding_error(call, corrected, total, wire, code, 1))

    def _find(self, axis: str, indices: tuple[int, ...]) -> _Open | None:
        among = (one for one in self._open if (one.axis, one.indices) == (axis, indices))
        return next(among, None)

    def keep_all(self) -> None:
        """Insert what keeps all that was lost, behind what says whether the step is skipped."""
        for one in list(self._open):
            self._keep(one)

    def _keep(self, one: _Open) -> None:
        self._open.remove(one)
        by_flag: dict[fx.Node | None, list[int]] = {}
        for index in one.indices:
            by_flag.setdefault(self._flag_of(index, one.rest), []).append(index)
        for found_inf, indices in by_flag.items():
            flag = {} if found_inf is None else {"found_inf": found_inf}
            last = max([one.rest, *one.sums, *flag.values()])
            origin: dict[str, Any] = {"role": Role.KEPT_ERROR, "like": one.rest}
            origin |= self.builder.serving(indices)
            with self.builder.before(last.next, **origin) as call:
                over = self.mesh.over(one.axis)
                call(ops.keep_error, one.rest, list(one.sums), indices, **over, **flag)

    def _flag_of(self, index: int, rest: fx.Node) -> fx.Node | None:
        """Return the ``found_inf`` that skips the next update of a parameter; None without one."""
        node = rest.next
        while node.op != "output":
            if any(parameter == index for _, parameter in updated_by(node)):
                return ops.argument(node, "found_inf")
            node = node.next
        return None


def _rounding_error(
    call: Any, corrected: fx.Node, exact: fx.Node, wire: fx.Node, code: str, parts: int
) -> fx.Node:
    """Insert what a wire loses of these values, which are scaled as ``corrected`` is."""
    scale = ops.argument(corrected, "scale")
    origin = {"role": Role.ROUNDING_ERROR, **({} if scale is None else {"scale": scale})}
    return call(ops.rounding_error, exact, wire, code, parts, **origin)


def _update_between(rest: fx.Node, flat: fx.Node, indices: Sequence[int]) -> bool:
    """Return whether parameters are updated between two reductions of their gradients."""
    node = rest
    while node is not flat and node.op != "output":
        if any(parameter in indices for _, parameter in updated_by(node)):
            return True
        node = node.next
    return False
