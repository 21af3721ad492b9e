"""Runs a dumped program on random inputs, which are the same for every program of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.errors import CommandError
from zerofx.ir.parameters import ParameterInfo
from zerofx.replay.in_process_group import Exchange
from zerofx.replay.reference import MakeOptimizer, Reference, Updates, reduced
from zerofx.report import optimizers
from zerofx.report.read import DumpedProgram, ProgramFacts
from zerofx.runtime.memory.flat import take_shard


@dataclass(frozen=True)
class Results:
    """The results of a program, its parameters (whole) and its buffers after a run, by name."""

    returned: Any
    after: dict[str, Any]


def run_random(program: DumpedProgram, exchange: Exchange, *, seed: int, sgd: bool) -> Results:
    """Run one rank's program on random inputs."""
    inputs = random_inputs(program, seed)
    updates = Updates(program.table(), optimizers_of(program, sgd))
    reference = Reference(program.table(), program.mesh, exchange, updates)
    torch.manual_seed(_number(f"{seed} {program.rank}"))
    returned = call(program, reference, list(inputs.values()))
    return Results(returned, left_behind(program, reference, inputs))


def left_behind(
    program: ProgramFacts, reference: Reference, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return parameters, whole, and buffers after a run, by name.  Collective."""
    indices = {info.name: info.index for info in reference.table}
    after = {}
    with torch.no_grad():
        for name, of in program.facts["INPUTS"].items():
            if of["kind"] == "parameter":
                index, value = indices[of["parameter"]], inputs[name]
                whole = reference.whole_value(value, index) if of.get("sharded") else value
                after[f"parameter {of['parameter']}"] = whole
            elif of["kind"] == "buffer":
                after[f"buffer {name}"] = inputs[name]
    return after


def call(program: DumpedProgram, reference: Reference, inputs: Sequence[Any]) -> Any:
    """Call a dumped program with these kernels for our operators."""
    names = program.namespace()
    names["zerofx"] = reference
    with torch.no_grad():
        return names["program"](*inputs)


def optimizers_of(program: ProgramFacts, sgd: bool = False, lenient: bool = False) -> MakeOptimizer:
    """Return what makes the program's optimizers, or plain SGD in the place of each.

    ``lenient`` puts SGD in the place of those that cannot be made.
    """

    def make(number: int, stand_ins: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = dict(zip(program.facts["PARAMETERS"], stand_ins, strict=True))
        try:
            if not sgd:
                return optimizers.rebuild(program.facts["OPTIMIZERS"][number], names)
        except CommandError:
            if not lenient:
                raise
        return torch.optim.SGD(stand_ins, lr=0.01)

    return make


def random_inputs(program: ProgramFacts, seed: int) -> dict[str, Any]:
    """Inputs as the dump describes them, by name.

    Parameters and buffers are the same on all ranks, and for every program of a step: shards are
    cut from the same whole tensors.  So are gradients, as the mean of the ranks' own, which a
    program with ``accumulate="local"`` is given instead.  Batches are a rank's own.  Integers are 0
    or 1, which index whatever has two elements.
    """
    infos = {info.name: info for info in program.table()}
    return {
        name: _random_input(program, seed, name, of, infos) if "shape" in of else of["value"]
        for name, of in program.facts["INPUTS"].items()
    }


def _random_input(
    program: ProgramFacts,
    seed: int,
    name: str,
    of: Mapping[str, Any],
    infos: Mapping[str, ParameterInfo],
) -> torch.Tensor:
    kind, what = of["kind"], of.get("parameter", name)
    info = infos[what] if of.get("sharded") else None
    if info and kind == "parameter":
        info = info.kept
    shape, stride = (info.shape, info.stride) if info else (of["shape"], of["stride"])

    def drawn(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_number(f"{seed} {kind} {what} {rank}"))
        value = torch.empty_strided(shape, stride, dtype=getattr(torch, of["dtype"]))
        return _filled(value, kind, generator)

    if kind == "gradient" and not of.get("unreduced"):
        value = reduced(list(map(drawn, range(program.world_size))), "mean")
    else:
        is_own = kind == "gradient" or (kind == "other" and shape != ())
        value = drawn(program.rank if is_own else 0)
    if info:
        value = take_shard(value.to(info.device), info, info.rank)
    return value.to(of["device"])


def _filled(value: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    shape = value.shape
    if not (value.is_floating_point() or value.is_complex()):
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
