"""Choose which forward values a backward keeps or computes again: a minimum cut in bytes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import fx

from zerofx import compat
from zerofx.ir.aliases import aliased_inputs, is_view, mutated_inputs
from zerofx.ir.graph import is_backward
from zerofx.ir.interface import input_role
from zerofx.ir.reach import reached
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.memory.minimum_cut import UNLIMITED, Network

aten = torch.ops.aten

LONGEST_CHAIN = 32
"""At most this many operators in a row are repeated: all their results are alive at once."""


def _packets(names: str) -> frozenset[object]:
    """The aten operators with these names, of those that this version of torch has."""
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


# Besides those that torch tags as pointwise.
_CHEAP = _packets(
    "_to_copy arange fill full full_like glu hardsigmoid hardswish leaky_relu log_sigmoid_forward"
    " masked_fill new_full new_ones new_zeros ones ones_like rsub scalar_tensor tril triu where"
    " zeros zeros_like"
)
# Of several results, of which only the first is large.  The others are kept.
_NORMS = _packets(
    "_batch_norm_with_update_functional _fused_rms_norm _native_batch_norm_legit_functional"
    " native_group_norm native_layer_norm"
)
# What Inductor fuses with pointwise operators, so that their results need no memory of their own.
_FUSED = _packets(
    "_fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax"
    " _softmax_backward_data batch_norm_backward cat elu_backward glu_backward"
    " hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward"
    " log_sigmoid_backward mish_backward native_batch_norm_backward native_dropout"
    " native_group_norm_backward native_layer_norm_backward nll_loss_backward nll_loss_forward"
    " select_backward slice_backward softplus_backward"
)

_ALL_CHEAP = _CHEAP | _NORMS
_ALL_FUSED = _CHEAP | _NORMS | _FUSED


def backward_calls(graph: fx.Graph) -> list[list[fx.Node]]:
    """The stretches of backward, one or more for each call of it."""
    calls: list[list[fx.Node]] = []
    inside = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_backward(node):
            if not inside:
                calls.append([])
            calls[-1].append(node)
        inside = is_backward(node)
    return calls


def made_of_parameters(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """By node that only parameters and gradients are computed into, or that is one, these."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "placeholder":
            if input_role(node).kind in ("parameter", "gradient"):
                found[node] = frozenset({node})
        elif sources and all(source in found for source in sources):
            found[node] = frozenset().union(*map(found.__getitem__, sources))
    return found


Choice = tuple[Collection[str], Mapping[str, str]]
"""The values that one backward computes again, and the reason for each that it keeps: names."""


class SavedValues:
    """Decides, for each backward of a program, what it keeps of forward.

    The rules are those of torch's own partitioner: only what Inductor fuses into its readers is
    computed again, and never what a matrix product of backward reads (it would have to be
    written to memory anyway), a reduction or a random draw.  Of what these allow, the choice
    keeps the fewest bytes, and among equals repeats the least: it is unique.

    A value all of whose sources backward holds anyway is repeated whatever its size.  Only such
    a value may read a parameter, and only one that backward reads anyway: so which gathers a
    program has, and in which order, never depends on sizes, which may differ between ranks.

    Source: functorch's min-cut partitioner (``torch/_functorch/partitioners.py``).
    """

    def __init__(self, graph: fx.Graph):
        self.parameters = made_of_parameters(graph)
        self.number: dict[fx.Node, int] = {}  # equal for what computes the same
        self.known: dict[object, int] = {}
        self.level: dict[fx.Node, int] = {}
        self.first_write: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        self.number[node] = self._computation(node)
        self.level[node] = self.reading_level(node) + (not is_fused(node))
        for source in mutated_inputs(node):
            self.first_write.setdefault(_base(source), node)

    def _computation(self, node: fx.Node) -> int:
        key: object = node
        if _is_repeatable(node) and not any(s in self.parameters for s in node.all_input_nodes):
            arguments = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda source: f"%{self.number[source]}"
            )
            key = (node.target, repr(arguments))
        return self.known.setdefault(key, len(self.known))

    def parameters_of(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """The parameters among ``nodes``, and those that some of them are computed from alone."""
        return frozenset().union(*(self.parameters.get(node, ()) for node in nodes))

    def reading_level(self, node: fx.Node) -> int:
        """Count the operators that nothing fuses with before a node, on the longest path."""
        return max((self.level[source] for source in node.all_input_nodes), default=0)

    def choose(self, backward: list[fx.Node]) -> Choice:
        """Choose what the backward made of these nodes, in program order, keeps and repeats."""
        return _Backward(self, backward).choose()

    def equals(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Those of ``nodes`` that compute the same as an earlier one of them -> that one.

        Left out is what reads parameters, or is handed to the caller or written to.
        """
        first: dict[int, fx.Node] = {}
        found: dict[fx.Node, fx.Node] = {}
        for node in sorted(nodes):
            same = first.setdefault(self.number[node], node)
            stays = any(r.op == "output" or mutated_inputs(r) for r in _readers(node))
            if same is not node and not stays:
                found[node] = same
        return found


class _Backward:
    """One backward: what it reads of forward, and what that can be computed from.

    Values ``at_hand`` are in memory during backward whatever is chosen; those that are ``free``
    are repeated from nothing else.
    """

    def __init__(self, program: SavedValues, nodes: list[fx.Node]):
        self.program = program
        self.nodes = set(nodes)
        self.first, self.last = nodes[0], nodes[-1]
        self.wanted: dict[fx.Node, None] = {}
        self.parameters: frozenset[fx.Node] = frozenset()
        for node in nodes:
            outside = [source for source in node.all_input_nodes if source not in self.nodes]
            self.wanted.update(dict.fromkeys(s for s in outside if s not in program.parameters))
            self.parameters |= program.parameters_of(outside)
        self.reasons: dict[fx.Node, str] = {}
        self.at_hand: set[fx.Node] = set()
        self.free: set[fx.Node] = set()
        self.with_parameters: set[fx.Node] = set()

    def choose(self) -> Choice:
        cone = self._cone()
        kept: dict[fx.Node, str] = {}
        network = Network()
        chain: dict[fx.Node, int] = {}
        for node in cone:
            chain[node] = 1 + max((chain.get(s, 0) for s in node.all_input_nodes), default=0)
            reason = self._why_kept(node, chain[node])
            if reason:
                chain[node] = 0
                if not _is_large(node) or self._is_held(node):
                    self.at_hand.add(node)
                    if _is_large(node):
                        kept[node] = reason
                else:
                    network.add(node, _price(node))
            elif self._comes_free(node):
                self.free.add(node)
            else:
                sources = [s for s in node.all_input_nodes if not self._costs_nothing(s)]
                network.add(node, _price(node), sources)
        for node in self.wanted:
            if not self._costs_nothing(node):
                network.want(node)
        cut, beyond = network.minimum_cut()
        for node in cut:
            is_source = bool(self._why_kept(node, chain[node]))
            kept[node] = "smaller than what comes of it" if is_source else "as small as its sources"
        repeated: set[fx.Node] = set()
        for node in cone:
            if node in self.free or node in beyond:
                if not is_view(node) or not repeated.isdisjoint(node.all_input_nodes):
                    repeated.add(node)
        return frozenset(n.name for n in repeated), {n.name: reason for n, reason in kept.items()}

    def _cone(self) -> list[fx.Node]:
        """Return the wanted values and all that they may be computed from, in program order."""

        def repeated_from(node: fx.Node) -> list[fx.Node]:
            self.reasons[node] = self._why_never_repeated(node)
            sources = [] if self.reasons[node] else node.all_input_nodes
            return [source for source in sources if source not in self.program.parameters]

        return sorted(reached(self.wanted, repeated_from))

    def _why_kept(self, node: fx.Node, chain: int) -> str:
        """Why a value is kept if backward needs it; an empty string if there is a choice."""
        reason = self.reasons[node]
        if not reason and chain > LONGEST_CHAIN:
            reason = "the end of a long chain"
        if not reason and self._needs_parameters(node):
            if not self._comes_free(node) or not self._has_parameters(node):
                return "reads a parameter"
            self.with_parameters.add(node)
        return reason

    def _why_never_repeated(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return "an input"
        if is_backward(node):
            return "computed in backward"
        if compat.aot.is_kept_by_policy(node):
            return "a checkpoint's policy"
        if compat.aot.may_draw(node.args[0] if node.target is operator.getitem else node):
            return "a random draw"
        if not _is_repeatable(node):
            return "a reduction" if _is_reduction(node) else "costly to compute"
        writes, end = self.program.first_write, self.last
        if any(writes.get(_base(source), end) < end for source in node.all_input_nodes):
            return "computed from what is overwritten"
        if is_view(node):
            return ""
        readers = list(_readers(node))
        if any(self._is_later(reader) for reader in readers):
            return "read again after backward"
        if any(reader in self.nodes and not is_fused(reader) for reader in readers):
            return "read by what nothing fuses with"
        levels = {
            self.program.reading_level(reader) for reader in readers if not is_backward(reader)
        }
        # As a residual stream: it would be computed from its beginning.
        if len(levels) > 1 and self.program.level[node] > 0:
            return "read on both sides of what nothing fuses with"
        return ""

    def _is_later(self, reader: fx.Node) -> bool:
        return reader not in self.nodes and reader > self.first

    def _is_held(self, node: fx.Node) -> bool:
        """Return whether a value that is not repeated is in memory during backward anyway."""
        return node in self.wanted or any(
            reader in self.nodes or self._is_later(reader) for reader in _readers(node)
        )

    def _costs_nothing(self, node: fx.Node) -> bool:
        return node in self.at_hand or node in self.free or node in self.program.parameters

    def _comes_free(self, node: fx.Node) -> bool:
        return all(map(self._costs_nothing, node.all_input_nodes))

    def _needs_parameters(self, node: fx.Node) -> bool:
        return any(
            source in self.program.parameters or source in self.with_parameters
            for source in node.all_input_nodes
        )

    def _has_parameters(self, node: fx.Node) -> bool:
        """Return whether backward reads the parameters that a node reads.

        A bias need not be read, if a weight beside it is: they travel together.
        """
        wanted = self.program.parameters_of(node.all_input_nodes)
        missing = wanted - self.parameters
        return not missing or (
            missing != wanted and all(parameter.meta["val"].dim() == 1 for parameter in missing)
        )


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        (node,) = aliased_inputs(node)
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Those who read a value or a view of it."""
    found = reached(node.users, lambda reader: reader.users if is_view(reader) else ())
    return (reader for reader in found if not is_view(reader))


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _is_reduction(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_reduction(node.args[0])
    return _packet(node) in _NORMS or torch.Tag.reduction in getattr(node.target, "tags", ())


def is_fused(node: fx.Node) -> bool:
    """Return whether Inductor can compute a node in the kernel of its readers or sources."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags or torch.Tag.reduction in tags:
        return True
    return _packet(node) in _ALL_FUSED or _becomes_pointwise(node)


def _becomes_pointwise(node: fx.Node) -> bool:
    """Return whether Inductor makes a node pointwise, as it does rotary embeddings' angles."""
    if _packet(node) in (aten.mm, aten.bmm):
        return node.args[0].meta["val"].shape[-1] == 1
    return _packet(node) is aten.cat and len(set(node.args[0])) == 1


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether repeating a node costs next to nothing in a kernel that reads its result."""
    if node.op != "call_function" or compat.aot.may_draw(node):
        return False
    if node.target is operator.getitem:
        source, index = node.args
        return is_view(node) or (_packet(source) in _NORMS and index == 0)
    if not isinstance(node.target, torch._ops.OpOverload) or mutated_inputs(node):
        return False
    if is_view(node):
        return True
    if torch.Tag.pointwise not in node.target.tags and _packet(node) not in _ALL_CHEAP:
        if not _becomes_pointwise(node):
            return False
    devices = {s.meta["val"].device for s in (node, *node.all_input_nodes) if _is_tensor(s)}
    return len(devices) <= 1


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_large(node: fx.Node) -> bool:
    """Return whether the program allocates memory for a value, and not a number's."""
    return node.op == "call_function" and _is_tensor(node)


def _price(node: fx.Node) -> int:
    """Bytes that keeping a value costs; no limit for what must not be kept itself.

    A view would keep all that it is a view of, and a tuple is no value.
    """
    value = node.meta.get("val")
    if is_view(node) or not isinstance(value, torch.Tensor):
        return UNLIMITED
    return hinted_bytes(node)
