"""The invariants of what is in files: there when it is used, and let go of once."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.graph import aliases, input_role, placeholders
from zerofx.ir.parameters import ParameterTable
from zerofx.verify.broken import broken


def verify_files(graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]) -> None:
    """Check every rule of what a program reads from files and lets go of there.

    Raises: GraphError.
    """
    _states_are_there_for_updates(graph, table, order)
    _shards_are_there_for_their_users(graph, table, order)
    _values_come_back_from_files(graph)
    _nothing_is_used_that_was_not_asked_for(graph)


_ASKED_BY = {
    ops.wait_file: ops.FROM_FILE,
    ops.states_to_file: (ops.wait_file,),
    ops.shards_to_file: (ops.wait_file,),
    ops.value_to_file: (ops.wait_move,),
    ops.value_from_file_start: (ops.value_to_file,),
    ops.drop_value: (ops.wait_file,),
}


def _nothing_is_used_that_was_not_asked_for(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _ASKED_BY and node.args[0].target not in _ASKED_BY[node.target]:
            raise broken(node, "is about what nobody has asked for.")


def _states_are_there_for_updates(
    graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]
) -> None:
    """States are read and let go once for each group of updates, which run in between.

    They are there in the order in which they are asked for.
    """
    starts = [node for node in graph.nodes if node.target is ops.states_from_file_start]
    updates = [node for node in graph.nodes if node.target in ops.HOST_UPDATES]
    before = -1
    covered: set[fx.Node] = set()
    for start in starts:
        wait = _only_reader(start, ops.wait_file, "states that are read")
        release = _only_reader(wait, ops.states_to_file, "states that are there")
        optimizer, indices = start.args[:2]
        if list(release.args[1:]) != [optimizer, indices]:
            raise broken(release, f"lets go of other states than {start.name} reads.")
        if order[wait] < before:
            raise broken(wait, "waits for states out of the order in which they are read.")
        before = order[wait]
        inside = {
            update
            for update in updates
            if update.args[2:4] == (optimizer, indices)
            and order[wait] < order[update]
            and order[_end_of(update)] < order[release]
        }
        if len(inside) != 1:
            names = ", ".join(table[index].name for index in indices)
            raise broken(wait, f"is not followed by one update each of {names}, and no others.")
        covered |= inside
    for node in graph.nodes:
        if starts and node.target in ops.HOST_UPDATES and node not in covered:
            raise broken(node, "changes states that may be in files: nobody has read them.")


def _shards_are_there_for_their_users(
    graph: fx.Graph, table: ParameterTable, order: dict[fx.Node, int]
) -> None:
    """Who is about a shard that is in a file has it there, from its start to its end."""
    there: dict[int, list[tuple[int, int, bool]]] = {}
    for start in graph.nodes:
        if start.target is not ops.shards_from_file_start:
            continue
        wait = _only_reader(start, ops.wait_file, "shards that are read")
        release = _only_reader(wait, ops.shards_to_file, "shards that are there")
        (indices, _), (_, let_go, changed) = start.args, release.args
        if list(indices) != list(let_go):
            raise broken(release, f"lets go of other shards than {start.name} reads.")
        for index in indices:
            there.setdefault(index, []).append((order[wait], order[release], changed))
    if not there:
        return
    unused = {(index, window) for index, windows in there.items() for window in windows}
    for shard in placeholders(graph, "parameter"):
        if not input_role(shard).on_host:
            continue
        index = input_role(shard).parameter
        for user in {user for alias in aliases(shard) for user in alias.users}:
            if user.target not in (*ops.MOVES, *ops.HOST_UPDATES):
                continue
            begins, ends = order[user], order[_end_of(user)]
            around = {
                (index, window)
                for window in there.get(index, ())
                if window[0] < begins and ends < window[1]
            }
            name = table[index].name
            if not around:
                raise broken(user, f"is about the shard of {name!r}, which is in a file then.")
            writes = user.target in (ops.store_start, *ops.HOST_UPDATES)
            if writes and not any(changed for _, (_, _, changed) in around):
                raise broken(user, f"changes the shard of {name!r}, and no file gets to hold that.")
            unused -= around
    for index, (begins, _, _) in sorted(unused):
        wait = next(node for node, position in order.items() if position == begins)
        raise broken(wait, f"has the shard of {table[index].name!r} read, and nobody uses it.")


def _values_come_back_from_files(graph: fx.Graph) -> None:
    """What has left for a file comes back once, and is dropped when it is on the device."""
    for filed in graph.nodes:
        if filed.target is not ops.value_to_file:
            continue
        start = _only_reader(filed, ops.value_from_file_start, "a value in a file")
        there = _only_reader(start, ops.wait_file, "a value that is read")
        readers = sorted(there.users)
        if [reader.target for reader in readers] != [ops.reload_start, ops.drop_value]:
            names = ", ".join(reader.name for reader in readers) or "nobody"
            raise broken(there, f"is to be brought back to the device once and dropped; {names}.")
        reload, drop = readers
        if drop < _end_of(reload):
            raise broken(drop, f"drops what {reload.name} still copies.")


def _end_of(start: fx.Node) -> fx.Node:
    """The wait of what goes on beside the step."""
    return next(user for user in start.users if user.target in ops.WAITS)


def _only_reader(node: fx.Node, target: object, what: str) -> fx.Node:
    if [user.target for user in node.users] != [target]:
        readers = ", ".join(user.name for user in node.users) or "nobody"
        raise broken(node, f"{what} must have one {target} and no other reader, not {readers}.")
    return next(iter(node.users))
