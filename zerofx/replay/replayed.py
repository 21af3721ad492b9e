"""The visible effects of a program on random inputs: its results and what it leaves behind.

Passes may change everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.graph import copied
from zerofx.ir.interface import recorded
from zerofx.passes.base import PassContext
from zerofx.replay.in_process_group import Exchange
from zerofx.replay.random_run import left_behind, optimizers_of, random_inputs
from zerofx.replay.reference import Interpreter, Reference, Updates, Watch
from zerofx.report.read import ProgramFacts
from zerofx.report.text import ProgramText


@dataclass(frozen=True)
class ObservedProgram(ProgramFacts):
    """One rank's program as it was behind a pass.  Its optimizers are by handle."""

    root: fx.GraphModule
    graph: fx.Graph

    @classmethod
    def of(
        cls, gm: fx.GraphModule, ctx: PassContext, optimizers: Mapping[int, Mapping[str, Any]]
    ) -> ObservedProgram:
        """A program as it is now, whatever is made of it later."""
        facts = {**ProgramText(gm, ctx.table).facts(), "OPTIMIZERS": optimizers, "RANK": ctx.rank}
        facts |= {"WORLD_SIZE": ctx.world_size, "STAGE": ctx.options.stage}
        facts |= ctx.mesh.facts
        return cls(facts, gm, copied(gm.graph))

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self.root, self.graph)

    def reduced_to(self, gm: fx.GraphModule) -> ObservedProgram:
        """A part of this program, as one of its own."""
        own = ProgramText(gm, self.table()).facts()
        return ObservedProgram({**self.facts, **own}, gm, gm.graph)

    def run(
        self, exchange: Exchange, watch: Watch | None = None, linear: bool = False
    ) -> dict[str, Any]:
        """Return a run's effects by name: results, gradients, parameters, buffers, inputs.

        ``linear`` updates with plain SGD, whatever the optimizers are.  Collective.
        """
        given: dict[tuple[int, int], list[tuple[Tensor, bool]]] = {}

        def note(optimizer: int, index: int, grad: Tensor, whole: bool) -> None:
            noted = grad.detach().clone(), self.facts["STAGE"] > 0 and not whole
            given.setdefault((optimizer, index), []).append(noted)

        make = optimizers_of(self, sgd=linear, lenient=True)  # the same ones for all programs
        updates = Updates(self.table(), make, note)
        reference = Reference(self.table(), self.mesh, exchange, updates)
        inputs = random_inputs(self, seed=0)
        torch.manual_seed(self.rank)
        with torch.no_grad():
            returned = Interpreter(self.root, self.graph, reference, watch).run(*inputs.values())
            return dict(self._visible(reference, inputs, returned, given))

    def _visible(
        self,
        reference: Reference,
        inputs: Mapping[str, Any],
        returned: Sequence[Any],
        updated: Mapping[tuple[int, int], list[tuple[Tensor, bool]]],
    ) -> Iterator[tuple[str, Any]]:
        """Pairs of name and value; of two of one name, the later one is what is seen.

        ``updated`` has the gradients that updates were given, by optimizer and parameter, and
        whether each was a shard.
        """
        facts = self.facts
        names = list(facts["PARAMETERS"])

        def whole(value: Any, index: int, is_shard: bool, unreduced: str = "") -> Any:
            if value is None:
                return None
            return reference.average(value, index, is_shard, unreduced)

        for name, of in facts["INPUTS"].items():
            if of["kind"] == "gradient":
                index = names.index(of["parameter"])
                is_shard, unreduced = of.get("sharded", False), of.get("unreduced", "")
                value = whole(inputs[name], index, is_shard, unreduced)
                yield f"the gradient of {of['parameter']}", value
            elif of["kind"] == "other" and "shape" in of:
                yield f"input {name}", inputs[name]
        written = recorded(self.graph).written_gradients
        own = dict.fromkeys(written, self.mesh.everywhere)
        unreduced = own | recorded(self.graph).unreduced
        slots = {position: names.index(name) for position, name in facts["GRADIENTS"].items()}
        slots |= written
        others = 0
        for position, value in enumerate(returned):
            if position not in slots:
                yield f"result {others}", value
                others += 1
                continue
            index, is_shard = slots[position], position in facts["SHARDED_RESULTS"]
            value = whole(value, index, is_shard, unreduced.get(position, ""))
            yield f"the gradient of {names[index]}", value
        yield from left_behind(self, reference, inputs).items()
        for (handle, index), gradients in updated.items():
            kind = facts["OPTIMIZERS"][handle]["class"].rpartition(".")[2]
            for number, (value, is_shard) in enumerate(gradients):
                again = f" for the {number + 1}. time" if number else ""
                what = f"the gradient that {kind} is given for {names[index]}{again}"
                yield what, whole(value, index, is_shard)
