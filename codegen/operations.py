"""The operations of an update's kernel, and how torch's operators are written in them.

A rule takes a node of the trace and gives its value for one element, computed as torch computes
it: in the promoted dtype of the operands, bf16 and fp16 in fp32, numbers rounded to that dtype.
Unlike torch, it does not round a bf16 or fp16 result that is an operand of the next operation;
what is stored, or cast by the optimizer, is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zerofx.codegen.numbers import Number
from zerofx.codegen.rewrite.rounding import LOW
from zerofx.codegen.trace.functions import example

if TYPE_CHECKING:
    from zerofx.codegen.pointwise import Builder

aten = torch.ops.aten


@dataclass(frozen=True)
class NumberOperand:
    """A number, in the dtype that it is combined with elements in."""

    number: Number
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Value:
    """One element of an intermediate result, or what the elements of a block have in common.

    ``operation`` names one of a kernel's, or is an operator of torch.  ``dtype`` is what it is
    held in.  ``name`` is what the optimizer calls it, if anything, ``line`` the optimizer's
    ``file:line``, ``note`` why it is there if that is not the optimizer's doing.
    """

    operation: str | functools.partial
    operands: tuple[Operand, ...]
    dtype: torch.dtype
    name: str = ""
    line: str = ""
    note: str = ""

    @property
    def values(self) -> Iterator[Value]:
        """The values among its operands."""
        return (operand for operand in self.operands if isinstance(operand, Value))


Operand = Value | NumberOperand | int | float | bool


# None: memory that nothing was written to.
Rule = Callable[["Builder", fx.Node], Value | None]


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch computes a dtype's elements in."""
    return torch.float32 if dtype in LOW else dtype


# Other names for their operand.  Views are of the whole shape, or of another dtype (a rule).
ALIASES = {"alias", "detach", "view", "_unsafe_view", "expand", "lift_fresh"}


def operator_names(target: torch._ops.OpOverload) -> tuple[str, str]:
    """An operator's name, and that of its functional form."""
    name = target._schema.name.partition("::")[2]
    return name, name if name.endswith("__") else name.removesuffix("_")


def rule_of(target: torch._ops.OpOverload, in_function: bool = False) -> Rule | None:
    """Return the rule that writes an operator, in place or not; None if it is not known.

    Some of what a Python function in an update may use (``in_function``) is not elementwise.
    """
    if target.namespace != "aten":
        return None
    if target is aten.view.dtype:
        return _bitcast
    name = operator_names(target)[1]
    return _RULES.get(name) or (_OF_FUNCTIONS.get(name) if in_function else None)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names in its schema, defaults included."""
    arguments = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    for argument, value in zip(arguments, node.args, strict=False):
        values[argument.name] = value
    return values | node.kwargs


def _common_dtype(build: Builder, node: fx.Node, *arguments: Any) -> torch.dtype:
    """The dtype that torch computes these arguments in, of which one is elements."""
    dtype: torch.dtype | None = None
    for item in sorted(arguments, key=build.is_element, reverse=True):
        value = item.meta.get("val") if isinstance(item, fx.Node) else item
        stand_in: Any = _NUMBERS.get(type(value), 0)
        if isinstance(value, torch.Tensor):
            stand_in = example(int(build.is_element(item)), value.dtype)
        dtype = torch.result_type(stand_in, example(1, dtype) if dtype else stand_in)
    assert dtype is not None
    return register_dtype(dtype)


_NUMBERS = {bool: False, float: 0.0, torch.SymFloat: 0.0}


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _function(
    operation: str,
    *names: str,
    floats: bool = False,
    takes: torch.dtype | None = None,
    gives: torch.dtype | None = None,
) -> Rule:
    """One operation of the named arguments, in their common dtype if not otherwise said."""

    def rule(build: Builder, node: fx.Node) -> Value:
        given = [_arguments(node)[name] for name in names]
        dtype = takes or _common_dtype(build, node, *given)
        dtype = _floating(dtype) if floats else dtype
        operands = [build.operand(item, dtype, node) for item in given]
        return build.emit(operation, *operands, dtype=gives or dtype, node=node)

    return rule


def _sum(build: Builder, node: fx.Node) -> Value:
    """``self + alpha * other``, or the difference; ``rsub`` swaps the two."""
    given = _arguments(node)
    first, second = given["self"], given["other"]
    minus = operator_names(node.target)[1] in ("sub", "rsub")
    if operator_names(node.target)[1] == "rsub":
        first, second = second, first
        if given.get("alpha", 1) != 1:
            raise build.refusal(node, "scales what it subtracts from")
    dtype = _common_dtype(build, node, first, second)
    term, negative = build.signed(second, dtype, node)
    scale, scale_negative = build.signed(given.get("alpha", 1), dtype, node)
    if scale != 1:
        term = build.emit("mul", scale, term, dtype=dtype, node=node)
    operation = "sub" if minus ^ negative ^ scale_negative else "add"
    return build.emit(operation, build.operand(first, dtype, node), term, dtype=dtype, node=node)


def _product(build: Builder, node: fx.Node) -> Value:
    """``self * other`` or ``self / other``; the sign of a number last."""
    given = _arguments(node)
    if given.get("rounding_mode") is not None:
        raise build.refusal(node, "rounds a quotient to an integer")
    operation = operator_names(node.target)[1]
    dtype = _common_dtype(build, node, given["self"], given["other"])
    dtype = _floating(dtype) if operation == "div" else dtype
    if dtype is torch.bool:
        operation = "and"
    first, minus = build.signed(given["self"], dtype, node)
    second, other_minus = build.signed(given["other"], dtype, node)
    value = build.emit(operation, first, second, dtype=dtype, node=node)
    is_negative = minus ^ other_minus
    return build.emit("neg", value, dtype=dtype, node=node) if is_negative else value


def _sum_of_products(combine: str) -> Rule:
    """``self + value * tensor1 * tensor2``, or the quotient of the two."""

    def rule(build: Builder, node: fx.Node) -> Value:
        given = _arguments(node)
        tensors = [given[name] for name in ("self", "tensor1", "tensor2")]
        dtype = _common_dtype(build, node, *tensors)
        start, first, second = (build.operand(item, dtype, node) for item in tensors)
        scale, negative = build.signed(given["value"], dtype, node)

        def emit(operation: str, *operands: Operand) -> Value:
            return build.emit(operation, *operands, dtype=dtype, node=node)

        def scaled(value: Operand) -> Operand:
            return value if scale == 1 else emit("mul", scale, value)

        if combine == "mul" or build.by_inductor:  # torch's own order, which on CUDA is another
            term: Operand = emit(combine, scaled(first), second)
        else:
            term = scaled(emit("div", first, second))
        return emit("sub" if negative else "add", start, term)

    return rule


def _power(of: float | None = None) -> Rule:
    """``self ** exponent``; the exponent is an argument if it is not given here."""

    def rule(build: Builder, node: fx.Node) -> Value:
        exponent = _arguments(node)["exponent"] if of is None else of
        if not isinstance(exponent, (int, float)) or exponent not in _POWERS:
            raise build.refusal(node, f"has an exponent other than {sorted(_POWERS)}")
        base = _arguments(node)["self"]
        dtype = _common_dtype(build, node, base, exponent)
        value = result = build.operand(base, dtype, node)
        for operation in _POWERS[exponent]:
            operands = (result, value) if operation == "mul" else (result,)
            result = build.emit(operation, *operands, dtype=dtype, node=node)
        return result  # type: ignore[return-value]

    return rule


_POWERS: dict[int | float, tuple[str, ...]] = {
    1: (),
    2: ("mul",),
    3: ("mul", "mul"),
    0.5: ("sqrt",),
    -0.5: ("sqrt", "reciprocal"),
    -1: ("reciprocal",),
    -2: ("mul", "reciprocal"),
}


def _clamp(build: Builder, node: fx.Node) -> Value:
    given = _arguments(node)
    bounds = [(name, given.get(name)) for name in ("min", "max") if given.get(name) is not None]
    dtype = _common_dtype(build, node, given["self"], *(bound for _, bound in bounds))
    value = build.operand(given["self"], dtype, node)
    for name, bound in bounds:
        operation = "maximum" if name == "min" else "minimum"
        limit = build.operand(bound, dtype, node)
        value = build.emit(operation, value, limit, dtype=dtype, node=node)
    return value  # type: ignore[return-value]


def _where(condition: str, chosen: str, otherwise: str) -> Rule:
    def rule(build: Builder, node: fx.Node) -> Value:
        given = _arguments(node)
        if condition == "indices":  # x[mask] = value; checked to be one mask and one value
            given["indices"] = given["indices"][0]
        branches = [given[chosen], given[otherwise]]
        dtype = register_dtype(node.meta["val"].dtype)
        test = build.operand(given[condition], torch.bool, node)
        operands = [build.operand(branch, dtype, node) for branch in branches]
        return build.emit("where", test, *operands, dtype=dtype, node=node)

    return rule


def _filled(argument: str | None = None, constant: int | None = None) -> Rule:
    def rule(build: Builder, node: fx.Node) -> Value:
        dtype = register_dtype(node.meta["val"].dtype)
        value = _arguments(node)[argument] if argument else constant
        return build.emit("full", build.operand(value, dtype, node), dtype=dtype, node=node)

    return rule


def as_it_is(build: Builder, node: fx.Node) -> Value:
    """An operator without a rule, for a compiler that knows torch's."""
    operators = getattr(torch.ops, node.target.namespace)
    function = getattr(operators, operator_names(node.target)[1], None)
    options = {name: option for name, option in node.kwargs.items() if name != "out"}
    if function is None or any(isinstance(option, fx.Node) for option in options.values()):
        raise build.refusal(node, "is not known to the kernel")
    given = [item for item in node.args if isinstance(item, fx.Node)]
    common = _common_dtype(build, node, *given)
    operands: list[Any] = []
    for item in node.args:
        if build.is_element(item):
            item = build.operand(item, register_dtype(item.meta["val"].dtype), node)
        elif isinstance(item, fx.Node):
            item = build.operand(item, common, node)
        operands.append(item)
    dtype = register_dtype(node.meta["val"].dtype)
    return build.emit(functools.partial(function, **options), *operands, dtype=dtype, node=node)


def _nothing(build: Builder, node: fx.Node) -> None:
    return None


def _moved(argument: str) -> Rule:
    """A value in the dtype of what it is written to: rounded to that, or the value itself."""

    def rule(build: Builder, node: fx.Node) -> Value:
        source, after = _arguments(node)[argument], node.meta["val"].dtype
        if not build.is_element(source):
            number = build.operand(source, register_dtype(after), node)
            return build.emit("full", number, dtype=register_dtype(after), node=node)
        before = source.meta["val"].dtype
        value = build.operand(source, register_dtype(before), node)
        assert isinstance(value, Value)
        return value if before == after else build.converted(value, after, node)

    return rule


def _bitcast(build: Builder, node: fx.Node) -> Value:
    """The same bits as another dtype of the same size."""
    given = _arguments(node)
    before, after = given["self"].meta["val"].dtype, given["dtype"]
    if before.itemsize != after.itemsize:
        raise build.refusal(node, "views elements as others of another size")
    value = build.operand(given["self"], before, node)
    return build.emit("bitcast", value, dtype=after, node=node)


def _index(build: Builder, node: fx.Node) -> Value:
    """``arange`` over the elements of a shard, counted in 64 bits from its first."""
    return build.emit("index", dtype=torch.int64, node=node)


def _of_rows(operation: str) -> Rule:
    """An operation between elements in rows, which are blocks, and what each row has one of."""

    def rule(build: Builder, node: fx.Node) -> Value:
        argument = _arguments(node)["self"]
        dtype = register_dtype(argument.meta["val"].dtype)
        return build.emit(operation, build.operand(argument, dtype, node), dtype=dtype, node=node)

    return rule


_PAIR = ("self", "other")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("mul", "div"), _product),
    "addcmul": _sum_of_products("mul"),
    "addcdiv": _sum_of_products("div"),
    "lerp": _function("lerp", "self", "end", "weight"),
    "pow": _power(),
    "square": _power(2),
    "rsqrt": _power(-0.5),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **{name: _function(name, *_PAIR) for name in ("maximum", "minimum")},
    **{name: _function(name, "self") for name in ("neg", "abs", "floor", "ceil")},
    **{name: _function("sign", "self") for name in ("sign", "sgn")},
    **{
        name: _function(name, "self", floats=True)
        for name in ("sqrt", "reciprocal", "exp", "log", "sigmoid", "sin", "cos", "erf")
    },
    **{
        name: _function(name, *_PAIR, gives=torch.bool)
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
    },
    **{name: _function(name, "self", gives=torch.bool) for name in ("isnan", "isinf", "isfinite")},
    **{
        f"logical_{name}": _function(name, *_PAIR, takes=torch.bool)
        for name in ("and", "or", "xor")
    },
    "logical_not": _function("not", "self", takes=torch.bool),
    **{f"bitwise_{name}": _function(name, *_PAIR) for name in ("and", "or", "xor")},
    **{f"__{name}__": _function(name, *_PAIR) for name in ("and", "or", "xor")},
    "bitwise_not": _function("not", "self"),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _function("shift_left", *_PAIR)),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _function("shift_right", *_PAIR)),
    "where": _where("condition", "self", "other"),
    "masked_fill": _where("mask", "value", "self"),
    "index_put": _where("indices", "values", "self"),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _filled(constant=0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(constant=1)),
    **dict.fromkeys(("full", "full_like", "new_full"), _filled("fill_value")),
    "fill": _filled("value"),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), _nothing
    ),
    **dict.fromkeys(("clone", "_to_copy", "lift_fresh_copy", "contiguous"), _moved("self")),
    "copy": _moved("src"),
}

_OF_FUNCTIONS: dict[str, Rule] = {
    "arange": _index,
    "amax": _of_rows("largest_of_block"),
    "unsqueeze": _of_rows("of_block"),
}
