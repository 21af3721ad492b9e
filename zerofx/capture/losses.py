"""``loss="global"``: what losses are divided by becomes the mean over ranks and micro-batches.

A loss is a sum of terms, each linear in sums over a batch's samples and divided by a count of these
(``nll_loss``'s total weight, a mask's sum, a mean's number of elements) or not.  Where the counts
that a divisor is made of are summed over all ranks, and it is then divided by their number, the
mean of the ranks' gradients is that of one process with all batches.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.divisors import is_per_rank, read_by
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.graph import (
    Builder,
    erase_unused,
    is_backward,
    is_of_batch,
    is_random,
    may_be_batch,
    move_to_front,
)
from zerofx.ir.interface import input_role, noted, placeholders, recorded
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role
from zerofx.ir.samples.follow import Samples
from zerofx.ir.samples.nodes import name_of
from zerofx.ir.samples.pointwise import is_users_division
from zerofx.ir.samples.values import Kind, Value
from zerofx.ir.source import source_line

logger = logging.getLogger("zerofx")
aten = torch.ops.aten

REMEDY = (
    "Divide it by a count of what this rank's batch has, or by all of them: "
    "zerofx.local_count(n) and zerofx.global_count(n) say that n is one. zerofx.per_rank(value) "
    "leaves this part of the loss a mean over the ranks; loss=rank, the default, all of it"
)


def spread_losses(gm: fx.GraphModule) -> None:
    """Put sums over ranks in the place of the counts that losses are divided by.

    Before::

        count = zerofx.count(sum_1, "found");  loss = zerofx.loss_part(div(total, count), "loss", 0)
        return [loss]

    After::

        all = zerofx.over_ranks(sum_1, "sum");  ranks = zerofx.over_ranks(full([], 1.0), "sum")
        mean = div(all, ranks);  loss = div(total, mean)
        return [zerofx.over_ranks(loss, "mean")]

    Raises: StepError for a loss that this is not true of, with the line.
    """
    graph, builder = gm.graph, Builder(gm, "capture")
    data = count_ranks(gm)
    samples = Samples(graph).follow()
    losses = [n for n in graph.find_nodes(op="call_function", target=ops.loss_part)]
    roots = [node for node in losses if node.args[1] == "loss"]
    for root in roots:
        _check(samples.of(root.args[0]), root)
    _warn_of_batch_norm(graph)

    def followed(node: fx.Node) -> list[fx.Node]:
        return [node.args[1]] if _keeps_own_counts(samples, node) else read_by(node)

    before = {root: set(reached([root], followed)) for root in roots}
    found = defaultdict(list)
    for count in graph.find_nodes(op="call_function", target=ops.count):
        root = next((root for root in roots if count in before[root]), None)
        if root is not None and samples.of(count).kind == Kind.COUNT:
            found[root].append(count)
    _check_own(samples, before, found)
    if found:
        assert data is not None, "a loss asks for it"
        kinds = {count: _kind(samples, count) for counts in found.values() for count in counts}
        _check_calls(graph, kinds, data)
    leaves = [leaf for counts in found.values() for c in counts for leaf in _leaves(samples, c)]
    numbers = map(_number_of, leaves)
    early = [number for number in numbers if is_of_batch(number)]
    means: dict[fx.Node, fx.Node] = {}
    if data is not None:
        move_to_front(graph, [data.weight, *early])
        _weigh_as_a_mean(builder, graph, data)
        _average_results(builder, graph, roots, data)
    for counts in found.values():
        _check_slices(samples, counts)
    for together in _alike(graph, samples, found):
        assert data is not None, "counts found are those of a loss"
        means |= _spread(builder, samples, together, data)
    part_of_loss = set().union(*before.values())
    _keep_own_results(builder, graph, means.keys())
    for count, mean in means.items():
        readers = {user for user in count.users if is_backward(user) or user in part_of_loss}
        if any(reader < mean for reader in readers):
            raise StepError(
                "loss=global: a micro-batch's loss is divided by a count that is known only when a "
                f"later one has been computed. {REMEDY}.\n  at {source_line(count)}"
            )
        count.replace_all_uses_with(mean, readers.__contains__)
    erase_unused(graph, means)
    for marker in [*graph.find_nodes(op="call_function", target=ops.count), *losses]:
        marker.replace_all_uses_with(marker.args[0])
        graph.erase_node(marker)


@dataclass(frozen=True)
class Data:
    """What a program computes of which ranks have data, in front of all else.

    ``mine`` is one, or zero without data; ``ranks`` the number of ranks that have data, ``weight``
    what makes the mean over all ranks one over these: one, if all have.
    """

    mine: fx.Node
    ranks: fx.Node
    weight: fx.Node


def count_ranks(gm: fx.GraphModule) -> Data | None:
    """Count the ranks that have data, in front of all else; None if no loss asks.

    Before::

        data = zerofx.has_data();  loss * data

    After::

        data = zerofx.has_data();  ranks = zerofx.over_ranks(data, "sum");  ...;  loss * data
    """
    graph, builder = gm.graph, Builder(gm, "capture")
    asked = graph.find_nodes(op="call_function", target=ops.has_data)
    if not asked:
        return None
    device = asked[0].meta["val"].device
    origin = {"role": Role.LOSS_COUNT, "like": asked[0]}
    with builder.before(placeholders(graph)[-1].next, **origin) as call:
        mine = call(ops.has_data, torch.float32, device)
        ranks = call(ops.over_ranks, mine, "sum")
        one = call(aten.full.default, [], 1.0, dtype=torch.float32, device=device)
        world = call(ops.over_ranks, one, "sum")
        weight = call(aten.mul.Tensor, mine, call(aten.div.Tensor, world, ranks))
    return Data(mine, ranks, weight)


def _weigh_as_a_mean(builder: Builder, graph: fx.Graph, data: Data) -> None:
    """Make gradients, which are means over all ranks, those over the ranks that have data."""
    for node in graph.find_nodes(op="call_function", target=ops.has_data):
        if node is data.mine:
            continue
        value, weight = node.meta["val"], data.weight
        if value.dtype == torch.bool:  # it asks whether there are, and weighs no mean
            weight = data.mine
        if (value.dtype, value.device) != (torch.float32, weight.meta["val"].device):
            with builder.before(node, role=Role.LOSS_COUNT) as call:
                wanted = {"dtype": value.dtype, "device": value.device}
                weight = call(aten._to_copy.default, weight, **wanted)
        node.replace_all_uses_with(weight)
        graph.erase_node(node)


def _check(value: Value, root: fx.Node) -> None:
    """Raise StepError for a loss that is not the mean or the sum of its parts."""
    if value.objection is not None:
        line = source_line(value.objection.node) or source_line(root)
        raise StepError(
            f"loss=global: the loss is no sum of what each sample adds to it, divided by a count "
            f"of them: it {value.objection.why}. {REMEDY}.\n  at {line}"
        )
    if value.kind == Kind.SAME:
        reads = reached([root], lambda node: node.all_input_nodes)
        if any(may_be_batch(node) for node in reads):
            raise StepError(
                "loss=global: the loss is made of nothing that the step is called with, so its "
                "samples cannot be found. Call the step with the batch, as arguments.\n"
                f"  at {source_line(root)}"
            )
        return
    if not value.degrees <= {0, 1}:
        raise StepError(
            "loss=global: the loss is divided by more than one count of the batch, one after the "
            f"other, or by less than it is multiplied with. {REMEDY}.\n  at {source_line(root)}"
        )


def _keeps_own_counts(samples: Samples, node: fx.Node) -> bool:
    """Return whether a node divides by a user's count what is no sum over samples.

    ``mean * n / zerofx.global_count(total)``: that is a sum of this rank's batch if the mean is
    divided by this rank's count.
    """
    if not is_users_division(samples, node):
        return False
    divided = samples.of(node.args[0])
    return (0 if divided.kind == Kind.SAMPLES else 1) not in divided.degrees


def _check_own(
    samples: Samples,
    before: Mapping[fx.Node, set[fx.Node]],
    found: Mapping[fx.Node, list[fx.Node]],
) -> None:
    """Refuse what keeps each rank's own counts and reads what a count of all ranks divides."""
    for root, counts in found.items():
        own = [n for n in before[root] if is_per_rank(n) or _keeps_own_counts(samples, n)]
        reads = set(reached([node.args[0] for node in own], lambda node: node.all_input_nodes))
        for count in filter(reads.__contains__, counts):
            raise StepError(
                "loss=global: zerofx.per_rank(value), or a division by zerofx.local_count or "
                "global_count, is given what is computed of a part of the loss that is divided by "
                "a count of all ranks, which has one meaning for each rank and another for all. "
                "Compute that part once more, inside of what per_rank is given, or of what is "
                f"divided.\n  at {source_line(count)}"
            )


def _warn_of_batch_norm(graph: fx.Graph) -> None:
    if any("batch_norm" in str(n.target) and n.op == "call_function" for n in graph.nodes):
        warning = (
            "loss=global: the statistics of batch norm stay each rank's own, as they are of its "
            "batch alone. With batch_norm=global they are of all ranks' batches."
        )
        logger.warning(noted(graph, warning))


_READS_NO_VALUES = (
    aten.copy_.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.zeros_like.default,
)


PARTLY_WITHOUT = (
    "gradients of several calls are added up, and zerofx.local_count says what this rank has in "
    "all of them. Divide by zerofx.global_count, of what all ranks have, or loop over the "
    "micro-batches inside of the step."
)


def _check_calls(graph: fx.Graph, kinds: Mapping[fx.Node, str], data: Data) -> None:
    """Refuse counts of one call where the gradients of several are added up.

    What counts in all of them cannot be right on a rank that lacks data in some.
    """
    updates = any(node.target is ops.optimizer_step for node in graph.nodes)
    added = any(
        user.target not in _READS_NO_VALUES
        for node in placeholders(graph, "gradient")
        for user in node.users
        if user.op != "output"
    )
    own = [count for count, kind in kinds.items() if kind == "found"]
    if own and (added or not updates):
        raise StepError(
            "loss=global: gradients of several calls are added up, and the count of them all has "
            "to be known in the first of them. Loop over the micro-batches inside of the step; or "
            "divide a sum by zerofx.local_count(n), of all that this rank's calls have between two "
            f"updates.\n  at {source_line(own[0])}"
        )
    if (added or not updates) and "local" in kinds.values():
        data.mine.args = (*data.mine.args, PARTLY_WITHOUT)


def _alike(
    graph: fx.Graph, samples: Samples, found: dict[fx.Node, list[fx.Node]]
) -> list[list[fx.Node]]:
    """Return the counts that a loop over micro-batches makes, one for each call of backward.

    They are of one line, of the same parameters, with no update in between, and of samples of their
    own.  Losses of other parameters, or that share what the model has computed, are other tasks of
    one batch: each has a divisor of its own.

    Raises: StepError where it may be either.
    """
    groups: dict[tuple, dict[fx.Node, fx.Node]] = defaultdict(dict)
    alone: list[list[fx.Node]] = []
    before = {root: set(reached([root], lambda n: n.all_input_nodes)) for root in found}
    updates = graph.find_nodes(op="call_function", target=ops.optimizer_step)
    for root, counts in found.items():
        parameters = frozenset(n for n in before[root] if _is_parameter(n))
        num_updates = sum(update < root for update in updates)
        seen: dict[str, int] = defaultdict(int)
        for count in counts:
            lines = count.meta.get("stack_trace") or ""
            key = lines, count.args[1], seen[lines], parameters, num_updates
            groups[key][root] = count
            seen[lines] += 1
    together = []
    for group in groups.values():
        shared = [
            _shared(samples, before[one], before[other])
            for one, other in itertools.combinations(group, 2)
        ]
        made_of = reached(itertools.chain(*shared), lambda n: n.all_input_nodes)
        if any(map(_is_parameter, made_of)):
            alone += [[count] for count in group.values()]
        elif any(shared):
            raise StepError(
                "loss=global: one line divides several losses of the same samples, which may be "
                "tasks with a divisor each, or micro-batches with one for all. Write the tasks on "
                f"lines of their own, or call backward() once, with their sum. {REMEDY}.\n"
                f"  at {source_line(next(iter(group.values())))}"
            )
        else:
            together.append(list(group.values()))
    return together + alone


def _check_slices(samples: Samples, counts: list[fx.Node]) -> None:
    """Refuse a loss that is means of slices of one batch: ranks would share the n-th one's count.

    Halves have a meaning of their own, as of what is preferred and what is rejected.
    """
    parts = {}
    for count in counts:
        of_count = {samples.of(leaf).part for leaf in _leaves(samples, count)}
        if len(of_count) == 1:
            parts[count.meta.get("stack_trace"), of_count.pop()] = count
    for (line, one), (other_line, other) in itertools.combinations(parts, 2):
        if line != other_line:
            continue  # tasks
        is_half = all(2 * (part.end - part.begin) == 1 for part in (one, other))
        if one.origin is not None and one.origin is other.origin and not is_half:
            raise StepError(
                "loss=global: the loss adds up means of slices of one batch, whose lengths differ "
                "from rank to rank. Add up sums, and divide by one count; or call backward() for "
                f"each slice. {REMEDY}.\n  at {source_line(parts[line, other])}"
            )


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and input_role(node).kind == "parameter"


_PARTS = (
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.unbind.int, aten.index.Tensor, operator.getitem),
)
"""Operators that take micro-batches of a batch."""


def _shared(samples: Samples, one: set[fx.Node], other: set[fx.Node]) -> list[fx.Node]:
    """Return what two losses both compute with, of the batch's samples, but for its parts."""
    own = one - other
    return [
        node
        for node in one & other
        if samples.of(node).kind == Kind.SAMPLES
        and any(user in own and user.target not in _PARTS for user in node.users)
    ]


def _spread(
    builder: Builder, samples: Samples, counts: list[fx.Node], data: Data
) -> dict[fx.Node, fx.Node]:
    """Compute the mean of the counts of micro-batches, and of all ranks': what takes their place.

    It is what one process would compute, of counts of all ranks, shared by so many.
    """
    of = _kind(samples, counts[0])
    reason = f"divides the loss at {source_line(counts[0])}"
    origin = {"role": Role.LOSS_COUNT, "like": counts[0], "reason": reason}
    means: dict[fx.Node, fx.Node] = {}
    if of == "global":
        for count in counts:
            given = {leaf: leaf.args[0] for leaf in _leaves(samples, count)}
            with builder.before(count, **origin) as call:
                number = _as_float(call, _computed_of(builder, count, given))
                means[count] = call(aten.div.Tensor, number, data.ranks)
        return means
    degree = max(samples.of(counts[0]).degrees)
    leaves = [_leaves(samples, count) for count in counts]
    if len({len(each) for each in leaves}) > 1:
        raise StepError(
            "loss=global: micro-batches divide their losses by counts that are not computed alike. "
            f"{REMEDY}.\n  at {source_line(counts[0])}"
        )
    after = max(_number_of(leaf) for each in leaves for leaf in each)
    after = max([after, data.weight])
    totals = []
    with builder.before(after.next, **origin) as call:
        for same in zip(*leaves, strict=True):
            total = _as_float(call, _number_of(same[0]))
            for other in same[1:]:
                total = call(aten.add.Tensor, total, _as_float(call, _number_of(other)))
            total = call(aten.mul.Tensor, total, data.mine)
            totals.append(call(ops.over_ranks, total, "sum"))
    common: fx.Node | None = None
    for count, own in zip(counts, leaves, strict=True):
        others = _read_beside(count, own)
        if common is not None and not others:  # of the same totals
            means[count] = common
            continue
        place = max([totals[-1], *(node for node in others if node.op != "placeholder")])
        with builder.before(place.next, **origin) as call:
            number = _computed_of(builder, count, dict(zip(own, totals, strict=True)))
            mean = _as_float(call, number)
            if degree:
                shares = call(aten.mul.Tensor, data.ranks, len(counts))
                if degree != 1:
                    shares = call(aten.pow.Tensor_Scalar, shares, degree)
                mean = call(aten.div.Tensor, mean, shares)
        means[count] = mean
        common = common if others else mean
    return means


def _computed_of(builder: Builder, count: fx.Node, leaves: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Compute a count once more, of others in the place of its leaves."""
    substitutes = dict(leaves)
    for node in _between(count, leaves):
        if node.target is ops.count:
            substitutes[node] = substitutes[node.args[0]]
        elif name_of(node) in ("scalar_tensor", "sym_float"):  # of a size, as below
            substitutes[node] = substitutes[node.args[0]]
        elif str(node.target).endswith(".Scalar") and isinstance(node.args[1], fx.Node):
            # a size, in whose place a tensor is now
            args = fx.node.map_arg(node.args, lambda one: substitutes.get(one, one))
            target, kwargs = node.target.overloadpacket.Tensor, node.kwargs
            made = builder.call(target, *args, role=Role.LOSS_COUNT, like=node, **kwargs)
            substitutes[node] = made
        else:
            copied = builder.copy(node, substitutes, role=Role.LOSS_COUNT, parameter=-1)
            substitutes[node] = copied
    return substitutes[count if count in leaves else count.args[0]]


def _as_float(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):  # a symbolic size
        return call(aten.scalar_tensor.default, node, dtype=torch.float32)
    if value.dtype.is_floating_point:
        return node
    return call(aten._to_copy.default, node, dtype=torch.float32)


def _number_of(leaf: fx.Node) -> fx.Node:
    return leaf.args[0] if leaf.target is ops.count else leaf


def _leaves(samples: Samples, count: fx.Node) -> list[fx.Node]:
    """The sums over samples that a count is made of, or marks of such numbers, in order."""

    def onward(node: fx.Node) -> list[fx.Node]:
        if node.target is ops.count:
            return [node.args[0]] if node.args[1] == "found" else []
        inputs = [samples.of(source).kind for source in node.all_input_nodes]
        return node.all_input_nodes if Kind.COUNT in inputs else []

    found = reached([count], onward)
    return sorted(n for n in found if samples.of(n).kind == Kind.COUNT and not onward(n))


def _kind(samples: Samples, count: fx.Node) -> str:
    """Return what a count is computed of: of "local" ones or "global" ones alone, or is "found"."""
    leaves = _leaves(samples, count)
    kinds = {
        leaf.args[1] if leaf.target is ops.count and leaf.args[1] != "mean" else "found"
        for leaf in leaves
    }
    if "global" in kinds and len(kinds) > 1:
        raise StepError(
            "loss=global: the loss is divided by what is computed of a count of all ranks' batches "
            f"and of a count of this rank's. Count both alike.\n  at {source_line(count)}"
        )
    return kinds.pop() if len(kinds) == 1 else "found"


def _between(count: fx.Node, leaves: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes that compute a count of its leaves, in order."""

    def onward(node: fx.Node) -> list[fx.Node]:
        return [] if node in leaves else node.all_input_nodes

    found = set(reached([count if count in leaves else count.args[0]], onward))
    depends: set[fx.Node] = set(leaves)
    between = []
    for node in sorted(found):
        if node not in leaves and depends.intersection(node.all_input_nodes):
            depends.add(node)
            between.append(node)
    return between


def _read_beside(count: fx.Node, leaves: Collection[fx.Node]) -> set[fx.Node]:
    """Return what a count is computed of beside its leaves, such as which samples it is for."""
    between = _between(count, leaves)
    return {source for node in between for source in node.all_input_nodes}.difference(
        between, leaves
    )


def _average_results(builder: Builder, graph: fx.Graph, roots: list[fx.Node], data: Data) -> None:
    """Return losses as they are over all ranks: what backward starts from, scaled or not."""
    output = graph.output_node()
    same = _same_as_losses(graph, roots)
    taken = {*recorded(graph).gradients}
    averaged: dict[fx.Node, fx.Node] = {}
    results = list(output.args[0])
    for position, result in enumerate(results):
        if result not in same or position in taken:
            continue
        if result not in averaged:
            with builder.before(output, role=Role.LOSS_VALUE, like=result) as call:
                value = result.meta["val"]
                weight = call(aten._to_copy.default, data.weight, dtype=value.dtype)
                weighed = call(aten.mul.Tensor, result, weight)
                averaged[result] = call(ops.over_ranks, weighed, "mean")
        results[position] = averaged[result]
    output.args = (tuple(results),)


def _keep_own_results(builder: Builder, graph: fx.Graph, counts: Iterable[fx.Node]) -> None:
    """Compute what else the step returns, or keeps in a buffer, of counts of this rank's own.

    A term of the loss, its exponential or a running mean of it: else they would be of sums of this
    rank, and of counts of all.
    """
    counts = set(counts)
    output = graph.output_node()
    taken = {*recorded(graph).gradients}
    wanted = {
        node
        for position, node in enumerate(output.args[0])
        if isinstance(node, fx.Node) and position not in taken
    }
    writes = [node for node in graph.nodes if _writes_buffer(node)]
    wanted |= {node.args[1] for node in writes}
    wanted = {node for node in wanted if node.target is not ops.over_ranks}
    own = _between_forward(counts, wanted)
    if not own:
        return
    substitutes: dict[fx.Node, fx.Node] = {}
    for node in own:
        if node.target in (ops.loss_part, ops.count):
            substitutes[node] = substitutes.get(node.args[0], node.args[0])
            continue
        with builder.before(node.next):  # an update may write to what it reads
            substitutes[node] = builder.copy(node, substitutes)
    output.args = (tuple(substitutes.get(one, one) for one in output.args[0]),)
    for node in writes:
        node.replace_input_with(node.args[1], substitutes.get(node.args[1], node.args[1]))


def _writes_buffer(node: fx.Node) -> bool:
    return (
        node.target is aten.copy_.default
        and isinstance(node.args[1], fx.Node)
        and node.args[0].op == "placeholder"
        and input_role(node.args[0]).kind in ("buffer", "other")
    )


def _between_forward(counts: set[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """Return what is computed of counts on the way to wanted values, in order; of no gradient."""
    depends = set(counts)
    between = []
    for node in sorted(set(reached(wanted, lambda n: n.all_input_nodes))):
        is_made_once = is_backward(node) or is_random(node) or node.target is ops.gradient
        is_on_the_way = node not in counts and not is_made_once
        if is_on_the_way and not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
            between.append(node)
    return between


def _same_as_losses(graph: fx.Graph, roots: list[fx.Node]) -> set[fx.Node]:
    """Losses, and what is linear in them alone."""
    found: set[fx.Node] = set()
    for root in roots:
        node = root
        while isinstance(node, fx.Node):
            found.add(node)
            node = _scaled_from(node)
    for node in graph.nodes:
        if node.op != "call_function" or node in found:
            continue
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        tensors = node.all_input_nodes
        if not tensors or name not in _SCALES | _LINEAR:
            continue
        if name in ("mul", "div"):
            is_one = node.args[0] in found and _is_number(node.args[1])
        else:
            is_one = found.issuperset(tensors) or (
                name == "add" and any(map(found.__contains__, tensors)) and _starts_a_sum(node)
            )
        if is_one:
            found.add(node)
    return found


_LINEAR = {"add", "sub", "stack", "cat", "sum", "mean", "unsqueeze", "squeeze", "expand"}
_SCALES = {"mul", "div", "neg", "detach", "alias", "clone", "_to_copy", "view", "loss_part"}


def _scaled_from(node: fx.Node) -> fx.Node | None:
    """Return what a node scales by a number; None if it does anything else."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in _SCALES:
        return None
    if name in ("mul", "div") and not _is_number(node.args[1]):
        return None
    return node.args[0]


def _is_number(argument: object) -> bool:
    """Return whether something is a number, or a scale that all ranks have alike."""
    if not isinstance(argument, fx.Node):
        return True
    return argument.op == "placeholder" and input_role(argument).is_loss_scale


def _starts_a_sum(node: fx.Node) -> bool:
    """Return whether a sum of losses starts here, from zeros."""
    zeros = [term for term in node.args if isinstance(term, fx.Node)]
    return any(
        getattr(term.target, "overloadpacket", None) in (aten.zeros, aten.full, aten.scalar_tensor)
        for term in zeros
    )
