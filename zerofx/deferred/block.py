"""``deferred_init``, what it leaves behind, and ``materialize``."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofx.deferred.guards import Reads, deferred_class
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.recorder import Recorder
from zerofx.deferred.refused import ReadsOfOthers, Refusal

_open = threading.local()


@contextlib.contextmanager
def deferred_init(*, exact: bool = False) -> Iterator[None]:
    """Record how parameters are made, instead of making them, in the ``with`` block.

    A model that is constructed there has no memory.  Each of its parameters is made at the first
    zero-compiled step, sharded and freed, one at a time; ``zerofx.materialize`` makes them all.
    Other tensors, buffers among them, are made when the block ends.

    By default an operation that draws random numbers draws one number from its generator, and
    later all that it needs from a generator seeded with that: values depend on the seed, not on
    ranks, stages or what is made first, and are not those of plain construction.  If ``exact``
    they are, bit for bit, and so is the generator afterwards; numbers are then drawn twice, first
    in the block, into memory for one operation at a time.

    Raises: ValueError for a block in a block with another ``exact``; StepError for what cannot be
    recorded.
    """
    outer = getattr(_open, "exact", None)
    if outer is not None:
        if outer is not exact:
            raise ValueError(
                f"deferred_init(exact={exact}) is inside of deferred_init(exact={outer}), and one "
                "model's parameters are made one way. Leave exact out of the inner block."
            )
        yield
        return
    with _block(exact, Reads()):
        yield


@contextlib.contextmanager
def never_made(refuse: Refusal) -> Iterator[None]:
    """Record as ``deferred_init`` does, and make no parameter, nor what is computed of one.

    A module's parameters are meant.  ``refuse`` is told of reads of their values, and of what
    trains them, and raises; other values can be read.
    """
    strict = ReadsOfOthers(refuse)
    hooks = (
        register_module_parameter_registration_hook(strict.on_parameter),
        register_module_module_registration_hook(strict.on_module),
        register_optimizer_step_pre_hook(strict.on_update),
    )
    LEDGER.on_read = strict.on_read
    try:
        with _block(exact=False, reads=strict, make_others=False):
            yield
    finally:
        LEDGER.on_read = None
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _block(exact: bool, reads: Reads, make_others: bool = True) -> Iterator[None]:
    _open.exact = exact
    _open.earlier = LEDGER.memories()
    LEDGER.make_plain()
    done = False
    try:
        with contextlib.ExitStack() as _open.modes:
            _open.modes.enter_context(Recorder(exact))
            _open.modes.enter_context(reads)
            yield
        done = make_others
    finally:
        _close(make_others=done)


def is_block_open() -> bool:
    """Return whether this thread is in a block."""
    return getattr(_open, "exact", None) is not None


def add_mode(mode: contextlib.AbstractContextManager) -> None:
    """Enter one more mode, which the open block leaves at its end, or ``leave_block``."""
    _open.modes.enter_context(mode)


def leave_block() -> None:
    """End the block that is open, if one is, and make nothing: who plans needs no values."""
    if is_block_open():
        _open.modes.close()
        _close(make_others=False)


def _close(make_others: bool) -> None:
    """Do what there is to do at a block's end, unless that has been done."""
    if _open.exact is None:
        return
    _open.exact = None
    LEDGER.on_read = None
    try:
        _leave(make_others)
    finally:
        LEDGER.guard_again()


def materialize(model: nn.Module) -> None:
    """Make all of a model's parameters whose making was deferred, whole, on this rank.

    They are ordinary parameters afterwards.  A compiled step does not need it: it makes and shards
    them one at a time.  Nothing happens to what is there already.

    Raises: StepError for one that can no longer be made; the others are made.
    """
    LEDGER.make_plain()
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            LEDGER.make(tensor)
    finally:
        LEDGER.guard_again()


def _leave(make_others: bool) -> None:
    """Make what is no parameter's, and guard what is left.

    Nor what an earlier block has left, as a parameter's or a plan's, and no tensor looks at that
    Python tells of: it does not tell of what was there before ``gc.freeze()``.
    """
    tensors = _tensors_without_memory()
    kept = {LEDGER.memory_of(one) for one in tensors if isinstance(one, nn.Parameter)}
    kept |= _open.earlier - {LEDGER.memory_of(one) for one in tensors}
    try:
        if make_others:
            LEDGER.make_others(kept)
    finally:
        deferred = [one for one in tensors if LEDGER.memory_of(one) is not None]
        LEDGER.guard((one, deferred_class(type(one))) for one in deferred)  # type: ignore[arg-type]


def _tensors_without_memory() -> list[Tensor]:
    """All that Python holds: a parameter may be in no module, in a list or an optimizer."""
    found: list[Tensor] = []
    for value in gc.get_objects():
        kind = type(value)  # isinstance would ask lazily loaded modules for their class
        if issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
            if LEDGER.memory_of(value) is not None:
                found.append(value)
    return found
