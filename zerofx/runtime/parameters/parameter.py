"""One parameter between steps: the state it is in, its shard, and its gradient's shard."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from zerofx.accelerator import is_accelerator
from zerofx.deferred.tape import Source
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import (
    copy_range,
    gather,
    ordinary_tensors,
    take_shard,
    without_base,
    without_storage,
)
from zerofx.runtime.parameters.bucket_memory import BucketMemory
from zerofx.runtime.parameters.snapshots import SNAPSHOTS
from zerofx.runtime.storage.bucket import Bucket, Key, Left, Location, Part, Place, Reader
from zerofx.runtime.storage.memory import HostMemory, Memory


class State(Enum):
    """The form in which a parameter is held between steps."""

    WHOLE = auto()
    """Stages 0 to 2: its values are its own."""
    SHARDED = auto()
    """Stage 3: this rank keeps a shard, and the parameter has no storage."""
    OPEN = auto()
    """Stage 3: it is whole for now, inside ``full_params``."""
    RETIRED = auto()
    """It has been given back by ``unshard``, or is gone."""


@dataclass(eq=False)
class ParameterState:
    """One parameter that zero-compiled functions have taken charge of.

    ``gradient`` is this rank's flat shard of a gradient that crosses calls, and ``stub`` the
    tensor without storage that stands for it as ``parameter.grad``.  If ``is_unreduced``, it is
    whole and this rank's own, and the gradient is its mean over the ranks.  If it ``is_sum``, it is
    cut over the inner axis of a mesh, a sum over that, and still to be averaged over the outer one.

    ``errors`` are what wires of gradients have lost, by the axis that they went over, and not yet
    brought to other ranks: those of the whole bucket, which its parameters share.

    Parameters of one bucket have the same ``bucket``: their ``BucketMemory`` if they live in one
    (stages 1 and 2).  ``location`` is where the values of the shard lie between uses; ``host`` is
    the memory for those that are not on the device.  ``home`` is the bucket that the shard has last
    been given to, and will come to if it is not there; None where it was made.  In a file, the
    shard is an empty tensor.  ``version`` counts the writes to the shard, and ``second_shards``
    are those of the buckets that it is the first of.
    """

    reference: weakref.ref[nn.Parameter]
    info: ParameterInfo
    stage: int
    communicator: Any
    own_class: type
    host: HostMemory = field(repr=False)
    bucket: object = None
    location: Location = Location.DEVICE
    home: ShardBucket | None = None
    gradient: torch.Tensor | None = None
    stub: torch.Tensor | None = None
    is_unreduced: bool = False
    is_sum: bool = False
    version: int = 0
    second_shards: list[SecondShard] = field(default_factory=list, repr=False)
    errors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    state: State = State.WHOLE
    snapshot: tuple[weakref.ref[torch.Tensor], int, int] | None = field(default=None, repr=False)
    _shard: torch.Tensor | None = None
    _freed: torch.Tensor | None = field(default=None, repr=False)
    accumulation_hook: Any = field(default=None, repr=False)  # by the gradients' registry

    def __post_init__(self) -> None:
        if self.stage == 3:
            self.state = State.SHARDED

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter itself, or None once it has been garbage-collected."""
        return self.reference()

    @property
    def memory(self) -> BucketMemory | None:
        """The flat memory that the whole parameter lives in with its bucket, if it does."""
        return self.bucket if isinstance(self.bucket, BucketMemory) else None

    @property
    def ranks(self) -> Any:
        """The process group that holds it: each mesh of one has a communicator of its own."""
        group = self.communicator.group
        return self.communicator if group is None else group  # alone

    @property
    def what_is_kept(self) -> str:
        """Say in words what this rank keeps of a gradient that crosses calls."""
        if self.is_unreduced:
            return "accumulate='local' keeps each rank's own, not yet averaged over the ranks,"
        return f"ZeRO stage {self.stage} keeps only this rank's shard of it"

    @property
    def file(self) -> ShardBucket | None:
        """The bucket in files that the shard belongs to, if it does."""
        is_filed = self.home is not None and self.home.place.location is Location.FILE
        return self.home if is_filed else None

    @property
    def shard(self) -> torch.Tensor | None:
        """This rank's flat range of the values at stage 3, else None.

        The same tensor for as long as it stays on the device, or off it; empty while its values
        are in a file.

        Raises: RuntimeError while the values are elsewhere.
        """
        if self.state is State.RETIRED:
            raise RuntimeError(
                f"parameter {self.name!r} was given back by zerofx.unshard: bind it again"
            )
        if self.state is State.OPEN:
            raise RuntimeError(
                f"parameter {self.name!r} is whole inside `with zerofx.full_params(model):`, and "
                "a compiled step works on its shards. Call the step after the with block."
            )
        return self._shard

    def live_in(self, buffer: torch.Tensor, location: Location) -> None:
        """Keep the shard in its bucket's buffer from now on.  Before the first ``free``."""
        kept = self.info.kept
        shard = buffer.narrow(0, kept.position_in_shard, kept.shard_numel)
        # A view would hold its memory when the shard has left for another place.
        self._shard, self.location = without_base(shard), location

    def values(self, reader: Reader | None = None) -> torch.Tensor:
        """The shard's values, wherever they are: the shard itself, or a copy of what is in a file.

        With a ``reader``, the copy is the reader's: not to be written to.

        Raises: FileTierError if they are lost, or cannot be read.
        """
        assert self._shard is not None
        if self.location is not Location.FILE:
            return self._shard
        assert self.home is not None, "it has come there"
        key = self.home.key_of(self)
        return reader.read(self.home, key) if reader else Reader().read(self.home, key).clone()

    def lie_in(self, part: torch.Tensor, location: Location) -> None:
        """Have the shard in this memory: with what is there, or what it has brought along."""
        assert self._shard is not None
        with torch.no_grad(), ordinary_tensors():
            if self.location is not Location.FILE:
                self._settle()
                part.copy_(self._shard)
                self.location = location  # an interrupt finds the values in the part
            if part.device == self._shard.device:
                self._shard.data = part
            else:
                self._shard = part

    def leave_memory(self) -> None:
        """Be an empty tensor until the values come back from the file."""
        assert self._shard is not None
        if self.location is Location.FILE:
            self._settle()  # a GPU may still copy it: its memory is given out again
            with torch.no_grad(), ordinary_tensors():
                self._shard.data = self._shard.new_empty(0)

    def _renewed(self) -> torch.Tensor:
        """Return the shard to write new values of all of it to: none is in a file any more."""
        assert self._shard is not None
        self.version += 1
        if self.location is Location.FILE:
            pinned = is_accelerator(self.info.device)
            with ordinary_tensors():
                self._shard.data = self.host.empty(
                    self.info.kept.shard_numel, self.info.dtype, pinned
                ).zero_()
            self.location = Location.HOST
        self._settle()
        self.snapshot = None
        return self._shard

    def write(self, whole: torch.Tensor) -> None:
        """Keep this rank's range of ``whole``, cast to the parameter's dtype."""
        with ordinary_tensors():
            copy_range(self._renewed(), whole, self.info.kept, self.info.kept.rank)

    def write_shard(self, values: torch.Tensor) -> None:
        """Keep these new values of the shard, if the parameter has not been given back."""
        if self._shard is not None:
            with ordinary_tensors():
                self._renewed().copy_(values)

    def _settle(self) -> None:
        """Wait until nothing reads the shard that may now be written to."""
        SNAPSHOTS.before_change([self.parameter])
        if self.location is not Location.DEVICE and self._shard is not None:
            self.host.settle(self._shard)

    def gather(self, reader: Reader | None = None) -> torch.Tensor:
        """Return the whole value in memory of its own.  Collective.

        A ``reader`` reads the parameters of one bucket at once.
        """
        assert self._shard is not None
        with ordinary_tensors():  # what is kept on the host travels from the device
            shard = self.values(reader).to(self.info.device)
            return gather(shard, self.info.kept, self.communicator.keepers)

    def take_snapshot(self, value: torch.Tensor, epoch: int) -> None:
        """Remember the whole value that one entry of a state dict holds."""
        self.snapshot = (weakref.ref(value), epoch, value._version)

    def snapshot_in(self, entries: Mapping[str, Any] | None, epoch: int) -> torch.Tensor | None:
        """The value taken last, if it is one of ``entries`` and still the parameter's."""
        if self.snapshot is None or entries is None:
            return None
        reference, taken, version = self.snapshot
        value = reference()
        if value is None or taken != epoch or value._version != version:
            return None
        return value if any(entry is value for entry in entries.values()) else None

    def free(self) -> None:
        """Move the values from the parameter into the shard.

        The parameter gets another storage instead of its own shrunk: whatever else looks at
        that one (a view the user kept, a neighbour in one flat buffer) still finds its values.
        """
        parameter = self.parameter
        assert parameter is not None
        with ordinary_tensors():
            whole = parameter.detach()
            assert self._shard is not None
            if self._shard.dtype != self.info.dtype:
                self._settle()
                self.version += 1
                self.location, self.home, self.snapshot = Location.DEVICE, None, None
                self._shard = take_shard(whole, self.info.kept, self.info.kept.rank)
            else:
                copy_range(self._renewed(), whole, self.info.kept, self.info.kept.rank)
            parameter.data = self.freed()
            # A backward pass through a graph built on the old values says so, and does not
            # read the freed storage.
            torch.autograd.graph.increment_version(parameter)

    def read(self, source: Source) -> None:
        """Have the shard, which is new, hold what is in a file; the parameter was never made."""
        parameter = self.parameter
        assert parameter is not None and self._shard is not None
        start, stop = self.info.kept.owned_by(self.info.kept.rank)
        with ordinary_tensors():
            source.read(self.info.storage_order, start, stop, self._shard[: stop - start])
            parameter.data = self.freed()

    def freed(self) -> torch.Tensor:
        """Return the tensor in the parameter's place while its values are in the shard."""
        if self._freed is None:
            info = self.info
            self._freed = without_storage(info.shape, info.stride, info.dtype, info.device)
        return self._freed

    def retire(self) -> None:
        """Let go of the shards for good."""
        parameter = self.parameter
        if self.memory is not None and parameter is not None:
            self.memory.leave(parameter)
        self.bucket = None
        self.errors = {}
        self.state = State.RETIRED
        self.gradient = self._shard = self.home = None
        self.second_shards.clear()
        self.location = Location.DEVICE

    def matches(self, info: ParameterInfo) -> bool:
        mine = self.info
        return (mine.shape, mine.stride, mine.dtype, mine.device) == (
            (info.shape, info.stride, info.dtype, info.device)
        )

    def follow(self, parameter: nn.Parameter) -> None:
        """Take note of a new dtype or device (``model.to``) of a whole parameter.

        Raises: ValueError if the elements are no longer those that the shards hold.
        """
        info = replace(
            self.info,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        if self.matches(info):
            return
        was = self.info
        if self.stage > 0 and (info.shape, info.storage_order) != (was.shape, was.storage_order):
            raise ValueError(
                f"parameter {self.name!r} had shape {was.shape} and strides {was.stride} when it "
                f"was first used, and has {info.shape} and {info.stride} now: the shards of its "
                "optimizer state no longer fit. Call zerofx.unshard(model, optimizer) before "
                "changing it."
            )
        self.info, self._freed = info, None


@dataclass
class SecondShard:
    """What a rank keeps of a bucket for its node alone: ``flat``, of these versions of ``bounds``.

    Source: hierarchical partitioning, Wang et al. 2023 (ZeRO++), section 3.2.
    """

    bounds: list[ParameterState]
    flat: torch.Tensor
    versions: list[int] = field(default_factory=list)


class ShardBucket(Bucket):
    """This rank's shards of one bucket's parameters, one behind the other, of one dtype.

    ``infos`` are of the parameters; ``adopt`` says which they are.
    """

    what = "parameter shards"

    def __init__(self, place: Place, name: str, infos: Sequence[ParameterInfo]) -> None:
        numels = tuple((number, info.kept.shard_numel) for number, info in enumerate(infos))
        super().__init__(place, name, (Part("shard", infos[0].dtype, numels),))
        self.device = infos[0].device
        self._bounds: list[weakref.ref[ParameterState]] = []
        self._has_new = False

    def adopt(self, bounds: Sequence[ParameterState]) -> None:
        """Be the bucket of these parameters, whose shards are still where they are.

        Raises: FileTierError if they are in other files, and cannot be read.
        """
        self._bounds = [weakref.ref(bound) for bound in bounds]
        reader = Reader()
        for bound in bounds:
            if bound.location is Location.FILE:
                bound.write_shard(bound.values(reader))
            bound.home = self

    def key_of(self, bound: ParameterState) -> Key:
        return self._members().index(bound), "shard"

    def _members(self) -> list[ParameterState | None]:
        """The parameters in it, in order; None for one that is gone, or has left it."""
        bounds = [reference() for reference in self._bounds]
        return [bound if bound is not None and bound.home is self else None for bound in bounds]

    @property
    def is_gone(self) -> bool:
        return bool(self._bounds) and not any(self._members())

    def has_any(self) -> bool:
        return any(
            bound is not None and bound.location is Location.FILE for bound in self._members()
        )

    def parts_elsewhere(self, memory: Memory) -> tuple[Part, ...]:
        there = (bound is None or bound.location is memory.location for bound in self._members())
        return () if all(there) else self.parts

    def arrive(self, views: Mapping[Key, torch.Tensor]) -> None:
        """Have each shard lie in this memory; copy what does not yet."""
        for bound, part in zip(self._members(), views.values(), strict=True):
            if bound is not None:
                self._has_new |= bound.location is not Location.FILE
                bound.lie_in(part, self.place.location)

    def leave(self, views: Mapping[Key, torch.Tensor]) -> Left:
        for bound in self._members():
            if bound is not None:
                bound.leave_memory()
        left, self._has_new = Left.NEW if self._has_new else Left.KNOWN, False
        return left
