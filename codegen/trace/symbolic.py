"""Keep the numbers of an optimizer's step symbolic while it is traced.

Three things would make constants of them, and each has its remedy here: a number read from a
0-dim tensor, a tensor made of a number, and ``math`` or ``float`` called on one.
"""

from __future__ import annotations

import builtins
import inspect
import math
import os
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError

aten = torch.ops.aten


class Follower(compat.scalars.DispatchMode):
    """Knows the values of 0-dim tensors during a trace, which source line runs, and its names.

    ``step += 1`` on such a tensor is followed exactly, and ``.item()`` then gives a number that
    can be branched on.  Any other write makes the value unknown: it may round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, tuple[Any, bool]] = {}  # and whether adding integers is exact
        self.mutated: set[int] = set()
        self.last_read = "item"
        self.number_names: dict[Any, str] = {}
        self._makers: dict[int, str] = {}
        self._alive: list[Tensor] = []  # a freed storage's key may be another's later

    def know(self, tensor: Tensor, value: Any, *, counts: bool) -> None:
        """Take ``value`` for the tensor's; ``counts``: adding integers to it does not round."""
        self._alive.append(tensor)
        self.values[compat.tensors.storage_key(tensor)] = value, counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        frame = _optimizer_frame(inspect.currentframe())
        compat.scalars.set_source_line(_traceback_line(frame))
        self._note_names(frame)
        one_by_one = compat.aot.list_operators().get(func)
        if one_by_one is not None:
            with self:
                return one_by_one(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            key = compat.tensors.storage_key(args[0])
            if key in self.values:
                return self.values[key][0]
            self.last_read = self._makers.get(key, "item")
            return func(*args, **kwargs)
        if func in _LIFTS and args[0].numel() == 1:
            # torch folds arithmetic on lifted constants, and gives NaN where the other operand
            # is symbolic (2.11 to 2.15).  A factory call is not folded.
            constant = args[0].item()
            result = aten.full.default(
                list(args[0].shape), constant, dtype=args[0].dtype, device=args[0].device
            )
            self.know(result, constant, counts=float(constant).is_integer())
            return result
        known = self._known_result(func, args, kwargs)
        result = func(*args, **kwargs)
        for written in _written(func, args, kwargs):
            self.mutated.add(compat.tensors.storage_key(written))
            self.values.pop(compat.tensors.storage_key(written), None)
        if isinstance(result, Tensor) and result.numel() == 1:
            self._alive.append(result)
            if func is not aten.detach.default:
                self._makers[compat.tensors.storage_key(result)] = str(func)
            if known is not None:
                self.know(result, known[0], counts=known[1])
        return result

    def _note_names(self, frame: types.FrameType | None) -> None:
        for name, value in frame.f_locals.items() if frame is not None else ():
            if isinstance(value, compat.scalars.SYMBOLIC_SCALARS):
                self.number_names.setdefault(compat.scalars.expression(value), name)
            elif isinstance(value, Tensor):
                node = compat.scalars.traced_node(value)
                if node is not None:
                    node.meta.setdefault("source_name", name)

    def _known_result(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, bool] | None:
        """The number that the result of an operation holds exactly, and whether it counts."""
        if func in _FILLS and list(args[0]) == []:
            value = args[1] if func is aten.full.default else _FILLS[func]
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if isinstance(value, (int, float)) and float(value).is_integer():
                return float(value) if dtype.is_floating_point else int(value), True
            return None
        if not args or not isinstance(args[0], Tensor):
            return None
        known = self.values.get(compat.tensors.storage_key(args[0]))
        if known is None or func is aten.clone.default:
            return known
        value, counts = known
        if not counts or len(args) != 2 or kwargs:
            return None
        if not isinstance(args[1], (int, float)) or not float(args[1]).is_integer():
            return None
        if func in (aten.add_.Tensor, aten.add.Tensor):
            return value + args[1], True
        if func in (aten.sub_.Tensor, aten.sub.Tensor):
            return value - args[1], True
        return None


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs[argument.name]


_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_FILLS = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}


class TensorsOfNumbers(torch.overrides.TorchFunctionMode):
    """Makes ``torch.tensor(x)`` of a symbolic number without making it a plain one.

    ``asks_for_shapes`` says whether something may have asked a tensor that is not 0-dim for its
    shape, or for anything else that is neither a tensor nor the same for all sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asks_for_shapes = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor):
            if args and isinstance(args[0], compat.scalars.SYMBOLIC_SCALARS):
                default = torch.get_default_dtype()
                is_float = isinstance(args[0], torch.SymFloat)
                dtype = kwargs.get("dtype") or (default if is_float else torch.int64)
                return torch.full((), args[0], dtype=dtype, device=kwargs.get("device"))
        if getattr(func, "__name__", "") in _READS and not compat.tensors.is_fake(args[0]):
            raise UpdateError(
                "the optimizer's step reads a number off a tensor that is neither in a parameter "
                "group nor in `self.state[p]`, and a traced update would keep that number. Move it "
                "there, or make it a Python number."
            )
        result = func(*args, **kwargs)
        if any(map(_has_elements, (*args, *kwargs.values()))):
            self.asks_for_shapes |= not _is_blind_to_sizes(func, result)
        return result


_READS = {"item", "tolist", "__float__", "__int__", "__index__", "__bool__"}


def _has_elements(argument: Any) -> bool:
    """Return whether an argument is, or may have in it, a tensor with dimensions."""
    if isinstance(argument, Tensor):
        return argument.dim() > 0
    return isinstance(argument, (list, tuple, dict)) and len(argument) > 0


def _is_blind_to_sizes(func: Callable[..., Any], result: Any) -> bool:
    """Return whether what Python has learned by a call is the same for tensors of other sizes.

    What a function of torch's written in Python has asked on its way is not seen: it counts as
    not blind.
    """
    if isinstance(func, types.MethodWrapperType) and func.__name__ == "__get__":
        return getattr(func.__self__, "__name__", None) in _GETTERS_OF_ALL_SIZES
    if not isinstance(func, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return False
    return isinstance(result, Tensor) or func.__name__ in _PREDICATES_OF_ALL_SIZES


_GETTERS_OF_ALL_SIZES = {"device", "dtype", "grad", "is_sparse", "layout", "requires_grad"}
_PREDICATES_OF_ALL_SIZES = {"is_complex", "is_floating_point"}


def copying_functions(
    env: compat.scalars.ScalarEnvironment,
) -> Callable[[types.FunctionType], types.FunctionType]:
    """Return what copies functions, so that ``math.sqrt`` and ``float`` take symbolic numbers.

    A copy has other globals; the module that the function is of stays as it is.
    """

    def symbolic(function: Callable[..., float]) -> Callable[..., Any]:
        def on_symbols(*arguments: Any) -> Any:
            return env.derive(function, arguments)

        on_symbols.function = function  # type: ignore[attr-defined]

        def call(*arguments: Any) -> Any:
            if any(isinstance(argument, compat.scalars.SYMBOLIC_SCALARS) for argument in arguments):
                return compat.scalars.record_scalar_call(on_symbols, arguments)
            return function(*arguments)

        return call

    class KindOfFloat(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (builtins.float, torch.SymFloat))

        def __call__(cls, value: Any = 0.0) -> Any:
            known = isinstance(value, compat.scalars.SYMBOLIC_SCALARS)
            return torch.sym_float(value) if known else builtins.float(value)

    symbolic_float = KindOfFloat("float", (), {})
    functions = {getattr(math, name): symbolic(getattr(math, name)) for name in _MATH}
    namespace = types.SimpleNamespace(
        **vars(math) | {function.__name__: call for function, call in functions.items()}
    )
    copies: dict[int, Any] = {}

    def copied_globals(original: dict[str, Any]) -> dict[str, Any]:
        if id(original) in copies:
            return copies[id(original)]
        copies[id(original)] = result = dict(original)
        for name, value in list(original.items()):
            if value is math:
                result[name] = namespace
            elif isinstance(value, types.BuiltinFunctionType) and value in functions:
                result[name] = functions[value]
            elif isinstance(value, types.FunctionType) and value.__globals__ is original:
                result[name] = copied(value)
        result.setdefault("float", symbolic_float)
        return result

    def copied(function: types.FunctionType) -> types.FunctionType:
        if id(function) in copies:
            return copies[id(function)]
        # Inside torch, only decorators such as no_grad are copied, for what they close over.
        inside_torch = (function.__module__ or "").partition(".")[0] == "torch"
        cells = [types.CellType() for _ in function.__closure__ or ()]
        names = function.__globals__ if inside_torch else copied_globals(function.__globals__)
        result = types.FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, tuple(cells)
        )
        result.__kwdefaults__ = function.__kwdefaults__
        copies[id(function)] = result
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            try:
                content = original.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
            is_function = isinstance(content, types.FunctionType)
            cell.cell_contents = copied(content) if is_function else content
        return result

    return copied


def class_with_copies(
    optimizer_class: type, copied: Callable[[types.FunctionType], types.FunctionType]
) -> type:
    """Return a subclass whose methods are copies.  Those reached through ``super()`` are not."""
    methods: dict[str, Any] = {}
    for base in reversed(optimizer_class.__mro__):
        if base in torch.optim.Optimizer.__mro__:
            continue
        for name, member in vars(base).items():
            if getattr(member, "hooked", False):
                member = member.__wrapped__  # torch's profiling and hooks around a step
            if isinstance(member, types.FunctionType):
                methods[name] = copied(member)
            elif isinstance(member, staticmethod):
                function = member.__func__
                if isinstance(function, types.FunctionType):
                    methods[name] = staticmethod(copied(function))
    return type(optimizer_class.__name__, (optimizer_class,), methods)


# Functions of a number that give a float.  The others (floor, isnan) work through the number's
# own methods.
_MATH = (
    *("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "pow", "fabs", "hypot"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf"),
)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_NOT_USER_CODE = (
    "<",
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),  # all of codegen
    os.path.join(os.path.dirname(compat.__file__), ""),
    os.path.join(_OPTIMIZERS, "optimizer.py"),
)


def _is_optimizer_source(filename: str) -> bool:
    """Return whether a file is the user's, or one of torch's optimizers."""
    if filename.startswith(_NOT_USER_CODE):
        return False
    return not filename.startswith(_TORCH) or filename.startswith(_OPTIMIZERS)


def frame_line(frame: types.FrameType | None) -> str:
    """``file:line`` of the innermost frame that is the optimizer's source."""
    frame = _optimizer_frame(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def _optimizer_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and not _is_optimizer_source(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _traceback_line(frame: types.FrameType | None) -> str:
    """The optimizer's source line being run, as a traceback writes it."""
    filename, _, line = frame_line(frame).rpartition(":")
    return f'File "{filename}", line {line}, in step'


def innermost_line(error: BaseException) -> str:
    """``file:line`` in the optimizer's source where an error was raised."""
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_optimizer_source(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else "?"
