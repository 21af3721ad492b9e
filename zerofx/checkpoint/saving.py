"""``zerofx.save``: every rank writes its part; the checkpoint appears when all parts are there."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from zerofx import compat
from zerofx.checkpoint.barrier import Ranks, Saving, meet
from zerofx.checkpoint.contents import Contents, as_list, check_model
from zerofx.checkpoint.folders import (
    METADATA,
    Draft,
    Notes,
    as_path,
    checkpoints_in,
    prune,
)
from zerofx.checkpoint.pieces import Piece, write_value
from zerofx.checkpoint.reading import in_use
from zerofx.errors import CheckpointError
from zerofx.garbage import without_collections
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.parameters.snapshots import Snapshot


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    trainable_only: bool = False,
    and_frozen: Collection[str] = (),
    process_group: Any = None,
) -> Saving:
    """Write a checkpoint to the new folder ``path``, in torch's distributed format.  Collective.

    Each rank writes its shards and sends no tensors to others; the folder appears under its name
    when everything is on the disk.  ``extra`` holds values of the user's by name; if several ranks
    give one name, the lowest rank's value is saved.  ``keep`` is how many checkpoints of this
    folder that were saved with ``keep`` remain: older ones are removed.

    With ``asynchronous`` the shards are copied to host memory and written while the training goes
    on.  The next save or load waits for that, and so does the interpreter before it ends.  Either
    way ``save(...).wait()`` returns the path when the checkpoint is there.

    With ``trainable_only`` parameters that require no gradient are left out, but for those that
    ``and_frozen`` names; buffers are saved.
    Such a checkpoint loads into a model in which the same parameters are frozen, and leaves them as
    they are.

    Gradients are not saved.

    Raises: FileExistsError if ``path`` exists; ValueError if ranks were given different paths, or
    for values that could not be read again; CheckpointError if it cannot be written; RuntimeError
    if a rank does not join.  Every rank raises, and earlier checkpoints stay as they are.
    """
    target, optimizers = as_path(path), as_list(optimizer)
    check_model(model)
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(
            f"extra is of type {type(extra).__name__}; expected values by name, such as "
            "{'step': 100}, or None"
        )
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is {keep!r}; expected how many checkpoints to keep, 1 or more")
    ranks = meet(model, optimizers, process_group, "zerofx.save()")
    ranks.check_same(
        path=target,
        keep=keep,
        asynchronous=asynchronous,
        trainable_only=trainable_only,
        and_frozen=sorted(and_frozen),
    )
    collected: dict[str, Any] = {}
    snapshot = Snapshot()  # of what is written later
    draft = Draft(target, ranks.rank)

    def begin() -> None:
        if ranks.rank == 0:
            draft.begin()
        contents = Contents(ranks.rank, ranks.world_size, snapshot if asynchronous else None)
        collected.update(contents.collect(model, optimizers, extra, trainable_only, and_frozen))
        snapshot.begin()

    def write() -> None:
        with draft.written():
            snapshot.run()
            _write(collected, draft, ranks, keep)

    with draft.written():
        ranks.together(begin)
    saving = Saving(target)
    if asynchronous:
        saving.start(write)
    else:
        write()
    return saving


def _write(contents: dict[str, Any], draft: Draft, ranks: Ranks, keep: int | None) -> None:
    """Plan and write as ``torch.distributed.checkpoint.save`` does, then publish.

    That function needs a group which ``destroy_process_group`` ends; this one talks in ``ranks``.
    """
    writer = dcp.FileSystemWriter(draft.folder)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    described: list[Metadata] = []  # on rank 0
    file = f"__{ranks.rank}_0.distcp"  # as torch's writer would name it

    def plan() -> SavePlan:
        planner.set_up_planner(contents, is_coordinator=ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        return planner.create_local_plan()

    def share_out(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        described.append(metadata)
        return plans

    def write() -> tuple[list[WriteResult], set[Path]]:
        with writer.fs.create_stream(draft.folder / file, "wb") as stream:
            return write_items(stream, file, shared.items, planner), in_use()

    def publish(written: list[tuple[list[WriteResult], set[Path]]]) -> list[None]:
        (metadata,) = described
        results = [its for its, _ in written]
        with without_collections():
            writer.finish(metadata, results)
        _check_files(draft.folder, sum(results, []))
        parent = draft.target.parent
        crc = zlib.crc32((draft.folder / METADATA).read_bytes())
        complete, _ = checkpoints_in(parent)
        serial = complete[-1][0].serial + 1 if complete else 1
        draft.publish(Notes(serial, keep, crc))
        if keep is not None:
            prune(parent, keep, set().union(*(unread for _, unread in written)))
        return [None] * ranks.world_size

    with without_collections():
        shared = ranks.exchange(plan, share_out)
    ranks.exchange(write, publish)


def write_items(
    stream: IO[bytes], name: str, items: Sequence[WriteItem], planner: dcp.DefaultSavePlanner
) -> list[WriteResult]:
    """Write a rank's part of a checkpoint to the file ``name``, one tensor in memory at a time.

    torch's writer makes the same of it, but keeps all tensors until the file is complete (2.11 to
    2.14).
    """
    results = []
    for item in items:
        found, start = planner.state_dict[item.index.fqn], stream.tell()
        if isinstance(found, bytes):
            stream.write(found)
        else:
            with compat.tensors.past_all_modes(), ordinary_tensors():
                if isinstance(found, Piece):
                    values = found.part.view_at(found.read(), item.index.offset)
                else:
                    values = planner.lookup_object(item.index)
                write_value(values.detach().to("cpu", copy=True), stream)
            del values  # before the next is read
        nbytes = stream.tell() - start
        place = compat.tensors.place_in_file(name, start, nbytes)
        results.append(WriteResult(item.index, nbytes, place))
    os.fsync(stream.fileno())
    return results


def _check_files(folder: Path, written: Iterable[WriteResult]) -> None:
    """Raise CheckpointError unless the files of all ranks are here, in full length."""
    ends: dict[str, int] = {}
    for info in (result.storage_data for result in written):
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    absent = [
        path
        for path, end in sorted(ends.items())
        if not (folder / path).is_file() or (folder / path).stat().st_size < end
    ]
    if absent:
        raise CheckpointError(
            f"{folder.parent} is not the same folder for all ranks: rank 0 does not see "
            f"{', '.join(absent[:5])}, which others have written there. Save to a file system that "
            "all ranks share."
        )
