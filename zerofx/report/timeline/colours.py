"""Colours that people with any colour vision tell apart, on light and on dark ground.

Source: Okabe and Ito 2008, "Color Universal Design", their eight but for black.
"""

from __future__ import annotations

from zerofx.report.timeline.record import Busy, Node

KINDS = {
    "parameters": "#0072b2",
    "optimizer states": "#56b4e9",
    "inputs": "#8c8c8c",
    "gathered parameters": "#e69f00",
    "gradients": "#d55e00",
    "activations": "#009e73",
    "temporaries": "#cc79a7",
    "staging": "#f0e442",
}
"""Memory.  What travels has the colour of what it is in memory."""

WAITING = "#9a9a9a"

WORK = {
    "forward": "#009e73",
    "backward": "#cc79a7",
    "recompute": "#7fcdb8",
    "update": "#0072b2",
    "waiting": WAITING,
    "gather": "#e69f00",
    "reduce": "#d55e00",
    "norms and flags": "#8c8c8c",
    "to owners and back": "#56b4e9",
    "shards moved": "#e69f00",
    "activations moved": "#009e73",
    "updates on the host": "#0072b2",
    "states in files": "#56b4e9",
}
"""What lanes do."""


def work_of(span: Busy, node: Node) -> str:
    """What a node does on a lane, as one of WORK."""
    if span.lane == "compute":
        return node.phase
    if span.lane == "waiting":
        return "waiting"
    if span.lane == "link":
        return _on_link(node)
    if span.lane in ("to host", "to device"):
        is_activation = node.operator in ("zerofx.offload_start", "zerofx.reload_start")
        return "activations moved" if is_activation else "shards moved"
    return "updates on the host" if span.lane == "updates" else "states in files"


def _on_link(node: Node) -> str:
    if node.operator == "zerofx.on_owners":
        return "to owners and back"
    if node.operator in ("zerofx.all_gather_start", "zerofx.resume_gather"):
        return "gather"
    return "reduce" if node.role == "reduce_gradient" else "norms and flags"
