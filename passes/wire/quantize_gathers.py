"""Let parameters travel in fewer bits: their shards are quantised before each gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, shards_in
from zerofx.ir.graph import Builder, erase_unused
from zerofx.ir.interface import written_input
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.wire_graph import becomes_parameters, exact_behind, is_parameter
from zerofx.ir.wires import is_quantizable
from zerofx.passes.base import Conflict, Counts, PassContext
from zerofx.passes.zero.elementwise import is_elementwise

CONFLICTS = (
    Conflict(
        lambda options: options.gather_dtype and options.stage < 3,
        "gather_dtype={gather_dtype!r} needs stage 3, on a mesh for its inner axis: at stage"
        " {stage} ranks keep whole parameters between steps, and what they gather are new values."
        " In eight bits every update would be lost that is smaller than half a code. Choose stage"
        " 3, which keeps exact shards, or drop gather_dtype",
    ),
)

LEFT = "travel as before: "

aten = torch.ops.aten

_PLACING = (
    aten.cat.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
)
"""Operators that put elements next to others, as a flat average of all weights has them."""


def quantize_gathers(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Gather the wires of parameters' shards, and compute with what comes back.

    Before (``p`` and ``q`` this rank's shards of float32, ``w`` in the dtype that uses it)::

        packed = zerofx.pack([p, q], [0, 1], n)
        w = zerofx.wait(zerofx.all_gather_start(_to_copy(packed, dtype=bf16), 2))
        ...;  zerofx.free(w)

    After::

        packed = zerofx.pack([p, q], [0, 1], n)
        wire = zerofx.quantize(packed, "int8", 1, [0, 1])
        gathered = zerofx.wait(zerofx.all_gather_start(wire, 2))
        w = zerofx.dequantize(gathered, "int8", 2, n, bf16);  zerofx.free(gathered)
        ...;  zerofx.free(w)

    All ranks compute with the same values, the owner of a shard too; the shard itself stays exact.
    A wire serves all gathers of its shard until that is written to: it is made for the first of
    them, and kept for the others.  On a mesh whose axes are both cut, wires go both ways.

    What travels as before is counted, with why, and what shares a hop with it too: integers have
    no codes;
    what a step has computed of shards is no parameter; and what becomes a parameter's new value,
    the caller's, or element by element a tensor of the caller's, has to be exact.
    Source: ZeRO++, Wang et al. 2023, section 3.1 (qwZ).
    """
    code = ctx.options.gather_dtype
    assert code is not None, "the pass is off without"
    builder = Builder(gm, "quantize_gathers", ctx.table)
    written = becomes_parameters(gm.graph)
    wires: dict[tuple[fx.Node, ...], fx.Node] = {}
    counts: Counter[str] = Counter()
    reasons: dict[fx.Node, str] = {}  # by the first hop: what gathers have in common is one wire
    waits = gm.graph.find_nodes(op="call_function", target=ops.wait)
    gathers = [wait for wait in waits if role(wait) == Role.GATHER]
    for wait in gathers:
        first, parts = ops.hops_of(wait)[-1], tuple(shards_in(exact_behind(wait)).values())
        reasons[first] = reasons.get(first) or _why_not(wait, parts, written)
    for wait in gathers:
        first, shard = ops.hops_of(wait)[-1], exact_behind(wait)
        if reasons[first]:
            counts[LEFT + reasons[first]] += 1
            continue
        held = shards_in(shard)
        parts = tuple(held.values())
        if parts not in wires:
            with builder.before(first, role=Role.QUANTIZED, **_origin(wait)) as call:
                wires[parts] = call(ops.quantize, shard, code, 1, list(held))
            counts["wires"] += 1
        _gather_wire(builder, wait, wires[parts], code)
        counts["quantised gathers"] += 1
    return counts


def _why_not(wait: fx.Node, parts: Sequence[fx.Node], written: set[fx.Node]) -> str:
    """Return why what a gather puts together cannot be quantised; empty if it can."""
    dtypes = {part.meta["val"].dtype for part in (*parts, wait)}
    if not all(map(is_quantizable, dtypes)):
        return "no floating point numbers"
    if not all(map(is_parameter, parts)):
        return "computed of shards, and no parameter"
    if wait in written:
        return "a parameter's new value is computed of it"
    if any(reader.op == "output" for alias in aliases(wait) for reader in alias.users):
        return "the caller's"
    if _is_averaged(wait):
        return "a tensor of the caller's is written with it"
    return ""


def _is_averaged(wait: fx.Node) -> bool:
    """Return whether an input is written element by element with it, as averages of weights are.

    Statistics of a forward pass are no such: they are computed of activations.
    """

    def computed(node: fx.Node) -> list[fx.Node]:
        pairs = [(alias, user) for alias in aliases(node) for user in alias.users]
        return [user for alias, user in pairs if _keeps_elements(user, alias)]

    return any(written_input(user) for node in reached([wait], computed) for user in node.users)


def _keeps_elements(reader: fx.Node, operand: fx.Node) -> bool:
    """Return whether a node computes with each element of an operand by itself, or places it."""
    return reader.target in _PLACING or (is_elementwise(reader) and _fits(reader, operand))


def _fits(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two tensors have the same shape, of known sizes as parameters have."""
    sizes = one.meta["val"].shape
    return all(type(size) is int for size in sizes) and sizes == other.meta["val"].shape


def _gather_wire(builder: Builder, wait: fx.Node, wire: fx.Node, code: str) -> None:
    """Let a gather put together this wire, and let who read what it gave read values of it."""
    shard = exact_behind(wait)
    numel, dtype = shard.meta["val"].shape[0], wait.meta["val"].dtype
    num_parts = wait.meta["val"].shape[0] // numel if numel else 1
    hops = ops.hops_of(wait)
    unread = hops[-1].args[0]
    hops[-1].args = (wire, *hops[-1].args[1:])
    for start in reversed(hops):
        builder.refresh(start)
        builder.refresh(ops.wait_of(start))
    with builder.before(wait.next, role=Role.DEQUANTIZED, **_origin(wait)) as call:
        values = call(ops.dequantize, wait, code, num_parts, numel, dtype)
        wait.replace_all_uses_with(values, delete_user_cb=lambda user: user is not values)
        call(ops.free, wait, role=Role.FREE)
    erase_unused(builder.graph, [unread])


def _origin(wait: fx.Node) -> dict:
    return {"parameter": parameter_of(wait), "bucket": bucket_of(wait), "like": wait}
