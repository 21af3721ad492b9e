"""Parameters, gradients and states between steps, when this rank does not hold their values.

Each has its shape but no storage.  ``ParameterRegistry`` exchanges its class for one of these.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.errors import FileTierError, StepError
from zerofx.ir.parameters import storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.memory.guard import Guarded, Special, guarded_among, is_saving
from zerofx.runtime.storage.bucket import Bucket, Key, Reader

if TYPE_CHECKING:
    from zerofx.runtime.parameters.registry import ParameterRegistry


class Kept(Guarded):
    """A guarded tensor whose values a ``ParameterState`` keeps, or a file.

    ``_keepers`` is this process's registry, which sets it: it finds what keeps a tensor's values,
    and reads and writes whole values there.
    """

    _keepers: ClassVar[ParameterRegistry]

    def _name_in_repr(self) -> str:
        keeper = self._keepers.keeper(self)
        return f"{keeper.name!r}, " if keeper is not None else ""

    def _refusal(self, touched: str) -> str:
        return _refusal(touched, self)


class ShardedParameter(Kept, nn.Parameter):
    """A parameter between steps, when each rank keeps its own shard of it and nothing else."""


class GuardedGradient(Kept, torch.Tensor):
    """A gradient between steps that holds no values, or not those that a reader would expect."""


class ShardedGradient(GuardedGradient):
    """A gradient between steps, when each rank keeps its own shard of it and nothing else."""


class UnreducedGradient(GuardedGradient):
    """A gradient between steps, when each rank keeps its own, not averaged yet."""


class GuardedState(Kept, torch.Tensor):
    """An optimizer's state between steps, whose values are in files.

    ``bucket`` is where they are, None once they are elsewhere; ``key`` says which tensor of the
    bucket it is, ``of`` says so in words.
    """

    bucket: Bucket | None = None
    key: Key
    of: str

    def read_by(self, reader: Reader) -> torch.Tensor:
        """Return a copy of the values, on the CPU.

        Raises: FileTierError if they are gone, or cannot be read.
        """
        if self.bucket is None:
            raise FileTierError(
                f"{self.of} has been replaced since this tensor stood for it, by load_state_dict or"
                " by a function without offload_tier='nvme': take it from optimizer.state_dict()"
            )
        with ordinary_tensors():
            return reader.read(self.bucket, self.key).clone()


def state_value(value: Any, reader: Reader) -> Any:
    """Return a state's value; what ``reader`` reads of one whose values are elsewhere."""
    return value.read_by(reader) if isinstance(value, GuardedState) else value


@functools.cache
def guarded_class(own: type) -> type:
    """Return the class that guards a parameter of class ``own``.

    A user's subclass of ``nn.Parameter`` gets a guarded subclass of its own, so that
    ``isinstance`` and the attributes it adds keep working; the object's ``__dict__`` is
    untouched.

    Raises: TypeError if the class cannot be exchanged.
    """
    if own is nn.Parameter:
        return ShardedParameter
    return type(f"Sharded{own.__name__}", (ShardedParameter, own), {"__module__": own.__module__})


def check_dense(parameter: nn.Parameter, name: str) -> None:
    """Raise TypeError for a parameter that has its values in several tensors, or sparse."""
    kind = type(parameter)
    is_own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if (is_own and not compat.tensors.is_fake(parameter)) or parameter.layout is not torch.strided:
        raise TypeError(
            f"parameter {name!r} (class {kind.__name__}, layout {parameter.layout}) does not keep "
            "its values in one ordinary storage, and cannot be sharded as a flat buffer. Use a "
            "dense nn.Parameter."
        )


def refuse_gradient_hooks(parameter: nn.Parameter, name: str, own: Any = None) -> None:
    """Refuse hooks of the user's on a parameter's gradient: ``own`` is the only other one.

    Raises: StepError.
    """
    hooks = parameter._backward_hooks or ()
    later = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if len(hooks) > (own is not None) or later:
        raise StepError(
            f"parameter {name!r} has gradient hooks, which would not run inside the compiled step. "
            "Remove them, and do their work on p.grad after backward()."
        )


def check_guardable(parameter: nn.Parameter, name: str) -> None:
    """Refuse a parameter that cannot be cut into flat shards or guarded between steps.

    Raises: TypeError for its class, ValueError for its present state.
    """
    kind = type(parameter)
    if not issubclass(kind, nn.Parameter):
        raise TypeError(
            f"parameter {name!r} is a {kind.__name__} and not an nn.Parameter: only a Parameter "
            "can be guarded between steps. Wrap the tensor in nn.Parameter."
        )
    if nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is not initialized yet (a lazy module). Run one eager forward "
            "pass before the first compiled step."
        )
    check_dense(parameter, name)
    if parameter.is_meta:
        raise ValueError(
            f"parameter {name!r} is on the meta device and has no values. Materialize the model "
            "before its first step."
        )
    if parameter.is_inference():
        raise ValueError(
            f"parameter {name!r} was created under torch.inference_mode() and can never be "
            "updated. Create the model outside of it."
        )
    is_there = LEDGER.memory_of(parameter) is None
    if is_there and parameter.numel() and parameter.untyped_storage().nbytes() == 0:
        raise ValueError(f"parameter {name!r} has no storage: its values were freed elsewhere")
    try:
        storage_order(tuple(parameter.shape), parameter.stride())
    except ValueError as error:
        raise ValueError(
            f"parameter {name!r} cannot be sharded: {error}. Make it dense: "
            "nn.Parameter(p.detach().contiguous())."
        ) from None
    try:
        parameter.__class__ = guarded_class(kind)  # type: ignore[arg-type]
        parameter.__class__ = kind
    except TypeError as error:
        raise TypeError(
            f"parameter {name!r} is of class {kind.__name__}, which cannot be guarded between "
            f"steps ({error}). Use nn.Parameter, or a class that can be subclassed."
        ) from error


def _refusal(touched: str, tensor: Any) -> str:
    if isinstance(tensor, GuardedState):
        return (
            f"{touched!r} needs the values of {tensor.of}, which offload_tier='nvme' keeps in "
            "files between steps. Use optimizer.state_dict(), which has them whole, or get plain "
            "objects back with zerofx.unshard(model, optimizer)."
        )
    keeper = tensor._keepers.keeper(tensor)
    name = repr(keeper.name) if keeper is not None else "whose model is gone"
    if isinstance(tensor, GuardedGradient):
        if keeper is None:
            return (
                f"{touched!r} needs the values of a gradient that has been replaced since, or whose"
                " model is gone. Keep a copy of what is to outlive zero_grad(): p.grad.clone() in "
                "the compiled step that computes it."
            )
        return (
            f"{touched!r} needs the values of the gradient of parameter {name}, and "
            f"{keeper.what_is_kept} between steps. Do it inside the compiled "
            "step, or get plain objects back with zerofx.unshard(model, optimizer)."
        )
    return (
        f"{touched!r} needs the values of parameter {name}, and ZeRO stage 3 keeps only this "
        "rank's shard of it between steps. Use `with zerofx.full_params(model):` to read or change "
        "it, model.state_dict() to save it, zerofx.unshard(model, optimizer) to have plain "
        "objects back, or do it inside the compiled step."
    )


def _copy(_frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep this rank's range of ``whole`` in ``parameter.copy_(whole)``: ``load_state_dict``."""
    parameter = args[0]
    source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if not isinstance(parameter, ShardedParameter) or not isinstance(source, torch.Tensor):
        return NotImplemented
    keeper = parameter._keepers.keeper(parameter)
    if keeper is None or next(guarded_among(source), None) is not None:
        return NotImplemented
    if source.shape != parameter.shape:
        raise RuntimeError(
            f"copy_ into the sharded parameter {keeper.name!r} takes a tensor of its whole shape "
            f"{tuple(parameter.shape)}, not {tuple(source.shape)}: each rank keeps its own range "
            "of it. Expand the tensor first."
        )
    if torch.is_grad_enabled() and parameter.requires_grad:
        raise RuntimeError(
            f"copy_ would change parameter {keeper.name!r}, a leaf that requires grad, in place. "
            "Do it under torch.no_grad()."
        )
    parameter._keepers.write(keeper, source)
    return parameter


def _detach(frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``parameter.detach()`` as ``Module.state_dict`` calls it: the whole value.

    Any other ``detach``, whose caller would take the result for a live view, is refused.
    """
    tensor = args[0]
    keeper = tensor._keepers.keeper(tensor)
    if isinstance(tensor, GuardedGradient) or keeper is None or not is_saving(frame):
        return NotImplemented
    return tensor._keepers.value_for_state_dict(keeper, frame.f_locals.get("destination"))


def _zero(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Zero what is behind gradients: ``optimizer.zero_grad(set_to_none=False)``."""
    tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if any(isinstance(tensor, ShardedParameter | GuardedState) for tensor in tensors):
        return NotImplemented
    for tensor in tensors:
        if not isinstance(tensor, GuardedGradient):
            tensor.zero_()
            continue
        keeper = tensor._keepers.keeper(tensor)
        if keeper is None or keeper.gradient is None:
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            keeper.gradient.zero_()
    return None if isinstance(args[0], (list, tuple)) else args[0]


def _detach_in_place(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """A gradient between steps has no history to be detached from."""
    return args[0] if isinstance(args[0], GuardedGradient) else NotImplemented


def _converted(name: str) -> Special:
    """Answer a conversion that changes nothing, as ``model.cpu()`` of a model that is there."""

    def answer(_frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *others = args
        if next(guarded_among((others, kwargs)), None) is not None or "memory_format" in kwargs:
            return NotImplemented
        with ordinary_tensors():
            like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            is_same = getattr(like, name)(*others, **kwargs) is like
        return tensor if is_same else NotImplemented

    return answer


def _may_be_data(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Tell a module, before it sets a tensor's data, that a tensor can be its own."""
    return True if args[0] is args[1] else NotImplemented


def _data(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``parameter.data = parameter``, with which a module ends a conversion."""
    return None if len(args) == 2 and args[0] is args[1] else NotImplemented


_SPECIAL: dict[str, Special] = {
    **{
        name: _converted(name)
        for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
    },
    "_has_compatible_shallow_copy_type": _may_be_data,
    "copy_": _copy,
    "data": _data,
    "detach": _detach,
    "detach_": _detach_in_place,
    "zero_": _zero,
    "_foreach_zero_": _zero,
}
for _kind in (ShardedParameter, GuardedGradient, GuardedState):
    _kind._special = _SPECIAL
