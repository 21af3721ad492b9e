"""Note what operators read and write: as torch dispatches them, and of what is compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zerofx import compat
from zerofx.codegen.kernel import UpdateKernel
from zerofx.ir.aliases import memory_of, mutated_inputs
from zerofx.lower.regions import CompiledRegion
from zerofx.order.clocks import Range
from zerofx.order.notes import Notes

aten = torch.ops.aten

NOTHING_WRITTEN = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Operators that take memory, and leave there what was there."""

SHAPES_ONLY = {
    *NOTHING_WRITTEN,
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full),
}
"""Operators that read no values of what they are given."""

NO_ACCESS = {aten.set_, aten.resize_, aten.is_same_size, aten.sym_size, aten.record_stream}

HOST_READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero, aten.item}
"""Operators whose result the host needs: it waits for the device."""

COPIES = {aten.copy_, aten._to_copy}


class Watch(compat.scalars.DispatchMode):
    """Notes each operator's accesses, on the stream that is current in the calling thread."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, notes = dict(kwargs or {}), self.notes
        if not isinstance(func, torch._ops.OpOverload):
            return notes.run(func, args, given)
        inputs = list(_inputs(func, args, given))
        if not all(compat.tensors.has_memory(tensor) for tensor, _ in inputs):
            return notes.run(func, args, given)
        packet, name = func.overloadpacket, str(func)
        if packet in NO_ACCESS:
            return notes.run(func, args, given)
        read: list[Range] = []  # and written, as it is before the operator runs
        for tensor, writes in inputs:
            if writes or packet not in SHAPES_ONLY:
                read += notes.ranges(tensor, writes, name)
        may_lag = _may_lag(func, args, given)
        results = notes.run(func, args, given)
        outputs = compat.tensors.tensors_in(results)
        if not all(map(compat.tensors.has_memory, outputs)):
            return results
        known = {compat.tensors.storage_key(tensor) for tensor, _ in inputs}
        fresh = [one for one in outputs if compat.tensors.storage_key(one) not in known]
        if outputs and not fresh and not any(writes for _, writes in inputs):
            return results  # a view
        made: list[Range] = []
        for tensor in fresh:
            made += notes.ranges(tensor, True, name, is_new=True)
        notes.settle_places(func, given, inputs, read, made, fresh)
        notes.operator(
            name,
            read if packet in NOTHING_WRITTEN else [*read, *made],
            waits=packet in HOST_READS,
            copies=packet in COPIES,
            may_lag=may_lag,
        )
        return results


def _inputs(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[tuple[Tensor, bool]]:
    """Yield the tensors that an operator is given, and whether it writes to each."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            value = kwargs[argument.name]
        elif at < len(args):
            value = args[at]
        else:
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one, writes


def _may_lag(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy is given ``non_blocking``."""
    names = [argument.name for argument in func._schema.arguments]
    return bool(
        kwargs.get("non_blocking") or dict(zip(names, args, strict=False)).get("non_blocking")
    )


def of_compiled(notes: Notes) -> Iterator[Any]:
    """Yield what has regions and update kernels noted by what they declare, as one operator each.

    The dispatcher does not see them.
    """
    forward, ready = CompiledRegion.forward, UpdateKernel.ready

    def noted_forward(region: CompiledRegion, values: list[Any]) -> tuple[Any, ...]:
        written = written_by(region.gm)
        ranges = _ranges(notes, "a region", ((at in written, one) for at, one in enumerate(values)))
        with compat.tensors.without_dispatch_modes():
            results = forward(region, values)
        ranges += _ranges(notes, "a region", ((True, one) for one in results))
        notes.operator("a region", ranges)
        return results

    def noted_ready(kernel: UpdateKernel, *values: Any) -> Callable[[], list[Any]]:
        run = ready(kernel, *values)
        tensors = kernel.program.bind(values).tensors
        stored = [stream.store is not None for stream in kernel.program.streams]
        pairs = list(zip(stored, tensors, strict=True))
        pairs += [(False, value) for value in values if isinstance(value, Tensor)]

        def noted_run() -> list[Any]:
            notes.operator("an update", _ranges(notes, "an update", pairs))
            with compat.tensors.without_dispatch_modes():
                return run()

        return noted_run

    yield mock.patch.object(CompiledRegion, "forward", noted_forward)
    yield mock.patch.object(UpdateKernel, "ready", noted_ready)


def _ranges(notes: Notes, name: str, given: Iterable[tuple[bool, Any]]) -> list[Range]:
    found: list[Range] = []
    for writes, value in given:
        if isinstance(value, Tensor) and compat.tensors.has_memory(value):
            found += notes.ranges(value, writes, name)
    return found


def written_by(gm: torch.fx.GraphModule) -> set[int]:
    """Return the positions of a region's inputs that it writes to."""
    roots = {
        root
        for node in gm.graph.nodes
        for changed in mutated_inputs(node)
        for root in memory_of(changed)
    }
    return {
        root.args[1]
        for root in roots
        if root.target is operator.getitem and root.args[0].op == "placeholder"
    }
