"""``python -m zerofx run``: run a dumped program again, on shapes alone or on random inputs."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from zerofx import compat, optimizer_facts
from zerofx.dumped import DumpedProgram, read
from zerofx.errors import CommandError
from zerofx.exchange import Exchange, alone, in_group, in_turns
from zerofx.options import environment
from zerofx.plan import ParameterTable
from zerofx.program_text import value_text
from zerofx.reference import Reference, Updates
from zerofx.runtime.communication import default_group
from zerofx.runtime.flat import take_shard


@dataclass(frozen=True)
class Results:
    """What a program returns, and what it has made of parameters (whole) and buffers, by name."""

    returned: Any
    after: dict[str, Any]


MOST_RANKS_IN_TURNS = 8
"""Ranks that run in one process; of larger worlds, one rank runs alone."""


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
        "--sgd", action="store_true", help="update with plain SGD, whatever the optimizer was"
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    program = read(chosen.program)
    check_runs(program)
    if not chosen.random:
        outputs = run_fake(program)
        print(f"{program.title} runs on shapes alone; what it returns:")
        print(_table(outputs, program))
        return 0
    refuse_missing_devices(program)
    group = default_group(environment())
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != program.world_size:
            raise CommandError(
                f"{program.path} is for {program.world_size} ranks, and torchrun has started {size}"
            )
        mine = of_rank(program, rank)
        results = run_random(mine, in_group(group), chosen.seed, chosen.sgd)
        if mine is program:
            _tell(program, results, f"rank {rank} of {size} processes", chosen)
        return 0
    programs = all_ranks(program)
    if programs is None:
        results = run_random(program, alone(program.world_size), chosen.seed, chosen.sgd)
        how = f"rank {program.rank} alone: each of {program.world_size} ranks holds what it does"
        _tell(program, results, how, chosen)
        return 0
    calls = [
        lambda exchange, one=one: run_random(one, exchange, chosen.seed, chosen.sgd)
        for one in programs
    ]
    everyone = in_turns(calls)
    others = f" of {len(programs)}, which ran in turns" if len(programs) > 1 else ", the only one"
    _tell(program, everyone[program.rank], f"rank {program.rank}{others}", chosen)
    return 0


def check_runs(program: DumpedProgram) -> None:
    """Raises: CommandError for what the dump does not hold enough of, or is of another torch."""
    if program.facts["OBSTACLES"]:
        raise CommandError(
            f"{program.path} can be read, but not run: {'; '.join(program.facts['OBSTACLES'])}"
        )
    version, here = (_minor(text) for text in (program.torch_version, torch.__version__))
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
    """Every rank's dump of this program, from the folders beside its own; None if not all are."""
    if program.world_size > MOST_RANKS_IN_TURNS:
        return None
    try:
        return [of_rank(program, rank) for rank in range(program.world_size)]
    except (OSError, CommandError):
        return None


def of_rank(program: DumpedProgram, rank: int) -> DumpedProgram:
    """Another rank's dump of the same program.  Raises: CommandError, OSError if there is none."""
    if rank == program.rank:
        return program
    path = program.path.absolute()
    other = read(path.parents[2] / f"rank{rank}" / path.parent.name / path.name)
    check_runs(other)
    if (other.rank, other.world_size) != (rank, program.world_size):
        raise CommandError(f"{other.path} is rank {other.rank}'s of {other.world_size}")
    return other


def run_fake(program: DumpedProgram) -> Any:
    """Run the program on tensors without elements, through every operator's own idea of shapes."""
    names = program.namespace()
    with compat.fake_tensors():
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


def run_random(program: DumpedProgram, exchange: Exchange, seed: int, sgd: bool) -> Results:
    """Run one rank's program on random inputs."""
    table = program.table()
    inputs = random_inputs(program, table, seed)
    updates = Updates(table, optimizers_of(program, table, sgd))
    reference = Reference(table, program.rank, exchange, updates)
    torch.manual_seed(_number(f"{seed} {program.rank}"))
    returned = call(program, reference, list(inputs.values()))
    indices = {info.name: info.index for info in table}
    after = {}
    with torch.no_grad():
        for name, of in program.facts["INPUTS"].items():
            if of["kind"] == "parameter":
                index, value = indices[of["parameter"]], inputs[name]
                whole = reference.whole(value, index) if of.get("sharded") else value
                after[f"parameter {of['parameter']}"] = whole
            elif of["kind"] == "buffer":
                after[f"buffer {name}"] = inputs[name]
    return Results(returned, after)


def call(program: DumpedProgram, reference: Reference, inputs: Sequence[Any]) -> Any:
    """Call a dumped program with these kernels for our operators."""
    names = program.namespace()
    names["zerofx"] = reference
    with torch.no_grad():
        return names["program"](*inputs)


def optimizers_of(
    program: DumpedProgram, table: ParameterTable, sgd: bool = False
) -> Callable[[int, list[nn.Parameter]], torch.optim.Optimizer]:
    """What makes the program's optimizers of stand-ins for its parameters, by number."""
    described = program.facts["OPTIMIZERS"]

    def make(number: int, stand_ins: list[nn.Parameter]) -> torch.optim.Optimizer:
        if sgd:
            return torch.optim.SGD(stand_ins, lr=0.01)
        names = {info.name: stand_in for info, stand_in in zip(table, stand_ins, strict=True)}
        return optimizer_facts.rebuild(described[number], names)

    return make


def random_inputs(program: DumpedProgram, table: ParameterTable, seed: int) -> dict[str, Any]:
    """Inputs as the dump describes them, by name.

    Parameters, their gradients and buffers are the same on all ranks, and for every program of a
    step: shards are cut from the same whole tensors.  Batches are a rank's own.  Integers are 0 or
    1, which index whatever has two elements.
    """
    infos = {info.name: info for info in table}
    inputs: dict[str, Any] = {}
    for name, of in program.facts["INPUTS"].items():
        if "shape" not in of:
            inputs[name] = of["value"]
            continue
        is_own = of.get("unreduced") or (of["kind"] == "other" and of["shape"] != ())
        what = of.get("parameter", name)
        seeds = f"{seed} {of['kind']} {what} {program.rank if is_own else 0}"
        generator = torch.Generator().manual_seed(_number(seeds))
        dtype, shape, stride = getattr(torch, of["dtype"]), of["shape"], of["stride"]
        if of.get("sharded"):
            info = infos[what]
            whole = _random(info.shape, info.stride, dtype, of["kind"], generator)
            value = take_shard(whole.to(info.device), info, program.rank)
        else:
            value = _random(shape, stride, dtype, of["kind"], generator)
        inputs[name] = value.to(of["device"])
    return inputs


def _random(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    kind: str,
    generator: torch.Generator,
) -> torch.Tensor:
    value = torch.empty_strided(shape, stride, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        high = 1 if kind == "buffer" or not shape else 2
        return value.copy_(torch.randint(0, high, shape, generator=generator))
    if not shape:  # a scale, a coefficient, a rate
        return value.fill_(1)
    if kind == "buffer":  # which may be a variance
        return value.copy_(torch.rand(shape, generator=generator))
    scale = shape[-1] ** -0.5 if kind == "parameter" and shape[-1] else 1.0
    return value.copy_(torch.randn(shape, generator=generator) * scale)


def _number(text: str) -> int:
    """A seed that no two texts share."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _tell(program: DumpedProgram, results: Results, how: str, chosen: argparse.Namespace) -> None:
    print(f"{program.title} on random inputs of seed {chosen.seed}, {how}; what it returns:")
    print(_table(results.returned, program))
    if results.after:
        print("\nand leaves behind:")
        print(_table(results.after, program))
    if chosen.sgd and program.facts["OPTIMIZERS"]:
        print("\nPlain SGD has stood in for its optimizers.")


def _table(values: Any, program: DumpedProgram) -> str:
    """A line per tensor: shape, and of one with elements a checksum and its norm."""
    named = dict(values) if isinstance(values, Mapping) else _named(values, program)
    rows = []
    for name, value in named.items():
        row = [name, value_text(value) or "None"]
        if isinstance(value, torch.Tensor) and not compat.is_fake(value):
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
    """Of a tensor's elements, bit by bit, whatever its strides."""
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
