"""Tensors whose values are not here: metadata is answered, everything else is an explained error.

Eager torch reads a freed storage without looking: a segmentation fault.  So the class of a tensor
without values, and only that, is exchanged for one whose ``__torch_function__`` refuses every
function that needs values.

A function that hands a tensor to C++ without asking ``__torch_function__`` gets past this, and
reads the freed storage: ``torch.tensor(p)``, ``torch.Tensor(p)``, ``torch.vmap``, ``torch.func``
transforms, a TorchScript function, ``torch.utils.dlpack.to_dlpack``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any

from torch import nn

from zerofx import compat
from zerofx.errors import NoValuesError

Special = Callable[[FrameType, tuple[Any, ...], dict[str, Any]], Any]
"""Answers a function, given the caller's frame and the arguments; or returns NotImplemented."""

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


class Guarded:
    """The base of all guarded classes; comes before the torch class in their bases.

    ``_special`` are the functions, by name, that are answered although they need values.
    """

    _special: Mapping[str, Special] = MappingProxyType({})

    def _name_in_repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        name = self._name_in_repr()
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        dtype, device = self.dtype, self.device  # type: ignore[attr-defined]
        return f"{type(self).__name__}({name}shape={shape}, dtype={dtype}, device='{device}')"

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        touched, is_metadata = read_or_write(func)
        if is_metadata or (touched == "type" and len(args) == 1 and not kwargs):
            with compat.tensors.without_torch_function():
                return func(*args, **kwargs)
        special = cls._special.get(touched)
        if special is not None and args:
            answer = special(sys._getframe(1), args, kwargs)
            if answer is not NotImplemented:
                return answer
        first = next(guarded_among((args, kwargs)))
        raise NoValuesError(first._refusal(touched))

    def _refusal(self, touched: str) -> str:
        """Return the error's text for a function that needs the values."""
        raise NotImplementedError


def guarded_among(value: Any) -> Iterator[Any]:
    """The guarded tensors in a function's arguments, also in lists and dicts."""
    if isinstance(value, Guarded):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from guarded_among(item)
    elif isinstance(value, dict):
        yield from guarded_among(list(value.values()))


def is_saving(frame: FrameType) -> bool:
    """Return whether a function is called by ``Module._save_to_state_dict``.

    ``state_dict`` reaches each parameter through it and nothing else.  Looking at the caller leaves
    the user's modules without a hook or a patched method.
    """
    saving = frame.f_code.co_name == nn.Module._save_to_state_dict.__name__
    return saving and isinstance(frame.f_locals.get("self"), nn.Module)
