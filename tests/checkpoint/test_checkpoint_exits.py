"""A process that ends right after a save behind its back completes it, or ends as failed, soon.

Ranks are forked as in ``tests/kit/ranks.py``, but end as a script does: threads are waited for, and
handlers run.  The store is rank 0's, and ends with it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.kit import ranks
from tests.kit.covering import nightly
from zerofx.checkpoint.barrier import Ranks, Saving
from zerofx.checkpoint.folders import Draft
from zerofx.errors import RankError

END_S = 60.0  # until a rank that is still there counts as one that hangs
CODES = {
    "end": 0,
    "destroy": 0,
    "raise": 1,
    "exit": 3,
    "SIGINT": 130,
    "SIGTERM": -signal.SIGTERM,
    "os._exit": 4,
    "full": 1,
}
UNWRITTEN = ("SIGTERM", "os._exit", "full")  # no Python runs after the first two


def end(way: str) -> None:
    if way == "destroy" and dist.is_initialized():
        dist.destroy_process_group()
    elif way == "raise":
        raise RuntimeError("the training has failed")
    elif way == "exit":
        sys.exit(3)
    elif way.startswith("SIG"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored behind a shell
        os.kill(os.getpid(), getattr(signal, way))
    elif way == "os._exit":
        os._exit(4)


def save_and_end(rank: int, root: str, port: int, ways: Sequence[str], delay_s: float) -> None:
    torch.set_num_threads(1)
    if len(ways) > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ways))
    publish = Draft.publish

    def publish_late(*arguments):
        time.sleep(delay_s)
        if "full" in ways:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        publish(*arguments)

    Draft.publish = publish_late
    atexit.register(lambda: os.write(2, b"The handler ran.\n"))
    zerofx.save(Path(root) / "last", torch.nn.Linear(3, 5), asynchronous=True)
    time.sleep(random.uniform(0, delay_s / 2))
    end(ways[rank])


def leave(rank: int, root: str, *arguments) -> None:
    """Be the script ``save_and_end``."""
    gc.freeze()  # what was imported: to collect it at exit takes a second
    os.dup2(os.open(f"{root}/{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(END_S * 0.9)  # where a rank that hangs is
    code = 0
    try:
        save_and_end(rank, root, *arguments)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    ctypes.pythonapi.Py_Exit(code)


def exit_codes(root: Path, ways: Sequence[str], delay_s: float = 0.05) -> list[int | None]:
    """The code with which each rank has ended; None for one that has not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    arguments = (str(root), port, ways, delay_s)
    processes = [
        context.Process(target=leave, args=(rank, *arguments)) for rank in range(len(ways))
    ]
    for rank, process in enumerate(processes):
        ranks.start(process, rank)
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def check(root: Path, ways: Sequence[str], delay_s: float = 0.05) -> None:
    root.mkdir(exist_ok=True)
    codes = exit_codes(root, ways, delay_s)
    logs = [(root / f"{rank}.log").read_text() for rank in range(len(ways))]
    said = f"{ways} ended with {codes}: {logs}"
    expected = [CODES[way] for way in ways]
    last = zerofx.latest(root)
    if not set(UNWRITTEN) & set(ways):
        assert codes == expected and last is not None, said
    for log, way in zip(logs, ways, strict=True):
        assert log.count("The handler ran.") == (way not in ("SIGTERM", "os._exit")), said
    for code, way, log in zip(codes, ways, logs, strict=True):
        # Without one that was killed nothing can be completed: the others fail then, in words.
        assert code in ((1,) if "full" in ways else (CODES[way], 1)), said
        assert code != 0 or last is not None, said
        assert code != 1 or way == "raise" or "last was not written: " in log, said
    if last is not None:
        zerofx.load(last, torch.nn.Linear(3, 5))


class Lost:
    """A connection whose other end receives nothing any more; gloo forgets what it was sent."""

    def __init__(self, *arrived, words="closed by peer"):
        self.arrived = list(arrived)  # tensors that it has sent before
        self.words = words

    def send(self, tensors, rank, tag):
        return mock.Mock(wait=mock.Mock(side_effect=AssertionError("waits for what is forgotten")))

    def recv(self, tensors, rank, tag):
        if not self.arrived:
            return mock.Mock(wait=mock.Mock(side_effect=RuntimeError(self.words)))
        tensors[0].copy_(self.arrived.pop(0))
        return mock.Mock()


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_that_ends_before_it_has_what_was_sent_is_missed_at_once(rank):
    report = torch.tensor(bytearray(pickle.dumps((None, "its"))), dtype=torch.uint8)
    connection = Lost(torch.tensor([len(report)]), report) if rank == 0 else Lost()
    with pytest.raises(RankError, match="lost the other ranks.*closed by peer"):
        Ranks(connection, rank, 2).together(lambda: "ours")


def test_a_rank_that_does_not_answer_in_time_may_still_be_there():
    connection = Lost(words="Timed out waiting 1800000ms for recv operation to complete")
    with pytest.raises(RankError, match="rank 1 has had no answer .* in 30 minutes.*Timed out"):
        Ranks(connection, 1, 2).together(lambda: "ours")


def test_a_save_behind_that_is_ended_by_anything_has_failed(tmp_path):
    saving = Saving(tmp_path / "a")
    saving.start(mock.Mock(side_effect=SystemExit(3)))
    with pytest.raises(zerofx.CheckpointError, match="a was not written: SystemExit"):
        saving.wait()


@pytest.mark.slow(reason="processes of its own end")
@pytest.mark.parametrize(
    "ways",
    [
        ("SIGINT",),
        ("destroy", "destroy"),
        nightly(("raise", "exit")),
        ("os._exit", "end"),
        ("full", "end"),
    ],
    ids=",".join,
)
def test_the_last_save_is_completed_or_the_process_fails(ways, tmp_path):
    check(tmp_path, ways)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("way", CODES)
def test_every_way_to_end_many_times(way, world_size, tmp_path):
    """All ranks end so, or one of them, at any time while the checkpoint is written."""
    for number, others in zip(range(10), itertools.cycle((way, "destroy")), strict=False):
        ways = [others] * world_size
        ways[number % world_size] = way
        check(tmp_path / str(number), ways, delay_s=random.choice((0, 0.01, 0.1)))
