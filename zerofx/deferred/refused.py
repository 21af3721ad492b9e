"""Parameters that are recorded and never made: reads of their values are refused by name."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.deferred.guards import Reads
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.mapped import MAPPED
from zerofx.deferred.tape import Memory, needed_for

Refusal = Callable[[str], NoReturn]
"""Is told what has been tried, as the beginning of a sentence, and raises."""


_COMPARISONS = (torch.equal, Tensor.equal)


def _is_certain(memory: Memory) -> bool:
    """Return whether no random numbers go into its values, which are others without a plan."""
    return all(write.draw is None for write in needed_for([memory.last]))


class ReadsOfOthers(Reads):
    """``Reads`` of what is computed of no module's parameter; others, and training, are refused."""

    def __init__(self, refuse: Refusal) -> None:
        super().__init__()
        self._refuse = refuse
        self._parameters: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._compares = False
        self._of_files: dict[tuple[int, int], Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.backward, torch.autograd.grad):
            loss = args[0] if isinstance(args[0], Tensor) else args[0][0]
            memory = LEDGER.memory_of(loss)
            if memory is not None and (read := self._first_of(memory)):
                self._refuse(f"{func.__name__}() computes gradients of {read}")
        with self._comparing() if func in _COMPARISONS else contextlib.nullcontext():
            return super().__torch_function__(func, types, args, kwargs)

    def on_parameter(self, module: nn.Module, _name: str, parameter: Any) -> None:
        """Note what a module is given as its parameter; one of a mapped file is recorded first."""
        if isinstance(parameter, Tensor) and MAPPED.hold(parameter):
            parameter.data = self._recorded(parameter)
        memory = LEDGER.memory_of(parameter) if isinstance(parameter, Tensor) else None
        if memory is not None:
            self._parameters.add(memory)
            self._modules.add(module)

    def _recorded(self, tensor: Tensor) -> Tensor:
        """Return a copy that has not been made; tensors in one storage are copied in one."""
        with compat.tensors.without_function_modes(), torch.no_grad():
            storage = tensor.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            if place not in self._of_files:
                flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                self._of_files[place] = flat.clone()
            like = tensor.shape, tensor.stride(), tensor.storage_offset()
            return self._of_files[place].view(tensor.dtype).as_strided(*like)

    def on_module(self, module: nn.Module, *_child: Any) -> None:
        """Note a module that has others: parameters are named as it has them."""
        self._modules.add(module)

    def on_read(self, memory: Memory) -> None:
        """Refuse to make a memory that parameters are needed for."""
        if (read := self._first_of(memory)) and not (self._compares and _is_certain(memory)):
            self._refuse(f"it reads what depends on the values of {read}")

    def on_update(self, optimizer: torch.optim.Optimizer, *_given: Any) -> None:
        """Refuse an update that has gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memory = LEDGER.memory_of(parameter)
                if parameter.grad is not None and memory in self._parameters:
                    self._refuse(f"{type(optimizer).__name__}.step() updates {self._name(memory)}")

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Let parameters be compared that files have: transformers ties those that are equal."""
        before, self._compares = self._compares, True
        try:
            yield
        finally:
            self._compares = before

    def _first_of(self, memory: Memory) -> str:
        """Return the name of the first parameter that a memory's values depend on, if any."""
        if memory in self._parameters:
            return self._name(memory)
        for write in needed_for([memory.last]):
            for one in (*write.operands(), *write.made.values()):
                if one.memory in self._parameters:
                    return self._name(one.memory)
        return ""

    def _name(self, memory: Memory | None) -> str:
        """Return a parameter's longest name: that in the whole model."""
        found = {
            name: tuple(parameter.shape)
            for module in list(self._modules)
            for name, parameter in module.named_parameters()
            if LEDGER.memory_of(parameter) is memory
        }
        name = max(found, key=len, default="")
        return f"the parameter {name!r} of shape {found[name]}" if found else "a parameter"
