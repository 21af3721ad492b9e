"""Checkpoints that a script loads while it is being planned: their headers alone are read."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.mapped import MAPPED
from zerofx.deferred.tape import Source
from zerofx.options import environment


@contextlib.contextmanager
def headers_alone(is_elsewhere: bool) -> Iterator[None]:
    """Map files that are loaded, and read of their tensors what the script reads, when it does.

    Those of ``torch.load``, safetensors and ``torch.distributed.checkpoint``, with all that is
    built on them.  Transformers loads in the script's own thread: a recorder does not see others.
    ``is_elsewhere``: the script is planned for a device that this machine lacks, and what it loads
    there is on the CPU.
    """
    with contextlib.ExitStack() as patches:
        patch = patches.enter_context
        patch(mock.patch.dict(environment(), {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        patch(mock.patch.object(torch, "load", _mapping(torch.load, is_elsewhere)))
        patch(mock.patch.object(torch.UntypedStorage, "from_file", _from_file))
        patch(mock.patch.object(dcp, "load", _reading_later(dcp.load)))
        if importlib.util.find_spec("safetensors") is not None:
            import safetensors.torch

            patch(in_all_modules({safetensors.safe_open: _opening(is_elsewhere)}))
            name = "_remove_duplicate_names"  # of load_model
            patch(mock.patch.object(safetensors.torch, name, names_twice, create=True))
        patches.callback(MAPPED.forget)
        yield


# torch.load and safetensors


_map_storage = torch.UntypedStorage.from_file


def _from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> torch.UntypedStorage:
    """Return a file's bytes, as torch does; private ones are mapped and not read."""
    if shared or nbytes <= 0:
        return _map_storage(filename, shared, nbytes)
    return MAPPED.map(os.fspath(filename), nbytes)


def _mapping(load: Callable, is_elsewhere: bool) -> Callable:
    """Return ``torch.load`` that maps files which can be mapped."""

    @functools.wraps(load)
    def mapping(f, map_location=None, *args, **options):
        if is_elsewhere and str(map_location) != "meta":
            map_location = "cpu"
        path = path_of(f)
        if path is not None and _is_zip(path):
            f, options["mmap"] = path, True
        return load(f, map_location, *args, **options)

    return mapping


def path_of(file: Any) -> str | None:
    """Return where a file is that is given by its path, or open at its beginning."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    try:
        path = os.path.abspath(file.name)
        is_it = file.tell() == 0 and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (AttributeError, OSError, TypeError, ValueError):  # no file, closed, or without a name
        return None
    return path if is_it else None


def _is_zip(path: str) -> bool:
    """Return whether a file is of the format that torch has written since 1.6."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False  # torch says what is wrong


def _opening(is_elsewhere: bool) -> Callable:
    """Return ``safetensors.safe_open`` that maps its file."""
    import safetensors

    original = safetensors.safe_open

    def safe_open(filename, framework, device="cpu", **_backend):
        return original(filename, framework, device="cpu" if is_elsewhere else device)

    return safe_open


@contextlib.contextmanager
def in_all_modules(instead: Mapping[Any, Any]) -> Iterator[None]:
    """Exchange what modules have imported, or import meanwhile, under any name.

    What is there ``instead`` has no name in a module: it would be exchanged back there too.
    """

    def exchange(new: Mapping[int, Any]) -> None:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            for name in [name for name, one in names.items() if id(one) in new]:
                names[name] = new[id(names[name])]

    exchange({id(old): new for old, new in instead.items()})
    try:
        yield
    finally:
        exchange({id(new): old for old, new in instead.items()})


def names_twice(
    tensors: Mapping[str, Tensor],
    *,
    preferred_names: Collection[str] = (),
    discard_names: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return the names of tensors that have another one too, each list under the one that is kept.

    As safetensors does it by addresses, which what has been recorded has not.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta":
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            with compat.tensors.without_function_modes():
                key = compat.tensors.storage_key(tensor)
            groups.setdefault((key, *place), []).append(name)
    twice: dict[str, list[str]] = {}
    for names in groups.values():
        if len(names) > 1:
            best = [one for one in names if one not in discard_names] or names
            kept = min([one for one in names if one in preferred_names] or best)
            twice[kept] = sorted(one for one in names if one != kept)
    return twice


# torch.distributed.checkpoint


def _reading_later(load: Callable) -> Callable:
    """Return ``dcp.load`` that reads a tensor when its values are needed, and all else at once."""

    @functools.wraps(load)
    def reading_later(state_dict, *, checkpoint_id=None, storage_reader=None, **options):
        is_folder = checkpoint_id is not None and dcp.FileSystemReader.validate_checkpoint_id(
            checkpoint_id
        )
        if storage_reader is None and is_folder:
            storage_reader = dcp.FileSystemReader(checkpoint_id)
        options |= {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader}
        options["no_dist"] = True  # the ranks that a plan is for are not there
        if storage_reader is None:
            return load(state_dict, **options)

        def read_data(plan, planner):
            now = copy.copy(storage_reader)  # the script may use it for another checkpoint
            return _read_later(functools.partial(type(now).read_data, now), plan, planner)

        with mock.patch.object(storage_reader, "read_data", read_data):
            return load(state_dict, **options)

    return reading_later


def _read_later(read_data: Callable, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
    """Do as ``StorageReader.read_data`` does, but for tensors that have been recorded."""
    at_once = []
    for item in plan.items:
        target = planner.resolve_tensor(item) if item.type is LoadItemType.TENSOR else None
        if target is None or LEDGER.memory_of(target) is None:
            at_once.append(item)
        else:
            one = replace(plan, items=[item])
            read = functools.partial(_read_one, read_data, one, target.dtype)
            name = f"{item.storage_index.fqn} of a checkpoint"
            LEDGER.fill_later(target, Source(name, read, lambda: None))
            planner.commit_tensor(item, target)
    return read_data(replace(plan, items=at_once), planner)


def _read_one(
    read_data: Callable,
    plan: dcp.LoadPlan,
    dtype: torch.dtype,
    order: Sequence[int],
    start: int,
    stop: int,
    into: Tensor,
) -> None:
    """Read a flat range of the one tensor of a plan."""
    whole = torch.empty(plan.items[0].lengths, dtype=dtype)
    read_data(plan, _Into(whole)).wait()
    into.copy_(whole.permute(order).reshape(-1)[start:stop])


class _Into(dcp.DefaultLoadPlanner):
    """Has whatever is read put into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: Any) -> Tensor:
        return self._tensor

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        pass
