"""The bytes that operators allocate for themselves, found by running each of them once.

torch says of no operator what it takes beside its results: a convolution in another layout, an
operand in a wider dtype, a mask.  Its profiler tells, of one that runs.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.cost.program import Own, flops
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.sizes import hinted_bytes

logger = logging.getLogger("zerofx")

Layouts = Mapping[fx.Node, Mapping[fx.Node, tuple[int, ...]]]
"""The strides of a call's operands, where they are not those that they were made with."""

LARGEST_BYTES = 2**28
MOST_FLOPS = 4e9
"""Calls that take more, operands and results together, are not run: that would take too long."""

_KNOWN: dict[Hashable, Own] = {}
"""What has been found, by the call."""


def own_bytes(nodes: Iterable[fx.Node], layouts: Layouts | None = None) -> Mapping[fx.Node, Own]:
    """Return what torch's operators allocate for themselves on this machine's CPU, if anything.

    Calls that are not known yet are run once, on zeros.  Left out are those that are too large,
    that make views or fail, and all of them while a profiler runs already.  ``layouts`` are the
    strides of operands that a compiler changes.
    """
    layouts = layouts or {}
    calls = {node: _call(node, layouts.get(node, {})) for node in nodes if _is_measured(node)}
    unknown = {call: node for node, call in calls.items() if call not in _KNOWN}
    if unknown and compat.tensors.is_profiled():
        logger.warning(
            "a profiler is running, so %d kinds of calls cannot be tried: what they allocate for "
            "themselves is not counted. Plan, or call the step first, without a profiler.",
            len(unknown),
        )
    elif unknown:
        _KNOWN.update(_measured(unknown, layouts))
    found = {node: _KNOWN[call] for node, call in calls.items() if call in _KNOWN}
    return {node: own for node, own in found.items() if any(own)}


def _is_measured(node: fx.Node) -> bool:
    if node.op != "call_function" or ops.is_ours(node.target):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if aliased_inputs(node) and not mutated_inputs(node):
        return False
    nbytes = sum(map(hinted_bytes, (*node.all_input_nodes, node)))
    return nbytes <= LARGEST_BYTES and flops(node) <= MOST_FLOPS


def _call(node: fx.Node, layout: Mapping[fx.Node, tuple[int, ...]]) -> Hashable:
    """Return what tells a call from others that may allocate something else."""

    def described(value: Any) -> Hashable:
        strides = layout.get(value) if isinstance(value, fx.Node) else None
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.dtype, _hints(value.shape), strides or _hints(value.stride())
        if isinstance(value, list | tuple):
            return tuple(map(described, value))
        return repr(compat.aot.size_hint(value) if isinstance(value, torch.SymInt) else value)

    named = tuple((name, described(value)) for name, value in node.kwargs.items())
    return node.target, described(node.args), named


def _hints(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(compat.aot.size_hint, sizes))


def _measured(calls: Mapping[Hashable, fx.Node], layouts: Layouts) -> dict[Hashable, Own]:
    """Run calls under torch's profiler; return what each has had at most beside its results.

    Some results lie in more memory than they fill, as the mean of ``aten.mse_loss`` does.
    """
    found = dict.fromkeys(calls, Own(0))
    ran: dict[str, Hashable] = {}
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with (
        compat.tensors.without_dispatch_modes(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
        profiler,
    ):
        for number, (call, node) in enumerate(calls.items()):
            zeros = functools.partial(_zeros, layouts.get(node, {}))
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), zeros)
            try:
                with torch.profiler.record_function(name := f"{_RANGE}{number}"):
                    result = node.target(*args, **kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # zeros are no such values as it needs
            ran[name] = call
            del result
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    times = [at for at, _ in changes]
    for event in events:
        if event.name() in ran:
            begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
            alive = most = 0
            for _, change in changes[bisect.bisect(times, begin) : bisect.bisect(times, end)]:
                alive += change
                most = max(most, alive)
            call, alive = ran[event.name()], max(alive, 0)
            kept = max(alive - hinted_bytes(calls[call]), 0)
            found[call] = Own(most - alive, kept)
    return found


_RANGE = "zerofx own "


def _zeros(layout: Mapping[fx.Node, tuple[int, ...]], node: fx.Node) -> Any:
    """Return what stands for an operand: zeros of its layout."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return compat.aot.size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = _hints(value.shape), layout.get(node) or _hints(value.stride())
    return torch.empty_strided(shape, strides, dtype=value.dtype).zero_()
