"""``python -m zerofx plan``: what a training will take on ranks that are not there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofx import hardware
from zerofx.errors import CommandError
from zerofx.planning.plan import axes_of, plan_of
from zerofx.planning.script import call_of


def add_to(subparsers: Any) -> None:
    """Add the command ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="say what a training script will take on any number of ranks",
        description="Run a training script up to its first compiled call, without memory for its "
        "model and without other ranks, and print what each stage would keep, send and wait for.",
    )
    parser.add_argument("--ranks", type=int, required=True, help="how many there will be")
    parser.add_argument(
        "--mesh", type=_sizes, metavar="NODESxRANKS", help="plan stages of two axes: 512x8"
    )
    parser.add_argument(
        "--hardware", metavar="FIGURES", help="what the option hardware takes (docs/options.md)"
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="say which stages fit a device's memory"
    )
    parser.add_argument("script", type=Path, help="the training script, unchanged")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the plan of a script's first compiled call."""
    try:
        axes = axes_of(chosen.ranks, chosen.mesh)
        figures = hardware.of(chosen.hardware) if chosen.hardware else None
    except ValueError as error:
        raise CommandError(str(error)) from None
    ranks_of_node = axes[-1][1] if len(axes) > 1 else min(chosen.ranks, 8)
    call = call_of(chosen.script, chosen.arguments, chosen.ranks, ranks_of_node)
    limit = None if chosen.memory_limit is None else int(chosen.memory_limit * 2**30)
    print(plan_of(call, axes, call.options, memory_limit=limit, figures=figures))
    return 0


def _sizes(text: str) -> Mapping[str, int]:
    """Read ``512x8`` as the axes of nodes and of the ranks in each."""
    nodes, _, ranks = text.partition("x")
    return {"node": int(nodes), "gpu": int(ranks)}
