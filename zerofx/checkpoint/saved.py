"""A checkpoint's table of contents: what is a model's, an optimizer's, or extra."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerofx.checkpoint.contents import EXTRA, FROZEN, MODEL, OPTIMIZER, RNG

OPTIMIZER_ROOTS = (OPTIMIZER, "optim")
"""What the optimizer's part is called; the second in torch's own tutorials."""

Path = tuple[Any, ...]


@dataclass
class SavedGroup:
    """One parameter group: the entries of its hyperparameters, by name."""

    entries: dict[str, str] = field(default_factory=dict)


@dataclass
class Saved:
    """The entries of a checkpoint, by what they are.

    ``model`` maps names to entries; ``states`` a parameter's name to entries by the path of keys
    that leads to them in its state; ``extra`` the same for the user's own; ``rng`` ranks to the
    states of their generators; ``frozen`` is where the names of what was left out are, None if
    nothing was.  Entries are the keys of the checkpoint's metadata.
    """

    metadata: Metadata
    model: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[Path, str]] = field(default_factory=dict)
    groups: dict[int, SavedGroup] = field(default_factory=dict)
    extra: dict[Path, str] = field(default_factory=dict)
    rng: dict[int, str] = field(default_factory=dict)
    frozen: str | None = None
    others: set[str] = field(default_factory=set)
    has_optimizer: bool = False

    def tensor(self, entry: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None if the entry is something else."""
        found = self.metadata.state_dict_metadata[entry]
        return found if isinstance(found, TensorStorageMetadata) else None

    @property
    def roots(self) -> list[str]:
        """The names at the top, for words about a checkpoint of something else."""
        return sorted({entry.partition(".")[0] for entry in self.metadata.state_dict_metadata})


def sort_out(metadata: Metadata, names: Collection[str]) -> Saved:
    """Tell what the entries are.  ``names`` are the parameters', which have dots as paths have."""
    saved = Saved(metadata)
    paths = metadata.planner_data or {}
    for entry in metadata.state_dict_metadata:
        path = tuple(paths.get(entry) or _split(entry, names))
        root, *rest = path
        if root == MODEL and rest:
            saved.model[".".join(map(str, rest))] = entry
        elif root == EXTRA and rest:
            saved.extra[tuple(rest)] = entry
        elif root == RNG and len(rest) == 1 and str(rest[0]).isdigit():
            saved.rng[int(rest[0])] = entry
        elif path == (FROZEN,):
            saved.frozen = entry
        elif root in OPTIMIZER_ROOTS and rest:
            saved.has_optimizer = True
            _add_of_optimizer(saved, rest, entry)
        else:
            saved.others.add(entry)
    return saved


def _add_of_optimizer(saved: Saved, path: list[Any], entry: str) -> None:
    kind, *rest = path
    if kind == "state" and len(rest) >= 2:
        name, *inner = rest
        saved.states.setdefault(str(name), {})[tuple(inner)] = entry
    elif kind == "param_groups" and len(rest) == 2 and str(rest[0]).isdigit():
        number, key = rest
        saved.groups.setdefault(int(number), SavedGroup()).entries[str(key)] = entry
    else:
        saved.others.add(entry)


def _split(entry: str, names: Collection[str]) -> Iterator[str]:
    """The path of an entry in a checkpoint that was saved without paths."""
    root, _, rest = entry.partition(".")
    yield root
    kind, _, below = rest.partition(".")
    if root not in OPTIMIZER_ROOTS or kind not in ("state", "param_groups"):
        if rest:
            yield rest
        return
    yield kind
    if kind == "param_groups":
        yield from below.split(".", 1)
        return
    parts = below.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            yield from (name, ".".join(parts[end:]))
            return
    yield below
