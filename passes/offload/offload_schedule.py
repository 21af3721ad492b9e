"""Schedule activations that leave the device: two lanes of copies beside the compute."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerofx.passes.offload.activations import Activation

MOST_LEAVING = 8
"""So many wait for their lane out at most: one more would only wait, and keep its memory."""


@dataclass(eq=False)
class Trip:
    """An activation away from the device: it is gone at one position, and back from another.

    It starts to leave at ``activation.leaves``; from ``gone`` its memory is free, until it starts
    to come ``back``, to be read at ``activation.returns``.
    """

    activation: Activation
    gone: int
    back: int

    @property
    def nbytes(self) -> int:
        return self.activation.nbytes

    @property
    def stops(self) -> tuple[int, int, int, int]:
        return self.activation.leaves, self.gone, self.back, self.activation.returns


@dataclass
class Lanes:
    """The program's clock, the positions where moves may stand, and the two lanes of copies.

    ``times`` say when each position is reached, ``copy_s`` for how long a copy of so many bytes
    occupies its lane.  ``others`` are copies to the device that the program has already: the
    position where each is waited for, and its bytes.  Each lane carries one copy at a time.
    """

    times: Sequence[float]
    cuts: Sequence[int]
    copy_s: Callable[[int], float]
    others: Sequence[tuple[int, int]] = ()

    @cached_property
    def cut_times(self) -> list[float]:
        """When each position is reached where a move may stand."""
        return [self.times[cut] for cut in self.cuts]

    def idle_s(self, activation: Activation) -> float:
        """For how long nobody reads it."""
        return self.times[activation.returns] - self.times[activation.leaves]

    def hidden(self, activations: Sequence[Activation]) -> list[Trip] | None:
        """Trips of which no copy makes compute wait; None if there is no time for all of them.

        Each leaves as soon as it can, in turn, and comes back as late as it can.  It is not worth
        it to be away for less time than the copies take.
        """
        gone = self._gone(activations)
        back = self.back(activations)
        if gone is None:
            return None
        trips = [Trip(activation, gone[activation], back[activation]) for activation in activations]
        for trip in trips:
            away_s = self.times[trip.back] - self.times[trip.gone]
            if trip.gone >= trip.back or away_s < 2 * self.copy_s(trip.nbytes):
                return None
        return trips

    def _gone(self, activations: Sequence[Activation]) -> dict[Activation, int] | None:
        """Return where each has left, one by one; None if too many would leave at once."""
        ends: list[float] = []
        gone = {}
        for activation in sorted(activations, key=lambda a: a.leaves):
            starts = self.times[activation.leaves]
            if len(ends) - bisect_right(ends, starts) >= MOST_LEAVING:
                return None
            ends.append(max(starts, ends[-1] if ends else 0.0) + self.copy_s(activation.nbytes))
            at = bisect_left(self.cut_times, ends[-1])
            if at == len(self.cuts):
                return None
            gone[activation] = max(self.cuts[at], activation.leaves)
        return gone

    def back(self, activations: Sequence[Activation]) -> dict[Activation, int]:
        """Return where each starts to come back, so that it is there when it is read."""
        back: dict[Activation, int] = {}
        needed = float("inf")
        arrivals: list[tuple[int, int, Activation | None]] = [
            *((a.returns, a.nbytes, a) for a in activations),
            *((position, nbytes, None) for position, nbytes in self.others),
        ]
        for returns, nbytes, activation in sorted(arrivals, key=lambda a: a[0], reverse=True):
            needed = min(self.times[returns], needed) - self.copy_s(nbytes)
            if activation is not None:
                at = max(bisect_right(self.cut_times, needed) - 1, 0)
                back[activation] = min(self.cuts[at], returns)
        return back


def worth_it(lanes: Lanes, activations: Sequence[Activation]) -> list[Trip]:
    """All that can travel hidden behind compute, what lies idle longest first.

    Lanes carry so many bytes a second, so what counts is for how long each byte is away.
    """
    chosen: list[Activation] = []
    trips: list[Trip] = []
    for activation in _best_first(lanes, activations):
        found = lanes.hidden([*chosen, activation])
        if found is not None:
            chosen.append(activation)
            trips = found
    return trips


def _best_first(lanes: Lanes, activations: Sequence[Activation]) -> list[Activation]:
    return sorted(activations, key=lambda a: (-lanes.idle_s(a), -a.nbytes, a.leaves))


def fit(
    lanes: Lanes, activations: Sequence[Activation], alive: Sequence[int], budget: int
) -> tuple[list[Trip], int]:
    """As few as keep what is alive within ``budget`` bytes, or as near to it as can be; the peak.

    ``alive`` is what there is at each position with nothing away.  First go those that travel
    hidden behind compute, then, as the budget demands it, others: compute waits for them.  Where
    the budget allows, each is gone later and comes back earlier, so that nobody waits.
    """
    alive = list(alive)
    chosen: list[Activation] = []
    left = _best_first(lanes, activations)
    late: set[Activation] = set()  # what is late beside some is late beside more
    waits = False
    while max(alive) > budget:
        peak = alive.index(max(alive))
        helping = [a for a in left if a.leaves <= peak < a.returns]
        if not helping:
            break
        best = None
        for activation in helping if not waits else ():
            if activation not in late and lanes.hidden([*chosen, activation]):
                best = activation
                break
            late.add(activation)
        waits = best is None
        best = best or helping[0]
        chosen.append(best)
        left.remove(best)
        _add(alive, best.leaves, best.returns, -best.nbytes)
    trips = [Trip(activation, activation.leaves, activation.returns) for activation in chosen]
    peak_bytes = max(alive)
    _relax(lanes, trips, alive, max(budget, peak_bytes))
    return trips, peak_bytes


def _add(alive: list[int], start: int, stop: int, nbytes: int) -> None:
    for position in range(start, stop):
        alive[position] += nbytes


def _relax(lanes: Lanes, trips: Sequence[Trip], alive: list[int], budget: int) -> None:
    """Give copies time, as far as the budget allows: those that leave first come first."""
    activations = [trip.activation for trip in trips]
    wanted_back = lanes.back(activations)
    ends = 0.0
    for trip in sorted(trips, key=lambda trip: trip.activation.leaves):
        starts = lanes.times[trip.gone]
        ends = max(starts, ends) + lanes.copy_s(trip.nbytes)
        at = bisect_left(lanes.cuts, trip.gone)
        while (
            lanes.cut_times[at] < ends
            and at + 1 < len(lanes.cuts)
            and lanes.cuts[at + 1] <= trip.back
            and _fits(alive, lanes.cuts[at], lanes.cuts[at + 1], trip.nbytes, budget)
        ):
            at += 1
        trip.gone = lanes.cuts[at]
    for trip in sorted(trips, key=lambda trip: trip.activation.returns, reverse=True):
        at = bisect_left(lanes.cuts, trip.back)
        while (
            at > 0
            and lanes.cuts[at] > wanted_back[trip.activation]
            and lanes.cuts[at - 1] >= trip.gone
            and _fits(alive, lanes.cuts[at - 1], lanes.cuts[at], trip.nbytes, budget)
        ):
            at -= 1
        trip.back = lanes.cuts[at]


def _fits(alive: list[int], start: int, stop: int, nbytes: int, budget: int) -> bool:
    """Keep a value from start to stop too, if the budget allows it; return whether it does."""
    is_room = max(alive[start:stop], default=0) + nbytes <= budget
    if is_room:
        _add(alive, start, stop, nbytes)
    return is_room
