"""Why a planted bug may be none: rules that say of a change that the program computes as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tests.kit.planted.bugs import Bug, layout, roots, stand_in
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, memory_of, mutated_inputs
from zerofx.ir.graph import is_random, updated_by
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, role

aten = torch.ops.aten


def why_equivalent(bug: Bug, graph: fx.Graph, table: ParameterTable) -> str | None:
    """Why the program with this change computes what it did; None if nobody knows."""
    nodes = {node.name: node for node in graph.nodes}
    node, other = nodes[bug.node], nodes.get(bug.other)
    if bug.kind == "duplicate" and _is_pure(node):
        return "the copy computes the same of the same operands"
    if bug.kind == "duplicate" and _draws_nothing(node):
        return "the copy computes the same of the same operands"
    if bug.kind == "duplicate" and node.target is ops.end_without_data:
        return "the call has ended, or goes on"
    if bug.kind == "delete" and _is_pure(node) and not node.users:
        return "nobody reads it"
    if bug.kind == "delete":
        return _why_unneeded(node, table)
    if bug.kind == "apply twice":
        return _why_idempotent(node, other)
    if bug.kind in ("move up", "move down"):
        return _why_it_commutes(node, other, list(graph.nodes))
    if bug.kind == "swap":
        return _why_symmetric(node, other, list(graph.nodes))
    if bug.kind == "constant":
        return _why_free(node, bug)
    return None


def _is_pure(node: fx.Node) -> bool:
    """Whether a node does nothing but compute a result, or name a part of one."""
    acts = ops.acts(node) or ops.starts(node) or ops.is_wait(node) or updated_by(node)
    acts = acts or node.target is ops.on_owners
    return not (acts or mutated_inputs(node) or is_random(node))


def _draws_nothing(node: fx.Node) -> bool:
    """Whether a node that could drop some of its operand is told to drop none."""
    if not is_random(node):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0) == 0.0


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _why_unneeded(node: fx.Node, table: ParameterTable) -> str | None:
    if _is_same_view(node, stand_in(node)):
        return "its operand is the same memory in the same shape"
    if why := _why_no_copy_is_needed(node):
        return why
    if node.target in _VIEWS and all(user.target in _VIEWS for user in node.users):
        return "its readers lay it out anew"
    if node.target is ops.mask_padding:
        info = table[node.args[1]]
        if all(info.extent_of(rank) == info.owned_by(rank) for rank in range(info.world_size)):
            return "there is no padding to mask"
        if _pads_with(node.args[2], node.args[0]):
            return "the sum of the ranks' padding is that already"
    return None


def _pads_with(identity: float, gradient: fx.Node) -> bool:
    """Whether all ranks pad a gradient with a zero before they sum it, and that is ``identity``."""
    total = gradient
    while total.target is aten.slice.Tensor:
        total = total.args[0]
    if total.target is ops.dequantize_sum:  # of wires whose codes of padding are 0
        wire = total.args[0].args[0].args[0]
        names = wire.args[0] if wire.args[0].target in (ops.correct, ops.fill_up) else wire
        return identity == 0.0 and bool(ops.argument(names, "parameters"))
    if not ops.is_wait(gradient) or gradient.args[0].target is not ops.reduce_scatter_start:
        return False
    flat = gradient.args[0].args[0]
    return flat.target is aten.constant_pad_nd.default and flat.args[2] == identity == 0.0


def _is_same_view(node: fx.Node, source: Any) -> bool:
    """Whether a node names all of its operand's memory in its operand's shape."""
    if source not in aliased_inputs(node) or not _is_pure(node):
        return False
    values = node.meta["val"], source.meta["val"]
    if layout(node) != layout(source) or not isinstance(values[0], torch.Tensor):
        return False
    return values[0].storage_offset() == values[1].storage_offset()


def _why_idempotent(node: fx.Node, source: fx.Node) -> str | None:
    if node.target is ops.mask_padding:
        return "what is masked stays masked"
    if _is_same_view(node, source):
        return "its operand is the same memory in the same shape"
    if node.target is aten.slice.Tensor and node.args[2] == 0:
        return "it takes the beginning, of which the beginning is all"
    if node.target is aten.addmm_.default and node.kwargs.get("beta") == 0:
        return "nothing of what it writes to is read"
    return _IDEMPOTENT.get(node.target) or _why_no_copy_is_needed(node)


_IDEMPOTENT = {
    aten.sum.default: "a sum is one number, and its sum",
    aten.where.ScalarOther: "what is masked is masked already",
    aten._log_softmax.default: "the exponentials of what it gives sum to one already",
    aten._log_softmax_backward_data.default: "what it gives sums to zero already",
    aten.nll_loss_backward.default: "it looks at the shape of what it replaces alone",
}


def _why_no_copy_is_needed(node: fx.Node) -> str | None:
    if node.target is aten.clone.default:
        return "nobody writes to what it copies"
    is_index = node.target is aten.where.ScalarOther and role(node) == Role.CHUNK
    if is_index and not node.meta["val"].dtype.is_floating_point:
        return "targets that do not count weigh nothing, whatever they are"
    return None


def _why_it_commutes(node: fx.Node, other: fx.Node, order: list[fx.Node]) -> str | None:
    low, high = sorted((order.index(node), order.index(other)))
    for crossed in order[low : high + 1]:
        if crossed is node:
            continue
        if all(ops.updates_on_host(n) or _waits_for_copy(n) for n in (node, crossed)):
            continue  # which waits for its operands by itself
        touched = roots(node) & roots(crossed)
        if touched & (_changes(node) | _changes(crossed)):
            return None
        if is_random(node) and is_random(crossed):
            return None
    return "neither changes what the other looks at"


def _waits_for_copy(node: fx.Node) -> bool:
    return ops.waits_on(node) in ("to host", "to device")


def _changes(node: fx.Node) -> set[fx.Node]:
    """The memory that a node writes to, completes or gives up, by who made it."""
    changed = list(mutated_inputs(node))
    if ops.gives_up(node) or ops.is_wait(node):
        changed += node.all_input_nodes
    return {root for one in changed for root in memory_of(one)}


def _why_symmetric(node: fx.Node, other: fx.Node, order: list[fx.Node]) -> str | None:
    """Two parts of a norm may change places: how it rounds is all that differs."""
    if not (node.users or other.users):
        if _waits_for_copy(node):
            return "both only wait, and nobody reads what for"
        pairs = ((node, other), (other, node))
        if all(_why_it_commutes(*pair, order) for pair in pairs):
            return "they change places, and neither changes what the other looks at"
    ends = [_end_of_chain(one) for one in (node, other)]
    if ends[0] is ends[1] and ends[0].target is aten.stack.default:
        if {user.target for user in ends[0].users} <= {aten.linalg_vector_norm.default}:
            return "the parts of a norm have no order"
    return None


def _end_of_chain(node: fx.Node) -> fx.Node:
    while len(node.users) == 1 and node.target is not aten.stack.default:
        (node,) = node.users
    return node


def _why_free(node: fx.Node, bug: Bug) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target is aten.constant_pad_nd.default and bug.argument == 2:
        return "nobody looks at padding"
    argument = node.target._schema.arguments[bug.argument].name
    if node.target is aten.slice.Tensor and argument == "end":
        size = node.args[0].meta["val"].shape[node.args[1]]
        if min(node.args[3], bug.value) >= size:
            return "a slice ends where its tensor does"
    if argument == "reduction" and bug.value > 2:
        return "torch takes it for a sum"
    if why := _why_no_copy_is_needed(node):
        return why
    if argument == "slot":
        return "any staging buffer will do that nobody else has in use"
    if argument == "changed" and bug.value:
        return "it writes to a file what is there already"
    if argument in ("nbytes", "flops"):
        return "plans alone look at it"
    return None
