"""Run what Inductor makes of a graph without its kernels and without memory."""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import operator
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.compat.inductor import Like, compile_with_inductor, prepare


def watch(
    run: Callable,
    inputs: Sequence[Any],
    begun: Callable[[Sequence[Any]], None],
    ran: Callable[[Any, Sequence[Any], dict[str, Any], Any], None],
) -> Sequence[Any]:
    """Run a graph on tensors like ``inputs`` that have no memory; return its results.

    ``begun`` is given the inputs, in a list which the graph empties as it goes; ``ran`` each
    operator of torch that has run, its arguments, and its result.
    """
    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()) as fakes:
        values = [like.made(fakes) for like in map(Like.of, inputs)]
        begun(values)
        with _Watched(ran):
            return run(values)


def on_cpu(
    gm: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, Sequence[Any]]:
    """Return a graph and its inputs as they are on a CPU."""
    likes = list(map(Like.of, inputs))
    if all(like.device is None or like.device.type == "cpu" for like in likes):
        return gm, inputs

    def there(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), there)
    moved = [replace(like, device=there(like.device)).made() for like in likes]
    return torch.fx.GraphModule(gm, graph), moved


class Storage:
    """Tells a tensor's storage from others, and whether it is still there.

    Private: ``torch.multiprocessing.reductions``, alike from 2.11 to 2.15.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._weak = StorageWeakRef(storage)
        self.nbytes = storage.nbytes()

    @property
    def is_gone(self) -> bool:
        return self._weak.expired()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self._weak.cdata == other._weak.cdata

    def __hash__(self) -> int:
        return hash(self._weak.cdata)


class _Watched(TorchDispatchMode):
    """Tells of each operator that runs: what it was given, and what it returned."""

    def __init__(self, ran: Callable) -> None:
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ran(func, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Have what this context compiles allocate and free, but run no kernel, and be in no cache.

    Private: ``GraphLowering.compile_to_module``, which torch's ``get_code`` replaces too (2.11 to
    2.15).  It can go when Inductor says what the code that it makes allocates.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    with _ONE_AT_A_TIME:
        compiled = GraphLowering.compile_to_module

        def compile_to_module(lowering: Any) -> Any:
            if not _REHEARSES.get():  # another thread's
                return compiled(lowering)
            code, _ = lowering.codegen()
            return _module_of(code.value)

        replaced = mock.patch.object(GraphLowering, "compile_to_module", compile_to_module)
        token = _REHEARSES.set(True)
        try:
            with config.patch(force_disable_caches=True, cpp_wrapper=False), replaced:
                yield
        finally:
            _REHEARSES.reset(token)


def warm_up() -> None:
    """Import what compiling needs, and compile something small, but for its kernel.

    Of the first graph that Inductor compiles, half a second goes to what it makes once.
    """
    prepare()
    with contextlib.suppress(Exception):  # what is compiled in earnest says what is wrong
        graph = torch.fx.Graph()
        value = graph.call_function(operator.getitem, (graph.placeholder("values"), 0))
        graph.output((graph.call_function(torch.ops.aten.sin.default, (value,)),))
        with without_kernels():
            gm = torch.fx.GraphModule(torch.nn.Module(), graph)
            compile_with_inductor(gm, [[torch.empty(4, device="cpu")]])


_REHEARSES = contextvars.ContextVar("rehearses", default=False)
_ONE_AT_A_TIME = threading.Lock()


def _module_of(code: str) -> types.SimpleNamespace:
    """Run the code of a module that Inductor writes, with nothing for its kernels."""
    names: dict[str, Any] = {
        "__name__": "rehearsed",
        "__builtins__": {**vars(builtins), "__import__": _import},
    }
    exec(compile(code, "<rehearsed>", "exec"), names)
    for name in [*names]:
        if name in _INSTEAD:
            names[name] = _INSTEAD[name]
    return types.SimpleNamespace(call=names["call"], runner=names.get("runner"))


def _import(name: str, *given: Any) -> Any:
    if name == "torch._inductor.async_compile":
        return types.SimpleNamespace(AsyncCompile=_NoCompile)
    return builtins.__import__(name, *given)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _NoCompile:
    """Stands for what compiles kernels: each of them does nothing."""

    def wait(self, names: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: _nothing


def _empty_strided(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _seen_as(tensor: torch.Tensor, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offset)


_INSTEAD: dict[str, Any] = {
    "empty_strided_cpu": _empty_strided,
    "reinterpret_tensor": _seen_as,
    **dict.fromkeys(("assert_size_stride", "assert_alignment"), _nothing),
}
"""These stand for functions of torch that need memory, by the names that the code has for them."""
