"""``zerofx.plan``: forecasts of one captured step at several stages, in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from zerofx.compiler.choices import choose, stopped
from zerofx.cost.traffic import size_text
from zerofx.errors import StepError
from zerofx.hardware import NOMINAL, Hardware
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options, environment
from zerofx.planning.forecast import Forecast, forecast
from zerofx.planning.stopped import StoppedCall, capture
from zerofx.report.memory import LOWERED_BY
from zerofx.report.timeline import duration

Axes = Mapping[str, int]
"""The ranks along each axis of a mesh, by its name; the last one is the inner axis."""


@dataclass(frozen=True)
class AxesOfRanks:
    """What stands for the device mesh of ranks that are not there, in options."""

    axes: tuple[tuple[str, int], ...]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def size(self, at: int) -> int:
        return self.axes[at][1]


@dataclass(frozen=True)
class Plan:
    """What a step takes at several stages, on ranks that need not be there.

    ``forecasts`` are by stage, as ``3`` or ``gpu:3,node:1``, ``refused`` the reasons why others
    cannot be.  ``memory_limit`` is what the device has for it, in bytes; None if nobody said.
    """

    name: str
    table: ParameterTable
    ranks: int
    forecasts: Mapping[str, Forecast]
    refused: Mapping[str, str]
    memory_limit: int | None = None

    def __str__(self) -> str:
        """Return the plan in tables: what is kept, sent and waited for, and the peak by kind."""
        numel = sum(info.numel for info in self.table)
        lines = [
            f"{self.name} on {self.ranks} rank(s): {len(self.table)} parameters, {numel} elements, "
            f"{size_text(sum(info.nbytes for info in self.table))}"
        ]
        if self.forecasts:
            figures = next(iter(self.forecasts.values())).rewritten.ctx.figures
            lines += [f"planned with {figures} ({figures.source})", "", self._steps(), ""]
            lines += [self._peaks(), ""]
        lines += [f"stage {stage} cannot be: {why}" for stage, why in self.refused.items()]
        return "\n".join(line.rstrip() for line in "\n".join(lines).rstrip().splitlines())

    def fits(self, one: Forecast) -> bool | None:
        """Return whether a peak is within the limit; None if there is none."""
        return None if self.memory_limit is None else sum(one.peak.values()) <= self.memory_limit

    def _steps(self) -> str:
        """Return a table with a row for each stage: bytes kept and sent, and a step's time."""
        rows = []
        for stage, one in self.forecasts.items():
            peak = size_text(sum(one.peak.values()))
            least, most = one.seconds
            sent = [
                size_text(nbytes) + (f" {axis}" if len(one.sent) > 1 else "")
                for axis, nbytes in one.sent.items()
                if nbytes or len(one.sent) == 1
            ]
            rows.append(
                [
                    stage,
                    size_text(sum(one.kept.values())),
                    peak + {None: "", True: ", fits", False: ", too much"}[self.fits(one)],
                    size_text(one.on_host),
                    ", ".join(sent),
                    f"{duration(least)} to {duration(most)}",
                    duration(one.timeline.exposed_s),
                    one.timeline.busiest,
                ]
            )
        headers = (
            "stage",
            "keeps",
            "peak",
            "on the host",
            "sends",
            "a step",
            "waits",
            "limited by",
        )
        return tabulate(rows, headers=headers, disable_numparse=True)

    def _peaks(self) -> str:
        """Return a table of what each peak consists of."""
        used = [kind for kind in LOWERED_BY if any(kind in f.peak for f in self.forecasts.values())]
        rows = [
            [stage, *(size_text(one.peak.get(kind, 0)) for kind in used)]
            for stage, one in self.forecasts.items()
        ]
        return tabulate(rows, headers=("of the peak", *used), disable_numparse=True)


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
) -> Plan:
    """Say what ``step(*args, **kwargs)`` would take on each of ``ranks``, without them.

    Nothing of the step runs, and no process group is needed.  ``step`` is the function itself, or
    what ``torch.compile`` made of it; ``options`` are those that are given there.  ``mesh`` has the
    ranks along its axes: ``{"node": 512, "gpu": 8}``.  By default all stages are planned, on a mesh
    those of each axis.  A model of ``deferred_init`` needs no memory here either.

    A plan is of rank 0, which holds most, and of the option ``hardware``, or else of figures that
    are assumed.  The programs are those that the ranks would run, given the same figures.

    Raises: ValueError for ranks that the mesh does not have, and for options; StepError for a step
    that cannot be compiled.
    """
    axes = axes_of(ranks, mesh)
    call = capture(step, tuple(args), dict(kwargs or {}), options)
    return plan_of(call, axes, call.options, stages, memory_limit)


def plan_of(
    call: StoppedCall,
    axes: tuple[tuple[str, int], ...],
    given: Mapping[str, Any],
    stages: Iterable[int | Mapping[str, int]] | None = None,
    memory_limit: int | None = None,
    figures: Hardware | None = None,
) -> Plan:
    """Plan a captured call for ranks along these axes, with the options ``given``; see ``plan``.

    By these ``figures``, or those that options have.
    """
    forecasts: dict[str, Forecast] = {}
    refused: dict[str, str] = {}
    for stage in _stages_of(axes) if stages is None else stages:
        name = _text(stage)
        try:
            options = _options(given, axes, stage)
            mesh = _mesh_of(axes, options)
            forecasts[name] = forecast(call.step, options, mesh, _figures(figures, options, axes))
        except StepError as error:
            refused[name] = str(error)
    ranks = math.prod(size for _, size in axes)
    return Plan(call.name, call.step.table, ranks, forecasts, refused, memory_limit)


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


def _options(given: Mapping[str, Any], axes: tuple[tuple[str, int], ...], stage: Any) -> Options:
    group = AxesOfRanks(axes) if len(axes) > 1 else None
    stage = dict(stage) if isinstance(stage, Mapping) else stage
    environ = {name: text for name, text in environment().items() if name != "ZEROFX_STAGE"}
    return stopped(choose({**given, "stage": stage, "process_group": group}, environ))


def _mesh_of(axes: tuple[tuple[str, int], ...], options: Options) -> Mesh:
    """Return the mesh as a communicator has it: axes count where they differ."""
    if len(axes) > 1 and options.stage_outside is not None and axes[0][1] > 1:
        return Mesh(axes, 0, options.stage_outside)
    return Mesh.flat(math.prod(size for _, size in axes))


def _figures(
    given: Hardware | None, options: Options, axes: tuple[tuple[str, int], ...]
) -> Hardware:
    given = given or options.hardware or NOMINAL
    if given.links and (len(axes) == 1 or options.stage_outside is None):
        return given.on_one_axis([axis for axis, size in axes if size > 1])
    return given
