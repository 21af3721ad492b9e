"""The bytes that operators allocate for themselves, found by running each of them once.

torch says of no operator what it takes beside its results: a convolution in another layout, an
operand in a wider dtype, a mask.  Its profiler tells, of one that runs.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from zerofx import compat
from zerofx.cost.program import Own, flops
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.sizes import hinted_bytes

logger = logging.getLogger("zerofx")

LARGEST_BYTES = 2**28
MOST_FLOPS = 4e9
"""Calls that take more, operands and results together, are not run: that would take too long."""


class Layout(NamedTuple):
    """A tensor that is given to a call, by its shape, dtype and strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.stride())

    def zeros(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).zero_()


class Call(NamedTuple):
    """A call of an operator: each tensor of its arguments is a ``Layout``.

    ``nbytes`` are those of its results.
    """

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    nbytes: int

    @classmethod
    def of(
        cls, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Call | None:
        """Describe a call that has been made on a CPU; None if such a call is not to be tried."""
        given = [*_tensors((args, dict(kwargs))), *_tensors(result)]
        if not _is_torchs(target) or any(of.device.type != "cpu" for of in given):
            return None
        if sum(of.nbytes for of in given) > LARGEST_BYTES:
            return None
        count = flop_registry.get(target.overloadpacket)
        if count is not None:
            with contextlib.suppress(AssertionError, IndexError, TypeError, ValueError):
                if count(*args, **kwargs, out_val=result) > MOST_FLOPS:
                    return None
        nbytes = sum(of.nbytes for of in _tensors(result))
        given_args, given_kwargs = map_aggregate((tuple(args), dict(kwargs)), _as_layout)
        return cls(target, given_args, given_kwargs, nbytes)

    @property
    def key(self) -> Hashable:
        """Tells the call from others that may allocate something else."""
        return self.target, repr((self.args, self.kwargs))


class _Found(NamedTuple):
    """Holds what running a call has shown: also its results' dtypes and strides.

    They are not always as torch says: statistics of a batch norm of bfloat16 are float32.
    """

    own: Own
    results: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...] = ()


_KNOWN: dict[Hashable, _Found] = {}
"""What has been found, by the call."""


def own_bytes(nodes: Iterable[fx.Node]) -> Mapping[fx.Node, Own]:
    """Return what torch's operators allocate for themselves on this machine's CPU, if anything.

    Calls that are not known yet are run once, on zeros.  Left out are those that are too large,
    that make views or fail, and all of them while a profiler runs already.
    """
    nodes = [node for node in nodes if _is_measured(node)]
    found: dict[fx.Node, _Found] = {}
    while True:
        unknown: dict[Hashable, Call] = {}
        for node in nodes:
            call = _call_of(node, found)
            if call.key in _KNOWN:
                found[node] = _KNOWN[call.key]
            else:
                unknown[call.key] = call
        if not unknown or not _try(unknown.values()):
            return {node: of.own for node, of in found.items() if any(of.own)}


def own_of_calls(calls: Sequence[Call]) -> list[Own]:
    """Return the same of calls, one by one, in their order."""
    _try({call.key: call for call in calls if call.key not in _KNOWN}.values())
    return [_KNOWN.get(call.key, _Found(Own(0))).own for call in calls]


def _call_of(node: fx.Node, found: Mapping[fx.Node, _Found]) -> Call:
    """Return the call that a node is; operands are as those that made them were ``found`` to."""

    def given(operand: fx.Node) -> Any:
        value = operand.meta.get("val")
        if isinstance(value, torch.SymInt):
            return compat.aot.size_hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        source, at = operand.args if operand.target is operator.getitem else (operand, 0)
        results = found[source].results if source in found else ()
        made = results[at] if at < len(results) else None
        return Layout(_hints(value.shape), *(made or (value.dtype, _hints(value.stride()))))

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), given)
    return Call(node.target, args, kwargs, hinted_bytes(node))


def _try(calls: Collection[Call]) -> bool:
    """Find what these calls allocate for themselves; return whether that can be done now."""
    if calls and compat.tensors.is_profiled():
        logger.warning(
            "a profiler is running, so %d kinds of calls cannot be tried: what they allocate "
            "for themselves is not counted. Plan, or call the step first, without a profiler.",
            len(calls),
        )
        return False
    if calls:
        _KNOWN.update(_measured(calls))
    return True


def _is_measured(node: fx.Node) -> bool:
    if node.op != "call_function" or ops.is_ours(node.target):
        return False
    if not _is_torchs(node.target):
        return False
    if aliased_inputs(node) and not mutated_inputs(node):
        return False
    nbytes = sum(map(hinted_bytes, (*node.all_input_nodes, node)))
    return nbytes <= LARGEST_BYTES and flops(node) <= MOST_FLOPS


def _is_torchs(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_aggregate(values, lambda one: found.append(one) if isinstance(one, torch.Tensor) else None)
    return found


def _as_layout(value: Any) -> Any:
    return Layout.of(value) if isinstance(value, torch.Tensor) else value


def _layout(result: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return (result.dtype, result.stride()) if isinstance(result, torch.Tensor) else None


def _hints(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(compat.aot.size_hint, sizes))


def _measured(calls: Collection[Call]) -> dict[Hashable, _Found]:
    """Run calls under torch's profiler; return what each has had at most beside its results.

    Some results lie in more memory than they fill, as the mean of ``aten.mse_loss`` does.
    """
    found = {call.key: _Found(Own(0)) for call in calls}
    ran: dict[str, Call] = {}
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
        for number, call in enumerate(calls):
            args, kwargs = _on_zeros(call.args), _on_zeros(dict(call.kwargs))
            try:
                with torch.profiler.record_function(name := f"{_RANGE}{number}"):
                    result = call.target(*args, **kwargs)
                made = result if isinstance(result, tuple | list) else (result,)
                layouts = tuple(map(_layout, made))
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # zeros are no such values as it needs
            ran[name] = call
            results[call.key] = layouts
            del result, made, args, kwargs
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
            kept = max(alive - call.nbytes, 0)
            found[call.key] = _Found(Own(most - alive, kept), results[call.key])
    return found


def _on_zeros(given: Any) -> Any:
    if isinstance(given, Layout):
        return given.zeros()
    if isinstance(given, Mapping):
        return {name: _on_zeros(value) for name, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(map(_on_zeros, given))
    return given


_RANGE = "zerofx own "
