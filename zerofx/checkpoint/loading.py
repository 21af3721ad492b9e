"""``zerofx.load`` and ``resume``: each rank reads its own part of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.checkpoint.barrier import Ranks, meet
from zerofx.checkpoint.contents import (
    as_list,
    bound_parameters,
    check_model,
    set_rng_state,
)
from zerofx.checkpoint.folders import (
    METADATA,
    NOTES,
    SKIPPED,
    DamageError,
    Notes,
    as_path,
    checkpoints_in,
    without_notes,
)
from zerofx.checkpoint.matching import Matching
from zerofx.checkpoint.metadata import read_metadata, sort_out
from zerofx.checkpoint.reading import Reader
from zerofx.errors import CheckpointError, MismatchError, NewerFormatError
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.state_dict import attach_optimizer

logger = logging.getLogger("zerofx")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``, and return its ``extra``.  Collective.

    Any number of ranks may have saved it at any stage, or FSDP2, or one process with
    ``torch.distributed.checkpoint``.  Each rank reads its own shards; whole parameters before the
    first compiled call (except deferred ones) and at stages below 3.  Before that call, states are
    only checked; the first step reads them.  Tensors of ``extra`` are on the CPU.  No code from the
    file is run.

    Everything is checked first, checksums included, and an error leaves model and optimizer as they
    were.  With ``strict=False`` tensors that do not fit are left as they are, and logged.
    Parameters that a save with ``trainable_only`` left out stay as they are; they must be frozen.

    Raises: MismatchError, with all differences, if the checkpoint is of other tensors;
    CheckpointError if it cannot be read; FileNotFoundError if there is none; ValueError if ranks
    were given different paths; RuntimeError if a rank does not join.  Every rank raises.
    """
    folder, optimizers = as_path(path), as_list(optimizer)
    check_model(model)
    ranks = meet(model, optimizers, process_group, "zerofx.load()")
    ranks.check_same(path=folder, strict=strict)
    reading = _Reading(folder, model, optimizers, ranks)
    reading.check(strict)
    return reading.read_on()


def resume(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: Any = None,
) -> dict[str, Any]:
    """Load the last checkpoint that ``zerofx.save`` has completed in ``folder``.  Collective.

    Returns its ``extra``; if there is no checkpoint yet, an empty dict, and nothing changes.  Call
    it at the start of a training that may be started again, on any number of ranks.  If that number
    is the same, generators of random numbers go on where those of the same rank were.  A damaged
    checkpoint is logged, and the one before it is loaded; a later save under its name renames it.

    Raises: MismatchError if the last one is of another model; CheckpointError if all are damaged,
    one is of a newer format, or the last one cannot be read at the moment or has no optimizer;
    ValueError if ``folder`` is a checkpoint; RuntimeError if a rank does not join.  Every rank
    raises.
    """
    optimizers = as_list(optimizer)
    check_model(model)
    ranks = meet(model, optimizers, process_group, "zerofx.resume()")
    ranks.check_same(folder=Path(folder).absolute())
    complete, damaged = ranks.on_first(lambda: _found_in(Path(folder)))
    for error in damaged.values():
        if isinstance(error, NewerFormatError):  # it may be the last
            raise error
    if damaged and not complete:
        raise CheckpointError(" ".join(map(str, damaged.values())))
    for path, error in damaged.items():
        logger.error("%s The last of the others is loaded.", error)
        SKIPPED.add(path.absolute())
    paths = [path for _, path in reversed(complete)]
    for path in paths:
        reading = _Reading(path, model, optimizers, ranks)
        damage = reading.damage()
        if damage and path == paths[-1]:
            raise DamageError(damage)
        if damage:
            logger.error("%s The one before it is loaded.", damage)
            SKIPPED.add(path.absolute())
            continue
        extra = reading.read_on()
        if reading.rng is not None:
            set_rng_state(reading.rng, model)
        else:
            logger.warning("%s is of other ranks: random numbers go on as seeded", path)
        return extra
    return {}


def _found_in(folder: Path) -> tuple[list[tuple[Notes, Path]], dict[Path, CheckpointError]]:
    """Return what ``checkpoints_in`` does; log what else looks like a checkpoint."""
    complete, damaged = checkpoints_in(folder)
    if not complete and not damaged and (folder / METADATA).is_file():
        raise ValueError(
            f"{folder} is a checkpoint, and zerofx.resume takes the folder that checkpoints are "
            f"in. Give {folder.parent}, or load this one with zerofx.load."
        )
    for path in without_notes(folder):
        logger.warning(
            "%s has no %s, which zerofx.save writes: it is another library's, or has lost it. "
            "zerofx.resume passes it over; zerofx.load reads it.",
            path,
            NOTES,
        )
    return complete, damaged


@dataclass
class _Reading:
    """One rank's part of a load.  ``rng`` is the state of its generators, if it was saved."""

    folder: Path
    model: nn.Module
    optimizers: Sequence[Optimizer]
    ranks: Ranks
    rng: dict[str, Any] | None = None

    def check(self, strict: bool) -> None:
        """Check on all ranks everything that will be read, and change nothing.  Collective.

        Raises: MismatchError if there are differences and ``strict`` is set; CheckpointError.
        """
        self.ranks.together(lambda: self._check(strict))

    def damage(self) -> str | None:
        """Check as ``check`` does; return in words what is damaged on any rank.  Collective.

        Raises: as ``check``, with ``strict``, for whatever else is wrong.
        """

        def found() -> str | None:
            try:
                self._check(strict=True)
            except (DamageError, FileNotFoundError) as error:
                return str(error)
            return None

        return next(filter(None, self.ranks.together(found)), None)

    def _check(self, strict: bool) -> None:
        there = self.folder.resolve()  # a link may point to another checkpoint before all is read
        metadata = read_metadata(there)
        self.reader = Reader(there, metadata)
        saved = sort_out(metadata)
        if not saved.model:
            roots = sorted({entry.partition(".")[0] for entry in metadata.state_dict_metadata})
            raise MismatchError(
                f"{self.folder} has no tensors under 'model', which is where zerofx.save and the "
                f"examples of torch.distributed.checkpoint put a model's: it has "
                f"{', '.join(roots[:8]) or 'nothing'}. Save it as {{'model': ..., "
                "'optimizer': ...}."
            )
        self.matching = Matching(saved, self.model, self.optimizers, self.reader.value)
        if len(saved.rng) == self.ranks.world_size:
            self.rng = self.reader.value(saved.rng[self.ranks.rank])
        differences = self.matching.differences
        if differences and strict:
            raise MismatchError(
                f"{self.folder} does not fit: {differences}. Load it into what was saved, convert "
                "the model to the dtype that was saved, or leave out what does not fit with "
                "strict=False."
            )
        self.reader.check_all(self.matching.targets, self.ranks.rank, self.ranks.world_size)
        if differences:
            logger.warning("zerofx.load left out what does not fit: %s", differences)

    def read_on(self) -> dict[str, Any]:
        """Read everything into its place, and return ``extra``.  Collective.

        Raises: CheckpointError on all ranks if one cannot read a part that was whole before.
        """
        with torch.no_grad(), ordinary_tensors():
            self.ranks.together(self._read)
        self.matching.forget()
        self.reader.values.clear()  # what reads late keeps the reader
        return self.matching.extra

    def _read(self) -> None:
        try:
            for optimizer in self.optimizers:
                if any(bound.stage > 0 for bound in bound_parameters(optimizer)):
                    attach_optimizer(optimizer)  # which keeps shards from now on
            for target in self.matching.targets:
                target.fill(self.reader)
            for finish in self.matching.finish:
                finish()
        except Exception as error:
            raise CheckpointError(
                f"reading {self.folder} failed after it had been checked: {error}. Model and "
                "optimizer are a mix of old and new now: load a checkpoint before you go on."
            ) from error
