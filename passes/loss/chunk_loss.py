"""Compute a head and the loss behind it in chunks of tokens, forward and backward at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.graph import Builder, erase_unused, is_backward, is_random, updated_by
from zerofx.ir.interface import noted
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role
from zerofx.ir.sizes import hinted_bytes, is_symbolic
from zerofx.ir.source import source_line
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.loss.rows import (
    MEAN,
    WHOLE,
    NotByTokensError,
    Rows,
    Step,
    shape_of,
    step_of,
)

logger = logging.getLogger("zerofx")
aten = torch.ops.aten

FEWEST, MOST = 128, 512
"""Tokens of a chunk, where nobody says how many chunks there are: half the width within these."""

LEAST_BYTES, LARGEST_BYTES = 1 << 20, 1 << 24
"""The bytes that a bucket counts as at least, and at most: an accelerator's has no limit."""


def chunk_loss(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Have no value of tokens x vocabulary, but of so many tokens as are in a chunk.

    Before::

        logits = mm(h, w);  loss = sum(f(logits));  ...;  grad = df(logits);  dh = mm(grad, w.t())
        dw = mm(grad.t(), h)

    After::

        h_0 = h[:n];  logits_0 = mm(h_0, w);  loss_0 = sum(f(logits_0));  grad_0 = df(logits_0)
        dh_0 = mm(grad_0, w.t());  dw_0 = addmm_(empty, grad_0.t(), h_0, beta=0);  h_1 = h[n:];  ...
        loss = loss_0 + loss_1;  dh = cat(dh_0, dh_1);  dw = addmm_(dw_0, grad_1.t(), h_1)

    Everything between the product and what leaves has to compute each token by itself, and nothing
    that backward reads there may depend on the loss of all tokens.  Chunks are part of backward.
    Sums of narrow values are made in float32.
    """
    wanted = ctx.options.chunk_loss
    found = chunks = saved = 0
    why_not = ["no matrix product makes more of each token than it has"]
    for head in _heads(gm.graph):
        if not head.users:
            continue  # part of another one's region
        number = _number_of_chunks(head, ctx)
        if not number:
            continue
        try:
            region = Region.of(gm.graph, head)
            _Chunked(gm, ctx, region, number).emit()
        except NotChunkedError as why:
            why_not.append(f"{why}, of {head.name} ({source_line(head)})")
            continue
        saved += region.nbytes - region.nbytes // number
        found, chunks = found + 1, chunks + number
    if wanted and not found:
        warning = f"chunk_loss={wanted:d}: no loss is computed in chunks: {why_not[-1]}."
        logger.warning(noted(gm.graph, warning))
    elif not found and len(why_not) > 1:
        logger.info("the loss is computed in one, for %s.", why_not[-1])
    return {"losses": found, "chunks": chunks, "bytes of logits less": saved}


class NotChunkedError(Exception):
    """A head is computed whole: says why."""


def _heads(graph: fx.Graph) -> list[fx.Node]:
    """Matrix products of forward that make more of each token than it has; the last is a head."""
    products = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target in (aten.mm.default, aten.addmm.default)
        and not is_backward(node)
        and hinted_bytes(node) > hinted_bytes(node.args[-2])
    ]
    most = max(map(hinted_bytes, products), default=0)
    return [node for node in products if 2 * hinted_bytes(node) >= most]


def _number_of_chunks(head: fx.Node, ctx: PassContext) -> int:
    """Return the number of chunks: what is wanted, or 0 where the least is no more than a bucket.

    Whether there are any does not depend on the tokens, of which ranks may have other numbers: one
    that has few has one chunk, and communicates alike.
    """
    wanted = ctx.options.chunk_loss
    tokens, width = map(compat.aot.size_hint, shape_of(head.args[-2]))
    if wanted is not None and wanted > 1:
        return min(wanted, tokens)
    least = 2 * FEWEST * hinted_bytes(head) // tokens  # what it makes, and its gradient
    if not wanted and least <= min(max(ctx.bucket_bytes, LEAST_BYTES), LARGEST_BYTES):
        return 0
    return math.ceil(tokens / min(MOST, max(FEWEST, width // 2)))


@dataclass(frozen=True)
class Cut:
    """A range of one of the dimensions that count tokens: the rest has no part in the loss."""

    sizes: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @staticmethod
    def of(shape: Sequence[int], rows: Rows, dim: int, start: Any, stop: Any, step: int) -> Cut:
        """Return what ``slice`` takes.  Raises: NotByTokensError for other steps than one."""
        at = dim % len(shape) - rows.lead
        if step != 1 or isinstance(start, fx.Node) or isinstance(stop, fx.Node):
            raise NotByTokensError("it takes tokens in steps, or others in every call")
        begin, end, _ = slice(start, stop).indices(shape[at + rows.lead])
        if end <= begin:
            raise NotByTokensError("it takes no tokens")
        return Cut(tuple(rows.of(shape)), at, begin, end)

    @property
    def left(self) -> list[int]:
        """The sizes of what is left."""
        sizes = list(self.sizes)
        sizes[self.dim] = self.stop - self.start
        return sizes


@dataclass
class Region:
    """A head and all that is computed of it token by token, in the program's order.

    ``ends`` are sums over tokens and what leaves; ``parts`` are values of single tokens that others
    read.  ``totals`` are what targets weigh, and ``pulled`` what was computed before the head.

    With a ``cut``, tokens behind it are fewer: those of ``few``.  What gradients flow back to in
    front of it has zeros for the others, of ``zeros`` that is known.
    """

    head: fx.Node
    steps: dict[fx.Node, Step]
    ends: dict[fx.Node, Step] = field(default_factory=dict)
    parts: list[fx.Node] = field(default_factory=list)
    totals: set[fx.Node] = field(default_factory=set)
    pulled: set[fx.Node] = field(default_factory=set)
    cut: Cut | None = None
    few: set[fx.Node] = field(default_factory=set)
    zeros: set[fx.Node] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """The number of tokens that have a part in the loss."""
        return math.prod(self.cut.left) if self.cut else self.all_tokens

    @property
    def all_tokens(self) -> int:
        return shape_of(self.head)[0]

    @property
    def known(self) -> dict[fx.Node, Rows]:
        return {node: step.rows for node, step in self.steps.items() if step.rows is not None}

    @property
    def nbytes(self) -> int:
        return hinted_bytes(self.head)

    @property
    def needed(self) -> list[fx.Node]:
        """Return what it reads from outside, and all that this is computed from."""
        steps = [*self.steps.values(), *self.ends.values()]
        read = dict.fromkeys(one for step in steps for one in step.operands)
        outside = [one for one in read if one not in self.steps and one not in self.totals]
        return list(reached(outside, lambda n: [] if _is_start(n) else n.all_input_nodes))

    @staticmethod
    def of(graph: fx.Graph, head: fx.Node) -> Region:
        """Find what can be computed in chunks with a head.

        Raises: NotChunkedError.
        """
        tokens = shape_of(head)[0]
        if is_symbolic(head.meta["val"]):
            raise NotChunkedError(
                "the number of tokens varies from call to call (torch.compile(..., dynamic=False) "
                "has a program for each)"
            )
        if tokens < 2:
            raise NotChunkedError("there is one token")
        try:
            region = Region(head, {head: step_of(head, {}, tokens, Rows(0, 1))})
        except NotByTokensError as why:
            raise NotChunkedError(str(why)) from why
        known, why_not = region.known, {}
        for node in [node for node in graph.nodes if node > head]:
            if node.op != "call_function" or known.keys().isdisjoint(node.all_input_nodes):
                continue
            if _is_total_weight(node):
                region.totals.add(node)
                continue
            try:
                step = region._step(node, known)
            except NotByTokensError as why:
                why_not[node] = str(why)
                continue
            for operand, rows in step.operands.items():
                if rows is not WHOLE and operand not in known:
                    region._pull(operand, rows, known, node in region.few)
            if step.adds_up or step.leaves:
                region.ends[node] = step
            else:
                assert step.rows is not None, "it has tokens, or is a sum over them"
                region.steps[node], known[node] = step, step.rows
        region._check(why_not)
        return region

    def _step(self, node: fx.Node, known: dict[fx.Node, Rows]) -> Step:
        """Return what a node is in a chunk.  Raises: NotByTokensError."""
        read = [one for one in node.all_input_nodes if one in known]
        are_few = {one in self.few for one in read}
        if node.target in (aten.slice.Tensor, aten.slice_backward.default):
            cut = self._cut(node, known)
            if cut is not None:
                return cut
        if len(are_few) > 1:
            raise NotByTokensError("all tokens meet some of them")
        if are_few == {True}:
            step = self._checked(step_of(node, known, self.tokens), self.tokens)
            self.few.add(node)
            return step
        step = self._checked(step_of(node, known, self.all_tokens), self.all_tokens)
        if not self.zeros.isdisjoint(read) and _keeps_zeros(node, self.zeros):
            self.zeros.add(node)
        return step

    @staticmethod
    def _checked(step: Step, tokens: int) -> Step:
        """A step whose operands have so many tokens.  Raises: NotByTokensError."""
        for operand, rows in step.operands.items():
            value = operand.meta["val"]
            if rows is WHOLE or not isinstance(value, torch.Tensor):
                continue
            if math.prod(rows.of(value.shape)) != tokens:
                raise NotByTokensError("an operand has other tokens")
        return step

    def _cut(self, node: fx.Node, known: dict[fx.Node, Rows]) -> Step | None:
        """Return the step of a node that takes some tokens or puts them back; None of others."""
        source, is_back = node.args[0], node.target is aten.slice_backward.default
        shape, rows = shape_of(node if is_back else source), known[source]
        arguments = [*node.args[2 if is_back else 1 :], *(0, None, None, 1)[len(node.args) - 1 :]]
        if not rows.lead <= arguments[0] % len(shape) < len(shape) - rows.trail:
            return None
        cut = Cut.of(shape, rows, *arguments[:4])
        if self.cut not in (None, cut) or (source in self.few) is not is_back:
            raise NotByTokensError("it takes other tokens than before")
        self.cut = cut
        (self.zeros if is_back else self.few).add(node)
        return Step({source: rows}, rows, lambda call, of, size: of(source))

    def _is_large(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        whole, made_of = self.head.meta["val"].numel(), self.head.args[-2].meta["val"].numel()
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and 2 * value.numel() >= whole and value.numel() > made_of

    def _pull(self, node: fx.Node, rows: Rows, known: dict[fx.Node, Rows], is_few: bool) -> None:
        """Take a large operand in, if it too is computed token by token: a teacher's logits."""
        if node.op != "call_function" or not self._is_large(node) or self._is_updated(node):
            return
        try:
            tokens = self.tokens if is_few else self.all_tokens
            step = self._checked(step_of(node, {}, tokens, rows), tokens)
        except NotByTokensError:
            return
        if is_few:
            self.few.add(node)
        self.steps[node], known[node] = step, rows
        self.pulled.add(node)
        for operand, its in step.operands.items():
            if its is not WHOLE and operand not in known:
                self._pull(operand, its, known, is_few)

    def _is_updated(self, node: fx.Node) -> bool:
        """Return whether something is written to between a node and the head."""
        between = node.next
        while between.op != "root" and between < self.head:
            if updated_by(between) or mutated_inputs(between):
                return True
            between = between.next
        return False

    def _check(self, why_not: dict[fx.Node, str]) -> None:
        inside = {*self.steps, *self.ends, *self.totals}
        for node in self.steps:
            others = [user for user in node.users if user not in inside]
            if not others or node in self.pulled:
                continue
            if not isinstance(node.meta["val"], torch.Tensor):
                raise NotChunkedError(f"{node.name} is read as a whole")
            if not self._is_large(node):
                self.parts.append(node)
            elif others[0].op == "output":
                raise NotChunkedError("the step returns what has tokens x vocabulary elements")
            else:
                why = why_not.get(others[0], "it is no part of the loss")
                raise NotChunkedError(_words(why, others[0]))
        if not self.ends:
            raise NotChunkedError("nothing sums over its tokens")
        if self.cut is not None:
            for node in (*self.ends, *self.parts):
                if node not in self.few and node not in self.zeros:
                    raise NotChunkedError(f"{node.name} has tokens that the loss has not")
        depends = {*self.steps, *self.ends}
        for node in self.head.graph.nodes:
            if node in self.totals or node in depends or _is_start(node):
                continue
            if not depends.isdisjoint(node.all_input_nodes):
                depends.add(node)
        for operand in self.needed:
            if operand in depends:
                way = reached([operand], lambda n: n.all_input_nodes if n in depends else [])
                unknown = next((node for node in way if node in why_not), None)
                if unknown is not None:
                    raise NotChunkedError(_words(why_not[unknown], unknown))
                raise NotChunkedError(_words("a token's gradient depends on all tokens", operand))
            acts = is_random(operand) or mutated_inputs(operand) or ops.acts(operand)
            if operand > self.head and acts:
                raise NotChunkedError(f"{operand.name} cannot be computed before it")


def _keeps_zeros(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether a node's tokens are zero where those of an operand are, which has zeros."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in _LINEAR or name.endswith(("_backward", "_backward_data")):
        return node.args[0] in zeros or (name in ("mul", "mm") and node.args[1] in zeros)
    return name in ("add", "sub") and all(map(zeros.__contains__, node.args[:2]))


_LINEAR = frozenset(
    "alias clone detach div expand mm mul neg sum squeeze t _to_copy transpose unsqueeze"
    " _unsafe_view view".split()
)


def _words(why: str, node: fx.Node) -> str:
    return f"{why} ({node.name}, {source_line(node) or 'of no line'})"


def _is_start(node: fx.Node) -> bool:
    """Return whether a node is what backward starts from: a one, which reads no loss."""
    return node.target is aten.ones_like.default and not node.meta["val"].dim()


def _is_total_weight(node: fx.Node) -> bool:
    """Return whether a node is how much targets weigh, which no loss is needed for."""
    source = node.args[0] if node.args else None
    return (
        isinstance(source, fx.Node)
        and source.target is aten.nll_loss_forward.default
        and node.args[1] == 1
    )


class _Chunked:
    """Writes a region in chunks, in front of its head."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, region: Region, number: int) -> None:
        self.graph, self.region, self.number = gm.graph, region, number
        self.builder = Builder(gm, "chunk_loss", ctx.table)
        self.weights: dict[fx.Node, fx.Node] = {}  # of targets, by what takes their mean
        self.wholes: dict[fx.Node, fx.Node] = {}  # in the place of operands that every chunk reads
        self.own: dict[tuple[fx.Node, fx.Node], fx.Node] = {}  # the same, for one reader
        self.merged: dict[tuple[fx.Node, Rows, bool], fx.Node] = {}
        self.sums: dict[fx.Node, fx.Node] = {}
        self.lists: dict[fx.Node, list[fx.Node]] = {}
        self.values: dict[fx.Node, fx.Node] = {}  # of the chunk at hand
        self.slices: dict[tuple[fx.Node, Rows, bool], fx.Node] = {}

    def emit(self) -> None:
        """Write it.  Raises: NotChunkedError, and leaves the program as it was."""
        before = set(self.graph.nodes)
        try:
            self._emit()
        except Exception as error:
            if not self.region.head.users:
                raise  # too late
            # What backward starts from stays: what reads it is in front of the loss now.
            kept = {*before, *(one for start, one in self.wholes.items() if _is_start(start))}
            for node in [node for node in reversed(self.graph.nodes) if node not in kept]:
                self.graph.erase_node(node)
            logger.warning(noted(self.graph, f"chunk_loss: {error}. Please report it."))
            raise NotChunkedError(f"it failed: {error}") from error

    def _emit(self) -> None:
        region = self.region
        self._hoist()
        self._weigh()
        size = math.ceil(region.tokens / self.number)
        # A region ends where a sum is added to: the last of a chunk, so that its gradient can go.
        sums = {node for node, step in region.ends.items() if step.adds_up and _adds_in_place(node)}
        everything = sorted([*region.steps, *region.ends], key=lambda n: (n in sums, n))
        for at, begin in enumerate(range(0, region.tokens, size)):
            self._emit_chunk(everything, at, slice(begin, min(begin + size, region.tokens)))
        self._finish()

    def _caller(self, like: fx.Node, name: str = "") -> Callable[..., fx.Node]:
        """Inserts in front of the head, as part of backward."""

        def call(target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
            with self.builder.before(self.region.head, role=Role.CHUNK, like=like) as insert:
                node = insert(target, *args, **kwargs)
            node.meta["autograd_backward"] = True
            if name:
                node._rename(name)
            return node

        return call

    def _hoist(self) -> None:
        """Have all operands in front of the head; what is late of them reads no token's loss."""
        head = self.region.head
        for node in sorted(node for node in self.region.needed if node > head):
            if _is_start(node):
                # Of the batch still, which ranks have another of: so that all plan alike.
                value, call = node.meta["val"], self._caller(node)
                options = {"dtype": value.dtype, "device": value.device}
                one = call(aten.new_full.default, head.args[-2], [], 1.0, **options)
                self.wholes[node] = one
                node.replace_all_uses_with(one, lambda user: user not in self.region.steps)
            else:
                head.prepend(node)

    def _weigh(self) -> None:
        """Count what the targets of a mean weigh, and divide what backward starts from by it."""
        for source in self.region.steps:
            if source.target is not aten.nll_loss_forward.default:
                continue
            _, targets, weight, _, ignored = source.args
            call, value = self._caller(source), source.args[0].meta["val"]
            if targets in self.region.steps:  # of each token a loss, for which it is not read
                options = {"dtype": value.dtype, "device": value.device}
                self.weights[source] = call(aten.full.default, [], 1.0, **options)
                continue
            counts = call(aten.ne.Scalar, targets, ignored)
            if isinstance(weight, fx.Node):
                known = call(aten.where.ScalarOther, counts, targets, 0)
                known = call(aten.view.default, known, [-1])
                weights = call(aten.index_select.default, weight, 0, known)
                counts = call(aten.where.ScalarOther, counts, weights, 0)
            self.weights[source] = call(aten.sum.default, counts, dtype=value.dtype)
        for total in self.region.totals:
            self.wholes[total] = self.weights[total.args[0]]
        for node in self.region.steps:
            if node.target is aten.nll_loss_backward.default and node.args[4] == MEAN:
                gradient, call = node.args[0], self._caller(node)
                start = self.wholes.get(gradient, gradient)
                mean = call(aten.div.Tensor, start, self.wholes[node.args[6]])
                self.own[node, gradient] = mean

    def _emit_chunk(self, nodes: Sequence[fx.Node], at: int, tokens: slice) -> None:
        self.values, self.slices = {}, {}
        size = tokens.stop - tokens.start
        for node in nodes:
            step = self.region.steps.get(node) or self.region.ends[node]

            def of(operand: fx.Node, node: fx.Node = node, step: Step = step) -> fx.Node:
                return self._operand(operand, step.operands[operand], node, at, tokens)

            call = self._caller(node, f"{node.name}_chunk{at}")
            if step.adds_up and _adds_in_place(node):
                self._add_in_place(node, call, *map(of, node.args))
                continue
            value = step.emit(call, of, size)
            if step.adds_up:
                self._add(node, step, value)
            elif step.leaves:
                self.lists.setdefault(node, []).append(value)
            else:
                self.values[node] = value
        for node in self.region.parts:
            self.lists.setdefault(node, []).append(self.values[node])

    def _operand(
        self, operand: fx.Node, rows: Rows | None, node: fx.Node, at: int, tokens: slice
    ) -> fx.Node:
        if operand in self.values:
            return self.values[operand]
        if rows is WHOLE:
            return self.own.get((node, operand)) or self.wholes.get(operand, operand)
        is_cut = self.region.cut is not None and node not in self.region.few
        key = operand, rows, is_cut
        if key not in self.slices:
            if key not in self.merged:
                self.merged[key] = self._merge(operand, rows, node, is_cut)
            call = self._caller(node, f"{operand.name}_chunk{at}")
            bounds = rows.lead, tokens.start, tokens.stop
            self.slices[key] = call(aten.slice.Tensor, self.merged[key], *bounds)
        return self.slices[key]

    def _merge(self, operand: fx.Node, rows: Rows, node: fx.Node, is_cut: bool) -> fx.Node:
        """Insert a view of an operand that has the loss's tokens in one dimension."""
        shape, call = shape_of(operand), self._caller(node)
        merged, cut = rows.merged(shape, self.region.tokens), self.region.cut
        if is_cut:
            assert cut is not None
            apart = [*shape[: rows.lead], *cut.sizes, *shape[len(shape) - rows.trail :]]
            operand = self._viewed(operand, apart, call)
            bounds = rows.lead + cut.dim, cut.start, cut.stop
            operand = call(aten.slice.Tensor, operand, *bounds)
        return self._viewed(operand, merged, call)

    @staticmethod
    def _viewed(operand: fx.Node, shape: list[int], call: Callable[..., fx.Node]) -> fx.Node:
        if shape_of(operand) == shape:
            return operand
        if not _is_viewable(operand.meta["val"], shape):
            options = {"memory_format": torch.contiguous_format}
            operand = call(aten.clone.default, operand, **options)
        return call(aten.view.default, operand, shape)

    def _add_in_place(
        self, node: fx.Node, call: Callable[..., fx.Node], one: fx.Node, other: fx.Node
    ) -> None:
        """Add the chunk's product to those before; what the first is written to is not read."""
        value, is_first = node.meta["val"], node not in self.sums
        if is_first:
            options = {"dtype": value.dtype, "device": value.device}
            self.sums[node] = self._caller(node)(
                aten.empty.memory_format, list(value.shape), **options
            )
        begin = {"beta": 0} if is_first else {}
        self.sums[node] = call(aten.addmm_.default, self.sums[node], one, other, **begin)

    def _add(self, node: fx.Node, step: Step, value: fx.Node) -> None:
        call = self._caller(node)
        if value.meta["val"].dtype in (torch.bfloat16, torch.float16):
            value = call(aten._to_copy.default, value, dtype=torch.float32)
        if node in self.sums:
            in_place = value.meta["val"].dim() > 1
            add = aten.add_.Tensor if in_place else aten.add.Tensor
            value = call(add, self.sums[node], value)
        self.sums[node] = value

    def _finish(self) -> None:
        region = self.region
        for node, total in self.sums.items():
            step, call = region.ends[node], self._caller(node)
            if step.divided_by > 1:
                total = call(aten.div.Scalar, total, step.divided_by)
            source = node.args[0]
            if source in self.weights and source.args[3] == MEAN:
                total = call(aten.div.Tensor, total, self.weights[source])
            self._replace(node, total, call)
            if _adds_in_place(node):
                self._add_rows(total)
        for node, parts in self.lists.items():
            step, call = region.steps.get(node) or region.ends[node], self._caller(node)
            assert step.rows is not None
            whole = call(aten.cat.default, parts, step.rows.lead)
            if region.cut is not None and node not in region.few:
                whole = self._among_zeros(whole, step.rows, region.cut, call)
            self._replace(node, whole, call)
        for total in region.totals:
            total.replace_all_uses_with(self.wholes[total])
        erase_unused(self.graph, [*region.totals, *region.ends, *region.steps])

    def _add_rows(self, total: fx.Node) -> None:
        """Add a tied embedding's gradient to the head's row by row: no second tensor of all rows.

        ``add(total, embedding_dense_backward(g, i, ...))`` becomes ``index_put_(total, [i], g)``.
        """
        while len(total.users) == 1 and aliased_inputs(user := next(iter(total.users))) == [total]:
            total = user
        add = next(iter(total.users)) if len(total.users) == 1 else total
        if add.target is not aten.add.Tensor or add.kwargs:
            return
        (rows,) = [node for node in add.all_input_nodes if node is not total] or [total]
        if rows.target is not aten.embedding_dense_backward.default or len(rows.users) > 1:
            return
        gradient, indices, _, padding, by_frequency = rows.args
        like = total.meta["val"]
        if (
            by_frequency
            or gradient.meta["val"].dtype != like.dtype
            or list(like.shape) != shape_of(rows)
        ):
            return
        with self.builder.before(add, role=Role.CHUNK, like=add) as insert:
            if padding >= 0:
                is_padding = insert(aten.eq.Scalar, indices, padding)
                is_padding = insert(aten.unsqueeze.default, is_padding, -1)
                gradient = insert(aten.masked_fill.Scalar, gradient, is_padding, 0)
            by = insert(aten.index_put_.default, total, [indices], gradient, True)
        add.replace_all_uses_with(by)
        erase_unused(self.graph, [add, rows])

    def _among_zeros(
        self, value: fx.Node, rows: Rows, cut: Cut, call: Callable[..., fx.Node]
    ) -> fx.Node:
        """What the tokens of the loss have, and zeros for all others."""
        shape = shape_of(value)
        before, behind = shape[: rows.lead], shape[len(shape) - rows.trail :]
        value = call(aten.view.default, value, [*before, *cut.left, *behind])
        bounds = rows.lead + cut.dim, cut.start, cut.stop, 1
        return call(aten.slice_backward.default, value, [*before, *cut.sizes, *behind], *bounds)

    def _replace(self, node: fx.Node, by: fx.Node, call: Callable[..., fx.Node]) -> None:
        value = node.meta["val"]
        if by.meta["val"].dtype != value.dtype:
            by = call(aten._to_copy.default, by, dtype=value.dtype)
        if by.meta["val"].shape != value.shape:
            by = call(aten.view.default, by, list(value.shape))
        inside = {*self.region.steps, *self.region.ends}
        node.replace_all_uses_with(by, lambda user: user not in inside)


def _adds_in_place(node: fx.Node) -> bool:
    """Return whether products are added to the first chunk's memory as they are made."""
    return node.target is aten.mm.default and node.meta["val"].dtype == torch.float32


def _is_viewable(value: torch.Tensor, shape: list[int]) -> bool:
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True
