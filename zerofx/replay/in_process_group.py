"""Exchange of tensors between ranks that run dumped programs, in one process or a group."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Tensor], Sequence[Tensor]]
"""Gives this rank's tensor to all ranks and returns everyone's, by rank, laid out as it is."""

MOST_RANKS_IN_TURNS = 8
"""Ranks that one process runs, one after the other."""


def alone(world_size: int) -> Exchange:
    """An exchange without any other ranks: each of them holds what this one does."""
    return lambda tensor: [tensor] * world_size


def in_group(group: dist.ProcessGroup) -> Exchange:
    """An exchange between the processes of a group."""

    def exchange(tensor: Tensor) -> list[Tensor]:
        given = tensor.contiguous().view(-1).view(torch.uint8)  # gloo has no small floats
        received = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
        dist.all_gather(received, given, group=group)
        values = (one.view(tensor.dtype).view(tensor.shape) for one in received)
        return [torch.empty_like(tensor).copy_(value) for value in values]

    return exchange


def in_turns(programs: Sequence[Callable[[Exchange], Any]]) -> list[Any]:
    """Run each rank's program in this process, and return what they return, by rank.

    One runs at a time, up to its next exchange, and each has random numbers of its own: the result
    is the same every time.

    Raises: what a program raises; RuntimeError if one ends while others wait for an exchange.
    """
    count = len(programs)
    all_given, turn = threading.Barrier(count), threading.Lock()
    given: list[list[Tensor | None]] = [[None] * count, [None] * count]  # of two exchanges
    start = torch.get_rng_state()

    def run(rank: int) -> Any:
        slots = itertools.cycle(given)

        def exchange(tensor: Tensor | None) -> list[Tensor]:
            """Exchange a tensor, or None behind the end of a program."""
            values = next(slots)
            values[rank] = None if tensor is None else tensor.detach().clone()
            random_state = torch.get_rng_state()
            turn.release()
            try:
                all_given.wait()
            finally:
                turn.acquire()
            torch.set_rng_state(random_state)
            found = [value for value in values if value is not None]
            if tensor is not None and len(found) < count:
                raise RuntimeError("the ranks' programs do not exchange as often as each other")
            return found

        with turn:
            try:
                torch.set_rng_state(start)
                result = programs[rank](exchange)
                exchange(None)
            except BaseException:
                all_given.abort()
                raise
            return result

    with ThreadPoolExecutor(count) as threads:
        ended = [threads.submit(run, rank) for rank in range(count)]
    torch.set_rng_state(start)
    for error in (one.exception() for one in ended):
        if error and not isinstance(error, threading.BrokenBarrierError):  # another's broke it
            raise error
    return [one.result() for one in ended]
