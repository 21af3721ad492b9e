"""The integer program finds what trying everything finds."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from zerofx.errors import StepError
from zerofx.passes.memory.exact import WORTH, Stay, choose_stays


def held(stays, used, chosen):
    """The bytes at each position."""
    bytes_at = list(used)
    for number in chosen:
        for at in range(stays[number].begin, stays[number].end + 1):
            bytes_at[at] += stays[number].nbytes
    return bytes_at


def seconds(stays, lanes, chosen):
    left = dict(lanes)
    for number in chosen:
        for lane, saved in stays[number].saves.items():
            left[lane] -= saved
    return max(left.values()) + WORTH * sum(left.values())


def an_instance(seed):
    """Stays of a few equal layers and states, positions, and lanes that have that to do."""
    draw = random.Random(seed)
    length = 20
    used = [draw.randrange(50) for _ in range(length)]
    stays = []
    for layer in range(draw.randrange(1, 7)):
        nbytes = draw.choice([10, 10, 30])
        begin, end = layer, length - 1 - layer
        stays.append(Stay(nbytes, begin, end, {"link": nbytes / 10}, 1))
    for _ in range(draw.randrange(4)):
        nbytes = draw.randrange(5, 40)
        stays.append(Stay(nbytes, 0, length - 1, {"to host": nbytes / 20, "updates": 0.3}, None))
    stays.append(Stay(7, 5, 4, {"link": 1.0}, 2))  # nothing lies between
    lanes = {"compute": draw.uniform(0, 5), "link": 1.0, "to host": 0.0, "updates": 0.5}
    for stay in stays:
        for lane, saved in stay.saves.items():
            lanes[lane] += saved
    return stays, used, lanes, max(used) + draw.randrange(100)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_fits_is_better(seed):
    stays, used, lanes, room = an_instance(seed)

    def peak(chosen):
        return max(held(stays, used, chosen))

    found = choose_stays(stays, used, room, lanes, peak, frozenset())
    every = itertools.chain.from_iterable(
        itertools.combinations(range(len(stays)), size) for size in range(len(stays) + 1)
    )
    best = min(seconds(stays, lanes, chosen) for chosen in every if peak(chosen) <= room)
    assert peak(found.numbers) <= room
    assert seconds(stays, lanes, found.numbers) == pytest.approx(best, rel=1e-3)
    assert found.gap < 1e-3


def test_what_is_known_is_kept_where_the_solver_finds_nothing_that_fits():
    stays = [Stay(10, 0, 1, {"link": 1.0}, 1), Stay(10, 0, 1, {"link": 2.0}, 2)]
    # More than the bytes say: as if each let other gathers start earlier.
    found = choose_stays(
        stays, [0, 0], 20, {"link": 3.0}, lambda chosen: 100 * len(chosen), frozenset()
    )
    assert found.numbers == frozenset()
    assert found.gap == pytest.approx(1.0)


def test_a_peak_that_is_higher_than_the_program_says_is_given_room():
    stays = [Stay(10, 0, 1, {"link": 1.0}, number) for number in range(4)]
    peak = lambda chosen: 10 * len(chosen) + (5 if len(chosen) > 2 else 0)  # noqa: E731
    found = choose_stays(stays, [0, 0], 30, {"link": 4.0}, peak, frozenset())
    assert len(found.numbers) == 2


def test_it_asks_for_the_solver(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(StepError, match=r"pip install 'zerofx\[plan\]'"):
        choose_stays([Stay(1, 0, 0, {"link": 1.0}, 1)], [0], 1, {"link": 1.0}, len, frozenset())
