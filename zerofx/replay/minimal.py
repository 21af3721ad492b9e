"""The least part of two programs that differs: from values that are alike to the first that is not.

Source of the idea: Weiser 1981, "Program Slicing".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, memory_of, mutated_inputs
from zerofx.ir.graph import copied
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.replay.in_process_group import in_turns
from zerofx.replay.replayed import ObservedProgram

logger = logging.getLogger("zerofx")

Same = Callable[[Any, Any], bool]
Programs = Sequence[ObservedProgram]
"""One program of all ranks, by rank."""


def compare_by_name(
    before: Programs, after: Programs, rank: int, same: Same
) -> tuple[fx.Node | None, dict[str, bool]]:
    """Run both programs of all ranks, and compare nodes of one name.

    Return this rank's first node that computes something else than its namesake before, and, by
    name, those that compute the same on every rank: True if all ranks also agree with each other.
    """
    results: list[dict[str, torch.Tensor]] = [{} for _ in before]
    alike: list[set[str]] = [set() for _ in before]
    first: list[fx.Node] = []

    def note(of: int, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor) and node.op == "call_function":
            results[of][node.name] = result.detach().clone()

    def compare(of: int, node: fx.Node, result: Any) -> None:
        known = results[of].get(node.name)
        if known is None or not isinstance(result, torch.Tensor):
            return
        if (known.shape, known.dtype) != (result.shape, result.dtype):
            return
        if bitwise(known, result):
            alike[of].add(node.name)
        elif of == rank and not first and not same(known, result):
            first.append(node)

    for programs, watch in ((before, note), (after, compare)):
        in_turns([partial(one.run, watch=partial(watch, of)) for of, one in enumerate(programs)])
    given = {
        name: all(bitwise(results[0][name], ranks[name]) for ranks in results)
        for name in set.intersection(*alike)
    }
    return first[0] if first else None, given


def minimal(
    before: Programs, after: Programs, first: fx.Node, given: Mapping[str, bool], same: Same
) -> tuple[Programs, Programs] | None:
    """The least part of both programs, by rank, that still differs; None if no part does.

    ``first`` and ``given`` are what ``compare_by_name`` has found.
    """
    for inputs in (given, {}):
        try:
            parts = [
                [one.reduced_to(cut_out(one.module(), first.name, inputs)) for one in programs]
                for programs in (before, after)
            ]
            seen = [in_turns([one.run for one in programs]) for programs in parts]
        except Exception as error:  # a part need not run: the caller has the whole
            logger.debug("no part of the programs with %d inputs runs: %s", len(inputs), error)
            continue
        pairs = zip(*seen, strict=True)
        if any(not same(one.get(w), two.get(w)) for one, two in pairs for w in {**one, **two}):
            return parts[0], parts[1]
    return None


def bitwise(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bits."""
    if one.shape != other.shape:
        return False
    data = [value.detach().contiguous().view(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*data)


def cut_out(gm: fx.GraphModule, target: str, given: Mapping[str, bool]) -> fx.GraphModule:
    """Return the least part of a program that computes the node ``target``, and returns it.

    Nodes named in ``given`` become inputs, the same on all ranks where it says so; nodes whose
    memory is written to do not, for more than their value counts.
    """
    graph = copied(gm.graph)
    nodes = {node.name: node for node in graph.nodes}
    end = nodes[target]
    changed = {node: _changed_by(node) for node in graph.nodes}
    inputs = {nodes[name] for name in given if name != target}.difference(*changed.values())
    needed = {end}
    order = list(graph.nodes)
    for node in reversed(order[: order.index(end) + 1]):
        if node in needed or not needed.isdisjoint(changed[node]):
            needed.add(node)
            if node not in inputs:
                needed.update(node.all_input_nodes)
    least, kept = fx.Graph(), {}
    for node in filter(needed.__contains__, order):  # inputs come first
        if node.op == "placeholder":
            kept[node] = least.node_copy(node)
        elif node in inputs:
            kept[node] = least.placeholder(node.name)
            kept[node].meta = {"val": node.meta["val"]}
            set_input_role(kept[node], InputRole("buffer" if given[node.name] else "other"))
    for node in order:
        if node in needed and node not in kept:
            kept[node] = least.node_copy(node, lambda source: kept[source])
    least.output((kept[end],))
    return fx.GraphModule(gm, least)


def _changed_by(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose memory a node writes to or gives up."""
    operands = node.all_input_nodes if ops.gives_up(node) else mutated_inputs(node)
    roots = {root for operand in operands for root in memory_of(operand)}
    return set().union(*map(aliases, roots))
