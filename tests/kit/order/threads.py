"""Note what orders host threads: handed-over jobs, their ends, locks, and operations on files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest import mock

from tests.kit.order.notes import Notes
from tests.kit.order.watch import Watch
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.storage import ring, tier
from zerofx.runtime.storage.disk.transfers import Operation, Transfers


class Threads:
    """The stand-ins for what starts and joins threads."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def patches(self) -> Iterator[Any]:
        patch = mock.patch.object
        yield patch(ThreadPoolExecutor, "submit", self._submit(ThreadPoolExecutor.submit))
        yield patch(ThreadPoolExecutor, "shutdown", self._shutdown(ThreadPoolExecutor.shutdown))
        yield patch(Future, "result", self._ended(Future.result, "result"))
        yield patch(threading.Thread, "start", self._thread_start(threading.Thread.start))
        yield patch(threading.Thread, "join", self._ended(threading.Thread.join, "join"))
        for module in (ring, snapshots, tier):
            yield patch(module, "threading", _Threading(self.notes), create=True)
        yield patch(Transfers, "start", self._file_start(Transfers.start))
        yield patch(Transfers, "_finish", self._file_finish(Transfers._finish))
        wait = Operation.wait_for_its_end
        yield patch(Operation, "wait_for_its_end", self._ended(wait, "file wait"))
        yield patch(Operation, "is_done", property(self._is_done, _set_done))
        registry = snapshots.Snapshots
        yield patch(registry, "discard", self._discard(registry.discard))
        yield patch(registry, "before_change", self._before_change(registry.before_change))

    def _job(self, done: Any, job: Callable) -> Callable:
        """Return a job that begins after now, and ends before what waits for ``done``."""
        notes = self.notes
        begin = notes.mark(notes.thread, "hand over")

        def run(*args: Any, **kwargs: Any) -> Any:
            notes.after(notes.thread, begin, "begin", given=True)
            try:
                with Watch(notes) if notes.is_on else contextlib.nullcontext():
                    return job(*args, **kwargs)
            finally:
                done.order_end = notes.mark(notes.thread, "end")

        return run

    def _submit(self, original: Callable) -> Callable:
        def submit(executor: Any, job: Callable, /, *args: Any, **kwargs: Any) -> Future:
            done = _Done()
            future = original(executor, self._job(done, job), *args, **kwargs)
            future.order_done = done
            executor.__dict__.setdefault("order_jobs", []).append(done)
            return future

        return submit

    def _shutdown(self, original: Callable) -> Callable:
        def shutdown(executor: Any, wait: bool = True, **options: Any) -> None:
            original(executor, wait, **options)
            for done in executor.__dict__.get("order_jobs", ()):
                if wait and done.order_end is not None:
                    self.notes.after(self.notes.thread, done.order_end, "shutdown")

        return shutdown

    def _ended(self, original: Callable, kind: str) -> Callable:
        """Return a wait of which what it waits for comes before what the waiting thread does."""

        def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self_, *args, **kwargs)
            finally:
                end = getattr(getattr(self_, "order_done", self_), "order_end", None)
                if end is not None:
                    self.notes.after(self.notes.thread, end, kind)

        return wait

    def _thread_start(self, original: Callable) -> Callable:
        def start(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            of = getattr(target, "__module__", "") or ""
            if of.startswith("zerofx") and not isinstance(
                getattr(target, "__self__", None), Transfers
            ):
                thread.run = self._job(thread, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

    # Files

    def _file_start(self, original: Callable) -> Callable:
        notes = self.notes

        def start(transfers: Transfers, operation: Operation, after: Iterable[Operation]) -> None:
            after = list(after)
            verb = "pwritev" if operation.is_write else "preadv"
            line = notes.history.line(f"file operation ({verb}, {operation.bucket})")
            begin = notes.mark(notes.thread, "hand over")
            notes.after(line, begin, "begin", given=True)
            for other in after:
                end = getattr(other, "order_end", None)
                if end is not None:
                    notes.after(line, end, "file after")
            if operation.memory is not None:
                ranges = notes.ranges(operation.memory, not operation.is_write, verb)
                notes.operator(verb, ranges, line=line)
            operation.order_end = notes.mark(line, "end")
            original(transfers, operation, after)

        return start

    def _file_finish(self, original: Callable) -> Callable:
        def finish(transfers: Transfers, operation: Operation) -> None:
            end = getattr(operation, "order_end", None)
            if end is not None:
                self.notes.after(self.notes.thread, end, "end of file operation", given=True)
            original(transfers, operation)

        return finish

    def _is_done(self, operation: Operation) -> bool:
        is_done = operation.__dict__.get("is_done", False)
        end = getattr(operation, "order_end", None)
        if is_done and end is not None:
            self.notes.after(self.notes.thread, end, "file is done", given=True)
        return is_done

    # Snapshots: a step that finds none under way knows that they have ended

    def _discard(self, original: Callable) -> Callable:
        def discard(registry: Any, snapshot: Any) -> None:
            original(registry, snapshot)
            marks = registry.__dict__.setdefault("order_marks", [])
            marks.append(self.notes.mark(self.notes.thread, "snapshot done"))

        return discard

    def _before_change(self, original: Callable) -> Callable:
        def before_change(registry: Any, parameters: Any) -> None:
            original(registry, parameters)
            for mark in registry.__dict__.get("order_marks", ()):
                self.notes.after(self.notes.thread, mark, "snapshot done", given=True)
            registry.__dict__.pop("order_marks", None)

        return before_change


class _Done:
    """Holds the mark of a job's end."""

    order_end: int | None = None


def _set_done(operation: Operation, is_done: bool) -> None:
    operation.__dict__["is_done"] = is_done


class _Threading(ModuleType):
    """``threading``, with locks that order who had them."""

    def __init__(self, notes: Notes) -> None:
        super().__init__("threading")
        self.__dict__["_notes"] = notes

    def __getattr__(self, name: str) -> Any:
        made = getattr(threading, name)
        return (lambda: _Lock(made(), self._notes)) if name in ("Lock", "RLock") else made


class _Lock:
    """A lock: whoever has it goes on after whoever had it."""

    def __init__(self, lock: Any, notes: Notes) -> None:
        self._lock, self._notes = lock, notes
        self._mark: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._mark is not None:
            self._notes.after(self._notes.thread, self._mark, "lock", given=True)

    def __exit__(self, *_error: Any) -> None:
        self._mark = self._notes.mark(self._notes.thread, "lock")
        self._lock.release()
