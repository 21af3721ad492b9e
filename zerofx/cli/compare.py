"""What changed between two programs: which statements came, went, moved, and read something else.

Statements are known by their names, which passes keep; what a pass makes anew under another name
is matched by what it computes from what, or by what it is for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerofx.report.statements import WORD, Statement


@dataclass(frozen=True)
class Move:
    """Statements that are elsewhere now, next to each other before and after.

    ``was_before`` and ``is_before`` are those that stay and come next; None at the end.  ``by`` is
    how many of those that stay they have passed: less than 0 for up.
    """

    statements: tuple[Statement, ...]
    was_before: Statement | None
    is_before: Statement | None
    by: int


@dataclass(frozen=True)
class Change:
    """A statement that calls something else, reads something else, or has another shape.

    ``replaced`` are the statements that it reads others instead of, by name, if that is all.
    """

    before: Statement
    after: Statement
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """From one program to another; ``unchanged`` counts statements, inputs among them."""

    inserted: list[Statement]
    removed: list[Statement]
    moved: list[Move]
    changed: list[Change]
    unchanged: int

    @property
    def is_empty(self) -> bool:
        return not (self.inserted or self.removed or self.moved or self.changed)


def compare(before: Sequence[Statement], after: Sequence[Statement]) -> Difference:
    """Compare two programs.  Takes about as long as reading them."""
    pairs = _matched(before, after)
    old_of = {new.name: old for old, new in pairs}
    new_names = set(old_of)
    old_names = {old.name for old, _ in pairs}
    changed = []
    for old, new in pairs:
        call = _with_old_names(new, old_of)
        if call != old.call or new.value != old.value:
            changed.append(Change(old, new, _replaced(old, new, call)))
    moved = _moves(before, after, pairs)
    touched = {change.after.name for change in changed}
    touched |= {statement.name for move in moved for statement in move.statements}
    return Difference(
        inserted=[statement for statement in after if statement.name not in new_names],
        removed=[statement for statement in before if statement.name not in old_names],
        moved=moved,
        changed=changed,
        unchanged=len(pairs) - len(touched),
    )


def _matched(
    before: Sequence[Statement], after: Sequence[Statement]
) -> list[tuple[Statement, Statement]]:
    """Statements that are the same in both, in the order of ``after``."""
    by_name = {statement.name: statement for statement in before}
    pairs = {}
    for new in after:
        old = by_name.get(new.name)
        if old is not None and _is_alike(old, new):
            pairs[new.name] = old
    known = {old.name for old in pairs.values()}
    others: dict[tuple[str, ...], dict[str, Statement]] = {}
    for old in before:
        if old.name not in known:
            for key in (_meaning(old, old.call), _purpose(old)):
                others.setdefault(key, {})[old.name] = old
    for new in after:
        if new.name in pairs:
            continue
        for key in (_meaning(new, _with_old_names(new, pairs)), _purpose(new)):
            alike = others.get(key)
            if alike and key:
                pairs[new.name] = old = next(iter(alike.values()))
                for of in (_meaning(old, old.call), _purpose(old)):
                    others[of].pop(old.name)
                break
    return [(pairs[new.name], new) for new in after if new.name in pairs]


def _is_alike(old: Statement, new: Statement) -> bool:
    return (old.operator, old.role) == (new.operator, new.role)


def _meaning(statement: Statement, call: str) -> tuple[str, ...]:
    return (call, statement.role, statement.serves, statement.value)


def _purpose(statement: Statement) -> tuple[str, ...]:
    """What a pass has inserted a statement for; nothing for the user's own."""
    if not statement.role or not statement.serves:
        return ()
    return (statement.operator, statement.role, statement.serves, statement.value)


def _with_old_names(statement: Statement, old_of: Mapping[str, Statement]) -> str:
    """A call with everything that it reads called what it was before."""
    renamed = {
        name: old_of[name].name
        for name in statement.reads
        if name in old_of and old_of[name].name != name
    }
    if not renamed:
        return statement.call
    return WORD.sub(lambda match: renamed.get(match[0], match[0]), statement.call)


def _replaced(old: Statement, new: Statement, call: str) -> dict[str, str]:
    """What a statement reads instead of what, if nothing else about it has changed."""
    was, now, written = map(WORD.findall, (old.call, call, new.call))
    if old.value != new.value or len(was) != len(now):
        return {}
    replaced = {a: b for a, b in zip(was, now, strict=True) if a != b}
    if not replaced.keys() <= set(old.reads):
        return {}
    is_all = WORD.sub(lambda match: replaced.get(match[0], match[0]), old.call) == call
    if not is_all:
        return {}
    return {a: name for a, b, name in zip(was, now, written, strict=True) if a != b}


def _moves(
    before: Sequence[Statement],
    after: Sequence[Statement],
    pairs: Sequence[tuple[Statement, Statement]],
) -> list[Move]:
    """The fewest statements that have to move for the others to be in the order they were in."""
    position = {statement.name: number for number, statement in enumerate(before)}
    ordered = [position[old.name] for old, _ in pairs]
    stays = set(_longest_increasing(ordered))
    if len(stays) == len(pairs):
        return []
    staying_old = {pairs[index][0].name for index in stays}
    staying_new = {pairs[index][1].name: pairs[index][0].name for index in stays}
    next_old, rank_old = _next_staying(before, staying_old)
    next_new, rank_new = _next_staying(after, staying_new.keys())
    number = {statement.name: i for i, statement in enumerate(after)}
    groups: list[list[tuple[Statement, Statement]]] = []
    for index, (old, new) in enumerate(pairs):
        if index in stays:
            continue
        last = groups[-1][-1] if groups else None
        goes_on = last is not None and (
            next_old[last[0].name] is next_old[old.name]
            and next_new[last[1].name] is next_new[new.name]
            and number[new.name] - number[last[1].name] < 3
        )
        if goes_on:
            groups[-1].append((old, new))
        else:
            groups.append([(old, new)])
    return [
        Move(
            statements=tuple(new for _, new in group),
            was_before=next_old[group[0][0].name],
            is_before=next_new[group[0][1].name],
            by=rank_new[group[0][1].name] - rank_old[group[0][0].name],
        )
        for group in groups
    ]


def _next_staying(
    program: Sequence[Statement], staying
) -> tuple[dict[str, Statement | None], dict[str, int]]:
    """By statement: which of those that stay comes next, and how many of them come before."""
    following: dict[str, Statement | None] = {}
    rank: dict[str, int] = {}
    coming: Statement | None = None
    for statement in reversed(program):
        following[statement.name] = coming
        if statement.name in staying:
            coming = statement
    count = 0
    for statement in program:
        rank[statement.name] = count
        count += statement.name in staying
    return following, rank


def _longest_increasing(numbers: Sequence[int]) -> list[int]:
    """Positions of a longest increasing subsequence, in n log n (patience sorting)."""
    tails: list[int] = []  # the smallest last number of a subsequence of each length
    at: list[int] = []
    before: list[int] = []
    for index, number in enumerate(numbers):
        length = bisect_left(tails, number)
        before.append(at[length - 1] if length else -1)
        if length == len(tails):
            tails.append(number)
            at.append(index)
        else:
            tails[length] = number
            at[length] = index
    found = []
    index = at[-1] if at else -1
    while index >= 0:
        found.append(index)
        index = before[index]
    return found[::-1]
