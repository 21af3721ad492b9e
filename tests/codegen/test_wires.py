"""Values in fewer bits: their error against the formula, blocks that are not finite, parts."""

import math

import pytest
import torch

from zerofx.codegen.wires.blocks import codes_of, dequantize, fields_of, from_bytes, quantize
from zerofx.ir.parameters import ParameterInfo, Place
from zerofx.ir.wires import (
    BLOCK,
    CODES,
    SMALLEST_SCALE,
    gaps,
    num_blocks,
    quantized_bytes,
)
from zerofx.runtime.memory.flat import without_gaps

SIZES = (0, 1, 2, 255, 256, 257, 1000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many magnitudes: a block's differ, and so do blocks."""
    random = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-12, 4, (numel,), generator=random).float().exp2()
    by_block = torch.randint(-4, 8, (num_blocks(numel),), generator=random).float().exp2()
    signed = torch.randn(numel, generator=random) * magnitudes
    return (signed * by_block.repeat_interleave(BLOCK)[:numel]).to(dtype)


def there_and_back(flat, code="int8", parts=1, dtype=torch.float32):
    return dequantize(quantize(flat, code, parts), code, parts, flat.numel() // parts, dtype)


def largest_error(largest: float, code: str) -> float:
    """Return the most that an element of a finite block changes by, in float32.

    ``largest`` is the block's largest magnitude.  To half a code comes the rounding of the scale,
    of the quotient and of the product, each in the last bit of a float32.
    """
    if largest * CODES[code].reciprocal <= SMALLEST_SCALE:
        return largest
    return largest * (1 / (2 * CODES[code].largest) + 2**-22)


def assert_within_bounds(flat, back, code):
    assert back.shape == flat.shape
    if not flat.numel():
        return
    for values, its in zip(flat.double().split(BLOCK), back.double().split(BLOCK), strict=True):
        assert (values - its).abs().max() <= largest_error(values.abs().max().item(), code)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_errors_are_within_half_a_code(numel, dtype, code):
    for seed in range(8):
        flat = numbers(numel, seed, dtype)
        assert_within_bounds(flat, there_and_back(flat, code), code)


@pytest.mark.parametrize("code", CODES)
def test_the_bound_is_reached_so_it_is_no_looser_than_it_says(code):
    largest = CODES[code].largest
    flat = torch.full((BLOCK,), 0.5)
    flat[0] = float(largest)
    assert there_and_back(flat, code)[1].item() == 0, "ties go to the even code"
    assert largest_error(largest, code) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("exponent", (-120, -60, 0, 60, 120))
def test_errors_are_within_half_a_code_at_any_magnitude(exponent, code):
    flat = torch.randn(BLOCK * 3, generator=torch.Generator().manual_seed(1)) * 2.0**exponent
    assert_within_bounds(flat, there_and_back(flat, code), code)


@pytest.mark.parametrize("code", CODES)
def test_every_code_comes_back_as_itself(code):
    largest = CODES[code].largest
    codes = torch.arange(BLOCK) % (2 * largest + 1) - largest
    for scale in (1.0, 0.5, 2.0**-100, 2.0**90):
        values = codes.float() * scale
        assert torch.equal(there_and_back(values, code), values)
        assert torch.equal(codes_of(values, code)[0], codes.to(torch.int8))


def test_the_largest_element_keeps_its_sign_and_its_size():
    for seed in range(20):
        flat = numbers(BLOCK, seed)
        at = flat.abs().argmax()
        torch.testing.assert_close(there_and_back(flat)[at], flat[at], rtol=2**-22, atol=0)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_with_an_infinity_or_a_nan_is_not_finite_throughout(dtype, bad, code):
    flat = numbers(BLOCK * 3 + 7, dtype=dtype)
    flat[BLOCK + 9] = bad
    back = there_and_back(flat, code, dtype=dtype)
    assert not back[BLOCK : 2 * BLOCK].isfinite().any()
    others = torch.cat((back[:BLOCK], back[2 * BLOCK :]))
    assert others.isfinite().all()
    assert torch.equal(others[:BLOCK], there_and_back(flat[:BLOCK], code, dtype=dtype))


@pytest.mark.parametrize("code", CODES)
def test_a_double_that_no_float_can_hold_is_not_lost(code):
    flat = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert not there_and_back(flat, code, dtype=torch.float64).isfinite().any()


@pytest.mark.parametrize("code", CODES)
def test_blocks_of_zeros_and_of_what_is_too_small_are_zeros(code):
    too_small = 0.9 * SMALLEST_SCALE * CODES[code].largest
    flat = torch.cat((torch.zeros(BLOCK), torch.full((BLOCK,), too_small), torch.ones(BLOCK)))
    flat[5] = -0.0
    back = there_and_back(flat, code)
    assert torch.equal(back[: 2 * BLOCK], torch.zeros(2 * BLOCK))
    assert not back[: 2 * BLOCK].signbit().any()
    assert_within_bounds(flat, back, code)
    assert back[-1] == 1


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("numel", SIZES)
def test_parts_are_quantised_as_if_each_were_alone(numel, code):
    flat = numbers(3 * numel)
    wire = quantize(flat, code, parts=3)
    alone = [quantize(part, code) for part in flat.view(3, numel)]
    assert torch.equal(wire, torch.cat(alone))
    assert wire.dtype is torch.uint8 and wire.numel() == 3 * quantized_bytes(numel, code)
    each = [dequantize(one, code, 1, numel, torch.float32) for one in alone]
    assert torch.equal(dequantize(wire, code, 3, numel, torch.float32), torch.cat(each))


def test_it_does_not_matter_how_many_blocks_are_taken_at_once(monkeypatch):
    flat = numbers(2 * (5 * BLOCK + 3))
    wire, back = quantize(flat, "int8", 2), there_and_back(flat, "int8", 2)
    monkeypatch.setattr("zerofx.codegen.wires.blocks.BLOCKS_AT_ONCE", 4)
    assert torch.equal(quantize(flat, "int8", 2), wire)
    assert torch.equal(there_and_back(flat, "int8", 2), back)


def test_two_codes_of_four_bits_share_a_byte():
    codes = torch.tensor([-7, 7, 3, -1] * 64, dtype=torch.float32)
    coded, scales = fields_of(quantize(codes, "int4"), "int4", 1, BLOCK)
    assert coded[0, 0, :2].tolist() == [0x79, 0xF3] and scales.item() == 1
    assert torch.equal(from_bytes(coded[0, 0], "int4"), codes.to(torch.int8))


def test_what_fills_up_the_last_block_is_zeros():
    codes, _ = fields_of(quantize(torch.ones(3), "int8"), "int8", 1, 3)
    assert codes.flatten().tolist() == [127] * 3 + [0] * 253


def test_scales_cost_less_than_two_percent():
    for numel in (2**15, 10**6 + 1):
        assert quantized_bytes(numel, "int8") <= 1.02 * numel
        assert quantized_bytes(numel, "int8") <= 0.52 * 2 * numel
        assert quantized_bytes(numel, "int4") <= 1.04 * numel / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back_in_the_dtype_that_is_asked_for(dtype):
    flat = numbers(300)
    back = there_and_back(flat, dtype=dtype)
    assert back.dtype is dtype and torch.equal(back, there_and_back(flat).to(dtype))


def test_parts_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="10 elements are not 3 equal parts"):
        quantize(torch.ones(10), "int8", 3)
    with pytest.raises(ValueError, match="272 elements are not 2 equal parts of 272"):
        dequantize(quantize(torch.ones(10), "int8"), "int8", 2, 10, torch.float32)


def info_at(index: int, numel: int, offset: int, rank: int) -> ParameterInfo:
    return ParameterInfo(
        index=index,
        name=f"p{index}",
        shape=(numel,),
        stride=(1,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
        world_size=4,
        rank=rank,
        assigned=Place(0, offset, numel, 5),
    )


@pytest.mark.parametrize("rank", range(4))
def test_gaps_are_what_no_parameter_fills(rank):
    """Of 20 elements, in shards of 5: seven of one, six of nobody here, six of the other, one."""
    bucket = torch.tensor([1.0] * 7 + [0] * 6 + [1] * 6 + [0])
    infos = [info_at(1, 6, 13, rank), info_at(0, 7, 0, rank)]
    for num_shards in (1, 2, 4):
        numel = 5 * num_shards
        own = bucket.view(-1, numel)[rank // num_shards]
        found = torch.ones(numel)
        for start, stop in gaps(infos, numel):
            assert start < stop
            found[start:stop] = 0
        assert torch.equal(found, own)


def test_what_is_in_a_gap_does_not_count():
    infos = [info_at(0, 7, 0, 1)]
    flat = torch.tensor([3.0, 4.0, math.nan, math.nan, math.inf])
    assert without_gaps(flat, infos).tolist() == [3, 4, 0, 0, 0]
    assert flat.isnan().any(), "the buffer itself stays as it is"
    full = torch.ones(5)
    assert without_gaps(full, [info_at(0, 7, 0, 0)]) is full


@pytest.mark.parametrize("numel", (0, 1, 300, 512))
def test_what_stands_for_no_element_is_zero_and_wires_begin_at_multiples_of_16(numel):
    assert quantized_bytes(numel, "int8") % 16 == quantized_bytes(numel, "int4") % 16 == 0
    wire = quantize(torch.ones(2 * numel), "int8", 2)
    for part in wire.view(2, -1):
        assert part[:numel].eq(127).all() and part[numel : num_blocks(numel) * BLOCK].eq(0).all()
        assert part[num_blocks(numel) * (BLOCK + 4) :].eq(0).all()
