"""Run a function on ranks of this machine, in fresh processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def device_of(rank: int, num_ranks: int) -> torch.device:
    """A GPU of its own for every rank if there are as many, else the CPU."""
    if torch.cuda.device_count() >= num_ranks:
        return torch.device("cuda", rank)
    return torch.device("cpu")


def on_ranks(
    worker: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = math.inf,
    on_one_gpu: bool = False,
) -> list[Any]:
    """Return what ``worker(rank, num_ranks, *arguments)`` returned on every rank, by rank.

    The worker runs in an initialised process group.  ``environment`` is there before torch is
    imported; "{rank}" in a value is replaced.  Exits if a rank dies or takes longer.  With
    ``on_one_gpu`` all ranks use the first GPU, over gloo.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = []
    for rank in range(num_ranks):
        settings = (worker, store.port, rank, num_ranks, on_one_gpu, arguments, answers)
        workers.append(context.Process(target=_serve, args=settings))
        with _environment(environment or {}, rank):
            workers[-1].start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < num_ranks:
        try:
            rank, answer = answers.get(timeout=1.0)
            found[rank] = answer
        except queue.Empty:
            failed = [worker.exitcode for worker in workers if worker.exitcode]
            if failed or time.monotonic() > deadline:
                for process in workers:
                    process.kill()
                why = f"ended with exit code {failed[0]}" if failed else f"took over {timeout_s} s"
                sys.exit(f"{worker.__name__}{arguments}: a rank {why}")
    for process in workers:
        process.join()
    return [found[rank] for rank in range(num_ranks)]


@contextmanager
def _environment(variables: Mapping[str, str], rank: int):
    """A spawned process inherits the environment of the moment."""
    before = dict(os.environ)
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    worker, port: int, rank: int, num_ranks: int, on_one_gpu: bool, arguments: tuple, answers
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", 0) if on_one_gpu else device_of(rank, num_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not on_one_gpu else "gloo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    answers.put((rank, worker(rank, num_ranks, *arguments)))
    dist.barrier()
    dist.destroy_process_group()
