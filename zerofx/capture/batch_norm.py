"""``batch_norm="global"``: batch norms normalise with the statistics of all ranks' batches."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, fx

from zerofx.capture.checks import argument, is_backward_call
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.source import source_line


def spread_batch_norms(gm: fx.GraphModule, may_lack_data: bool) -> None:
    """Have batch norms that train be those of all ranks' batches, in Dynamo's graph.

    Before::

        y = batch_norm(x, mean, var, weight, bias, training=True)

    After::

        n = zerofx.over_ranks(count, "sum");  m = zerofx.over_ranks(sum(x), "sum") / n
        v = zerofx.over_ranks(sum((x - m) ** 2), "sum") / n
        y = (x - m) * rsqrt(v + eps) * weight + bias

    ``mean`` and ``var`` become the same on all ranks.  Backward has one more sum over the ranks, of
    what its sums over a rank's batch are.  A rank that ``may_lack_data`` adds nothing without.

    One without running statistics normalises with a batch's own in evaluation too: there, where
    nothing is differentiated, it stays as it is.

    Raises: StepError for a batch norm that is computed in another way, or differentiated twice.
    """
    calls = [node for node in gm.graph.nodes if is_backward_call(node)]
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]  # checkpointed ones
    for node in itertools.chain.from_iterable(part.graph.nodes for part in parts):
        if node.target is F.batch_norm:
            keeps = argument(node, 1, "running_mean") is not None
            if argument(node, 5, "training") and (calls or keeps):
                _refuse_differentiated_twice(calls)
                node.target = _over_ranks
                node.kwargs = {**node.kwargs, "may_lack_data": may_lack_data}
        elif node.op == "call_function" and "batch_norm" in getattr(node.target, "__name__", ""):
            raise StepError(
                "batch_norm=global knows the batch norms of torch.nn, and F.batch_norm. Call one "
                f"of these, or leave the option out.\n  at {source_line(node)}"
            )


def _refuse_differentiated_twice(calls: list[fx.Node]) -> None:
    for call in calls:
        if argument(call, 4, "create_graph"):
            raise StepError(
                "batch_norm=global: gradients are differentiated again (create_graph=True), and "
                "those of a batch norm over all ranks cannot be. Leave the option out, or have "
                f"the norm in evaluation there.\n  at {source_line(call)}"
            )


def _over_ranks(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    may_lack_data: bool = False,
) -> Tensor:
    """Compute ``F.batch_norm`` of all ranks' batches; statistics are in float32 at least."""
    has_data = None
    if may_lack_data:
        has_data = ops.has_data(torch.bool, x.device)
    normalised, mean, var, count = _BatchNorm.apply(x, has_data, eps)
    with torch.no_grad():
        of_all = var * (count / (count - 1))
        for running, new in ((running_mean, mean), (running_var, of_all)):
            if running is not None:
                running.copy_(running * (1 - momentum) + new * momentum)
    at = partial(_at_channels, ndim=x.dim())
    if weight is not None:
        normalised = normalised * at(weight)
    if bias is not None:
        normalised = normalised + at(bias)
    return normalised.to(x.dtype)


class _BatchNorm(torch.autograd.Function):
    """Normalise with the mean and the variance of all ranks' batches; return these, and the count.

    Source: torch.nn.SyncBatchNorm, with sums over the deviations from the mean of all.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, has_data: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, at = _all_but_channels(x), partial(_at_channels, ndim=x.dim())
        samples = wide.numel() // wide.shape[1]
        own = torch.scalar_tensor(samples, dtype=wide.dtype, device=wide.device)
        count = _over_all(own, has_data)
        mean = _over_all(wide.sum(dims), has_data) / count
        centred = wide - at(mean)
        var = _over_all(centred.square().sum(dims), has_data) / count
        inverse = torch.rsqrt(var + eps)
        normalised = centred * at(inverse)
        ctx.save_for_backward(normalised, inverse, count, has_data)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(mean, var, count)
        return normalised, mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normalised, inverse, count, has_data = ctx.saved_tensors
        dims, at = _all_but_channels(gradient), partial(_at_channels, ndim=gradient.dim())
        own = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)])
        added, along = ops.over_ranks(own, "sum").unbind()
        rest = at(added / count) + normalised * at(along / count)
        of_x = at(inverse) * (gradient - rest)
        if has_data is not None:
            of_x = torch.where(has_data, of_x, 0.0)
        return of_x.to(ctx.dtype), None, None


def _over_all(own: Tensor, has_data: Tensor | None) -> Tensor:
    """Return the sum over ranks of what those with data have."""
    if has_data is not None:
        own = torch.where(has_data, own, 0.0)
    return ops.over_ranks(own, "sum")


def _all_but_channels(value: Tensor) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]


def _at_channels(value: Tensor, ndim: int) -> Tensor:
    return value.view(1, -1, *[1] * (ndim - 2))
