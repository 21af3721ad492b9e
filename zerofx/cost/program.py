"""The cost of a program before it runs: bytes alive at each node, and the nodes' seconds."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zerofx import compat
from zerofx.calibration import OTHERS, Calibration
from zerofx.hardware import PIECE_BYTES, Hardware
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, done_with, mutated_inputs
from zerofx.ir.interface import input_role
from zerofx.ir.mesh import EVERY_RANK
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, role
from zerofx.ir.rules import FILES, TO_HOST
from zerofx.ir.sizes import hinted_bytes, hinted_tensor_bytes, is_symbolic, tensor_bytes

aten = torch.ops.aten

UPDATE_TEMPORARIES = 2
"""Shards that an update allocates for itself: AdamW's root and denominator, run op by op."""

OWNER_TEMPORARIES = 3
"""Tensors of an owner's share: what it receives, what it makes of it, and what it makes that in."""

OWN_STEP_TEMPORARIES = 4 + UPDATE_TEMPORARIES
"""The same where the optimizer's own step runs: parameters and gradients, received and whole."""


def live_bytes(
    graph: fx.Graph,
    world_size: int,
    ignored: Collection[fx.Node] = (),
    *,
    sockets: bool = False,
    table: ParameterTable | None = None,
    hinted: bool = False,
) -> list[int]:
    """Bytes that the program has allocated on the device and not freed while each node runs.

    In program order; inputs and constants are not counted, nor what an operator allocates for
    itself, but for updates and reductions on a CPU: with ``sockets`` these receive into a buffer,
    else they add up others' memory piece by piece.  In a world of one, collectives allocate
    nothing.  Memory lives until the last reader of the last view of it.  ``ignored`` nodes count as
    views of nothing.  With a ``table`` an update allocates what it does on the rank whose shard is
    largest: ranks plan alike.  Symbolic sizes count as they were when captured, and get guards
    unless ``hinted``.
    """
    nodes = list(graph.nodes)
    changes = [0] * (len(nodes) + 1)
    bytes_of = hinted_tensor_bytes if hinted else tensor_bytes
    for made in _Memory(world_size, sockets, bytes_of, table, frozenset(ignored)).of(nodes):
        changes[made.begin] += made.nbytes
        changes[made.end + 1] -= made.nbytes
    return list(itertools.accumulate(changes[:-1]))


class Allocation(NamedTuple):
    """Bytes that are on the device from one position of a program to another, both included.

    ``part`` is which of the node's results they hold; ``own`` says that they are no result, but
    what the node allocates for itself.  Units: bytes; positions in the program's order.
    """

    node: fx.Node
    part: int
    begin: int
    end: int
    nbytes: int
    own: bool = False


def allocations(
    graph: fx.Graph,
    world_size: int,
    ignored: Collection[fx.Node] = (),
    *,
    sockets: bool = False,
    table: ParameterTable | None = None,
    own: Mapping[fx.Node, Own] | None = None,
    rehearsals: Sequence[Rehearsal] = (),
) -> tuple[list[Allocation], dict[fx.Node, set[tuple[fx.Node, int]]]]:
    """Return what ``live_bytes`` counts, one by one, and the (node, part) that a result lies in.

    At any position, the bytes of those allocations that are alive there add up to it, and those
    that ``own`` says nodes allocate for themselves.  Nodes of ``rehearsals`` allocate what these
    say.  But no guard is made of a symbolic size: this is for who looks at programs, and must not
    change them.
    """
    kinds = hinted_tensor_bytes, table, frozenset(ignored), own or {}, rehearsals
    memory = _Memory(world_size, sockets, *kinds)
    return list(memory.of(list(graph.nodes))), memory.roots


class Own(NamedTuple):
    """What an operator allocates ``during`` its call beside results, and keeps behind them.

    Units: bytes.
    """

    during: int
    kept: int = 0


class Lifetime(NamedTuple):
    """Bytes that are there from one moment to another, both included; to the end if that is None.

    Units: bytes; moments in an order of their own.
    """

    begin: int
    end: int | None
    nbytes: int


@dataclass(frozen=True)
class Rehearsal:
    """The memory of nodes that run as one, in an order of their own: a compiled region's.

    Between its ``num_moments`` moments memory is allocated and freed: what is ``made``.  A result
    lies in one of those, by its number, or in what an input lies in.  An input is held until the
    last moment that it has in ``held_until``.  ``nodes`` follow each other in the program.
    """

    nodes: Sequence[fx.Node]
    num_moments: int
    made: Sequence[Lifetime]
    results: Mapping[fx.Node, int | fx.Node]
    held_until: Mapping[fx.Node, int]

    @cached_property
    def moments(self) -> list[int]:
        """The moment that stands for each node's position: of several the one with most bytes."""
        alive = [
            sum(of.nbytes for of in self.made if of.begin <= at <= self._end(of))
            for at in range(self.num_moments)
        ]
        count = len(self.nodes)
        if self.num_moments <= count:
            return [position * self.num_moments // count for position in range(count)]
        cuts = [position * self.num_moments // count for position in range(count + 1)]
        return [max(range(*cut), key=alive.__getitem__) for cut in itertools.pairwise(cuts)]

    def _end(self, of: Lifetime) -> int:
        return self.num_moments if of.end is None else of.end

    def allocations(self, first: int) -> Iterator[tuple[int, Allocation]]:
        """Yield what is made, with its number, where ``nodes`` have positions from ``first`` on.

        Results begin there; where they end others say.  Left out is what is there between two of
        the moments that count.
        """
        for number, of in enumerate(self.made):
            there = [at for at, moment in enumerate(self.moments) if of.begin <= moment]
            begin = there[0] if there else len(self.nodes)
            ends = [at for at in there if self.moments[at] <= self._end(of)]
            if of.end is None:
                node = next(node for node, at in self.results.items() if at == number)
                yield number, Allocation(node, 0, first + begin, first + begin, of.nbytes)
            elif ends:
                node = self.nodes[begin]
                at = first + begin, first + ends[-1]
                yield number, Allocation(node, 0, *at, of.nbytes, own=True)

    def done_with(self, source: fx.Node, first: int) -> int:
        """Return the last position at which an input is held: one before, if at no moment."""
        until = self.held_until.get(source, self.num_moments)
        return first + sum(moment <= until for moment in self.moments) - 1


@dataclass
class _Memory:
    """The allocations of a program's nodes, and those that each result lies in."""

    world_size: int
    sockets: bool
    bytes_of: Callable[[Any], int]
    table: ParameterTable | None = None
    ignored: Collection[fx.Node] = ()
    own: Mapping[fx.Node, Own] = field(default_factory=dict)
    rehearsals: Sequence[Rehearsal] = ()
    roots: dict[fx.Node, set[tuple[fx.Node, int]]] = field(default_factory=dict)
    sizes: dict[tuple[fx.Node, int], int] = field(default_factory=dict)

    def of(self, nodes: Sequence[fx.Node]) -> Iterator[Allocation]:
        """Yield the allocations of these nodes, in order; note the places of results."""
        order = {node: position for position, node in enumerate(nodes)}
        inside = {node: of for of in self.rehearsals for node in of.nodes}
        first = {id(of): order[of.nodes[0]] for of in self.rehearsals}
        last: dict[tuple[fx.Node, int], int] = {}
        begins: dict[tuple[fx.Node, int], int] = {}
        for node in nodes:
            of = inside.get(node)
            if of is None:
                self.roots[node] = self._roots_of(node)
            elif node is of.nodes[0]:
                yield from self._rehearsed(of, first[id(of)], begins)
            if of is not None and node not in of.results:
                continue
            deaths = [order[node]]
            for user in node.users:
                by = inside.get(user)
                if by is None:
                    deaths.append(order[self._done_with(user)])
                elif by is not of:
                    deaths.append(by.done_with(node, first[id(by)]))
            for root in self.roots[node]:
                last[root] = max(last.get(root, 0), *deaths)
        for (node, part), nbytes in self.sizes.items():
            begin = begins.get((node, part), order[node])
            yield Allocation(node, part, begin, last.get((node, part), order[node]), nbytes)
        for node in nodes:
            if node not in inside and (nbytes := self._own_bytes(node)):
                end = done_with(node) if ops.is_collective(node) else node
                yield Allocation(node, 0, order[node], order[end], nbytes, own=True)

    def _rehearsed(
        self, of: Rehearsal, first: int, begins: dict[tuple[fx.Node, int], int]
    ) -> Iterator[Allocation]:
        """Note the places of results, and where these begin; yield what nodes hold meanwhile."""
        places: dict[int, tuple[fx.Node, int]] = {}
        for number, made in of.allocations(first):
            if made.own:
                yield made
            else:
                places[number] = (made.node, 0)
                self.sizes[made.node, 0] = made.nbytes
                begins[made.node, 0] = made.begin
        for node in of.nodes:
            at = of.results.get(node)
            if isinstance(at, int):
                self.roots[node] = {places[at]}
            else:
                sources = aliased_inputs(node) if at is None else [at]
                self.roots[node] = set().union(*(self.roots[source] for source in sources))

    def _done_with(self, reader: fx.Node) -> fx.Node:
        """Return the node with which a reader is done with its operands.

        Ranks that read each other's memory read a gather's result, where each puts its own part
        when it starts.
        """
        starts_gather = reader.target is ops.all_gather_start and not self.sockets
        if starts_gather and reader.meta["val"].device.type == "cpu":
            return reader
        return done_with(reader)

    def _own_bytes(self, node: fx.Node) -> int:
        """Bytes that a node allocates for itself."""
        if node in self.own:
            return self.own[node].during
        if node.target is ops.on_owners:
            shards = ops.num_shards(node.graph, self.world_size) if journeys(node) else 1
            times = OWN_STEP_TEMPORARIES if ops.argument(node, "own_step") else OWNER_TEMPORARIES
            if self.table is not None:
                return times * max(bytes_by_owner(node, self.table).values(), default=0)
            return times * owned_bytes(node, shards)
        if node.target is ops.update:
            value = node.args[0].meta["val"]
            nbytes = self.bytes_of(value)
            if self.table is not None and value.dim() == 1:
                largest = self.table[node.args[3]].largest_shard_numel * value.dtype.itemsize
                nbytes = max(nbytes, largest)
            return UPDATE_TEMPORARIES * nbytes
        if self.sockets and self._reduces_on_cpu(node):
            operands = node.args[0] if isinstance(node.args[0], list) else [node.args[0]]
            return sum(self.bytes_of(operand.meta["val"]) for operand in operands)
        if not self.sockets and ops.waits_on(node) and self._reduces_on_cpu(node.args[0]):
            is_read_alone = self._is_one_of_two(node.args[0])
            return 0 if is_read_alone else min(self.bytes_of(node.args[0].meta["val"]), PIECE_BYTES)
        return 0

    def _is_one_of_two(self, start: fx.Node) -> bool:
        """Return whether two ranks reduce one tensor: each adds the other's to its own."""
        operand = start.args[0]
        if isinstance(operand, fx.Node) and operand.target is ops.flatten_bucket:
            (pieces, _, numel, *_) = operand.args
            operand = pieces[0] if len(pieces) == 1 and _numel(pieces[0]) == numel else None
        return isinstance(operand, fx.Node) and ops.num_ranks(start, self.world_size) == 2

    def _reduces_on_cpu(self, node: fx.Node) -> bool:
        """Return whether a node starts a reduction of several ranks' tensors on a CPU."""
        if not (ops.rules(node).reduces and ops.is_collective(node)):
            return False
        is_shared = ops.num_ranks(node, self.world_size) > 1
        return is_shared and node.meta["val"].device.type == "cpu"

    def _roots_of(self, node: fx.Node) -> set[tuple[fx.Node, int]]:
        """The allocations that a node's result lies in; notes the size of a new one."""
        roots = self.roots
        if node.op != "call_function" or node in self.ignored:
            return set()
        if ops.lane(node) in (FILES, TO_HOST):  # what it makes is on the host
            return set()
        if node.target is ops.refill_start:  # and this is kept between steps
            return set()
        if node.target is operator.getitem:
            part = node.args
            if part in roots[node.args[0]]:  # it is one of many, as an optimizer's step has results
                return {part}
            whole, at = part
            if aliased_inputs(whole) and not ops.is_ours(whole.target):
                return roots[whole]  # views of one tensor, as split has them
            return {root for root in roots[whole] if root[1] == at}
        sources = aliased_inputs(node) or mutated_inputs(node)
        if ops.is_collective(node) and ops.num_ranks(node, self.world_size) == 1:
            sources = node.all_input_nodes
        if sources:
            return set().union(*(roots[source] for source in sources))
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        made = [(node, at) for at, part in enumerate(parts) if isinstance(part, torch.Tensor)]
        self.sizes |= {(node, at): self.bytes_of(parts[at]) for _, at in made}
        if made and node in self.own:
            self.sizes[made[0]] += self.own[node].kept
        return set(made)


def _numel(node: fx.Node) -> Any:
    return node.meta["val"].numel()


# torch counts these from 2.15 on.
_COUNTED_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def seconds(node: fx.Node, figures: Hardware, table: ParameterTable) -> float:
    """Return a node's seconds by a roofline: its arithmetic or its memory, the slower one.

    Nothing for views and for communication, which is the link's.  Operators count one by one,
    though a compiler may fuse them.  Ranks must predict alike, and their shards have different
    lengths: an update counts as one of an equal share, other arithmetic on shards as nothing.
    By a calibration it is what such a call took, of views too.
    Source: Williams et al. 2009, "Roofline".
    """
    if figures.calibration is not None:
        return calibrated_s(node, figures, figures.calibration, table)
    if node.op != "call_function" or _is_of_shards(node):
        return 0.0
    if not ops.is_ours(node.target) and is_view(node):
        return 0.0
    nbytes, count = work(node, table)
    return max(_flops_s(node, count, figures), nbytes / figures.memory_bytes_per_s)


def is_view(node: fx.Node) -> bool:
    """Return whether a node makes nothing but a view."""
    return bool(aliased_inputs(node)) and not mutated_inputs(node)


def work(node: fx.Node, table: ParameterTable) -> tuple[float, int]:
    """Return the bytes that a node reads and writes on the device, and its operations."""
    if ops.is_ours(node.target):
        rules = ops.rules(node)
        return rules.memory_bytes(node, table), rules.flops(node)
    return sum(map(hinted_bytes, (*node.all_input_nodes, node))), flops(node)


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator, as calibrations have it: ``aten.mm``.

    In a narrow dtype it is another one: ``aten.mm bfloat16``.
    """
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet) if packet is not None else getattr(node.target, "__name__", "call")
    dtype = _dtype_of(node)
    is_narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return f"{name} {str(dtype).removeprefix('torch.')}" if is_narrow else name


def calibrated_s(
    node: fx.Node, figures: Hardware, calibration: Calibration, table: ParameterTable
) -> float:
    """Return what a call like a node's has taken.

    Of one that has not been measured: what others take for as many bytes, or its arithmetic.
    """
    if node.op != "call_function":
        return 0.0
    cost, others = calibration.of(name_of(node)), calibration.operators[OTHERS]
    if _is_of_shards(node) or (is_view(node) and not ops.is_ours(node.target)):
        return (cost or others).call_s
    nbytes, count = work(node, table)
    if cost is None:
        return max(others.seconds(nbytes), others.call_s + _flops_s(node, count, figures))
    return cost.seconds(nbytes, count)


def _flops_s(node: fx.Node, count: int, figures: Hardware) -> float:
    return count / figures.flops_per_s_in(_dtype_of(node))


def _dtype_of(node: fx.Node) -> torch.dtype:
    made = node.meta.get("val")
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32


def owned_bytes(node: fx.Node, world_size: int, table: ParameterTable | None = None) -> int:
    """Return the bytes of an even share of an ``on_owners``' tensors, as gradients.

    An update may send them in a narrower dtype.  With a ``table`` all ranks count alike.
    """
    gradients = [gradient.meta["val"] for gradient in node.args[1]]
    if table is None:
        return sum(map(tensor_bytes, gradients))
    wholes = zip(node.args[3], gradients, strict=True)
    nbytes = sum(table[index].numel * gradient.itemsize for index, gradient in wholes)
    return -(-nbytes // world_size)


def bytes_by_owner(node: fx.Node, table: ParameterTable) -> dict[int, int]:
    """Return the bytes of an ``on_owners``' whole tensors, as gradients, by who owns them."""
    found: dict[int, int] = defaultdict(int)
    for gradient, index, owner in zip(node.args[1], *node.args[3:5], strict=True):
        found[owner] += table[index].numel * gradient.meta["val"].itemsize
    return found


def journeys(node: fx.Node) -> int:
    """Return how often an ``on_owners`` sends what ``owned_bytes`` counts: there, and back.

    Of an update by the optimizer's own step, parameter and gradient go; of others one tensor does.
    """
    if min(node.args[4], default=EVERY_RANK) == EVERY_RANK:
        return 0
    return 3 if ops.argument(node, "own_step") else 2


def flops(node: fx.Node) -> int:
    """Floating point operations of matrix products, convolutions and attention; 0 of others.

    And of those that torch's own count does not take.  Of causal attention only the blocks that are
    not masked as a whole count: kernels leave out the others.  Source: Dao 2023, FlashAttention-2.
    """
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) or flop_registry.get(_COUNTED_LIKE.get(packet))
    if count is None:
        return 0

    def sized(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_symbolic(value):  # lest counting adds guards
            sizes = [compat.aot.size_hint(size) for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        return compat.aot.size_hint(value) if isinstance(value, torch.SymInt) else value

    given = node.args, dict(node.kwargs)
    args, kwargs = fx.node.map_arg(given, lambda operand: sized(operand.meta.get("val")))
    made = fx.node.map_aggregate(node.meta.get("val"), sized)
    try:
        return int(_unmasked(node, args) * count(*args, **kwargs, out_val=made))
    except (AssertionError, IndexError, TypeError, ValueError):
        # torch's formulas do not know all that its operators take, such as attention whose
        # queries have more heads.  That is no reason to refuse a step: its memory still counts.
        return 0


ATTENTION_BLOCK = 128
"""Queries and keys that a kernel of attention takes together; those differ by device and width."""


def _unmasked(node: fx.Node, args: Sequence[Any]) -> float:
    """Return the share of an attention's blocks that its causal mask leaves; 1 of what has none."""
    names = [argument.name for argument in node.target._schema.arguments]
    if "is_causal" not in names or not all(name in names for name in ("query", "key")):
        return 1.0
    at = names.index("is_causal")
    length, keys = (args[names.index(name)].shape[-2] for name in ("query", "key"))
    if not (args[at] if at < len(args) else node.kwargs.get("is_causal")) or length != keys:
        return 1.0
    return min((keys + ATTENTION_BLOCK) / (2 * keys), 1.0)


def _is_of_shards(node: fx.Node) -> bool:
    """Return whether a node does arithmetic on flat shards, but for an update."""
    if role(node) in (Role.ON_SHARD, Role.PARTIAL, Role.GATHER_CAST, Role.FINISH_REDUCTION):
        return True
    return node.target is not ops.update and any(
        operand.op == "placeholder" and input_role(operand).sharded
        for operand in node.all_input_nodes
    )
