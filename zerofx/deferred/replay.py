"""Make what has been recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.deferred.tape import Constant, Drawn, Memory, Operand, Write, needed_for, replaced
from zerofx.runtime.memory.flat import ordinary_tensors


def replay(targets: Sequence[Memory], storages: Mapping[Memory, torch.UntypedStorage]) -> None:
    """Fill these storages with what has been written to their memories up to now.

    Operations run in the order of the program, each that is needed once; what they need of other
    memory is there from the first to the last of them, and freed.
    """
    writes = needed_for(memory.last for memory in targets)
    for write in writes:
        write.check()
    with _as_recorded(targets), ordinary_tensors():
        _Replay(writes, storages).run()


def value_of(operand: Operand) -> Tensor:
    """Return the present values of a tensor that is not there, in memory of their own."""
    storage = _zeros(operand.memory)
    replay([operand.memory], {operand.memory: storage})
    with ordinary_tensors():
        return operand.over(storage)


def check(memory: Memory) -> None:
    """Raise StepError for what can no longer be made."""
    for write in needed_for([memory.last]):
        write.check()


class _Replay:
    def __init__(
        self, writes: Sequence[Write], storages: Mapping[Memory, torch.UntypedStorage]
    ) -> None:
        self.writes = writes
        self.given = storages
        self.storages: dict[Memory, torch.UntypedStorage] = dict(storages)
        self.last_use: dict[Memory, Write] = {}
        for write in writes:
            for operand in (*write.operands(), *write.made.values()):
                self.last_use[operand.memory] = write

    def run(self) -> None:
        for write in self.writes:
            self._run(write)
            for memory in [m for m in self.storages if self.last_use.get(m) is write]:
                if memory not in self.given:
                    del self.storages[memory]

    def _run(self, write: Write) -> None:
        draw = write.draw

        def real(value: Any) -> Any:
            if isinstance(value, Operand):
                return value.over(self._storage(value.memory))
            if isinstance(value, Constant):
                return value.value()
            if isinstance(value, Drawn):
                assert draw is not None
                return draw.own_generator()
            return value

        arguments, keywords = replaced(write.arguments, write.keywords, real)
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if draw is not None and not draw.has_generator:
            context = draw.by_default()
        with context, _default_dtype(write.default_dtype):
            results = write.op(*arguments, **keywords)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        for position, made in write.made.items():
            self._keep(made, results[position])

    def _storage(self, memory: Memory) -> torch.UntypedStorage:
        if memory not in self.storages:
            self.storages[memory] = _zeros(memory)
        return self.storages[memory]

    def _keep(self, made: Operand, result: Tensor) -> None:
        """Have an operation's result where others look for it."""
        is_alike = (tuple(result.shape), tuple(result.stride()), result.storage_offset()) == (
            made.size,
            made.stride,
            made.offset,
        )
        fits = result.untyped_storage().nbytes() >= made.memory.nbytes
        if is_alike and fits and made.memory not in self.given:
            self.storages[made.memory] = result.untyped_storage()
        else:
            made.over(self._storage(made.memory)).copy_(result)


def _zeros(memory: Memory) -> torch.UntypedStorage:
    with ordinary_tensors():
        flat = torch.zeros(memory.nbytes, dtype=torch.uint8, device=memory.device)
        return flat.untyped_storage()


@contextlib.contextmanager
def _as_recorded(targets: Iterable[Memory]):
    """Run operators as they were recorded: below autocast."""
    kinds = {"cpu", *(memory.device.type for memory in targets)}
    with contextlib.ExitStack() as stack:
        for kind in sorted(kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
