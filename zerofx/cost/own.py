"""The bytes that operators allocate for themselves, found by running each of them once.

torch says of no operator what it takes beside its results: a convolution in another layout, an
operand in a wider dtype, a mask.  Its profiler tells, of one that runs.
"""

from __future__ import annotations

import bisect
import functools
import logging
import operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

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


class _Found(NamedTuple):
    """Holds what running a call has shown: also its results' dtypes and strides.

    They are not always as torch says: statistics of a batch norm of bfloat16 are float32.
    """

    own: Own
    results: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...] = ()


_KNOWN: dict[Hashable, _Found] = {}
"""What has been found, by the call."""


def own_bytes(nodes: Iterable[fx.Node], layouts: Layouts | None = None) -> Mapping[fx.Node, Own]:
    """Return what torch's operators allocate for themselves on this machine's CPU, if anything.

    Calls that are not known yet are run once, on zeros.  Left out are those that are too large,
    that make views or fail, and all of them while a profiler runs already.  ``layouts`` are the
    strides of operands that a compiler changes.
    """
    tried = _Tried(layouts or {}, {})
    nodes = [node for node in nodes if _is_measured(node)]
    while unknown := tried.unknown(nodes):
        if compat.tensors.is_profiled():
            logger.warning(
                "a profiler is running, so %d kinds of calls cannot be tried: what they allocate "
                "for themselves is not counted. Plan, or call the step first, without a profiler.",
                len(unknown),
            )
            break
        _KNOWN.update(_measured(unknown, tried))
    return {node: found.own for node, found in tried.found.items() if any(found.own)}


class _Tried(NamedTuple):
    """Tells calls apart: by ``layouts``, as in ``own_bytes``, and what is ``found`` of nodes."""

    layouts: Layouts
    found: dict[fx.Node, _Found]

    def unknown(self, nodes: Iterable[fx.Node]) -> dict[Hashable, fx.Node]:
        """Note what is known of these nodes, in their order; return the calls that are not."""
        unknown = {}
        for node in nodes:
            call = self.call(node)
            if call in _KNOWN:
                self.found[node] = _KNOWN[call]
            else:
                unknown[call] = node
        return unknown

    def call(self, node: fx.Node) -> Hashable:
        """Return what tells a call from others that may allocate something else."""

        def described(value: Any) -> Hashable:
            value = self.operand(node, value) if isinstance(value, fx.Node) else value
            if isinstance(value, list | tuple):
                return tuple(map(described, value))
            return repr(compat.aot.size_hint(value) if isinstance(value, torch.SymInt) else value)

        named = tuple((name, described(value)) for name, value in node.kwargs.items())
        return node.target, described(node.args), named

    def operand(self, node: fx.Node, operand: fx.Node) -> Any:
        """Return an operand's shape, dtype and strides in a call, or the number that it is."""
        value = operand.meta.get("val")
        if isinstance(value, torch.SymInt):
            return compat.aot.size_hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        source, at = operand.args if operand.target is operator.getitem else (operand, 0)
        results = self.found[source].results if source in self.found else ()
        made = results[at] if at < len(results) else None
        dtype, strides = made or (value.dtype, _hints(value.stride()))
        return _hints(value.shape), dtype, self.layouts.get(node, {}).get(operand) or strides

    def zeros(self, node: fx.Node, operand: fx.Node) -> Any:
        """Return what stands for an operand of a call."""
        value = self.operand(node, operand)
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            return value
        shape, dtype, strides = value
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()


def _is_measured(node: fx.Node) -> bool:
    if node.op != "call_function" or ops.is_ours(node.target):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if aliased_inputs(node) and not mutated_inputs(node):
        return False
    nbytes = sum(map(hinted_bytes, (*node.all_input_nodes, node)))
    return nbytes <= LARGEST_BYTES and flops(node) <= MOST_FLOPS


def _layout(result: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return (result.dtype, result.stride()) if isinstance(result, torch.Tensor) else None


def _hints(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(compat.aot.size_hint, sizes))


def _measured(calls: Mapping[Hashable, fx.Node], tried: _Tried) -> dict[Hashable, _Found]:
    """Run calls under torch's profiler; return what each has had at most beside its results.

    Some results lie in more memory than they fill, as the mean of ``aten.mse_loss`` does.
    """
    found = dict.fromkeys(calls, _Found(Own(0)))
    ran: dict[str, Hashable] = {}
    results = {}
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
            zeros = functools.partial(tried.zeros, node)
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), zeros)
            try:
                with torch.profiler.record_function(name := f"{_RANGE}{number}"):
                    result = node.target(*args, **kwargs)
                made = result if isinstance(result, tuple | list) else (result,)
                layouts = tuple(map(_layout, made))
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # zeros are no such values as it needs
            ran[name] = call
            results[call] = layouts
            del result, made
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
            found[call] = _Found(Own(most - alive, kept), results[call])
    return found


_RANGE = "zerofx own "
