"""Tensors whose values are not here: metadata is answered, everything else is an explained error.

Between steps a sharded parameter has its shape but no storage, and eager torch reads a freed
storage without looking: a segmentation fault.  So its class, and only that, is exchanged for
one whose ``__torch_function__`` refuses whatever needs values.

What hands a tensor to C++ without asking ``__torch_function__`` gets past this, and reads the
freed storage: ``torch.tensor(p)``, ``torch.Tensor(p)``, ``torch.vmap``, ``torch.func`` transforms,
a TorchScript function, ``torch.utils.dlpack.to_dlpack``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.ir.parameters import storage_order

Special = Callable[[FrameType, tuple[Any, ...], dict[str, Any]], Any]
"""Answers a function, given who called it and with what; or says NotImplemented."""

_ATTRIBUTES = frozenset(
    "shape dtype device layout ndim itemsize nbytes names name "
    "requires_grad grad grad_fn grad_dtype is_leaf output_nr retains_grad "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized "
    "is_sparse is_sparse_csr is_vulkan is_xla is_xpu "
    "_version _base _backward_hooks _post_accumulate_grad_hooks".split()
)
_WRITABLE_ATTRIBUTES = frozenset(
    "grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks".split()
)
_METHODS = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size dim_order __len__ "
    "__hash__ __dir__ get_device has_names untyped_storage "
    "is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_same_size "
    "is_shared is_signed _is_view "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook".split()
)


def read_or_write(func: Callable[..., Any]) -> tuple[str, bool]:
    """Name what ``func`` touches, and say whether it is metadata.

    An attribute arrives as the bound ``__get__`` or ``__set__`` of its descriptor.
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        allowed = _ATTRIBUTES if name == "__get__" else _WRITABLE_ATTRIBUTES
        return attribute, attribute in allowed
    return name, name in _METHODS


def _keeper(tensor: torch.Tensor) -> Any:
    """The ``BoundParameter`` behind a guarded tensor, or None once it is gone."""
    # Not at the top: the registry swaps these classes in and out, so it imports this module.
    from zerofx.runtime.parameters.registry import REGISTRY

    return REGISTRY.keeper(tensor)


class Guarded:
    """What guarded classes share; comes before the torch class in their bases.

    ``_special`` are functions that are answered although they need values, by name.
    """

    _special: Mapping[str, Special] = MappingProxyType({})

    def __repr__(self) -> str:
        keeper = _keeper(self)
        name = f"{keeper.name!r}, " if keeper is not None else ""
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        dtype, device = self.dtype, self.device  # type: ignore[attr-defined]
        return f"{type(self).__name__}({name}shape={shape}, dtype={dtype}, device='{device}')"

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        touched, is_metadata = read_or_write(func)
        if is_metadata or (touched == "type" and len(args) == 1 and not kwargs):
            with compat.without_torch_function():
                return func(*args, **kwargs)
        special = cls._special.get(touched)
        if special is not None and args:
            answer = special(sys._getframe(1), args, kwargs)
            if answer is not NotImplemented:
                return answer
        first = next(guarded_among((args, kwargs)))
        raise RuntimeError(first._refusal(touched))

    def _refusal(self, touched: str) -> str:
        """What is said to who needs the values."""
        return _refusal(touched, self)


class ShardedParameter(Guarded, nn.Parameter):
    """A parameter between steps, when each rank keeps its own shard of it and nothing else."""


class GuardedGradient(Guarded, torch.Tensor):
    """A gradient between steps, whose values are not what a reader would take them for."""


class ShardedGradient(GuardedGradient):
    """A gradient between steps, when each rank keeps its own shard of it and nothing else."""


class UnreducedGradient(GuardedGradient):
    """A gradient between steps, when each rank keeps its own, which nobody has averaged yet."""


class GuardedState(Guarded, torch.Tensor):
    """An optimizer's state between steps, whose values are in files.

    ``bucket`` is where they are, None once they are elsewhere; ``place`` and ``field_name`` say
    which of it, ``of`` says so in words.
    """

    bucket: Any = None
    place: int
    state_name: str
    field_name: str
    of: str


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
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or (
        parameter.layout is not torch.strided
    ):
        raise TypeError(
            f"parameter {name!r} (class {kind.__name__}, layout {parameter.layout}) does not keep "
            "its values in one ordinary storage, and cannot be sharded as a flat buffer. Use a "
            "dense nn.Parameter."
        )
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


def guarded_among(value: Any) -> Iterator[Any]:
    """The guarded tensors in a function's arguments, also in lists and dicts."""
    if isinstance(value, Guarded):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from guarded_among(item)
    elif isinstance(value, dict):
        yield from guarded_among(list(value.values()))


def _refusal(touched: str, tensor: torch.Tensor) -> str:
    if isinstance(tensor, GuardedState):
        return (
            f"{touched!r} needs the values of {tensor.of}, which offload_tier='nvme' keeps in "
            "files between steps. Use optimizer.state_dict(), which has them whole, or get plain "
            "objects back with zerofx.unshard(model, optimizer)."
        )
    keeper = _keeper(tensor)
    name = repr(keeper.name) if keeper is not None else "whose model is gone"
    if isinstance(tensor, GuardedGradient):
        kept = keeper.what_is_kept if keeper is not None else "nothing of it is kept"
        return (
            f"{touched!r} needs the values of the gradient of parameter {name}, and {kept} between "
            "steps. Do it inside the compiled "
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
    keeper = _keeper(parameter)
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
    from zerofx.runtime.parameters.registry import REGISTRY  # see _keeper

    REGISTRY.write(keeper, source)
    return parameter


def _detach(frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``parameter.detach()`` as ``Module.state_dict`` calls it: the whole value.

    ``state_dict`` reaches each parameter through ``Module._save_to_state_dict`` and nothing
    else.  Looking at who calls leaves the user's modules without a hook or a patched method,
    and any other ``detach`` (whose caller would take the result for a live view) refused.
    """
    tensor = args[0]
    if isinstance(tensor, GuardedGradient):
        return NotImplemented
    keeper = _keeper(tensor)
    caller = frame.f_locals
    saving = frame.f_code.co_name == nn.Module._save_to_state_dict.__name__
    if keeper is None or not saving or not isinstance(caller.get("self"), nn.Module):
        return NotImplemented
    from zerofx.runtime.access import value_for_state_dict  # see _keeper

    return value_for_state_dict(keeper, caller.get("destination"))


def _zero(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Zero what is behind gradients: ``optimizer.zero_grad(set_to_none=False)``."""
    tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if any(isinstance(tensor, ShardedParameter | GuardedState) for tensor in tensors):
        return NotImplemented
    for tensor in tensors:
        if not isinstance(tensor, GuardedGradient):
            tensor.zero_()
            continue
        keeper = _keeper(tensor)
        if keeper is None or keeper.gradient is None:
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            keeper.gradient.zero_()
    return None if isinstance(args[0], (list, tuple)) else args[0]


def _detach_in_place(_frame: FrameType, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """A gradient between steps has no history to be detached from."""
    return args[0] if isinstance(args[0], GuardedGradient) else NotImplemented


_SPECIAL: dict[str, Special] = {
    "copy_": _copy,
    "detach": _detach,
    "detach_": _detach_in_place,
    "zero_": _zero,
    "_foreach_zero_": _zero,
}
for _kind in (ShardedParameter, GuardedGradient, GuardedState):
    _kind._special = _SPECIAL
