"""Run a function on N gloo ranks: processes started once and reused by all tests of a process.

A function and its arguments travel by pickle, so it must be at the top level of a module.

A rank is forked from a server that has imported what all need and done nothing else.  Neighbours
have servers of their own: ranks that hash strings alike would hide an order that depends on hashes.
Behind a module's tests they forget what these have compiled.  New ones would begin without the
caches of a process that has compiled before: 0.9 s of a processor for each rank (November 2026).
"""

from __future__ import annotations

import atexit
import datetime
import functools
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from multiprocessing import connection, forkserver, resource_tracker
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from zerofx.deferred.ledger import LEDGER
from zerofx.runtime.comm.peer_memory import PeerMemory

GRACE_S = 5.0  # how long other ranks may still answer after one has failed
EXIT_S = 30.0


def server_of(rank: int) -> forkserver.ForkServer:
    """Return what ranks of this number are forked from; it ends with this process."""
    return _server(rank % 2)


@functools.cache
def _server(number: int) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.kit.preloaded"])
    return server


def start(process: multiprocessing.process.BaseProcess, rank: int) -> None:
    """Start a process of the context ``forkserver`` as one of this rank."""
    connect = server_of(rank).connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()


def use_own_server() -> None:
    """Have what this process starts, itself forked from a server, forked from the same one."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # or it begins another


class Ranks:
    """N worker processes in one gloo group.  For ``contextlib.closing``.

    Without ``peer_memory`` all that they exchange goes through sockets.
    """

    def __init__(
        self, world_size: int, group_timeout_s: float = 60.0, peer_memory: bool = True
    ) -> None:
        self.world_size = world_size
        self.group_timeout_s = group_timeout_s
        self.peer_memory = peer_memory
        self.workers: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[connection.Connection] = []

    def run(self, fn, *args, timeout_s: float = 120.0) -> list:
        """Return ``fn(*args)`` of every rank, by rank.

        Raises: what the lowest failing rank raised, with that rank's traceback as a note;
        RuntimeError for a worker that died, TimeoutError after ``timeout_s``.  Unless all ranks
        returned or all raised, the workers are killed and the next run has new ones.
        """
        if not self.workers:
            self._spawn()
        request = pickle.dumps((fn, args))
        for pipe in self.pipes:
            pipe.send_bytes(request)
        answers = self._answers(time.monotonic() + timeout_s)
        raised = [rank for rank in sorted(answers) if answers[rank][1] is not None]
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if silent or 0 < len(raised) < self.world_size:
            self.kill()
        if raised:
            _, error, trace = answers[raised[0]]
            error.add_note(trace)
            raise error
        if silent:
            raise TimeoutError(f"rank(s) {silent} did not answer within {timeout_s:g} s")
        return [answers[rank][0] for rank in range(self.world_size)]

    def close(self) -> list[int | None]:
        """End the workers and return their exit codes."""
        for pipe in self.pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:  # that worker is gone already
                pass
        for worker in self.workers:
            worker.join(EXIT_S)
        return self.kill()

    def _spawn(self) -> None:
        # The parent serves the store: its port is free by construction, and a rank that dies
        # does not take the store with it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            server_of(rank).ensure_running()  # they import side by side
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            settings = (rank, self.world_size, self.store.port, self.group_timeout_s)
            worker = context.Process(
                target=_serve,
                args=(theirs, dict(os.environ), *settings, self.peer_memory),
                daemon=True,
            )
            start(worker, rank)
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.send_bytes(b"all are there")  # a busy machine takes longer than a group waits

    def _answers(self, deadline: float) -> dict[int, tuple]:
        answers: dict[int, tuple] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.workers[rank].join(GRACE_S)
                    code = self.workers[rank].exitcode
                    answers[rank] = (None, RuntimeError(f"rank {rank} died, exit code {code}"), "")
                if answers[rank][1] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def kill(self) -> list[int | None]:
        """End the workers at once and return their exit codes."""
        for worker in self.workers:
            worker.kill()
            worker.join()
        codes = [worker.exitcode for worker in self.workers]
        for pipe in self.pipes:
            pipe.close()
        self.workers, self.pipes = [], []
        return codes


def _serve(
    pipe: connection.Connection,
    environment: dict[str, str],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    peer_memory: bool,
) -> None:
    pipe.recv_bytes()
    os.environ.clear()  # the server's is of another time
    os.environ.update(environment)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if not peer_memory:
        PeerMemory.decline(dist.group.WORLD)
    while request := pipe.recv_bytes():
        try:
            fn, args = pickle.loads(request)
            reply = pickle.dumps((fn(*args), None, ""))
        except Exception as error:
            reply = _dumps_error(error, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send_bytes(reply)
        if "coverage" in sys.modules:
            _save_coverage()
    if dist.is_initialized():
        dist.destroy_process_group()


def _save_coverage() -> None:
    """Write down now what has been covered: ranks are killed in the end."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.save()


def _dumps_error(error: Exception, trace: str) -> bytes:
    try:
        reply = pickle.dumps((None, error, trace))
        pickle.loads(reply)  # some errors pickle but cannot be rebuilt
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return reply


class Kept:
    """Groups of ranks that outlive a module, by their size and their way to talk."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, bool], Ranks] = {}
        self.environments: dict[tuple[int, bool], dict[str, str]] = {}
        self.used: set[Ranks] = set()

    def of(self, world_size: int, peer_memory: bool) -> Ranks:
        """Return ranks that have this process's environment of now."""
        key = (world_size, peer_memory)
        group = self.groups.setdefault(key, Ranks(world_size, peer_memory=peer_memory))
        if self.environments.get(key) != (now := _environment()):
            group.kill()
            self.environments[key] = now
        self.used.add(group)
        return group

    def forget(self) -> None:
        """Have the ranks that were used drop what they have compiled, as this process does."""
        for group in self.used:
            if group.workers:
                try:
                    group.run(forget)
                except Exception:  # a test has left them otherwise occupied
                    group.kill()
        self.used.clear()

    def end(self) -> None:
        for group in self.groups.values():
            group.kill()  # nine orderly exits would take as many seconds


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def forget() -> None:
    """Spare later modules what this one leaves: millions of objects, after a while.

    Also the storages of planned models, which are empty, and which something of torch's holds on to
    (each plan leaves one or more): tests count what of a model is not there.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
    LEDGER._memories.clear()


@functools.cache
def kept() -> Kept:
    found = Kept()
    atexit.register(found.end)
    return found


@pytest.fixture(scope="module", name="ranks")
def ranks_fixture():
    """``ranks(n)``: n ranks, the same processes for every test that asks."""
    yield from _kept_ranks(peer_memory=True)


@pytest.fixture(scope="module", name="ranks_on_sockets")
def ranks_on_sockets_fixture():
    """``ranks``, of which none reads another's memory."""
    yield from _kept_ranks(peer_memory=False)


@pytest.fixture(scope="module", name="ranks", params=(True, False), ids=("peer_memory", "sockets"))
def ranks_either_way_fixture(request):
    """``ranks``, for tests that hold for each way to talk on one machine."""
    yield from _kept_ranks(request.param)


def _kept_ranks(peer_memory: bool):
    kept().of(2, peer_memory).run(_nothing)  # what starting takes is not the first test's
    yield lambda world_size: kept().of(world_size, peer_memory)
    kept().forget()


def _nothing() -> None:
    pass
