"""Questions about loss scales: which of their values a gradient has been multiplied by."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import updated_by
from zerofx.ir.interface import input_role, written_input
from zerofx.ir.reach import reached
from zerofx.ir.reduction_hops import hops_into
from zerofx.ir.roles import Role, role

aten = torch.ops.aten


def is_loss_scale(node: fx.Node) -> bool:
    """Return whether a node is a loss scale, as it came in or as a scaler has changed it since."""
    while node.target is operator.getitem and node.args[1] == 0:
        if node.args[0].target is not aten._amp_update_scale.default:
            return False
        node = node.args[0].args[0]
    return node.op == "placeholder" and input_role(node).is_loss_scale


def loss_scales_of(flat: fx.Node) -> list[fx.Node]:
    """Return the loss scales that gradients have been multiplied by before they are reduced.

    A step that goes on after its scaler's update has another one then.  Gradients of earlier calls
    alone have been multiplied by the scale that they are divided by before their update.
    """
    hops = hops_into(flat)
    laid_out = hops[-1].source if hops else flat
    starts = laid_out.all_input_nodes if ops.is_collective(laid_out) else [laid_out]
    made_of = list(reached(starts, _computed_from))
    scales = [node for node in made_of if is_loss_scale(node)]
    if not scales:
        indices = {
            input_role(node).parameter
            for node in made_of
            if node.op == "placeholder" and input_role(node).kind == "gradient"
        }
        updates = [node for node in flat.graph.nodes if _skips_update_of(node, indices)]
        given = [one for update in updates for one in update.all_input_nodes]
        scales = [node for node in reached(given, _computed_from) if is_loss_scale(node)]
    return sorted(scales)


def is_set_by_step(graph: fx.Graph) -> bool:
    """Return whether a step gives a loss scale another value than its scaler's update does."""
    return any(
        not is_loss_scale(node.args[1])
        for node in graph.nodes
        if (into := written_input(node)) is not None and into.is_loss_scale
    )


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a gradient's computation within this backward pass."""
    ends = is_loss_scale(node) or updated_by(node) or ops.is_collective(node)
    return [] if ends or role(node) == Role.REDUCE_GRADIENT else node.all_input_nodes


def _skips_update_of(node: fx.Node, indices: set[int]) -> bool:
    mine = any(parameter in indices for _, parameter in updated_by(node))
    return mine and ops.argument(node, "found_inf") is not None
