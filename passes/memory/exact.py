"""Choose what stays on the device by an integer program, instead of one thing after the other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.errors import StepError

MOST_NODES = 1000
"""Branches that are looked at: a number and no time, for all ranks must come to the same."""

MOST_TRIALS = 8

WORTH = 1e-3
"""Weighs a second of any lane beside one of the lane that has most to do."""


@dataclass(frozen=True)
class Stay:
    """Bytes that may stay on the device over positions of a program, both included.

    ``saves`` are the seconds that this spares each lane.  ``like`` is the same for those of equal
    layers: they are told apart by where they are alone.
    """

    nbytes: int
    begin: int
    end: int
    saves: Mapping[str, float]
    like: object


@dataclass(frozen=True)
class Chosen:
    """The numbers of what stays, and by which share of the step a better choice might be faster.

    Of the lanes alone: what no order of a program's nodes hides is not in it.
    """

    numbers: frozenset[int]
    gap: float


def choose_stays(
    stays: Sequence[Stay],
    used: Sequence[int],
    room: int,
    lanes: Mapping[str, float],
    peak: Callable[[Collection[int]], int],
    known: frozenset[int],
) -> Chosen:
    """Choose what stays such that the lane that has most to do has least, then all lanes.

    ``used`` are the bytes at each position without any of it, ``lanes`` the seconds that each has
    to do then; ``peak`` tells the most bytes with the stays of some numbers.  A ``known`` choice,
    which fits, is where the solver begins, and what is returned if it finds none that ``peak``
    confirms: a gather that is spared lets the one behind it start earlier, which is not linear, and
    for which the program is told to leave as much room as that took.

    Source: the form of the program is that of Checkmate, Jain et al. 2020, section 4, with bytes
    that stay in the place of values that are kept; the solver is HiGHS, Huangfu and Hall 2018, in
    scipy.

    Raises: StepError without scipy.
    """
    if not stays:
        return Chosen(known, 0.0)
    program = _Program(stays, used, lanes)
    bound, best, left = None, known, room
    for _ in range(MOST_TRIALS):
        found, least_s = program.solve(left, best)
        bound = least_s if bound is None else bound  # the first has all the room that there is
        over = peak(found) - room
        if over <= 0:
            if program.seconds(found) < program.seconds(best):
                best = found
            break
        left -= over
    seconds = program.seconds(best)
    gap = (seconds - bound) / seconds if seconds and bound is not None else 0.0
    return Chosen(best, max(gap, 0.0))


class _Program:
    """The integer program: a variable for each stay, one for the longest lane."""

    def __init__(
        self, stays: Sequence[Stay], used: Sequence[int], lanes: Mapping[str, float]
    ) -> None:
        self.stays, self.lanes = stays, lanes
        self.rows = _rows(stays, used)
        self.scale_s = max(lanes.values(), default=0.0) or 1.0
        self.scale_bytes = max(stay.nbytes for stay in stays) or 1

    def seconds(self, chosen: Collection[int]) -> float:
        """Return what is made least: the longest lane, and a little of each."""
        left = dict(self.lanes)
        for number in chosen:
            for lane, seconds in self.stays[number].saves.items():
                left[lane] -= seconds
        return max(left.values(), default=0.0) + WORTH * sum(left.values())

    def solve(self, room: int, known: Collection[int]) -> tuple[frozenset[int], float]:
        """Return the best choice within ``room``, and the seconds that none has less than.

        None that is worse than what is ``known`` is looked at.
        """
        optimize, sparse = solver()
        number, nested = len(self.stays), self._nested()
        saved = [stay.saves for stay in self.stays]
        cost = [-WORTH * sum(each.values()) / self.scale_s for each in saved] + [1.0]
        constant = WORTH * sum(self.lanes.values())
        rows: list[Mapping[int, float]] = []
        most: list[float] = []
        for lane, seconds in self.lanes.items():  # no lane has more to do than the longest
            of_lane = {
                n: -each[lane] / self.scale_s for n, each in enumerate(saved) if lane in each
            }
            rows.append({**of_lane, number: -1.0})
            most.append(-seconds / self.scale_s)
        for members, nbytes in self.rows.items():
            rows.append({n: self.stays[n].nbytes / self.scale_bytes for n in members})
            most.append((room - nbytes) / self.scale_bytes)
        for outer, inner in nested:
            rows.append({outer: 1.0, inner: -1.0})
            most.append(0.0)
        rows.append(dict(enumerate(cost)))
        most.append((self.seconds(known) - constant) / self.scale_s + 1e-9)
        entries = [(r, c, value) for r, row in enumerate(rows) for c, value in row.items()]
        at_row, at_column, values = zip(*entries, strict=True)
        matrix = sparse.csr_array((values, (at_row, at_column)), (len(rows), number + 1))
        found = optimize.milp(
            cost,
            integrality=[1] * number + [0],
            bounds=optimize.Bounds(0, [1.0] * number + [float("inf")]),
            constraints=optimize.LinearConstraint(matrix, ub=most),
            options={"mip_rel_gap": 1e-4, "node_limit": MOST_NODES},
        )
        if found.x is None:  # with less room than there is, even what is known does not fit
            return frozenset(known), self.seconds(known)
        least_s = found.mip_dual_bound * self.scale_s + constant
        return frozenset(n for n in range(number) if found.x[n] > 0.5), least_s

    def _nested(self) -> list[tuple[int, int]]:
        """Return pairs of equal stays of which the first lasts through all of the second.

        Where the first fits so does the second, and saves as much: no choice is lost.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, stay in enumerate(self.stays):
            groups[stay.nbytes, stay.like, tuple(stay.saves.items())].append(number)
        pairs = []
        for group in groups.values():
            group.sort(key=lambda number: (self.stays[number].begin, -self.stays[number].end))
            for outer, inner in itertools.pairwise(group):
                if self.stays[inner].end <= self.stays[outer].end:
                    pairs.append((outer, inner))
        return pairs


def _rows(stays: Sequence[Stay], used: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return what may be on the device together, and the most bytes that there are besides.

    One row for each set of stays, and none for a set that is part of another with more bytes.
    """
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for number, stay in enumerate(stays):
        if stay.begin > stay.end:  # nothing lies between
            continue
        begins[stay.begin].append(number)
        ends[stay.end + 1].append(number)
    rows: dict[tuple[int, ...], int] = {}
    members: set[int] = set()
    key: tuple[int, ...] = ()
    for position, nbytes in enumerate(used):
        if position in begins or position in ends:
            members.difference_update(ends[position])
            members.update(begins[position])
            key = tuple(sorted(members))
        if key:
            rows[key] = max(rows.get(key, nbytes), nbytes)
    ordered = sorted(rows, key=len, reverse=True)
    sets = {row: frozenset(row) for row in ordered}
    kept: list[tuple[int, ...]] = []
    for row in ordered:
        if not any(sets[row] < sets[other] and rows[row] <= rows[other] for other in kept):
            kept.append(row)
    return {row: rows[row] for row in kept}


def solver() -> tuple[Any, Any]:
    """Return the modules of scipy that solve programs.  Raises: StepError if they are not there."""
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise StepError(
            "plan='auto' chooses with a solver, and scipy is not installed: pip install "
            "'zerofx[plan]', or leave plan out and choose by options"
        ) from None
    return optimize, sparse
