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


def verify_files(graph: fx.Graph, table: ParameterTable) -> None:
    """Check every rule of what a program reads from files and lets go of there.

    Raises: GraphError.
    """
    _what_is_used_is_there(graph, table, "states")
    _what_is_used_is_there(graph, table, "shards")
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


Held = tuple[int | None, tuple[int, ...]]
"""Of which optimizer states are, None for shards; and of which parameters."""


def _reads(graph: fx.Graph, what: str) -> Iterator[tuple[Held, fx.Node, fx.Node]]:
    """What is read of states or shards, with the wait for it and what lets go of it."""
    for start in graph.nodes:
        if is_fetch(start, what):
            wait = ops.wait_of(start)
            release = _only_reader(wait, ops.evict, f"{what} that are there")
            read, let_go = (
                (ops.argument(node, "optimizer"), tuple(ops.argument(node, "parameters")))
                for node in (start, release)
            )
            if let_go != read:
                raise broken(release, f"lets go of other {what} than {start.name} reads.")
            yield read, wait, release


def _users(graph: fx.Graph, what: str) -> Iterator[tuple[Held, fx.Node]]:
    """What uses states or shards in host memory, from its start to its wait."""
    if what == "states":
        updates = filter(ops.updates_on_host, graph.nodes)
        yield from (((update.args[2], tuple(update.args[3])), update) for update in updates)
        return
    for shard in placeholders(graph, "parameter"):
        if input_role(shard).on_host:
            for user in readers(shard):
                if ops.is_move(user) or ops.updates_on_host(user):
                    yield (None, (input_role(shard).parameter,)), user


def _what_is_used_is_there(graph: fx.Graph, table: ParameterTable, what: str) -> None:
    """Check that who uses states or shards has them in memory, and that files get what it changes.

    They are there in the order in which they are asked for, and for somebody.
    """
    there: dict[Held, list[tuple[fx.Node, fx.Node]]] = {}
    last = None
    for (optimizer, parameters), wait, release in _reads(graph, what):
        if last is not None and wait < last:
            raise broken(wait, f"waits for {what} out of the order in which they are read.")
        last = wait
        parts = [parameters] if what == "states" else [(one,) for one in parameters]
        for part in parts:
            there.setdefault((optimizer, part), []).append((wait, release))
    unused = {(wait, held) for held, windows in there.items() for wait, _ in windows}
    for held, user in _users(graph, what) if there else ():
        around = [
            (wait, release)
            for wait, release in there.get(held, ())
            if wait < user and ops.wait_of(user) < release
        ]
        if not around:
            raise broken(user, f"is about {what} of {_names(held, table)} that are in files then.")
        if mutated_inputs(user) and not any(changes_files(release) for _, release in around):
            names = _names(held, table)
            raise broken(user, f"changes {what} of {names}, and no file gets to hold that.")
        unused -= {(wait, held) for wait, _ in around}
    for wait, held in sorted(unused):
        raise broken(wait, f"has {what} of {_names(held, table)} read, and nobody uses them.")


def _names(held: Held, table: ParameterTable) -> str:
    return ", ".join(repr(table[index].name) for index in held[1])


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
