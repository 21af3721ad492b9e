"""Every golden kernel compiled without a GPU, and its machine code read.

Triton's compiler needs no device: it makes PTX, and the ptxas that comes with it makes the binary.
"""

import functools
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.codegen.updates import program
from tests.codegen.variants import VARIANTS
from tests.kit.covering import exhaustive, first, only
from zerofx.codegen.triton.launch import ALIGNMENT, configurations_of, load_kernel
from zerofx.codegen.triton.source import CHUNK, kernel_arguments, kernel_name, triton_source

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

import triton  # noqa: E402

POINTERS = {"segments": "*i64", "segment_of_chunk": "*i32", "numbers": "*fp64"}


@functools.cache
def compiled(name, capability, block=None, warps=None):
    """The kernel in the first of its configurations, or in the one that is given."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = program(**VARIANTS[name])
    if block is None:
        block, warps = configurations_of(made)[0]
    arguments = kernel_arguments(made)
    source = ASTSource(
        fn=load_kernel(triton_source(made), kernel_name(made)),
        signature={name: POINTERS.get(name, "*fp32") for name in arguments}
        | dict.fromkeys(("BLOCK", "CHUNK", "ALIGNMENT"), "constexpr"),
        constexprs={"BLOCK": block, "CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def accesses(ptx, direction):
    """The global accesses of a kernel's text: how many there are of each width in bytes."""
    found = re.findall(rf"{direction}\.global(?:\.\w+(?:::\w+)?)*?(?:\.v(\d))?\.b(\d+)\s", ptx)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)


def per_thread_of(made):
    block, warps = configurations_of(made)[0]
    return block // (warps * 32)


def expected(made, direction, per_thread):
    """Accesses of the streams: all of 16 bytes in a full block, else one per element.

    A thread's eight-bit codes are 8 bytes, those of four bits 4.  What a part of 256 elements has
    in common is one access for all of them, in either block; a block's partial sum is one behind
    both.
    """
    widths = Counter()
    for stream in made.streams:
        if (stream.load if direction == "ld" else stream.store) is not None:
            size = stream.dtype.itemsize
            if stream.is_per_block:
                widths[size] += 2
                continue
            entries = per_thread // stream.elements_per_entry
            width = min(16, entries * size)
            widths[width] += entries * size // width
            widths[size] += entries
    if direction == "ld":
        widths[4] += 1 + len(made.device_numbers)  # segment_of_chunk
        widths[8] += 2 + len(made.streams) + len(made.numbers)
    elif made.squares is not None:
        widths[4] += 1
    return widths


# All for the newer, and the first for the other too.
ON_DEVICES = [
    *((name, 90) for name in VARIANTS),
    *(exhaustive(name, 80) if number else (name, 80) for number, name in enumerate(VARIANTS)),
]


@pytest.mark.parametrize("name, capability", first(8, ON_DEVICES))
def test_streams_move_in_16_bytes_and_nothing_else_does(name, capability):
    made, ptx = program(**VARIANTS[name]), compiled(name, capability).asm["ptx"]
    loads, stores = accesses(ptx, "ld"), accesses(ptx, "st")
    per_thread = per_thread_of(made)
    assert loads == expected(made, "ld", per_thread)
    assert stores == expected(made, "st", per_thread)
    wide = sum(s.bytes_per_element for s in made.streams if s.dtype is not torch.int8)
    scales = sum(s.bytes_per_element for s in made.streams if s.is_per_block)
    assert 16 * (loads[16] + stores[16]) == (wide - scales) * per_thread


@pytest.mark.parametrize("name, capability", first(16, ON_DEVICES))
def test_nothing_is_spilled(name, capability, tmp_path):
    usage = resource_usage(compiled(name, capability), tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0 and 0 < usage["REG"] <= 255


@pytest.mark.slow(reason="each configuration is compiled")
@pytest.mark.parametrize("capability", only((90,), [90, 80]))
@pytest.mark.parametrize(
    "name",
    only(
        ("adamw_squares",),
        [
            "adamw_bf16_gradient",
            "adamw_squares",
            "adamw_rounded_int8_moments",
            "adamw_rounded_int8_moments_squares",
        ],
    ),
)
def test_every_configuration_that_is_timed_is_as_good(name, capability, tmp_path):
    made = program(**VARIANTS[name])
    for block, warps in configurations_of(made)[1:]:
        kernel, per_thread = compiled(name, capability, block, warps), block // (warps * 32)
        for direction in ("ld", "st"):
            assert accesses(kernel.asm["ptx"], direction) == expected(made, direction, per_thread)
        usage = resource_usage(kernel, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("adamw_bf16_gradient", 26),
        ("adamw", 28),
    ],
)
def test_adamw_moves_what_it_must(name, bytes_per_element):
    ptx = compiled(name, 90).asm["ptx"]
    wide = accesses(ptx, "ld")[16] + accesses(ptx, "st")[16]
    assert 16 * wide / per_thread_of(program(**VARIANTS[name])) == bytes_per_element


def test_accesses_are_read_off_the_text():
    text = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_first.b16 { %rs1 }, [ %rd1 + 0 ];
    st.global.b64 [ %rd2 + 0 ], { %rd3 };
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
    """
    assert accesses(text, "ld") == {16: 1, 2: 1} and accesses(text, "st") == {8: 1}


def resource_usage(kernel, folder):
    """Registers, stack and local memory that the binary says it takes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    told = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {what: int(count) for what, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
