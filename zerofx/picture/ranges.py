"""Name every node of a compiled step to torch's profiler, so that what it measures has a place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.profiler import record_function

from zerofx.backend import CompiledFunction, Program, zero
from zerofx.graph import aliased_inputs
from zerofx.lower import STANDS_FOR
from zerofx.picture.measured import RANGE, STEP_RANGE


@contextlib.contextmanager
def named_ranges(step: Callable) -> Iterator[None]:
    """Run a compiled step so that a profiler sees its nodes by name; call the step once before.

    A compiled region has the name of the first operator in it, and updates that run together that
    of the first of them.  Each range costs microseconds, which are the profiler's, not the step's::

        with named_ranges(step), torch.profiler.profile() as profiler:
            step(model, optimizer, batch)
        profiler.export_chrome_trace("trace.json")

    ``python -m zerofx timeline FOLDER --measured trace.json`` draws it.

    Raises: ValueError if ``step`` has no program yet that this backend has compiled and run.
    """
    programs = [program for function in _functions(step) for program in function.programs]
    runtimes = [(program, program.runtime) for program in programs if program.runtime is not None]
    if not runtimes:
        raise ValueError(
            f"{step!r} has no zero-compiled program yet: pass what "
            'torch.compile(step, backend="zero") returned, after its first call.'
        )
    before = [runtime.program for _, runtime in runtimes]
    try:
        for program, runtime in runtimes:
            runtime.program = _ranged(program, runtime.program)
        yield
    finally:
        for (_, runtime), plain in zip(runtimes, before, strict=True):
            runtime.program = plain


def _functions(step: Callable) -> list[CompiledFunction]:
    code = getattr(getattr(step, "_torchdynamo_orig_callable", None), "__code__", None)
    return [function for function in zero.functions if code is not None and function.code is code]


def _ranged(program: Program, lowered: Any) -> Callable:
    """A lowered program with a range around each call that is, or stands for, a node."""
    known = {node.name for node in program.gm.graph.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(lowered.graph, copies))
    for node, copy in copies.items():
        name = node.meta.get(STANDS_FOR, node.name)
        if node.op == "call_module":
            region = lowered.get_submodule(node.target)
            name = _first_operator(region.gm.graph, known)
            copy.op, copy.target = "call_function", region
        if copy.op == "call_function" and name in known:
            copy.target = _within(f"{RANGE}{name}", copy.target)
    ranged = fx.GraphModule(lowered, graph)

    def run(*values: Any) -> Any:
        with record_function(STEP_RANGE):
            return ranged(*values)

    return run


def _first_operator(graph: fx.Graph, known: set[str]) -> str:
    """The first node of a region that computes anything, by its name in the program."""
    named = [node for node in graph.nodes if node.op == "call_function" and node.name in known]
    working = [node for node in named if not aliased_inputs(node)]
    return (working or named)[0].name if named else ""


def _within(name: str, target: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return target(*args, **kwargs)

    run.__name__ = getattr(target, "__name__", "run")
    return run
