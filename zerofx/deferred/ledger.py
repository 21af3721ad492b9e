"""The memory of this process that is not there, and the tensors that look at it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.deferred import replay
from zerofx.deferred.tape import Memory, Operand, Source, Write, needed_for
from zerofx.runtime.memory.flat import ordinary_tensors


class Ledger:
    """The storages whose memory is not there, and the tensors over them that Python holds.

    Such a storage has no bytes; its tensors have their class, device, dtype, shape and strides.
    While a block records, or a compiled call runs, tensors are of their own classes, else guarded.
    An entry goes when its storage does, or when its memory is there.
    """

    def __init__(self) -> None:
        self._memories: dict[int, tuple[weakref.ref[torch.UntypedStorage], Memory]] = {}
        self._guarded: list[tuple[weakref.ref[Tensor], type, type]] = []
        self._plain_depth = 0
        self.on_read: Callable[[Memory], None] | None = None  # may refuse it
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._memories)

    def memories(self) -> set[Memory | None]:
        """Return all memory that is not there."""
        return {memory for _, memory in self._memories.values()}

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor that is not there; None if it is there."""
        if not self._memories or tensor.layout is not torch.strided:
            return None
        try:
            with compat.tensors.without_function_modes():
                found = self._memories.get(compat.tensors.storage_key(tensor))
        except (NotImplementedError, RuntimeError):  # it has no storage of its own: a functorch one
            return None
        return found[1] if found is not None else None

    def enter(self, tensor: Tensor) -> Memory:
        """Take a tensor's memory away, before anything has been written there."""
        storage = tensor.untyped_storage()
        memory = Memory(storage.nbytes(), tensor.device)
        storage.resize_(0)
        key = compat.tensors.storage_key(tensor)

        def forget(reference: Any) -> None:
            if key in self._memories and self._memories[key][0] is reference:
                del self._memories[key]
                memory.last = None  # they would keep each other, and what it is made from

        self._memories[key] = weakref.ref(storage, forget), memory
        return memory

    # Making

    def fill_later(self, tensor: Tensor, source: Source) -> None:
        """Have all of a tensor that is not there read from a file, when it is made."""
        memory = self.memory_of(tensor)
        assert memory is not None
        operand = Operand.of(tensor, memory).overwritten()
        default = torch.get_default_dtype()
        memory.last = Write(source.fill, (operand,), {}, {}, None, default, source)

    def source_of(self, tensor: Tensor) -> Source | None:
        """Return the one read that fills a tensor; None if it takes more than a read.

        Nor if something else looks into its memory.
        """
        memory = self.memory_of(tensor)
        if memory is None or memory.last is None or memory.last.source is None:
            return None
        (operand,) = memory.last.operands()
        is_it = (operand.size, operand.stride) == (tuple(tensor.shape), tuple(tensor.stride()))
        is_alone = operand.fills_memory and not compat.tensors.is_memory_shared(tensor)
        return memory.last.source if is_it and is_alone else None

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the present values of a tensor that is not there, in memory of their own."""
        memory = self.memory_of(tensor)
        assert memory is not None
        if self.on_read is not None:
            self.on_read(memory)
        with _at_once():
            operand, storage = Operand.of(tensor, memory), replay.zeros(memory)
            replay.replay({memory: storage})
            return operand.over(storage)

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise StepError for those that can no longer be made."""
        memories = [self.memory_of(tensor) for tensor in tensors]
        for write in needed_for(memory.last for memory in memories if memory is not None):
            write.check()

    def make(self, tensor: Tensor, *, with_values: bool = True) -> None:
        """Have a tensor's memory there, and so that of all that share it; classes stay.

        Without values it is uninitialised, for who writes all of it.
        """
        with self._lock:
            memory = self.memory_of(tensor)
            if memory is None:
                return
            with _at_once():
                storage = tensor.untyped_storage()
                storage.resize_(memory.nbytes)
                if with_values:
                    try:
                        storage.fill_(0)
                        replay.replay({memory: storage})
                    except BaseException:
                        storage.resize_(0)
                        raise
            del self._memories[compat.tensors.storage_key(tensor)]
            memory.last = None

    @contextlib.contextmanager
    def backed(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Have room, and no values, where these look, for as long as the context lasts."""
        found = [(tensor.untyped_storage(), self.memory_of(tensor)) for tensor in tensors]
        try:
            for storage, memory in found:
                if memory is not None:
                    storage.resize_(memory.nbytes)
            yield
        finally:
            for storage, memory in found:
                if memory is not None:
                    storage.resize_(0)

    def make_others(self, kept: Container[Memory | None]) -> None:
        """Make all memory but these."""
        for reference, memory in list(self._memories.values()):
            storage = reference()
            if storage is not None and memory not in kept:
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
                self.make(whole.set_(storage, 0, (0,)))

    # Classes

    def guard(self, tensors: Iterable[tuple[Tensor, type]]) -> None:
        """Exchange classes of these: now, or when tensors are no longer to be plain."""
        with self._lock:
            for tensor, guarded in tensors:
                self._guarded.append((weakref.ref(tensor), type(tensor), guarded))
                if self._plain_depth == 0:
                    tensor.__class__ = guarded

    def make_plain(self) -> None:
        """Give all tensors their own classes until ``guard_again``; nests."""
        with self._lock:
            self._plain_depth += 1
            if self._plain_depth == 1:
                for tensor, own, _ in self._alive():
                    tensor.__class__ = own

    def guard_again(self) -> None:
        """Guard those whose memory is still not there, and forget the others."""
        with self._lock:
            self._plain_depth -= 1
            if self._plain_depth:
                return
            still = [one for one in self._alive() if self.memory_of(one[0]) is not None]
            self._guarded = [(weakref.ref(tensor), own, to) for tensor, own, to in still]
            for tensor, _, guarded in still:
                tensor.__class__ = guarded

    def _alive(self) -> Iterator[tuple[Tensor, type, type]]:
        for reference, own, guarded in self._guarded:
            tensor = reference()
            if tensor is not None:
                yield tensor, own, guarded


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Do what is done here, inside of a block that records too."""
    with compat.tensors.past_all_modes(), ordinary_tensors():
        yield


LEDGER = Ledger()
