"""``zerofx.load`` and ``resume``: each rank reads its own part of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.optim import Optimizer

from zerofx.checkpoint.background import meet
from zerofx.checkpoint.contents import bound_parameters, parameter_names
from zerofx.checkpoint.errors import CheckpointError, MismatchError
from zerofx.checkpoint.folders import SKIPPED, complete_in, damaged_in
from zerofx.checkpoint.late import Files
from zerofx.checkpoint.matching import (
    Plan,
    match_extra,
    match_model,
    match_optimizers,
)
from zerofx.checkpoint.meeting import Ranks
from zerofx.checkpoint.paths import as_list, as_path, check_model
from zerofx.checkpoint.reading import Reader, read_metadata
from zerofx.checkpoint.rng import set_rng_state
from zerofx.checkpoint.saved import sort_out
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

    It may have been saved by any number of ranks at any stage, or by FSDP2 or one process with
    ``torch.distributed.checkpoint``.  Before the first compiled call, or at stages below 3, every
    rank reads whole parameters, but those that are deferred; then, and of states always, each reads
    what it keeps.  Before that call, states are only checked, and read in the first step.
    Tensors of ``extra`` are on the CPU.  No code from the file is run.

    Everything is checked first, checksums included: an error before that leaves all as it was.
    With ``strict=False`` what does not fit is left as it is, and logged.  Parameters that a save
    with ``trainable_only`` has left out stay as they are, and have to be frozen here.

    Raises: MismatchError, with all differences, if the checkpoint is of other tensors;
    CheckpointError if it cannot be read; FileNotFoundError if there is none; ValueError if ranks
    were given different paths; RuntimeError if a rank does not join.  All on every rank.
    """
    folder, optimizers = as_path(path), as_list(optimizer)
    check_model(model)
    ranks = meet(model, optimizers, process_group, "zerofx.load()")
    ranks.check_same(path=folder, strict=strict)
    reading = _checked(folder, model, optimizers, ranks, strict)
    reading.read_on()
    return reading.extra


def resume(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: Any = None,
) -> dict[str, Any]:
    """Load the last checkpoint that ``zerofx.save`` has completed in ``folder``.  Collective.

    Returns its ``extra``; an empty dict, and nothing has changed, if there is none yet.  Call it at
    the start of a training that may be started again, on as many ranks or others.  Generators of
    random numbers go on where those of the same rank were, if there are as many ranks as then.
    A checkpoint that is damaged is logged, and the one before it loaded; a later save under its
    name renames it.

    Raises: MismatchError if the last one is of another model; CheckpointError if all are damaged,
    or one is of a newer format; RuntimeError if a rank does not join.  All on every rank.
    """
    optimizers = as_list(optimizer)
    check_model(model)
    ranks = meet(model, optimizers, process_group, "zerofx.resume()")
    ranks.check_same(folder=Path(folder).absolute())
    damaged = ranks.on_first(lambda: damaged_in(Path(folder)))
    paths = ranks.on_first(lambda: [path for _, path in reversed(complete_in(Path(folder)))])
    if damaged and not paths:
        raise CheckpointError(" ".join(damaged.values()))
    for path, words in damaged.items():
        logger.error("%s The last of the others is loaded.", words)
        SKIPPED.add(path.absolute())
    for path in paths:
        try:
            reading = _checked(path, model, optimizers, ranks, strict=True)
        except MismatchError:
            raise
        except (CheckpointError, FileNotFoundError) as error:
            if path == paths[-1]:
                raise
            logger.error("%s The one before it is loaded.", error)
            SKIPPED.add(path.absolute())
            continue
        reading.read_on()
        if reading.rng is not None:
            set_rng_state(reading.rng)
        else:
            logger.warning("%s is of other ranks: random numbers go on as seeded", path)
        return reading.extra
    return {}


def _checked(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, strict: bool
) -> _Reading:
    """A load that all ranks have checked, and that has not changed anything yet.  Collective."""
    readings: list[_Reading] = []

    def check() -> None:
        reading = _Reading(folder, model, optimizers, ranks)
        differences = reading.check(strict)
        if differences:
            logger.warning("zerofx.load left out what does not fit: %s", differences)
        readings.append(reading)

    ranks.together(check)
    return readings[0]


class _Reading:
    """One rank's part of a load, which has been checked."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self.optimizers = optimizers
        self.extra: dict[str, Any] = {}
        there = folder.resolve()  # who turns a link to another checkpoint later changes nothing
        metadata, _ = read_metadata(there)
        self.reader = Reader(there, metadata)
        saved = sort_out(metadata, set(parameter_names(model, optimizers).values()))
        self.values: dict[str, Any] = {}
        self.plan = Plan()
        if not saved.model:
            raise MismatchError(
                f"{folder} has no tensors under 'model', which is where zerofx.save and the "
                f"examples of torch.distributed.checkpoint put a model's: it has "
                f"{', '.join(saved.roots[:8]) or 'nothing'}. Save it as {{'model': ..., "
                "'optimizer': ...}."
            )
        left_out = self._value(saved.frozen) if saved.frozen is not None else ()
        match_model(self.plan, saved, model, left_out)
        if optimizers:
            match_optimizers(self.plan, saved, model, optimizers, self._value)
        match_extra(self.plan, saved, self.extra)
        self.rng: dict[str, Any] | None = None
        if len(saved.rng) == ranks.world_size:
            self.rng = self._value(saved.rng[ranks.rank])

    def _value(self, entry: str) -> Any:
        if entry not in self.values:
            self.reader.check_value(entry)
            self.values[entry] = self.reader.read_value(entry)
        return self.values[entry]

    def check(self, strict: bool) -> str:
        """Check all that will be read, and say what does not fit.

        Raises: MismatchError if something does not, and may not so; CheckpointError.
        """
        differences = self.plan.differences
        if differences and strict:
            raise MismatchError(
                f"{self.folder} does not fit: {differences}. Load it into what was saved, convert "
                "the model to the dtype that was saved, or leave out what does not fit with "
                "strict=False."
            )
        items = [self.reader.items(t.entry, t.boxes) for t in self.plan.targets]
        parts = [[item.storage_index for item in its] for its in items]
        both = list(zip(self.plan.targets, parts, strict=True))
        late = {target.entry: its for target, its in both if target.is_late}
        share = self._share_of([part for its in late.values() for part in its])
        self.files = Files(self.reader, late, share)
        now = [part for target, its in both if not target.is_late for part in its]
        self.reader.check([*now, *share])
        for entry in self.plan.values:
            self._value(entry)
        return str(differences)

    def _share_of(self, parts: Sequence[MetadataIndex]) -> set[MetadataIndex]:
        """What this rank checks of what all would, now and before a step."""
        return set(parts[self.ranks.rank :: self.ranks.world_size])

    def read_on(self) -> None:
        """Read everything into its place.  Collective.

        Raises: CheckpointError, on all ranks, if one cannot read what it could before.
        """
        with torch.no_grad(), ordinary_tensors():
            self.ranks.together(self._read)
        self.plan.clear()

    def _read(self) -> None:
        try:
            for optimizer in self.optimizers:
                if any(bound.stage > 0 for bound in bound_parameters(optimizer)):
                    attach_optimizer(optimizer)  # which keeps shards from now on
            for target in self.plan.targets:
                target.fill(self.files)
            for finish in self.plan.finish:
                finish(self.values)
        except Exception as error:
            raise CheckpointError(
                f"reading {self.folder} failed after it had been checked: {error}. Model and "
                "optimizer are a mix of old and new now: load a checkpoint before you go on."
            ) from error
