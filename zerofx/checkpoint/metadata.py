"""A checkpoint's table of contents: read without running code from it, and sorted by meaning."""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerofx.checkpoint.contents import (
    BY_OWN_NAME,
    ERRORS,
    EXTRA,
    FROZEN,
    MODEL,
    OPTIMIZER,
    RNG,
)
from zerofx.checkpoint.folders import METADATA, NOTES, DamageError, notes_of
from zerofx.errors import CheckpointError

NEWEST_VERSION = (1, 0)
"""The newest major and minor version of torch's format that is known here."""

_DCP = "torch.distributed.checkpoint"
_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
)
_SAFE = {
    *((f"{_DCP}.metadata", name) for name in _METADATA.split()),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
"""The classes that a checkpoint's metadata may hold, beside dtypes and paths."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds metadata and nothing else, whatever the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where it was written to, maybe on another system
        if (module, name) in _SAFE:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's metadata: what it holds, and where.  Runs no code from the file.

    Raises: FileNotFoundError if there is no checkpoint; DamageError for one that is not what was
    written; CheckpointError for one of a newer format, or that asks for anything but metadata.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(_why_none(folder)) from error
    notes = notes_of(folder)
    if notes is not None and zlib.crc32(data) != notes.metadata_crc32:
        raise DamageError(
            f"{path} is not what was written: its CRC-32 differs from the one in {NOTES}. The "
            "checkpoint is damaged: load another."
        )
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        _check(metadata, path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in any way at all
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is damaged, not a checkpoint of "
            f"torch.distributed.checkpoint, or written by a newer torch than {torch.__version__}: "
            "load another checkpoint, or use the torch that wrote it."
        ) from error
    return metadata


def _why_none(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint at {folder}: zerofx.latest(folder) finds the last complete"
    inner = [path.name for path in folder.iterdir() if (path / METADATA).exists()]
    if inner:
        return (
            f"{folder} is no checkpoint but holds some: {', '.join(sorted(inner)[:5])}. Load one "
            "of them; zerofx.latest(folder) finds the last complete."
        )
    return (
        f"{folder} has no {METADATA} and so is no complete checkpoint of "
        "torch.distributed.checkpoint: it was left half written, or is something else. Load "
        "another."
    )


def _check(metadata: Any, path: Path) -> None:
    """Raise for a newer format, and for other types than metadata has: later code believes them."""
    version = getattr(metadata, "version", None)
    numbers = tuple(int(part) for part in (version or "0").split(".")[:2])
    if numbers > NEWEST_VERSION:
        known = ".".join(map(str, NEWEST_VERSION))
        raise CheckpointError(
            f"{path} is of format {version}, and formats up to {known} are known here. Use the "
            f"torch that wrote it (this is {torch.__version__}), and a zerofx for it."
        )
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    if not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it has no table of tensors")
    if not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("it has no table of where things are")
    for path in {info.relative_path for info in metadata.storage_data.values()}:
        if os.path.isabs(path) or ".." in Path(path).parts:
            raise pickle.UnpicklingError(f"it points out of the checkpoint, to {path!r}")


OPTIMIZER_ROOTS = (OPTIMIZER, "optim")
"""The names of an optimizer's part; the second is from torch's own tutorials."""

Keys = tuple[Any, ...]


@dataclass
class Saved:
    """The entries of a checkpoint, by their meaning; an entry is a key of its metadata.

    ``model`` maps names to entries.  ``states`` maps a parameter's name to the entries of its
    state, by the path of keys that leads to each.  ``groups`` maps the number of a parameter group
    to the entries of its hyperparameters.  ``extra`` maps paths to entries of the user's own, and
    ``rng`` ranks to the states of their generators.  ``errors`` maps ranks to the entries of what
    their gradients have lost, by number, and what these are.  ``frozen`` is the entry with the
    names of parameters that were left out, None if there are none; ``by_own_name`` the one with
    those whose modules' hooks were.
    """

    metadata: Metadata
    model: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[Keys, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    extra: dict[Keys, str] = field(default_factory=dict)
    rng: dict[int, str] = field(default_factory=dict)
    errors: dict[int, dict[str, str]] = field(default_factory=dict)
    frozen: str | None = None
    by_own_name: str | None = None
    has_optimizer: bool = False

    def tensor(self, entry: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None if the entry is something else."""
        found = self.metadata.state_dict_metadata[entry]
        return found if isinstance(found, TensorStorageMetadata) else None


def sort_out(metadata: Metadata) -> Saved:
    """Sort a checkpoint's entries by the keys of the state dict that was saved."""
    saved = Saved(metadata)
    paths = metadata.planner_data or {}
    for entry in metadata.state_dict_metadata:
        path = tuple(paths.get(entry) or entry.split(".", 1))
        saved.has_optimizer |= path[0] in OPTIMIZER_ROOTS and len(path) > 1
        match path:
            case (root, *rest) if root == MODEL and rest:
                saved.model[".".join(map(str, rest))] = entry
            case (root, *rest) if root == EXTRA and rest:
                saved.extra[tuple(rest)] = entry
            case (root, rank) if root == RNG and str(rank).isdigit():
                saved.rng[int(rank)] = entry
            case (root, rank, key) if root == ERRORS and str(rank).isdigit():
                saved.errors.setdefault(int(rank), {})[str(key)] = entry
            case (root,) if root == FROZEN:
                saved.frozen = entry
            case (root,) if root == BY_OWN_NAME:
                saved.by_own_name = entry
            case (root, "state", name, *inner) if root in OPTIMIZER_ROOTS and inner:
                saved.states.setdefault(str(name), {})[tuple(inner)] = entry
            case (root, "param_groups", number, key) if (
                root in OPTIMIZER_ROOTS and str(number).isdigit()
            ):
                saved.groups.setdefault(int(number), {})[str(key)] = entry
    return saved


# A checkpoint names no classes: an optimizer's kind is known by its hyperparameters.

HOW_NOT_WHAT = frozenset("foreach fused capturable differentiable maximize".split())
"""Hyperparameters of how an update is computed: another version of torch may lack or have them."""

DECOUPLED = "decoupled_weight_decay"
"""The hyperparameter that tells Adam from AdamW; older versions of torch have none."""


def why_another_kind(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Collection[str], values: Mapping
) -> str:
    """Return in words how a saved group's hyperparameters differ from an optimizer's, or "".

    ``saved`` are their names, ``values`` those that are no tensors.  Names that no optimizer of
    torch's has, such as a schedule's, are ignored.
    """
    absent = set(optimizer.defaults) - set(saved) - HOW_NOT_WHAT - {DECOUPLED}
    unknown = (set(saved) & _hyperparameters()) - set(group) - HOW_NOT_WHAT
    words = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (("without", absent), ("with", unknown))
        if names
    ]
    if DECOUPLED in values and values[DECOUPLED] != group.get(DECOUPLED, values[DECOUPLED]):
        words.append(f"with {DECOUPLED}={values[DECOUPLED]}")
    return ", ".join(words)


@functools.cache
def _hyperparameters() -> frozenset[str]:
    """Return the names of hyperparameters of torch's own optimizers."""
    classes = filter(inspect.isclass, vars(torch.optim).values())
    kinds = {one for one in classes if issubclass(one, Optimizer)} - {Optimizer}
    names = [inspect.signature(kind).parameters for kind in kinds]
    return frozenset().union(*names) - {"params"}
