"""The entries of a model's state dict, and those that the model has to be given.

A hook may compute entries of parameters, as torchtitan's three matrices of a fused one.  Where it
needs values that other ranks have it is left out: the parameter is there, by its own name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerofx.errors import NoValuesError

logger = logging.getLogger("zerofx")

EXTRA_STATE = "_extra_state"
"""The end of the name of a module's own state (``nn.Module.get_extra_state``)."""


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that ``torch.compile(model)`` adds."""
    return name.replace("_orig_mod.", "")


def model_entries(model: nn.Module, own: Collection[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """Return the entries of ``model.state_dict()``: parameters and buffers themselves.

    Also the names of parameters whose modules' hooks are left out, for want of values, or as the
    hook replaces one that is in ``own``, by which a checkpoint has parameters by their own names.
    """
    entries, unhooked = _entries(model, own)
    names = {plain_name(name) for name, value in entries.items() if id(value) in unhooked}
    return {plain_name(name): value for name, value in entries.items()}, names


def _entries(model: nn.Module, own: Collection[str]) -> tuple[dict[str, Any], set[int]]:
    """Return the same by the state dict's names, and the ``id`` of such parameters."""
    if not any(module._state_dict_hooks for module in model.modules()):
        return model.state_dict(keep_vars=True), set()
    chosen: set[int] = set()
    if own:
        with _without_hooks(model, lambda replaced: True):
            plain = model.state_dict(keep_vars=True)
        chosen = {id(value) for name, value in plain.items() if plain_name(name) in own}
    with _without_hooks(model, lambda replaced: not chosen.isdisjoint(replaced)) as unhooked:
        return model.state_dict(keep_vars=True), unhooked


@contextlib.contextmanager
def _without_hooks(model: nn.Module, leave_out: Callable[[set[int]], bool]) -> Iterator[set[int]]:
    """Leave out hooks that need values that are not here, and of others those to be left out.

    ``leave_out`` is given the ``id`` of each parameter that a hook replaces, if it does any.
    Yields that of each parameter whose hook has been left out.
    """
    unhooked: set[int] = set()

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, entries: dict[str, Any], prefix: str, *others: Any) -> Any:
            before = dict(entries)
            own = (value for name, value in before.items() if name.startswith(prefix))
            replaced = {id(value) for value in own if isinstance(value, nn.Parameter)}
            try:
                result = hook(module, entries, prefix, *others)
            except NoValuesError:
                pass
            else:
                replaced -= {
                    id(value) for value in (entries if result is None else result).values()
                }
                if not replaced or not leave_out(replaced):
                    return result
            entries.clear()
            entries.update(before)
            unhooked.update(replaced)
            return None

        call._from_public_api = getattr(hook, "_from_public_api", False)  # type: ignore[attr-defined]
        return call

    hooks = [(one._state_dict_hooks, dict(one._state_dict_hooks)) for one in model.modules()]
    try:
        for there, own in hooks:
            there.update((number, guarded(hook)) for number, hook in own.items())
        yield unhooked
    finally:
        for there, own in hooks:
            there.update(own)


def entries_to_give(model: nn.Module, own: Collection[str] = ()) -> set[str]:
    """Return the names of the entries that only ``model.load_state_dict`` can put in their place.

    They are modules' own states, what is no tensor, and tensors that the state dict makes anew each
    time: to read into one of those would change nothing of the model.
    """
    one, other = (_entries(model, own)[0] for _ in range(2))
    return {
        plain_name(name)
        for name, value in one.items()
        if name.endswith(EXTRA_STATE)
        or not isinstance(value, torch.Tensor)
        or _is_made_anew(value, other[name])
    }


def _is_made_anew(value: torch.Tensor, again: torch.Tensor) -> bool:
    storages = (tensor.untyped_storage()._cdata for tensor in (value, again))
    return value is not again and len(set(storages)) == 2


def unlike_hooked(
    unhooked: Collection[str], own: Container[str], saved: Container[str]
) -> list[str]:
    """Return, as differences, parameters that hooks would compute here, if they had the values.

    A checkpoint that has them, and not as a parameter's ``own``, has what a hook has computed.
    """
    return [
        f"{name} (the state dict of its module has a hook, which needs the values of whole "
        "parameters here; load it before the model's first compiled call)"
        for name in sorted(unhooked)
        if name not in own and name in saved
    ]


def give(model: nn.Module, values: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Give a model entries of its state dict; log those that it ignores and has otherwise."""
    if not values:
        return
    here, _ = _entries(model, own)
    given = {name: values[plain] for name in here if (plain := plain_name(name)) in values}
    ignored = model.load_state_dict(given, strict=False).unexpected_keys
    lost = [name for name in ignored if not _is_same(here[name], given[name])]
    if lost:
        logger.warning(
            "the model's load_state_dict() takes no %s, so that it keeps its own. Have a module's "
            "_load_from_state_dict take what its _save_to_state_dict adds.",
            ", ".join(lost),
        )


def _is_same(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and torch.equal(one.cpu(), other)
