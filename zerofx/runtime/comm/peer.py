"""Collectives among ranks of one machine, which read each other's memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerofx.hardware import PIECE_BYTES
from zerofx.runtime.comm.gloo import GlooTransport, copy_unless_there
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.comm.transport import REDUCTIONS, Started, Work, divide
from zerofx.runtime.memory.pages import BufferPool


@dataclass(eq=False)
class PeerWork(Work):
    """A collective among ranks that read each other's memory: it happens at the wait."""

    memory: PeerMemory
    sources: Sequence[torch.Tensor]
    collect: Callable[[dict[int, list[int]]], None]

    def __post_init__(self) -> None:
        self.number = self.memory.post(self.sources)

    def wait(self) -> None:
        """Read what this rank needs of the others, which may have to start it first.

        Behind it nobody reads this rank's sources any more.
        """
        memory = self.memory
        addresses = {
            peer.rank: memory.find(peer, self.number, self.sources) for peer in memory.peers
        }
        self.collect(addresses)
        memory.finish(self.number)


class PeerTransport(GlooTransport):
    """gloo's ranks on one machine: each reads what it needs where the others have it.

    Sums are made piece by piece while a piece is in the cache, so no buffer receives them first.
    """

    overlaps = False

    def __init__(
        self,
        memory: PeerMemory,
        group: dist.ProcessGroup,
        buffers: BufferPool,
        mean_of: int | None = None,
    ) -> None:
        super().__init__(group, buffers, mean_of)
        self.memory = memory

    def reduce_scatter(self, flat: torch.Tensor, reduction: str) -> Started:
        return self.reduce_scatter_pieces([flat], [0], flat.numel(), reduction)

    def reduce_scatter_pieces(
        self, pieces: Sequence[torch.Tensor], offsets: Sequence[int], numel: int, reduction: str
    ) -> Started:
        """Reduce-scatter a flat buffer of ``numel`` elements that need not exist.

        ``pieces`` are flat and contiguous, and would lie at ``offsets``, in order; the rest of it
        would be zero.
        """
        result = pieces[0].new_empty(numel // self.world_size)
        work = self._reduce_range(pieces, offsets, self.rank * result.numel(), reduction, result)
        return Started(result, work)

    def all_reduce(self, input: torch.Tensor, reduction: str, in_place: bool = False) -> Started:
        return super().all_reduce(input, reduction)  # not in place: the others read it there

    def all_reduce_pieces(
        self, pieces: Sequence[torch.Tensor], offsets: Sequence[int], numel: int, reduction: str
    ) -> Started:
        """All-reduce the same."""
        result = self.buffers.empty(numel, pieces[0])
        if self.world_size > 2:
            scattered = self.reduce_scatter_pieces(pieces, offsets, numel, reduction)
            return self._gathered(scattered, result)
        return Started(result, self._reduce_range(pieces, offsets, 0, reduction, result))

    def _gather(self, result: torch.Tensor, shard: torch.Tensor) -> Work:
        pieces = result.chunk(self.world_size)
        own = copy_unless_there(pieces[self.rank], shard)

        def collect(addresses: dict[int, list[int]]) -> None:
            for peer in self.memory.peers:
                (address,) = addresses[peer.rank]
                self.memory.copy(peer, [(address, pieces[peer.rank])])

        return PeerWork(self.memory, [own], collect)

    def swap(self, parts: torch.Tensor) -> Started:
        result = self.buffers.empty(parts.numel(), parts)
        received, mine = result.chunk(self.world_size), parts.chunk(self.world_size)[self.rank]

        def collect(addresses: dict[int, list[int]]) -> None:
            received[self.rank].copy_(mine)
            for peer in self.memory.peers:
                (address,) = addresses[peer.rank]
                self.memory.copy(peer, [(address + self.rank * mine.nbytes, received[peer.rank])])

        return Started(result, PeerWork(self.memory, [parts], collect))

    def _reduce_at_once(self, flat: torch.Tensor, reduction: str) -> Started:
        result = torch.empty_like(flat)
        return Started(result, self._reduce_range([flat], [0], 0, reduction, result))

    def _exchange(self, flat: torch.Tensor, reduction: str, into: torch.Tensor | None) -> Started:
        return self._reduce_at_once(flat, reduction)

    def _reduce_range(
        self,
        pieces: Sequence[torch.Tensor],
        offsets: Sequence[int],
        start: int,
        reduction: str,
        result: torch.Tensor,
    ) -> PeerWork:
        """Reduce the range that begins at ``start`` of every rank's buffer into ``result``."""
        combine = REDUCTIONS[reduction]
        peers = {peer.rank: peer for peer in self.memory.peers}
        step = max(PIECE_BYTES // result.itemsize, 1)

        def fetch(rank: int, addresses: list[int], parts: list, into: torch.Tensor) -> torch.Tensor:
            if sum(length for *_, length in parts) < into.numel():
                into.zero_()
            if rank == self.rank:
                for index, first, to, length in parts:
                    into[to : to + length] = pieces[index][first : first + length]
                return into
            where = [
                (addresses[index] + first * into.itemsize, into[to : to + length])
                for index, first, to, length in parts
            ]
            self.memory.copy(peers[rank], where)
            return into

        def collect(addresses: dict[int, list[int]]) -> None:
            scratch = result.new_empty(0)
            for at in range(0, result.numel(), step):
                out = result[at : at + step]
                parts = _overlaps(pieces, offsets, start + at, out.numel())
                total = None
                for rank in range(self.world_size):
                    index, first, _, length = parts[0] if parts else (0, 0, 0, 0)
                    if rank == self.rank and length == out.numel():
                        piece = pieces[index][first : first + length]
                    elif rank != self.rank and (total is None or (rank == 1 and self.rank == 0)):
                        piece = fetch(rank, addresses[rank], parts, out)
                    else:
                        if not scratch.numel():
                            scratch = result.new_empty(min(step, result.numel()))
                        piece = fetch(rank, addresses.get(rank, []), parts, scratch[: out.numel()])
                    total = piece if total is None else combine(total, piece, out=out)
                divide(out, reduction, self.mean_of)

        return PeerWork(self.memory, pieces, collect)


def _overlaps(
    pieces: Sequence[torch.Tensor], offsets: Sequence[int], start: int, length: int
) -> list[tuple[int, int, int, int]]:
    """Return each piece's part of a range: its index, its start, the place, the length."""
    found = []
    for index in range(max(bisect_right(offsets, start) - 1, 0), len(pieces)):
        first = max(start - offsets[index], 0)
        to = offsets[index] + first - start
        if to >= length:
            break
        count = min(pieces[index].numel() - first, length - to)
        if count > 0:
            found.append((index, first, to, count))
    return found
