"""Place communication in the program: as early as its data, a bounded number in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import is_compute
from zerofx.ir.graph import is_backward
from zerofx.ir.roles import Role, role
from zerofx.passes.memory.saved_values import is_fused


def stagger_waits(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Put each ``wait`` in front of the next start: one transfer overlaps compute at a time.

    A started reduction keeps its whole input alive until its wait, so waits must not pile up
    at the end of backward.  ``pairs`` are (start, wait); a wait that is read before the next
    start is moved no later than its first reader.
    """
    pairs = sorted(pairs)
    ranges = [user for _, wait in pairs for user in wait.users if user.users]
    for part in ranges:
        if role(part) == Role.REDUCED_GRADIENT:
            min(part.users).prepend(part)  # taken only where it is read
    for (_, wait), (following, _) in itertools.pairwise(pairs):
        # Not two flat buckets at once: wait before the next one is filled.
        flat = following.all_input_nodes[0]
        filled = flat if flat.target is ops.flatten_bucket else following
        min([filled, *wait.users]).prepend(wait)  # nodes compare by program order
    if pairs:
        start, wait = pairs[-1]
        start.append(wait)  # nothing left to overlap with


def place_reductions(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Place waits of reduce-scatters, and what reduces their shards over the rest of a mesh.

    ``pairs`` are (start, wait).  The second reduction starts as soon as the first one is there, and
    is waited for behind the start of the next one's.
    """
    seconds = [user for _, wait in pairs for user in wait.users if ops.is_collective(user)]
    for second in seconds:  # waits of the first are not held up by readers of the second
        ops.wait_of(second).prepend(second)
    stagger_waits(pairs)
    for second in seconds:
        hoist(second)
    stagger_waits([(second, ops.wait_of(second)) for second in seconds])


def hoist(
    node: fx.Node,
    brings: Callable[[fx.Node], bool] = lambda operand: False,
    hoisted: set[fx.Node] | None = None,
) -> None:
    """Move a node to just after the last of its operands, and first those that it ``brings``.

    Nothing is moved that has been ``hoisted``; what is moved is added to it.
    """
    hoisted = set() if hoisted is None else hoisted
    if node in hoisted:
        return
    hoisted.add(node)
    operands = node.all_input_nodes
    for operand in filter(brings, operands):
        hoist(operand, brings, hoisted)
    anchor = max(operands, default=None)
    if anchor is not None and anchor.op != "placeholder" and anchor.next is not node:
        anchor.append(node)


def hoist_reduction(start: fx.Node) -> None:
    """Start a reduction as soon as its gradients are there, with what casts and lays these out."""
    hoist(start, lambda operand: role(operand) in (Role.FLATTEN, Role.REDUCE_CAST))


def sink_past_fused(node: fx.Node) -> None:
    """Move a node of backward behind what Inductor fuses with what stands before it.

    Between the two it would part regions, and a region cannot write its results into what another
    has made: the gradient of a gated product would take one activation more.
    """
    anchor = node
    while node not in (following := anchor.next).all_input_nodes:
        if not (is_compute(following) and is_backward(following) and is_fused(following)):
            break
        anchor = following
    if anchor is not node:
        anchor.append(node)
