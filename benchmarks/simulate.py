"""Run compiled steps as slowly as given figures say, lane by lane: real work, on a real schedule.

A benchmark's and a test's way to see what overlaps, on a machine that has none of the hardware.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from zerofx.backend import CompiledFunction
from zerofx.compiler.program import Program
from zerofx.cost.timeline import LANES, Timeline, Work, predict, work_of
from zerofx.hardware import Hardware
from zerofx.ir import ops
from zerofx.ir.graph import copied
from zerofx.lower.lowering import lower
from zerofx.passes.fuse.write_back import write_back
from zerofx.worker import Job, Worker

SLACK_S = 0.02
"""How late a thread may be, over a whole step, without those behind it being so: they wake late."""

_WORK = "zerofx_simulated"


@contextlib.contextmanager
def simulated(function: CompiledFunction, figures: Hardware) -> Iterator[list[Timeline]]:
    """Have the programs of a function take as long as ``figures`` say; call its step twice before.

    Whatever is computed, moved or updated is so in fact, operator by operator, and counts as done
    when as many seconds have passed as its node takes.  Compute is the step's thread; the link,
    copies each way and updates have a thread each, which does one thing after another.  Figures
    that are faster than the machine are of no use.

    Yields what the timeline predicts for each program.
    """
    clock = _Clock()
    lanes = {name: ThrottledWorker(name, clock) for name in LANES if name != "compute"}
    copies, programs = function.copies, function.programs
    runtimes = [program.runtime for program in programs if program.runtime is not None]
    assert len(runtimes) == len(programs), "each has been called before"
    before = [runtime.program for runtime in runtimes]
    own = copies.updates, copies.workers
    copies.updates = lanes["updates"]
    copies.workers = {name: lanes[name] for name in ("to host", "to device")}
    ranks = function.communicator.world_size
    try:
        for program, runtime in zip(programs, runtimes, strict=True):
            runtime.program = _slowed(program, figures, clock, lanes)
        yield [predict(p.gm.graph, figures, p.table, ranks) for p in programs]
    finally:
        copies.updates, copies.workers = own
        for runtime, real in zip(runtimes, before, strict=True):
            runtime.program = real


class _Clock:
    """Where the step's thread is, in seconds of ``time.perf_counter``: it sleeps to be no earlier.

    Where it is later by no more than ``SLACK_S``, what follows does not have to wait for it.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.noted = threading.local()  # ends of what each thread has waited for

    def begin(self) -> None:
        self.now_s = time.perf_counter()

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def settle(self) -> None:
        self.now_s = _no_earlier(self.now_s)

    def note(self, ended_s: float) -> None:
        """Note in this thread that it has waited for what has ended then."""
        self.noted.latest_s = max(self.latest_s(), ended_s)

    def latest_s(self) -> float:
        return getattr(self.noted, "latest_s", 0.0)


class ThrottledWorker(Worker):
    """A lane whose jobs take as long as has been said before each is started."""

    def __init__(self, name: str, clock: _Clock) -> None:
        super().__init__(name)
        self._clock = clock
        self._free_s = self._takes_s = 0.0

    def takes(self, seconds: float) -> None:
        self._takes_s = seconds

    def start(self, job: Callable[[], Any]) -> Any:
        seconds, started_s, clock = self._takes_s, self._clock.now_s, self._clock

        def throttled() -> tuple[Any, float]:
            clock.noted.latest_s = 0.0
            result = job()
            begun_s = max(started_s, self._free_s, clock.latest_s())
            self._free_s = _no_earlier(begun_s + seconds)
            return result, self._free_s

        return _Throttled(super().start(throttled), clock)


class _Throttled(Job):
    """The job of what a throttled lane has started, which notes when it has ended."""

    def __init__(self, job: Job, clock: _Clock) -> None:
        super().__init__(job._future)
        self._job, self._clock = job, clock

    def result(self) -> Any:
        result, ended_s = self._job.result()
        self._clock.note(ended_s)
        return result


def _no_earlier(due_s: float) -> float:
    """Return at ``due_s``, and say when that was: then, unless it is much later by now."""
    while (left_s := due_s - time.perf_counter()) > 0:
        time.sleep(left_s)
    return max(due_s, time.perf_counter() - SLACK_S)


def _slowed(
    program: Program, figures: Hardware, clock: _Clock, lanes: dict[str, ThrottledWorker]
) -> Callable:
    """Lower a program once more, each node taking the time that it has by these figures."""
    runtime, ranks = program.runtime, program.function.communicator.world_size
    assert runtime is not None
    for node in program.gm.graph.nodes:
        is_wait = ops.is_wait(node)
        node.meta[_WORK] = "wait" if is_wait else work_of(node, figures, program.table, ranks)
    plain = fx.GraphModule(program.gm, copied(program.gm.graph))
    if program.options.bucket:
        write_back(plain, program.rewritten.ctx)
    slowed = lower(plain, runtime.kernels())
    traveling: dict[int, Any] = {}  # by the id of what a collective makes
    for node in list(slowed.graph.nodes):
        if node.op == "output":
            with slowed.graph.inserting_before(node):
                slowed.graph.call_function(clock.settle)
        work = node.meta.get(_WORK) if node.op == "call_function" else None
        if work == "wait":
            node.target = _waiting(node.target, clock, traveling)
        elif isinstance(work, Work) and work.lane == "compute" and work.seconds:
            with slowed.graph.inserting_after(node):
                slowed.graph.call_function(clock.spend, (work.seconds,))
        elif isinstance(work, Work) and work.lane != "compute":
            node.target = _starting(node.target, clock, lanes[work.lane], work.seconds, traveling)
    first = next(node for node in slowed.graph.nodes if node.op != "placeholder")
    with slowed.graph.inserting_before(first):
        slowed.graph.call_function(clock.begin)
    slowed.recompile()
    return slowed


def _starting(
    kernel: Callable,
    clock: _Clock,
    lane: ThrottledWorker,
    seconds: float,
    traveling: dict[int, Any],
) -> Callable:
    def start(*arguments: Any) -> Any:
        clock.settle()
        lane.takes(seconds)
        started = kernel(*arguments)
        if lane.name in ("link", "outer link", "files"):  # the others are started by the kernel
            travels = lane.start(lambda: None)
            if started is not None:
                traveling[id(started)] = travels
        return started

    return start


def _waiting(kernel: Callable, clock: _Clock, traveling: dict[int, Any]) -> Callable:
    def wait(started: Any) -> Any:
        clock.settle()
        clock.noted.latest_s = 0.0
        arrived = kernel(started)
        if id(started) in traveling:
            traveling.pop(id(started)).result()
        clock.now_s = max(clock.now_s, clock.latest_s())
        clock.settle()
        return arrived

    return wait
