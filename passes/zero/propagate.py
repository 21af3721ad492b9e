"""Propagate shards through a program: what can be computed on a flat shard is, the rest gathers.

The three ``shard_*`` passes each name some sources (a reduced gradient, a parameter) that are
henceforth sharded, and share this walk over everything that reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, aliases, memory_of, mutated_inputs, writers
from zerofx.ir.graph import Builder, erase_unused
from zerofx.ir.interface import input_role, recorded, set_input_role
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.reach import reached
from zerofx.ir.roles import Role, role
from zerofx.ir.source import source_line
from zerofx.ir.varying import rank_varying
from zerofx.passes.base import PassContext
from zerofx.passes.zero.elementwise import is_elementwise, is_reshape, is_scalar
from zerofx.passes.zero.gathers import GatherSource, insert_gathers
from zerofx.passes.zero.reductions import PendingReductions, rule_for
from zerofx.passes.zero.updates import compute_on_owners, update_one_by_one, updated_in_place

aten = torch.ops.aten


@dataclass
class ShardedValue:
    """A node whose whole value need not exist.

    ``source`` is what its whole value can be rebuilt from, by gathering and repeating the
    views and casts in between; None if its own shard has to be gathered.  ``shard`` is made
    when first asked for; a value that cannot be one (a transpose) has ``can_shard`` False.
    """

    parameter: ParameterInfo
    shape: tuple[int, ...]
    source: GatherSource | None
    shard: fx.Node | None = None
    can_shard: bool = True


class ShardPropagation:
    """One walk over a program, from its sharded sources to all that reads them."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, inserted_by: str):
        self.graph = gm.graph
        self.ctx = ctx
        self.builder = Builder(gm, inserted_by, ctx.table)
        self.pending = PendingReductions(self.builder)
        self.values: dict[fx.Node, ShardedValue] = {}
        self.sources: list[GatherSource] = []
        # Results that an earlier pass has already turned into shards stay so.
        self.sharded_results = recorded(gm.graph).sharded
        self.varying = rank_varying(gm.graph, ctx.world_size)
        self.counts: dict[str, int] = defaultdict(int)
        self.counts |= {"gathers": 0, "collectives for norms": 0, "computed on shards": 0}

    def add_source(
        self,
        node: fx.Node,
        info: ParameterInfo,
        shard: fx.Node,
        regather: bool = False,
        cast_to: torch.dtype | None = None,
    ) -> None:
        """Declare that ``node`` is sharded, as the flat node ``shard`` (maybe ``node`` itself).

        ``info`` says how: as the parameter, or as what is ``kept`` of its values.

        ``regather`` lets its whole value be freed between far-apart uses and gathered again;
        ``cast_to`` says that ``node`` is the cast of ``shard``.
        """
        source = GatherSource(node, info, shard, regather=regather, cast_to=cast_to)
        self.sources.append(source)
        known_shard = shard if cast_to is None else None
        self.values[node] = ShardedValue(info, info.shape, source, known_shard)

    def shard_input(self, node: fx.Node, regather: bool = False) -> None:
        """Let the program receive an input as this rank's flat shard."""
        given = input_role(node)
        info = self.ctx.table[given.parameter]
        if given.kind == "parameter" or given.unreduced:
            info = info.kept
        set_input_role(node, replace(given, sharded=True))
        with self.builder.fake_mode:
            node.meta["val"] = node.meta["val"].new_empty(info.shard_numel)
        node.meta.pop("tensor_meta", None)
        self.add_source(node, info, node, regather)

    def run(self, shard_gradient_results: bool = False) -> dict[str, int]:
        """Rewrite every reader of the sources, maybe also all results that become ``p.grad``."""
        # What reads a whole value is decided by the program as it came: a node that an earlier
        # pass gave a shard may come to read the very input that is one.
        read_before = {node: tuple(node.all_input_nodes) for node in self.graph.nodes}
        for node, inputs in read_before.items():
            if node in self.values or node._erased:
                continue
            if any(source in self.pending.waiting for source in node.all_input_nodes):
                self.pending.complete_before(node)
            # An optimizer's step is lowered even if all it reads came in whole.
            if node.target is ops.optimizer_step or any(s in self.values for s in inputs):
                self._visit(node)
        if shard_gradient_results:
            self._shard_gradient_results()
        self.counts["collectives for norms"] = self.pending.collectives
        self.counts |= insert_gathers(self.builder, self.sources, self.ctx)
        kept = [source.node for source in self.sources]
        stale = {node for node in self.values if not node._erased}.difference(kept)
        erase_unused(self.graph, [*sorted(stale, reverse=True), *kept])
        return dict(self.counts)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._visit_output(node)
        elif self._takes_own_range(node):
            with self.graph.inserting_before(node):
                info = self.ctx.table.cut(node.args[1], ops.argument(node, "axis"))
                shard = self._cut_like(node.args[0], info, node)
            node.replace_all_uses_with(shard)
            self.graph.erase_node(node)
        elif node.target is ops.optimizer_step:
            self._visit_optimizer_step(node)
        elif mutated_inputs(node):
            self._visit_write(node)
        elif self._try_view(node) or self._try_elementwise(node) or self._try_reduction(node):
            pass
        else:
            self._use_whole(node)

    def _takes_own_range(self, node: fx.Node) -> bool:
        """Return whether a node cuts from a whole value what this rank has of it now."""
        if node.target is not ops.take_shard or node.args[0] not in self.values:
            return False
        value = self.values[node.args[0]]
        info = self.ctx.table.cut(node.args[1], ops.argument(node, "axis"))
        return value.can_shard and _is_cut_for(info, value.parameter)

    def _cut_like(self, node: fx.Node, info: ParameterInfo, reader: fx.Node) -> fx.Node:
        """The shard of ``node``, or of a coarser one the range that is ``info``'s: a copy of it."""
        shard, value = self.shard_of(node), self.values[node]
        if value.parameter.lies_like(info):
            return shard
        begin, end = info.position_in_kept, info.position_in_kept + info.shard_numel
        of = value.parameter.index
        call = partial(self.builder.call, role=Role.TAKE_SHARD, parameter=of, like=reader)
        return call(aten.clone.default, call(aten.slice.Tensor, shard, 0, begin, end))

    def _try_view(self, node: fx.Node) -> bool:
        """Views of a source are rebuilt on each gathered copy; reshapes of a shard are free."""
        bases = [base for base in aliased_inputs(node) if base in self.values]
        if not bases:
            return False
        value = self.values[bases[0]]
        same_order = node.target in _UNCHANGED
        same_order |= is_reshape(node) and value.parameter.is_contiguous
        can_shard = value.can_shard and same_order
        if value.source is None and not can_shard:
            return False
        result = node.meta.get("val")
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else value.shape
        self.values[node] = ShardedValue(value.parameter, shape, value.source, can_shard=can_shard)
        if value.source is not None:
            value.source.chain.add(node)
        return True

    def _try_elementwise(self, node: fx.Node) -> bool:
        """An elementwise node of shards is one itself, if its whole operands can be cut alike."""
        if not is_elementwise(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        shape = tuple(node.meta["val"].shape)
        sharded = [source for source in node.all_input_nodes if source in self.values]
        infos = [self.values[source].parameter for source in sharded]
        finest = max(infos, key=lambda info: info.world_size)
        for source in node.all_input_nodes:
            if source in self.values:
                value = self.values[source]
                if not value.can_shard or value.shape != shape:
                    return False
                if not _is_cut_for(finest, value.parameter):
                    return False
            elif source in self.varying:
                return False  # each rank's own number would scale its own shard
            elif not is_scalar(source.meta["val"]) and tuple(source.meta["val"].shape) != shape:
                return False
        sources = {self.values[source].source for source in sharded}
        numbers = (source for source in node.all_input_nodes if source not in self.values)
        # Else its own shard is gathered: a gradient is not rebuilt from another.
        may_be_rebuilt = len(sources) == 1 and all(is_scalar(n.meta.get("val")) for n in numbers)
        rebuilt = sources.pop() if may_be_rebuilt else None
        rebuilt = rebuilt if rebuilt is not None and rebuilt.regather else None
        self.values[node] = ShardedValue(finest, shape, rebuilt)
        if rebuilt is not None:
            rebuilt.chain.add(node)
        return True

    def _try_reduction(self, node: fx.Node) -> bool:
        """A norm or sum of a gradient's shards: partial results, then one collective.

        Reductions of parameters stay whole: they are part of forward, which gathers anyway.
        """
        value = self.values.get(node.args[0]) if node.args else None
        if value is None or not value.can_shard:
            return False
        if value.source is not None and value.source.regather:
            return False
        rule = rule_for(node)
        if rule is None:
            return False
        info, mesh = value.parameter, self.ctx.mesh
        with self.builder.before(node, parameter=info.index) as call:
            shard = self.shard_of(node.args[0])
            over = mesh.cut_in(info.world_size)
            if rule.minds_padding(info):
                given = (shard, info.index, rule.identity)
                shard = call(ops.mask_padding, *given, **over, role=Role.MASK_PADDING)
            local = rule.partial(partial(call, role=Role.PARTIAL, parameter=-1), node, shard)
        self.pending.waiting[node] = rule, local, over or mesh.over_shards
        return True

    def _visit_write(self, node: fx.Node) -> None:
        """``copy_`` into a sharded input writes its shard, and so do sums of gradients.

        Any other write is of a whole value.
        """
        target = node.args[0]
        value = self.values.get(target)
        is_copy = node.target is aten.copy_.default and target.op == "placeholder"
        if value is None or not (is_copy or role(node) == Role.ACCUMULATE):
            self._use_whole(node)
            return
        with self.graph.inserting_before(node):
            shard = self._shard_operand(node.args[1], value.parameter, node)
        if updated_in_place(shard) is value.shard:
            node.replace_all_uses_with(target)
            self.graph.erase_node(node)
            return
        node.args = (value.shard, shard)
        self.builder.refresh(node)
        self.values[node] = ShardedValue(value.parameter, value.shape, None, node)

    def _visit_optimizer_step(self, node: fx.Node) -> None:
        """``optimizer_step`` over lists -> one in-place ``update`` of each parameter's shard."""
        parameters, gradients, _, _, indices = node.args

        def shards_at(position: int) -> tuple[fx.Node, fx.Node]:
            info = self.ctx.table[indices[position]]
            value = self._shard_operand(parameters[position], info, node)
            return value, self._shard_operand(gradients[position], info, node)

        owned = compute_on_owners(self.builder, self.ctx, node, shards_at)
        if owned:
            self.counts["owned"] += len(owned)
        updates = update_one_by_one(
            self.builder, node, lambda position: owned.get(position) or shards_at(position)
        )
        for result, index, updated in updates:
            if result is not None:
                self.add_source(result, self.ctx.table[index], updated)
            self.counts["updates"] += 1

    def _visit_output(self, node: fx.Node) -> None:
        """A gradient leaves the program as its shard at stages 2 and 3, all else whole.

        One that replaces a gradient left unreduced before does so from stage 1 on.

        A result that is an input stands for that input's object, whatever it holds.
        """
        slots = dict(recorded(self.graph).written_gradients)
        unreduced = recorded(self.graph).unreduced
        if self.ctx.options.stage >= 2:
            slots |= recorded(self.graph).gradients
        results = list(node.args[0])
        whole: list[fx.Node] = []  # in order: every rank must gather them alike
        for position, result in enumerate(results):
            if result not in self.values:
                continue
            is_input = result.op == "placeholder" or result.target is aten.copy_.default
            if is_input or (position in slots and self.values[result].can_shard):
                with self.graph.inserting_before(node):
                    results[position] = self.shard_of(result)
                    if position in slots and not is_input and position not in unreduced:
                        results[position] = self._finest(result, node)
                self.sharded_results.add(position)
            else:
                whole.append(result)
        for result in dict.fromkeys(whole):
            self._use(node, result)
        node.args = (tuple(results),)

    def _shard_gradient_results(self) -> None:
        """A gradient that is no one's shard (zeros, say) leaves as this rank's range of it."""
        output = self.graph.output_node()
        results = list(output.args[0])
        slots = {**recorded(self.graph).gradients, **recorded(self.graph).written_gradients}
        done = self.sharded_results.union(recorded(self.graph).unreduced)
        for position, index in slots.items():
            if position in done or results[position].op == "placeholder":
                continue
            with self.graph.inserting_before(output):
                info = self.ctx.table[index]
                results[position] = self._shard_operand(results[position], info, output)
                self.sharded_results.add(position)
        output.args = (tuple(results),)

    def _use_whole(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.values:
                self._use(node, source)

    def _use(self, reader: fx.Node, source: fx.Node) -> None:
        value = self.values[source]
        if self._is_rebuilt_too_late(source, reader):
            self._gather_by_itself(source)
        if value.source is None:
            shard = self.shard_of(source)
            value.source = GatherSource(source, value.parameter, shard, shape=value.shape)
            self.sources.append(value.source)
        value.source.uses.append((reader, source))

    def _is_rebuilt_too_late(self, node: fx.Node, reader: fx.Node) -> bool:
        """Return whether a parameter is written to between ``node``, made from it, and ``reader``.

        Nodes in between would then be repeated on a copy of new values.  Views see them rightly.
        """
        source = self.values[node].source
        if source is None or source.shard.op != "placeholder":
            return False
        chain = source.chain
        repeated = reached({node} & chain, lambda found: chain.intersection(found.all_input_nodes))
        computed = [found for found in repeated if not aliased_inputs(found)]
        if source.cast_to is not None:
            computed.append(source.node)
        return bool(computed) and any(
            min(computed) < writer < reader for writer in writers(source.shard)
        )

    def _gather_by_itself(self, node: fx.Node) -> None:
        """Let a node, and what it is a view of, no longer be rebuilt from a parameter.

        Before::

            clone = clone(parameter);  update(shard, gradient);  output(clone(gather(shard)))

        After::

            on_shard = clone(shard);  update(shard, gradient);  output(gather(on_shard))
        """
        (base,) = [found for found in memory_of(node) if not aliased_inputs(found)]
        value = self.values[base]
        source = GatherSource(base, value.parameter, self.shard_of(base), shape=value.shape)
        self.sources.append(source)
        for view in aliases(base) & self.values.keys():
            self.values[view].source = source
            source.chain.add(view)
        source.chain.discard(base)

    def _shard_operand(self, operand: fx.Node, info: ParameterInfo, reader: fx.Node) -> fx.Node:
        """The shard of an operand: its own, or this rank's range of a uniform whole value.

        What is sharded like another parameter is gathered, and cut like this one.  What is
        flattened, as a contiguous parameter may be, gets the parameter's shape first.
        """
        value = self.values.get(operand)
        if value is not None and not value.can_shard:
            raise GraphError(
                f"{operand.name} is a view of {info.name!r} that has no flat shard, and "
                f"{reader.name} needs one. {source_line(reader)}"
            )
        if value is not None and _is_cut_for(info, value.parameter):
            return self._cut_like(operand, info, reader)
        origin = {"role": Role.TAKE_SHARD, "parameter": info.index, "like": reader}
        call: Callable[..., fx.Node] = partial(self.builder.call, **origin)
        over = self.ctx.mesh.cut_in(info.world_size)
        whole = operand
        if tuple(operand.meta["val"].shape) != info.shape:
            reshape = aten.view if operand.meta["val"].is_contiguous() else aten.reshape
            whole = call(reshape.default, operand, list(info.shape))
        shard = call(ops.take_shard, whole, info.index, info.shard_numel, **over)
        if value is not None and value.parameter.kept.lies_like(info):
            self.join(shard, value.parameter, self.shard_of(operand), reader)
        else:
            self._use_whole(shard if whole is operand else whole)
        return shard

    def _finest(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The shard of ``node`` as states are cut."""
        return self._cut_like(node, self.ctx.table[self.values[node].parameter.index], reader)

    def join(self, coarse: fx.Node, info: ParameterInfo, shard: fx.Node, reader: fx.Node) -> None:
        """Put what ``reader`` reads as ``coarse`` together from shards, of which one is ours.

        Before, and after::

            copy_(p, take_shard(new, axis="gpu"))
            copy_(p, zerofx.wait(zerofx.all_gather_start(s, 2, axis="node")))
        """
        source = GatherSource(coarse, info, shard, is_joined=True, uses=[(reader, coarse)])
        self.sources.append(source)
        self.values[coarse] = ShardedValue(info.kept, info.shape, None, coarse)

    def shard_of(self, node: fx.Node) -> fx.Node:
        """The flat node that computes this rank's shard of ``node``, inserted where it stands."""
        value = self.values[node]
        if value.shard is not None:
            return value.shard
        if aliased_inputs(node) and (is_reshape(node) or node.target in _UNCHANGED):
            value.shard = self.shard_of(node.args[0])
            return value.shard
        with self.graph.inserting_before(node):
            substitutes = {}
            for source in node.all_input_nodes:
                if source in self.values:
                    substitutes[source] = self._cut_like(source, value.parameter, node)
                elif not is_scalar(source.meta.get("val")):
                    substitutes[source] = self._shard_operand(source, value.parameter, node)
            origin = {"role": Role.ON_SHARD, "parameter": value.parameter.index}
            value.shard = self.builder.copy(node, substitutes, **origin)
        # Layouts are those of the whole value: a flat shard has but one.
        if "memory_format" in value.shard.kwargs:
            kwargs = value.shard.kwargs.items()
            value.shard.kwargs = {k: v for k, v in kwargs if k != "memory_format"}
        self.counts["computed on shards"] += 1
        return value.shard


def _is_cut_for(info: ParameterInfo, by: ParameterInfo) -> bool:
    """Return whether a shard ``by`` one cut holds the shard by another, of the same values."""
    return by.lies_like(info) or by.lies_like(info.kept)


_UNCHANGED = (aten.detach.default, aten.alias.default)
