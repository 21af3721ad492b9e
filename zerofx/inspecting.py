"""A compiled step explained in tables, and measured by torch's profiler, node by node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from zerofx.backend import zero
from zerofx.compiler.program import Program
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.interface import STANDS_FOR
from zerofx.report.explain import explanation
from zerofx.report.measured import PROFILE, RANGE, STEP_RANGE

NOWHERE = (
    "the step's programs are not dumped, so there is no folder for a profile: set ZEROFX_DUMP "
    "before its first call, or give a path for it."
)


def explain(step: Callable) -> str:
    """Describe every program compiled for ``step``: shards, memory, traffic, passes.

    ``step`` is what ``torch.compile(step, backend="zero")`` returned; call it once before.
    Not collective.

    Raises: ValueError if ``step`` has not been compiled by this backend.
    """
    return "\n\n".join(
        explanation(program, with_seconds=True) for program in _programs(step, have_run=False)
    )


@contextlib.contextmanager
def profile(step: Callable, path: str | Path | None = None) -> Iterator[torch.profiler.profile]:
    """Measure a compiled step for its timeline; call the step once before.

    Writes what ``torch.profiler`` has measured to ``path``; by default beside the dumped program of
    the last call, where ``python -m zerofx timeline`` finds it::

        with zerofx.profile(step):
            step(model, optimizer, batch)

    Gives the profiler.  Not collective: every rank that does this writes a file.

    Raises: ValueError if ``step`` has no program yet that this backend has compiled and run, none
    runs, its nodes are named already, or it is not dumped and there is no ``path``; OSError if the
    file cannot be written.
    """
    if path is None and not any(map(_dumped_to, _programs(step, have_run=True))):
        raise ValueError(NOWHERE)
    ran: list[Program] = []
    with _ranging(step, ran.append), torch.profiler.profile() as profiler:
        yield profiler
    if not ran:
        raise ValueError("no step has run within zerofx.profile: call it there.")
    target = path or _dumped_to(ran[-1])
    if target is None:
        raise ValueError(NOWHERE)
    with open(target, "ab"):  # for torch, which logs a file it cannot write, and raises nothing
        pass
    profiler.export_chrome_trace(str(target))


@contextlib.contextmanager
def named_ranges(step: Callable) -> Iterator[None]:
    """Run a compiled step so that a profiler sees its nodes by name; call the step once before.

    A compiled region has the name of its first operator, and updates that run together have the
    name of the first of them.  Each range costs microseconds, which a profile then has in it::

        with named_ranges(step), torch.profiler.profile() as profiler:
            step(model, optimizer, batch)
        profiler.export_chrome_trace("profile.json")

    ``python -m zerofx timeline FOLDER --measured profile.json`` draws it.  ``profile`` does both.

    Raises: ValueError if ``step`` has no program yet that this backend has compiled and run, or its
    nodes are named already.
    """
    with _ranging(step, lambda program: None):
        yield


@contextlib.contextmanager
def _ranging(step: Callable, on_run: Callable[[Program], None]) -> Iterator[None]:
    programs = _programs(step, have_run=True)
    runtimes = [(program, program.runtime) for program in programs if program.runtime is not None]
    before = [runtime.program for _, runtime in runtimes]
    if not all(isinstance(program, fx.GraphModule) for program in before):
        raise ValueError(
            "this step's nodes are named already: zerofx.profile and zerofx.named_ranges each do "
            "that, and one within the other would do it twice. Use one of them."
        )
    try:
        for program, runtime in runtimes:
            runtime.program = _ranged(program, runtime.program, on_run)
        yield
    finally:
        for (_, runtime), plain in zip(runtimes, before, strict=True):
            runtime.program = plain


def _programs(step: Callable, *, have_run: bool) -> list[Program]:
    """Return what is compiled for a step, or what of that has run."""
    code = getattr(getattr(step, "_torchdynamo_orig_callable", None), "__code__", None)
    functions = [known for known in zero.functions if code is not None and known.code is code]
    if code is None and (function := zero.function_called_by(step)) is not None:  # of a module
        functions = [function]
    compiled = (program for function in functions for program in function.programs)
    programs = [one for one in compiled if one.runtime is not None or not have_run]
    if not programs:
        raise ValueError(
            f"{step!r} has no zero-compiled program yet: pass what "
            'torch.compile(step, backend="zero") returned, after its first call.'
        )
    return programs


def _dumped_to(program: Program) -> Path | None:
    """Return the file beside a program's dump that its profile goes to, if it is dumped."""
    dump = program.dump
    if dump is None or dump.folder is None or not dump.folder.works:
        return None
    return dump.folder.path / dump.name / PROFILE


def _ranged(program: Program, lowered: Any, on_run: Callable[[Program], None]) -> Callable:
    """Put a range around each call of a lowered program that is, or stands for, a node."""
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
        on_run(program)
        with record_function(STEP_RANGE):
            return ranged(*values)

    return run


def _first_operator(graph: fx.Graph, known: set[str]) -> str:
    """Return the first node of a region that computes anything, by its name in the program."""
    named = [node for node in graph.nodes if node.op == "call_function" and node.name in known]
    working = [node for node in named if not aliased_inputs(node)]
    return (working or named)[0].name if named else ""


def _within(name: str, target: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return target(*args, **kwargs)

    run.__name__ = getattr(target, "__name__", "run")
    return run
