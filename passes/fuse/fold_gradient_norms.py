"""Let updates give the squares of their gradients, where a norm is only looked at."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.graph import erase_unused
from zerofx.ir.reduction_hops import hops_into
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.fuse.fold_gradient_work import may_be_overwritten
from zerofx.passes.fuse.together import result_of, run_together

aten = torch.ops.aten


def fold_gradient_norms(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Take the squares of gradients from their updates, for a total norm that decides no update.

    Before::

        update(p, g, 1, 0);  update(q, h, 1, 1);  a = norm(g) ** 2;  b = norm(h) ** 2
        all = wait(all_reduce_start(stack([a, b]), "sum"))
        total = norm(stack([sqrt(all[0]), sqrt(all[1])]))

    After::

        s, a = update_together([p], [g], 1, [0], norm=0)
        t, b = update_together([q], [h], 1, [1], norm=0);  ...

    The gradient is then read once, and gone after its update.  Updates of one norm may share out
    their squares as they like: only the total reads them.  A norm that clips comes before the
    updates, and is left alone; so is one of whose gradients any cannot be folded.
    """
    graph = gm.graph
    number = folded = 0
    for start in [node for node in graph.nodes if node.target is ops.all_reduce_start]:
        for members in _totals(start):
            found = [(square, _update_of(square, start)) for square in members]
            updates = {update for _, update in found}
            if None in updates or len(updates) < len(members):
                continue
            for square, update in found:
                assert update is not None
                value = square.meta["val"]
                by = "fold_gradient_norms"
                together = run_together(graph, [update], by, squares=value, norm=number)
                square.replace_all_uses_with(result_of(together, 1))
                erase_unused(graph, [square])
                folded += 1
            number += 1
    return {"norms": number, "gradients": folded}


def _totals(start: fx.Node) -> list[list[fx.Node]]:
    """The squares of norms that a reduction sums, by the norm of all that is made of them.

    Only those of which nothing else is made.
    """
    stacked, reduction = start.args[:2]
    wait = _only_user(start, ops.wait)
    if stacked.target is not aten.stack.default or reduction != "sum" or wait is None:
        return []
    if list(stacked.users) != [start] or any(not _is_part(user, wait) for user in wait.users):
        return []
    squares = stacked.args[0]
    sums = {part.args[2]: part for part in wait.users}
    totals: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for position, square in enumerate(squares):
        total = _total_of(sums[position]) if position in sums else None
        if total is not None and squares.count(square) == 1:
            totals[total].append(square)
    # One of norms that are reduced apart is not all here.
    return [members for total, members in totals.items() if len(members) == len(total.args[0])]


def _is_part(node: fx.Node, stacked: fx.Node) -> bool:
    return node.target is aten.select.int and node.args[:2] == (stacked, 0)


def _total_of(part: fx.Node) -> fx.Node | None:
    """The stack of norms whose norm is all that anybody wants of one sum of squares."""
    norm = _only_user(part, aten.sqrt.default)
    while norm is not None and (cast := _only_user(norm, aten._to_copy.default)) is not None:
        norm = cast
    stacked = _only_user(norm, aten.stack.default) if norm is not None else None
    if stacked is None or stacked.args[0].count(norm) != 1:
        return None
    total = _only_user(stacked, aten.linalg_vector_norm.default)
    return stacked if total is not None and _is_of_order_2(total) else None


def _update_of(square: fx.Node, start: fx.Node) -> fx.Node | None:
    """The update that has the elements at hand of which a norm's square is; None if none has."""
    norm = square.args[0] if square.target is aten.pow.Tensor_Scalar else None
    if norm is None or square.args[1] != 2 or list(norm.users) != [square]:
        return None
    if norm.target is not aten.linalg_vector_norm.default or not _is_of_order_2(norm):
        return None
    gradient = norm.args[0]
    if gradient.target is ops.mask_padding:
        gradient = gradient.args[0]
        if not _has_zeros_for_padding(gradient):
            return None
    if norm.meta["val"].dtype is not torch.float32 or gradient.meta["val"].dtype not in _SUMMED:
        return None
    if list(square.users) != [start.args[0]] or may_be_overwritten(gradient, norm):
        return None
    for update in gradient.users:
        is_its = update.target is ops.update and update.args[1] is gradient
        if is_its and update < start.args[0]:
            return update
    return None


# Whose squares the kernel sums, in float32.
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def _has_zeros_for_padding(gradient: fx.Node) -> bool:
    """Return whether a gradient is part of a bucket as it was reduced, or that cast or scaled.

    A factor that is a tensor may be infinite, and make NaN of zero.
    """
    node = gradient
    while not (hops := hops_into(node)):
        sources = aliased_inputs(node)
        if node.target is aten._to_copy.default or _scales_by_a_number(node):
            sources = node.all_input_nodes
        if len(sources) != 1:
            return False
        (node,) = sources
    return hops[-1].source.target is ops.flatten_bucket


def _scales_by_a_number(node: fx.Node) -> bool:
    if node.target not in (aten.mul.Tensor, aten.div.Tensor):
        return False
    factor = node.args[1]
    return isinstance(factor, int | float) and math.isfinite(factor) and factor != 0


def _is_of_order_2(norm: fx.Node) -> bool:
    """Return whether it is the 2-norm of all elements of a flat tensor."""
    order = norm.args[1] if len(norm.args) > 1 else 2
    return order == 2 and norm.args[0].meta["val"].dim() == 1 and norm.meta["val"].dim() == 0


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    """The one user of a node, if it calls ``target``."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None
