"""Refuses a step that looks into ``optimizer.state`` where that is not what it would find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from zerofx import compat
from zerofx.capture import substitutes
from zerofx.errors import StepError
from zerofx.ir import ops

REMEDY = "Read optimizer.state_dict() after the call, which has whole states."


def refuse_reads_of_states(gm: fx.GraphModule, inputs: Sequence[Any], stage: int) -> None:
    """Check Dynamo's graph of a step and what its path depends on.

    From stage 1 on, states are this rank's shards, and a step's own update replaces what it finds
    whole.  At every stage, a step is traced once, before its first update has made any state.

    Raises: StepError.
    """
    if stage > 0:
        _refuse_values(inputs)
    steps = (ops.optimizer_step, ops.optimizer_step.overloadpacket)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in steps:
            parameters = [given[operand] for operand in node.args[0] if operand in given]
            _refuse_looks(substitutes.optimizer_of(node.args[2]), parameters)


def _refuse_values(inputs: Sequence[Any]) -> None:
    given = {id(value) for value in inputs if isinstance(value, torch.Tensor)}
    for optimizer in substitutes.known_optimizers():
        for state in list(optimizer.state.values()):
            for name, value in state.items() if isinstance(state, dict) else ():
                if id(value) in given and not (name == "step" and value.dim() == 0):
                    raise StepError(
                        f"the step reads optimizer.state[...][{name!r}] of "
                        f"{type(optimizer).__name__}, of which every rank keeps its shard alone, "
                        f"flat and as its last update has left it. {REMEDY}"
                    )


def _refuse_looks(optimizer: torch.optim.Optimizer, parameters: Iterable[Any]) -> None:
    if all(parameter in optimizer.state for parameter in parameters):
        return
    if any(owner is optimizer for owner in compat.owners_looked_into("state")):
        raise StepError(
            f"the step looks into the state of {type(optimizer).__name__}, which its own "
            "optimizer.step() is the first to fill: a step is traced before it runs, and has "
            f"seen nothing there. {REMEDY}"
        )
