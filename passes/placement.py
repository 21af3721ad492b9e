"""Where communication stands in the program: as early as its data, a bounded number in flight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def stagger_waits(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Let each ``wait`` follow the next start: one transfer overlaps compute at a time.

    A started reduction keeps its whole input alive until its wait, so waits must not pile up
    at the end of backward.  ``pairs`` are (start, wait); a wait that is read before the next
    start is moved no later than its first reader.
    """
    pairs = sorted(pairs)
    for (start, wait), following in zip(pairs, [*pairs[1:], None]):
        first_reader = min(wait.users, default=None)
        anchor = first_reader
        if following is not None:
            candidate = following[0]
            if anchor is None or candidate < anchor:
                anchor = candidate
        if following is None and anchor is None:
            continue
        if following is None:
            # Nothing else to overlap with: release the input as soon as it has been sent.
            start.append(wait)
            continue
        anchor.prepend(wait)


def hoist(node: fx.Node) -> None:
    """Move a node to just after the last of its operands."""
    operands = node.all_input_nodes
    if not operands:
        return
    anchor = max(operands)  # nodes compare by program order
    if anchor.op == "placeholder":
        return
    anchor.append(node)
