"""Optimizer states that are in a checkpoint and have not been read yet.

A checkpoint is loaded before the first step knows which part of a state this rank keeps.  Until
then a tensor without memory stands for the whole of it, then one for this rank's shard: what is
read is what is kept, when its first update needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.deferred.tape import Source
from zerofx.errors import StepError
from zerofx.ir.parameters import ParameterInfo, storage_order
from zerofx.runtime.memory.flat import ordinary_tensors, without_storage
from zerofx.runtime.memory.guard import guarded_among, read_or_write
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.storage.bucket import Reader

_UNREAD: weakref.WeakSet[Source] = weakref.WeakSet()
"""Those of states; they live as long as a tensor that stands for what they have."""


class LazyState(GuardedState):
    """Stands for what is in ``source``, from element ``start`` to ``stop`` of it in ``order``.

    Elements beyond that are padding, which is zero.  The first use of its values reads them: it is
    an ordinary tensor from then on.
    """

    source: Source
    order: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if read_or_write(func)[1]:
            with compat.tensors.without_torch_function():
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
        """Its values, in memory of their own.  Raises: what the source does."""
        with (
            ordinary_tensors(),
            compat.tensors.real_tensors(),
            compat.tensors.without_dispatch_modes(),
        ):
            flat = torch.zeros(self.numel(), dtype=self.dtype, device=self.device)
            self.source.read(self.order, self.start, self.stop, flat[: self.stop - self.start])
            return flat.as_strided(self.shape, self.stride())

    def read_by(self, reader: Reader) -> Tensor:
        return self.read()

    def arrive(self) -> None:
        """Be an ordinary tensor, with its values.  Nothing changes if they cannot be read."""
        values = self.read()
        with (
            ordinary_tensors(),
            compat.tensors.real_tensors(),
            compat.tensors.without_dispatch_modes(),
        ):
            self.__class__ = Tensor
            self.set_(values)
        del self.source

    def shard(self, info: ParameterInfo, rank: int) -> LazyState:
        """Return a tensor that stands for the range of it that ``rank`` owns.

        Shapes: ``info.shape`` -> ``[info.shard_numel]``, in storage order.
        """
        like = torch.empty(info.shard_numel, dtype=self.dtype, device="meta")
        return standing_for(
            self.source, like, self.device, (info.storage_order, *info.owned_by(rank))
        )


def standing_for(
    source: Source,
    like: Tensor,
    device: torch.device,
    part: tuple[Sequence[int], int, int] | None = None,
) -> LazyState:
    """Return a tensor of the shape, strides and dtype of ``like`` that stands for a state.

    It is dense, and the whole of what is in ``source``; or a ``part``: the order of dimensions, the
    first element and the one behind the last.
    """
    shape, stride = tuple(like.shape), like.stride()
    with compat.tensors.past_all_modes():
        late: Any = without_storage(shape, stride, like.dtype, device)
    late.__class__ = LazyState
    late.source, late.of = source, source.name
    order, late.start, late.stop = part or (storage_order(shape, stride), 0, like.numel())
    late.order = tuple(order)
    _UNREAD.add(source)
    return late


def unread() -> bool:
    """Return whether any saved state has not been read."""
    return bool(_UNREAD)


def check_states(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise what those states of these optimizers raise that can no longer be read."""
    for optimizer in optimizers if unread() else ():
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, LazyState):
                    value.source.check()
