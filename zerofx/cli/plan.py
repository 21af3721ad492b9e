"""``python -m zerofx plan``: what a training will take on ranks that are not there."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from zerofx import hardware
from zerofx.devices import DEVICES, device_named
from zerofx.errors import CommandError
from zerofx.garbage import without_collections
from zerofx.options import environment
from zerofx.planning import picture
from zerofx.planning.models import LENGTH, call_of_model, shipped
from zerofx.planning.plan import axes_of, plan_of, ranks_of_node
from zerofx.planning.script import call_of
from zerofx.planning.stopped import StoppedCall
from zerofx.planning.tables import compared, text_of


def add_to(subparsers: Any) -> None:
    """Add the command ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="say what a training script will take on any number of ranks",
        description="Run a training script up to its first compiled call, without memory for its "
        "model and without other ranks, and print what each stage would keep, send and wait for. "
        "Or do so for a model of which there is only a configuration.",
    )
    parser.add_argument("--ranks", type=int, help="how many there will be")
    parser.add_argument(
        "--sweep", type=_numbers, metavar="ranks=N,N", help="plan for several numbers of ranks"
    )
    parser.add_argument(
        "--mesh",
        type=_sizes,
        metavar="NODESxRANKS",
        help="plan stages of two axes, 512x8; with --sweep the ranks of a node count",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"plan a model instead of a script: {', '.join(shipped())}, a config.json, a folder "
        "with one, or owner/name on the hub",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"with --model, the length of its one sequence (default: {LENGTH}, or its positions)",
    )
    parser.add_argument(
        "--hardware", metavar="FIGURES", help="what the option hardware takes (docs/options.md)"
    )
    parser.add_argument(
        "--device", help=f"what each rank has, as if this machine had it: {', '.join(DEVICES)}"
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="say which stages fit so much (default: all that --device has)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan to a file too")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw memory by kind and time by lane too: a .png, .svg or .pdf; it takes matplotlib",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="FILE",
        help="print two such files beside each other, and run nothing",
    )
    parser.add_argument(
        "-m", action="store_true", dest="is_module", help="the script is a module's name"
    )
    parser.add_argument("script", type=Path, nargs="?", help="the training script, unchanged")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the plan of a script's first compiled call, or compare two that there are."""
    if chosen.picture:
        picture.check(chosen.picture)
    if chosen.compare:
        one, other = map(_read, chosen.compare)
        print(compared(one, other))
        if chosen.picture:
            ranks = [f"{plan['ranks']} rank(s)" for plan in (one, other)]
            picture.draw(
                [one, other], chosen.picture, [f"first: {ranks[0]}", f"second: {ranks[1]}"]
            )
        return 0
    _check(chosen)
    meshes = [_axes(chosen, ranks) for ranks in chosen.sweep or [chosen.ranks]]
    of_model = None if chosen.model is None else call_of_model(chosen.model, chosen.tokens)
    call = of_model.call if of_model else None
    plans: list[Mapping[str, Any]] = []
    for axes in meshes:
        try:
            plans.append(_plan(chosen, axes, call))
        except Exception as error:
            if plans and call is None:
                error.add_note(_AGAIN)
            raise
    if chosen.json:
        chosen.json.write_text(json.dumps(plans if chosen.sweep else plans[0], indent=1))
    if of_model:
        print(of_model.words)
    print(text_of(plans))
    if chosen.picture:
        picture.draw(plans, chosen.picture)
    return 0


_AGAIN = (
    "--sweep has run the script before in this process. What can be done once in a process "
    "(torch.multiprocessing.set_start_method, torch.set_num_interop_threads, torch.library.Library"
    '(..., "DEF"), AutoConfig.register) fails then: plan each number of ranks on its own, with '
    "--ranks N."
)


def _check(chosen: argparse.Namespace) -> None:
    """Raise CommandError for arguments of which there are too few or too many."""
    if (chosen.script is None) == (chosen.model is None):
        raise CommandError(
            "plan needs a training script or --model NAME, and not both: "
            "python -m zerofx plan --ranks 64 train.py"
        )
    if (chosen.ranks is None) == (chosen.sweep is None):
        raise CommandError(
            "plan needs --ranks N or --sweep ranks=N,N before the script, and not both: "
            "python -m zerofx plan --ranks 64 train.py"
        )
    if chosen.tokens is not None and chosen.model is None:
        raise CommandError(
            "--tokens is the length of the sequence that --model trains on, and a script has "
            "batches of its own: leave it out, or give it to the script, behind its name"
        )
    limit = chosen.memory_limit
    if limit is not None and not (math.isfinite(limit) and int(limit * 2**30) > 0):
        raise CommandError(
            f"--memory-limit is how many GiB a rank's device has, and {limit:g} is no such amount: "
            "give a number above 0, such as 70 or 0.5, or leave it out"
        )


def _axes(chosen: argparse.Namespace, ranks: int) -> tuple[tuple[str, int], ...]:
    """Return the axes of so many ranks.  Raises: CommandError if they have no such mesh."""
    mesh = chosen.mesh
    if mesh is not None and chosen.sweep:
        if ranks % mesh["gpu"]:
            raise CommandError(
                f"--sweep plans for {ranks} ranks, which do not divide into nodes of "
                f"{mesh['gpu']}, as --mesh says: leave {ranks} out, or give nodes of another size"
            )
        mesh = {**mesh, "node": ranks // mesh["gpu"]}
    try:
        return axes_of(ranks, mesh)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _plan(
    chosen: argparse.Namespace, axes: tuple[tuple[str, int], ...], call: StoppedCall | None
) -> Mapping[str, Any]:
    """Plan a call for ranks along these axes; without one, run the script as the first of them."""
    try:
        device = device_named(chosen.device) if chosen.device else None
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        figures = hardware.of(chosen.hardware) if chosen.hardware else None
    except ValueError as error:
        raise CommandError(f"--hardware {chosen.hardware}: {error}") from None
    if call is None:
        ranks = math.prod(size for _, size in axes)
        given = chosen.script, chosen.arguments, ranks, ranks_of_node(axes), device
        call = call_of(*given, is_module=chosen.is_module)
    elif device is not None:
        call = call.on_device(device.kind)
    limit = None if chosen.memory_limit is None else int(chosen.memory_limit * 2**30)
    quiet = {"KINETO_LOG_LEVEL": environment().get("KINETO_LOG_LEVEL", _SILENT)}
    with mock.patch.dict(environment(), quiet), without_collections():  # facts are made there too
        made = plan_of(call, axes, call.options, memory_limit=limit, figures=figures, device=device)
        return made.facts


_SILENT = "6"
"""The level above all of Kineto's, torch's profiler, which operators' own bytes are found with.

It prints two lines a profile by default (torch 2.13 and 2.15), and reads its level at the first.
"""


def _sizes(text: str) -> Mapping[str, int]:
    """Read ``512x8`` as the axes of nodes and of the ranks in each."""
    nodes, _, ranks = text.partition("x")
    sizes = {"node": int(nodes), "gpu": int(ranks)}
    if min(sizes.values()) < 1:
        raise ValueError(text)  # argparse names the option
    return sizes


def _numbers(text: str) -> list[int]:
    """Read ``ranks=8,64``."""
    name, _, numbers = text.partition("=")
    if name != "ranks":
        raise ValueError(text)
    return [int(number) for number in numbers.split(",")]


def _read(path: Path) -> Mapping[str, Any]:
    """Return the plan in a file."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{path} is no plan: {error}") from None
    if isinstance(facts, list):
        raise CommandError(
            f"{path} has the plans of a --sweep, and --compare takes one from each file: write it "
            "with plan --ranks N --json"
        )
    if not isinstance(facts, dict) or "stages" not in facts:
        raise CommandError(f"{path} is no plan: write it with plan --json")
    if any({"device_bytes", "expected_s", "lanes_s"} - set(of) for of in facts["stages"].values()):
        raise CommandError(f"{path} is a plan of another version of zerofx: write it again")
    return facts
