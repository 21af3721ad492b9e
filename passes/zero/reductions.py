"""Norms and sums of a sharded value: a partial result on each rank, then one collective.

Partial results that wait for the same reader travel together: clipping by the global norm
costs one small all-reduce, however many parameters there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import Builder
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.roles import Role

aten = torch.ops.aten


Insert = Callable[[Callable[..., fx.Node], fx.Node, fx.Node], fx.Node]
"""Given what inserts a call, the reduction and a value, it inserts nodes and returns the last."""


@dataclass(frozen=True)
class ReductionRule:
    """A way to compute a full reduction from shards.

    ``identity`` is what padding is set to, ``partial`` and ``finish`` are what stands around the
    collective ``reduction``.
    """

    identity: float
    reduction: str
    partial: Insert
    finish: Insert

    def minds_padding(self, info: ParameterInfo) -> bool:
        """The same on all ranks: whether some rank's shard has padding, or nothing to reduce."""
        empty_counts = self.reduction in ("max", "min") and info.shares_bucket
        return info.place.extent != info.numel or empty_counts


def rule_for(node: fx.Node) -> ReductionRule | None:
    """The rule of a node that reduces its first operand to one number; None for any other."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    is_norm = node.target is aten.linalg_vector_norm.default
    if not _reduces_everything(node, dims_at=2 if is_norm else 1):
        return None
    if is_norm:
        return _norm_rule(float(node.args[1]) if len(node.args) > 1 else 2.0)
    rule = _SIMPLE.get(node.target)
    if rule in (_LARGEST, _SMALLEST) and not value.dtype.is_floating_point:
        return None  # whole numbers have no infinity to pad with: gathered instead
    return rule


def _reduces_everything(node: fx.Node, dims_at: int) -> bool:
    source = node.args[0].meta["val"]
    dims = node.args[dims_at] if len(node.args) > dims_at else node.kwargs.get("dim")
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


def _cast(call: Callable, node: fx.Node, value: fx.Node) -> fx.Node:
    """Give the result the dtype and shape that the user's own reduction has."""
    wanted = node.meta["val"]
    if value.meta["val"].dtype != wanted.dtype:
        value = call(aten._to_copy.default, value, dtype=wanted.dtype)
    if value.meta["val"].shape != wanted.shape:
        value = call(aten.view.default, value, list(wanted.shape))
    return value


def _norm_rule(order: float) -> ReductionRule | None:
    def local(call: Callable, node: fx.Node, shard: fx.Node) -> fx.Node:
        dtype = _accumulation_dtype(node)
        norm = call(aten.linalg_vector_norm.default, shard, order, dtype=dtype)
        has_power = math.isfinite(order) and order != 1.0
        return call(aten.pow.Tensor_Scalar, norm, order) if has_power else norm

    def root(call: Callable, node: fx.Node, total: fx.Node) -> fx.Node:
        if order == 2.0:
            total = call(aten.sqrt.default, total)
        elif order != 1.0:
            total = call(aten.pow.Tensor_Scalar, total, 1.0 / order)
        return _cast(call, node, total)

    if order == math.inf:
        return ReductionRule(0.0, "max", local, _cast)
    if order == -math.inf:
        return ReductionRule(math.inf, "min", local, _cast)
    if order <= 0.0:
        return None  # a count of non-zeros, or a negative power: gathered instead
    return ReductionRule(0.0, "sum", local, root)


def _local(target: Callable) -> Insert:
    """A partial that is ``target(shard)`` in the accumulation dtype."""

    def insert(call: Callable, node: fx.Node, shard: fx.Node) -> fx.Node:
        dtype = _accumulation_dtype(node)
        if shard.meta["val"].dtype != dtype:
            shard = call(aten._to_copy.default, shard, dtype=dtype)
        return call(target, shard)

    return insert


def _nonzero(target: Callable) -> Insert:
    """Take ``target`` of whether elements are no zeros: one below zero is as true as any."""
    local = _local(target)

    def insert(call: Callable, node: fx.Node, shard: fx.Node) -> fx.Node:
        return local(call, node, call(aten.ne.Scalar, shard, 0))

    return insert


def _mean(call: Callable, node: fx.Node, total: fx.Node) -> fx.Node:
    total = call(aten.div.Tensor, total, node.args[0].meta["val"].numel())
    return _cast(call, node, total)


def _is_nonzero(call: Callable, node: fx.Node, value: fx.Node) -> fx.Node:
    return _cast(call, node, call(aten.ne.Scalar, value, 0))


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
    aten.any.default: ReductionRule(0.0, "max", _nonzero(aten.amax.default), _is_nonzero),
    aten.all.default: ReductionRule(1.0, "min", _nonzero(aten.amin.default), _is_nonzero),
}


class PendingReductions:
    """Partial results that no one has read yet, and the collective that completes them.

    ``waiting`` has their rules, the results, and what a collective is over.
    """

    def __init__(self, builder: Builder):
        self.builder = builder
        self.waiting: dict[fx.Node, tuple[ReductionRule, fx.Node, Mapping[str, str]]] = {}
        self.collectives = 0

    def complete_before(self, reader: fx.Node) -> None:
        """Insert the collectives in front of ``reader`` and let all readers use the results."""
        groups: dict[tuple, list[fx.Node]] = {}
        for node, (rule, local, over) in self.waiting.items():
            key = (rule.reduction, local.meta["val"].dtype, *over.values())
            groups.setdefault(key, []).append(node)
        for (reduction, *_), nodes in groups.items():
            origin = {"role": Role.REDUCE_SCALAR, "like": nodes[0]}
            with self.builder.before(reader, **origin) as call:
                stacked = call(aten.stack.default, [self.waiting[node][1] for node in nodes])
                over = self.waiting[nodes[0]][2]
                total = call(ops.wait, call(ops.all_reduce_start, stacked, reduction, **over))
                parts = [call(aten.select.int, total, 0, at) for at in range(len(nodes))]
                for node, part in zip(nodes, parts, strict=True):
                    finish = partial(call, role=Role.FINISH_REDUCTION, like=node)
                    node.replace_all_uses_with(self.waiting[node][0].finish(finish, node, part))
            self.collectives += 1
        for node in self.waiting:
            self.builder.graph.erase_node(node)
        self.waiting = {}
