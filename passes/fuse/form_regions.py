"""Part the program into regions: runs of compute that are compiled together."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.interface import region_of, set_region
from zerofx.ir.regions import (
    goes_into_region,
    numbered,
    of_batch_alone,
    shared_by_layers,
)
from zerofx.passes.base import Counts, PassContext


def form_regions(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Number each run of compute between two of our operators.

    Before::

        v = t.view(8);  start = zerofx.all_gather_start(s, 2);  a = sin(v);  b = cos(a)

    After::

        start = zerofx.all_gather_start(s, 2);  v = t.view(8);  a = sin(v);  b = cos(a)
        #                                       ~~~~~~~~~~~~ region 1 ~~~~~~~~~~~~~~~~~

    Every region gets a view of its own, where it reads one that another region takes: what passes
    between regions is whole memory, once, which its last reader may reuse.  What layers share, a
    mask or the angles of rope, is computed behind the region before the first one's: its region is
    then like those of the others, and compiled with them.  The order of everything else stays.
    """
    graph = gm.graph
    _take_results_apart_at_once(graph)
    _compute_before_layers_what_they_share(graph)
    numbers = dict(numbered(list(graph.nodes)))
    for node, number in numbers.items():
        set_region(node, number)
    _take_views_where_they_are_read(graph)
    return {"regions": len(set(numbers.values()))}


def _take_results_apart_at_once(graph: fx.Graph) -> None:
    """Compiled regions return tensors: those of several results are taken where they are made."""
    for node in graph.nodes:
        if not goes_into_region(node) or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for part in [user for user in node.users if user.target is operator.getitem]:
            if part.users:
                node.append(part)
            else:
                graph.erase_node(part)


def _compute_before_layers_what_they_share(graph: fx.Graph) -> None:
    """Move what is of the batch alone, and layers read, to the end of the region before.

    Before::

        region 1: x = embedding(w, tokens)
        region 2: c = cos(positions);  y = mul(x, c);  region 3: z = mul(y, c);  ...

    After::

        region 1: x = embedding(w, tokens);  c = cos(positions)
        region 2: y = mul(x, c);  region 3: z = mul(y, c);  ...
    """
    numbers = dict(numbered(list(graph.nodes)))
    shared = shared_by_layers(graph.nodes, numbers)
    common = of_batch_alone(graph.nodes) if shared else set()
    end: fx.Node | None = None  # of the region before
    for _, run in itertools.groupby(list(numbers), numbers.__getitem__):
        members = list(run)
        moved: set[fx.Node] = set()
        for node in reversed(members):
            if node in shared or (node in common and not moved.isdisjoint(node.users)):
                moved.add(node)
        # Of several results, all: a compiled region returns no tuple.
        moved |= {node for node in members if _is_taken_from(node, moved)}
        rest = [node for node in members if node not in moved]
        if end is not None and moved and any(not aliased_inputs(node) for node in rest):
            for node in filter(moved.__contains__, members):
                end.append(node)
                end = node
            members = rest
        end = members[-1]


def _is_taken_from(node: fx.Node, made: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in made


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
