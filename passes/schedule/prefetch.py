"""Start each gather while the one before it is being used."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, readers
from zerofx.ir.interface import note_decisions, written_input
from zerofx.ir.roles import Role, bucket_of, parameter_of, role
from zerofx.ir.wire_graph import frees_of
from zerofx.passes.base import Counts, PassContext
from zerofx.passes.schedule.start_times import (
    bytes_of,
    chain_of,
    explain_transfers,
    start_behind,
    start_moves_ahead,
    starts_within_budget,
)

aten = torch.ops.aten


def prefetch(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Move the start of each all-gather up, to just after the previous one's wait or further.

    Before::

        a = zerofx.wait(zerofx.all_gather_start(p, 2));  y = mm(x, a)
        b = zerofx.wait(zerofx.all_gather_start(q, 2));  z = mm(y, b)

    After::

        a = zerofx.wait(zerofx.all_gather_start(p, 2));  start = zerofx.all_gather_start(q, 2)
        y = mm(x, a)
        b = zerofx.wait(start);  z = mm(y, b)

    On an accelerator small gathers go ahead together: each starts as soon as those that are not
    waited for take no more bytes than the largest does.  If ``p`` is larger than ``q`` and ``r``
    together, both start behind ``a``, and if all are, all at once.

    What comes from the host for a gather starts one gather earlier still.  With a
    ``memory_budget`` each starts as late as hides it (start_times.py).  At stages 1 and 2, where
    all that is gathered is parameters' new values, each starts behind its update, travels while
    backward goes on, and is written where the next one starts.  Before::

        u = zerofx.update(s, g, 1, 0);  dx = mm(dy, w);  v = zerofx.update(t, h, 1, 1)
        copy_(p, zerofx.wait(zerofx.all_gather_start(u, 2)))
        copy_(q, zerofx.wait(zerofx.all_gather_start(v, 2)))

    After::

        u = zerofx.update(s, g, 1, 0);  start = zerofx.all_gather_start(u, 2)
        dx = mm(dy, w);  v = zerofx.update(t, h, 1, 1)
        a = zerofx.wait(start);  start_1 = zerofx.all_gather_start(v, 2);  copy_(p, a)
        copy_(q, zerofx.wait(start_1))
    """
    waits = [
        node
        for node in gm.graph.nodes
        if ops.is_wait(node)
        and ops.rules(node.args[0]).gathers
        and role(node) not in (Role.GATHER_SHARD, Role.REDUCE_GRADIENT)
    ]
    budget = ctx.options.memory_budget if ctx.options.stage == 3 else None
    if all(map(_is_only_written, waits)):
        moved = _start_behind_updates(waits)
        why = dict.fromkeys(waits, "as soon as it can be")
    else:
        starts = ctx.decided.starts
        if starts is None:
            starts = _starts(gm.graph, ctx, waits, budget)
        note_decisions(gm.graph, starts=starts)
        nodes = {node.name: node for node in gm.graph.nodes}
        ahead = [(nodes[name], behind) for name, (behind, _) in starts.items() if behind]
        start_behind((chain_of(wait), nodes[behind]) for wait, behind in ahead)
        moved = sum(budget is None or wait.prev is not wait.args[0] for wait, _ in ahead)
        why = {nodes[name]: reason for name, (_, reason) in starts.items()}
    if waits and ctx.host_parameters:
        start_moves_ahead(gm.graph, ctx, waits)
    explain_transfers(gm.graph, ctx, {wait.args[0]: reason for wait, reason in why.items()})
    return {"prefetched": moved}


def _starts(
    graph: fx.Graph, ctx: PassContext, waits: list[fx.Node], budget: int | None
) -> dict[str, tuple[str, str]]:
    """Return behind which node each gather starts, none if it stays, and why: all by name."""
    if budget is None:
        # What comes from the host has to arrive before each gather: together, none would hide it.
        if ctx.on_accelerator and not ctx.host_parameters:
            return _bytes_ahead(waits)
        return _one_ahead(waits, ctx.mesh.num_shards)
    if ctx.gathers_overlap:
        return starts_within_budget(graph, ctx, waits, budget)
    return {w.name: ("", "where it is waited for, as it is read only then") for w in waits}


def _one_ahead(waits: list[fx.Node], num_shards: int) -> dict[str, tuple[str, str]]:
    """Return behind which node each gather starts, the arrival of the one before, if it can.

    With one shard nothing is gathered, and what comes from the host is waited for where it
    is used.
    """
    starts = {}
    for previous, wait in itertools.pairwise(waits):
        first = chain_of(wait)[-1]
        anchor = max(previous, *first.all_input_nodes)
        stays = (num_shards == 1 and ops.is_move(first)) or not anchor < first
        starts[wait.name] = "" if stays else anchor.name, "one gather ahead"
    return starts


def _bytes_ahead(waits: list[fx.Node]) -> dict[str, tuple[str, str]]:
    """Return the same where as many start together as take the bytes of the largest of all.

    None starts later than one ahead would have it, but behind the free of what it gathers again,
    and the program holds no more than that and one more of the largest.
    """
    chains = [chain_of(wait) for wait in waits]
    nbytes = list(map(bytes_of, chains))
    most = max(nbytes, default=0)
    starts: dict[str, tuple[str, str]] = {}
    frees: dict[tuple[int, int], list[fx.Node]] = {}  # of the last gather, by what that serves
    at: fx.Node | None = None  # where the one before starts
    first = in_flight = 0
    for index, (wait, chain) in enumerate(zip(waits, chains, strict=True)):
        in_flight += nbytes[index]
        while in_flight > most:
            in_flight -= nbytes[first]
            first += 1
        serves = parameter_of(wait), bucket_of(wait)
        stays = at is None
        if at is not None:
            needed = [*chain[-1].all_input_nodes, *frees.get(serves, ())]
            anchor = max([at, *waits[:first][-1:], *needed])
            stays = not anchor < chain[-1]
            starts[wait.name] = "" if stays else anchor.name, f"with at most {most} bytes ahead"
        at = wait.args[0] if stays else anchor
        frees[serves] = frees_of(wait)
    return starts


def _is_only_written(wait: fx.Node) -> bool:
    """Return whether what is gathered is only copied into inputs, and freed."""
    views = aliases(wait)
    return all(
        reader in views or reader.target is ops.free or written_input(reader)
        for reader in readers(wait)
    )


def _start_behind_updates(waits: list[fx.Node]) -> int:
    """Start each gather once its input is there, and write the one before; return how many."""
    ready = {wait: max(chain_of(wait)[-1].all_input_nodes) for wait in waits}
    started: fx.Node | None = None
    previous: fx.Node | None = None
    for wait in sorted(waits, key=ready.__getitem__):
        here = ready[wait] if started is None else max(ready[wait], started)
        ahead = [] if previous is None else [previous]
        for node in (*ahead, *reversed(chain_of(wait))):
            here.append(node)
            here = node
        started = here
        if previous is not None:
            _write_behind(previous, started)
        previous = wait
    return len(waits)


def _write_behind(wait: fx.Node, anchor: fx.Node) -> None:
    """Move what follows a gather's wait behind ``anchor`` and the last reader of old values."""
    rest = sorted(readers(wait))
    for write in rest:
        if write.target is aten.copy_.default:
            anchor = max([anchor, *_readers_before_writes(write.args[0])])
    for node in rest:
        anchor.append(node)
        anchor = node


def _readers_before_writes(parameter: fx.Node) -> list[fx.Node]:
    """Return the readers of an input before it is written to; a collective reads until its wait."""
    memory = aliases(parameter)
    found = {
        reader
        for reader in readers(parameter)
        if reader.op != "output" and not (written_input(reader) and reader.args[0] in memory)
    }
    waits = {user for reader in found if ops.is_collective(reader) for user in reader.users}
    return [*found, *waits]
