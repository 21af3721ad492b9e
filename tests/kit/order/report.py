"""Watch runs and print what came of them: ``python -m tests.kit.order.report SECONDS [SEED]``.

The cases are shuffled by the seed, and begun until the seconds are over.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time

from tests.kit.order.cases import Outcome, cases, outcome_of
from tests.kit.order.plants import Place


def watched_for(seconds: float, seed: int) -> list[Outcome]:
    """Run cases for so long, and print each."""
    chosen, found = cases(), []
    random.Random(seed).shuffle(chosen)
    end = time.monotonic() + seconds
    for case in chosen:
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = outcome_of(case, folder)
            except Exception as error:
                print(f"FAILED {case}: {type(error).__name__}: {error}", flush=True)
                continue
        found.append(outcome)
        print(f"{len(outcome.races)} unordered of {outcome.num_entries} entries: {case}")
        print(*outcome.races, sep="\n", end="\n" if outcome.races else "", flush=True)
    return found


def reported(outcomes: list[Outcome]) -> dict[Place, str | None]:
    """Return each wait's first race without it, over the runs that are in order with it."""
    found: dict[Place, str | None] = {}
    for outcome in outcomes:
        if not outcome.races:
            for place, race in outcome.planted.items():
                found[place] = found.get(place) or race
    return found


def main(seconds: str, seed: str = "0") -> None:
    outcomes = watched_for(float(seconds), int(seed))
    places = reported(outcomes)
    bugs = [bug for outcome in outcomes for bug in outcome.planted.values()]
    print(f"{len(outcomes)} cases, {sum(bool(outcome.races) for outcome in outcomes)} with races")
    num_reported = sum(bug is not None for bug in bugs)
    print(f"{len(bugs)} bugs planted, {num_reported} reported; others where another wait serves")
    missed = [place for place, race in places.items() if race is None]
    print(f"{len(places)} places, " + (f"{len(missed)} not reported" if missed else "all reported"))
    for kind, code in missed:
        print("never:", kind, " < ".join(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
