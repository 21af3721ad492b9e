"""Exchange of tensors between ranks that run dumped programs, in one process or a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Gives this rank's tensor to all ranks and returns everyone's, by rank, laid out as it is."""


MOST_RANKS_IN_TURNS = 8
"""Ranks that one process runs, one after the other."""


def alone(world_size: int) -> Exchange:
    """An exchange without any other ranks: each of them holds what this one does."""
    return lambda tensor: [tensor] * world_size


def in_group(group: dist.ProcessGroup) -> Exchange:
    """An exchange between the processes of a group."""

    def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
        given = tensor.contiguous().view(-1).view(torch.uint8)  # gloo has no small floats
        received = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
        dist.all_gather(received, given, group=group)
        return [
            torch.empty_like(tensor).copy_(one.view(tensor.dtype).view(tensor.shape))
            for one in received
        ]

    return exchange


def in_turns(programs: Sequence[Callable[[Exchange], Any]]) -> list[Any]:
    """Run each rank's program in this process, and return what they return, by rank.

    One runs at a time, up to its next exchange, and each has random numbers of its own: the result
    is the same every time.

    Raises: what a program raises; RuntimeError if one ends while others wait for an exchange.
    """
    return _Turns(programs).run()


class _Turns:
    def __init__(self, programs: Sequence[Callable[[Exchange], Any]]):
        self.programs = programs
        self.count = len(programs)
        self.turn = 0
        self.exchanges = [0] * self.count
        self.changed = threading.Condition()
        self.given: list[dict[int, torch.Tensor]] = [{}, {}]  # of this exchange and the one before
        self.results: list[Any] = [None] * self.count
        self.ended: set[int] = set()
        self.error: BaseException | None = None
        start = torch.get_rng_state()
        self.random_states = [start] * self.count

    def run(self) -> list[Any]:
        before = torch.get_rng_state()
        threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_rng_state(before)
        if self.error is not None:
            raise self.error
        return self.results

    def _run(self, rank: int) -> None:
        def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
            slot = self.given[self.exchanges[rank] % 2]
            slot[rank] = tensor.detach().clone()
            self.exchanges[rank] += 1
            self._pass_on(rank)
            self._await(rank)
            if min(self.exchanges) < self.exchanges[rank]:
                raise RuntimeError("the ranks' programs do not exchange as often as each other")
            return [slot[other] for other in range(self.count)]

        try:
            self._await(rank)
            self.results[rank] = self.programs[rank](exchange)
        except _AnotherFailed:
            return
        except BaseException as error:
            self.error = error
        self.ended.add(rank)
        self._pass_on(rank)

    def _await(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.error is not None)
        if self.error is not None:
            raise _AnotherFailed
        torch.set_rng_state(self.random_states[rank])

    def _pass_on(self, rank: int) -> None:
        self.random_states[rank] = torch.get_rng_state()
        with self.changed:
            others = ((rank + step) % self.count for step in range(1, self.count + 1))
            self.turn = next((other for other in others if other not in self.ended), rank)
            self.changed.notify_all()


class _AnotherFailed(BaseException):
    """Ends a rank's thread when another's program has failed."""
