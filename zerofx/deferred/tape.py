"""The record of memory that is not there yet: writes, and what they read."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.accelerator import is_accelerator, module_of
from zerofx.deferred.mapped import MAPPED
from zerofx.errors import StepError
from zerofx.ir.parameters import storage_order

_COPIED_BYTES = 1024 * 1024
"""Tensors that a recorded operation reads are copied up to here; larger ones are referred to.

So are those in mapped files."""


class Memory:
    """One storage that is not there: how large it is, where it will be, what was written last.

    What nothing has written to is zero.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self.last: Write | None = None


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor in memory that is not there, as an operation has found it.

    ``after`` is the write that it has found there last, None if what was there does not matter.
    """

    memory: Memory
    after: Write | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, memory: Memory) -> Operand:
        """The tensor as it is now.  Raises: StepError for a lazily conjugated or negated one."""
        if tensor.is_conj() or tensor.is_neg():
            raise StepError(
                "deferred_init cannot record an operation on a lazily conjugated or negated "
                "tensor. Call resolve_conj().resolve_neg() on it, or make it before the block."
            )
        return Operand(
            memory,
            memory.last,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            tensor.dtype,
        )

    @property
    def fills_memory(self) -> bool:
        """Return whether it is all of its memory, each element once."""
        if math.prod(self.size) * self.dtype.itemsize != self.memory.nbytes:
            return False
        try:
            storage_order(self.size, self.stride)
        except ValueError:
            return False
        return self.offset == 0

    def overwritten(self) -> Operand:
        """The same, to be written to: what was there does not matter if that is all of it."""
        return replace(self, after=None) if self.fills_memory else self

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The same tensor over memory that is there."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        return flat.set_(storage, self.offset, self.size, self.stride)


class Constant:
    """A tensor that was there when an operation that reads it was recorded.

    Raises: StepError from ``value`` if its owner has written to it since.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_lent = not tensor.untyped_storage().resizable()  # numpy's, or shared: written unseen
        self.tensor = tensor  # not detached: below autograd that would have its own version
        self.is_copy = False
        is_small = tensor.nbytes <= _COPIED_BYTES
        if tensor.is_inference() or ((is_small or is_lent) and not MAPPED.hold(tensor)):
            self.keep()
        else:
            self._version = tensor._version

    def keep(self) -> None:
        """Copy it, if it is no copy: its owner may write to it."""
        if not self.is_copy:
            with torch.inference_mode(False), torch.no_grad():
                self.tensor = self.tensor.clone(memory_format=torch.preserve_format)
            self.is_copy = True

    def check(self) -> None:
        if not self.is_copy and self.tensor._version != self._version:
            raise StepError(
                f"a tensor of shape {tuple(self.tensor.shape)} that a deferred parameter is made "
                "from has been written to since it was recorded, outside of deferred_init. Give "
                "the parameter a clone() of it, or call zerofx.materialize(model) before writing."
            )

    def value(self) -> Tensor:
        self.check()
        return self.tensor


@dataclass(frozen=True)
class Draw:
    """The source of one operation's random numbers: a generator's state, or a seed.

    The operation is given no generator when it is made: it draws from its device's.
    """

    device: torch.device
    state: Tensor | None = None
    seed: int = 0

    @contextlib.contextmanager
    def by_default(self) -> Iterator[None]:
        """Have the device's generator as the operation has found its own; then as it was."""
        generator = default_generator(self.device)
        before = generator.get_state()
        if self.state is not None:
            generator.set_state(self.state)
        else:
            generator.manual_seed(self.seed)
        try:
            yield
        finally:
            generator.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a device's operations draw from if they are given none."""
    if is_accelerator(device):
        return module_of(device).default_generators[device.index]
    return torch.default_generator


@dataclass(frozen=True, eq=False)
class Source:
    """One tensor in a file.  ``name`` is the same wherever and whenever it is the same tensor's.

    ``read`` fills a flat range of it, given the order of its dimensions in memory, the first
    element, the one behind the last, and memory for them.  ``check`` raises StepError if it cannot
    be read any more.
    """

    name: str
    read: Callable[[Sequence[int], int, int, Tensor], object]
    check: Callable[[], object]

    def fill(self, tensor: Tensor) -> None:
        """Read all of a tensor in place."""
        shape, is_dense = tuple(tensor.shape), True
        try:
            order = storage_order(shape, tensor.stride())
        except ValueError:
            order, is_dense = tuple(range(len(shape))), False
        flat = tensor.detach().permute(order).reshape(-1)  # a view; a copy if it is not dense
        self.read(order, 0, flat.numel(), flat)
        if not is_dense:
            tensor.detach().copy_(flat.view(shape))
        # A graph built on the old values says so when it is run backward.
        torch.autograd.graph.increment_version(tensor)


@dataclass(eq=False)
class Write:
    """One recorded operation.

    ``arguments`` hold operands and constants in the place of tensors; it may write to operands in
    place.  ``made`` are its results that have memory of their own, by position.  ``source`` is what
    it reads besides: a file.
    """

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    made: Mapping[int, Operand]
    draw: Draw | None
    default_dtype: torch.dtype
    source: Source | None = None
    number: int = field(default_factory=itertools.count().__next__)

    def operands(self) -> Iterator[Operand]:
        return (one for one in leaves(self.arguments, self.keywords) if isinstance(one, Operand))

    def check(self) -> None:
        """Raise StepError if something that it reads is no longer as it was."""
        for one in leaves(self.arguments, self.keywords):
            if isinstance(one, Constant):
                one.check()
        if self.source is not None:
            self.source.check()


def needed_for(targets: Iterable[Write | None]) -> list[Write]:
    """All writes that what is in memory after these depends on, in the order of the program."""
    found: dict[int, Write] = {}
    waiting = [write for write in targets if write is not None]
    while waiting:
        write = waiting.pop()
        if write.number in found:
            continue
        found[write.number] = write
        waiting += [one.after for one in write.operands() if one.after is not None]
    return [found[number] for number in sorted(found)]


def leaves(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Any]:
    """All that is in an operator's arguments, also in lists."""
    for value in (*arguments, *keywords.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def replaced(
    arguments: Sequence[Any], keywords: Mapping[str, Any], replace: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments with each leaf exchanged."""
    positional, named = fx.node.map_aggregate((tuple(arguments), keywords), replace)
    return positional, dict(named)
