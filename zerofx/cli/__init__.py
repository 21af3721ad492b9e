"""The commands of ``python -m zerofx``, one module each.

A module's ``add_to(subparsers)`` adds the command's parser, and sets its default ``run`` to a
function of the parsed arguments that returns the exit status.  It raises CommandError for what
the user should be told.
"""

from __future__ import annotations

from zerofx.cli import bisect, calibrate, diff, explain, plan, run, timeline

COMMANDS = (
    run.add_to,
    diff.add_to,
    timeline.add_to,
    explain.add_to,
    bisect.add_to,
    plan.add_to,
    calibrate.add_to,
)
"""Each command's ``add_to``, in the order in which help lists them."""
