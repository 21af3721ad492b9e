"""A save that fails, or is killed, leaves what there was; one behind the training is as of then."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

import zerofx
from tests.kit.checkpoints import assert_same, built, file_size_limit, pair_of, states, train, zero
from tests.kit.covering import exhaustive, nightly
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx.checkpoint import folders
from zerofx.checkpoint import saving as writing
from zerofx.checkpoint.folders import Draft
from zerofx.errors import CheckpointError

# Disks that fail


class Full:
    """A file system that takes so many bytes on these ranks."""

    def __init__(self, ranks, room: int):
        self.ranks, self.room = ranks, room

    def __enter__(self):
        original = filesystem.FileSystem.create_stream
        room = [self.room if dist.get_rank() in self.ranks else 1 << 40]

        def open_limited(system, path, mode):
            stream = original(system, path, mode)
            if "w" in mode:
                return _limited(stream, room)
            return stream

        self.patch = mock.patch.object(filesystem.FileSystem, "create_stream", open_limited)
        self.patch.__enter__()

    def __exit__(self, *error):
        self.patch.__exit__(*error)


def _limited(context, room):
    @contextlib.contextmanager
    def opened():
        with context as stream:
            write = stream.write

            class Limited:
                def __getattr__(self, name):
                    return getattr(stream, name)

                def write(self, data):
                    room[0] -= len(data)
                    if room[0] < 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return write(data)

            yield Limited()

    return opened()


def fill(root: str, room: int, asynchronous: bool) -> tuple[str, list[str]]:
    pair, root = built(), Path(root)
    train(zero(), pair, range(1))
    zerofx.save(root / "old", *pair)
    with Full([1], room), pytest.raises(CheckpointError) as caught:
        zerofx.save(root / "new", *pair, asynchronous=asynchronous).wait()
    dist.barrier()
    left = sorted(os.listdir(root))
    zerofx.load(zerofx.latest(root), *built(1))
    zerofx.save(root / "new", *pair)  # there is room again
    zerofx.load(root / "new", *built(1))
    return str(caught.value), left


@pytest.mark.nightly
@pytest.mark.parametrize(("room", "asynchronous"), [(0, False), (3000, True)])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    room,
    asynchronous,
    ranks,  # noqa: F811
    tmp_path,
):
    for words, left in ranks(2).run(fill, str(tmp_path), room, asynchronous):
        assert left == ["old"]
        assert "rank 1: OSError: [Errno 28] No space left on device" in words
        assert "earlier checkpoints are whole" in words


def fill_files(root: str, limited: list[int], parts: list[float], asynchronous: bool) -> list[str]:
    """Save where the kernel takes a part of the file that is written, and then all of it."""
    pair, root = built(), Path(root)
    train(zero(), pair, range(1))
    zerofx.save(root / "old", *pair)
    nbytes = min(file.stat().st_size for file in (root / "old").glob("*.distcp"))
    said = []
    for number, part in enumerate(parts):
        train(zero(), pair, range(1))
        limit = file_size_limit(int(nbytes * part), limited)
        with limit, pytest.raises(CheckpointError) as caught:
            zerofx.save(root / "new", *pair, asynchronous=asynchronous).wait()
        said.append(str(caught.value))
        dist.barrier()
        assert zerofx.latest(root) == root / ("old" if number == 0 else f"{number - 1}")
        assert not (root / "new").exists() and not list(root.glob(".*"))
        zerofx.load(zerofx.latest(root), *built(1))
        zerofx.save(root / str(number), *pair)
        again = built(1)
        zerofx.load(root / str(number), *again)
        assert_same(states(again), states(pair))
    return said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("limited", "asynchronous"),
    [exhaustive([0], False), ([1], True), exhaustive([0, 1], False), exhaustive([0], True)],
)
def test_what_the_kernel_refuses_leaves_the_old_checkpoint(
    limited,
    asynchronous,
    ranks,  # noqa: F811
    tmp_path,
):
    parts = [0, 0.3, 0.99]
    results = ranks(2).run(fill_files, str(tmp_path), limited, parts, asynchronous)
    for rank, said in enumerate(results):
        failed = rank if rank in limited else limited[0]
        for words in said:
            assert f"rank {failed}: " in words and "File too large" in words
            assert "earlier checkpoints are whole" in words


def save_behind_and_forget(root: str) -> str:
    pair = pair_of()
    with Full([0], 0):
        saving = zerofx.save(Path(root) / "a", *pair, asynchronous=True)
        while not saving.done():
            time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        zerofx.save(Path(root) / "b", *pair)
    zerofx.save(Path(root) / "b", *pair)
    return str(caught.value)


def test_an_error_that_nobody_waited_for_is_the_next_saves(ranks, tmp_path):  # noqa: F811
    for words in ranks(2).run(save_behind_and_forget, str(tmp_path)):
        assert str(tmp_path / "a") in words and "No space left" in words
    assert os.listdir(tmp_path) == ["b"]


# Processes that are killed


def die(root: str, when: str) -> None:
    pair = pair_of()
    zerofx.save(Path(root) / "older", *pair, keep=2)
    zerofx.save(Path(root) / "old", *pair, keep=2)
    if dist.get_rank() == 0:
        module, name, suffix = {
            "writing": (writing, "write_items", ""),
            "publishing": (os, "rename", "/new"),
            "removing": (shutil, "rmtree", ".removing"),
        }[when]
        original = getattr(module, name)

        def kill(*arguments, **named):
            if not suffix or (str(arguments[-1]).endswith(suffix) and os.path.exists(arguments[0])):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(module, name, kill)
    zerofx.save(Path(root) / "new", *pair, keep=2)


@pytest.mark.parametrize("when", ("publishing", nightly("writing"), nightly("removing")))
def test_what_a_killed_save_leaves_is_no_checkpoint_and_is_removed(when, tmp_path):
    with contextlib.closing(Ranks(2)) as two:
        with pytest.raises(RuntimeError, match="died, exit code -9"):
            two.run(die, str(tmp_path), when)
    left = set(os.listdir(tmp_path))
    if when == "removing":
        assert left == {".older.removing", "new", "old"}
    else:
        # The other rank may have seen that rank 0 was gone; only rank 0 removes anything.
        assert left == {".new.saving", "old", "older"}
    assert zerofx.latest(tmp_path) == tmp_path / ("new" if when == "removing" else "old")
    zerofx.load(zerofx.latest(tmp_path), *pair_of(1))
    zerofx.save(tmp_path / "newer", *pair_of())
    assert set(os.listdir(tmp_path)) == {*left, "newer"} - {".older.removing", ".new.saving"}


def test_the_last_few_are_kept_and_those_that_stay_do(tmp_path):
    pair = pair_of()
    zerofx.save(tmp_path / "best", *pair)
    (tmp_path / "notes").mkdir()
    for number in (10, 9, 8, 7):  # the order counts, not the names
        zerofx.save(tmp_path / f"step-{number}", *pair, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["best", "notes", "step-7", "step-8"]
    assert zerofx.latest(tmp_path) == tmp_path / "step-7"
    assert zerofx.latest(tmp_path / "none") is None


def keep_the_last(root: str) -> list[list[str]]:
    """What there is after each of three saves; rank 1 reads from the first up to the last one."""
    pair, found = pair_of(), []
    reads_the_first = {Path(root) / "0"} if dist.get_rank() == 1 else set()
    for number in range(3):
        unread = reads_the_first if number < 2 else set()
        with mock.patch.object(writing, "in_use", lambda unread=unread: unread):
            zerofx.save(f"{root}/{number}", *pair, keep=1)
        dist.barrier()
        found.append(sorted(os.listdir(root)))
        dist.barrier()
    return found


def test_what_another_rank_is_still_to_read_is_kept(ranks, tmp_path):  # noqa: F811
    expected = [["0"], ["0", "1"], ["2"]]
    assert ranks(2).run(keep_the_last, str(tmp_path)) == [expected, expected]


def test_a_link_to_a_checkpoint_is_not_another(tmp_path):
    pair = pair_of()
    for number in range(3):
        zerofx.save(tmp_path / f"step-{number}", *pair, keep=2)
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(f"step-{number}")
    assert sorted(os.listdir(tmp_path)) == ["current", "step-1", "step-2"]
    assert zerofx.latest(tmp_path) == tmp_path / "step-2"
    zerofx.load(tmp_path / "current", *pair_of(1))
    with pytest.raises(FileExistsError):
        zerofx.save(tmp_path / "current", *pair)


def test_a_file_is_closed_once_if_there_is_no_second_one(tmp_path):
    (tmp_path / ".a.saving" / "left").mkdir(parents=True)
    draft, lock = Draft(tmp_path / "a"), folders._locked
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(folders, "remove_leftovers"))
        refused = [lock(tmp_path / ".a.saving" / folders.NOTES, os.O_CREAT), PermissionError()]
        stack.enter_context(mock.patch.object(folders, "_locked", side_effect=refused))
        stack.enter_context(pytest.raises(CheckpointError, match="PermissionError"))
        with draft.written():
            draft.begin()


def test_who_is_being_written_is_left_alone(tmp_path):
    being_written = Draft(tmp_path / "new")
    being_written.begin()
    with pytest.raises(FileExistsError, match="another process is writing"):
        zerofx.save(tmp_path / "new", *pair_of())
    zerofx.save(tmp_path / "other", *pair_of())
    assert sorted(os.listdir(tmp_path)) == [".new.saving", "other"]
    being_written.discard()
    zerofx.save(tmp_path / "new", *pair_of())


# Behind the training


@pytest.mark.nightly
def test_what_is_written_behind_is_as_it_was_when_it_was_saved(tmp_path):
    pair = pair_of()
    before, go = states(pair), threading.Event()
    write = writing.write_items

    def late(*arguments):
        assert go.wait(30)
        return write(*arguments)

    extra = {"a": torch.zeros(2), "b": [torch.zeros(2)]}
    with mock.patch.object(writing, "write_items", late):
        saving = zerofx.save(tmp_path / "a", *pair, extra, asynchronous=True)
        assert not saving.done() and zerofx.latest(tmp_path) is None
        with pytest.raises(TimeoutError, match="still being written"):
            saving.wait(0.01)
        with torch.no_grad():
            for tensor in [*pair[0].parameters(), extra["a"], extra["b"][0]]:
                tensor.fill_(7)
            for state in pair[1].state.values():
                for value in state.values():
                    value.fill_(7)
        pair[1].param_groups[0]["lr"] = 7.0
        go.set()
        assert saving.wait() == tmp_path / "a" and saving.done()
    loaded = pair_of(1)
    found = zerofx.load(tmp_path / "a", *loaded)
    assert_same(states(loaded), before)
    assert_same(found, {"a": torch.zeros(2), "b": [torch.zeros(2)]})


def test_a_relative_path_is_where_the_process_was_when_it_saved(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    go, write = threading.Event(), writing.write_items

    def late(*arguments):
        assert go.wait(30)
        return write(*arguments)

    with mock.patch.object(writing, "write_items", late):
        saving = zerofx.save("here/a/", *pair_of(), asynchronous=True)
        os.chdir("elsewhere")
        go.set()
        assert saving.wait() == tmp_path / "here" / "a"
    assert zerofx.latest(tmp_path / "here") == tmp_path / "here" / "a"
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_save_waits_for_the_one_before(tmp_path):
    pair, order = pair_of(), []
    publish = Draft.publish

    def noted(draft, notes):
        if draft.target.name == "a":
            time.sleep(0.2)
        order.append(draft.target.name)
        publish(draft, notes)

    with mock.patch.object(Draft, "publish", noted):
        first = zerofx.save(tmp_path / "a", *pair, asynchronous=True)
        second = zerofx.save(tmp_path / "b", *pair, asynchronous=True)
        assert first.done()
        second.wait()
    assert order == ["a", "b"]


@pytest.mark.parametrize("is_on", (True, False))
def test_garbage_is_collected_while_files_are_written_and_not_while_they_are_planned(
    is_on, tmp_path
):
    seen, plan = {}, dcp.DefaultSavePlanner.create_local_plan
    write = writing.write_items

    def noted_plan(planner):
        seen["planning"] = gc.isenabled()
        return plan(planner)

    def noted_write(*arguments):
        seen["writing"] = gc.isenabled()
        return write(*arguments)

    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with (
            mock.patch.object(dcp.DefaultSavePlanner, "create_local_plan", noted_plan),
            mock.patch.object(writing, "write_items", noted_write),
        ):
            zerofx.save(tmp_path / "a", *pair_of())
            assert seen == {"planning": False, "writing": is_on} and gc.isenabled() is is_on
        fails = mock.patch.object(writing, "write_items", side_effect=OSError)
        with fails, pytest.raises(CheckpointError):
            zerofx.save(tmp_path / "b", *pair_of())
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
