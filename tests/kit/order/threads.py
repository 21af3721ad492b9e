"""Note what orders the threads of saves: their starts and ends, locks, snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from zerofx.order.hooks import ended, job_of, of_files, of_jobs
from zerofx.order.notes import Notes
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.storage import ring, tier
from zerofx.runtime.storage.disk.transfers import Transfers


class Threads:
    """The stand-ins for what starts and joins threads."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def patches(self) -> Iterator[Any]:
        patch = mock.patch.object
        yield from of_jobs(self.notes)
        yield from of_files(self.notes)
        yield patch(threading.Thread, "start", self._thread_start(threading.Thread.start))
        yield patch(threading.Thread, "join", ended(self.notes, threading.Thread.join, "join"))
        for module in (ring, snapshots, tier):
            yield patch(module, "threading", _Threading(self.notes), create=True)
        registry = snapshots.Snapshots
        yield patch(registry, "discard", self._discard(registry.discard))
        yield patch(registry, "before_change", self._before_change(registry.before_change))

    def _thread_start(self, original: Callable) -> Callable:
        def start(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            of = getattr(target, "__module__", "") or ""
            if of.startswith("zerofx") and not isinstance(
                getattr(target, "__self__", None), Transfers
            ):
                thread.run = job_of(self.notes, thread, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

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
