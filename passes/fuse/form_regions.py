"""Part the program into regions: runs of compute that are compiled together."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.aliases import is_compute as computes
from zerofx.ir.graph import is_backward
from zerofx.ir.interface import region_of, set_region
from zerofx.ir.roles import Role, role
from zerofx.passes.base import Counts, PassContext


def form_regions(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Number each run of compute between two of our operators.

    Before::

        v = t.view(8);  start = zerofx.all_gather_start(s, 2);  a = sin(v);  b = cos(a)

    After::

        start = zerofx.all_gather_start(s, 2);  v = t.view(8);  a = sin(v);  b = cos(a)
        #                                       ~~~~~~~~~~~~ region 1 ~~~~~~~~~~~~~~~~~

    What backward computes again begins a region: a compiler that saw the first computation beside
    it would do both at once, and keep the results until backward.

    Every region gets a view of its own, where it reads one that another region takes: what passes
    between regions is whole memory, once, which its last reader may reuse.  The order of everything
    else stays.
    """
    graph = gm.graph
    _take_results_apart_at_once(graph)
    number, has_forward = 0, False
    for node in graph.nodes:
        is_again = role(node) == Role.RECOMPUTE
        if not is_compute(node) or (is_again and has_forward):
            number, has_forward = number + 1, False
        if is_compute(node):
            set_region(node, number)
            has_forward |= not is_again and not is_backward(node)
    _take_views_where_they_are_read(graph)
    regions = {region_of(node) for node in graph.nodes} - {None}
    return {"regions": len(regions)}


def _take_results_apart_at_once(graph: fx.Graph) -> None:
    """Compiled regions return tensors: those of several results are taken where they are made."""
    for node in graph.nodes:
        if not is_compute(node) or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for part in [user for user in node.users if user.target is operator.getitem]:
            if part.users:
                node.append(part)
            else:
                graph.erase_node(part)


def _take_views_where_they_are_read(graph: fx.Graph) -> None:
    """Give every region the views that it reads."""
    for node in reversed(graph.nodes):
        own_region = region_of(node)
        if own_region is None or not _is_view(node):
            continue
        own = {own_region: node}
        for user in sorted(node.users):  # in the program's order
            region = region_of(user)
            if region is None:
                continue
            if region not in own:
                with graph.inserting_before(user):
                    own[region] = graph.node_copy(node)
                set_region(own[region], region)
            user.replace_input_with(node, own[region])
        if not node.users:
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    """Return whether all that a node does is to look at one tensor's memory in another way."""
    is_call = isinstance(node.target, torch._ops.OpOverload)
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    return is_call and is_one and aliased_inputs(node) == node.all_input_nodes


def is_compute(node: fx.Node) -> bool:
    """Return whether a node goes into a region: neither ours nor a result of ours, nor a write."""
    if not computes(node):
        return False
    if node.target is operator.getitem and ops.is_ours(node.args[0].target):
        return False
    return not _has_branches(node)


def _has_branches(node: fx.Node) -> bool:
    """Return whether a node runs its own programs, as ``torch.cond`` does, or is a result of one.

    These are in attributes and no tensors, as a region's inputs are: they run operator by operator.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _has_branches(node.args[0])
    return compat.inductor.is_higher_order(node.target)
