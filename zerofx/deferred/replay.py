"""Make what has been recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping
from typing import Any

import torch

from zerofx.deferred.tape import Constant, Memory, Operand, Write, needed_for, replaced
from zerofx.runtime.memory.flat import ordinary_tensors


def replay(given: Mapping[Memory, torch.UntypedStorage]) -> None:
    """Fill these storages with what has been written to their memories up to now.

    Operations run in the order of the program, each that is needed once; what they need of other
    memory is there from the first to the last of them, and freed.
    """
    writes = needed_for(memory.last for memory in given)
    last_use: dict[Memory, Write] = {}
    for write in writes:
        write.check()
        for operand in (*write.operands(), *write.made.values()):
            last_use[operand.memory] = write
    storages = _Storages(given)
    with contextlib.ExitStack() as stack:
        for kind in sorted({"cpu", *(memory.device.type for memory in given)}):
            # Operators run as they were recorded: below autocast.
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(ordinary_tensors())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        for write in writes:
            _run(write, storages, given)
            for memory in list(storages):
                if memory not in given and last_use.get(memory) is write:
                    del storages[memory]


class _Storages(dict[Memory, torch.UntypedStorage]):
    """The storages of memories; one that is asked for before it is written to is zero."""

    def __missing__(self, memory: Memory) -> torch.UntypedStorage:
        self[memory] = storage = zeros(memory)
        return storage


def _run(write: Write, storages: _Storages, given: Container[Memory]) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, Operand):
            return value.over(storages[value.memory])
        return value.value() if isinstance(value, Constant) else value

    arguments, keywords = replaced(write.arguments, write.keywords, real)
    draws = write.draw.by_default() if write.draw is not None else contextlib.nullcontext()
    torch.set_default_dtype(write.default_dtype)
    with draws:
        results = write.op(*arguments, **keywords)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    for position, made in write.made.items():
        result = results[position]
        is_alike = (tuple(result.shape), tuple(result.stride()), result.storage_offset()) == (
            made.size,
            made.stride,
            made.offset,
        )
        fits = result.untyped_storage().nbytes() >= made.memory.nbytes
        if is_alike and fits and made.memory not in given:
            storages[made.memory] = result.untyped_storage()
        elif result.numel():  # statistics of a norm that does not train are none, but on meta
            made.over(storages[made.memory]).copy_(result)


def zeros(memory: Memory) -> torch.UntypedStorage:
    """Return a storage for a memory that nothing has been written to."""
    with ordinary_tensors():
        flat = torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device)
        return flat.untyped_storage()
