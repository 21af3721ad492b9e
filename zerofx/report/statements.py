"""The statements of a dumped program, read from its text line by line; nothing of it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zerofx.report.read import DumpedProgram

_STATEMENT = re.compile(r'    (\w+): "((?:[^"\\]|\\.)*)" = (.*?)(?:;  del [\w, ]+)?$')
_INPUT = re.compile(r'    (\w+): "((?:[^"\\]|\\.)*)",$')
_NAME = r'(?:"(?:[^"\\]|\\.)*"|[^\s,;:()"]+)'
_ORIGIN = re.compile(
    rf"(?P<by>\w+): (?P<role>\w+)(?: (?P<names>{_NAME}(?:, {_NAME})*))?"
    r"(?: \(bucket (?P<bucket>\d+)\))?(?:; (?P<why>.*))?$"
)
_SOURCE = re.compile(r"from (?P<place>.*?:\d+)(?: \((?P<module>[^:]*)\))?: (?P<text>.*)$")
_GRADIENT = "this rank's gradient of "
WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?![\w=])")
"""A name in a call that may be a statement's: no attribute, and no keyword."""


@dataclass(frozen=True)
class Statement:
    """One line of a program: ``name: annotation = call``, and what the comments say of it.

    ``names`` are the parameters that it serves, as they are written, ``by`` the pass that inserted
    it, ``place`` and ``module`` where the user wrote it; ``gradient_of`` are the parameters whose
    local gradient it is, and ``leads_to`` those of the next such statement, for what is of no
    module.  ``reads`` are the statements and inputs in its call, each once.
    """

    name: str
    value: str
    call: str
    reads: tuple[str, ...] = ()
    by: str = ""
    role: str = ""
    names: str = ""
    bucket: int = -1
    why: str = ""
    place: str = ""
    module: str = ""
    gradient_of: str = ""
    leads_to: str = ""

    @property
    def operator(self) -> str:
        """``zerofx.wait``, ``aten.mm.default`` or ``getitem``."""
        head = self.call.split("(", 1)[0]
        return head if head != self.call and "[" not in head else "getitem"

    @property
    def serves(self) -> str:
        """The parameter or the bucket that an inserted statement is for; empty for none."""
        if self.bucket >= 0:
            return f"bucket {self.bucket}"
        return self.names

    @property
    def what(self) -> str:
        """In words, as short as a reader can do with."""
        if self.role:
            return f"{self.role} {self.serves}".strip()
        if self.gradient_of:
            return f"gradient of {self.gradient_of}"
        if self.module:
            return f"{self.operator} in {self.module}"
        then = f", before the gradient of {self.leads_to}" if self.leads_to else ""
        return f"{self.operator}{then}"


def statements(program: DumpedProgram) -> list[Statement]:
    """A program's inputs and statements, in order; what it returns is one called ``return``."""
    found: list[Statement] = []
    known: set[str] = set()
    comments: list[str] = []
    source: tuple[str, str] = ("", "")
    for line in program.lines:
        if line.startswith("    #     "):
            comments[-1] += f" {line[10:]}"
        elif line.startswith("    # "):
            comments.append(line[6:])
        elif match := _INPUT.match(line):
            found.append(Statement(match[1], match[2], "", role="input"))
            known.add(match[1])
        elif match := _STATEMENT.match(line):
            name, value, call = match.groups()
            origin, source = _noted(comments, source)
            reads = _reads(call, known)
            place, module = source
            found.append(Statement(name, value, call, reads, **origin, place=place, module=module))
            known.add(name)
            comments = []
        elif line.startswith("    return "):
            call = line.strip().removeprefix("return ")
            found.append(Statement("return", "", call, _reads(call, known)))
    return _with_landmarks(found)


def _with_landmarks(found: list[Statement]) -> list[Statement]:
    coming = ""
    for position in range(len(found) - 1, -1, -1):
        statement = found[position]
        if statement.gradient_of:
            coming = statement.gradient_of
        elif coming and not (statement.role or statement.module):
            found[position] = replace(statement, leads_to=coming)
    return found


def _noted(comments: Iterable[str], source: tuple[str, str]) -> tuple[dict, tuple[str, str]]:
    origin: dict[str, object] = {}
    for comment in comments:
        if match := _SOURCE.match(comment):
            source = f"{match['place']}: {match['text']}", match["module"] or ""
        elif comment.startswith(_GRADIENT):
            origin["gradient_of"] = comment.removeprefix(_GRADIENT)
        elif match := _ORIGIN.match(comment):
            fields = match.groupdict(default="")
            origin |= {**fields, "bucket": int(fields["bucket"] or -1)}
    return origin, source


def _reads(call: str, known: set[str]) -> tuple[str, ...]:
    words: Sequence[str] = WORD.findall(call)
    return tuple(dict.fromkeys(word for word in words if word in known))
