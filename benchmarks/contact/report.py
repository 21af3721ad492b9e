"""The report of a run as Markdown, and its figures for the option ``hardware``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contact.driver import Record
from contact.findings import NOT_RUN, PASSED
from contact.sections import NOTED, Section


def opening(sections: Sequence[Section], header: Record) -> str:
    """What this run can show: its machine, or what is rehearsed where there is no GPU."""
    versions = ", ".join(f"{name} {value}" for name, value in header["versions"].items())
    if not header["rehearsal"]:
        return f"{header['gpus']} x {header['gpu']}; {versions}"
    lines = [
        "**This is a rehearsal: there is no GPU here.** The sections ran on the CPU, tiny; nothing",
        "below says anything about an accelerator, and no figure is a measurement.",
        "",
        versions,
        "",
        "| section | what was rehearsed | what could not be |",
        "|---|---|---|",
        *(f"| {each.name} | {each.rehearsed} | {each.missing} |" for each in sections),
    ]
    return "\n".join(lines)


def report(sections: Sequence[Section], records: Mapping[str, Record], header: Record) -> str:
    """Return the whole report: what passed, what failed and why, all figures."""
    lines = ["# First contact", "", opening(sections, header), ""]
    lines += ["| section | | s | checks | shows |", "|---|---|---|---|---|"]
    for section in sections:
        record = records.get(section.name, {})
        checks = record.get("checks", [])
        passed = sum(check["passed"] for check in checks)
        lines.append(
            f"| {section.name} | {_emphasised(record.get('status', NOT_RUN))} | "
            f"{record.get('seconds', 0):.0f} | {passed}/{len(checks)} | {section.shows} |"
        )
    for section in sections:
        lines += _section(section, records.get(section.name, {}), header)
    lines += ["", "## Only noted", "", *(f"- {name}: {text}" for name, text in NOTED.items())]
    return "\n".join(lines) + "\n"


def hardware(records: Mapping[str, Record], header: Record) -> dict[str, Any]:
    """Return the figures that this machine's sections have measured, by the option's names."""
    figures: dict[str, Any] = {}
    for record in records.values():
        if record.get("header") == header:
            figures |= record["hardware"]
    return figures


def _emphasised(status: str) -> str:
    return status if status == PASSED else f"**{status}**"


def _section(section: Section, record: Record, header: Record) -> list[str]:
    if not record:
        return []
    lines = ["", f"## {section.name}: {record['status']}", "", f"To show: {section.shows}."]
    if record.get("header", header) != header:
        lines += ["", f"From an earlier run, with {record['header']}."]
    if "why" in record:
        lines += ["", record["why"]]
    failed = [check for check in record["checks"] if not check["passed"]]
    passed = [check for check in record["checks"] if check["passed"]]
    for title, checks in (("Failed", failed), ("Passed", passed)):
        if checks:
            lines += ["", f"{title}:", ""]
            lines += [f"- {check['name']}: {check['detail'] or 'yes'}" for check in checks]
    if record["figures"]:
        lines += ["", "| figure | value | unit |", "|---|---|---|"]
        lines += [f"| {f['name']} | {f['value']:.6g} | {f['unit']} |" for f in record["figures"]]
    if record["notes"]:
        lines += ["", *(f"- {note}" for note in record["notes"])]
    if "log" in record:
        lines += ["", "The end of its log:", "", "```", *record["log"], "```"]
    return lines
