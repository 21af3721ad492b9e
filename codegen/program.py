"""An update of one element, as data: streams, values, numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from zerofx.codegen.numbers import HostNumbers, Number, unique
from zerofx.codegen.operations import NumberOperand, Value
from zerofx.ir.reach import reached

Kind = Literal["parameter", "gradient", "state", "new state", "value", "wire"]
"""Those of an update; and values that travel, and the wire that does so in their place."""


@dataclass(frozen=True)
class Stream:
    """One array that the kernel goes through; ``load`` and ``store`` are None if it does not.

    It has one entry for each element, one for every two, which share a byte, or one for a block of
    ``elements_per_entry``.
    """

    name: str
    kind: Kind
    dtype: torch.dtype
    load: Value | None = None
    store: Value | None = None
    elements_per_entry: int = 1

    @property
    def is_per_block(self) -> bool:
        """Return whether many elements share an entry: the scales of moments in eight bits."""
        return self.elements_per_entry > 2

    @property
    def is_packed(self) -> bool:
        """Return whether two elements share an entry: codes of four bits."""
        return self.elements_per_entry == 2

    @property
    def bytes_per_element(self) -> float:
        ways = (self.load is not None) + (self.store is not None)
        return self.dtype.itemsize * ways / self.elements_per_entry

    def length(self, elements: int) -> int:
        """Return the number of entries for so many elements."""
        return -(-elements // self.elements_per_entry)

    def entries(self, elements: slice) -> slice:
        """Return the entries of these elements, which begin with an entry's first."""
        return slice(elements.start // self.elements_per_entry, self.length(elements.stop))


# Where a result of the update comes from: a number by position, a stream by name; or the sum of the
# gradient's squares.
Result = (
    tuple[Literal["number"], int] | tuple[Literal["stream"], str] | tuple[Literal["squares"], None]
)

ELEMENTS_PER_PARTIAL = 1024
"""At the least: each block writes one partial sum of the gradient's squares, of four bytes."""


@dataclass(frozen=True)
class Bound:
    """One run of a program: a tensor for each stream, each number's value, and numbers for results.

    Values are Python numbers or 0-dim tensors; those on the device stay there.
    """

    tensors: Sequence[Tensor]
    numbers: dict[Number, Any]
    kept: Sequence[Any] = ()


@dataclass(frozen=True)
class Program:
    """One update of one element of each stream.

    ``values`` are in an order in which they can be computed.  ``inputs`` gives the position of
    each stream among the update's inputs; new states have none.  ``device_numbers`` are read from
    device memory: the update's inputs at ``coefficients``.  ``squares`` is the sum of a block's
    squares of the gradient, if it is asked for.  ``title`` says what it is if it is no update,
    ``verb`` what it does to a block.
    """

    optimizer: str
    streams: tuple[Stream, ...]
    values: tuple[Value, ...]
    host: HostNumbers
    inputs: dict[str, int]
    results: tuple[Result, ...]
    device_numbers: tuple[Number, ...] = ()
    coefficients: tuple[int, ...] = ()
    squares: Value | None = None
    title: str = ""
    verb: str = "Update"

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The gradient's dtype; None if it takes none."""
        return next((one.dtype for one in self.streams if one.kind == "gradient"), None)

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The numbers that the host computes, in the order of the kernel's table."""
        return self.host.needed

    @property
    def bytes_per_element(self) -> float:
        """Return the fewest bytes that an update of one element moves.

        Partial sums are counted as of the smallest blocks.
        """
        partials = 4 / ELEMENTS_PER_PARTIAL if self.squares is not None else 0
        return sum(stream.bytes_per_element for stream in self.streams) + partials

    @cached_property
    def counts(self) -> bool:
        """Return whether it is given the number of an element."""
        return any(value.operation == "index" for value in self.values)

    @cached_property
    def is_in_blocks(self) -> bool:
        """Return whether many elements share an entry of some stream."""
        return any(stream.is_per_block for stream in self.streams)

    def bind(self, values: Sequence[Any]) -> Bound:
        """Compute the numbers from an update's inputs, and make memory for new states."""
        kept, computed = self.host(values)
        tensors = [
            values[self.inputs[stream.name]]
            if stream.name in self.inputs
            else torch.empty_like(values[0], dtype=stream.dtype)
            for stream in self.streams
        ]
        numbers = dict(zip(self.numbers, computed, strict=True))
        on_device = (values[position] for position in self.coefficients)
        numbers |= zip(self.device_numbers, on_device, strict=True)
        return Bound(tensors, numbers, kept)

    def results_of(self, bound: Bound, squares: Tensor | None) -> list[Any]:
        """Return what the update returns, once its elements have been computed."""
        streams = dict(zip((s.name for s in self.streams), bound.tensors, strict=True))
        sources: dict[str, Any] = {
            "number": bound.kept,
            "stream": streams,
            "squares": {None: squares},
        }
        return [sources[kind][where] for kind, where in self.results]

    def number_names(self, taken: Collection[str]) -> dict[NumberOperand, str]:
        """A name for each number and dtype that elements are combined with, in the table's order.

        It is neither a stream's nor one of those that are ``taken``.
        """
        used = {
            operand
            for value in self.values
            for operand in value.operands
            if isinstance(operand, NumberOperand)
        }
        names: dict[NumberOperand, str] = {}
        streams = {stream.name for stream in self.streams}
        for number in (*self.numbers, *self.device_numbers):
            of_number = (operand for operand in used if operand.number == number)
            for operand in sorted(of_number, key=lambda operand: str(operand.dtype)):
                names[operand] = unique(number.name, {*names.values(), *streams, *taken})
        return names


def without_dead_values(program: Program) -> Program:
    """Drop what no result needs; a stream that is not read is not loaded either."""
    wanted = (program.squares, *(stream.store for stream in program.streams))
    alive = set(reached(filter(None, wanted), lambda value: value.values))
    streams = tuple(
        stream if stream.load in alive else replace(stream, load=None) for stream in program.streams
    )
    values = tuple(value for value in program.values if value in alive)
    return replace(program, streams=streams, values=values)
