"""``zerofx.plan``: forecasts of one captured step at several stages, in a table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from zerofx.compiler.best import Choice, Search, first_found, ranks_that_fit, searches
from zerofx.compiler.choices import choose, stopped
from zerofx.compiler.forecast import Forecast, Ranks
from zerofx.devices import RANKS_OF_NODE, Device, device_named
from zerofx.errors import StepError
from zerofx.garbage import without_collections
from zerofx.hardware import NOMINAL, Hardware
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options, named
from zerofx.planning.stand_in import standing_in
from zerofx.planning.stopped import StoppedCall, capture
from zerofx.planning.tables import text_of

Axes = Mapping[str, int]
"""The ranks along each axis of a mesh, by its name; the last one is the inner axis."""


@dataclass(frozen=True)
class AxesOfRanks:
    """Stands for the device mesh of ranks that are not there, in options."""

    axes: tuple[tuple[str, int], ...]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def size(self, at: int) -> int:
        return self.axes[at][1]


class Least(NamedTuple):
    """The stage that takes least of the device, of those that do not fit, and where one would.

    ``on_ranks`` is the smallest number of ranks, doubled from the plan's, on which ``on_stage``
    fits the limit; None if up to 65,536 ranks none does.  Units: bytes.
    """

    stage: str
    device_bytes: int
    on_ranks: int | None
    on_stage: str | None


@dataclass(frozen=True)
class Plan:
    """Holds what a step takes at several stages, on ranks that need not be there.

    ``forecasts`` are by stage, as ``3`` or ``gpu:3,node:1``, ``refused`` the reasons why others
    cannot be.  ``memory_limit`` is what the device has for it, in bytes, and ``choice`` what
    ``plan="auto"`` would choose within it, or why nothing fits; None if nobody said.  ``least`` is
    about a limit that no stage fits.  What ``updates`` nothing has no states of an optimizer.
    """

    name: str
    table: ParameterTable
    ranks: int
    forecasts: Mapping[str, Forecast]
    refused: Mapping[str, str]
    memory_limit: int | None = None
    choice: Choice | str | None = None
    least: Least | None = None
    updates: bool = True

    def __str__(self) -> str:
        return text_of([self.facts])

    @property
    def facts(self) -> dict[str, Any]:
        """The plan as plain data, which JSON can hold.  Units: bytes, seconds."""
        used = {str(one.rewritten.ctx.figures) for one in self.forecasts.values()}
        source = {one.rewritten.ctx.figures.source for one in self.forecasts.values()}
        return {
            "function": self.name,
            "ranks": self.ranks,
            "parameters": len(self.table),
            "elements": sum(info.numel for info in self.table),
            "bytes": sum(info.nbytes for info in self.table),
            "updates": self.updates,
            "figures": f"{'; '.join(sorted(used))} ({', '.join(sorted(source))})",
            "memory_limit": self.memory_limit,
            "least": self.least and self.least._asdict(),
            "stages": {stage: one.facts for stage, one in self.forecasts.items()},
            "refused": dict(self.refused),
            "choice": self.choice.facts if isinstance(self.choice, Choice) else self.choice,
        }


_Source = tuple[Hardware | None, Device | None]
"""Figures that are given, and the device that has some of its own."""


def plan(
    step: Callable,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    mesh: Axes | None = None,
    stages: Iterable[int | Mapping[str, int]] | None = None,
    options: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
    device: str | None = None,
) -> Plan:
    """Say what ``step(*args, **kwargs)`` would take on each of ``ranks``, without them.

    Nothing of the step runs, and no process group is needed.  ``step`` is the function itself, or
    what ``torch.compile`` made of it; ``options`` are those that are given there.  ``mesh`` has the
    ranks along its axes: ``{"node": 512, "gpu": 8}``.  By default all stages are planned, on a mesh
    those of each axis.  A model of ``deferred_init`` needs no memory here either.

    A plan is of rank 0, which holds most, and of the option ``hardware``, or else of figures of the
    ``device``: ``h100``, ``h200``, ``a100``, ``mi300x``, ``b200`` or ``cpu``; else they are
    assumed.  The step is planned as if its tensors were on that device, whose memory is the
    ``memory_limit`` unless one is given.  The programs are those that the ranks would run, given
    the same figures.

    Raises: ValueError for ranks that the mesh does not have, and for options; StepError for a step
    that cannot be compiled.
    """
    axes = axes_of(ranks, mesh)
    given = {**(options or {}), "process_group": _group_of(axes)}
    found = None if device is None else device_named(device)
    with contextlib.nullcontext() if found is None else standing_in(found):
        call = capture(step, tuple(args), dict(kwargs or {}), given)
    if found is not None:
        call = call.on_device(found.kind)
    return plan_of(call, axes, call.options, stages, memory_limit, device=found)


@without_collections()
def plan_of(
    call: StoppedCall,
    axes: tuple[tuple[str, int], ...],
    given: Mapping[str, Any],
    stages: Iterable[int | Mapping[str, int]] | None = None,
    memory_limit: int | None = None,
    figures: Hardware | None = None,
    device: Device | None = None,
) -> Plan:
    """Plan a captured call for ranks along these axes, with the options ``given``; see ``plan``.

    By these ``figures``, or those that options have, or those of the ``device``.
    """
    if memory_limit is None:
        memory_limit = choose(given, call.environ).memory_limit
    if memory_limit is None and device is not None:
        memory_limit = device.memory_bytes
    source = figures, device
    chosen = _stages_of(axes) if stages is None else list(stages)
    forecasts, refused = _forecasts(call, axes, given, chosen, source)
    number = math.prod(size for _, size in axes)
    made = Plan(
        call.name,
        call.step.table,
        number,
        forecasts,
        refused,
        memory_limit,
        updates=bool(call.step.updates),
    )
    if memory_limit is None:
        return made
    made = replace(made, choice=_choice(call, axes, given, made, memory_limit, source))
    if forecasts and all(one.device_bytes > memory_limit for one in forecasts.values()):
        stage = min(forecasts, key=lambda name: forecasts[name].device_bytes)
        by_name = {_text(each): each for each in chosen}
        of = {name: _options(call, given, axes, by_name[name]) for name in forecasts}
        ranks = _ranks(axes, of[stage], source, call.makes_whole)
        may_fit = [
            options
            for name, options in of.items()
            if "auto" in options.offload
            or forecasts[name].at_least(more_ranks=True) <= memory_limit
        ]
        on_ranks, fits = ranks_that_fit(call.step, ranks, may_fit, memory_limit)
        on_stage = next((name for name, options in of.items() if options is fits), None)
        least = Least(stage, forecasts[stage].device_bytes, on_ranks, on_stage)
        made = replace(made, least=least)
    return made


def _forecasts(
    call: StoppedCall,
    axes: tuple[tuple[str, int], ...],
    given: Mapping[str, Any],
    stages: Sequence[int | Mapping[str, int]],
    source: _Source,
) -> tuple[dict[str, Forecast], dict[str, str]]:
    """Return the forecasts of a captured call by stage, and why others cannot be."""
    forecasts: dict[str, Forecast] = {}
    refused: dict[str, str] = {}
    for stage in stages:
        name = _text(stage)
        try:
            options = _options(call, given, axes, stage)
            if options.stage > 0 and call.why_not_sharded:
                raise StepError(call.why_not_sharded)
            ranks = _ranks(axes, options, source, call.makes_whole)
            forecasts[name] = ranks.forecast(call.step, options)
        except ValueError as error:  # of options that need another stage; a StepError is one too
            refused[name] = str(error)
    return forecasts, refused


def _choice(
    call: StoppedCall,
    axes: tuple[tuple[str, int], ...],
    given: Mapping[str, Any],
    made: Plan,
    limit: int,
    source: _Source,
) -> Choice | str:
    """Return what ``plan="auto"`` chooses within a limit; in words why if it chooses nothing."""
    free = {"stage", "memory_budget", "plan"}
    if "auto" in (given.get("offload") or ()):
        free.add("offload")
    given = {name: value for name, value in given.items() if name not in free}
    try:
        options = _options(call, given, axes, 3)
    except ValueError as error:  # they do not go together
        return str(error)
    ranks = _ranks(axes, options, source, call.makes_whole)
    search = partial(
        Search,
        call.step,
        ranks=ranks,
        limit=limit,
        why_whole=call.why_not_sharded,
        made=made.forecasts.values(),
        more=2**30,
    )
    looked = searches(search, call.step, options, named(given, call.environ) - free, ranks)
    try:
        return first_found(looked, Search.run)
    except StepError as error:
        return str(error)


def _ranks(
    axes: tuple[tuple[str, int], ...], options: Options, source: _Source, makes_whole: bool
) -> Ranks:
    figures, device = source
    figures = figures or options.hardware
    if figures is None and device is not None:
        has_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"  # whoever sets it
        figures = device.hardware(axes, has_tf32=has_tf32)
    return Ranks(axes, figures or NOMINAL, makes_whole)


def axes_of(ranks: int, mesh: Axes | None) -> tuple[tuple[str, int], ...]:
    """Return the axes of so many ranks.  Raises: ValueError."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is how many there are, a number from 1 on, not {ranks!r}")
    if mesh is None:
        return Mesh.flat(ranks).axes
    if len(mesh) != 2 or min(mesh.values()) < 1 or math.prod(mesh.values()) != ranks:
        axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
        raise ValueError(
            f"mesh={dict(mesh)} has {axes}, and ranks={ranks}: give two axes, the inner one last, "
            "whose sizes multiply to the ranks: {'node': 512, 'gpu': 8} for 4096"
        )
    return tuple(mesh.items())


def _stages_of(axes: tuple[tuple[str, int], ...]) -> list[int | Mapping[str, int]]:
    """Return all stages, on a mesh each legal pair."""
    if len(axes) == 1:
        return list(range(4))
    (outer, _), (inner, _) = axes
    return [{inner: of, outer: out} for of in range(4) for out in range(of + 1)]


def _text(stage: int | Mapping[str, int]) -> str:
    if isinstance(stage, Mapping):
        return ",".join(f"{axis}:{of}" for axis, of in stage.items())
    return str(stage)


def _options(
    call: StoppedCall, given: Mapping[str, Any], axes: tuple[tuple[str, int], ...], stage: Any
) -> Options:
    stage = dict(stage) if isinstance(stage, Mapping) else stage
    environ = {name: text for name, text in call.environ.items() if name not in _OF_PLANS}
    given = {name: value for name, value in given.items() if name not in ("plan", "memory_limit")}
    return stopped(choose({**given, "stage": stage, "process_group": _group_of(axes)}, environ))


_OF_PLANS = ("ZEROFX_STAGE", "ZEROFX_PLAN", "ZEROFX_MEMORY_LIMIT")
"""Variables of the environment that choose what a plan is there to show."""


def _group_of(axes: tuple[tuple[str, int], ...]) -> AxesOfRanks | None:
    return AxesOfRanks(axes) if len(axes) > 1 else None


def ranks_of_node(axes: tuple[tuple[str, int], ...]) -> int:
    """Return how many ranks share a machine: those of the inner axis of a mesh, else eight."""
    (*_, (_, inner)) = axes
    return inner if len(axes) > 1 else min(inner, RANKS_OF_NODE)
