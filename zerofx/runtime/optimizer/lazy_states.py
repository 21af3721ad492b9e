"""Optimizer states that are in a checkpoint and have not been read yet.

A checkpoint is loaded before the first step knows which part of a state this rank keeps.  Until
then a tensor without memory stands for the whole of it, then one for this rank's shard: what is
read is what is kept, when its first update needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.errors import StepError
from zerofx.ir.parameters import ParameterInfo, storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.memory.guard import guarded_among, read_or_write
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.storage.bucket import Reader

FlatReader = Callable[[Sequence[int], int, int, Tensor], object]
"""Fills a flat tensor ``[stop - start]`` with these elements of one, given the order of its
dimensions in memory from slowest to fastest, ``start`` and ``stop``."""


@dataclass(frozen=True, eq=False)
class SavedState:
    """One state in a checkpoint.

    ``name`` is for errors, ``check`` raises if it cannot be read, ``use`` keeps what it is read
    from.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: FlatReader
    check: Callable[[], object]
    use: object

    def __post_init__(self) -> None:
        _UNREAD.add(self)


_UNREAD: weakref.WeakSet[SavedState] = weakref.WeakSet()


class LazyState(GuardedState):
    """Stands for ``saved``, from element ``start`` to ``stop`` of it in ``order``.

    Elements beyond that are padding, which is zero.  The first use of its values reads them: it is
    an ordinary tensor from then on.
    """

    saved: SavedState
    order: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if read_or_write(func)[1]:
            with compat.without_torch_function():
                return func(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            raise StepError(
                "the step reads a state of an optimizer that has been loaded from a checkpoint, "
                "and has not been read yet: call copy.deepcopy(optimizer.state_dict()) before the "
                "step, which reads them all."
            )
        for tensor in guarded_among((args, kwargs)):
            if isinstance(tensor, LazyState):
                tensor.arrive()
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """Its values, in memory of their own.  Raises: what ``saved.read`` does."""
        with ordinary_tensors(), compat.real_tensors(), compat.without_dispatch_modes():
            flat = torch.zeros(self.numel(), dtype=self.dtype, device=self.device)
            self.saved.read(self.order, self.start, self.stop, flat[: self.stop - self.start])
            return flat.as_strided(self.shape, self.stride())

    def read_by(self, reader: Reader) -> Tensor:
        return self.read()

    def arrive(self) -> None:
        """Be an ordinary tensor, with its values.  Nothing changes if they cannot be read."""
        values = self.read()
        with ordinary_tensors(), compat.real_tensors(), compat.without_dispatch_modes():
            self.__class__ = Tensor
            self.set_(values)
        del self.saved

    def shard(self, info: ParameterInfo, rank: int) -> LazyState:
        """Return a tensor that stands for the range of it that ``rank`` owns.

        Shapes: ``info.shape`` -> ``[info.shard_numel]``, in storage order.
        """
        start, stop = info.owned_by(rank)
        shape = (info.shard_numel,)
        return _without_memory(
            self.saved, shape, (1,), info.storage_order, (start, stop), info.device
        )


def standing_for(saved: SavedState, like: Tensor, device: torch.device) -> LazyState:
    """Return a tensor that stands for all of a state, strided as the parameter ``like`` is.

    Raises: ValueError if that is not dense.
    """
    order = storage_order(tuple(like.shape), like.stride())
    return _without_memory(saved, saved.shape, like.stride(), order, (0, like.numel()), device)


def unread() -> bool:
    """Return whether any saved state has not been read."""
    return bool(_UNREAD)


def check_states(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise what those states of these optimizers raise that can no longer be read."""
    for optimizer in optimizers if unread() else ():
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, LazyState):
                    value.saved.check()


def _without_memory(
    saved: SavedState,
    shape: Sequence[int],
    stride: Sequence[int],
    order: Sequence[int],
    bounds: tuple[int, int],
    device: torch.device,
) -> LazyState:
    with ordinary_tensors():
        late = torch.empty(0, dtype=saved.dtype, device=device)
        late.set_(late.untyped_storage(), 0, tuple(shape), tuple(stride))
        late.untyped_storage().resize_(0)
    late.__class__ = LazyState
    late.saved, late.order = saved, tuple(order)
    late.start, late.stop = bounds
    late.of = saved.name
    return late
