"""A thread beside the step's: in order, errors to who waits, nothing left when it is abandoned."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zerofx.runtime.storage.memory import HostMemory
from zerofx.worker import Worker


def test_threads_take_host_memory_at_once():
    memory, interval = HostMemory(), sys.getswitchinterval()
    kept = [memory.empty(1, torch.float32) for _ in range(500)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: memory.empty(1, torch.float32), range(2000)))
    finally:
        sys.setswitchinterval(interval)
    assert memory.nbytes == 4 * len(kept) and memory.num_allocations == 2500


def test_it_does_one_thing_after_another_in_one_thread():
    worker, done = Worker("test"), []
    futures = [worker.start(lambda n=n: done.append((n, threading.get_ident()))) for n in range(20)]
    for future in futures:
        future.result()
    assert [number for number, _ in done] == list(range(20))
    threads = {thread for _, thread in done}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_an_error_comes_out_where_it_is_waited_for_and_the_next_goes_on():
    worker, error = Worker("test"), ValueError("no")

    def fail():
        raise error

    failed, after = worker.start(fail), worker.start(lambda: 7)
    with pytest.raises(ValueError) as raised:
        failed.result()
    assert raised.value is error and "fail" in [entry.name for entry in raised.traceback]
    assert after.result() == 7


def test_what_is_abandoned_has_ended_or_never_begins():
    worker, begun, ended = Worker("test"), threading.Event(), []

    def slow():
        begun.set()
        time.sleep(0.2)
        ended.append("slow")

    worker.start(slow)
    worker.start(lambda: ended.append("never"))
    begun.wait()
    worker.abandon()
    assert ended == ["slow"]
    assert worker.start(lambda: 1).result() == 1 and ended == ["slow"]


@pytest.mark.parametrize("is_queued", (True, False))
def test_who_interrupts_a_start_abandons_it_too(is_queued, monkeypatch):
    worker, begun, ended = Worker("test"), threading.Event(), []
    worker.start(lambda: None).result()

    def slow():
        begun.set()
        time.sleep(0.2)
        ended.append("slow")

    submit = ThreadPoolExecutor.submit

    def interrupted(pool, *arguments):
        if is_queued:
            submit(pool, *arguments)
            begun.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.start(slow)
    worker.abandon()
    assert ended == ["slow"] * is_queued, "nothing goes on behind"
    assert worker.start(lambda: 1).result() == 1


def test_its_thread_goes_with_it():
    def is_there():  # by its name: threads of other tests may end meanwhile
        return any("worker that goes" in thread.name for thread in threading.enumerate())

    worker = Worker("worker that goes")
    worker.start(lambda: None).result()
    assert is_there()
    del worker
    gc.collect()
    for _ in range(100):
        if not is_there():
            break
        time.sleep(0.02)
    assert not is_there()


IN_A_FORK = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor

import pytest

from zerofx.worker import Worker
worker = Worker("test")
assert worker.start(lambda: 1).result() == 1
pending = worker.start(lambda: time.sleep(0.3))
child = os.fork()
if child == 0:
    worker.abandon()  # what its parent has started is its parent's
    assert worker.start(os.getpid).result() == os.getpid()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
pending.result()
assert worker.start(lambda: 2).result() == 2
worker.start(lambda: time.sleep(0.2) or print("ended"))
"""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows forks nothing")
def test_a_fork_has_a_thread_of_its_own_and_exits_are_clean():
    """At the interpreter's exit, what is under way ends."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
