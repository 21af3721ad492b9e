"""Let an update's kernel do what a step does to the gradient, element by element, just before."""

from __future__ import annotations

import functools

from torch import fx

from zerofx.codegen.rewrite.gradient_work import GradientWork, may_be_work
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, writers
from zerofx.ir.graph import erase_unused
from zerofx.ir.interface import set_gradient_work
from zerofx.ir.offload import operands_of_updates
from zerofx.ir.reach import reached
from zerofx.ir.regions import goes_into_region
from zerofx.ir.sizes import value_bytes
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.fuse.together import is_update_alone, run_together


def fold_gradient_work(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Give updates the gradient as it is before elementwise work that only they need.

    Before::

        mul = mul(g, clip);  update(p, mul, 1, 0);  mul_1 = mul(h, clip);  update(q, mul_1, 1, 1)

    After, with ``mul = aten.mul.Tensor(gradient, coefficient); return mul`` for ``work``::

        update_together([p], [g], 1, [0], work=work, coefficients=[clip])
        update_together([q], [h], 1, [1], work=work, coefficients=[clip])

    The gradient is then read once and not written again, and one kernel takes the updates of a
    bucket.  Work whose result others need in memory stays (``p.grad`` that outlives the step).
    """
    graph = gm.graph
    known: dict[tuple, GradientWork] = {}
    runs = _runs(graph)
    first = functools.cache(first_write)  # all updates have one coefficient of clipping
    folded_nodes = 0
    for update in list(filter(is_update_alone, graph.nodes)):
        folded = _foldable(update, runs)
        if folded is None:
            continue
        nodes, gradient = folded
        work, coefficients = GradientWork.of(nodes, gradient)
        if any(write < update for write in map(first, coefficients) if write is not None):
            continue  # it is read by then, and not where the step reads it
        work = known.setdefault(work.computation, work)
        added = {"work": work.text, "coefficients": coefficients}
        together = run_together(graph, [update], "fold_gradient_work", gradient, **added)
        set_gradient_work(together, work)
        runs[together] = runs[update]
        folded_nodes += erase_unused(graph, [nodes[-1]])
    return {"kinds of work": len(known), "operators": folded_nodes}


def _runs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number the runs of compute that are compiled together."""
    runs, number = {}, 0
    for node in graph.nodes:
        runs[node] = number
        number += not goes_into_region(node)
    return runs


def _foldable(update: fx.Node, runs: dict[fx.Node, int]) -> tuple[list[fx.Node], fx.Node] | None:
    """The most work before an update that starts from one flat tensor; and that tensor."""
    (operands,) = operands_of_updates(update)
    shape = tuple(operands.gradient.meta["val"].shape)
    inside = {update}
    edge = {operands.gradient}
    found: tuple[list[fx.Node], fx.Node] | None = None
    while edge:
        node = max(edge)
        if not (may_be_work(node) and tuple(node.meta["val"].shape) == shape):
            break
        if not _is_needed_here_alone(node, inside, runs):
            break
        edge.remove(node)
        inside.add(node)
        edge.update(item for item in node.all_input_nodes if item.meta["val"].dim())
        gradient, *others = edge
        if not others and not may_be_overwritten(gradient, update):
            found = sorted(inside - {update}), gradient
    return found


def _is_needed_here_alone(node: fx.Node, inside: set[fx.Node], runs: dict[fx.Node, int]) -> bool:
    """Return whether nothing else needs a result in memory.

    Where others read it as it is computed, what it is computed from must take no more memory, as
    that now lives on.
    """
    others = [user for user in node.users if user not in inside]
    if not others:
        return True
    if any(value_bytes(item) > value_bytes(node) for item in node.all_input_nodes):
        return False
    return all(user.op == "call_function" and runs[user] == runs[node] for user in others)


def may_be_overwritten(operand: fx.Node, reader: fx.Node) -> bool:
    """Return whether a tensor may lie in memory that is written to before ``reader`` reads it."""
    write = first_write(operand)
    return write is not None and write < reader


def first_write(operand: fx.Node) -> fx.Node | None:
    """Return the first node that writes to memory in which a tensor may lie; None if none does.

    Callers write to inputs of theirs, which stand for that.  In a world of one, what has been
    gathered or reduced is what it was made of.
    """

    def moved_from(node: fx.Node) -> list[fx.Node]:
        moves = ops.is_collective(node) or node.target is ops.take_shard
        return node.all_input_nodes if moves else aliased_inputs(node)

    def writes_to(node: fx.Node) -> set[fx.Node]:
        role = node.meta.get("zerofx_input")
        is_callers = role is not None and role.kind in ("parameter", "buffer")
        return {node} if is_callers else writers(node)

    memory = reached([operand], moved_from)
    return min((write for node in memory for write in writes_to(node)), default=None)
