"""The pointwise programs that kernels of wires are made of: they compute each element, as data.

They compute what ``blocks.py``, ``sums.py`` and ``errors.py`` do, in every bit: but a GPU may round
a product and the sum that it goes into at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import fx

from zerofx.codegen.numbers import HostNumbers, Number
from zerofx.codegen.operations import NumberOperand, Operand, Value, register_dtype
from zerofx.codegen.program import Program, Stream
from zerofx.ir.wires import BLOCK, CODES, NARROW, SMALLEST_SCALE

PARTS_AT_ONCE = 8
"""The most wires that one kernel sums: each has two streams."""


@functools.cache
def quantize_program(dtype: torch.dtype, code: str) -> Program:
    """Return the program that makes codes and scales of values in ``dtype``."""
    make = _Values()
    value = load = make("load", dtype=register_dtype(dtype))
    if load.dtype != torch.float32:
        value = make("cast", load, name="value", note="What float32 cannot hold is infinite.")
    note = (
        f"The scale of a part: its largest magnitude / {CODES[code].largest}, a product that all "
        "round alike."
    )
    magnitude = make("abs", value, name="magnitude", note=note)
    largest = make("largest_of_block", magnitude, name="largest", note=note)
    scale = make("mul", largest, CODES[code].reciprocal, name="scale", note=note)
    note = "0 for what is too small, infinity for what is not finite: both have codes of 0."
    is_large = make("ge", scale, SMALLEST_SCALE, dtype=torch.bool, name="is_large", note=note)
    is_finite = make("lt", largest, math.inf, dtype=torch.bool, name="is_finite", note=note)
    scale = make("where", is_large, scale, 0.0, name="scale", note=note)
    scale = make("where", is_finite, scale, math.inf, name="scale", note=note)
    note = "The codes: whole numbers, ties to even."
    spread = make("of_block", scale, name="divisor", note=note)
    is_there = make("gt", spread, 0.0, dtype=torch.bool, name="is_there", note=note)
    is_below = make("lt", spread, math.inf, dtype=torch.bool, name="is_below", note=note)
    is_coded = make("and", is_there, is_below, dtype=torch.bool, name="is_coded", note=note)
    divisor = make("where", is_coded, spread, 1.0, name="divisor", note=note)
    kept = make("where", is_coded, value, 0.0, name="value", note=note)
    ratio = make("div", kept, divisor, name="ratio", note=note)
    whole = make("round", ratio, name="code", note=note)
    codes = make("cast", whole, dtype=torch.int8, name="code", note=note)
    if CODES[code].bits == 4:
        codes = make("pack", codes, dtype=torch.int8, name="code", note="Two of them in a byte.")
    streams = (
        Stream("value", "value", dtype, load),
        _stream_of_codes("code", code, store=codes),
        Stream("scale", "wire", torch.float32, store=scale, elements_per_entry=BLOCK),
    )
    title = f"The codes in {code} of flat shards, and a scale for each 256 elements"
    return _program("quantize", "Quantise", title, streams, make)


@functools.cache
def dequantize_program(dtype: torch.dtype, code: str) -> Program:
    """Return the program that makes values in ``dtype`` of codes and scales."""
    make = _Values()
    note = "The product in float32, which is rounded where it is stored."
    value, wire = _dequantized(make, code, "", note)
    streams = (Stream("value", "value", dtype, store=value), *wire)
    title = f"The values of codes in {code}, with a scale for each 256 of them"
    return _program("dequantize", "Dequantise", title, streams, make)


@functools.cache
def sum_program(dtype: torch.dtype, code: str, count: int, adds: bool, divisor: int = 1) -> Program:
    """Return the program that sums the values of so many wires, and divides the sum.

    If it ``adds``, to what a kernel before it has summed.
    """
    make = _Values()
    note = "One behind the other, in float32."
    load = make("load") if adds else None
    total: Value | None = load
    wires: list[Stream] = []
    for number in range(count):
        value, wire = _dequantized(make, code, str(number), note)
        wires += wire
        total = value if total is None else make("add", total, value, name="total", note=note)
    assert total is not None, "there is something to sum"
    if divisor > 1:
        total = make("div", total, float(divisor), name="total", note="The mean.")
    streams = (Stream("total", "value", dtype, load, store=total), *wires)
    title = f"The sum of {count} ranks' gradients in {code}"
    return _program("dequantize_sum", "Sum", title, streams, make)


@functools.cache
def error_program(code: str, is_scaled: bool) -> Program:
    """Return the program that finds what wires of float32 values have lost of them.

    If it ``is_scaled``, divided by a number that the device has.
    """
    make = _Values()
    exact = make("load")
    value, wire = _dequantized(make, code, "", "What has travelled.")
    lost = make("sub", exact, value, name="lost", note="What has not.")
    numbers = (Number("loss_scale", "loss_scale"),) if is_scaled else ()
    for number in numbers:
        scale = NumberOperand(number, torch.float32)
        lost = make("div", lost, scale, name="lost", note="In units of gradients.")
    note = "Nothing of what is no number."
    is_finite = make("isfinite", lost, dtype=torch.bool, name="is_finite", note=note)
    lost = make("where", is_finite, lost, 0.0, name="error", note=note)
    streams = (
        Stream("exact", "value", torch.float32, exact),
        *wire,
        Stream("error", "value", torch.float32, store=lost),
    )
    title = f"Finds what codes in {code} have lost of values"
    return _program("rounding_error", "Find the errors of", title, streams, make, numbers)


class _Values(list[Value]):
    """The values of a program, in the order in which they are made."""

    def __call__(
        self,
        operation: str,
        *operands: Operand,
        dtype: torch.dtype = torch.float32,
        name: str = "",
        note: str = "",
    ) -> Value:
        self.append(Value(operation, operands, dtype, name, note=note))
        return self[-1]


def _dequantized(make: _Values, code: str, number: str, note: str) -> tuple[Value, list[Stream]]:
    """Make the value of a wire's element; return it and the wire's streams."""
    if code == NARROW:
        value = make("load")
        return value, [Stream(f"value{number}", "wire", torch.bfloat16, value)]
    codes = load = make("load", dtype=torch.int8)
    scale = make("load")
    if CODES[code].bits == 4:
        codes = make("unpack", codes, dtype=torch.int8, name=f"codes{number}", note=note)
    whole = make("cast", codes, name=f"code{number}", note=note)
    spread = make("of_block", scale, name=f"scale{number}", note=note)
    value = make("mul", whole, spread, name=f"value{number}", note=note)
    return value, [
        _stream_of_codes(f"code{number}", code, load),
        Stream(f"scale{number}", "wire", torch.float32, scale, elements_per_entry=BLOCK),
    ]


def _stream_of_codes(
    name: str, code: str, load: Value | None = None, store: Value | None = None
) -> Stream:
    return Stream(name, "wire", torch.int8, load, store, elements_per_entry=8 // CODES[code].bits)


def _program(
    name: str,
    verb: str,
    title: str,
    streams: Sequence[Stream],
    values: Sequence[Value],
    device_numbers: tuple[Number, ...] = (),
) -> Program:
    graph = fx.Graph()
    graph.output([])
    return Program(
        name,
        tuple(streams),
        tuple(values),
        HostNumbers(fx.GraphModule({}, graph), (), 0, ()),
        {stream.name: position for position, stream in enumerate(streams)},
        (),
        device_numbers,
        tuple(range(len(streams), len(streams) + len(device_numbers))),
        verb=verb,
        title=title,
    )
