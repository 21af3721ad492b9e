"""Record what operations write to memory that is not there, instead of doing it."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from zerofx import compat
from zerofx.accelerator import is_accelerator, module_of
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.mapped import MAPPED
from zerofx.deferred.tape import (
    Constant,
    Draw,
    Operand,
    Write,
    default_generator,
    leaves,
    replaced,
)
from zerofx.errors import StepError
from zerofx.runtime.memory.flat import ordinary_tensors

aten = torch.ops.aten


class Recorder(compat.scalars.DispatchMode):
    """While it is active, new tensors have no memory, and operations on such are recorded.

    What has to be known at once (``item()``, a shape that depends on values) is made at once, and
    again later.  An operation that draws random numbers draws one, and later all from a generator
    seeded with that; if ``exact``, it draws all at once and later again.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self._process = os.getpid()
        # By their place; after the block nobody sees writes any more, and their versions tell.
        self._constants: dict[tuple[str, int], WeakSet[Constant]] = defaultdict(WeakSet)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return func(*args, **kwargs)  # its own operations come here again
        with compat.tensors.without_function_modes():
            return self._record(_Call(func, args, kwargs))

    def _record(self, call: _Call) -> Any:
        if os.getpid() != self._process:  # a loader's worker, which sends what it computes
            for tensor in call.deferred:
                LEDGER.make(tensor)
            return call.run()
        if not call.deferred:
            if call.returns_tensors and (not call.tensors or call.is_of_file):
                return self._make(call)
            self._keep_constants(call.written)
            return call.run()
        if call.is_of_storage:
            return call.run()
        if call.name in _REFUSED and call.op is not aten.set_.source_Tensor:
            raise StepError(
                f"{call.name} gives a tensor other memory, which deferred_init cannot record. Make "
                "the tensor before the block, or assign a new one (p.data = ...)."
            )
        if call.name in _OF_METADATA:
            return call.run()
        if call.is_view:
            with LEDGER.backed(call.deferred):
                return call.run()
        if not call.returns_tensors and not call.written:
            return call.run_on_values()
        return self._write(call) if call.written else self._make(call)

    # New tensors

    def _make(self, call: _Call) -> Any:
        """Results in memory of their own: filled, drawn, counted, computed."""
        device = call.device
        if device.type == "meta":
            return call.on_meta()
        if not call.is_strided:
            return call.run_on_values()
        try:
            results = call.on_meta()
        except _NO_SHAPE:
            return call.run_on_values()
        if (call.name in _EMPTY or call.name in _FILLED_BY) and results.numel():
            return self._filled(call, results, device)
        is_list = isinstance(results, (list, tuple))
        shapes = list(results) if is_list else [results]
        made = {}
        for position, shape in enumerate(shapes):
            if isinstance(shape, Tensor):
                shapes[position] = new = _like(shape, device)
                if new.nbytes:
                    made[position] = Operand.of(new, LEDGER.enter(new))
        if made:
            self._add(call, made)
        return type(results)(shapes) if is_list else shapes[0]

    def _filled(self, call: _Call, shape: Tensor, device: torch.device) -> Tensor:
        """A new tensor, and what fills it recorded as a write in place."""
        new = _like(shape, device)
        LEDGER.enter(new)
        fill_of = _FILLED_BY.get(call.name)
        if fill_of is not None:
            fill, arguments = fill_of(call)
            generator = call.keywords.get("generator")
            keywords = {"generator": generator} if generator is not None else {}
            self._write(_Call(fill, (new, *arguments), keywords))
        return new

    # Writes in place

    def _write(self, call: _Call) -> Any:
        there = [one for one in call.written if one.numel() and LEDGER.memory_of(one) is None]
        if len(there) == len(call.written):
            self._keep_constants(there)
            return call.run_on_values()
        if there:
            raise StepError(
                f"{call.op} writes to tensors made inside of deferred_init and to others at once, "
                "which cannot be recorded. Do it one by one."
            )
        if call.makes_tensors:
            return self._make(call)
        with contextlib.suppress(*_NO_SHAPE):
            call.on_meta()  # for what is wrong with it
        self._add(call, made={})
        return call.returned_arguments()

    def _add(self, call: _Call, made: dict[int, Operand]) -> None:
        """Record a call, after which what it has written to, or ``made``, is what it is."""
        draw = self._draw(call) if torch.Tag.nondeterministic_seeded in call.op.tags else None
        written = call.written

        def recorded(value: Any) -> Any:
            if isinstance(value, Tensor):
                memory = LEDGER.memory_of(value)
                if memory is None:
                    constant = Constant(value)
                    if not constant.is_copy:
                        self._constants[_place(value)].add(constant)
                    return constant
                operand = Operand.of(value, memory)
                if call.overwrites and any(value is one for one in written):
                    operand = operand.overwritten()
                return operand
            return None if isinstance(value, torch.Generator) else value  # ``draw`` has it

        arguments, keywords = replaced(call.arguments, call.keywords, recorded)
        write = Write(call.op, arguments, keywords, made, draw, torch.get_default_dtype())
        memories = [LEDGER.memory_of(tensor) for tensor in written]
        for memory in (*memories, *(operand.memory for operand in made.values())):
            if memory is not None:
                memory.last = write

    # What operations read that is there

    def _keep_constants(self, written: Iterable[Tensor]) -> None:
        """Copy what recorded operations read of the memory of these, before it is written to."""
        for tensor in written if self._constants else ():
            for constant in self._constants.pop(_place(tensor), ()):
                constant.keep()

    # Random numbers

    def _draw(self, call: _Call) -> Draw:
        given = [one for one in call.leaves if isinstance(one, torch.Generator)]
        device = given[0].device if given else call.device
        generator = given[0] if given else default_generator(device)
        if self.exact:
            draw = Draw(device, state=generator.get_state())
            call.run_on_values()
            return draw
        with torch.inference_mode(False), torch.no_grad():
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        return Draw(device, seed=int(seed))


class _Call:
    """One call of an operator, and what its schema says of it."""

    def __init__(self, op: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        self.op, self.arguments, self.keywords = op, tuple(arguments), keywords
        self.name: str = op.overloadpacket.__name__
        self.leaves = list(leaves(arguments, keywords))
        self.tensors = [one for one in self.leaves if isinstance(one, Tensor)]
        reads_it = len(set(map(id, self.tensors))) < len(self.tensors)  # p.copy_(p)
        self.overwrites = self.name in _OVERWRITES and not reads_it
        self.deferred = [one for one in self.tensors if LEDGER.memory_of(one) is not None]

    def run(self) -> Any:
        return self.op(*self.arguments, **self.keywords)

    def run_on_values(self) -> Any:
        """Run it on what deferred tensors hold now; what it writes to these is lost."""
        overwritten = list(map(id, self.written)) if self.overwrites else ()

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor) or LEDGER.memory_of(value) is None:
                return value
            is_overwritten = id(value) in overwritten
            return _like(value, value.device) if is_overwritten else LEDGER.value_of(value)

        arguments, keywords = replaced(self.arguments, self.keywords, real)
        return self.op(*arguments, **keywords)

    def on_meta(self) -> Any:
        """Run it on tensors without values: its results have the right shapes."""
        meta = torch.device("meta")

        def on_meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return _like(value, meta)
            return None if isinstance(value, torch.Generator) else value

        arguments, keywords = replaced(self.arguments, self.keywords, on_meta)
        if not self.tensors or keywords.get("device") is not None:
            keywords["device"] = meta
        with ordinary_tensors():
            return self.op(*arguments, **keywords)

    @property
    def written(self) -> list[Tensor]:
        """The tensors that it writes to, in the order of its arguments."""
        schema = self.op._schema.arguments
        given = dict(zip((one.name for one in schema), self.arguments, strict=False))
        given |= self.keywords
        written = [one.name for one in schema if one.alias_info and one.alias_info.is_write]
        if self.name in _OF_BATCH_NORMS and given.get("training"):
            written += ["running_mean", "running_var"]
        values = [given.get(name) for name in written]
        return [one for one in leaves(values, {}) if isinstance(one, Tensor)]

    @property
    def returns_tensors(self) -> bool:
        return any("Tensor" in str(result.type) for result in self.op._schema.returns)

    @property
    def makes_tensors(self) -> bool:
        """Return whether its results are new, and none is an argument that it has written to."""
        results = self.op._schema.returns
        return self.returns_tensors and not any(result.alias_info for result in results)

    @property
    def is_view(self) -> bool:
        """Return whether its results look at its arguments' memory, or it changes how one does."""
        if torch.Tag.inplace_view in self.op.tags:
            return True
        infos = [result.alias_info for result in self.op._schema.returns]
        return any(info is not None and not info.is_write for info in infos)

    @property
    def is_of_storage(self) -> bool:
        """Return whether it gives a new tensor, of which nothing is recorded, other memory.

        As ``torch.ByteTensor(storage)`` does, and ``broadcast_object_list`` with it.
        """
        if self.op not in (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset):
            return False
        memory = LEDGER.memory_of(self.deferred[0])
        return memory is not None and memory.last is None

    @property
    def is_of_file(self) -> bool:
        """Return whether it computes new tensors of what is in mapped files."""
        return any(map(MAPPED.hold, self.tensors)) and not self.is_view and not self.written

    @property
    def is_strided(self) -> bool:
        layout = self.keywords.get("layout")
        return layout in (None, torch.strided) and not self.keywords.get("pin_memory")

    @property
    def device(self) -> torch.device:
        """Return the devices of its results."""
        given = self.keywords.get("device")
        if given is None:
            devices = [one.device for one in self.tensors]
            return max(devices, key=lambda one: one.type != "cpu", default=torch.device("cpu"))
        device = torch.device(given)
        if is_accelerator(device) and device.index is None:
            return torch.device(device.type, module_of(device).current_device())
        return device

    def returned_arguments(self) -> Any:
        """Return those of its results that it has written to: they are in the arguments' order."""
        are_arguments = [result.alias_info is not None for result in self.op._schema.returns]
        results = self.written[: sum(are_arguments)]
        return results[0] if len(results) == 1 else tuple(results) or None


def _place(tensor: Tensor) -> tuple[str, int]:
    """Return the same for tensors that are in one memory."""
    if MAPPED.hold(tensor):  # storages that begin at one byte of a file
        return "file", tensor.untyped_storage().data_ptr()
    return "storage", compat.tensors.storage_key(tensor)


def _like(shape: Tensor, device: torch.device) -> Tensor:
    with ordinary_tensors():
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)


_NO_SHAPE = (NotImplementedError, *compat.scalars.DATA_DEPENDENT_ERRORS)

_REFUSED = frozenset("set_ resize_ resize_as_ swap_".split())
_OF_METADATA = frozenset("is_same_size is_pinned is_set_to detach alias lift_fresh".split())
_EMPTY = frozenset(
    "empty empty_strided empty_like new_empty new_empty_strided empty_permuted "
    "zeros zeros_like new_zeros".split()
)
_FILLED_BY: dict[str, Callable[[_Call], tuple[Any, tuple[Any, ...]]]] = {
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda call: (aten.fill_.Scalar, (1,))),
    "full": lambda call: (aten.fill_.Scalar, (call.arguments[1],)),
    "full_like": lambda call: (aten.fill_.Scalar, (call.arguments[1],)),
    "new_full": lambda call: (aten.fill_.Scalar, (call.arguments[2],)),
    **dict.fromkeys(("rand", "rand_like"), lambda call: (aten.uniform_.default, ())),
    **dict.fromkeys(("randn", "randn_like"), lambda call: (aten.normal_.default, ())),
}
"""New tensors that are made by filling them: then there is never a second one at the same time."""

_OVERWRITES = frozenset(
    "fill_ zero_ copy_ normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_ "
    "bernoulli_".split()
)
"""Whatever was there before does not matter to these."""

_OF_BATCH_NORMS = frozenset("native_batch_norm cudnn_batch_norm miopen_batch_norm".split())
"""These write to running statistics while training, which their schemas do not say."""
