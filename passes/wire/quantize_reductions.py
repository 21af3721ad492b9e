"""Let gradients travel in fewer bits: each rank sums, in float32, what the others have sent it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.wires import NARROW, wire_length
from zerofx.passes.base import Conflict, Counts, PassContext
from zerofx.passes.wire.error_feedback import WITHOUT, Feedback

aten = torch.ops.aten

CONFLICTS = (
    Conflict(
        lambda options: options.quantizes_reductions and options.reduce_dtype,
        "reduce_wire and reduce_dtype={reduce_dtype} exclude each other: one says in what gradients"
        " travel, to be summed in float32, and the other in what they travel and are summed. Drop"
        " reduce_dtype, or reduce_wire",
    ),
    Conflict(
        lambda options: options.quantizes_reductions and options.stage == 0,
        "reduce_wire needs stage 1, 2 or 3, on a mesh for its inner axis: at stage 0 each rank"
        " needs the sums of whole gradients, and every rank would have to send all of them on, in"
        " as many bytes again. Choose stage 1, which has each rank sum its own shard, or"
        " reduce_dtype='bfloat16'",
    ),
    Conflict(
        lambda options: (
            (options.error_feedback and not options.reduce_wire)
            or (options.outer_feedback and not options.outer_wire)
        ),
        "error_feedback keeps what a reduce_wire loses, and is on over an axis that has none: give"
        " that axis a reduce_wire, or drop error_feedback there",
        is_lack=True,
    ),
)

LEFT = "reduced as before: "

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of gradients that have wires: float32 holds all their values."""


def quantize_reductions(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Send the wires of gradients' parts to the ranks that sum them.

    Before::

        flat = flatten_bucket([a, b], [0, 1], n)
        g = zerofx.wait(zerofx.reduce_scatter_start(flat, "mean", 2))

    After::

        flat = flatten_bucket([a, b], [0, 1], n)
        wire = zerofx.quantize(flat, "int8", 2, [0, 1])
        received = zerofx.wait(zerofx.all_to_all_start(wire, 2))
        g = zerofx.dequantize_sum(received, "int8", 2, n // 2, "mean", float32)

    What ``bfloat16`` travels in is a cast.  A rank sums what it has sent itself as the others have
    it: rounded.  On a mesh each axis has a wire of its own, or none; between two wires the sum is
    in float32.  Over an outer axis of stage 0 all ranks need the sum: it is summed in parts, and
    these are gathered, as wires again, so that all have the same::

        parts = zerofx.fill_up(shard, [0, 1], m)
        received = zerofx.wait(zerofx.all_to_all_start(zerofx.quantize(parts, "int8", 2), 2))
        sums = zerofx.dequantize_sum(received, "int8", 2, m // 2, "mean", float32)
        gathered = zerofx.wait(zerofx.all_gather_start(zerofx.quantize(sums, "int8"), 2))
        g = zerofx.dequantize(gathered, "int8", 2, m // 2, float32)[0:n]

    What is reduced as before is counted, with why.
    Source: ZeRO++, Wang et al. 2023, section 3.3 (qgZ).
    """
    counts: Counter[str] = Counter()
    quantised = _Quantiser(gm, ctx)
    reductions = [node for node in gm.graph.nodes if _reduces_gradient(node)]
    firsts = [node for node in reductions if _hop_before(node) is None]
    for first, indices in zip(firsts, quantised.note_all(firsts), strict=True):
        hops = [first, *filter(_reduces_gradient, ops.wait_of(first).users)]
        codes = []
        for hop in hops:
            code = quantised.code_over(ops.argument(hop, "axis"))
            why = quantised.why_not(hop, code) if code else ""
            if code:
                counts[LEFT + why if why else f"in {code}{quantised.along(hop)}"] += 1
            codes.append("" if why else code)
        dtype = first.meta["val"].dtype
        for number, (hop, code) in enumerate(zip(hops, codes, strict=True)):
            if code:
                follows = any(codes[number + 1 :])
                quantised.rewrite(hop, code, indices, torch.float32 if follows else dtype)
    quantised.feedback.keep_all()
    return counts + quantised.feedback.counts


def _reduces_gradient(node: fx.Node) -> bool:
    return ops.is_collective(node) and role(node) == Role.REDUCE_GRADIENT


def _hop_before(start: fx.Node) -> fx.Node | None:
    """The reduction whose result a start reduces further over the rest of a mesh."""
    wait = start.args[0]
    is_second = isinstance(wait, fx.Node) and wait.target is ops.wait
    return wait.args[0] if is_second and _reduces_gradient(wait.args[0]) else None


class _Quantiser:
    """Replaces reductions by sums of wires, in one program."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.ctx, self.mesh, self.options = ctx, ctx.mesh, ctx.options
        self.builder = Builder(gm, "quantize_reductions", ctx.table)
        self.feedback = Feedback(gm, ctx, self.builder)
        self.together: list[list[int]] = []

    def note_all(self, firsts: Sequence[fx.Node]) -> list[list[int]]:
        """Note, and return, the parameters whose gradients each of these reduces."""
        for first in firsts:
            flat = first.args[0]
            of_bucket = isinstance(flat, fx.Node) and flat.target in (ops.flatten_bucket, ops.pack)
            self.together.append(list(flat.args[1]) if of_bucket else [parameter_of(first)])
        return self.together

    def code_over(self, axis: str) -> str:
        """The code for what travels over an axis, or over all; empty for none."""
        inner, outer = self.options.reduce_wire or "", self.options.outer_wire or ""
        if not self.mesh.outer:
            return inner
        return {self.mesh.inner: inner, self.mesh.outer: outer}.get(axis, inner or outer)

    def along(self, hop: fx.Node) -> str:
        return f" over {ops.argument(hop, 'axis')}" if self.mesh.outer else ""

    def why_not(self, hop: fx.Node, code: str) -> str:
        """Return why a reduction stays as it is; empty if it does not have to."""
        value, ranks = hop.meta["val"], self._num_ranks(hop)
        if value.dtype not in DTYPES:
            return "no float32, bfloat16 or float16"
        if hop.target is not ops.reduce_scatter_start and _hop_before(hop) is None:
            return "whole on all ranks"
        if ranks == 1:
            return "of one rank"
        numel = -(-hop.args[0].meta["val"].shape[0] // ranks)
        nbytes = ranks * wire_length(numel, code) * (2 if code == NARROW else 1)
        is_short = hop.args[0].meta["val"].shape[0] < ranks
        return "in no fewer bytes" if is_short or nbytes > ops.rules(hop).sends(hop) else ""

    def _num_ranks(self, hop: fx.Node) -> int:
        return ops.num_ranks(hop, self.ctx.world_size)

    def rewrite(self, hop: fx.Node, code: str, indices: Sequence[int], dtype: torch.dtype) -> None:
        """Replace one reduction of these gradients, at the places of its start and of its wait."""
        wait, ranks, reduction = ops.wait_of(hop), self._num_ranks(hop), hop.args[1]
        (flat,), over = hop.all_input_nodes, self.mesh.over(ops.argument(hop, "axis"))
        comes_back = hop.target is ops.all_reduce_start
        length = flat.meta["val"].shape[0]
        numel = -(-length // ranks)
        origin = {"role": Role.REDUCE_GRADIENT, **_origin(hop)}
        axis, feedback = ops.argument(hop, "axis"), self.feedback
        corrects = self._corrects(axis, flat, indices)
        with self.builder.before(hop, **origin) as call:
            parts, named = flat, indices
            if corrects:
                named, parts = (), feedback.correct(call, flat, indices, ranks * numel, axis)
            elif ranks * numel != length:
                given = (flat, indices, ranks * numel)
                named, parts = (), call(ops.fill_up, *given, role=Role.GRADIENT_WIRE)
            wire = _wire(call, parts, code, ranks, named)
            start = call(ops.all_to_all_start, wire, ranks, **over)
            if corrects:
                feedback.lost(call, parts, wire, code, ranks, indices, axis)
        with self.builder.before(wait, **origin) as call:
            received = call(ops.wait, start)
            summed_in = torch.float32 if comes_back else dtype
            sent = (code, ranks, numel)
            reduced = call(ops.dequantize_sum, received, *sent, reduction, summed_in)
            if comes_back:
                wire = _wire(call, reduced, code, 1, ())
                back = call(ops.all_gather_start, wire, ranks, **over)
                if corrects:
                    feedback.lost_of_sum(call, reduced, wire, code, indices, axis)
                gathered = call(ops.wait, back)
                reduced = _values(call, gathered, *sent, dtype)
                if ranks * numel != length:
                    reduced = call(aten.slice.Tensor, reduced, 0, 0, length)
        wait.replace_all_uses_with(reduced)
        self.builder.graph.erase_node(wait)
        self.builder.graph.erase_node(hop)

    def _corrects(self, axis: str, flat: fx.Node, indices: Sequence[int]) -> bool:
        """Return whether what these lose over an axis is kept; count why not if it should be."""
        if not self.feedback.is_on(axis):
            return False
        why = self.feedback.why_not(flat, indices, self.together)
        if why:
            self.feedback.counts[WITHOUT + why] += 1
        return not why


def _wire(call: Any, flat: fx.Node, code: str, parts: int, indices: Sequence[int]) -> fx.Node:
    """Insert the wire of a flat buffer in so many parts."""
    if code == NARROW:
        return call(aten._to_copy.default, flat, dtype=torch.bfloat16, role=Role.GRADIENT_WIRE)
    return call(ops.quantize, flat, code, parts, list(indices), role=Role.GRADIENT_WIRE)


def _values(
    call: Any, gathered: fx.Node, code: str, parts: int, numel: int, dtype: torch.dtype
) -> fx.Node:
    """Insert the values of wires that ranks have gathered."""
    if code == NARROW:
        return call(aten._to_copy.default, gathered, dtype=dtype)
    return call(ops.dequantize, gathered, code, parts, numel, dtype)


def _origin(hop: fx.Node) -> dict[str, Any]:
    return {"parameter": parameter_of(hop), "bucket": bucket_of(hop), "like": hop}
