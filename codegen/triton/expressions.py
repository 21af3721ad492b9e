"""Triton's text for what happens to one element: the operations of a pointwise program."""

from __future__ import annotations

import torch

from zerofx.codegen.operations import NumberOperand, Operand, Value

DTYPES = {
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
FUNCTIONS = {
    "stream": '''\
@triton.jit
def stream(address, begin, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The address of a segment's stream, from the block's first element on."""
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
    "largest_of_part": '''\
@triton.jit
def largest_of_part(x, mask):
    """The largest of each part's 256 elements; NaN if one is."""
    parts = tl.where(mask, x, float("-inf")).reshape(x.numel // 256, 256)
    return tl.reduce(parts, 1, maximum)
''',
    "rounded": '''\
@triton.jit
def rounded(x):
    """torch.round, of what is below 2**22: a sum of more has no digits behind the point."""
    return (x + 12582912.0) - 12582912.0
''',
    "sum_of_squares": '''\
@triton.jit
def sum_of_squares(x, mask):
    """Of the elements that are there."""
    return tl.sum(tl.where(mask, x * x, 0.0))
''',
    "packed": '''\
@triton.jit
def packed(x, mask):
    """The codes of two elements in each byte, the first in its lower half."""
    low, high = tl.split(tl.where(mask, x, 0).reshape(x.numel // 2, 2))
    return (low & 15) | (high << 4)
''',
    "unpacked": '''\
@triton.jit
def unpacked(x):
    """The codes of two elements that are in each byte, with their signs."""
    return tl.join(((x & 15) ^ 8) - 8, x >> 4).reshape(x.numel * 2)
''',
    "of_part": '''\
@triton.jit
def of_part(x):
    """For each element what its part of 256 has."""
    return tl.broadcast_to(x[:, None], x.numel, 256).reshape(x.numel * 256)
''',
}

# How tightly an expression holds together, as in Python.
_LOOSE, _COMPARED, _BITS, _SHIFTED, _ADDED, _MULTIPLIED, _NEGATED, _CALL = range(8)

_BINARY = {
    "add": ("+", _ADDED),
    "sub": ("-", _ADDED),
    "mul": ("*", _MULTIPLIED),
    "div": ("/", _MULTIPLIED),
    "gt": (">", _COMPARED),
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

# The text, how tightly that holds, and how tightly the operand in it has to hold.
_Template = tuple[str, int, int]
_TEMPLATES: dict[str, _Template] = {
    "neg": ("-{0}", _NEGATED, _NEGATED),
    "not": ("~{0}", _NEGATED, _NEGATED),
    "reciprocal": ("1.0 / {0}", _MULTIPLIED, _MULTIPLIED + 1),
    "cast": ("{0}.to({dtype})", _CALL, _CALL),
    "index": ("begin + lane", _ADDED, _LOOSE),
    "bitcast": ("{0}.to({dtype}, bitcast=True)", _CALL, _CALL),
    "full": ("tl.full(lane.shape, {0}, {dtype})", _CALL, _LOOSE),
    "isnan": ("{0} != {0}", _COMPARED, _COMPARED + 1),
    "isinf": ('tl.abs({0}) == float("inf")', _COMPARED, _LOOSE),
    "isfinite": ('tl.abs({0}) < float("inf")', _COMPARED, _LOOSE),
    "largest_of_block": ("largest_of_part({0}, mask)", _CALL, _LOOSE),
    "round": ("rounded({0})", _CALL, _LOOSE),
    "sum_of_squares": ("sum_of_squares({0}, mask)", _CALL, _LOOSE),
    "lerp": ("lerp({0}, {1}, {2})", _CALL, _LOOSE),
    "where": ("tl.where({0}, {1}, {2})", _CALL, _LOOSE),
    "sign": ("sign_of({0})", _CALL, _LOOSE),
    "of_block": ("of_part({0})", _CALL, _LOOSE),
    "pack": ("packed({0}, mask)", _CALL, _LOOSE),
    "unpack": ("unpacked({0})", _CALL, _LOOSE),
    **{name: (f"{name}({{0}}, {{1}})", _CALL, _LOOSE) for name in ("maximum", "minimum")},
    **{
        name: (f"tl.{name}({{0}})", _CALL, _LOOSE)
        for name in ("sqrt", "abs", "exp", "log", "floor", "ceil", "sigmoid", "sin", "cos", "erf")
    },
}

# Those of results of one dtype.  Quotients and roots in float32 are rounded as torch rounds them:
# Triton's plain ones are not.
_BY_DTYPE: dict[torch.dtype, dict[str, _Template]] = {
    torch.bool: {
        "not": ("{0} == 0", _COMPARED, _NEGATED),
        "cast": ("{0} != 0", _COMPARED, _COMPARED + 1),
    },
    torch.float32: {
        "div": ("tl.div_rn({0}, {1})", _CALL, _LOOSE),
        "sqrt": ("tl.sqrt_rn({0})", _CALL, _LOOSE),
        "reciprocal": ("tl.div_rn(1.0, {0})", _CALL, _LOOSE),
    },
}

# The functions of the module that these operations are written with.
_USES = {
    "sign": ("sign_of",),
    "round": ("rounded",),
    "of_block": ("of_part",),
    "pack": ("packed",),
    "unpack": ("unpacked",),
    "largest_of_block": ("maximum", "largest_of_part"),
    **{name: (name,) for name in ("lerp", "maximum", "minimum", "sum_of_squares")},
}


class Expressions:
    """Writes values as text: by name, or in place where they are ``inlined``.

    ``functions`` are those of the module that have been used, in that order.
    """

    def __init__(self, numbers: dict[NumberOperand, str], inlined: set[Value]) -> None:
        self.numbers, self.inlined = numbers, inlined
        self.names: dict[Value, str] = {}
        self.functions: dict[str, None] = {}

    def text(self, operand: Operand, hold: int = _LOOSE) -> str:
        """An operand as text that may stand next to operators that hold less tightly."""
        text, tightness = self._tight(operand)
        return f"({text})" if tightness < hold else text

    def _tight(self, operand: Operand) -> tuple[str, int]:
        if isinstance(operand, NumberOperand):
            return self.numbers[operand], _CALL
        if not isinstance(operand, Value):
            return _constant(operand), _CALL
        if operand not in self.inlined:
            return self.names[operand], _CALL
        return self.operation(operand)

    def operation(self, value: Value) -> tuple[str, int]:
        operation, operands = value.operation, value.operands
        assert isinstance(operation, str), "others are for Inductor"
        template = _BY_DTYPE.get(value.dtype, {}).get(operation) or _TEMPLATES.get(operation)
        if template is None:
            sign, hold = _BINARY[operation]
            # Few know how tightly & and >> hold: what they combine is in parentheses.
            is_plain = hold in (_ADDED, _MULTIPLIED)
            left = self.text(operands[0], hold if is_plain else _NEGATED)
            right = self.text(operands[1], hold + 1 if is_plain else _NEGATED)
            return f"{left} {sign} {right}", hold
        text, hold, inner = template
        texts = [self.text(operand, inner) for operand in operands]
        self.functions |= dict.fromkeys(_USES.get(operation, ()))
        return text.format(*texts, dtype=DTYPES[value.dtype]), hold


def _constant(value: int | float | bool) -> str:
    text = repr(value)
    return f'float("{text}")' if text in ("inf", "nan") else text
