"""Tensors and process groups: fakes, modes, memory that others hold, stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    ReduceScatterOptions,
    _get_default_store,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# Names as short as ``f32``, by dtype.
short_dtypes = dtype_abbrs

# A context in which new tensors are real although a compilation is under way.
real_tensors = unset_fake_temporarily


def fake_tensors() -> FakeTensorMode:
    """Make tensors without elements; real ones may be mixed with them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Return whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def make_fake(
    mode: FakeTensorMode,
    layout: tuple[tuple[int, ...], tuple[int, ...], int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a fake tensor of a shape, strides and offset, in elements.

    Past the dispatch of the operator that would make it.
    """
    shape, stride, offset = layout
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    base = torch.empty(offset + (extent if 0 not in shape else 0), dtype=dtype, device="meta")
    return FakeTensor(mode, base.as_strided(*layout), device)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements in memory of its own: not fake, not wrapped, strided."""
    return not (
        isinstance(tensor, FakeTensor | FunctionalTensor)
        or tensor.device.type == "meta"
        or tensor.layout is not torch.strided
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what an operator returns, however it is nested."""
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


# Documented under this name.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# Whether a profiler of torch is running: another cannot then.
is_profiled = torch.autograd._profiler_enabled


# Also without modes, which a recorder must not call for what it does itself.
without_function_modes = torch._C.DisableTorchFunction

# Where something must be done at once, past a recorder or AOTAutograd's watch of a first call.
without_dispatch_modes = _disable_current_modes


@contextlib.contextmanager
def past_all_modes() -> Iterator[None]:
    """Make tensors that are there, also in a block of ``deferred_init``."""
    with without_dispatch_modes(), without_function_modes():
        yield


def agreement_store(group: torch.distributed.ProcessGroup) -> torch.distributed.Store:
    """The key-value store that a group's ranks share, under a prefix of the group's own.

    The prefix holds the ranks too: groups cut from one mesh may share a name.
    """
    ranks = ",".join(map(str, torch.distributed.get_process_group_ranks(group)))
    return torch.distributed.PrefixStore(f"zerofx/{group.group_name}/{ranks}", _get_default_store())


def world_store() -> torch.distributed.Store | None:
    """The store that all ranks of this run share; None if there is but this process."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.PrefixStore("zerofx", _get_default_store()) if is_there else None


_all_gather = getattr(ProcessGroup, "all_gather_single", None) or ProcessGroup._allgather_base
_reduce_scatter = (
    getattr(ProcessGroup, "reduce_scatter_single", None) or ProcessGroup._reduce_scatter_base
)


def start_all_gather(result: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> Work:
    """Start torch's ``all_gather_into_tensor``, past its 15 to 25 us of Python.

    With an underscore in 2.11 and 2.12.  Can go when torch's own function is as short.
    """
    options = AllgatherOptions()
    options.asyncOp = True
    return _all_gather(group, _as_real(result), _as_real(shard), options)


def start_reduce_scatter(
    result: torch.Tensor, flat: torch.Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup
) -> Work:
    """The same for ``reduce_scatter_tensor``."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = operation, True
    return _reduce_scatter(group, _as_real(result), _as_real(flat), options)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def timeout_s(group: torch.distributed.ProcessGroup) -> float:
    """Return the longest time that a collective of a gloo group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def has_global_optimizer_hooks() -> bool:
    """Return whether hooks are registered around every optimizer's step of the process."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def copy_to_each(tensors: list[torch.Tensor], value: torch.Tensor) -> None:
    """Copy one value to several tensors of its shape, in one call of torch's.

    For 2.11 to 2.15, where ``_foreach_copy_`` has no public name.
    """
    if tensors:
        torch._foreach_copy_(tensors, [value] * len(tensors))


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether C++ code holds this very tensor too."""
    return tensor._use_count() > 1


def is_storage_held(storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor, or C++ besides its one Python object, holds this memory."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


def is_memory_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor has this one's memory too, or anything else in C++."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # it, and Python


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, fake ones too, while they live."""
    return tensor.untyped_storage()._cdata


def place_in_file(name: str, start: int, nbytes: int) -> _StorageInfo:
    """The place of a part of a checkpoint, as the metadata of torch.distributed.checkpoint has it.

    For 2.11 to 2.15; can go when torch's own writer frees each tensor that it has written.
    """
    return _StorageInfo(name, start, nbytes)
