"""Inductor: regions compiled in order, and for any length."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib
import itertools
import os
import pickle
import pickletools
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
from sympy import Basic, Expr, sympify
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from zerofx.compat.aot import scalar_hint, value_of
from zerofx.compat.compile_cache import is_kept, keep, kept, turn_to_compile
from zerofx.compat.cpp_kernels import kernels_together
from zerofx.worker import Worker


def is_higher_order(target: Any) -> bool:
    """Return whether an operator takes programs as arguments, as ``torch.cond`` does."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def mark_emptied(placeholder: torch.fx.Node) -> None:
    """Let the compiled graph empty the list that it is given here, as it consumes what is in it."""
    placeholder.meta[EMPTIED] = True


EMPTIED = "steal_arg"
"""Inductor's name for that, among a node's metadata (2.11 to 2.15)."""


def mark_alike(placeholder: torch.fx.Node) -> None:
    """Have the graph add up in one order on all ranks, whichever is fastest on each."""
    placeholder.meta[ALIKE] = True


ALIKE = "alike on ranks"


def import_inductor() -> None:
    """Import it: 2 to 4 s.  Not at the top: only what compiles needs it."""
    importlib.import_module("torch._inductor.compile_fx")


def keys() -> dict[str, Any]:
    """Return what keys of Inductor's cache begin with, but for the device: hashes of sources.

    Private: functions of ``codecache`` that can be set (2.11 to 2.15, triton's from 2.13 on).
    """
    from torch._inductor import codecache

    found = {name: getattr(codecache, name, None) for name in ("torch_key", "triton_key")}
    return {name: key() for name, key in found.items() if key is not None and hasattr(key, "set")}


def _set_keys(found: dict[str, Any]) -> None:
    """Set what ``keys`` has returned in another process with the same torch, and find the rest."""
    from torch._inductor import codecache

    for name, value in found.items():
        with contextlib.suppress(RuntimeError):  # it is set
            getattr(codecache, name).set(value)
    codecache.torch_key()
    codecache.CacheBase.get_system()


def prepare() -> None:
    """Import what compiling needs, and find which vector instructions there are; once."""
    with _PREPARING:
        _prepare()


def prepare_beside(found: dict[str, Any] | None = None) -> threading.Event:
    """Do that in a thread, and give what tells that it is done, or has failed; set ``keys`` too.

    They may be ``found`` by another process.  Not in a thread that the process may end beside, for
    it imports; where the process ends meanwhile, imports fail, and nobody needs them.
    """
    has_ended = threading.Event()

    def run() -> None:
        try:
            with contextlib.suppress(Exception):
                prepare()
                _set_keys(found or {})
        finally:
            has_ended.set()

    threading.Thread(target=run, name="zerofx prepares").start()
    return has_ended


_PREPARING = threading.Lock()


def _compiles(kind: Any, code: str) -> bool:
    """Return whether the C++ compiler makes this kind of vector instructions of this code.

    Inductor's own test includes torch's headers, links and loads what comes of that, 1.2 s of a
    processor, to see whether torch has functions of such vectors too.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler, flags = get_cpp_compiler(), kind.build_arch_flags().split()
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    found = repr((compiler, version, flags, code, torch.__version__, torch.__file__))
    key = hashlib.sha256(found.encode()).hexdigest()
    if is_kept() and kept(key) is not None:
        return True
    if "ATen" in code:
        library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        if not hasattr(ctypes.CDLL(library), f"Sleef_expf{kind.bit_width() // 32}_u10"):
            return False
        code = ""
    command = [compiler, "-march=native", *flags, "-c", "-o", os.devnull, "-x", "c++", "-"]
    compiles = subprocess.run(command, input=code.encode(), capture_output=True).returncode == 0
    if compiles and is_kept():
        keep(key, b"compiles")
    return compiles


@functools.cache
def _prepare() -> None:
    """Do as ``prepare`` does.

    Inductor has the C++ compiler try all kinds that the processor has, one after the other: 19 s
    of a first call with an empty cache (torch 2.13, two CPU cores, November 2026).  A compiler
    that makes the widest makes the others: with that one tried, the rest is taken for granted.

    Private: ``cpu_vec_isa``, alike from 2.11 to 2.15; elsewhere Inductor finds them itself.  It can
    go when torch tries one kind alone.
    """
    import_inductor()
    from torch._inductor import config, cpu_vec_isa

    with contextlib.suppress(AttributeError):
        flags = cpu_vec_isa.x86_isa_checker()  # none of another processor
        kinds = cpu_vec_isa.supported_vec_isa_list
        widest = next((kind for kind in kinds if set(str(kind).split()) <= set(flags)), None)
        is_linux = sys.platform == "linux" and widest is not None
        trying = mock.patch.object(cpu_vec_isa.VecISA, "check_build", _compiles)
        with trying if is_linux else contextlib.nullcontext():
            if widest is not None and widest:
                with config.patch({"cpp.vec_isa_ok": True}):
                    cpu_vec_isa.valid_vec_isa_list()  # which keeps what it finds
            cpu_vec_isa.pick_vec_isa()


def settings() -> dict[str, Any]:
    """Return what compiled code depends on beside its graph: torch's settings, to pickle."""
    from torch._inductor import config

    matmul = torch.backends.cuda.matmul
    return {
        "inductor": config.save_config(),
        "functorch": torch._functorch.config.save_config(),
        "threads": torch.get_num_threads(),
        "matmul": {name: getattr(matmul, name) for name in _MATMUL if hasattr(matmul, name)},
        "precision": value_of(_PRECISION),
        "modules": _modules_in_keys(),
        "dtype": torch.get_default_dtype(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    }


_PRECISION = "_get_float32_matmul_precision"
"""Torch raises where it was set by the new name, ``fp32_precision``, which is in ``_MATMUL``."""
_MATMUL = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


_WITHOUT_MODULE = {
    "torch.contiguous_format": (torch, torch.contiguous_format),
    "float32": (torch.float32, torch.float32),
}
"""Objects of torch, by name, that do not say their module; and what a module has that has them."""


def _modules_in_keys() -> dict[str, str]:
    """Return where pickle finds objects of torch that do not say their module.

    That is the first imported module that has them, or has torch: as Inductor's keys are hashes of
    pickles, these differ between programs that import otherwise (2.11 to 2.15).
    """

    def place(value: Any) -> str:
        operations = pickletools.genops(pickle.dumps(value, protocol=4))
        module, _ = (word for _, word, _ in operations if isinstance(word, str))
        return module

    return {name: place(value) for name, (_, value) in _WITHOUT_MODULE.items()}


def set_settings(found: dict[str, Any]) -> None:
    """Set what another process's ``settings`` returned."""
    from torch._inductor import config

    config.load_config(found["inductor"])
    torch._functorch.config.load_config(found["functorch"])
    torch.set_num_threads(found["threads"])
    precision = found["precision"]
    if precision is not None and precision != value_of(_PRECISION):  # setting it writes others too
        torch.set_float32_matmul_precision(precision)
    for name, value in found["matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)
    torch.set_default_dtype(found["dtype"])
    torch.utils.deterministic.fill_uninitialized_memory = found["fills"]
    for name in set(found["modules"].values()) - set(_modules_in_keys().values()):
        module = sys.modules.pop(name, None) or types.ModuleType(name)
        for value, place in found["modules"].items():
            if place == name:
                vars(module).setdefault(value.partition(".")[0], _WITHOUT_MODULE[value][0])
        others = dict(sys.modules)
        sys.modules.clear()
        sys.modules.update({name: module, **others})
    is_deterministic, warns_only = found["deterministic"]
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


@dataclass(frozen=True)
class Like:
    """An input of a graph: a tensor's shape and strides, in elements; or another value.

    A symbolic size is an expression of sympy's.
    """

    shape: tuple[Any, ...] = ()
    stride: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    value: Any = None

    @classmethod
    def of(cls, value: Any, number: Callable[[Any], Any] = _expression) -> Like:
        """Describe a value, each of its sizes as ``number`` gives it."""
        if not isinstance(value, torch.Tensor):
            return cls(value=number(value))
        shape, stride = (tuple(map(number, of)) for of in (value.shape, value.stride()))
        return cls(shape, stride, value.dtype, value.device)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Shape and strides, or the value."""
        return (self.value,) if self.dtype is None else (*self.shape, *self.stride)

    def made(self, fakes: FakeTensorMode | None = None) -> Any:
        """Return such a value; of a tensor, one without memory."""
        if self.dtype is None:
            return self.value
        with fakes or FakeTensorMode():
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )


def as_captured(values: Sequence[Any]) -> list[Any] | None:
    """Return captured values with the sizes that they had; None if a size was not known."""
    made = []
    for value in values:
        like = Like.of(value, scalar_hint)
        if None in like.sizes:
            return None
        made.append(like.made())
    return made


WITHOUT_CUDAGRAPHS = {"triton.cudagraphs": False}
"""Whatever the environment says: a CUDA graph would give out memory that it writes again."""

IN_ORDER = {"reorder_for_locality": False, **WITHOUT_CUDAGRAPHS}
"""Settings of Inductor that keep a program's order, as in training and not as in inference.

Weight gradients late, next to what communicates them, keep alive what they are made of.
"""


def _patches(gm: torch.fx.GraphModule, inputs: Iterable[Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph.

    On an accelerator it tries how best to run a reduction, in each process, and one configuration
    adds up in another order than the next.  ``deterministic`` (2.11 to 2.15) has it try none.
    """
    from torch._inductor import config

    is_alike = any(node.meta.get(ALIKE) for node in gm.graph.find_nodes(op="placeholder"))
    if not is_alike or not hasattr(config, "deterministic"):
        return IN_ORDER
    on_device = any(isinstance(one, torch.Tensor) and not is_on_cpu(one) for one in inputs)
    return {**IN_ORDER, "deterministic": True} if on_device else IN_ORDER


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: list[list[Any]], donated: Sequence[int] = ()
) -> Callable:
    """Compile an aten graph for inputs such as these, in lists; returns a function of those.

    The memory of inputs at the positions ``donated`` may be written to, as that of what backward
    alone reads: nobody else has it, and nobody reads it later.

    ``compile_fx`` and not ``compile_fx_inner``, which skips passes that dropout needs.  In a
    thread of its own: the caller's runs inside AOT's runtime, with dispatch keys masked that
    tracing needs.  Under a tracing context with a shape environment, without which Inductor
    leaves its disk cache alone.
    """
    # Not at the top: only this lowering needs it, and the import takes 1.6 to 2.0 s (2.11, 2.13
    # and 2.15 on two busy CPU cores, November 2026).
    from torch._inductor.compile_fx import compile_fx

    fakes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)

    def static(value: Any) -> Any:
        """AOTAutograd takes sizes for symbols otherwise, and fails if one is a view's offset."""
        if isinstance(value, FakeTensor):  # of another mode: captured
            with fakes:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        is_tensor = isinstance(value, torch.Tensor)
        return fakes.from_tensor(value, static_shapes=True) if is_tensor else value

    def compile_region() -> Callable:
        with torch.no_grad(), tracing(TracingContext(fakes)):
            examples = [list(map(static, values)) for values in inputs]
            if any(is_on_cpu(value) for values in examples for value in values):
                prepare()
            patches = _patches(gm, itertools.chain.from_iterable(examples))
            with kernels_together():
                return compile_fx(gm, examples, config_patches=patches, **_donating(donated))

    return _in_thread_of_its_own(compile_region)


def compile_for_sizes(
    gm: torch.fx.GraphModule,
    values: Sequence[Any],
    like: Sequence[Like],
    donated: Sequence[int] = (),
) -> tuple[Callable, Callable[[Sequence[Any]], bool]] | None:
    """Compile as above for all inputs whose sizes and strides are those of ``like``, in symbols.

    Returns what runs such a list of inputs, and what tells whether others are such, and hold what
    Inductor has assumed of ``values``.  None if no size of an input is a symbol, so many times it
    or so much more or less, or if ``values`` lie otherwise in memory.

    The symbols are inputs too, behind the others: of what was assumed of a size, torch's cache
    keeps what is of such inputs.
    """
    from torch._inductor.compile_fx import compile_fx

    shapes = ShapeEnv()
    fakes = FakeTensorMode(shape_env=shapes)
    expected = [list(map(sympify, one.sizes)) for one in like]
    found = [Like.of(value).sizes for value in values]
    places: dict[Any, tuple[int, int, int, int]] = {}  # the size that is linear in each symbol
    for at, sizes in enumerate(expected):
        for position, size in enumerate(sizes):
            if (linear := _linear_in(size)) is not None:
                symbol, times, more = linear
                places.setdefault(symbol, (at, position, times, more))

    def symbols_of(sizes: Sequence[Sequence[Any]]) -> list[Any]:
        return [(sizes[at][by] - more) // times for at, by, times, more in places.values()]

    hints = dict(zip(places, symbols_of(found), strict=True))
    for sizes, its in zip(expected, found, strict=True):
        if any(size.xreplace(hints) != one for size, one in zip(sizes, its, strict=True)):
            return None
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    symbols = {}
    for symbol, size in hints.items():
        (new,) = fakes.from_tensor(torch.empty(size, device="meta"), symbolic_context=dynamic).shape
        symbols[symbol] = sympify(_expression(new))  # 0 and 1 are themselves

    def number(size: Any) -> Any:
        size = sympify(size)
        if not size.free_symbols:
            return int(size)
        hint = int(size.xreplace(hints))
        return shapes.create_symintnode(size.xreplace(symbols), hint=hint)

    def in_symbols(one: Like) -> Like:
        shape, stride = (tuple(map(number, of)) for of in (one.shape, one.stride))
        value = number(one.value) if isinstance(one.value, Basic) else one.value
        return replace(one, shape=shape, stride=stride, value=value)

    def with_symbols(values: list[Any]) -> list[Any]:
        values += symbols_of([Like.of(value).sizes for value in values])
        return values

    def numbers(of: Sequence[Like], symbols: Sequence[Any]) -> list[Any]:
        return [*itertools.chain.from_iterable(one.sizes for one in of), *symbols]

    # AOTAutograd's cache lacks those sizes.
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)

    def compile_region() -> tuple[Callable, Any]:
        with torch.no_grad(), tracing(TracingContext(fakes)), uncached:
            new, known = list(map(in_symbols, like)), list(map(number, places))
            examples = [one.made(fakes) for one in new]
            if any(map(is_on_cpu, examples)):
                prepare()
            given = {"config_patches": _patches(gm, examples), **_donating(donated)}
            with kernels_together():
                run = compile_fx(gm, [examples + known], **given)
            # Of sizes: guards of tensors say where in a storage these lie, which may be anywhere.
            return run, shapes.produce_guards_expression(numbers(new, known), ignore_static=False)

    run, text = _in_thread_of_its_own(compile_region)
    guards: Any = compile(text or "True", "<guards of a region>", "eval")  # once, not every call

    def holds_for(others: Sequence[Any]) -> bool:
        found = list(map(Like.of, others))
        known = symbols_of([one.sizes for one in found])
        return shapes.evaluate_guards_expression(guards, numbers(found, known))

    return (lambda inputs: run(with_symbols(inputs))), holds_for


def _linear_in(size: Any) -> tuple[Any, int, int] | None:
    """Return the symbol of a size, how many times it is in there, and what is added; or None."""
    symbols = size.free_symbols if isinstance(size, Expr) else set()
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    times = size.expand().coeff(symbol)
    more = (size - times * symbol).expand()
    if not (times.is_Integer and more.is_Integer) or not times:
        return None
    return symbol, int(times), int(more)


def is_on_cpu(value: Any) -> bool:
    """Return whether a value is a tensor on a CPU, which Inductor makes C++ kernels for."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _in_thread_of_its_own(function: Callable[[], Any]) -> Any:
    """Call it there with this thread's device and settings: Inductor's are per context, in some.

    In torch 2.11 a process crashes where the first thread that had a mode of fake tensors has
    ended, and another one enters one.
    """
    with FakeTensorMode():
        worker = Worker("compiles")
    try:
        in_context = functools.partial(contextvars.copy_context().run, function)
        return worker.start(in_context).result()
    finally:
        worker.abandon()


def _donating(donated: Sequence[int]) -> dict[str, Any]:
    """Arguments of ``compile_fx`` that make Inductor reuse the memory of inputs at positions.

    It does so in what is called a backward, where it looks in the tracing context for which.  That
    is no part of its caches' keys, so the inputs are renamed.
    """
    if not donated:
        return {}
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_donated(
        gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable:
        placeholders = gm.graph.find_nodes(op="placeholder")
        for position in donated:
            placeholders[position]._rename(f"donated_{position}")
            placeholders[position].target = placeholders[position].name
        gm.recompile()
        TracingContext.get().fw_metadata.bw_donated_idxs = list(donated)
        return compile_fx_inner(gm, inputs, **{**options, "is_backward": True})

    return {"inner_compile": compile_donated}


def ready_to_run(function: Callable, inputs: Sequence[Any]) -> Callable:
    """Return a function that runs such inputs without compiling, in any thread."""
    ready = getattr(function, "ready", None)
    return function if ready is None else ready(*inputs)


AT_ONCE: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("at once", default=None)
"""Told of a graph of any length that is to run, with its inputs, before it is compiled.

It returns whether that is done later: until then the graph runs operator by operator.
"""


def _kinds(inputs: Sequence[Any]) -> tuple:
    return tuple((tensor.dtype, tensor.device, tensor.dim()) for tensor in inputs)


class CompiledForAnyLength:
    """A graph over tensors of one shape, and of its length, compiled by Inductor for all shapes.

    Tensors are 0-dim, or flat and of one length; or of two dimensions, some of them half as wide as
    others, and flat ones then have as many elements as those have rows.  Lengths of 0 and 1 are no
    other program.  The first call with other dtypes or devices compiles, in a thread of its own and
    by ``compile_fx`` for the reasons above; through ``torch.compile`` a length of 1 is compiled
    apart, and every call checks guards.  On a CPU, what is compiled runs without Python's lock.
    """

    _left: set[str] = set()
    """The texts of what runs operator by operator, in every program."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self._gm = gm
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self.ready(*inputs)(*inputs)

    def ready(self, *inputs: Any) -> Callable:
        """Return the program for such dtypes, devices and dimensions, compiled if new."""
        kinds = _kinds(inputs)
        if kinds not in self._compiled:
            if self._left and self.text(inputs) in self._left:
                return self._gm
            later = AT_ONCE.get()
            if later is not None and later(self, inputs):
                return self._gm
            with turn_to_compile(self.text(inputs)):
                self.compile(inputs)
        return self._compiled[kinds]

    def text(self, inputs: Sequence[Any]) -> str:
        """Return what all that is compiled for such inputs depends on."""
        return f"{self._gm.code}\n{_kinds(inputs)}"

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph that is compiled; called, it runs operator by operator."""
        return self._gm

    def compile(self, inputs: Sequence[Any]) -> None:
        """Compile for such inputs, whoever else does."""
        compile_now = functools.partial(self._compile, inputs)
        self._compiled[_kinds(inputs)] = _in_thread_of_its_own(compile_now)

    def forget(self, inputs: Sequence[Any]) -> None:
        """Have it compiled for such inputs once more."""
        self._compiled.pop(_kinds(inputs), None)

    def leave(self, text: str) -> None:
        """Have what is of this text run operator by operator."""
        self._left.add(text)

    def _compile(self, inputs: Sequence[Any]) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        fakes = FakeTensorMode(shape_env=ShapeEnv())
        in_rows = any(tensor.dim() == 2 for tensor in inputs)
        # What AOTAutograd finds in its cache meets no inner compiler, which has a cache too.
        uncached = torch._functorch.config.patch(enable_autograd_cache=False)
        with torch.no_grad(), tracing(TracingContext(fakes)), uncached:
            widest = max((tensor.shape[1] for tensor in inputs if tensor.dim() == 2), default=1)
            examples = [_of_any_length(tensor, in_rows, widest, fakes) for tensor in inputs]
            patches = WITHOUT_CUDAGRAPHS
            return compile_fx(self._gm, examples, _compile_sums_last, config_patches=patches)


_SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList}


def _compile_sums_last(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """``compile_fx_inner``, behind writes to inputs what sums: Inductor then has one loop for both.

    It puts no pointwise loop into that of a sum that it has come to before.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    late: dict[torch.fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.target in _SUMS or any(operand in late for operand in node.all_input_nodes):
            late[node] = None
    for node in late:
        if node.op != "output":
            gm.graph.output_node().prepend(node)
    gm.recompile()
    with kernels_together() as kernels:
        compiled = compile_fx_inner(gm, inputs, **options)
        kernels.afterwards.append(functools.partial(_let_go_of_the_lock, compiled))
    return compiled


def _let_go_of_the_lock(compiled: Any) -> None:
    """Have the C++ kernels of a graph that Inductor has compiled run without Python's lock.

    Its own bindings hold it.  A kernel is ``extern "C"``, so ``ctypes`` can call it in the same
    library, and that lets go of the lock.  Python's threads then run beside a kernel, which takes
    milliseconds.
    """
    runner = getattr(compiled, "compiled_fn_runner", None)
    call = runner.call if runner is not None else compiled.current_callable
    names = getattr(call, "__func__", call).__globals__
    for name, kernel in list(names.items()):
        library = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if library is not None and getattr(kernel, "__name__", "") == "kernel":
            names[name] = _WithoutLock(kernel, library)


class _WithoutLock:
    """A kernel as Inductor's binding of it: takes tensors, for their memory, and integers."""

    def __init__(self, binding: Any, library: str) -> None:
        self._binding = binding
        self._kernel = ctypes.CDLL(library)[getattr(binding.__self__, "symbol", "kernel")]
        self._kernel.restype = None

    def __call__(self, *arguments: Any) -> None:
        if self._kernel.argtypes is None:
            known = {torch.Tensor: ctypes.c_void_p, int: ctypes.c_int64}
            kinds = [known.get(type(argument)) for argument in arguments]
            if None in kinds:  # a float, of a width that only its C++ says
                return self._binding(*arguments)
            self._kernel.argtypes = kinds
        self._kernel(*(a if type(a) is int else a.data_ptr() for a in arguments))
        return None


def _of_any_length(
    tensor: torch.Tensor, in_rows: bool, widest: int, fakes: FakeTensorMode
) -> torch.Tensor:
    """Stands for tensors like this one, of lengths that are nothing else's and worth threads."""
    sizes = (2**12 + 3, 2**8 + 4)[: tensor.dim()] if in_rows else (2**20 + 3,)[: tensor.dim()]
    if tensor.dim() == 2 and tensor.shape[1] < widest:  # two columns of others share one of these
        sizes = (sizes[0], sizes[1] // 2)
    example = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    return fakes.from_tensor(example, symbolic_context=context)
