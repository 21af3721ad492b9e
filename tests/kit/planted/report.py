"""Print what has become of all planted bugs: ``python -m tests.kit.planted.report``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from tests.kit.planted.bugs import KINDS
from tests.kit.planted.steps import FORMS
from tests.kit.planted.verdicts import KILLED, Verdict, verdicts


def tables(found: Sequence[Verdict]) -> Iterator[str]:
    """By pass, by kind, and why what survived is right to."""
    for name, of in (("pass", lambda one: one.inserted_by), ("bug", lambda one: one.bug.kind)):
        counts = Counter((of(one), one.found_by) for one in found)
        firsts = list(dict.fromkeys(map(of, found))) if name == "pass" else KINDS
        rows = [
            [first, sum(n for (one, _), n in counts.items() if one == first)]
            + [counts[first, by] for by in (*KILLED, "nobody")]
            for first in firsts
        ]
        rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
        yield tabulate(rows, headers=[name, "planted", *KILLED, "nobody"], tablefmt="github")
    whys = Counter(one.why or "NOBODY KNOWS" for one in found if one.survived)
    yield tabulate(whys.most_common(), headers=["found by nobody, for", "bugs"], tablefmt="github")


def main(names: Sequence[str]) -> None:
    for name in names or FORMS:
        form = FORMS[name]
        with form.captured() as step:
            found = list(verdicts(step, **form.arguments))
        print(f"## {name}\n", *tables(found), sep="\n\n", flush=True)
        for one in found:
            if one.survived and not one.why:
                print(one)


if __name__ == "__main__":
    main(sys.argv[1:])
