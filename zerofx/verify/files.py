"""The invariants of what is in files: there when it is used, and let go of once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import mutated_inputs, readers
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.offload import changes_files, copies_to_device, is_fetch
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.rules import FILES, TO_HOST
from zerofx.verify.broken import broken


def verify_files(graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]) -> None:
    """Check every rule of what a program reads from files and lets go of there.

    Raises: GraphError.
    """
    _states_are_there_for_updates(graph, table, order)
    _shards_are_there_for_their_users(graph, table, order)
    _values_come_back_from_files(graph)
    _nothing_is_used_that_was_not_asked_for(graph)


def _nothing_is_used_that_was_not_asked_for(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is ops.evict:
            (there, what), fetched = node.args[:2], ops.waits_on(node.args[0]) == FILES
            is_there = fetched and ops.argument(there.args[0], "what") == what
            if what == "value" and changes_files(node):  # written once: as it comes to the host
                is_there = ops.waits_on(there) == TO_HOST
        elif node.target is ops.fetch_start and node.args[0] is not None:
            is_there = node.args[0].target is ops.evict
        else:
            continue
        if not is_there:
            raise broken(node, "is about what nobody has asked for.")


def _reads(graph: fx.Graph, what: str) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """The starts of reads of states or shards, with their waits and what lets go of them."""
    for start in graph.nodes:
        if is_fetch(start, what):
            wait = ops.wait_of(start)
            release = _only_reader(wait, ops.evict, f"{what} that are there")
            for name in ("optimizer", "parameters"):
                if ops.argument(release, name) != ops.argument(start, name):
                    raise broken(release, f"lets go of other {what} than {start.name} reads.")
            yield start, wait, release


def _states_are_there_for_updates(
    graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]
) -> None:
    """States are read and let go once for each group of updates, which run in between.

    They are there in the order in which they are asked for.
    """
    reads = list(_reads(graph, "states"))
    updates = list(filter(ops.updates_on_host, graph.nodes))
    before = -1
    covered: set[fx.Node] = set()
    for start, wait, release in reads:
        optimizer, indices = ops.argument(start, "optimizer"), ops.argument(start, "parameters")
        if not changes_files(release):
            raise broken(release, "lets go of states as if no update had changed them.")
        if order[wait] < before:
            raise broken(wait, "waits for states out of the order in which they are read.")
        before = order[wait]
        inside = {
            update
            for update in updates
            if update.args[2:4] == (optimizer, indices)
            and order[wait] < order[update]
            and order[ops.wait_of(update)] < order[release]
        }
        if len(inside) != 1:
            names = ", ".join(table[index].name for index in indices)
            raise broken(wait, f"is not followed by one update each of {names}, and no others.")
        covered |= inside
    for node in updates:
        if reads and node not in covered:
            raise broken(node, "changes states that may be in files: nobody has read them.")


def _shards_are_there_for_their_users(
    graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]
) -> None:
    """Check that a node that uses a shard in a file has it in memory from start to end."""
    there: dict[int, list[tuple[int, int, bool]]] = {}
    for start, wait, release in _reads(graph, "shards"):
        window = order[wait], order[release], changes_files(release)
        for index in ops.argument(start, "parameters"):
            there.setdefault(index, []).append(window)
    if not there:
        return
    unused = {(index, window) for index, windows in there.items() for window in windows}
    for shard in placeholders(graph, "parameter"):
        if not input_role(shard).on_host:
            continue
        index = input_role(shard).parameter
        for user in readers(shard):
            if not (ops.is_move(user) or ops.updates_on_host(user)):
                continue
            begins, ends = order[user], order[ops.wait_of(user)]
            around = {
                (index, window)
                for window in there.get(index, ())
                if window[0] < begins and ends < window[1]
            }
            name = table[index].name
            if not around:
                raise broken(user, f"is about the shard of {name!r}, which is in a file then.")
            if mutated_inputs(user) and not any(changed for _, (_, _, changed) in around):
                raise broken(user, f"changes the shard of {name!r}, and no file gets to hold that.")
            unused -= around
    for index, (begins, _, _) in sorted(unused):
        wait = next(node for node, position in order.items() if position == begins)
        raise broken(wait, f"has the shard of {table[index].name!r} read, and nobody uses it.")


def _values_come_back_from_files(graph: fx.Graph) -> None:
    """Check that a value in a file comes back once, and is dropped when it is on the device."""
    for filed in graph.nodes:
        if filed.target is not ops.evict or filed.args[1] != "value" or not changes_files(filed):
            continue
        start = _only_reader(filed, ops.fetch_start, "a value in a file")
        there = ops.wait_of(start)
        readers = sorted(there.users)
        drops = [one.target is ops.evict and not changes_files(one) for one in readers]
        if drops != [False, True] or not copies_to_device(readers[0]):
            names = ", ".join(reader.name for reader in readers) or "nobody"
            raise broken(there, f"is to be brought back to the device once and dropped; {names}.")
        reload, drop = readers
        if drop < ops.wait_of(reload):
            raise broken(drop, f"drops what {reload.name} still copies.")


def _only_reader(node: fx.Node, target: object, what: str) -> fx.Node:
    if [user.target for user in node.users] != [target]:
        readers = ", ".join(user.name for user in node.users) or "nobody"
        raise broken(node, f"{what} must have one {target} and no other reader, not {readers}.")
    return next(iter(node.users))
