"""Regions: runs of compute between two of our operators, which are compiled together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.aliases import is_compute, memory_of, mutated_inputs, uses
from zerofx.ir.graph import is_backward, is_random
from zerofx.ir.interface import gradient_of, input_role
from zerofx.ir.roles import Role, role

aten = torch.ops.aten


def goes_into_region(node: fx.Node) -> bool:
    """Return whether a node is compute: neither ours nor a result of ours, nor a write."""
    if not is_compute(node):
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


def numbered(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes of regions with their region's number, in the program's order.

    A region ends before a node that goes into none.  What backward computes again begins one: a
    compiler that saw the first computation beside it would do both at once, and keep the results
    until backward.  So does a sum of a parameter's gradients, as of one that is used twice or in
    several micro-batches, if a term is a product that several others have followed since: Inductor
    would compute it where it is added, and keep what it is made of until then.
    """
    sums = _sums_of_gradients(nodes)
    number, has_forward = 0, False
    products: list[fx.Node] = []
    for node in nodes:
        # One of several results stays with what has made them, though it is taken once again.
        is_again = role(node) == Role.RECOMPUTE and node.target is not operator.getitem
        is_inside = goes_into_region(node)
        adds_early = node in sums and not set(products[:-2]).isdisjoint(_terms(node))
        if not is_inside or (is_again and has_forward) or adds_early:
            number, has_forward, products = number + 1, False, []
        if is_inside:
            has_forward |= not is_again and not is_backward(node)
            yield node, number
        if node.target is aten.mm.default:
            products.append(node)


def of_batch_alone(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what is computed of the batch and of constants, in any order: masks, angles of rope.

    Nothing of a parameter or a gradient is in it, nothing is drawn, and what it reads is not
    written to.
    """
    nodes = list(nodes)
    written = {
        source for node in nodes for given in mutated_inputs(node) for source in memory_of(given)
    }
    found: set[fx.Node] = set()
    for node in nodes:
        if node in written:
            continue
        if node.op == "placeholder":
            is_one = input_role(node).kind not in ("parameter", "gradient")
        else:
            is_one = goes_into_region(node) and not is_random(node)
        if is_one and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def shared_by_layers(nodes: Iterable[fx.Node], numbers: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return what is of the batch alone, and read by more regions than one and its backward.

    ``numbers`` are those of the regions.
    """
    common = of_batch_alone(nodes)
    readers = {node: {numbers.get(user) for user, _ in uses(node)} - {None} for node in common}
    return {node for node in common if len(readers[node]) > 2}


def _sums_of_gradients(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the sums that make a parameter's gradient of those of its several uses."""
    found: set[fx.Node] = set()
    left = [node for node in nodes if gradient_of(node)]
    while left:
        node = left.pop()
        if node.target is aten.add.Tensor and node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _terms(total: fx.Node) -> Iterator[fx.Node]:
    """Yield what a sum adds up, and what that is a view or a cast of."""
    left = list(total.all_input_nodes)
    while left:
        for node in memory_of(left.pop()):
            yield node
            left += node.all_input_nodes if node.target is aten._to_copy.default else []
