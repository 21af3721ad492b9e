"""Traces that compiled programs share: what torch's own optimizers do is the same in all of them.

A trace is shared where all that it depends on can be told, and is in its key.  That is so for the
classes of ``torch.optim`` themselves.  What a user's class reads cannot be told, nor a subclass's
(globals, closures, what its attributes refer to): each program traces these for itself.
"""

from __future__ import annotations

import operator
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx import compat
from zerofx.codegen.trace.arguments import Arguments, plain_key
from zerofx.codegen.trace.trace import Update, is_usual
from zerofx.ir.parameters import ParameterInfo

_MOST_KEYS = 256

# What a trace is given beside the optimizer, what it leaves out, and what a scheduler counts; of
# the defaults, only those that a step reads.
_APART = {"defaults", "param_groups", "state", "step", "_opt_called", "_step_count"}


@dataclass(frozen=True)
class TraceKey:
    """All that a trace depends on, but for what its guard says of numbers, and for defaults.

    ``of_any_sizes`` is the key without the parameter's sizes; None if these cannot be left out.
    """

    exact: Hashable
    of_any_sizes: Hashable | None


class NotedDefaults(Mapping):
    """An optimizer's defaults for the step of a trace, and which of them it has ``read``."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        self.read: set[Any] = set()

    def __getitem__(self, name: Any) -> Any:
        self.read.add(name)
        return self._defaults[name]

    def __iter__(self) -> Iterator[Any]:
        self.read.add(_ALL)
        return iter(self._defaults)

    def __len__(self) -> int:
        self.read.add(_ALL)
        return len(self._defaults)


_ALL = object()  # no default is called this


@dataclass(frozen=True)
class _Known:
    """A trace, and the defaults that it has read: it holds for equal ones."""

    update: Update
    defaults: tuple[tuple[Any, Hashable], ...]

    def holds(self, optimizer: torch.optim.Optimizer, scalars: Sequence[float | int]) -> bool:
        if any(_default(optimizer, name) != value for name, value in self.defaults):
            return False
        return self.update.guard is None or self.update.guard(scalars)


def _default(optimizer: torch.optim.Optimizer, name: Any) -> Hashable | None:
    """What is known of a default; None if that is not enough."""
    if name is _ALL:
        return None
    return plain_key([optimizer.defaults[name]] if name in optimizer.defaults else [])


class SharedTraces:
    """The traces of a process, by all that they depend on; those not used for long are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[_Known]] = OrderedDict()
        self._code: dict[type, tuple[list[Any], int]] = {}
        self._lock = threading.Lock()

    def key(
        self,
        optimizer: torch.optim.Optimizer,
        info: ParameterInfo,
        *,
        group: Arguments,
        state: Arguments,
        sharded: bool,
    ) -> TraceKey | None:
        """What ``trace_update`` of these depends on; None if that cannot be told."""
        kind = type(optimizer)
        is_torchs = kind.__module__.startswith("torch.optim.")
        if not is_torchs or getattr(torch.optim, kind.__name__, None) is not kind:
            return None
        parts = (
            plain_key({k: v for k, v in vars(optimizer).items() if not _is_apart(k)}),
            plain_key(group.key),
            plain_key(state.key),
            compat.settings_of_traces(),
        )
        if None in parts:
            return None
        numbers = tuple(map(type, (*group.scalars, *state.scalars)))
        shared = (kind, self._version(kind), *parts, numbers, info.dtype, info.device, sharded)
        return TraceKey(
            (*shared, info.shape, info.stride), shared if sharded and is_usual(info) else None
        )

    def find(
        self, key: TraceKey, optimizer: torch.optim.Optimizer, scalars: Sequence[float | int]
    ) -> Update | None:
        """The trace that holds for this optimizer's defaults and these numbers, if it is known."""
        with self._lock:
            for one in (key.exact, key.of_any_sizes):
                for known in self._known.get(one, ()):
                    if known.holds(optimizer, scalars):
                        self._known.move_to_end(one)
                        return known.update
        return None

    def keep(
        self,
        key: TraceKey,
        optimizer: torch.optim.Optimizer,
        defaults: NotedDefaults,
        update: Update,
    ) -> None:
        """Let others have a trace that has been made for a key, with these defaults."""
        read = tuple((name, _default(optimizer, name)) for name in defaults.read)
        # What has conversions was made for these numbers alone, and knows who asked for them.
        if update.conversions or any(value is None for _, value in read):
            return
        one = key.of_any_sizes if update.of_any_sizes else key.exact
        with self._lock:
            self._known.setdefault(one, []).append(_Known(update, read))
            self._known.move_to_end(one)
            while len(self._known) > _MOST_KEYS:
                self._known.popitem(last=False)

    def _version(self, kind: type) -> int:
        """A number for an optimizer's code as it is now: somebody may have replaced some of it.

        torch.optim's own, that is; what it calls of the rest of torch is taken to stay.
        """
        code = list(_code_of(kind))
        with self._lock:
            known, version = self._code.get(kind, ([], 0))
            same = len(code) == len(known) and all(map(operator.is_, code, known))
            if not same:
                version += 1
                self._code[kind] = code, version
        return version


def _is_apart(name: str) -> bool:
    return name in _APART or (name.startswith("_optimizer_") and name.endswith("_hooks"))


def _code_of(kind: type) -> Iterator[Any]:
    """The objects that make up the code of a class: its members, and all that its modules have."""
    bases = [base for base in kind.__mro__ if base is not object]
    seen: set[int] = set()
    for table in (*map(vars, bases), *(vars(sys.modules[base.__module__]) for base in bases)):
        for name, member in table.items():
            yield name
            yield from _parts(member, seen)


def _parts(member: Any, seen: set[int]) -> Iterator[Any]:
    """An object, and of a function what can be replaced in it."""
    yield member
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if not isinstance(member, types.FunctionType) or id(member) in seen:
        return
    seen.add(id(member))
    yield from (member.__code__, member.__defaults__, *(member.__kwdefaults__ or {}).values())
    for cell in member.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # a name that is not bound yet
            yield None


SHARED_TRACES = SharedTraces()
"""Those of this process: they hold nothing of a program's."""
