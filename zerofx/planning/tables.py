"""Plans as plain data, which files hold, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from zerofx.cost.outside import AT_FIRST
from zerofx.cost.traffic import size_text
from zerofx.report.memory import LOWERED_BY
from zerofx.report.timeline import duration

Facts = Mapping[str, Any]
"""A plan's facts: names to numbers, texts, and mappings of them.  Units: bytes, seconds."""


def text_of(plans: Sequence[Facts]) -> str:
    """Return plans of one step in tables: bytes kept and sent, a step's time, peaks by kind."""
    (first, *_), many = plans, len(plans) > 1
    ranks = ", ".join(str(plan["ranks"]) for plan in plans)
    lines = [
        f"{first['function']} on {ranks} rank(s): {first['parameters']} parameters, "
        f"{first['elements']} elements, {size_text(first['bytes'])}",
        f"planned with {first['figures']}",
    ]
    if not first.get("updates", True):  # a file of before may lack it
        lines.append(
            "this call updates nothing: what an optimizer keeps is in none of these. For training, "
            "plan a call that updates."
        )
    stages = [(plan, stage) for plan in plans for stage in plan["stages"]]
    if stages:
        lead = [[plan["ranks"], stage] if many else [stage] for plan, stage in stages]
        names = ["ranks", "stage"] if many else ["stage"]
        steps = [_step(plan["stages"][stage], plan["memory_limit"]) for plan, stage in stages]
        lines += ["", _table([*names, *_STEP], lead, steps)]
        peaks = [plan["stages"][stage]["peak"] for plan, stage in stages]
        kinds = [kind for kind in LOWERED_BY if any(kind in peak for peak in peaks)]
        parts = [[size_text(peak.get(kind, 0)) for kind in kinds] for peak in peaks]
        lines += ["", "Of the peak:", "", _table([*names, *kinds], lead, parts)]
        beside = [plan["stages"][stage]["outside"] for plan, stage in stages]
        rows = list(dict.fromkeys(name for of in beside for name in of))
        headers = [_with_source(name, beside) for name in rows]
        parts = [
            [size_text(of[name]["nbytes"] if name in of else 0) for name in rows] for of in beside
        ]
        lines += ["", "Beside the program:", "", _table([*names, *headers], lead, parts)]
    of = {plan["ranks"]: f" on {plan['ranks']} rank(s)" if many else "" for plan in plans}
    refused = [
        f"stage {stage}{of[plan['ranks']]} cannot be: {why}"
        for plan in plans
        for stage, why in plan["refused"].items()
    ]
    lines += ["", *refused] if refused else []
    least = [_least(plan, of[plan["ranks"]]) for plan in plans if plan.get("least")]
    lines += ["", *least] if least else []
    for plan in plans:
        lines += _chosen(plan, of[plan["ranks"]])
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def _chosen(plan: Facts, where: str) -> list[str]:
    """Return the lines of what a plan would choose."""
    choice = plan.get("choice")
    if choice is None:
        return []
    if isinstance(choice, str):
        return ["", f"Nothing can be chosen{where}: {choice}"]
    best, *others = choice["reasons"]
    return ["", f"plan='auto' would choose{where}: {best}", *(f"  {line}" for line in others)]


def compared(one: Facts, other: Facts) -> str:
    """Return what differs between two plans, by stage: the second one's beside the first one's."""
    rows = []
    for stage in one["stages"]:
        if stage in other["stages"]:
            before, after = (
                _step(plan["stages"][stage], plan["memory_limit"]) for plan in (one, other)
            )
            pairs = zip(before, after, strict=True)
            rows.append([stage, *(a if a == b else f"{a} -> {b}" for a, b in pairs)])
    alone = {
        f"stage {stage} is in the {which} alone"
        for plan, against, which in ((one, other, "first"), (other, one, "second"))
        for stage in plan["stages"]
        if stage not in against["stages"]
    }
    titles = [
        f"{which}: {plan['function']} on {plan['ranks']} rank(s), {size_text(plan['bytes'])} of "
        f"parameters, planned with {plan['figures']}"
        for which, plan in (("first", one), ("second", other))
    ]
    table = [_table(["stage", *_STEP], [row[:1] for row in rows], [row[1:] for row in rows])]
    return "\n".join([*titles, *(["", *table] if rows else []), *sorted(alone)])


_STEP = ("keeps", "peak", "on the host", "sends", "a step", "waits", "limited by")


def _step(of: Facts, limit: int | None) -> list[str]:
    """Return the cells of one stage."""
    peak, sends = sum(of["peak"].values()), of["sends"]
    fits = ""
    if limit is not None:
        first = of["outside"].get(AT_FIRST, {"nbytes": 0})["nbytes"]
        fits = ", too much"
        if of["device_bytes"] <= limit:
            is_too_much = first and of["device_bytes"] + first > limit
            fits = ", fits with deferred_init" if is_too_much else ", fits"
    sent = [
        size_text(nbytes) + (f" {axis}" if len(sends) > 1 else "")
        for axis, nbytes in sends.items()
        if nbytes or len(sends) == 1
    ]
    low_s, high_s = of["step_s"]
    return [
        size_text(sum(of["keeps"].values())),
        size_text(peak) + fits,
        size_text(of["on_host"]),
        ", ".join(sent),
        f"{duration(of['expected_s'])} ({duration(low_s)} to {duration(high_s)})",
        duration(of["waits_s"]),
        of["limited_by"],
    ]


def _least(plan: Facts, on: str) -> str:
    """Say what would do where nothing fits the limit."""
    least = plan["least"]
    if least["on_ranks"] is None:
        more = "more ranks do not make it fit: offload, a smaller batch or a larger limit may"
    else:
        more = f"stage {least['on_stage']} fits on {least['on_ranks']} ranks"
    return (
        f"nothing{on} fits {size_text(plan['memory_limit'])}: stage {least['stage']} takes least, "
        f"{size_text(least['device_bytes'])}; {more}"
    )


def _with_source(name: str, beside: Sequence[Facts]) -> str:
    """Return a row's name, with where it lies if that is no part of a need, and its source."""
    row = next(of[name] for of in beside if name in of)
    where = {"host": " on the host", "spare": " if there is room"}.get(row["place"], "")
    return f"{name}{where} ({row['source']})"


def _table(headers: Sequence[str], lead: Sequence[list], rest: Sequence[list[str]]) -> str:
    rows = [[*first, *row] for first, row in zip(lead, rest, strict=True)]
    return tabulate(rows, headers=headers, disable_numparse=True)
