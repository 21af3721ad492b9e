"""``python -m zerofx run``: run a dumped program again, on shapes alone or on random inputs."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from zerofx import compat
from zerofx.errors import CommandError
from zerofx.options import environment
from zerofx.replay.in_process_group import MOST_RANKS_IN_TURNS, alone, in_group, in_turns
from zerofx.replay.random_run import run_random
from zerofx.report.python_text import value_text
from zerofx.report.read import DumpedProgram, read
from zerofx.runtime.comm.communication import default_group


def add_to(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a dumped program again",
        description="Run a dumped program: on shapes alone, or with --random on random tensors. "
        "Under torchrun every process runs its rank's; otherwise one process runs all ranks', one "
        "after the other, if their dumps lie beside this one.",
    )
    parser.add_argument("program", type=Path, help="rank0/<function>/<number>_<pass>.py")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fake", action="store_true", help="on shapes alone (default)")
    how.add_argument("--random", action="store_true", help="on random inputs")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    parser.add_argument(
        "--sgd", action="store_true", help="update with plain SGD, not with the dumped optimizer"
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    program = read(chosen.program)
    check_runs(program)
    if not chosen.random:
        outputs = run_fake(program)
        print(f"{program.title} runs on shapes alone; what it returns:")
        print(_table(_named(outputs, program)))
        return 0
    refuse_missing_devices(program)
    call = partial(run_random, seed=chosen.seed, sgd=chosen.sgd)
    group = default_group(environment())
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != program.world_size:
            raise CommandError(
                f"{program.path} is for {program.world_size} ranks, and torchrun has started {size}"
            )
        mine = of_rank(program, rank)
        results = call(mine, in_group(group))
        if mine is not program:
            return 0
        how = f"rank {rank} of {size} processes"
    elif (programs := all_ranks(program)) is None:
        results = call(program, alone(program.world_size))
        how = f"rank {program.rank} alone: each of {program.world_size} ranks holds what it does"
    else:
        results = in_turns([partial(call, one) for one in programs])[program.rank]
        others = f" of {len(programs)}, which ran in turns"
        how = f"rank {program.rank}{others if len(programs) > 1 else ', the only one'}"
    print(f"{program.title} on random inputs of seed {chosen.seed}, {how}; what it returns:")
    print(_table(_named(results.returned, program)))
    if results.after:
        print("\nand leaves behind:")
        print(_table(results.after))
    if chosen.sgd and program.facts["OPTIMIZERS"]:
        print("\nPlain SGD has stood in for its optimizers.")
    return 0


def check_runs(program: DumpedProgram) -> None:
    """Raise CommandError if a dump lacks what it takes to run it, or is of another torch."""
    if program.facts["OBSTACLES"]:
        raise CommandError(
            f"{program.path} can be read, but not run: {'; '.join(program.facts['OBSTACLES'])}"
        )
    versions = program.torch_version, torch.__version__
    version, here = (".".join(each.split(".")[:2]) for each in versions)
    if version != here:
        raise CommandError(
            f"{program.path} was dumped with torch {version}, and this is torch {here}, whose "
            "operators may differ. Run it with that torch, or dump the step again."
        )


def refuse_missing_devices(program: DumpedProgram) -> None:
    devices = {of["device"] for of in program.facts["INPUTS"].values() if "device" in of}
    for device in sorted(devices):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CommandError(
                f"{program.path} is for {device}, which is not here: {error}. Without --random it "
                "runs on shapes alone, which needs no device."
            ) from error


def all_ranks(program: DumpedProgram) -> list[DumpedProgram] | None:
    """Return every rank's dump of this program; None if one is missing beside it."""
    if program.world_size > MOST_RANKS_IN_TURNS:
        return None
    try:
        return [of_rank(program, rank) for rank in range(program.world_size)]
    except (OSError, CommandError):
        return None


def of_rank(program: DumpedProgram, rank: int) -> DumpedProgram:
    """Return another rank's dump of a program.  Raises: CommandError, OSError if there is none."""
    if rank == program.rank:
        return program
    path = program.path.absolute()
    other = read(path.parents[2] / f"rank{rank}" / path.parent.name / path.name)
    check_runs(other)
    if (other.rank, other.world_size) != (rank, program.world_size):
        raise CommandError(f"{other.path} is rank {other.rank}'s of {other.world_size}")
    return other


def run_fake(program: DumpedProgram) -> Any:
    """Run the program on tensors without elements: each operator checks and gives shapes."""
    names = program.namespace()
    with compat.tensors.fake_tensors():
        inputs = [
            torch.empty_strided(
                of["shape"], of["stride"], dtype=getattr(torch, of["dtype"]), device=of["device"]
            )
            if "shape" in of
            else of["value"]
            for of in program.facts["INPUTS"].values()
        ]
        with torch.no_grad():
            return names["program"](*inputs)


def _table(named: Mapping[str, Any]) -> str:
    """Return a table with each tensor's shape and, if it has elements, checksum and norm."""
    rows = []
    for name, value in named.items():
        row = [name, value_text(value) or "None"]
        if isinstance(value, torch.Tensor) and not compat.tensors.is_fake(value):
            row += [checksum(value), f"{value.detach().double().norm().item():.6g}"]
        rows.append(row)
    return tabulate(rows, headers=("", "", "checksum", "norm"), disable_numparse=True)


def _named(values: Sequence[Any], program: DumpedProgram) -> dict[str, Any]:
    gradients, sharded = program.facts["GRADIENTS"], program.facts["SHARDED_RESULTS"]
    named = {}
    for position, value in enumerate(values):
        what = f" gradient of {gradients[position]}" if position in gradients else ""
        shard = " (shard)" if position in sharded else ""
        named[f"{position}{what}{shard}"] = value
    return named


def checksum(value: torch.Tensor) -> str:
    """Return a checksum of the bits of a tensor's elements; strides do not count."""
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
