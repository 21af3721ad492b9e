"""Norms and sums of a sharded value: a partial result on each rank, then one collective.

Partial results that wait for the same reader travel together: clipping by the global norm
costs one small all-reduce, however many parameters there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.roles import Role

aten = torch.ops.aten


@dataclass(frozen=True)
class ReductionRule:
    """A way to compute a full reduction from shards.

    ``identity`` is what padding is set to, ``partial`` and ``finish`` insert nodes around the
    collective ``reduction``; they take (builder, node, value) and return the new value.
    """

    identity: float
    reduction: str
    partial: Callable[[Builder, fx.Node, fx.Node], fx.Node]
    finish: Callable[[Builder, fx.Node, fx.Node], fx.Node]


def rule_for(node: fx.Node) -> ReductionRule | None:
    """The rule of a node that reduces its first operand to one number; None for any other."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    if node.target is aten.linalg_vector_norm.default:
        return _norm_rule(node)
    if not _reduces_everything(node):
        return None
    rule = _SIMPLE.get(node.target)
    if rule in (_LARGEST, _SMALLEST) and not value.dtype.is_floating_point:
        return None  # whole numbers have no infinity to pad with: gathered instead
    return rule


def _reduces_everything(node: fx.Node) -> bool:
    source = node.args[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == []:
        return True
    if not isinstance(dims, (list, tuple)):
        return False
    return len({dim % max(source.dim(), 1) for dim in dims}) == source.dim()


def _accumulation_dtype(node: fx.Node) -> torch.dtype:
    """Whole numbers are counted exactly; doubles stay doubles; all else sums in float32."""
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if not result.is_floating_point and result != torch.bool:
        return torch.int64
    return torch.float64 if torch.float64 in (source, result) else torch.float32


def _cast(builder: Builder, node: fx.Node, value: fx.Node) -> fx.Node:
    """Give the result the dtype and shape that the user's own reduction has."""
    wanted = node.meta["val"]
    if value.meta["val"].dtype != wanted.dtype:
        value = builder.call(
            aten._to_copy.default, value, dtype=wanted.dtype, role=Role.FINISH_REDUCTION, like=node
        )
    if value.meta["val"].shape != wanted.shape:
        value = builder.call(
            aten.view.default, value, list(wanted.shape), role=Role.FINISH_REDUCTION, like=node
        )
    return value


def _norm_rule(node: fx.Node) -> ReductionRule | None:
    order = float(node.args[1]) if len(node.args) > 1 else 2.0
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dims is not None and len(dims) != node.args[0].meta["val"].dim():
        return None
    if order == math.inf:
        return ReductionRule(0.0, "max", _local_norm(order, None), _cast)
    if order == -math.inf:
        return ReductionRule(math.inf, "min", _local_norm(order, None), _cast)
    if order <= 0.0:
        return None  # a count of non-zeros, or a negative power: gathered instead
    return ReductionRule(0.0, "sum", _local_norm(order, order), _root(order))


def _local_norm(order: float, power: float | None):
    def partial(builder: Builder, node: fx.Node, shard: fx.Node) -> fx.Node:
        dtype = _accumulation_dtype(node)
        norm = builder.call(
            aten.linalg_vector_norm.default, shard, order, dtype=dtype, role=Role.PARTIAL, like=node
        )
        if power is None or power == 1.0:
            return norm
        return builder.call(aten.pow.Tensor_Scalar, norm, power, role=Role.PARTIAL, like=node)

    return partial


def _root(order: float):
    def finish(builder: Builder, node: fx.Node, total: fx.Node) -> fx.Node:
        if order == 2.0:
            total = builder.call(aten.sqrt.default, total, role=Role.FINISH_REDUCTION, like=node)
        elif order != 1.0:
            total = builder.call(
                aten.pow.Tensor_Scalar, total, 1.0 / order, role=Role.FINISH_REDUCTION, like=node
            )
        return _cast(builder, node, total)

    return finish


def _local(target: Callable, *args) -> Callable:
    """A partial that is ``target(shard)`` in the accumulation dtype."""

    def partial(builder: Builder, node: fx.Node, shard: fx.Node) -> fx.Node:
        dtype = _accumulation_dtype(node)
        if shard.meta["val"].dtype != dtype:
            shard = builder.call(
                aten._to_copy.default, shard, dtype=dtype, role=Role.PARTIAL, like=node
            )
        return builder.call(target, shard, *args, role=Role.PARTIAL, like=node)

    return partial


def _mean(builder: Builder, node: fx.Node, total: fx.Node) -> fx.Node:
    numel = node.args[0].meta["val"].numel()
    total = builder.call(aten.div.Tensor, total, numel, role=Role.FINISH_REDUCTION, like=node)
    return _cast(builder, node, total)


def _is_nonzero(builder: Builder, node: fx.Node, value: fx.Node) -> fx.Node:
    value = builder.call(aten.ne.Scalar, value, 0, role=Role.FINISH_REDUCTION, like=node)
    return _cast(builder, node, value)


_LARGEST = ReductionRule(-math.inf, "max", _local(aten.amax.default), _cast)
_SMALLEST = ReductionRule(math.inf, "min", _local(aten.amin.default), _cast)
_SUM = ReductionRule(0.0, "sum", _local(aten.sum.default), _cast)
_MEAN = ReductionRule(0.0, "sum", _local(aten.sum.default), _mean)
_SIMPLE = {
    aten.sum.default: _SUM,
    aten.sum.dim_IntList: _SUM,
    aten.mean.default: _MEAN,
    aten.mean.dim: _MEAN,
    aten.amax.default: _LARGEST,
    aten.max.default: _LARGEST,
    aten.amin.default: _SMALLEST,
    aten.min.default: _SMALLEST,
    aten.any.default: ReductionRule(0.0, "max", _local(aten.amax.default), _is_nonzero),
    aten.all.default: ReductionRule(1.0, "min", _local(aten.amin.default), _is_nonzero),
}


class PendingReductions:
    """Partial results that no one has read yet, and the collective that completes them."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.waiting: dict[fx.Node, tuple[ReductionRule, fx.Node]] = {}
        self.collectives = 0

    def add(self, node: fx.Node, rule: ReductionRule, partial: fx.Node) -> None:
        self.waiting[node] = (rule, partial)

    def complete_before(self, reader: fx.Node) -> None:
        """Insert the collectives in front of ``reader`` and let all readers use the results."""
        groups: dict[tuple, list[fx.Node]] = {}
        for node, (rule, partial) in self.waiting.items():
            groups.setdefault((rule.reduction, partial.meta["val"].dtype), []).append(node)
        for (reduction, _), nodes in groups.items():
            with self.builder.graph.inserting_before(reader):
                totals = self._reduce(reduction, nodes)
                for node, total in zip(nodes, totals, strict=True):
                    result = self.waiting[node][0].finish(self.builder, node, total)
                    node.replace_all_uses_with(result)
            self.collectives += 1
        for node in self.waiting:
            self.builder.graph.erase_node(node)
        self.waiting = {}

    def _reduce(self, reduction: str, nodes: list[fx.Node]) -> list[fx.Node]:
        call = self.builder.call
        origin = {"role": Role.REDUCE_SCALAR, "like": nodes[0]}
        partials = [self.waiting[node][1] for node in nodes]
        stacked = call(aten.stack.default, partials, **origin)
        started = call(ops.all_reduce_start, stacked, reduction, **origin)
        total = call(ops.wait, started, **origin)
        return [
            call(aten.select.int, total, 0, position, **origin) for position in range(len(nodes))
        ]
