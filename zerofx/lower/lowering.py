"""From the passes' program to something that runs: operators bound to one step's runtime."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from torch import fx, nn

from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.graph import erase_unused
from zerofx.ir.rules import LINK
from zerofx.lower.gradient_norms import fold_gradient_norms
from zerofx.lower.gradient_work import fold_gradient_work
from zerofx.lower.in_place import WholeBucket
from zerofx.lower.regions import is_compute, with_compiled_regions

STANDS_FOR = "zerofx_stands_for"
"""In a call's metadata, the name of the first node that it runs in place of."""


def lower(
    gm: fx.GraphModule,
    kernels: Mapping[object, Callable],
    lowering: str,
    update_together: Callable | None = None,
    reduce_bucket_start: Callable | None = None,
    write_back: Callable | None = None,
    in_place: Sequence[WholeBucket] = (),
) -> Callable:
    """Return a function of the program's inputs.

    ``kernels`` holds the function that runs each ``zerofx::`` operator, and for waits, as
    ``(wait, lane)``, the one for what is on that lane.  ``eager`` runs every
    operator by itself; ``inductor`` compiles what stands between zerofx operators.
    Communication keeps the program's order in both.  ``update_together``, if given, runs
    several updates that follow one another, with what is done to their gradients just before, and
    sums the gradients' squares for a norm;
    ``reduce_bucket_start`` reduces a bucket of what would be copied into its buffer for that
    alone; ``write_back`` stands for all copies of updated values into the parameters of a bucket,
    for those of ``in_place``.
    """
    root = nn.Module()
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    program.output(program.graph_copy(gm.graph, copies))
    if write_back is not None:
        for bucket in in_place:
            _write_back_together(program, bucket, copies, write_back)
    if update_together is not None:
        fold_gradient_norms(program)
        fold_gradient_work(program, root, is_compute)
    if lowering == "inductor":
        graph = with_compiled_regions(gm, program, root)
    else:
        graph = program
        for node in graph.nodes:
            if node.op == "get_attr" and not hasattr(root, node.target):
                setattr(root, node.target, getattr(gm, node.target))
    if update_together is not None:
        _merge_updates(graph, update_together)
    if reduce_bucket_start is not None:
        _reduce_unflattened(graph, reduce_bucket_start)
    for node in reversed(graph.nodes):  # waits first: their starts say which they are
        of = (ops.wait, ops.waits_on(node) or LINK) if ops.is_wait(node) else node.target
        if node.op == "call_function" and of in kernels:
            node.target = kernels[of]
    return fx.GraphModule(root, graph, "ZeroProgram")


def _write_back_together(
    graph: fx.Graph,
    bucket: WholeBucket,
    copies: Mapping[fx.Node, fx.Node],
    write_back: Callable,
) -> None:
    """Replace the copies of a gathered bucket into its parameters by one call."""
    wait, writes = copies[bucket.wait], [copies[write] for write in bucket.writes]
    with graph.inserting_after(wait):
        wholes = [write.args[0] for write in writes]
        call = graph.call_function(write_back, (wait, wholes, list(bucket.parameters)))
        call.meta[STANDS_FOR] = writes[0].name
    for write in writes:
        value = write.args[1]
        graph.erase_node(write)
        erase_unused(graph, [value])


def _merge_updates(graph: fx.Graph, update_together: Callable) -> None:
    """Replace updates of one optimizer that follow one another by one call.

    Between them may stand what reads nothing that they write: views of gradients, and copies of
    shards yet to be updated.  Behind the new values, the call returns what each of them adds to a
    norm's squares.
    """
    pending: list[fx.Node] = []

    def flush() -> None:
        if pending:
            _, _, optimizer, _, *found_inf = pending[0].args
            with graph.inserting_after(pending[-1]):
                values, grads, _, parameters = zip(*(n.args[:4] for n in pending), strict=True)
                together = graph.call_function(
                    update_together,
                    (list(values), list(grads), optimizer, list(parameters), *found_inf),
                    dict(pending[0].kwargs),
                )
                together.meta[STANDS_FOR] = pending[0].name
            for position, node in reversed(list(enumerate(pending))):
                with graph.inserting_after(together):
                    part = graph.call_function(operator.getitem, (together, position))
                for squares in [user for user in node.users if _is_squares(user)]:
                    with graph.inserting_after(together):
                        at = len(pending) + position
                        given = graph.call_function(operator.getitem, (together, at))
                    squares.replace_all_uses_with(given)
                    graph.erase_node(squares)
                node.replace_all_uses_with(part)
                graph.erase_node(node)
        pending.clear()

    for node in list(graph.nodes):
        if node.target is ops.update:
            reads_new = any(operand in pending for operand in node.all_input_nodes)
            if pending and (reads_new or _shared(node) != _shared(pending[0])):
                flush()
            pending.append(node)
        elif pending and not _may_stand_between(node, pending):
            flush()


def _reduce_unflattened(graph: fx.Graph, reduce_bucket_start: Callable) -> None:
    """Replace a copy into a bucket's buffer and the reduction that alone reads it by one call."""
    for start in list(graph.nodes):
        if start.target is not ops.reduce_scatter_start:
            continue
        flat, *others = start.args
        if flat.target is ops.flatten_bucket and list(flat.users) == [start]:
            with graph.inserting_before(start):
                call = graph.call_function(reduce_bucket_start, (*flat.args, *others))
                call.meta[STANDS_FOR] = start.name
            start.replace_all_uses_with(call)
            graph.erase_node(start)
            graph.erase_node(flat)


def _shared(update: fx.Node) -> tuple:
    """What updates must have in common: optimizer, flag of overflow, work on the gradient, norm."""
    return (update.args[2], update.args[4:], tuple(update.kwargs.items()))


def _is_squares(node: fx.Node) -> bool:
    return node.target is ops.gradient_squares


def _may_stand_between(node: fx.Node, updates: list[fx.Node]) -> bool:
    if _is_squares(node):
        return True
    if any(operand in updates for operand in node.all_input_nodes):
        return False
    return node.target in (ops.take_shard, operator.getitem) or (
        node.op == "call_function" and not ops.is_ours(node.target) and bool(aliased_inputs(node))
    )
