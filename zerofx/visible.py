"""What a program leaves that others can see: results, gradients, parameters, buffers, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.dumped import DumpedProgram
from zerofx.dumped_run import left_behind
from zerofx.graph import placeholders, unreduced_results, writers
from zerofx.reference import Reference


@dataclass(frozen=True)
class Visible:
    """One thing that a program leaves: ``result`` 0 as the step counts them, ``parameter`` w.

    Of a ``state``, ``name`` is the parameter that ``optimizer`` keeps it for.
    """

    kind: str
    name: str
    state: str = ""
    optimizer: int = -1

    def __str__(self) -> str:
        if self.kind == "gradient":
            return f"the gradient of {self.name}"
        if self.kind == "state":
            return f"{self.state} of {self.name}, kept by optimizer {self.optimizer}"
        return f"{self.kind} {self.name}"


def visible(
    facts: DumpedProgram,
    gm: fx.GraphModule,
    reference: Reference,
    inputs: Mapping[str, Any],
    returned: Sequence[Any],
) -> Iterator[tuple[Visible, Any]]:
    """What a run has left, tensors whole and gradients averaged.  Collective."""
    indices = {name: index for index, name in enumerate(facts.facts["PARAMETERS"])}
    unreduced = set(unreduced_results(gm.graph))
    for position, one in _results(facts, len(returned)):
        value = returned[position]
        if one.kind == "gradient" and value is not None:
            if position in facts.facts["SHARDED_RESULTS"]:
                value = reference.whole(value, indices[one.name])
            if position in unreduced:
                value = torch.stack(list(reference.exchange(value))).mean(0)
        yield one, value
    for name, value in left_behind(facts, reference, inputs).items():
        kind, _, of = name.partition(" ")
        yield Visible(kind, of), value
    # Updates may hide what is wrong with gradients: Adam's first has the size of none.
    for (optimizer, parameter, state), value in reference.states().items():
        yield Visible("state", parameter, state, optimizer), value


def sources(facts: DumpedProgram, gm: fx.GraphModule, one: Visible) -> list[fx.Node]:
    """The nodes that make something visible: it is their result, or they write to it."""
    results = gm.graph.output_node().args[0]
    for position, result in _results(facts, len(results)):
        if result == one:
            return [results[position]] if isinstance(results[position], fx.Node) else []
    found: list[fx.Node] = []
    inputs = facts.facts["INPUTS"].items()
    for node, (name, of) in zip(placeholders(gm.graph), inputs, strict=True):
        is_it = of["kind"] == "buffer" and (one.kind, one.name) == ("buffer", name)
        if is_it or (of["kind"] == "parameter" and of["parameter"] == one.name):
            found += writers(node)
    return found


def _results(facts: DumpedProgram, count: int) -> Iterator[tuple[int, Visible]]:
    """What each returned value is, by its position."""
    others = 0
    for position in range(count):
        of = facts.facts["GRADIENTS"].get(position)
        if of is None:
            yield position, Visible("result", str(others))
            others += 1
        else:
            yield position, Visible("gradient", of)
