"""Have streams, collectives, jobs and operations on files take note of what waits for what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zerofx import accelerator, compat
from zerofx.order.notes import Notes
from zerofx.order.operators import Watch, of_compiled
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.transport import LocalTransport, Started, Work
from zerofx.runtime.memory.pages import BufferPool
from zerofx.runtime.storage import copies
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.disk.transfers import Operation, Transfers
from zerofx.runtime.storage.memory import HostMemory
from zerofx.worker import Job, Worker

patch = mock.patch.object


def hooks(notes: Notes) -> Iterator[Any]:
    """Yield contexts in which this process's runtime notes what it does."""
    yield patch(copies, "module_of", partial(_module, notes))
    yield patch(Copies, "_copy_beside", _copy_beside(notes, Copies._copy_beside))
    yield patch(HostMemory, "empty", _empty(notes, HostMemory.empty))
    # What a pool gives out again is held by nothing: as memory that is taken anew.
    yield patch(BufferPool, "empty", lambda pool, numel, like: like.new_empty(numel))
    yield patch(Communicator, "_start", _collective_start(notes, Communicator._start))
    for name in ("gather_whole", "broadcast"):  # of full_params and state dicts, between steps
        yield patch(Communicator, name, _as_a_call(notes, getattr(Communicator, name)))
    yield from of_jobs(notes)
    yield from of_files(notes)
    yield from of_compiled(notes)


# Streams


class Noted:
    """A stream or an event of a device that notes who waits for it, or for whom it waits."""

    def __init__(self, notes: Notes, real: Any) -> None:
        self._notes, self._real = notes, real
        self._mark: Any = None  # what comes before an event

    @property
    def line(self) -> int:
        return self._notes.line_of(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __hash__(self) -> int:
        return hash(self._real)

    def __eq__(self, other: object) -> bool:
        return self._real == getattr(other, "_real", other)

    def wait_stream(self, other: Noted) -> None:
        mark = self._notes.mark(other.line, "wait_stream")
        self._notes.after(self.line, mark, "wait_stream")
        self._real.wait_stream(other._real)

    def wait_event(self, event: Any) -> None:
        if getattr(event, "_mark", None) is not None:
            self._notes.after(self.line, event._mark, "wait_event")
        self._real.wait_event(getattr(event, "_real", event))

    def record(self, stream: Noted) -> None:
        self._mark = self._notes.mark(stream.line, "record")
        self._real.record(stream._real)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._notes.after(self._notes.thread, self._mark, "synchronize")
        self._real.synchronize()


def _module(notes: Notes, device: torch.device) -> Any:
    """Return what a device's module has for copies beside a step, noted."""
    module = accelerator.module_of(device)
    return SimpleNamespace(
        Stream=lambda *given: Noted(notes, module.Stream(*given)),
        Event=lambda: Noted(notes, module.Event()),
        current_stream=lambda *given: Noted(notes, module.current_stream(*given)),
        stream=lambda stream: module.stream(stream._real),
    )


def _copy_beside(notes: Notes, original: Callable) -> Callable:
    def copy(moves: Copies, *given: Any) -> Any:
        for key, stream in moves._streams.items():  # of before there was a check
            moves._streams[key] = stream if isinstance(stream, Noted) else Noted(notes, stream)
        return original(moves, *given)

    return copy


def _empty(notes: Notes, original: Callable) -> Callable:
    def empty(host: HostMemory, *given: Any, **options: Any) -> Tensor:
        memory = original(host, *given, **options)  # its end waits for its copies before it goes
        notes.blocks.before_given[memory.untyped_storage().data_ptr()] = host._settle
        return memory

    return empty


# Collectives


class _NotedWork(Work):
    """A collective that notes its wait, behind which it may do a part of it itself."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self._work, self._on_wait = work, on_wait

    def wait(self) -> None:
        self._on_wait()
        if self._work is not None:
            self._work.wait()

    def abandon(self) -> None:
        Started(None, self._work).abandon()


def _collective_start(notes: Notes, original: Callable) -> Callable:
    """Note a collective as a line of its own, which ends when it is waited for."""

    def start(communicator: Communicator, kind: str, nbytes: int, launch: partial) -> Tensor:
        result = original(communicator, kind, nbytes, launch)
        is_beside = accelerator.is_accelerator(result.device)
        line = notes.clocks.line(f"collective ({kind})")
        begin = notes.mark(notes.stream if is_beside else notes.thread, "hand over")
        notes.after(line, begin, "begin", given=True)
        read = compat.tensors.tensors_in((launch.args, launch.keywords))
        ranges = [one for tensor in read for one in notes.ranges(tensor, False, kind)]
        is_there = launch.func is Started  # from before: nothing writes to it
        if not is_there and not isinstance(getattr(launch.func, "__self__", None), LocalTransport):
            ranges += notes.ranges(result, True, kind)
        notes.operator(kind, ranges, line=line)
        end, started = notes.end(line), communicator._in_flight[id(result)]

        def on_wait() -> None:
            notes.after(notes.stream if is_beside else notes.thread, end, "collective wait")

        started.work = _NotedWork(started.work, on_wait)
        return result

    return start


def _as_a_call(notes: Notes, original: Callable) -> Callable:
    """Note what blocks between steps as a call of its own, in whichever thread it is."""

    def run(*given: Any, **options: Any) -> Any:
        notes.begin_call()
        try:
            return original(*given, **options)
        finally:
            notes.end_call()

    return run


# Jobs of threads


def of_jobs(notes: Notes) -> Iterator[Any]:
    """Yield what notes that a worker's job comes after it was handed over, and before its result.

    Threads of the user's own are left alone, and those of ``replay``, which are of no step.
    """
    yield patch(Worker, "start", _worker_start(notes, Worker.start))
    yield patch(Worker, "abandon", ended(notes, Worker.abandon, "shutdown"))
    yield patch(Job, "result", ended(notes, Job.result, "result"))


def job_of(notes: Notes, done: Any, job: Callable) -> Callable:
    """Return a job that begins after now, and ends before what waits for ``done``."""
    begin = notes.mark(notes.thread, "hand over")

    def run(*args: Any, **kwargs: Any) -> Any:
        notes.after(notes.thread, begin, "begin", given=True)
        try:
            with Watch(notes) if notes.is_on else contextlib.nullcontext():
                return job(*args, **kwargs)
        finally:
            done.order_end = notes.mark(notes.thread, "end")

    return run


class _Done:
    """Holds the mark of a job's end: of one job, or of the last that a worker has ended."""

    order_end: Any = None


def _worker_start(notes: Notes, original: Callable) -> Callable:
    def start(worker: Worker, job: Callable[[], Any]) -> Job:
        done, last = _Done(), worker.__dict__.setdefault("order_done", _Done())
        noted = job_of(notes, done, job)

        def run() -> Any:
            try:
                return noted()
            finally:
                last.order_end = done.order_end  # which knows of the ends before, in one thread

        started = original(worker, run)
        started.order_done = done
        return started

    return start


def ended(notes: Notes, original: Callable, kind: str) -> Callable:
    """Return a wait of which what it waits for comes before what the waiting thread does."""

    def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self_, *args, **kwargs)
        finally:
            end = getattr(getattr(self_, "order_done", self_), "order_end", None)
            if end is not None:
                notes.after(notes.thread, end, kind)

    return wait


# Files


def of_files(notes: Notes) -> Iterator[Any]:
    """Yield what notes an operation on files as a line of its own."""
    yield patch(Transfers, "start", _file_start(notes, Transfers.start))
    yield patch(Transfers, "_finish", _file_finish(notes, Transfers._finish))
    wait = Operation.wait_for_its_end
    yield patch(Operation, "wait_for_its_end", ended(notes, wait, "file wait"))
    yield patch(Operation, "is_done", property(partial(_is_done, notes), _set_done))


def _file_start(notes: Notes, original: Callable) -> Callable:
    def start(transfers: Transfers, operation: Operation, after: Iterable[Operation]) -> None:
        after = list(after)
        verb = "pwritev" if operation.is_write else "preadv"
        line = notes.clocks.line(f"file operation ({verb}, {operation.bucket})")
        notes.after(line, notes.mark(notes.thread, "hand over"), "begin", given=True)
        for end in (getattr(other, "order_end", None) for other in after):
            if end is not None:
                notes.after(line, end, "file after")
        if operation.memory is not None:
            ranges = notes.ranges(operation.memory, not operation.is_write, verb)
            notes.operator(verb, ranges, line=line)
        operation.__dict__["order_end"] = notes.end(line)
        original(transfers, operation, after)

    return start


def _file_finish(notes: Notes, original: Callable) -> Callable:
    def finish(transfers: Transfers, operation: Operation) -> None:
        end = getattr(operation, "order_end", None)
        if end is not None:
            notes.after(notes.thread, end, "end of file operation", given=True)
        original(transfers, operation)

    return finish


def _is_done(notes: Notes, operation: Operation) -> bool:
    is_done = operation.__dict__.get("is_done", False)
    end = getattr(operation, "order_end", None)
    if is_done and end is not None:
        notes.after(notes.thread, end, "file is done", given=True)
    return is_done


def _set_done(operation: Operation, is_done: bool) -> None:
    operation.__dict__["is_done"] = is_done
