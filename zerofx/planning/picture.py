"""Plans as one picture: memory by kind above the time by lane, over stages and ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofx.cost.timeline import LANES
from zerofx.cost.traffic import size_text
from zerofx.errors import CommandError
from zerofx.report.folder import written_anew
from zerofx.report.memory import KINDS
from zerofx.report.picture import MEMORY, mark_bytes
from zerofx.report.timeline import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TYPES = (".png", ".svg", ".pdf")

BESIDE = "beside the program"

LANE_COLOURS = dict(
    zip(
        LANES,
        ("#009e73", "#d55e00", "#e69f00", "#56b4e9", "#cc79a7", "#0072b2", "#f0e442"),
        strict=True,
    )
)
"""Colours that people with any colour vision tell apart (Okabe and Ito 2008)."""

BAR = 0.8
"""The width of a stage's bars, where the next stage's begin at 1."""

GAP = 0.6
"""What lies between the stages of one plan and those of the next."""


def check(path: Path) -> None:
    """Say what is in the way of a picture, before anything is planned for it.

    Raises: CommandError for a type that is not drawn, a folder that is not there, and without
    matplotlib.
    """
    if path.suffix.lower() not in TYPES:
        raise CommandError(
            f"--picture {path}: the end of its name says what is drawn, and is none of "
            f"{', '.join(TYPES)}: name it {path.stem or 'plan'}.png"
        )
    if not path.parent.is_dir():
        raise CommandError(
            f"--picture {path}: there is no folder {path.parent} for it: make it, or name another"
        )
    if path.is_dir():
        raise CommandError(f"--picture {path} is a folder: name a file in it")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "--picture is drawn with matplotlib, which is not installed: "
            "pip install 'zerofx[pictures]', or leave it out"
        ) from error


def draw(plans: Sequence[Mapping[str, Any]], path: Path, names: Sequence[str] = ()) -> None:
    """Draw plans' facts to a file whose suffix is one of ``TYPES``.

    Raises: CommandError if they have no stage; ImportError without matplotlib; OSError.
    """
    if not any(plan["stages"] for plan in plans):
        raise CommandError(f"{path} is not drawn: no stage can be planned, for the reasons above")
    figure = figure_of(plans, names or [f"{plan['ranks']} rank(s)" for plan in plans])
    with written_anew(path) as part:
        figure.savefig(part, format=path.suffix.lower().removeprefix("."), dpi=100)


def figure_of(plans: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    """Return the figure of plans, which are called by these ``names``.

    In the upper axes each stage has a bar of what it takes of the device at its peak, by kind, up
    to ``device_bytes``; a line across it is what it keeps between steps, one across the axes the
    memory limit.  In the lower ones it has a bar for each lane, and a mark for the whole step, with
    its interval.
    """
    from matplotlib.figure import Figure

    places = dict(_places(plans))
    width = max(7.0, 3.6 + 0.55 * len(places))
    figure = Figure(figsize=(width, 7.2), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    stages = [plan["stages"][stage] for plan, stage in _stages(plans)]
    _draw_memory(memory, stages, list(places), {plan["memory_limit"] for plan in plans})
    _draw_time(time, stages, list(places))
    words = list(places.values())
    slanted = any(len(word) > 4 for word in words)
    time.set_xticks(list(places), words, rotation=45 if slanted else 0, fontsize=8)
    time.set_xlabel("stage", fontsize=8)
    for name, (first, last) in zip(names, _ends(plans), strict=True):
        if last >= first:
            place = memory.get_xaxis_transform()
            memory.text((first + last) / 2, 1.01, name, transform=place, ha="center", fontsize=9)
    title = f"{plans[0]['function']}: {size_text(plans[0]['bytes'])} of parameters"
    figure.suptitle(title, fontsize=11)
    words_of_figures = textwrap.fill(f"planned with {plans[0]['figures']}", int(18 * width))
    figure.supxlabel(words_of_figures, fontsize=7)
    return figure


def _stages(plans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    return ((plan, stage) for plan in plans for stage in plan["stages"])


def _ends(plans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield where the first and the last stage of each plan is; a plan of none ends before."""
    begin = 0.0
    for plan in plans:
        count = len(plan["stages"])
        yield begin, begin + count - 1
        begin += count + GAP * bool(count)


def _places(plans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    """Yield where each stage is, and its name."""
    for plan, (first, _) in zip(plans, _ends(plans), strict=True):
        for at, stage in enumerate(plan["stages"]):
            yield first + at, stage


def _draw_memory(
    axis: Any, stages: Sequence[Mapping[str, Any]], places: list[float], limits: set[int | None]
) -> None:
    beside = [
        sum(row["nbytes"] for row in of["outside"].values() if row["place"] == "device")
        for of in stages
    ]
    columns = {kind: [of["peak"].get(kind, 0) for of in stages] for kind in KINDS["device"]}
    below = [0] * len(stages)
    for kind, heights in {**columns, BESIDE: beside}.items():
        if any(heights):
            colour = MEMORY.get(kind, "#ffffff")
            axis.bar(places, heights, BAR, below, label=kind, color=colour, edgecolor="#606060",
                     linewidth=0.4, hatch="///" if kind == BESIDE else None)  # fmt: skip
            below = [low + height for low, height in zip(below, heights, strict=True)]
    kept = [sum(of["keeps"].values()) for of in stages]
    sides = [place - BAR / 2 for place in places], [place + BAR / 2 for place in places]
    axis.hlines(kept, *sides, color="black", linewidth=2, label="kept between steps")
    known = sorted(limit for limit in limits if limit is not None)
    for limit in known:
        axis.axhline(limit, color="red", linestyle="--", linewidth=1, label="memory limit")
        axis.annotate(size_text(limit), (1, limit), xycoords=("axes fraction", "data"),
                      xytext=(-2, 2), textcoords="offset points", ha="right", color="red",
                      fontsize=8)  # fmt: skip
    most = max(*below, *known, 1)
    mark_bytes(axis.yaxis, most, 8)
    _finish(axis, "device memory", most)


def _draw_time(axis: Any, stages: Sequence[Mapping[str, Any]], places: list[float]) -> None:
    lanes = [lane for lane in LANES if any(of["lanes_s"].get(lane) for of in stages)]
    width = BAR / max(len(lanes), 1)
    for at, lane in enumerate(lanes):
        left = [place - BAR / 2 + at * width for place in places]
        heights = [of["lanes_s"].get(lane, 0.0) for of in stages]
        axis.bar(left, heights, width, align="edge", label=lane, color=LANE_COLOURS[lane])
    expected = [of["expected_s"] for of in stages]
    lows = [of["expected_s"] - of["step_s"][0] for of in stages]
    highs = [of["step_s"][1] - of["expected_s"] for of in stages]
    label = f"a step, {stages[0]['confidence']:.0%} of them within"
    axis.errorbar(places, expected, (lows, highs), fmt="o", color="black", markersize=4,
                  capsize=3, linewidth=1, label=label)  # fmt: skip
    axis.yaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    _finish(axis, "time of a step", max(of["step_s"][1] for of in stages))


def _finish(axis: Any, name: str, most: float) -> None:
    axis.set_ylim(0, 1.1 * most or 1)
    axis.set_ylabel(name, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True)
