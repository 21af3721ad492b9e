"""Triton source of a pointwise program, as a person would write it.

One launch updates any number of segments: contiguous pieces of parameter, gradient and states,
each with numbers (a parameter group's hyperparameters) of its own.  The kernel's arguments are

- ``segments``: int64[segments, 2 + streams], a row per segment: where it starts in the grid (a
  multiple of CHUNK elements), its length in elements, the address of each stream;
- ``segment_of_chunk``: int32[chunks], which segment each CHUNK elements of the grid belong to;
- ``numbers``: float64[segments, numbers];
- ``partials``, if the program sums the gradient's squares: float32, one for each program of the
  grid, which writes the sum of its block there;
- the device numbers of the program, each a pointer to one element.

A program of the grid does BLOCK elements; BLOCK divides CHUNK.  Elements are counted from the
block's start in 32 bits, block starts in 64.  A block that is full has no mask, and accesses of
16 bytes (8 of eight-bit codes) where the streams start at multiples of ALIGNMENT = 16 bytes; a
segment's last block goes element by element.  The 256 elements that share a scale are called a
part there: a block is a whole number of them, and so a scale belongs to one program of the grid.
Two elements that share a byte are a pair.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zerofx.codegen.numbers import unique
from zerofx.codegen.operations import Value
from zerofx.codegen.program import ELEMENTS_PER_PARTIAL, Program, Stream
from zerofx.codegen.triton.expressions import DTYPES, FUNCTIONS, Expressions
from zerofx.ir.wires import BLOCK as SHARED

CHUNK = 8192
"""Elements per entry of ``segment_of_chunk``: the largest block there may be."""

_WIDTH = 92

# Operations; more of them are no longer read at a glance.
_LARGEST_INLINED = 3


def triton_source(program: Program) -> str:
    """The source of a module whose function ``kernel_name(program)`` is the kernel."""
    return _Writer(program).module()


def kernel_name(program: Program) -> str:
    """``adamw`` for AdamW."""
    return re.sub(r"\W+", "_", program.optimizer).lower().lstrip("_0123456789") or "update"


CONSTANTS = ("BLOCK", "CHUNK", "ALIGNMENT")


def kernel_arguments(program: Program) -> tuple[str, ...]:
    """The kernel's arguments in order, without its constants."""
    partials = ["partials"] * (program.squares is not None)
    device = (f"{number.name}_ptr" for number in program.device_numbers)
    return ("segments", "segment_of_chunk", "numbers", *partials, *device)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.kernel = kernel_name(program)
        self.loads = [(stream, stream.load) for stream in program.streams if stream.load]
        self.stores = [(stream, stream.store) for stream in program.streams if stream.store]
        self.numbers = program.number_names({*_RESERVED, self.kernel})
        taken = {*self.numbers.values(), *_RESERVED, self.kernel, f"{self.kernel}_block"}
        taken |= {f"{number.name}_ptr" for number in program.device_numbers}
        self.pointers = {
            stream.name: unique(f"{stream.name}_ptr", taken) for stream in program.streams
        }
        self.written = Expressions(self.numbers, self._inlined())
        self.names = self.written.names
        self.statements = [
            value
            for value in program.values
            if value.operation != "load" and value not in self.written.inlined
        ]
        self._name_values(taken | set(self.pointers.values()))
        self.places = ["lane", "mask"]
        if program.is_in_blocks:
            self.places += ["part", "part_mask"]
        if any(stream.is_packed for stream in program.streams):
            self.places += ["pair", "pair_mask"]
        self.inputs = [
            *self.pointers.values(),
            *self.numbers.values(),
            *(["begin"] * program.counts),
        ]

    def module(self) -> str:
        block, kernel = self._block(), self._kernel()
        functions = (FUNCTIONS[name] for name in ("stream", *self.written.functions))
        return "\n\n".join([self._header(), *functions, block, kernel])

    # What is written inline, and what in a statement of its own.

    def _inlined(self) -> set[Value]:
        """One statement per source line where that can be: a value read once is written there."""
        uses: dict[Value, list[Value]] = {}
        for value in self.program.values:
            for operand in value.values:
                uses.setdefault(operand, []).append(value)
        stored = [value for _, value in self.stores]
        inlined: set[Value] = set()
        sizes: dict[Value, int] = {}
        for value in self.program.values:
            sizes[value] = 1 + sum(sizes[operand] for operand in value.values if operand in inlined)
            users = uses.get(value, [])
            if value.operation == "load" or value in stored or len(users) != 1:
                continue
            is_of_line = (value.line, value.note) == (users[0].line, users[0].note)
            if (is_of_line and sizes[value] <= _LARGEST_INLINED) or value.operation == "cast":
                inlined.add(value)
        return inlined

    def _reads(self, value: Value) -> Iterable[Value]:
        """The values that a statement reads by name."""
        for operand in value.values:
            if operand in self.written.inlined:
                yield from self._reads(operand)
            else:
                yield operand

    def _name_values(self, taken: set[str]) -> None:
        """Give values the optimizer's names; a name goes on to the next value when it is free."""
        last_use: dict[Value, int] = {}
        for position, statement in enumerate(self.statements):
            last_use |= dict.fromkeys(self._reads(statement), position)
        end = len(self.statements)
        last_use |= dict.fromkeys((value for _, value in self.stores), end)
        if self.program.squares is not None:
            last_use[self.program.squares] = end
        for stream, load in self.loads:
            self.names[load] = unique(stream.name, taken)
            taken.add(self.names[load])
        # The result of a function goes by its name, but what is stored by that of its memory.
        stored = {value: stream.name for stream, value in self.stores if value.note}
        for position, value in enumerate(self.statements):
            busy = {
                name for other, name in self.names.items() if last_use.get(other, -1) > position
            }
            ended = set(self.names.values()) - busy
            wanted = stored.get(value) or value.name or "value"
            self.names[value] = unique(wanted, (taken - ended) | busy)

    # The module's parts.

    def _header(self) -> str:
        program = self.program
        title = program.title or f"{program.optimizer}'s update of flat shards"
        origin = "" if program.title else " from the optimizer's own step"
        lines = [
            f'"""{title}, in one pass over memory.',
            "",
            f"Made by zerofx.codegen{origin}.  An element moves"
            f" {program.bytes_per_element:g} bytes:",
            "",
        ]
        for stream in program.streams:
            ways = ["read"] * bool(stream.load) + ["written"] * bool(stream.store)
            dtype = DTYPES[stream.dtype].removeprefix("tl.")
            shared = f", one for {stream.elements_per_entry}" * (stream.elements_per_entry > 1)
            lines.append(f"    {stream.name}: {dtype}, {' and '.join(ways)}{shared}")
        if program.squares is not None:
            lines.append(f"    partials: float32, written, one for {ELEMENTS_PER_PARTIAL} or more")
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
        lines += _call("def ", f"{self.kernel}_block", [*self.inputs, *self.places], ":")
        parts = ", ``part`` its parts of 256" if "part" in self.places else ""
        pairs = ", ``pair`` its pairs" if "pair" in self.places else ""
        summary = f"{program.verb} one block; ``lane`` counts its elements{parts}{pairs}."
        if program.squares is None:
            lines.append(f'    """{summary}"""')
        else:
            returned = "Returns the sum of its gradient's squares."
            lines += [f'    """{summary}', "", f"    {returned}", '    """']
        for stream, load in self.loads:
            place, mask = _place(stream)
            text = f"tl.load({self.pointers[stream.name]} + {place}, {mask})"
            if stream.dtype is torch.bool:
                text = f"{text} != 0"
            elif stream.dtype != load.dtype:
                text = f"{text}.to({DTYPES[load.dtype]})"
            lines.append(f"    {self.names[load]} = {text}")
        lines.append("")
        said = ""
        for value in self.statements:
            comment = _comment(value.line) or value.note
            if comment and comment != said:
                lines.append(f"    # {comment}")
            said = comment
            text, _ = self.written.operation(value)
            lines.append(f"    {self.names[value]} = {text}")
        lines.append("")
        for stream, stored in self.stores:
            text, dtype = self.names[stored], _in_memory(stream)
            if dtype != stored.dtype:
                text = f"{text}.to({DTYPES[dtype]})"
            place, mask = _place(stream)
            lines.append(f"    tl.store({self.pointers[stream.name]} + {place}, {text}, {mask})")
        if program.squares is not None:
            lines.append(f"    return {self.names[program.squares]}")
        return "\n".join(["@triton.jit", *lines, ""])

    def _kernel(self) -> str:
        program, width = self.program, 2 + len(self.program.streams)
        constants = [f"{name}: tl.constexpr" for name in CONSTANTS]
        lines = _call("def ", self.kernel, [*kernel_arguments(program), *constants], ":")
        lines += [
            f'    """{program.verb} BLOCK elements of one segment."""',
            "    first = tl.program_id(0).to(tl.int64) * BLOCK",
            "    segment = tl.load(segment_of_chunk + first // CHUNK)",
            f"    row = segments + segment * {width}",
            "    begin = first - tl.multiple_of(tl.load(row), CHUNK)",
            "    rest = tl.load(row + 1) - begin",
        ]
        for position, stream in enumerate(program.streams, 2):
            start, alignment = "begin", "ALIGNMENT"
            if stream.elements_per_entry > 1:
                start = f"begin // {stream.elements_per_entry}"
            if stream.is_per_block:  # whatever is shared starts anywhere among other segments'
                alignment = str(stream.dtype.itemsize)
            place = f"row + {position}, {start}, {DTYPES[_in_memory(stream)]}, {alignment}"
            lines.append(f"    {self.pointers[stream.name]} = stream({place})")
        if program.numbers:
            lines.append(f"    numbers += segment * {len(program.numbers)}")
        places = {number: place for place, number in enumerate(program.numbers)}
        for operand, name in self.numbers.items():
            if operand.number in places:
                source = f"tl.load(numbers + {places[operand.number]})"
            else:
                source = f"tl.load({operand.number.name}_ptr)"
            convert = " != 0" if operand.dtype is torch.bool else f".to({DTYPES[operand.dtype]})"
            lines.append(f"    {name} = {source}{convert}")
        full, last = ["lane", "lane < BLOCK"], ["lane", "lane < rest"]
        lines.append("    lane = tl.arange(0, BLOCK)")
        if "part" in self.places:
            lines.append(f"    part = tl.arange(0, BLOCK // {SHARED})")
            full += ["part", f"part < BLOCK // {SHARED}"]
            last += ["part", f"part * {SHARED} < rest"]
        if "pair" in self.places:
            lines.append("    pair = tl.arange(0, BLOCK // 2)")
            full += ["pair", "pair < BLOCK // 2"]
            last += ["pair", "pair * 2 < rest"]
        result = "partial = " if program.squares is not None else ""
        for condition, elements in (("if rest >= BLOCK:", full), ("else:", last)):
            lines.append(f"    {condition}")
            call = _call(result, f"{self.kernel}_block", [*self.inputs, *elements], "")
            lines += [f"        {line}" for line in call]
        if program.squares is not None:
            lines.append("    tl.store(partials + tl.program_id(0), partial)")
        return "\n".join(["@triton.jit", *lines, ""])


def _in_memory(stream: Stream) -> torch.dtype:
    return torch.int8 if stream.dtype is torch.bool else stream.dtype


def _place(stream: Stream) -> tuple[str, str]:
    """A stream's place in a block, and the mask of its entries."""
    if stream.is_packed:
        return "pair", "pair_mask"
    return ("part", "part_mask") if stream.is_per_block else ("lane", "mask")


# Names that the kernel has for itself.
_RESERVED = (
    *("segments", "segment_of_chunk", "segment", "numbers", "row", "begin", "rest", "first"),
    *("lane", "mask", "BLOCK", "CHUNK", "ALIGNMENT", "float", "range"),
    *("part", "part_mask", "pair", "pair_mask"),
    *("partials", "partial"),
    *FUNCTIONS,
)


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
