"""The tiers that the tests are in, parts of a tier, and the processor time that a test may take.

A test without a tier's mark is a default test, and its call takes at most ``LIMIT_S`` of the
processors, its ranks' and child processes' included.  ``-m nightly`` also takes a part of the
exhaustive tests, and of each test no more than ``--cases``; ``--seed`` draws both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

LIMIT_S = 2.0
SAMPLED = 8
"""One exhaustive test in so many is a nightly one too."""
CASES = 2
"""So many cases of one test are nightly; ``--cases`` changes it."""

TIERS = ("nightly", "exhaustive")
SECONDS = pytest.StashKey[list[float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--shard", type=_shard, metavar="I/N", help="run the I-th of N parts")
    group.addoption(
        "--resume",
        metavar="FILE",
        help="leave out the tests that FILE names, and add those that pass to it; with =",
    )
    group.addoption(
        "--seed", default="0", help="draws the exhaustive tests and the cases that -m nightly runs"
    )
    group.addoption(
        "--cases",
        type=int,
        default=CASES,
        metavar="COUNT",
        help=f"what -m nightly runs of the cases of one test (default {CASES}; 0 for all)",
    )
    group.addoption(
        "--cpu", metavar="FILE", help="add each call's seconds of the processors to FILE, as JSON"
    )
    group.addoption(
        "--cpu-limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"what a default test's call may take (default {LIMIT_S:g}; 0 for any time)",
    )


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(text)  # argparse names the option
    return int(number), int(count)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: takes minutes, or is one of many like it")
    config.addinivalue_line("markers", "exhaustive: a case of a whole product of parameters")
    config.addinivalue_line(
        "markers", f"slow(reason): a default test whose call may take more than {LIMIT_S:g} s"
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(config), RECORD)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a process of pytest-xdist what had passed before the run, also if it starts late."""
    node.workerinput["passed"] = sorted(node.config.pluginmanager.get_plugin(RECORD).passed)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow and not slow.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid}: the mark slow takes reason='...'")
        if item.get_closest_marker("exhaustive") and is_sampled(item.nodeid, config.option.seed):
            item.add_marker("nightly")
    if hasattr(config, "workerinput"):
        passed = set(config.workerinput["passed"])
    else:
        passed = config.pluginmanager.get_plugin(RECORD).passed
    number, count = config.option.shard or (1, 1)
    left_out = {
        item for item in items if item.nodeid in passed or shard_of(item.nodeid, count) != number
    }
    if config.option.markexpr.strip() == "nightly" and config.option.cases:
        left_out |= _beyond(config.option.cases, items, config.option.seed)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_sampled(nodeid: str, seed: str) -> bool:
    return _drawn(nodeid, seed) % SAMPLED == 0


def _drawn(nodeid: str, seed: str) -> int:
    return zlib.crc32(f"{seed} {nodeid}".encode())


def _beyond(count: int, items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """Return the nightly items that are none of the ``count`` which ``seed`` draws of a test."""
    of_tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("nightly"):
            of_tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        item
        for cases in of_tests.values()
        for item in sorted(cases, key=lambda item: _drawn(item.nodeid, seed))[count:]
    }


def shard_of(nodeid: str, count: int) -> int:
    return zlib.crc32(nodeid.encode()) % count + 1


RECORD = "record of passed tests and processor time"


class _Record:
    """Writes what ``--resume`` and ``--cpu`` ask for, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.resume = config.option.resume and Path(config.option.resume)
        self.cpu = config.option.cpu and Path(config.option.cpu)
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        if self.resume and self.resume.exists():
            self.passed = set(self.resume.read_text(encoding="utf-8").splitlines())

    def pytest_report_header(self) -> list[str]:
        return [f"{len(self.passed)} tests passed before ({self.resume})"] if self.resume else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when != "teardown":
            return
        if self.resume and report.nodeid not in self.failed:
            _append(self.resume, report.nodeid)
        if self.cpu:
            seconds = dict(report.user_properties).get("cpu_s")
            _append(self.cpu, json.dumps({"id": report.nodeid, "cpu_s": seconds}))


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


# Processor time.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a default test once more whose call has taken too long; twice is an error.

    The first call of a process pays for what later ones find done, and a machine may be busy.  On
    one that is slow now, a test may take as much longer.
    """
    if not _is_limited(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    limit_s = item.config.option.cpu_limit
    if item.stash.get(SECONDS, [0.0])[-1] > limit_s:
        limit_s *= slowness()
    if item.stash.get(SECONDS, [0.0])[-1] > limit_s and not any(r.failed for r in reports):
        if hasattr(item, "_initrequest"):
            item._initrequest()  # fixtures are made anew
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        seconds = item.stash[SECONDS]
        (call,) = (report for report in reports if report.when == "call")
        if seconds[-1] > limit_s and call.passed:
            call.outcome = "failed"
            call.longrepr = (
                f"{item.nodeid} took {seconds[0]:.1f} and {seconds[-1]:.1f} s of the processors "
                f"in its call.  A default test takes at most {limit_s:.2g} s here: have it do "
                "less, or mark it nightly, or slow(reason='...')."
            )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def slowness() -> float:
    """Return how many times as long as on the machine of docs/measured.md work takes now.

    At least 1.  The same 0.05 s of work have taken 0.1 there while others kept its caches busy.
    """
    seconds = []
    for _ in range(3):
        started = time.process_time()
        table = {}
        for number in range(400_000):
            table[number % 1000] = number, str(number & 7)
        seconds.append(time.process_time() - started)
    return max(1.0, statistics.median(seconds) / 0.05)


def _is_limited(item: pytest.Item) -> bool:
    is_slow = any(item.get_closest_marker(mark) for mark in (*TIERS, "slow"))
    return bool(item.config.option.cpu_limit) and not is_slow and not _is_watched()


def _is_watched() -> bool:
    """A debugger's and a tracer's own time is not the test's."""
    monitoring = getattr(sys, "monitoring", None)
    tools = monitoring and any(monitoring.get_tool(number) for number in range(6))
    return bool(tools or sys.gettrace() or "COVERAGE_RUN" in os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = cpu_s(os.getpid())
    try:
        return (yield)
    finally:
        seconds = cpu_s(os.getpid()) - before
        item.stash.setdefault(SECONDS, []).append(seconds)
        item.user_properties.append(("cpu_s", round(seconds, 2)))


def cpu_s(pid: int) -> float:
    """Return the seconds of the processors that a process has taken, and all that it began.

    Its children's children are counted too, those that are still there and those that a parent has
    waited for.  Without ``/proc``, only what this process has waited for.
    """
    if not os.path.isdir("/proc/self"):
        return sum(os.times()[:4])
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = Path("/proc", name, "stat").read_text()
        except OSError:  # it is gone
            continue
        fields = stat.rpartition(")")[2].split()  # a program's name may hold blanks
        ticks[int(name)] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(int(name))
    total, left = 0, [pid]
    while left:
        one = left.pop()
        total += ticks.get(one, 0)
        left += children.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")
