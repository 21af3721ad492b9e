"""The pointwise programs that kernels of wires are made of: they compute each element, as data.

They compute what ``blocks.py`` does in ``int8``, in every bit.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import fx

from zerofx.codegen.numbers import HostNumbers
from zerofx.codegen.operations import Operand, Value, register_dtype
from zerofx.codegen.program import Program, Stream
from zerofx.ir.wires import BLOCK, CODES, SMALLEST_SCALE

INT8 = CODES["int8"]


@functools.cache
def quantize_program(dtype: torch.dtype) -> Program:
    """Return the program that makes codes and scales of values in ``dtype``."""
    made: list[Value] = []

    def make(
        operation: str, *operands: Operand, dtype: torch.dtype = torch.float32, name: str, note: str
    ) -> Value:
        made.append(Value(operation, operands, dtype, name, note=note))
        return made[-1]

    load = Value("load", (), register_dtype(dtype))
    made.append(load)
    value = load
    if load.dtype != torch.float32:
        note = "What float32 cannot hold is infinite."
        value = make("cast", load, name="value", note=note)
    note = "The scale of a part: its largest magnitude / 127, a product that all round alike."
    magnitude = make("abs", value, name="magnitude", note=note)
    largest = make("largest_of_block", magnitude, name="largest", note=note)
    scale = make("mul", largest, INT8.reciprocal, name="scale", note=note)
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
    code = make("cast", whole, dtype=torch.int8, name="code", note=note)
    streams = (
        Stream("value", "value", dtype, load),
        Stream("code", "wire", torch.int8, store=code),
        Stream("scale", "wire", torch.float32, store=scale, elements_per_entry=BLOCK),
    )
    title = "The codes in int8 of flat shards, and a scale for each 256 elements"
    return _program("quantize", "Quantise", title, streams, made)


@functools.cache
def dequantize_program(dtype: torch.dtype) -> Program:
    """Return the program that makes values in ``dtype`` of codes and scales."""
    code = Value("load", (), torch.int8)
    scale = Value("load", (), torch.float32)
    note = "The product in float32, which is rounded where it is stored."
    whole = Value("cast", (code,), torch.float32, "code", note=note)
    spread = Value("of_block", (scale,), torch.float32, "scale", note=note)
    value = Value("mul", (whole, spread), torch.float32, "value", note=note)
    streams = (
        Stream("code", "wire", torch.int8, code),
        Stream("scale", "wire", torch.float32, scale, elements_per_entry=BLOCK),
        Stream("value", "value", dtype, store=value),
    )
    title = "The values of codes in int8, with a scale for each 256 of them"
    made = [code, scale, whole, spread, value]
    return _program("dequantize", "Dequantise", title, streams, made)


def _program(
    name: str, verb: str, title: str, streams: tuple[Stream, ...], values: list[Value]
) -> Program:
    graph = fx.Graph()
    graph.output([])
    return Program(
        name,
        streams,
        tuple(values),
        HostNumbers(fx.GraphModule({}, graph), (), 0, ()),
        {stream.name: position for position, stream in enumerate(streams)},
        (),
        verb=verb,
        title=title,
    )
