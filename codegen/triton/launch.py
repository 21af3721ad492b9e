"""Build, tune and launch the Triton kernel of a pointwise program.

For shards on CUDA; with ``TRITON_INTERPRET=1`` in the environment Triton runs it on the CPU, for
tests.  Nothing here waits for the device: what a step has to tell the kernel goes there from
pinned memory, and stays there for launches that say the same.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import linecache
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.accelerator import current
from zerofx.codegen.numbers import Number
from zerofx.codegen.program import ELEMENTS_PER_PARTIAL, Bound, Program
from zerofx.codegen.triton.source import CHUNK, kernel_name, triton_source

ALIGNMENT = 16
"""Bytes: where every stream of a segment starts at a multiple of it, accesses are as wide."""

# BLOCK and warps.  8 elements a thread are one access of a bf16 stream and two of an fp32 one.
_CONFIGURATIONS = ((1024, 4), (2048, 8), (2048, 4), (4096, 8), (4096, 16))

# Of eight-bit codes they are 8 bytes, 256 for a warp.  More elements, or more than 8 warps, would
# take more registers than there are: two moments are encoded with what the step needs at hand.
_CONFIGURATIONS_OF_CODES = ((1024, 4), (2048, 8))

# The interpreter's time goes by blocks, so it gets no empty ones.
_INTERPRETED_BLOCK = 1024

_TUNED_ON_ELEMENTS = 1 << 22
"""The elements that a configuration is timed on: AdamW's streams then exceed a GPU's cache."""


class TritonKernel:
    """The kernel of one program, which stands for a traced update's graph.

    ``launch`` updates any number of segments with it.
    """

    may_wait = True

    def __init__(self, program: Program) -> None:
        self.program = program
        self.gradient_dtype = program.gradient_dtype
        self.source = triton_source(program)
        self.function = load_kernel(self.source, kernel_name(program))
        self._chosen: dict[torch.device, tuple[int, int]] = {}  # elements and warps of a block
        self._partials: dict[torch.device, Tensor] = {}

    def ready(self, *values: Any, launches: Launches | None = None) -> Callable[[], list[Any]]:
        """Return what runs the update as calling this does."""
        return functools.partial(self, *values, launches=launches)

    def __call__(self, *values: Any, launches: Launches | None = None) -> list[Any]:
        """Run the update in place, as the traced graph would; return the results it returns.

        With ``launches`` it runs when they do, and the results are not to be read before; the sum
        of squares is among theirs.
        """
        bound = self.program.bind(values)
        squares = None
        if launches is None:
            squares = self.launch([bound])
        else:
            launches.add(self, bound)
        return self.program.results_of(bound, squares)

    def launch(self, segments: Sequence[Bound]) -> Tensor | None:
        """Update segments in place: contiguous pieces of every stream, with numbers of their own.

        The numbers on the device are the first segment's.  One launch for the segments whose
        streams are all aligned, another for the rest.  Returns the sum of all gradients' squares,
        0-dim, if the program gives it.

        Raises: ValueError if a stream is not flat memory of the program's dtype, all of one
        length and on one device.
        """
        for segment in segments:
            self._check(segment)
        there = [segment for segment in segments if segment.tensors[0].numel()]
        groups = _by_alignment(self.program, there)
        sums = [
            self._launch(group, alignment)
            for group, alignment in zip(groups, (ALIGNMENT, 1), strict=True)
            if group
        ]
        if self.program.squares is None or not segments:
            return None
        squares = [squares for squares in sums if squares is not None]
        if not squares:
            return torch.zeros((), device=segments[0].tensors[0].device)
        return squares[0] if len(squares) == 1 else torch.stack(squares).sum()

    def _launch(
        self, segments: Sequence[Bound], alignment: int, tuner: Any = None
    ) -> Tensor | None:
        device = segments[0].tensors[0].device
        block, warps = (0, 0) if tuner else self._configuration(device)
        chunk = CHUNK if _on_gpu(device) else _INTERPRETED_BLOCK
        lengths = [segment.tensors[0].numel() for segment in segments]
        chunks = [-(-length // chunk) for length in lengths]
        table, numbers = self._tables(segments, chunks, chunk)
        elements = sum(chunks[:-1]) * chunk + lengths[-1]
        partials = self._room_for_partials(elements, device)
        on_device = (segments[0].numbers[number] for number in self.program.device_numbers)
        places = (table, _segment_of_chunk(tuple(chunks), device), numbers, *partials, *on_device)
        with current(device):
            if tuner:  # it tries blocks of several sizes, and warps
                grid = lambda meta: (-(-elements // meta["BLOCK"]),)  # noqa: E731
                tuner[grid](*places, CHUNK=chunk, ALIGNMENT=alignment)
                return None
            blocks = -(-elements // block)
            constants = {"BLOCK": block, "CHUNK": chunk, "ALIGNMENT": alignment}
            self.function[(blocks,)](*places, **constants, num_warps=warps)
        return partials[0][:blocks].sum() if partials else None

    def _room_for_partials(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """The memory that blocks write their sums to, if they sum: the same for every launch."""
        if self.program.squares is None:
            return ()
        count = -(-elements // ELEMENTS_PER_PARTIAL)
        if device not in self._partials or len(self._partials[device]) < count:
            self._partials[device] = torch.empty(count, device=device)
        return (self._partials[device],)

    def _tables(
        self, segments: Sequence[Bound], chunks: Sequence[int], chunk: int
    ) -> tuple[Tensor, Tensor]:
        """The rows of the segments and of their numbers, on the device."""
        device = segments[0].tensors[0].device
        starts = itertools.accumulate((count * chunk for count in chunks), initial=0)
        rows = []
        for start, segment in zip(starts, segments, strict=False):
            rows += [start, segment.tensors[0].numel()]
            rows += [tensor.data_ptr() for tensor in segment.tensors]
        given = [bound.numbers[number] for bound in segments for number in self.program.numbers]
        on_device = {place: number for place, number in enumerate(given) if _is_on_device(number)}
        known = [0.0 if place in on_device else float(x) for place, x in enumerate(given)]
        table = _sent(struct.pack(f"{len(rows)}q", *rows), device)
        numbers = _sent(struct.pack(f"{len(known)}d", *known), device).view(torch.float64)
        if on_device:
            numbers = numbers.clone()
            for place, number in on_device.items():
                numbers[place].copy_(number)
        return table, numbers

    def _check(self, segment: Bound) -> None:
        first = segment.tensors[0]
        for stream, tensor in zip(self.program.streams, segment.tensors, strict=True):
            alike = tensor.dtype == stream.dtype and tensor.device == first.device
            length = stream.length(first.numel())
            shape = (length,) if stream.elements_per_entry > 1 else first.shape
            if not alike or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{self.program.optimizer}'s kernel updates '{stream.name}' as contiguous "
                    f"{stream.dtype}[{length}] on {first.device}, and was given "
                    f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} on "
                    f"{tensor.device}. Give every stream of a segment as one flat piece of memory."
                )

    def _configuration(self, device: torch.device) -> tuple[int, int]:
        if device not in self._chosen:
            interpreted = (_INTERPRETED_BLOCK, 4)
            self._chosen[device] = self._tuned(device) if _on_gpu(device) else interpreted
        return self._chosen[device]

    def _tuned(self, device: torch.device) -> tuple[int, int]:
        """Time the configurations on scratch memory, or read from disk which was the fastest.

        Only there: the kernel writes in place, and Triton's tuner runs it many times for whatever
        dtypes it has not met.  What is launched on a step's memory is the plain kernel.
        """
        import triton

        configurations = [
            triton.Config({"BLOCK": block}, num_warps=warps)
            for block, warps in configurations_of(self.program)
        ]
        tuner = triton.autotune(configurations, key=[], cache_results=True)(self.function)
        streams = [
            torch.zeros(stream.length(_TUNED_ON_ELEMENTS), dtype=stream.dtype, device=device)
            for stream in self.program.streams
        ]
        numbers: dict[Number, Any] = dict.fromkeys(self.program.numbers, 0.5)
        numbers |= {n: torch.zeros((), device=device) for n in self.program.device_numbers}
        self._launch([Bound(streams, numbers)], ALIGNMENT, tuner)
        return tuner.best_config.kwargs["BLOCK"], tuner.best_config.num_warps


class Launches:
    """Updates that wait to be launched together: one launch for each kernel among them."""

    def __init__(self) -> None:
        self._waiting: dict[tuple, tuple[TritonKernel, list[Bound]]] = {}

    def add(self, kernel: TritonKernel, segment: Bound) -> None:
        """Let a segment wait for ``run``."""
        on_device = (segment.numbers[number] for number in kernel.program.device_numbers)
        key = (id(kernel), *map(id, on_device), segment.tensors[0].device)
        self._waiting.setdefault(key, (kernel, []))[1].append(segment)

    def run(self) -> list[Tensor]:
        """Launch what waits; return the sums of squares, of each kernel that gives one."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        sums = (kernel.launch(segments) for kernel, segments in waiting)
        return [squares for squares in sums if squares is not None]


@functools.lru_cache(maxsize=256)
def _sent(words: bytes, device: torch.device) -> Tensor:
    """Return words of eight bytes on the device, int64 [words].  Nobody writes to them there."""
    host = (
        torch.frombuffer(bytearray(words), dtype=torch.int64)
        if words
        else torch.empty(0, dtype=torch.int64, device="cpu")
    )
    return _moved(host, device)


@functools.lru_cache(maxsize=64)
def _segment_of_chunk(chunks: tuple[int, ...], device: torch.device) -> Tensor:
    """Which segment each chunk belongs to, on the device."""
    counts = torch.tensor(chunks, device="cpu")
    owners = torch.arange(len(chunks), dtype=torch.int32, device="cpu").repeat_interleave(counts)
    return _moved(owners, device)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for it."""
    return (host.pin_memory() if _on_gpu(device) else host).to(device, non_blocking=True)


@functools.cache
def load_kernel(source: str, name: str) -> Any:
    """The kernel of a generated module.

    The module has no file: Triton and debuggers read its source through ``linecache``.  Triton
    keeps what it compiles on disk, by the text.
    """
    filename = f"<zerofx {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names: dict[str, Any] = {"__name__": f"zerofx.generated.{name}"}
    exec(compile(source, filename, "exec"), names)  # noqa: S102 - our own text
    return names[name]


def configurations_of(program: Program) -> Sequence[tuple[int, int]]:
    """The elements and warps of a block that a program is timed with."""
    return _CONFIGURATIONS_OF_CODES if program.is_in_blocks else _CONFIGURATIONS


def _by_alignment(program: Program, segments: Sequence[Bound]) -> tuple[list[Bound], list[Bound]]:
    """The segments whose streams all start at multiples of ALIGNMENT, and the others.

    But for streams per block: there are few of their entries, and each is read by itself.
    """
    groups: tuple[list[Bound], list[Bound]] = ([], [])
    places = [i for i, stream in enumerate(program.streams) if not stream.is_per_block]
    for segment in segments:
        is_aligned = all(segment.tensors[i].data_ptr() % ALIGNMENT == 0 for i in places)
        groups[not is_aligned].append(segment)
    return groups


def _is_on_device(number: Any) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
