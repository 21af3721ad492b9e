"""Checkpoints that a script loads while it is being planned: their headers alone are read."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zerofx import compat
from zerofx.deferred.mapped import MAPPED
from zerofx.options import environment


@contextlib.contextmanager
def headers_alone(is_elsewhere: bool) -> Iterator[None]:
    """Map files that are loaded, and read of their tensors what the script reads, when it does.

    Those of ``torch.load`` and of safetensors, with all that is built on them.  Transformers loads
    in the script's own thread: a recorder does not see others.  ``is_elsewhere``: the script is
    planned for a device that this machine lacks, and what it loads there is on the CPU.
    """
    patches: list[Any] = [
        mock.patch.dict(environment(), {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        mock.patch.object(torch, "load", _mapping(torch.load, is_elsewhere)),
        mock.patch.object(torch.UntypedStorage, "from_file", _from_file),
    ]
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch

        if hasattr(safetensors.torch, "_remove_duplicate_names"):
            patches.append(
                mock.patch.object(safetensors.torch, "_remove_duplicate_names", names_twice)
            )
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        MAPPED.forget()


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
        if is_elsewhere and not callable(map_location) and str(map_location) != "meta":
            map_location = "cpu"
        path = _path_of(f)
        if path is not None and _is_zip(path):
            f, options["mmap"] = path, True
        return load(f, map_location, *args, **options)

    return mapping


def _path_of(file: Any) -> str | None:
    """Return where a file is that is given by its path, or open at its beginning."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    try:
        is_it = file.tell() == 0 and os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (AttributeError, OSError, TypeError):  # it is no file, or has been moved
        return None
    return os.fspath(file.name) if is_it else None


def _is_zip(path: str) -> bool:
    """Return whether a file is of the format that torch has written since 1.6."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False  # torch says what is wrong


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
