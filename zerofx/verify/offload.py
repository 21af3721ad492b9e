"""The invariants of what leaves the device: moves, and updates in host memory."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import is_kept_on_host, memory_of, mutated_inputs, shard_of, uses, writers
from zerofx.ir.interface import input_role
from zerofx.ir.offload import (
    brought_from,
    copies_activation,
    copies_to_device,
    is_staged,
    operands_of_updates,
    slot_of,
    staged_until,
    updated_parameter,
)
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import Role, parameter_of, role
from zerofx.ir.rules import FILES, TO_DEVICE, TO_HOST, UPDATES
from zerofx.verify.broken import broken

aten = torch.ops.aten


def _goes_on(node: fx.Node) -> bool:
    """Return whether a node starts a copy, or an update in host memory."""
    return ops.starts(node) and ops.lane(node) in (TO_HOST, TO_DEVICE, UPDATES)


def verify_offload(graph: fx.Graph, table: ParameterTable) -> None:
    """Check every rule of a program's moves, and of what reads and writes host memory.

    Raises: GraphError.
    """
    _nothing_changes_while_it_moves(graph)
    _staging_buffers_are_free(graph)
    _what_left_comes_back(graph)
    _moves_carry_what_they_say(graph, table)


def _nothing_changes_while_it_moves(graph: fx.Graph) -> None:
    """Check that nothing overwrites the operands of a copy or a started update before its wait.

    An update of shards in host memory may begin to write when its gradients start to move there:
    it waits for these, and for no copy of the shards.
    """
    for start in filter(_goes_on, graph.nodes):
        wait = ops.wait_of(start)
        is_move = ops.is_move(start)
        for piece in start.args[0] if is_move else [*mutated_inputs(start), start.args[1]]:
            for writer in {w for source in memory_of(piece) for w in writers(source)}:
                in_place = is_move and writer.target is ops.update_start_shards
                begins = writer.args[1] if in_place else writer
                if start < writer and begins < wait:
                    what = "copies" if is_move else "reads"
                    raise broken(writer, f"overwrites {piece.name} while {start.name} {what} it.")


def _staging_buffers_are_free(graph: fx.Graph) -> None:
    """A staging buffer is written to again only when all of it has been read."""
    used: dict[int, tuple[fx.Node, fx.Node]] = {}
    for start in graph.nodes:
        if not is_staged(start) or slot_of(start) < 0:
            continue
        slot = slot_of(start)
        if slot in used and not used[slot][1] < start:
            raise broken(
                start, f"writes to staging buffer {slot}, which {used[slot][0].name} still uses."
            )
        used[slot] = start, staged_until(start)


def _what_left_comes_back(graph: fx.Graph) -> None:
    """Check that a value that has left the device is read only after it has come back, once."""
    for start in filter(copies_activation, graph.nodes):
        if len(start.args[0]) != 1:
            raise broken(start, "moves several values as if they were one.")
        if is_staged(start):
            _is_read_before_it_leaves(start)
            continue
        origin = _before_files(start.args[0][0])
        leaves = origin.args[0] if ops.is_wait(origin) else origin
        if not (copies_activation(leaves) and is_staged(leaves)):
            raise broken(start, f"brings back {origin.name}, which has not left the device.")
        (wait,), (left,) = start.users, leaves.args[0]
        if not wait.users:
            raise broken(start, f"brings back {left.name}, and nobody reads it there.")
        if start.args[2] != str(left.meta["val"].device):
            raise broken(start, f"brings {left.name} back to another device.")


def _before_files(there: fx.Node) -> fx.Node:
    """Return the value that a node brought back from a file was; else the node itself."""
    if ops.waits_on(there) == FILES:
        there = there.args[0].args[0] or there
    return there.args[0] if there.target is ops.evict else there


def _is_read_before_it_leaves(start: fx.Node) -> None:
    (wait,) = start.users
    (value,) = start.args[0]
    for source in memory_of(value) - {value}:
        if isinstance(source.meta["val"], torch.Tensor):
            raise broken(start, f"moves a view: {source.name} keeps its memory on the device.")
    if value.op == "placeholder":
        raise broken(start, f"moves {value.name}, which the caller keeps on the device.")
    leaving = [r for r in wait.users if r.target is ops.evict or copies_to_device(r)]
    if len(leaving) != 1 or len(wait.users) != 1:
        readers = ", ".join(reader.name for reader in wait.users) or "nobody"
        raise broken(
            wait, f"is in host memory, to be brought back to the device once; {readers} reads it."
        )
    for reader, alias in uses(value):
        if reader > wait:
            raise broken(reader, f"reads {alias.name}, which has left the device at {wait.name}.")


def _moves_carry_what_they_say(graph: fx.Graph, table: ParameterTable) -> None:
    """Each part is updated once, with its gradient, and comes back."""
    for node in graph.nodes:
        if _goes_on(node) and not copies_activation(node):
            _takes_parts_of_a_bucket(node, table)
        if (index := updated_parameter(node)) is not None:
            is_alone = node.target is ops.update
            value = node.args[0] if is_alone else node.args[0].args[0][node.args[1]]
            if brought_from(value) is not None:
                _is_stored(node, value, index, table)
        if node.op == "placeholder" and input_role(node).on_host:
            _is_read_where_it_is(node)
        is_store = node.target is aten.copy_.default and role(node) == Role.STORE
        if is_store and shard_of(node.args[0]) != parameter_of(node.args[1]):
            raise broken(node, f"stores {node.args[1].name}, which is of another parameter.")


def _takes_parts_of_a_bucket(start: fx.Node, table: ParameterTable) -> None:
    """Check a copy or update of a bucket's parts: in its order, from and to where they belong."""
    indices = ops.argument(start, "parameters")
    infos = [table[index] for index in indices]
    offsets = [info.place.offset for info in infos]
    if len({info.place.bucket for info in infos}) > 1:
        raise broken(start, "is not of parts of one bucket.")
    if offsets != sorted(offsets) or len(set(indices)) != len(indices):
        raise broken(start, "does not take a bucket's parts in the order of the bucket.")
    if is_staged(start):
        if len(start.args[0]) != len(indices):
            raise broken(start, "does not move one part for each parameter.")
        _host_memory_is_for_updates(start)
    if copies_to_device(start):
        _pieces_are_read_where_they_lie(start, infos)
        if any(map(is_kept_on_host, start.args[0])):
            _brings_what_it_says(start, infos)
        else:
            _is_return_of_an_update(start, table)
    if start.target is ops.copy_start_shards:
        _stores_what_it_says(start, infos)
    if ops.updates_on_host(start):
        _is_update_of_what_has_arrived(start, table)


def _is_return_of_an_update(move: fx.Node, table: ParameterTable) -> None:
    for piece in move.args[0]:
        start = piece.args[0] if ops.waits_on(piece) == UPDATES else None
        if len(move.args[0]) > 1 or start is None or start.args[3] != move.args[1]:
            names = ", ".join(table[index].name for index in move.args[1])
            raise broken(move, f"moves {piece.name} as if it were the update of {names}.")


def _pieces_are_read_where_they_lie(start: fx.Node, infos: list[ParameterInfo]) -> None:
    """Of what has arrived, each parameter's range is read, and nothing else."""
    (wait,) = start.users
    stops = itertools.accumulate((info.shard_numel for info in infos), initial=0)
    parts = zip(infos, itertools.pairwise(stops), strict=True)
    ranges = {info.index: (0, *part) for info, part in parts}
    read = set()
    for piece in wait.users:
        index = parameter_of(piece)
        if piece.target is not aten.slice.Tensor or tuple(piece.args[1:]) != ranges.get(index):
            raise broken(piece, f"is not the range of a parameter in what {start.name} moves.")
        read |= {index} if piece.users else set()
    for info in infos:
        if info.index not in read:
            raise broken(start, f"moves what is of {info.name!r}, and nobody reads it there.")


def _stores_what_it_says(start: fx.Node, infos: list[ParameterInfo]) -> None:
    """Each new value goes to its own parameter's shard, and is read as that."""
    values, _, shards = start.args
    if len(shards) != len(infos) or not all(map(is_kept_on_host, shards)):
        raise broken(start, "does not store to shards that are kept in host memory.")
    for value, info, shard in zip(values, infos, shards, strict=True):
        updated = updated_parameter(value)
        if shard_of(shard) != info.index or updated not in (None, info.index):
            raise broken(start, f"stores {value.name} as if it were of {info.name!r}.")
    (wait,) = start.users
    for stored in wait.users:
        if stored.target is not operator.getitem or (
            parameter_of(stored) != infos[stored.args[1]].index
        ):
            raise broken(stored, f"is not the shard that {start.name} stores at that place.")


def _is_stored(update: fx.Node, value: fx.Node, index: int, table: ParameterTable) -> None:
    """Check that the update of a shard brought to the device is stored, once."""
    shard = brought_from(value)
    if shard is None or shard_of(shard) != index:
        raise broken(update, f"updates {table[index].name!r} from the value of another parameter.")
    stores = [user for user in update.users if user.target is ops.copy_start_shards]
    if len(stores) != 1 or len(update.users) != 1:
        raise broken(
            update,
            f"what it makes of {table[index].name!r} is stored in host memory {len(stores)} times "
            f"and read by {len(update.users)}; it must be stored once, and read from there.",
        )


def _is_read_where_it_is(shard: fx.Node) -> None:
    """Check that only copies and host updates read a shard that is kept on the host."""
    for reader, alias in uses(shard):
        on_host = reader.target in (ops.update_start_shards, ops.wait_shards, operator.getitem)
        stores = reader.target is ops.copy_start_shards and alias not in reader.args[0]
        if not (on_host or stores or copies_to_device(reader) or reader.op == "output"):
            raise broken(reader, f"reads {alias.name}, which is in host memory.")


def _host_memory_is_for_updates(start: fx.Node) -> None:
    for reader, alias in uses(start):
        if not _goes_on(reader.args[0] if ops.is_wait(reader) else reader):
            raise broken(reader, f"reads {alias.name}, which is in host memory.")


def _is_update_of_what_has_arrived(update: fx.Node, table: ParameterTable) -> None:
    """Check that an update reads what was moved for it, and its result is moved back, once.

    Of shards that are kept on the host, neither the values are moved nor what they become.
    """
    indices = update.args[3]
    is_kept = update.target is ops.update_start_shards
    moved = update.args[1:2] if is_kept else update.args[:2]
    for operand in moved:
        if not is_staged(operand) or copies_activation(operand):
            raise broken(update, f"reads {operand.name}, which is not moved to the host.")
        if list(operand.args[1]) != list(indices):
            raise broken(update, f"reads {operand.name}, which is of another parameter.")
    if is_kept and len(update.args[0]) != len(indices):
        raise broken(update, "does not update one shard for each parameter.")
    for operands in operands_of_updates(update):
        name = table[operands.parameter].name
        if is_kept and not is_kept_on_host(operands.value):
            raise broken(update, f"updates {name!r} on the host, and its shard is not kept there.")
        is_a_shard = operands.value.op == "placeholder" or role(operands.value) is not None
        if is_a_shard and shard_of(operands.value) not in (operands.parameter, -1):
            raise broken(update, f"updates {name!r} from the value of another parameter.")
    wait = ops.wait_of(update)
    if any(ops.wait_of(operand) > wait for operand in moved):
        raise broken(update, "is waited for before what it reads.")
    if not is_kept and (len(wait.users) != 1 or not all(map(copies_to_device, wait.users))):
        raise broken(update, f"what it makes is moved back {len(wait.users)} times, not once.")


def _brings_what_it_says(start: fx.Node, infos: list[ParameterInfo]) -> None:
    """Check that a move to the device takes the shards of the parameters that it names."""
    for piece, info in zip(start.args[0], infos, strict=True):
        if not is_kept_on_host(piece) or shard_of(piece) != info.index:
            raise broken(start, f"moves {piece.name} as if it were the shard of {info.name!r}.")
