"""Notes of the passes that lower: regions, replaced nodes, work on gradients."""

from __future__ import annotations

from typing import Any

from torch import fx

STANDS_FOR = "zerofx_stands_for"
"""In a node's metadata, the name of the first node that it runs in place of."""


def set_gradient_work(update: fx.Node, work: Any) -> None:
    """Record what ``update_together`` says as text, for a kernel."""
    update.meta["zerofx_work"] = work


def gradient_work(update: fx.Node) -> Any:
    """Return the work on gradients that an ``update_together`` does first; None for none."""
    return update.meta.get("zerofx_work")


def set_region(node: fx.Node, number: int) -> None:
    """Record which run of compute a node is in: what is compiled together."""
    node.meta["zerofx_region"] = number


def region_of(node: fx.Node) -> int | None:
    """The run of compute that a node is in; None for what is none, or not in one yet."""
    return node.meta.get("zerofx_region")
