"""What each rank keeps of the parameters and gradients between steps.

A parameter stays the very same Python object for its whole life.  At stage 3 its storage is
exchanged for an empty one and its values live in a flat shard; its class is plain while a
zero-compiled function runs, so that Dynamo always sees ordinary parameters, and guarded
(``zerofx.runtime.guarded``) in between, so that every other reader gets an error with words.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zerofx.plan import ParameterInfo, shard_bounds, storage_order
from zerofx.runtime.guarded import ShardedGradient, check_guardable, guarded_class

# Small tensors travel to the other ranks together, in messages of at most this size.
_COALESCED_BYTES = 4 * 1024 * 1024


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make what is created here usable by any later step.

    The first call may be an evaluation under ``torch.inference_mode()``, whose tensors can
    never be updated afterwards.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def take_shard(whole: torch.Tensor, info: ParameterInfo, rank: int) -> torch.Tensor:
    """Return a copy of the range that ``rank`` owns, flat and padded with zeros.

    Shapes: ``info.shape`` -> ``[info.shard_numel]``, in storage order.
    """
    shard = torch.zeros(info.shard_numel, dtype=whole.dtype, device=info.device)
    _copy_range(shard, whole, info, rank)
    return shard


def _copy_range(shard: torch.Tensor, whole: torch.Tensor, info: ParameterInfo, rank: int) -> None:
    start, stop = shard_bounds(info.numel, rank, info.world_size)
    flat = whole.detach().permute(info.storage_order).reshape(-1)
    shard[: stop - start].copy_(flat[start:stop])


def whole_from_flat(flat: torch.Tensor, info: ParameterInfo) -> torch.Tensor:
    """View a gathered flat buffer as the parameter, with its strides.

    Shapes: ``[info.padded_numel]`` or ``[info.numel]`` -> ``info.shape``.
    """
    return flat.as_strided(info.shape, info.stride)


def gather(shard: torch.Tensor, info: ParameterInfo, communicator: Any) -> torch.Tensor:
    """Return the whole tensor that every rank holds a shard of.  Collective.

    It travels as bytes: gloo has no complex numbers, nor all of the small floats.

    Shapes: ``[info.shard_numel]`` -> ``info.shape``, in memory of its own.
    """
    if info.numel == 0:
        return shard.new_empty_strided(info.shape, info.stride)
    flat = communicator.gather_whole(shard.view(torch.uint8)).view(shard.dtype)
    whole = whole_from_flat(flat, info)
    # Without padding in its storage (which torch.save would write out), and never the shard.
    owned = flat.numel() == info.numel and flat.data_ptr() != shard.data_ptr()
    return whole if owned else whole.clone(memory_format=torch.preserve_format)


def _memory_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's memory as flat bytes.  Raises: ValueError if it is not dense."""
    order = storage_order(tuple(tensor.shape), tensor.stride())
    return tensor.detach().permute(order).view(-1).view(torch.uint8)


def make_equal(tensors: Iterable[torch.Tensor], communicator: Any) -> None:
    """Overwrite every tensor with rank 0's, small ones together.  Collective."""
    if communicator.world_size == 1:
        return
    pending: list[torch.Tensor] = []

    def flush() -> None:
        if not pending:
            return
        message = torch.cat(pending)
        communicator.broadcast(message)
        for data, received in zip(pending, message.split([len(d) for d in pending]), strict=True):
            data.copy_(received)
        pending.clear()

    for tensor in tensors:
        try:
            data = _memory_bytes(tensor)
        except ValueError:  # a buffer with holes or overlaps; parameters were checked before
            packed = tensor.detach().contiguous()
            communicator.broadcast(_memory_bytes(packed))
            tensor.copy_(packed)
            continue
        if len(data) >= _COALESCED_BYTES:
            communicator.broadcast(data)
            continue
        bytes_after = sum(map(len, pending)) + len(data)
        if pending and (bytes_after > _COALESCED_BYTES or pending[0].device != data.device):
            flush()
        if len(data):
            pending.append(data)
    flush()


@dataclass(eq=False)
class BoundParameter:
    """One parameter that zero-compiled functions have taken charge of.

    ``gradient`` is this rank's flat shard of a gradient that crosses calls, and ``stub`` the
    tensor without storage that stands for it as ``parameter.grad``.
    """

    reference: weakref.ref[nn.Parameter]
    info: ParameterInfo
    stage: int
    communicator: Any
    own_class: type
    guarded_class: type
    gradient: torch.Tensor | None = None
    stub: torch.Tensor | None = None
    open_count: int = 0
    retired: bool = False
    snapshot: tuple[weakref.ref[torch.Tensor], int, int] | None = field(default=None, repr=False)
    _shard: torch.Tensor | None = None
    _freed: torch.Tensor | None = field(default=None, repr=False)
    _accumulation_hook: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter itself, or None once it has been garbage-collected."""
        return self.reference()

    @property
    def is_sharded(self) -> bool:
        """Whether the values live in ``shard`` (stage 3) and not in the parameter."""
        return self.stage == 3 and not self.retired

    @property
    def is_open(self) -> bool:
        """Whether the parameter is whole for now, inside ``full_params``."""
        return self.open_count > 0

    @property
    def shard(self) -> torch.Tensor | None:
        """This rank's flat range of the values at stage 3, else None.  Always the same tensor.

        Raises: RuntimeError while the values are elsewhere.
        """
        if self.retired:
            raise RuntimeError(
                f"parameter {self.name!r} was given back by zerofx.unshard: bind it again"
            )
        if self.open_count:
            raise RuntimeError(
                f"parameter {self.name!r} is whole inside `with zerofx.full_params(model):`, and "
                "a compiled step works on its shards. Call the step after the with block."
            )
        return self._shard

    def write(self, whole: torch.Tensor) -> None:
        """Keep this rank's range of ``whole``, cast to the parameter's dtype."""
        assert self._shard is not None
        with ordinary_tensors():
            _copy_range(self._shard, whole, self.info, self.communicator.rank)
        self.snapshot = None

    def gather(self) -> torch.Tensor:
        """Return the whole value in memory of its own.  Collective."""
        assert self._shard is not None
        with ordinary_tensors():
            return gather(self._shard, self.info, self.communicator)

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
            if self._shard is None or self._shard.dtype != self.info.dtype:
                self._shard = take_shard(whole, self.info, self.communicator.rank)
            else:
                _copy_range(self._shard, whole, self.info, self.communicator.rank)
            if self._freed is None:
                self._freed = _without_storage(self.info)
            parameter.data = self._freed
            # A backward pass through a graph built on the old values says so, and does not
            # read the freed storage.
            torch.autograd.graph.increment_version(parameter)
        self.snapshot = None

    def drop_gradient_unless_used(self, parameter: nn.Parameter) -> None:
        if self.gradient is not None and parameter.grad is not self.stub:
            self.gradient = None

    def refuse_eager_accumulation(self, parameter: nn.Parameter) -> None:
        """Make an eager ``backward()`` an error while ``parameter.grad`` has no storage.

        Autograd adds to it in C++, past every guard.
        """
        if self.gradient is None or not parameter.requires_grad:
            return

        def refuse(_gradient: torch.Tensor) -> None:
            current = self.parameter
            if current is not None and current.grad is self.stub:
                raise RuntimeError(
                    f"an eager backward() would add to the gradient of parameter {self.name!r}, "
                    f"and ZeRO stage {self.stage} keeps only this rank's shard of it between "
                    "steps. Compile the function that calls backward() with "
                    "torch.compile(..., backend='zero'), or call optimizer.zero_grad() first."
                )

        self._accumulation_hook = parameter.register_hook(refuse)

    def allow_accumulation(self, parameter: nn.Parameter) -> None:
        if self._accumulation_hook is None:
            return
        self._accumulation_hook.remove()
        self._accumulation_hook = None
        if not parameter._backward_hooks:
            parameter._backward_hooks = None  # Dynamo takes a hooked tensor for another one

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


def _without_storage(info: ParameterInfo) -> torch.Tensor:
    tensor = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=info.device)
    tensor.untyped_storage().resize_(0)
    return tensor


class ParameterRegistry:
    """Every parameter bound in this process, shared by all its zero-compiled functions.

    An entry goes when its parameter does.
    """

    def __init__(self, join_timeout_s: float = 30.0) -> None:
        self.join_timeout_s = join_timeout_s
        self.epoch = 0  # moves at every compiled call: values may have changed
        self.attached: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # The dict that the ranks last met to fill, and when: see value_for_state_dict.
        self.last_destination: tuple[weakref.ref[Any], int] | None = None
        self._bound: dict[int, BoundParameter] = {}
        self._stubs: dict[int, BoundParameter] = {}
        self._buffers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._claims: dict[int, tuple[Any, list[tuple[int, int, Any, str]]]] = {}
        self._guarded: list[tuple[Any, type, type]] | None = None
        self._depth = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._bound)

    def lookup(self, parameter: Any) -> BoundParameter | None:
        """The entry of ``parameter``, or None if no compiled function has seen it."""
        bound = self._bound.get(id(parameter))
        return bound if bound is not None and bound.reference() is parameter else None

    def keeper(self, tensor: torch.Tensor) -> BoundParameter | None:
        """The entry behind a parameter or behind a gradient's stub."""
        found = self.lookup(tensor) or self._stubs.get(id(tensor))
        return found if found and (found.reference() is tensor or found.stub is tensor) else None

    def bind(
        self,
        parameters: Sequence[tuple[nn.Parameter, ParameterInfo]],
        buffers: Sequence[torch.Tensor],
        communicator: Any,
        stage: int,
    ) -> list[BoundParameter]:
        """Take charge of a step's parameters: make them rank 0's, and shard them at stage 3.

        Only what has not been seen before is touched, so that a second compilation or another
        function of the same model changes nothing.  Collective for new ones.

        Raises: ValueError or TypeError, before anything has changed, for a parameter bound with
        another stage or other ranks, or one that cannot be sharded.
        """
        with self._lock, ordinary_tensors():
            new: dict[int, tuple[nn.Parameter, ParameterInfo]] = {}
            for parameter, info in parameters:
                bound = self.lookup(parameter)
                if bound is not None:
                    _check_same_options(bound, communicator, stage)
                    if not bound.matches(info) and not bound.is_open:
                        self._follow(bound, parameter)
                elif id(parameter) not in new:
                    check_guardable(parameter, info.name)
                    self._claim_storage(parameter, info.name)
                    new[id(parameter)] = (parameter, info)
            new_buffers = self._unseen(buffers)
            make_equal([p for p, _ in new.values()] + new_buffers, communicator)
            for parameter, info in new.values():
                self._add(parameter, info, communicator, stage)
            return [self._bound[id(parameter)] for parameter, _ in parameters]

    def _add(
        self, parameter: nn.Parameter, info: ParameterInfo, communicator: Any, stage: int
    ) -> None:
        key = id(parameter)

        def forget(reference: Any) -> None:
            if key in self._bound and self._bound[key].reference is reference:
                self._drop(self._bound[key], key)

        own = type(parameter)
        guarded = guarded_class(own)  # type: ignore[arg-type]
        reference = weakref.ref(parameter, forget)
        bound = BoundParameter(reference, info, stage, communicator, own, guarded)
        self._bound[key] = bound
        if stage == 3:
            bound.free()
            self._guard_again(bound)

    def _drop(self, bound: BoundParameter, key: int) -> None:
        self._bound.pop(key, None)
        self._stubs.pop(id(bound.stub), None)
        self._guarded = None
        bound.retired, bound.gradient, bound._shard = True, None, None

    def _unseen(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        unseen = []
        for buffer in buffers:
            key = id(buffer)
            if key in self._buffers and self._buffers[key]() is buffer:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"a buffer of shape {tuple(buffer.shape)} is on the meta device and has no "
                    "values. Materialize the model before its first step."
                )
            self._buffers[key] = weakref.ref(buffer, _forgetting(self._buffers, key))
            unseen.append(buffer)
        return unseen

    def _claim_storage(self, parameter: nn.Parameter, name: str) -> None:
        """Refuse two parameter objects over the same memory: each would get a shard of its own."""
        storage = parameter.untyped_storage()
        start = parameter.storage_offset() * parameter.itemsize
        stop = start + parameter.nbytes
        key = id(storage)
        if key not in self._claims or self._claims[key][0]() is not storage:
            forget = weakref.ref(storage, _forgetting(self._claims, key))
            self._claims[key] = (forget, [])
        claims = self._claims[key][1]
        for other_start, other_stop, other, other_name in claims:
            if other() is parameter:
                return
            if other() is not None and start < other_stop and other_start < stop:
                raise ValueError(
                    f"parameters {other_name!r} and {name!r} are two nn.Parameter objects over the "
                    "same memory, and each would be sharded and updated on its own. Tie them by "
                    "assigning the same object: `b.weight = a.weight`."
                )
        claims.append((start, stop, weakref.ref(parameter), name))

    def enter_call(self) -> None:
        """Make parameters and gradients plain for the duration of a compiled call."""
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            self.epoch += 1
            for reference, own, _ in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = own
            for bound, parameter in self._with_stub():
                bound.stub.__class__ = torch.Tensor
                bound.allow_accumulation(parameter)
                bound.drop_gradient_unless_used(parameter)

    def exit_call(self) -> None:
        """Guard them again, and let go of the gradients that nobody refers to any more."""
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            for bound, parameter in self._with_stub():
                bound.drop_gradient_unless_used(parameter)
                bound.refuse_eager_accumulation(parameter)
                bound.stub.__class__ = ShardedGradient
            for reference, _, guarded in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = guarded

    def _swaps(self) -> list[tuple[Any, type, type]]:
        if self._guarded is None:
            self._guarded = [
                (bound.reference, bound.own_class, bound.guarded_class)
                for bound in list(self._bound.values())
                if bound.is_sharded and not bound.open_count
            ]
        return self._guarded

    def _with_stub(self) -> list[tuple[BoundParameter, nn.Parameter]]:
        pairs = [(bound, bound.reference()) for bound in list(self._stubs.values())]
        return [(bound, parameter) for bound, parameter in pairs if parameter is not None]

    def _guard_again(self, bound: BoundParameter) -> None:
        self._guarded = None
        if self._depth == 0:
            bound.parameter.__class__ = bound.guarded_class

    def open(self, bound: BoundParameter) -> None:
        """Give a sharded parameter its whole value and its own class.  Collective; nests."""
        with self._lock:
            if bound.open_count == 0:
                whole, parameter = bound.gather(), bound.parameter
                parameter.__class__ = bound.own_class
                parameter.data = whole  # type: ignore[union-attr]
                self._guarded = None
            bound.open_count += 1

    def close(self, bound: BoundParameter) -> None:
        """Undo one ``open``: the last one keeps this rank's range of what was written."""
        with self._lock:
            bound.open_count -= 1
            parameter = bound.parameter
            if bound.open_count or bound.retired or parameter is None:
                return
            try:
                self._follow(bound, parameter)
            except ValueError:
                self.retire(bound)
                raise
            bound.free()
            self._guard_again(bound)

    def _follow(self, bound: BoundParameter, parameter: nn.Parameter) -> None:
        was = bound.info
        bound.follow(parameter)
        if bound.info is not was:
            self._stubs.pop(id(bound.stub), None)
            bound.stub = bound.gradient = None

    def retire(self, bound: BoundParameter) -> None:
        """Forget a parameter, which must be whole by now, and leave it plain."""
        with self._lock:
            parameter = bound.parameter
            if parameter is not None:
                parameter.__class__ = bound.own_class
                bound.allow_accumulation(parameter)
            self._drop(bound, id(parameter))

    def store_gradient(self, bound: BoundParameter, shard: torch.Tensor) -> torch.Tensor:
        """Keep a gradient's shard, and return what to store as ``parameter.grad``.

        Shapes: ``[info.shard_numel]`` -> ``info.shape``, a tensor without storage and the same
        object every time, so that Dynamo's guards on it hold.
        """
        with self._lock, ordinary_tensors():
            if bound.stub is None:
                bound.stub = _without_storage(bound.info)
                self._stubs[id(bound.stub)] = bound
            bound.gradient = shard.detach()
            if self._depth == 0:
                bound.stub.__class__ = ShardedGradient
            return bound.stub

    def gradient_shard(self, bound: BoundParameter, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's flat range of ``gradient``: what was stored, or a part of a whole tensor.

        Raises: RuntimeError for a stub whose gradient has been released, or another's stub.
        """
        if gradient is bound.stub and bound.gradient is not None:
            return bound.gradient
        owner = self._stubs.get(id(gradient))
        if owner is not None and owner.stub is gradient:
            raise RuntimeError(
                f"the gradient of parameter {bound.name!r} stands for a shard of {owner.name!r} "
                "that has been released or belongs to that parameter: it was taken off p.grad and "
                "put back. Leave p.grad to backward() and zero_grad()."
            )
        with ordinary_tensors():
            return take_shard(gradient, bound.info, bound.communicator.rank)

    def persistent_bytes(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, int]:
        """Bytes this rank holds between steps, padding included, by kind."""
        parameters = gradients = 0
        for bound in list(self._bound.values()):
            parameter = bound.parameter
            if parameter is None:
                continue
            shard = bound._shard if bound.is_sharded and not bound.open_count else None
            parameters += parameter.nbytes if shard is None else shard.nbytes
            if bound.gradient is not None and parameter.grad is bound.stub:
                gradients += bound.gradient.nbytes
            elif parameter.grad is not None and parameter.grad is not bound.stub:
                gradients += parameter.grad.nbytes
        states = sum(
            value.nbytes
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        return {"parameters": parameters, "gradients": gradients, "optimizer_states": states}


def _forgetting(table: dict[int, Any], key: int) -> Callable[[Any], None]:
    def forget(_reference: Any) -> None:
        table.pop(key, None)

    return forget


def _check_same_options(bound: BoundParameter, communicator: Any, stage: int) -> None:
    remedy = (
        "A model is bound by the first zero-compiled function it goes through, evaluation "
        "included: give every function that touches it the same options, or call "
        "zerofx.unshard(model, optimizer) first."
    )
    if bound.stage != stage:
        raise ValueError(
            f"parameter {bound.name!r} is bound at ZeRO stage {bound.stage}, and this function "
            f"asks for stage {stage}. {remedy}"
        )
    mine, other = bound.communicator, communicator
    ranks = [(c.rank, c.world_size, getattr(c, "group", None)) for c in (mine, other)]
    if mine is not other and ranks[0] != ranks[1]:
        raise ValueError(
            f"parameter {bound.name!r} is bound to another process group (rank {mine.rank} of "
            f"{mine.world_size}) than this function asks for (rank {other.rank} of "
            f"{other.world_size}). {remedy}"
        )


REGISTRY = ParameterRegistry()
