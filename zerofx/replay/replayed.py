"""The visible effects of a program on random inputs: its results and what it leaves behind.

Passes may change everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from zerofx.errors import CommandError
from zerofx.ir import ops
from zerofx.ir.graph import copied
from zerofx.ir.interface import unreduced_results, written_gradients
from zerofx.passes.base import PassContext
from zerofx.replay.in_process_group import Exchange
from zerofx.replay.random_run import left_behind, random_inputs
from zerofx.replay.reference import Reference, Updates, worked_on
from zerofx.report.optimizers import rebuild
from zerofx.report.read import DumpedProgram
from zerofx.report.text import program_facts

Watch = Callable[[fx.Node, Any], None]


@dataclass(frozen=True)
class ObservedProgram:
    """One rank's program as it was behind a pass.

    ``averaged`` are inputs, by name, that are the mean of the ranks' own: what a gradient that
    ``accumulate="local"`` has left unreduced means where nothing has been said of ranks yet.
    """

    root: fx.GraphModule
    graph: fx.Graph
    facts: DumpedProgram
    optimizers: Mapping[int, Mapping[str, Any]]
    averaged: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        gm: fx.GraphModule,
        ctx: PassContext,
        optimizers: Mapping[int, Mapping[str, Any]],
    ) -> ObservedProgram:
        """A program as it is now, whatever is made of it later."""
        facts = program_facts(gm, ctx.table)
        facts |= {"RANK": ctx.rank, "WORLD_SIZE": ctx.world_size, "STAGE": ctx.options.stage}
        described = DumpedProgram(Path(), torch.__version__, "", facts, "", ())
        return cls(gm, copied(gm.graph), described, optimizers)

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self.root, self.graph)

    def reduced_to(self, gm: fx.GraphModule) -> ObservedProgram:
        """A part of this program, as one of its own."""
        facts = program_facts(gm, self.facts.table())
        facts |= {name: self.facts.facts[name] for name in ("RANK", "WORLD_SIZE", "STAGE")}
        averaged = self.averaged & facts["INPUTS"].keys()
        described = replace(self.facts, facts=facts)
        return ObservedProgram(gm, gm.graph, described, self.optimizers, averaged)

    def unreduced(self) -> frozenset[str]:
        """The inputs, by name, that are this rank's own gradients."""
        inputs = self.facts.facts["INPUTS"].items()
        return frozenset(name for name, of in inputs if of.get("unreduced"))

    def run(
        self, exchange: Exchange, watch: Watch | None = None, linear: bool = False
    ) -> dict[str, Any]:
        """Return a run's effects by name: results, gradients, parameters, buffers, inputs.

        ``linear`` updates with plain SGD, whatever the optimizers are.  Collective.
        """
        table = self.facts.table()

        def optimizer(handle: int, stand_ins: list[nn.Parameter]) -> torch.optim.Optimizer:
            names = {info.name: one for info, one in zip(table, stand_ins, strict=True)}
            try:
                if not linear:
                    return rebuild(self.optimizers[handle], names)
            except CommandError:  # all programs are compared with the same one
                pass
            return torch.optim.SGD(stand_ins, lr=0.01)

        reference = Reference(table, self.facts.rank, exchange, Updates(table, optimizer))
        inputs = self._inputs(reference)
        torch.manual_seed(self.facts.rank)
        with torch.no_grad():
            run = _Run(self, reference, watch)
            returned = run.run(*inputs.values())
            return dict(self._visible(reference, inputs, returned, run.given))

    def _inputs(self, reference: Reference) -> dict[str, Any]:
        facts = dict(self.facts.facts)
        own = {name: {**facts["INPUTS"][name], "unreduced": True} for name in self.averaged}
        facts["INPUTS"] = {**facts["INPUTS"], **own}
        program = DumpedProgram(Path(), torch.__version__, "", facts, "", ())
        inputs = random_inputs(program, reference.table, seed=0)
        for name in sorted(self.averaged):
            inputs[name] = reference.gradient(inputs[name], 0)
        return inputs

    def _visible(
        self,
        reference: Reference,
        inputs: Mapping[str, Any],
        returned: Sequence[Any],
        given: Mapping[tuple[int, int], list[tuple[torch.Tensor, bool]]],
    ) -> Iterator[tuple[str, Any]]:
        """Pairs of name and value; of two of one name, the later one is what is seen."""
        facts = self.facts.facts
        names = list(facts["PARAMETERS"])

        def whole(value: Any, index: int, is_shard: bool, is_own: bool) -> Any:
            if value is None or not (is_shard or is_own):
                return value
            return reference.whole(value, index) if is_shard else reference.gradient(value, index)

        for name, of in facts["INPUTS"].items():
            if of["kind"] == "gradient":
                index = names.index(of["parameter"])
                is_shard, is_own = of.get("sharded", False), of.get("unreduced", False)
                value = whole(inputs[name], index, is_shard, is_own)
                yield f"the gradient of {of['parameter']}", value
            elif of["kind"] == "other" and "shape" in of:
                yield f"input {name}", inputs[name]
        written = written_gradients(self.graph)
        unreduced = {*unreduced_results(self.graph), *written}
        slots = {position: names.index(name) for position, name in facts["GRADIENTS"].items()}
        slots |= written
        others = 0
        for position, value in enumerate(returned):
            if position not in slots:
                yield f"result {others}", value
                others += 1
                continue
            index, is_shard = slots[position], position in facts["SHARDED_RESULTS"]
            value = whole(value, index, is_shard, position in unreduced)
            yield f"the gradient of {names[index]}", value
        yield from left_behind(self.facts, reference, inputs).items()
        for (handle, index), gradients in given.items():
            kind = self.optimizers[handle]["class"].rpartition(".")[2]
            for number, (value, is_shard) in enumerate(gradients):
                again = f" for the {number + 1}. time" if number else ""
                what = f"the gradient that {kind} is given for {names[index]}{again}"
                yield what, whole(value, index, is_shard, False)


class _Run(fx.Interpreter):
    """Runs a program with the reference's kernels, and shows who ``watch`` is each result.

    ``given`` are the gradients that updates were given, by optimizer and parameter, each with
    whether it was a shard.
    """

    def __init__(self, program: ObservedProgram, reference: Reference, watch: Watch | None) -> None:
        super().__init__(program.root, graph=program.graph)
        self.reference, self.watch = reference, watch
        self.is_sharded = program.facts.facts["STAGE"] > 0
        self.given: dict[tuple[int, int], list[tuple[torch.Tensor, bool]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if ops.is_ours(target):
            self._note_given(target, args, kwargs)
            schema = target._schema
            names = (argument.name for argument in schema.arguments)
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            target = getattr(self.reference, schema.name.split("::")[1])
        return super().call_function(target, args, kwargs)

    def _note_given(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if target in (ops.optimizer_step, ops.on_owners):
            position = 4 if target is ops.optimizer_step else 3
            gradients, optimizer, indices = args[1], args[2], args[position]
            is_shard = target is ops.on_owners
        elif target is ops.update:
            gradients, optimizer, indices = [args[1]], args[2], [args[3]]
            if self.reference.is_updated_whole(optimizer, args[3]):
                return
            is_shard = self.is_sharded
        elif target is ops.update_together:
            optimizer, indices, is_shard = args[2], args[3], True
            work, coefficients = kwargs.get("work", ""), kwargs.get("coefficients", ())
            gradients = worked_on(args[1], work, coefficients)
            if any(self.reference.is_updated_whole(optimizer, index) for index in indices):
                return  # what only goes on with what owners have computed
        elif target in (ops.update_start, ops.update_start_shards):
            optimizer, indices, is_shard = args[2], args[3], True
            gradients = args[1].split([self.reference.table[i].shard_numel for i in indices])
        else:
            return
        for index, gradient in zip(indices, gradients, strict=True):
            of_update = self.given.setdefault((optimizer, index), [])
            of_update.append((gradient.detach().clone(), is_shard))

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if self.watch is not None:
            self.watch(node, result)
        return result
