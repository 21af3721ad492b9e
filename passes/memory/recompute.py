"""Compute again in backward what is not worth keeping, or what forward was told to drop."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from zerofx import compat
from zerofx.ir.graph import Builder, erase_unused
from zerofx.ir.interface import mark_kept, note_decisions
from zerofx.ir.roles import Role
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.memory.saved_values import Choice, SavedValues, backward_calls


def recompute(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Repeat forward's nodes where backward reads them, just before their first reader.

    Before::

        gelu = gelu(mm);  y = mul(gelu, up);  z = mm(y, w2);  ...
        d_w2 = mm(dz.t(), y);  dy = mm(dz, w2.t());  d_up = mul(dy, gelu)

    After (``gelu`` is computed again from ``mm``, which its own gradient needs anyway)::

        gelu = gelu(mm);  y = mul(gelu, up);  z = mm(y, w2);  ...
        d_w2 = mm(dz.t(), y);  dy = mm(dz, w2.t());  gelu_1 = gelu(mm);  d_up = mul(dy, gelu_1)

    Repeated are values that ``torch.utils.checkpoint`` drops, whatever they cost; and where
    Inductor fuses them with their readers, those that ``SavedValues`` chooses.  Each call of
    backward repeats anew.  What may draw random numbers is never repeated, nor is any operator of
    another library without a ``dropout_p`` of 0: the second draw would differ.
    """
    builder = Builder(gm, "recompute")
    checkpointed = compat.aot.checkpointed_nodes(gm)
    num_checkpointed = 0
    for backward in backward_calls(gm.graph):
        num_checkpointed += _repeat(builder, backward, checkpointed, "checkpointed")
    counts = {"checkpointed": len(checkpointed), "recomputed": num_checkpointed}
    if ctx.options.lowering == "inductor":
        counts |= _repeat_what_is_cheap(gm, builder, ctx.decided.saved)
    return counts


def _repeat_what_is_cheap(
    gm: fx.GraphModule, builder: Builder, decided: Sequence[Choice] | None
) -> dict[str, int]:
    calls = backward_calls(gm.graph)
    values = SavedValues(gm.graph)
    choices = decided or [values.choose(backward) for backward in calls]
    note_decisions(gm.graph, saved=choices)
    nodes = {node.name: node for node in gm.graph.nodes}
    num_repeated = 0
    kept: dict[fx.Node, str] = {}
    dropped: dict[fx.Node, None] = {}
    for backward, (again, reasons) in zip(calls, choices, strict=True):
        repeated = {nodes[name] for name in again}
        read = dict.fromkeys(s for node in backward for s in node.all_input_nodes)
        dropped |= dict.fromkeys(node for node in read if node in repeated)
        kept |= {nodes[name]: reason for name, reason in reasons.items()}
        num_repeated += _repeat(builder, backward, repeated, "{} is not kept")
    equals = values.equals(kept)
    for node, same in equals.items():
        node.replace_all_uses_with(same)
        del kept[node]
    erase_unused(gm.graph, [*dropped, *equals])
    for node, reason in kept.items():
        mark_kept(node, f"{hinted_bytes(node) / 1e6:.3g} MB, {reason}")
    return {
        "recomputed because cheap": num_repeated,
        "merged": len(equals),
        "kept": len(kept),
        "bytes kept": sum(map(hinted_bytes, kept)),
    }


def _repeat(
    builder: Builder, backward: list[fx.Node], chosen: Collection[fx.Node], reason: str
) -> int:
    """Give one backward its own copies of the chosen nodes that it reads; return how many."""
    repeated: dict[fx.Node, fx.Node] = {}

    def repeat(node: fx.Node, before: fx.Node) -> fx.Node:
        pending = [node]  # and no recursion: checkpointed chains are as long as a model is deep
        while pending:
            current = pending[-1]
            missing = [s for s in current.all_input_nodes if s in chosen and s not in repeated]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in repeated:
                with builder.graph.inserting_before(before):
                    origin = {"parameter": -1, "reason": reason.format(current.name)}
                    duplicate = builder.copy(current, repeated, role=Role.RECOMPUTE, **origin)
                duplicate.meta["autograd_backward"] = True
                repeated[current] = duplicate
        return repeated[node]

    for node in backward:
        for source in list(node.all_input_nodes):
            if source in chosen:
                node.replace_input_with(source, repeat(source, node))
    return len(repeated)
