"""Triton source of a pointwise program, as a person would write it.

One launch updates any number of segments: contiguous pieces of parameter, gradient and states,
each with numbers (a parameter group's hyperparameters) of its own.  The kernel's arguments are

- ``segments``: int64[segments, 2 + streams], a row per segment: where it starts in the grid (a
  multiple of CHUNK elements), its length in elements, the address of each stream;
- ``segment_of_chunk``: int32[chunks], which segment each CHUNK elements of the grid belong to;
- ``numbers``: float64[segments, numbers];
- the device numbers of the program, each a pointer to one element.

A program of the grid does BLOCK elements; BLOCK divides CHUNK.  Elements are counted from the
block's start in 32 bits, block starts in 64.  A block that is full has no mask, and accesses of
16 bytes where the streams start at multiples of ALIGNMENT = 16 bytes; a segment's last block
goes element by element.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerofx.codegen.numbers import unique
from zerofx.codegen.operations import NumberOperand, Operand, Value
from zerofx.codegen.pointwise import FOUND_INF, Program, Stream

CHUNK = 8192
"""Elements per entry of ``segment_of_chunk``: the largest block there may be."""

_WIDTH = 92

_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

# Functions of the module that operations are written with.
_FUNCTIONS = {
    "stream": '''\
@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a segment's stream lies, from the block's first element on."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), ALIGNMENT) + begin
''',
    "lerp": '''\
@triton.jit
def lerp(start, end, weight):
    """torch.lerp, which is exact at both ends."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1.0 - weight)
    return tl.where(tl.abs(weight) < 0.5, near_start, near_end)
''',
    "sign_of": '''\
@triton.jit
def sign_of(x):
    """torch.sign: 0 for NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
''',
    "maximum": '''\
@triton.jit
def maximum(x, y):
    """torch.maximum: NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
''',
    "minimum": '''\
@triton.jit
def minimum(x, y):
    """torch.minimum: NaN if either is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
''',
}

# How tightly an expression holds together, as in Python.
_LOOSE, _COMPARED, _BITS, _SHIFTED, _ADDED, _MULTIPLIED, _NEGATED, _CALL = range(8)

_BINARY = {
    "add": ("+", _ADDED),
    "sub": ("-", _ADDED),
    "mul": ("*", _MULTIPLIED),
    **dict.fromkeys(("gt",), (">", _COMPARED)),
    "ge": (">=", _COMPARED),
    "lt": ("<", _COMPARED),
    "le": ("<=", _COMPARED),
    "eq": ("==", _COMPARED),
    "ne": ("!=", _COMPARED),
    "and": ("&", _BITS),
    "or": ("|", _BITS),
    "xor": ("^", _BITS),
    "shift_left": ("<<", _SHIFTED),
    "shift_right": (">>", _SHIFTED),
}

_CALLS = {
    **{name: f"tl.{name}" for name in ("abs", "exp", "log", "floor", "ceil", "sigmoid")},
    **{name: f"tl.{name}" for name in ("sin", "cos", "erf", "where")},
    **{name: name for name in ("lerp", "maximum", "minimum")},
    "sign": "sign_of",
}


def triton_source(program: Program) -> str:
    """The source of a module whose function ``kernel_name(program)`` is the kernel."""
    return _Writer(program).module()


def kernel_name(program: Program) -> str:
    """``adamw`` for AdamW."""
    return re.sub(r"\W+", "_", program.optimizer).lower().lstrip("_0123456789") or "update"


CONSTANTS = ("BLOCK", "CHUNK", "ALIGNMENT")


def kernel_arguments(program: Program) -> tuple[str, ...]:
    """The kernel's arguments in order, without its constants."""
    device = (f"{number.name}_ptr" for number in program.device_numbers)
    return ("segments", "segment_of_chunk", "numbers", *device)


@dataclass
class _Statement:
    """An assignment of one value, with those written inside of it."""

    value: Value
    name: str = ""
    reads: list[Value] = field(default_factory=list)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.kernel = kernel_name(program)
        self.loads = [stream for stream in program.streams if stream.load is not None]
        self.stores = [stream for stream in program.streams if stream.store is not None]
        self.numbers = _number_names(program)
        taken = {*self.numbers.values(), *_RESERVED, self.kernel, f"{self.kernel}_block"}
        self.pointers = {
            stream.name: unique(f"{stream.name}_ptr", taken) for stream in program.streams
        }
        self.statements = self._statements()
        self._name_values(taken)
        self.functions: dict[str, None] = {"stream": None}

    def module(self) -> str:
        block, kernel = self._block(), self._kernel()
        parts = [self._header(), *(_FUNCTIONS[name] for name in self.functions), block, kernel]
        return "\n\n".join(parts)

    # What is written inline, and what in a statement of its own.

    def _statements(self) -> list[_Statement]:
        """One statement per source line where that can be: a value read once is written there."""
        uses: dict[Value, list[Value]] = {}
        for value in self.program.values:
            for operand in value.values:
                uses.setdefault(operand, []).append(value)
        stored = [stream.store for stream in self.stores]
        inlined: set[Value] = set()
        for value in self.program.values:
            users = uses.get(value, [])
            if value.operation == "load" or value in stored or len(users) != 1:
                continue
            if value.line == users[0].line or value.operation == "cast":
                inlined.add(value)
        self.inlined = inlined
        return [
            _Statement(value, reads=list(self._leaves(value)))
            for value in self.program.values
            if value.operation != "load" and value not in inlined
        ]

    def _leaves(self, value: Value) -> Iterable[Value]:
        for operand in value.values:
            if operand in self.inlined:
                yield from self._leaves(operand)
            else:
                yield operand

    def _name_values(self, taken: set[str]) -> None:
        """Give values the optimizer's names; a name goes on to the next value when it is free."""
        last_use: dict[Value, int] = {}
        for position, statement in enumerate(self.statements):
            for value in statement.reads:
                last_use[value] = position
        end = len(self.statements)
        for stream in self.stores:
            assert stream.store is not None
            last_use[stream.store] = end
        taken = taken | set(self.pointers.values())
        self.names: dict[Value, str] = {}
        for stream in self.loads:
            assert stream.load is not None
            self.names[stream.load] = unique(stream.name, taken)
            taken.add(self.names[stream.load])
        for position, statement in enumerate(self.statements):
            value = statement.value
            busy = {
                name for other, name in self.names.items() if last_use.get(other, -1) > position
            }
            ended = set(self.names.values()) - busy
            name = unique(value.name or "value", (taken - ended) | busy)
            statement.name = self.names[value] = name

    # Expressions.

    def _expression(self, operand: Operand, hold: int = _LOOSE) -> str:
        """An operand as text that may stand next to operators that hold less tightly."""
        text, tightness = self._text(operand)
        return f"({text})" if tightness < hold else text

    def _text(self, operand: Operand) -> tuple[str, int]:
        if isinstance(operand, NumberOperand):
            return self.numbers[operand], _CALL
        if not isinstance(operand, Value):
            return _constant(operand), _CALL
        if operand not in self.inlined:
            return self.names[operand], _CALL
        return self._operation(operand)

    def _operation(self, value: Value) -> tuple[str, int]:
        operation, operands = value.operation, value.operands
        if operation in _BINARY:
            sign, hold = _BINARY[operation]
            # Few know how tightly & and >> hold: what they combine is in parentheses.
            is_plain = hold in (_ADDED, _MULTIPLIED)
            left = self._expression(operands[0], hold if is_plain else _NEGATED)
            right = self._expression(operands[1], hold + 1 if is_plain else _NEGATED)
            return f"{left} {sign} {right}", hold
        if operation == "neg":
            return f"-{self._expression(operands[0], _NEGATED)}", _NEGATED
        if operation == "not":
            operand = self._expression(operands[0], _NEGATED)
            return (f"{operand} == 0", _COMPARED) if _is_bool(value) else (f"~{operand}", _NEGATED)
        texts = [self._expression(operand) for operand in operands]
        if operation in ("div", "sqrt", "reciprocal"):
            return self._rounded(operation, operands, value.dtype)
        if operation == "cast":
            return self._cast(operands[0], value.dtype)
        if operation == "bitcast":
            held = self._expression(operands[0], _CALL)
            return f"{held}.to({_DTYPES[value.dtype]}, bitcast=True)", _CALL
        if operation == "full":
            return f"tl.full(lane.shape, {texts[0]}, {_DTYPES[value.dtype]})", _CALL
        if operation == "isnan":
            held = self._expression(operands[0], _COMPARED + 1)
            return f"{held} != {held}", _COMPARED
        if operation in ("isinf", "isfinite"):
            sign = "==" if operation == "isinf" else "<"
            return f'tl.abs({texts[0]}) {sign} float("inf")', _COMPARED
        function = _CALLS[operation]
        if function in _FUNCTIONS:
            self.functions[function] = None
        return f"{function}({', '.join(texts)})", _CALL

    def _rounded(
        self, operation: str, operands: Sequence[Operand], dtype: torch.dtype
    ) -> tuple[str, int]:
        """Quotients and roots rounded as torch rounds them; Triton's plain ones are not in fp32."""
        if operation == "sqrt":
            function = "tl.sqrt_rn" if dtype is torch.float32 else "tl.sqrt"
            return f"{function}({self._expression(operands[0])})", _CALL
        over, under = operands if operation == "div" else (1.0, operands[0])
        if dtype is torch.float32:
            return f"tl.div_rn({self._expression(over)}, {self._expression(under)})", _CALL
        over_text = self._expression(over, _MULTIPLIED)
        return f"{over_text} / {self._expression(under, _MULTIPLIED + 1)}", _MULTIPLIED

    def _cast(self, operand: Operand, dtype: torch.dtype) -> tuple[str, int]:
        if dtype is torch.bool:
            return f"{self._expression(operand, _COMPARED + 1)} != 0", _COMPARED
        return f"{self._expression(operand, _CALL)}.to({_DTYPES[dtype]})", _CALL

    # The module's parts.

    def _header(self) -> str:
        program = self.program
        lines = [
            f'"""{program.optimizer}\'s update of flat shards, in one pass over memory.',
            "",
            "Made by zerofx.codegen from the optimizer's own step.  An element moves"
            f" {program.bytes_per_element} bytes:",
            "",
        ]
        for stream in program.streams:
            ways = [
                way
                for way, there in (("read", stream.load), ("written", stream.store))
                if there is not None
            ]
            dtype = _DTYPES[stream.dtype].removeprefix("tl.")
            lines.append(f"    {stream.name}: {dtype}, {' and '.join(ways)}")
        if program.numbers:
            lines += ["", "The host computes once a step, for each segment:", ""]
            lines += [
                f"    {number.name}" + f" = {number.formula}" * (number.formula != number.name)
                for number in program.numbers
            ]
        lines += ['"""', "", "import triton", "import triton.language as tl", ""]
        return "\n".join(lines)

    def _block(self) -> str:
        program, lines = self.program, []
        parameters = [*self.pointers.values(), *self.numbers.values(), "lane", "mask"]
        lines += _call("def ", f"{self.kernel}_block", parameters, ":")
        lines.append(f'    """Update one block; ``lane`` counts its elements{self._skipping()}."""')
        for stream in self.loads:
            assert stream.load is not None
            text = f"tl.load({self.pointers[stream.name]} + lane, mask)"
            if stream.dtype is torch.bool:
                text = f"{text} != 0"
            elif stream.dtype != stream.load.dtype:
                text = f"{text}.to({_DTYPES[stream.load.dtype]})"
            lines.append(f"    {self.names[stream.load]} = {text}")
        lines.append("")
        said = ""
        for statement in self.statements:
            comment = _comment(statement.value.line) or statement.value.note
            if comment and comment != said:
                lines.append(f"    # {comment}")
            said = comment
            text, _ = self._operation(statement.value)
            lines.append(f"    {statement.name} = {text}")
        lines.append("")
        if program.skips:
            lines += [f"    kept = tl.where({self.numbers[_FOUND]}, False, mask)"]
        for stream in self.stores:
            lines.append(f"    {self._store(stream)}")
        return "\n".join(["@triton.jit", *lines, ""])

    def _skipping(self) -> str:
        return "; if ``found_inf`` is set, nothing changes" if self.program.skips else ""

    def _store(self, stream: Stream) -> str:
        assert stream.store is not None
        text = self.names[stream.store]
        stored = torch.int8 if stream.dtype is torch.bool else stream.dtype
        if stored != stream.store.dtype:
            text = f"{text}.to({_DTYPES[stored]})"
        mask = "kept" if self.program.skips and stream.kind != "copy" else "mask"
        return f"tl.store({self.pointers[stream.name]} + lane, {text}, {mask})"

    def _kernel(self) -> str:
        program, width = self.program, 2 + len(self.program.streams)
        constants = [f"{name}: tl.constexpr" for name in CONSTANTS]
        lines = _call("def ", self.kernel, [*kernel_arguments(program), *constants], ":")
        lines += [
            '    """Update BLOCK elements of one segment."""',
            "    first = tl.program_id(0).to(tl.int64) * BLOCK",
            "    segment = tl.load(segment_of_chunk + first // CHUNK)",
            f"    row = segments + segment * {width}",
            "    begin = first - tl.multiple_of(tl.load(row), CHUNK)",
            "    rest = tl.load(row + 1) - begin",
        ]
        for position, stream in enumerate(program.streams, 2):
            stored = torch.int8 if stream.dtype is torch.bool else stream.dtype
            place = f"row + {position}, begin, {_DTYPES[stored]}, ALIGNMENT"
            lines.append(f"    {self.pointers[stream.name]} = stream({place})")
        if program.numbers:
            lines.append(f"    numbers += segment * {len(program.numbers)}")
        places = {number: place for place, number in enumerate(program.numbers)}
        for operand, name in self.numbers.items():
            if operand.number in places:
                source = f"tl.load(numbers + {places[operand.number]})"
            else:
                source = f"tl.load({operand.number.name}_ptr)"
            convert = " != 0" if _is_bool(operand) else f".to({_DTYPES[operand.dtype]})"
            lines.append(f"    {name} = {source}{convert}")
        lines.append("    lane = tl.arange(0, BLOCK)")
        arguments = [*self.pointers.values(), *self.numbers.values(), "lane"]
        for condition, mask in (("if rest >= BLOCK:", "lane < BLOCK"), ("else:", "lane < rest")):
            lines.append(f"    {condition}")
            call = _call("", f"{self.kernel}_block", [*arguments, mask], "")
            lines += [f"        {line}" for line in call]
        return "\n".join(["@triton.jit", *lines, ""])


_FOUND = NumberOperand(FOUND_INF, torch.bool)

# Names that the kernel has for itself.
_RESERVED = (
    *("segments", "segment_of_chunk", "segment", "numbers", "row", "begin", "rest", "first"),
    *("lane", "mask", "kept", "BLOCK", "CHUNK", "ALIGNMENT", "float", "range"),
    *_FUNCTIONS,
)


def _number_names(program: Program) -> dict[NumberOperand, str]:
    """A name for each number and dtype that elements are combined with, in the table's order."""
    used = {
        operand
        for value in program.values
        for operand in value.operands
        if isinstance(operand, NumberOperand)
    }
    if program.skips:
        used.add(_FOUND)
    names: dict[NumberOperand, str] = {}
    streams = {stream.name for stream in program.streams}
    for number in (*program.numbers, *program.device_numbers):
        for operand in sorted(
            (operand for operand in used if operand.number == number), key=lambda o: str(o.dtype)
        ):
            taken = {*names.values(), *_RESERVED, *streams, kernel_name(program)}
            names[operand] = unique(number.name, taken)
    return names


def _is_bool(value: Value | NumberOperand) -> bool:
    return value.dtype is torch.bool


def _constant(value: int | float | bool) -> str:
    text = repr(value)
    return f'float("{text}")' if text in ("inf", "nan") else text


def _call(prefix: str, function: str, arguments: Sequence[str], suffix: str) -> list[str]:
    """A call or signature, in as many lines as it takes."""
    line = f"{prefix}{function}({', '.join(arguments)}){suffix}"
    if len(line) <= _WIDTH:
        return [line]
    inside = [""]
    for argument in arguments:
        if inside[-1] and len(inside[-1]) + len(argument) > _WIDTH - 8:
            inside.append("")
        inside[-1] += f"{argument}, "
    wrapped = [f"    {part.rstrip()}" for part in inside]
    return [f"{prefix}{function}(", *wrapped, f"){suffix}"]


def _comment(line: str) -> str:
    """``adam.py:414: step_t += 1`` for a ``file:line`` of the optimizer."""
    if not line:
        return ""
    filename, _, number = line.rpartition(":")
    text = ""
    for i in range(int(number), int(number) + 6):
        text = f"{text} {linecache.getline(filename, i).strip()}".strip()
        if text.count("(") <= text.count(")"):
            break
    text = re.sub(r"\s+", " ", text.partition("  #")[0])
    shown = f"{Path(filename).name}:{number}: {text}"
    return shown if len(shown) <= 94 else f"{shown[:91]}..."
