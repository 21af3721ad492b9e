"""The collectives behind the ``zerofx::`` operators.

Each backend has its own way to run them: ``zerofx.runtime.comm.transport``.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx import compat
from zerofx.accelerator import kind
from zerofx.ir.mesh import Mesh
from zerofx.runtime.comm.gloo import GlooTransport
from zerofx.runtime.comm.peer import PeerTransport
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.comm.rendezvous import store_of_this_start
from zerofx.runtime.comm.transport import (
    LocalTransport,
    NativeTransport,
    Started,
)
from zerofx.runtime.memory.pages import BufferPool

FAILED_TIMEOUT_S = 30.0
"""Ranks that fail alike have failed within this, or the last of them has."""

Transport = LocalTransport | NativeTransport | GlooTransport


class Communicator:
    """The collectives of one process group.

    ``*_start`` returns the buffer that will hold the result; ``wait`` completes it.  An input
    must not change before its wait, and all ranks must start and wait in the same order.  One that
    is ``part_of`` another, along an axis of its ranks, has its results waited for there, and means
    are over all of its ranks.
    An error of a collective keeps its type and says which collective it was.
    """

    # By the identity of the groups, which each communicator keeps alive.
    _known: weakref.WeakValueDictionary[tuple[int, ...], Communicator] = (
        weakref.WeakValueDictionary()
    )

    @classmethod
    def of(
        cls, group: dist.ProcessGroup | DeviceMesh | None, outer_stage: int | None = None
    ) -> Communicator:
        """Return the communicator of a group or mesh; None is the world, or a world of one.

        On a mesh of two axes ``outer_stage`` says what is cut over the outer one too; with None
        the axes do not count.

        Raises: ValueError for a mesh of more dimensions, or of two that does not have the world's
        ranks in their order; and for a group without this rank.
        """
        if isinstance(group, DeviceMesh):
            if group.ndim > 1:
                _check_covers_world(group)
                if outer_stage is not None and group.size(0) > 1 and group.mesh_dim_names:
                    return cls._of_mesh(group, outer_stage)
            group = group.get_group() if group.ndim == 1 else None
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"process_group is {group!r}, which is no process group that this rank is in: "
                "call the step only on ranks of the group, or leave process_group out"
            )
        key = (id(group),)
        communicator = cls._known.get(key)
        if communicator is None:
            communicator = cls._known[key] = cls(group)
        return communicator

    @classmethod
    def _of_mesh(cls, mesh: DeviceMesh, outer_stage: int) -> Communicator:
        names = mesh.mesh_dim_names
        assert names is not None, "stages go by the names of axes"
        groups = {name: mesh.get_group(name) for name in names}
        key = (*map(id, groups.values()), outer_stage)
        communicator = cls._known.get(key)
        if communicator is None:
            communicator = MeshCommunicator(dist.group.WORLD, groups, outer_stage)
            cls._known[key] = communicator
        return communicator

    def __init__(
        self, group: dist.ProcessGroup | None, part_of: Communicator | None = None
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._whole = whole = self if part_of is None else part_of
        self.mean_of = whole.world_size
        self._num_started = 0  # of the whole's
        self._failure = ""  # the name of one in the middle of a call, until all ranks have met
        self.buffers: BufferPool = BufferPool() if part_of is None else part_of.buffers
        self._in_flight: dict[int, Started] = {} if part_of is None else part_of._in_flight
        self._memory: PeerMemory | None = None
        self._local = LocalTransport()
        self._transports: dict[str, Transport] = {}

    @property
    def mesh(self) -> Mesh:
        """The ranks' axes."""
        return Mesh.flat(self.world_size, self.rank)

    @property
    def shards(self) -> Communicator:
        """The communicator of the ranks that each hold a shard of one copy of optimizer states."""
        return self

    @property
    def keepers(self) -> Communicator:
        """The same of one copy of the parameters, at stage 3."""
        return self.shards

    def along(self, axis: str) -> Communicator:
        """The communicator of the ranks along an axis, or along all."""
        return self

    def parts(self) -> Sequence[Communicator]:
        """This communicator, and those of single axes."""
        return [self]

    def all_reduce_start(
        self, input: torch.Tensor, reduction: str, in_place: bool = False
    ) -> torch.Tensor:
        """Start reducing ``input`` over the ranks.  ``mean`` is the sum divided by ``mean_of``.

        The result may be ``in_place``, in a contiguous input's memory.
        """
        launch = partial(self._transport(input).all_reduce, input.detach(), reduction, in_place)
        return self._start("all_reduce", input.nbytes, launch)

    def reduce_scatter_start(
        self, flat: torch.Tensor, reduction: str, world_size: int
    ) -> torch.Tensor:
        """Start reducing a flat [N * n] buffer; this rank receives its own [n] of the result."""
        transport = self._transport(flat)
        launch = partial(transport.reduce_scatter, flat.detach().contiguous(), reduction)
        return self._start("reduce_scatter", flat.nbytes, launch)

    def takes_pieces(self, like: torch.Tensor) -> bool:
        """Return whether ``pieces_start`` takes tensors like this one."""
        return isinstance(self._transport_of(like.device), PeerTransport)

    def pieces_start(
        self,
        kind: str,
        pieces: Sequence[torch.Tensor],
        offsets: Sequence[int],
        numel: int,
        reduction: str,
    ) -> torch.Tensor:
        """Start a ``reduce_scatter`` or ``all_reduce`` of a buffer with these at ``offsets``.

        The rest of it would be zero.
        """
        run = getattr(self._transport(pieces[0]), f"{kind}_pieces")
        launch = partial(run, pieces, offsets, numel, reduction)
        return self._start(kind, numel * pieces[0].itemsize, launch)

    def all_gather_start(
        self, shard: torch.Tensor, world_size: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Start concatenating every rank's [n] to [N * n], alive until ``free``.

        ``into`` is where, if given: a flat buffer of which ``shard`` is this rank's part.
        """
        launch = partial(self._transport(shard).all_gather, shard.detach().reshape(-1), into)
        return self._start("all_gather", shard.nbytes * world_size, launch)

    def there(self, result: torch.Tensor) -> torch.Tensor:
        """Start what is complete already: all ranks have this result from before."""
        return self._start("all_gather", 0, partial(Started, result))

    def all_to_all_start(self, parts: torch.Tensor) -> torch.Tensor:
        """Start sending each rank its equal part of a flat buffer, in rank order.

        The result is what all have sent here, in that order too.
        """
        launch = partial(self._transport(parts).swap, parts.detach().contiguous())
        return self._start("all_to_all", parts.nbytes, launch)

    def all_to_all(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send each rank its part of a flat buffer and return what all have sent here; blocks.

        ``sent`` and ``received`` count the elements to and from each rank, in rank order.
        """
        launch = partial(self._transport_of(flat.device).all_to_all, flat, sent, received)
        return self.wait(self._start("all_to_all", flat.nbytes, launch))

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Complete ``started``, the very tensor that a ``*_start`` returned, and return it."""
        pending = self._in_flight.pop(id(started), None)
        if pending is None:
            raise RuntimeError(
                f"wait on a {started.dtype} tensor of shape {tuple(started.shape)} that is not in "
                "flight: it was waited on before, or is a copy or view of what a start returned"
            )
        try:
            if pending.work is not None:
                pending.work.wait()
            pending.finish()
        except Exception as error:
            self._explain(error, pending.kind, started.nbytes)
            raise
        return started

    def complete(self) -> None:
        """Wait for all that is in flight."""
        for pending in list(self._in_flight.values()):
            self.wait(pending.result)

    def free(self, gathered: torch.Tensor) -> None:
        """Do nothing: a gathered buffer goes as the program drops its last reference here.

        Resizing the storage instead would crash on any alias that an operator did not declare.
        """

    def broadcast(self, tensor: torch.Tensor, src_group_rank: int = 0) -> None:
        """Overwrite ``tensor`` with that of one rank of the group; blocks.  For first calls."""
        target = tensor.detach()
        buffer = target.contiguous()
        launch = partial(self._transport(tensor).broadcast, buffer, src_group_rank)
        self.wait(self._start("broadcast", tensor.nbytes, launch))
        if buffer is not target:
            target.copy_(buffer)

    def gather_whole(self, shard: torch.Tensor) -> torch.Tensor:
        """Return every rank's [n] as [N * n], in the order of their shards; blocks.

        For state dicts and other reading.
        """
        nbytes = shard.nbytes * self.world_size
        was_on = self.buffers.is_on
        self.buffers.is_on = False  # the result is the caller's, who may write its memory to a file
        try:
            launch = partial(self._transport(shard).all_gather, shard.detach().reshape(-1))
            gathered = self.wait(self._start("all_gather", nbytes, launch))
            if not self.mesh.is_cut:
                return gathered
            parts, ranks = gathered.chunk(self.world_size), range(self.world_size)
            return torch.cat([parts[self.mesh.rank_of(shard)] for shard in ranks])
        except Exception:
            memories = (part._memory for part in self.parts())
            if not any(memory.program for memory in memories if memory is not None):
                self.abandon()  # which a program does itself
            raise
        finally:
            self.buffers.is_on = was_on

    def overlaps(self, like: torch.Tensor) -> bool:
        """Return whether tensors like this one travel while the rank computes."""
        return self._transport(like).overlaps

    @contextlib.contextmanager
    def running(self, program: int) -> Iterator[None]:
        """Let the others see, where they can, which program what is started here belongs to.

        If it fails behind its first collective, the next one is started only if all ranks have
        failed behind the same one: what else they wait for would be taken for it.
        """
        memories = [part._memory for part in self.parts() if part._memory is not None]
        for memory in memories:
            memory.program = program
        started = self._num_started
        try:
            yield
        except BaseException:
            if self._num_started > started and not self._failure:
                self._note_failure()
            raise
        finally:
            for memory in memories:
                memory.program = 0

    def abandon(self) -> None:
        """Forget what is in flight, after a step that failed; ranks that wait for it fail too."""
        for started in self._in_flight.values():
            started.abandon()
        self._in_flight.clear()
        for part in self.parts():
            if part._memory is not None:
                part._memory.fail()

    def _note_failure(self) -> None:
        """Tell the others behind which collective a call has failed; peers' memory does so itself.

        It waits for nobody: an error is on its way.
        """
        transports = [one for part in self.parts() for one in part._transports.values()]
        if self.group is None or all(isinstance(one, PeerTransport) for one in transports):
            return
        with contextlib.suppress(Exception):  # a store that is gone tells nobody
            store = compat.tensors.agreement_store(self.group)
            name = f"failed/{self.mesh.axes}/{self.mesh.outer_stage}"
            number = store.add(f"{name}/{self.rank}", 1)  # which outlives this object
            self._failure = f"{name}/{number}"
            store.set(f"{self._failure}/{self.rank}", str(self._num_started))

    def _check_failed_alike(self) -> None:
        """Go on after a call that failed, if all ranks' have, behind the same collective.

        Raises: RuntimeError if not, now and whenever it is called again.
        """
        assert self.group is not None
        store = compat.tensors.agreement_store(self.group)
        keys = [f"{self._failure}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + FAILED_TIMEOUT_S
        while not (all_have := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.01)  # a blocking wait would hold the store's connection
        if not all_have or len({store.get(key) for key in keys}) > 1:
            raise RuntimeError(
                f"a call failed in the middle on rank {self.rank}, and the others have not failed "
                "at the same place: they wait in it, and would take what this rank sends now for "
                "what they wait for. End the process, and go on from a checkpoint."
            )
        self._failure = ""

    def _start(self, kind: str, nbytes: int, launch: Callable[[], Started]) -> torch.Tensor:
        if self._whole._failure:
            self._whole._check_failed_alike()
        self._whole._num_started += 1
        try:
            started = launch()
        except Exception as error:
            self._explain(error, kind, nbytes)
            raise
        started.kind = kind
        self._in_flight[id(started.result)] = started
        return started.result

    def _explain(self, error: Exception, kind: str, nbytes: int) -> None:
        _explain_device(error)
        error.add_note(
            f"in {kind} of {nbytes} bytes, on rank {self.rank} of {self.world_size}; if it says "
            "that a connection closed or timed out, another rank has died or is not calling the "
            "same function: look at the other ranks' logs"
        )

    def _transport(self, tensor: torch.Tensor) -> Transport:
        """Return the transport of tensors like this one; one without elements has nowhere to go."""
        return self._transport_of(tensor.device) if tensor.numel() else self._local

    def _transport_of(self, of_device: torch.device) -> Transport:
        if self.group is None or self.world_size == 1:
            return self._local
        device = of_device.type
        if device not in self._transports:
            self._transports[device] = self._connect(device, self.group)
        return self._transports[device]

    def _connect(self, device: str, group: dist.ProcessGroup) -> Transport:
        backend = _backend_for(device, group)
        if backend != "gloo":
            averages = backend == "nccl" and self.mean_of == self.world_size
            return NativeTransport(group, averages, self.mean_of)
        numbers = dist.get_process_group_ranks(group) if self.mean_of > self.world_size else ()
        self._memory = PeerMemory.of(group, numbers)
        if self._memory is not None:
            return PeerTransport(self._memory, group, self.buffers, self.mean_of)
        return GlooTransport(group, self.buffers, self.mean_of)


class MeshCommunicator(Communicator):
    """The collectives of a mesh of two axes: along each of them, and between all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        groups: Mapping[str, dist.ProcessGroup],
        outer_stage: int,
    ) -> None:
        super().__init__(group)
        self._along = {name: Communicator(one, part_of=self) for name, one in groups.items()}
        sizes = tuple((name, part.world_size) for name, part in self._along.items())
        self._mesh = Mesh(sizes, self.rank, outer_stage)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def shards(self) -> Communicator:
        return self if self._mesh.is_cut else self._along[self._mesh.inner]

    @property
    def keepers(self) -> Communicator:
        return self.shards if self._mesh.parts == 1 else self._along[self._mesh.inner]

    def along(self, axis: str) -> Communicator:
        return self._along.get(axis, self)

    def parts(self) -> Sequence[Communicator]:
        return [self, *self._along.values()]


OF_MODELS = frozenset({"tp", "pp", "cp", "sp", "ep"})
"""Names of axes along which ranks share a batch or a model, as in tensor parallelism."""


def _check_covers_world(mesh: DeviceMesh) -> None:
    """Raise ValueError unless a mesh has two axes, and the world's ranks in their order."""
    names = mesh.mesh_dim_names or ()
    axes = f"({', '.join(map(str, names or mesh.shape))})"
    if mesh.ndim > 2 or not OF_MODELS.isdisjoint(names):
        raise ValueError(
            f"process_group is a device mesh of {mesh.ndim} dimensions {axes}, and the ranks that "
            "each have a batch of their own are along one or two: pass these, e.g. mesh['dp']"
        )
    if any("," in name for name in names):
        raise ValueError(
            f"process_group is a device mesh with the axes {axes}: names with a comma are those of "
            "several axes together. Give mesh_dim_names without one"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"process_group is a device mesh {axes} of ranks {ranks}, and the world has "
            f"{dist.get_world_size()}: a mesh of two axes has all of the world's ranks, in their "
            "order. init_device_mesh(device, (nodes, ranks of a node), mesh_dim_names=...) makes it"
        )


def _explain_device(error: Exception) -> None:
    if "Duplicate GPU" in str(error):
        error.add_note(
            "Ranks of one machine have their tensors on the same device. Give each its own before "
            "the model is made: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))."
        )


def _backend_for(device: str, group: dist.ProcessGroup) -> str:
    configuration = dist.get_backend_config(group)
    backends = dict(pair.split(":") for pair in configuration.split(","))
    backend = backends.get(device)
    if backend is None or (backend == "gloo" and device != "cpu"):
        raise ValueError(
            f"the process group ({configuration}) cannot move {device} tensors as zerofx needs: "
            "make it with init_process_group('cpu:gloo,cuda:nccl')"
        )
    return backend


START_TIMEOUT_S = 30 * 60.0  # torch's own for a process group
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def default_group(
    environ: Mapping[str, str], device: torch.device | None = None
) -> dist.ProcessGroup | None:
    """Return the world: the group that exists, the one torchrun describes, or None for one rank.

    A group made here is of this rank's ``device``, if it has one that is no CPU, and is destroyed
    at exit unless the user has done so.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not all(name in environ for name in TORCHRUN_VARIABLES):
            return None
        backend, name, arguments = "gloo", kind(), _rendezvous(environ)
        if name is not None:
            backend = f"cpu:gloo,{name}:{dist.get_default_backend_for_device(name)}"
            if device is not None and device.type == name:
                arguments["device_id"] = device
        try:
            dist.init_process_group(backend, **arguments)
        except RuntimeError as error:
            _explain_device(error)
            raise
        atexit.register(_destroy, dist.group.WORLD)
    return dist.group.WORLD


def _rendezvous(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``init_process_group``: torchrun's store, with keys of this start."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    timeout = timedelta(seconds=START_TIMEOUT_S)
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    store = store_of_this_start(store, rank, world_size, START_TIMEOUT_S)
    return {"store": store, "rank": rank, "world_size": world_size}


def _destroy(group: dist.ProcessGroup) -> None:
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
