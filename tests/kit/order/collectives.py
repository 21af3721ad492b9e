"""Collectives with NCCL's contract: on a stream of their own, and ``wait`` has a stream wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.order.places import PlacedNotes
from zerofx import compat
from zerofx.order.clocks import Where
from zerofx.runtime.comm import communication, transport
from zerofx.runtime.comm.transport import NativeTransport


class Work:
    """A collective under way: it keeps what it reads and writes until it is waited for."""

    def __init__(self, notes: PlacedNotes, mark: int, tensors: Any) -> None:
        self._notes, self._mark, self._tensors = notes, mark, tensors

    def wait(self) -> None:
        self._notes.after(self._notes.stream, self._mark, "collective wait")
        self._tensors = ()


class Collectives:
    """The stand-ins for torch's collectives: made at once, by gloo if there are other ranks."""

    def __init__(self, notes: PlacedNotes) -> None:
        self.notes = notes
        self._line = notes.clocks.line("communication stream", is_stream=True)
        self._transports: dict[int, NativeTransport] = {}

    def patches(self) -> Iterator[Any]:
        patch = mock.patch.object
        communicator = communication.Communicator
        yield patch(communicator, "_transport_of", lambda one, device: self._transport(one.group))
        yield patch(transport, "dist", self._namespace())
        yield patch(compat.tensors, "start_all_gather", self._all_gather)
        yield patch(compat.tensors, "start_reduce_scatter", self._reduce_scatter)

    def _namespace(self) -> Any:
        return SimpleNamespace(
            **{name: getattr(dist, name) for name in ("ReduceOp", "Work", "ProcessGroup")},
            all_reduce=self._all_reduce,
            broadcast=self._broadcast,
            all_to_all_single=self._all_to_all,
        )

    def _transport(self, group: Any) -> NativeTransport:
        if id(group) not in self._transports:
            made = NativeTransport(group or SimpleNamespace(size=lambda: 1))
            made.group = group
            self._transports[id(group)] = made
        return self._transports[id(group)]

    def _all_reduce(self, tensor: Tensor, op: Any, group: Any, async_op: bool) -> Work:
        return self._run("all_reduce", group, [], tensor, lambda: _reduce(tensor, op, group))

    def _broadcast(self, tensor: Tensor, group: Any, group_src: int, async_op: bool) -> Work:
        def run() -> None:
            dist.broadcast(tensor, group=group, group_src=group_src)

        return self._run("broadcast", group, [], tensor, run)

    def _all_gather(self, result: Tensor, shard: Tensor, group: Any) -> Work:
        def run() -> None:
            parts = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(parts, shard.clone(), group=group)
            result.copy_(torch.cat(parts))

        return self._run("all_gather", group, [shard], result, run)

    def _reduce_scatter(self, result: Tensor, flat: Tensor, op: Any, group: Any) -> Work:
        def run() -> None:
            whole = flat.clone()
            _reduce(whole, op, group)
            result.copy_(whole.chunk(group.size())[group.rank()])

        return self._run("reduce_scatter", group, [flat], result, run)

    def _all_to_all(
        self, result: Tensor, flat: Tensor, received: Any, sent: Any, group: Any, async_op: bool
    ) -> Work:
        def run() -> None:
            dist.all_to_all_single(result, flat, received, sent, group=group)

        return self._run("all_to_all", group, [flat], result, run)

    def _run(
        self, name: str, group: Any, read: list[Tensor], written: Tensor, run: Callable[[], None]
    ) -> Work:
        """Note a collective behind what the current stream has been given, and make it."""
        notes = self.notes
        before = notes.mark(notes.stream, "collective start")
        notes.after(self._line, before, "collective start", given=True)
        for tensor in (*read, written):
            notes.lies_in(tensor, Where.DEVICE, name, is_new=False)
        ranges = [one for tensor in read for one in notes.ranges(tensor, False, name)]
        ranges += notes.ranges(written, True, name)
        notes.operator(name, ranges, line=self._line)
        with compat.tensors.without_dispatch_modes():
            if group is not None and group.size() > 1:
                run()
            elif read and read[0].data_ptr() != written.data_ptr():
                written.copy_(read[0].view(written.shape))
        return Work(notes, notes.mark(self._line, "end"), (read, written))


def _reduce(tensor: Tensor, op: Any, group: Any) -> None:
    is_mean = op == dist.ReduceOp.AVG
    dist.all_reduce(tensor, dist.ReduceOp.SUM if is_mean else op, group=group)
    if is_mean:
        tensor.div_(group.size())
