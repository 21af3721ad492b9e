"""Kernels of wires: golden text, machine code without a GPU, and the bits of plain torch.

After a change of the emitter write the golden ones anew with

    python -m tests.codegen.test_wire_kernels

and review the difference.
"""

import functools
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.codegen import interpreted
from tests.kit.covering import each_pair, only
from zerofx.codegen.triton.source import kernel_arguments, kernel_name, triton_source
from zerofx.codegen.wires import blocks, errors, sums
from zerofx.codegen.wires.kernels import FEWEST_COMPILED, WireKernels
from zerofx.codegen.wires.programs import (
    PARTS_AT_ONCE,
    dequantize_program,
    error_program,
    quantize_program,
    sum_program,
)
from zerofx.ir.wires import BLOCK, CODES, NARROW

GOLDEN = Path(__file__).parent / "golden" / "wires"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROGRAMS = {
    f"{make.__name__.removesuffix('_program')}_{code}_{str(dtype).removeprefix('torch.')}": (
        functools.partial(make, dtype, code)
    )
    for make in (quantize_program, dequantize_program)
    for code in CODES
    for dtype in (DTYPES if code == "int8" else DTYPES[:2])
}
PROGRAMS |= {
    f"sum_of_2_{code}": functools.partial(sum_program, torch.float32, code, 2, False, 2)
    for code in (*CODES, NARROW)
}
PROGRAMS |= {
    "sum_of_1_int4_more": functools.partial(sum_program, torch.float32, "int4", 1, True),
    "error_int4": functools.partial(error_program, "int4", False),
    "error_int8_scaled": functools.partial(error_program, "int8", True),
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


def made(name):
    return PROGRAMS[name]()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernel_is_the_golden_one(name):
    assert triton_source(made(name)) == (GOLDEN / f"{name}.py").read_text(encoding="utf-8")


def test_every_golden_kernel_has_its_program():
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(PROGRAMS)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("quantize_int8_float32", 4 + 1 + 4 / 256),
        ("quantize_int4_float32", 4 + 1 / 2 + 4 / 256),
        ("dequantize_int8_bfloat16", 2 + 1 + 4 / 256),
        ("sum_of_2_int4", 4 + 2 * (1 / 2 + 4 / 256)),
        ("error_int4", 4 + 1 / 2 + 4 / 256 + 4),
    ],
)
def test_an_element_moves_as_many_bytes_as_it_must(name, expected):
    assert made(name).bytes_per_element == expected


@functools.cache
def compiled(name, capability):
    """The kernel in the first of its configurations, compiled without a device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zerofx.codegen.triton.launch import ALIGNMENT, configurations_of, load_kernel
    from zerofx.codegen.triton.source import CHUNK

    program = made(name)
    block, warps = configurations_of(program)[0]
    kinds = {"segments": "*i64", "segment_of_chunk": "*i32", "numbers": "*fp64"}
    source = ASTSource(
        fn=load_kernel(triton_source(program), kernel_name(program)),
        signature={name: kinds.get(name, "*fp32") for name in kernel_arguments(program)}
        | dict.fromkeys(("BLOCK", "CHUNK", "ALIGNMENT"), "constexpr"),
        constexprs={"BLOCK": block, "CHUNK": CHUNK, "ALIGNMENT": ALIGNMENT},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


@linux
@pytest.mark.slow(reason="kernels are compiled to machine code")
@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize("name", only(("quantize_int8_float32", "sum_of_2_int4"), PROGRAMS))
def test_it_is_machine_code_that_moves_16_bytes_at_a_time(name, capability, tmp_path):
    from tests.codegen.test_triton_offline import accesses, expected, per_thread_of, resource_usage

    program, kernel = made(name), compiled(name, capability)
    for direction in ("ld", "st"):
        wanted = expected(program, direction, per_thread_of(program))
        assert accesses(kernel.asm["ptx"], direction) == wanted
    usage = resource_usage(kernel, tmp_path)
    # Around calls of the quotient's slow path ptxas puts one register on the stack, on sm_80.
    assert usage["STACK"] <= 8 and usage["LOCAL"] == 0 and usage["REG"] <= 64


@linux
@pytest.mark.slow(reason="kernels are compiled to machine code")
@pytest.mark.parametrize("capability", (80, 90))
def test_a_quotient_is_rounded_as_torchs_and_nothing_is_joined(capability):
    """Whatever takes the last bit from one rank's kernel would part the ranks' parameters."""
    ptx = compiled("quantize_int8_float32", capability).asm["ptx"]
    assert "div.rn.f32" in ptx and "div.full" not in ptx and "div.approx" not in ptx
    for name in ("quantize_int8_float32", "quantize_int4_float32", "dequantize_int8_bfloat16"):
        assert "fma." not in compiled(name, capability).asm["ptx"]
        assert ".ftz" not in compiled(name, capability).asm["ptx"]


@pytest.fixture(scope="module")
def run():
    """Run a function of ``interpreted`` in a process where Triton interprets."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            process.submit(interpreted.start).result()
        yield lambda function, *args: process.submit(function, *args).result()


@linux
@pytest.mark.parametrize(
    ("numel_and_parts", "code", "dtype"),
    each_pair([(1, 1), (255, 2), (256, 1), (257, 3), (2051, 2)], CODES, DTYPES),
    ids=str,
)
def test_interpreted_it_gives_the_bits_of_plain_torch(dtype, code, numel_and_parts, run):
    run(interpreted.check_wires, dtype, code, *numel_and_parts)


@linux
@pytest.mark.parametrize("numel, parts", [(1, 1), (257, 3), (515, 2 * PARTS_AT_ONCE + 1)])
@pytest.mark.parametrize("code", (*CODES, NARROW))
def test_interpreted_sums_and_errors_have_the_bits_of_plain_torch(code, numel, parts, run):
    run(interpreted.check_sums_and_errors, code, numel, parts)


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all magnitudes, among them what is not finite and what is too small."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, dtype=torch.float64, generator=generator)
    values *= torch.randn(numel, dtype=torch.float64, generator=generator).mul(4).exp()
    values[5 * BLOCK + 3], values[7 * BLOCK] = math.nan, -math.inf
    values[9 * BLOCK : 10 * BLOCK] = 0
    values[11 * BLOCK : 12 * BLOCK] *= 1e-42
    return values.to(dtype)


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("code", only(("int8",), CODES))
@pytest.mark.parametrize("dtype", only((torch.float32,), DTYPES), ids=str)
def test_compiled_it_gives_the_bits_of_plain_torch(dtype, code):
    kernels = WireKernels()
    for numel, parts in ((FEWEST_COMPILED, 1), (FEWEST_COMPILED + 1, 2), (3 * 2**18 + 77, 3)):
        flat = numbers(numel * parts, dtype)
        wire = kernels.quantize(flat, code, parts)
        assert torch.equal(wire, blocks.quantize(flat, code, parts))
        found = kernels.dequantize(wire, code, parts, numel, dtype)
        wanted = blocks.dequantize(wire, code, parts, numel, dtype)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert all(kernel is not None for kernel in kernels._known.values()) and kernels._known


@pytest.mark.nightly
@pytest.mark.parametrize("code", only(("int4",), (*CODES, NARROW)))
def test_compiled_sums_and_errors_have_the_bits_of_plain_torch(code):
    kernels, parts = WireKernels(), 3
    for numel in (FEWEST_COMPILED, FEWEST_COMPILED + 77):
        flat = numbers(numel * parts, torch.float32)
        wire = flat.bfloat16() if code == NARROW else blocks.quantize(flat, code, parts)
        for dtype in (torch.float32, torch.bfloat16):
            found = kernels.dequantize_sum(wire, code, parts, numel, parts, dtype)
            wanted = sums.dequantize_sum(wire, code, parts, numel, parts, dtype)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        for scale in (None, torch.tensor(3.0)):
            found = kernels.rounding_error(flat, wire, code, parts, scale)
            assert torch.equal(found, errors.rounding_error(flat, wire, code, parts, scale))
    assert all(kernel is not None for kernel in kernels._known.values()) and kernels._known


def test_small_buffers_and_what_is_not_compiled_run_operator_by_operator():
    for kernels, numel in ((WireKernels(), 100), (WireKernels(False), FEWEST_COMPILED)):
        values = torch.randn(numel)
        for code in CODES:
            wire = kernels.quantize(values, code)
            assert torch.equal(wire, blocks.quantize(values, code))
            kernels.dequantize(wire, code, 1, numel, torch.float32)
            kernels.dequantize_sum(wire, code, 1, numel, 2, torch.float32)
            kernels.rounding_error(values, wire, code, 1)
        assert not kernels._known


def test_kernels_are_kept_by_name_for_who_reads_them(monkeypatch):
    kept = {}
    kernels = WireKernels(keep=lambda name, text: kept.setdefault(name, text))
    monkeypatch.setattr("zerofx.codegen.wires.kernels._run", lambda kernel, segments: None)
    kernels.quantize(torch.ones(FEWEST_COMPILED), "int8")
    (name,) = kept
    assert name.startswith("kernel_quantize_") and "amax" in kept[name]


if __name__ == "__main__":
    for each in PROGRAMS:
        (GOLDEN / f"{each}.py").write_text(triton_source(made(each)), encoding="utf-8")
