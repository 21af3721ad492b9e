"""Which buckets of whole parameters can be updated and gathered where the parameters lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, mutated_inputs
from zerofx.ir.graph import is_owned, program_order
from zerofx.ir.interface import input_role
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Role, parameter_of, role


@dataclass(frozen=True)
class WholeBucket:
    """The end of one bucket's step at stages 1 and 2, all of whose copies may be left out.

    ``wait`` is the gather of its updated shards, ``writes`` copy each parameter's part of it
    into the parameter.  ``parameters`` are those of the bucket, in the order of ``writes``.
    """

    wait: fx.Node
    writes: tuple[fx.Node, ...]
    parameters: tuple[int, ...]


def buckets_updated_in_place(graph: fx.Graph, table: ParameterTable) -> list[WholeBucket]:
    """Find the buckets whose parameters may be written before the program's copies say so::

        s = zerofx.update(zerofx.take_shard(p, 0, n), g, 1, 0)
        whole = zerofx.wait(zerofx.all_gather_start(zerofx.pack([s, ...], [0, ...], m), 2))
        copy_(p, whole[0:k].view(...))

    If ``p`` is a view of a bucket's flat buffer, ``s`` can be this rank's range of it and
    ``whole`` the buffer itself.  That writes ``p`` at the update and, the other ranks' ranges,
    from the gather's start on: all readers of its old value must come before, and all that is
    gathered must be parameters that this program updates once.
    """
    order = program_order(graph)
    found = (_bucket_of(node, table, order) for node in graph.nodes if node.target is ops.wait)
    return [bucket for bucket in found if bucket is not None]


def _bucket_of(
    wait: fx.Node, table: ParameterTable, order: dict[fx.Node, int]
) -> WholeBucket | None:
    start = wait.args[0]
    if start.target is not ops.all_gather_start or list(start.users) != [wait]:
        return None
    packed = start.args[0]
    shards = packed.args[0] if packed.target is ops.pack else [packed]
    parameters = [shard.args[3] for shard in shards if shard.target is ops.update]
    if len(parameters) < len(shards) or not _is_whole_bucket(parameters, packed, table):
        return None
    seen = aliases(wait)
    writes = []
    for shard, index in zip(shards, parameters, strict=True):
        write = _only_write(shard, index, seen, order)
        if write is None:
            return None
        writes.append(write)
    readers = {user for alias in seen for user in alias.users} - set(writes)
    if any(reader.op == "output" or mutated_inputs(reader) for reader in readers):
        return None
    return WholeBucket(wait, tuple(writes), tuple(parameters))


def _is_whole_bucket(parameters: list[int], packed: fx.Node, table: ParameterTable) -> bool:
    info = table[parameters[0]]
    if not info.shares_bucket:
        return packed.target is not ops.pack
    members = [member.index for member in table.bucket(info.place.bucket)]
    return sorted(parameters) == sorted(members)


def _only_write(
    update: fx.Node, index: int, gathered: set[fx.Node], order: dict[fx.Node, int]
) -> fx.Node | None:
    """The copy that ends a parameter's only update; None if its old value is needed later."""
    cut = update.args[0]
    before = {update.args[1].args[0]} if is_owned(update) else set()
    if cut.target is not ops.take_shard or set(cut.users) - before != {update}:
        return None
    parameter = cut.args[0]
    if parameter.op != "placeholder" or input_role(parameter).parameter != index:
        return None
    lookers = aliases(parameter)
    readers = {user for alias in lookers for user in alias.users}
    writes = [node for node in readers if set(mutated_inputs(node)) & lookers]
    if len(writes) != 1 or writes[0].users or "output" in {node.op for node in readers}:
        return None
    (write,) = writes
    value = write.args[1]
    if write.args[0] is not parameter or value not in gathered:
        return None
    if role(value) != Role.WHOLE or parameter_of(value) != index:
        return None
    readers -= {write, cut}
    if any(reader.target is ops.take_shard for reader in readers):  # taken for a copy
        return None
    if any(order[reader] > order[update] for reader in readers):
        return None
    return write
