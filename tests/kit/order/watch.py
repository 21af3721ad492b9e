"""Note what operators read and write, as torch dispatches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit.order.blocks import put, unite
from tests.kit.order.history import Range, Where
from tests.kit.order.notes import Notes

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


class Watch(TorchDispatchMode):
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
        given = dict(kwargs or {})
        is_pinned = bool(given.get("pin_memory"))
        if is_pinned:  # there is nothing to pin it with
            given["pin_memory"] = False
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **given)
        inputs = list(_inputs(func, args, given))
        if any(_is_strange(tensor) for tensor, _ in inputs):
            return func(*args, **given)
        read = self._ranges(func, inputs)
        results = func(*args, **given)
        outputs = [one for one in pytree.tree_leaves(results) if isinstance(one, Tensor)]
        if any(map(_is_strange, outputs)):
            return results
        may_lag = _may_lag(func, args, given)
        self._note(func, given, inputs, read, outputs, is_pinned, may_lag)
        return results

    def _ranges(self, func: Any, inputs: Iterable[tuple[Tensor, bool]]) -> list[Range]:
        """Return what is read and written of the inputs, as it is before the operator runs."""
        packet, name = func.overloadpacket, str(func)
        if packet in NO_ACCESS:
            return []
        found = []
        for tensor, writes in inputs:
            if writes or packet not in SHAPES_ONLY:
                found += self.notes.ranges(tensor, writes, name)
        return found

    def _note(
        self,
        func: Any,
        kwargs: Mapping[str, Any],
        inputs: Sequence[tuple[Tensor, bool]],
        read: list[Range],
        outputs: Sequence[Tensor],
        is_pinned: bool,
        may_lag: bool,
    ) -> None:
        packet, name, notes = func.overloadpacket, str(func), self.notes
        if packet in NO_ACCESS:
            return
        known = {tensor.untyped_storage()._cdata for tensor, _ in inputs}
        fresh = [one for one in outputs if one.untyped_storage()._cdata not in known]
        is_view = bool(outputs) and not fresh and not any(writes for _, writes in inputs)
        if is_view:
            return
        made: list[Range] = []
        for tensor in fresh:
            made += notes.ranges(tensor, True, name, is_new=True)
        to_cpu = packet is aten._to_copy and kwargs.get("device") is not None
        if is_pinned:
            for tensor in fresh:
                notes.lies_in(tensor, Where.PINNED_BY_TORCH, name)
        elif to_cpu:
            for tensor in fresh:
                notes.lies_in(tensor, Where.HOST, name)
        elif packet is not aten.copy_:
            _settle_places(read, made, is_given_any=bool(inputs))
        if packet in NOTHING_WRITTEN:
            made = []
        notes.operator(
            name,
            [*read, *made],
            waits=packet in HOST_READS,
            copies=packet in COPIES,
            may_lag=may_lag,
        )


def _settle_places(read: Sequence[Range], made: Sequence[Range], is_given_any: bool) -> None:
    """Have what an operator computes on, and what it makes, lie in one memory.

    A number that is made of nothing is the host's.
    """
    wide = [one.block for one in read if not one.is_number]
    if wide:
        written = [one.block for one in read if one.is_number and one.writes]
        unite(block.root().group for block in (*wide, *written, *(one.block for one in made)))
        return
    on_device = any(one.block.is_on_device for one in read)
    for one in made:
        if read or (one.is_number and not is_given_any):
            put(one.block, Where.DEVICE if on_device else Where.HOST)


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


def _is_strange(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory of its own: fake, on meta, not strided."""
    return (
        isinstance(tensor, (FakeTensor, FunctionalTensor))
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
