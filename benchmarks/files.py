"""Measure how fast buckets move between files and memory, against fio on the same files.

    python benchmarks/files.py --directories /mnt/nvme0 /mnt/nvme1
    python benchmarks/files.py --gib 2 --rounds 9 --fio /opt/fio/bin/fio

Three systems take turns: the file store; fio with io_uring, direct I/O, the store's block size
and its depth; and threads that call ``preadv`` and ``pwritev`` on one list of blocks, with
nothing else in Python.  All of them use huge pages if Linux gives them.  A ratio is the median of
the rounds' ratios, each of two runs that were seconds apart.  The exit status says whether the
store reads and writes at ``--at-least`` times what fio does, or the threads if fio is missing.

With ``--updates`` AdamW runs over the buckets as well, their states in a cache of ``--cached`` of
them, against what the slower of disk and update would take by itself: no schedule beats that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from tabulate import tabulate

from zerofx.runtime.memory.pages import aligned_empty
from zerofx.runtime.storage.disk import BucketLayout, FileStore, HostCache, Part
from zerofx.runtime.storage.memory import HostMemory

NUM_BUFFERS = 4  # buckets in memory at once, as many operations are under way
KINDS = ("read", "write")


@contextlib.contextmanager
def opened_store(directories: list[str], layouts: list[BucketLayout], **options) -> Iterator:
    with contextlib.closing(FileStore(directories, **options)) as store:
        store.add(layouts)
        yield store


def empty(store: FileStore, bucket: str) -> torch.Tensor:
    """Memory for a whole bucket."""
    return aligned_empty(store.layouts[bucket].nbytes)


class Files:
    """A store full of values, the memory to move them with, and its files for the others."""

    def __init__(self, store: FileStore, depth: int) -> None:
        self.store = store
        self.depth = depth
        self.buckets = list(store.layouts)
        self.nbytes = sum(layout.nbytes for layout in store.layouts.values())
        self.buffers = [empty(store, self.buckets[0]) for _ in range(NUM_BUFFERS)]
        for buffer in self.buffers:
            buffer.random_()
        # They have no names of their own.
        files = (one.file for bucket in self.buckets for one in store.files[bucket])
        self.paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        self.through_store("write")  # what is only reserved is slower to write the first time

    def through_store(self, kind: str) -> float:
        start = self.store.start_read if kind == "read" else self.store.start_write
        under_way: deque = deque()
        start_s = time.perf_counter()
        for index, bucket in enumerate(self.buckets):
            if len(under_way) == NUM_BUFFERS:
                under_way.popleft().wait()
            under_way.append(start(bucket, self.buffers[index % NUM_BUFFERS]))
        while under_way:
            under_way.popleft().wait()
        return self.nbytes / (time.perf_counter() - start_s)

    def through_threads(self, kind: str) -> float:
        call = os.preadv if kind == "read" else os.pwritev
        block = self.store.block_bytes
        flags = os.O_RDWR | (os.O_DIRECT if all(self.store.stripes.is_direct) else 0)
        memories = [memoryview(buffer.numpy()) for buffer in self.buffers]
        with contextlib.ExitStack() as opened:
            blocks = []
            for index, path in enumerate(self.paths):
                fd = os.open(path, flags)
                opened.callback(os.close, fd)
                memory = memories[index % NUM_BUFFERS]
                for offset in range(0, os.path.getsize(path), block):
                    blocks.append((fd, memory[offset : offset + block], offset))
            turns = iter(blocks)
            lock = threading.Lock()

            def work() -> None:
                while True:
                    with lock:
                        turn = next(turns, None)
                    if turn is None:
                        return
                    fd, memory, offset = turn
                    if call(fd, [memory], offset) != len(memory):
                        raise OSError(f"a short {kind}")

            threads = [threading.Thread(target=work) for _ in range(self.depth)]
            start_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return self.nbytes / (time.perf_counter() - start_s)

    def through_fio(self, kind: str, fio: str) -> float:
        with tempfile.TemporaryDirectory() as links:  # fio takes 4096 characters of names
            for index, path in enumerate(self.paths):
                os.symlink(path, os.path.join(links, str(index)))
            ran = subprocess.run(
                [
                    fio,
                    "--name=files",
                    f"--filename={':'.join(map(str, range(len(self.paths))))}",
                    f"--size={self.nbytes}",
                    f"--rw={kind}",
                    f"--bs={self.store.block_bytes}",
                    f"--iodepth={self.depth}",
                    "--file_service_type=sequential",
                    "--ioengine=io_uring",
                    "--direct=1",
                    "--mem=malloc",
                    "--thread",
                    "--output-format=json",
                ],
                # Huge pages for what it allocates, as the store has.
                env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
                cwd=links,
                capture_output=True,
                text=True,
            )
        if ran.returncode:
            sys.exit(f"fio failed: {ran.stderr}")
        result = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][kind]
        if result["io_bytes"] != self.nbytes:
            sys.exit(f"fio moved {result['io_bytes']} bytes, not {self.nbytes}")
        return result["bw_bytes"]


class Updates:
    """AdamW over all buckets: states come from files, values and gradients are in memory."""

    def __init__(self, store: FileStore, cached: int) -> None:
        self.store = store
        self.order = list(store.layouts)
        layout = store.layouts[self.order[0]]
        memory_bytes = cached * layout.nbytes
        self.cache = HostCache(store, memory_bytes, HostMemory())
        self.cache.begin(self.order)
        self.numel = layout.parts[0].nbytes // 4
        self.value = torch.nn.Parameter(torch.randn(self.numel))
        self.value.grad = torch.randn(self.numel)
        self.optimizer = torch.optim.AdamW([self.value], fused=True)
        self.optimizer.state[self.value]["step"] = torch.zeros(())
        self.resident = layout.views(empty(store, self.order[0]))

    def step(self) -> float:
        """Seconds of one step, from files."""
        start_s = time.perf_counter()
        self.cache.begin(self.order)
        for bucket in self.order:
            self.update(self.cache.use(bucket))
            self.cache.release(bucket, dirty=True)
        return time.perf_counter() - start_s

    def in_memory(self) -> float:
        """Seconds of as many updates of one bucket that stays."""
        start_s = time.perf_counter()
        for _ in self.order:
            self.update(self.resident)
        return time.perf_counter() - start_s

    def update(self, states: dict[tuple[int, str], torch.Tensor]) -> None:
        named = {name: state for (_, name), state in states.items()}
        self.optimizer.state[self.value].update(named)
        self.optimizer.step()


def measure_updates(arguments: argparse.Namespace) -> None:
    """Print what a step takes from files, and the bound: disk and update, each by itself."""
    half = arguments.bucket_mib * 2**17 // 1024 * 1024
    fields = tuple(Part(name, torch.float32, ((0, half),)) for name in ("exp_avg", "exp_avg_sq"))
    count = max(arguments.cached + 2, round(arguments.gib * 1024 / arguments.bucket_mib))
    layouts = [BucketLayout(f"bucket {index}", fields) for index in range(count)]
    options = {"block_bytes": arguments.block_kib * 1024, "depth": arguments.depth}
    with opened_store(arguments.directories, layouts, **options) as store:
        files, updates = Files(store, arguments.depth), Updates(store, arguments.cached)
        updates.step()
        rows = []
        for _ in range(arguments.rounds):
            rates = [files.through_store(kind) for kind in KINDS]
            before = store.transfers.bytes_read, store.transfers.bytes_written
            step_s = updates.step()
            after = store.transfers.bytes_read, store.transfers.bytes_written
            moved = [now - then for now, then in zip(after, before, strict=True)]
            disk_s = sum(nbytes / rate for nbytes, rate in zip(moved, rates, strict=True))
            rows.append((step_s, disk_s, updates.in_memory()))
    seconds = [statistics.median(column) for column in zip(*rows, strict=True)]
    ratio = statistics.median(step / max(disk, update) for step, disk, update in rows)
    names = ("a step from files", "what it reads and writes alone", "its updates alone, in memory")
    print(f"{half * count / 1e6:.0f}M elements in {count} buckets, {arguments.cached} in memory")
    print(tabulate(list(zip(names, seconds, strict=True)), ("", "s, median"), floatfmt=".3f"))
    print(f"a step takes {ratio:.2f} times what no schedule can beat (median of the rounds)")
    print(f"{sum(moved) / (2 * files.nbytes):.2f} of all states moved in the last one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directories", nargs="+", default=[tempfile.gettempdir()])
    parser.add_argument("--gib", type=float, default=1.0, help="on disk, in all")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fio", default=shutil.which("fio"), help="where it is; '' for without")
    parser.add_argument("--checksums", action="store_true", help="a store with them too")
    parser.add_argument("--at-least", type=float, default=0.9, help="times the baseline")
    parser.add_argument("--updates", action="store_true", help="AdamW over them, and nothing else")
    parser.add_argument("--cached", type=int, default=2, help="buckets that memory may hold")
    arguments = parser.parse_args()
    if arguments.updates:
        measure_updates(arguments)
        return

    numel = arguments.bucket_mib * 2**18  # float32: shard, exp_avg and exp_avg_sq
    third = numel // 3 // 1024 * 1024
    fields = (("shard", third), ("exp_avg", third), ("exp_avg_sq", numel - 2 * third))
    layouts = [
        BucketLayout(
            f"bucket {i}", tuple(Part(name, torch.float32, ((0, n),)) for name, n in fields)
        )
        for i in range(max(NUM_BUFFERS, round(arguments.gib * 1024 / arguments.bucket_mib)))
    ]
    options = {"block_bytes": arguments.block_kib * 1024, "depth": arguments.depth}
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(opened_store(arguments.directories, layouts, **options))
        files = Files(store, arguments.depth)
        systems = {"store": files.through_store, "threads": files.through_threads}
        if arguments.fio:
            systems["fio"] = lambda kind: files.through_fio(kind, arguments.fio)
        if arguments.checksums:  # files of its own: the others write into the first one's
            checked = opened.enter_context(
                opened_store(arguments.directories, layouts, checksums=True, **options)
            )
            systems["store, checksums"] = Files(checked, arguments.depth).through_store
        rates = measure(systems, arguments.rounds)
    baseline = "fio" if arguments.fio else "threads"
    rows, worst = [], float("inf")
    for kind in KINDS:
        for system in (*rates,):
            mine = rates[system][kind]
            ratio = statistics.median(
                a / b for a, b in zip(mine, rates[baseline][kind], strict=True)
            )
            if system == "store":
                worst = min(worst, ratio)
            spread = f"{min(mine) / 1e9:.2f} to {max(mine) / 1e9:.2f}"
            rows.append([kind, system, statistics.median(mine) / 1e9, spread, ratio])
    headers = ["", "system", "GB/s, median", "least to most", f"ratio to {baseline}"]
    print(tabulate(rows, headers, floatfmt=".2f"))
    if worst < arguments.at_least:
        sys.exit(f"the store moves {worst:.2f} times what {baseline} does")


def measure(
    systems: dict[str, Callable[[str], float]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Bytes a second of every system, by kind and round; each round begins with another one."""
    rates: dict[str, dict[str, list[float]]] = {
        system: {kind: [] for kind in KINDS} for system in systems
    }
    names = list(systems)
    for index in range(rounds):
        for kind in KINDS:
            first = index % len(names)
            for system in names[first:] + names[:first]:
                rates[system][kind].append(systems[system](kind))
    return rates


if __name__ == "__main__":
    main()
