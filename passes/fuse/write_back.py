"""Let whole parameters be updated and gathered where they lie, bucket by bucket."""

from __future__ import annotations

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliases import aliases, mutated_inputs, readers, shards_in, writers
from zerofx.ir.graph import erase_unused, is_owned
from zerofx.ir.interface import STANDS_FOR, input_role
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.roles import Provenance, Role, bucket_of, parameter_of, role
from zerofx.passes.base import Counts, PassContext


def write_back(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Replace all copies of a gathered bucket into its parameters by one node.

    Before, at stages 1 and 2::

        s = update(take_shard(p, 0, n), g, 1, 0)
        whole = wait(all_gather_start(pack([s, ...], [0, ...], m), 2))
        copy_(p, whole[0:k].view(...));  copy_(q, whole[k:l].view(...))

    After::

        s = update(take_shard(p, 0, n), g, 1, 0)
        whole = wait(all_gather_start(pack([s, ...], [0, ...], m), 2))
        write_back(whole, [p, q], [0, 1])

    If ``p`` is a view of its bucket's flat buffer, ``s`` can be this rank's range of it and
    ``whole`` the buffer itself, and nothing is left to copy.  That writes ``p`` at the update and,
    the other ranks' ranges, from the gather's start on: all readers of its old value must come
    before, and all that is gathered must be parameters that this program updates once.
    """
    waits = gm.graph.find_nodes(op="call_function", target=ops.wait)
    found = {wait: writes for wait in waits if (writes := _writes_of(wait, ctx.table))}
    for wait, writes in found.items():
        _write_together(gm.graph, wait, writes)
    return {"buckets": len(found), "copies": sum(map(len, found.values()))}


def _write_together(graph: fx.Graph, wait: fx.Node, writes: list[fx.Node]) -> None:
    wholes = [write.args[0] for write in writes]
    parameters = [input_role(whole).parameter for whole in wholes]
    with graph.inserting_after(wait):
        call = graph.create_node(
            "call_function", ops.write_back, (wait, wholes, parameters), name="write_back"
        )
    alone = parameters[0] if len(parameters) == 1 else -1
    call.meta = {
        "val": None,
        STANDS_FOR: writes[0].name,
        "zerofx": Provenance(Role.WRITE_BACK, alone, "write_back", bucket_of(wait)),
    }
    for write in writes:
        value = write.args[1]
        graph.erase_node(write)
        erase_unused(graph, [value])


def _writes_of(wait: fx.Node, table: ParameterTable) -> list[fx.Node] | None:
    """The copies of each part of a gathered bucket into its parameter; None if they must stay."""
    start = wait.args[0]
    if start.target is not ops.all_gather_start or list(start.users) != [wait]:
        return None
    packed = ops.gathered_from(wait)
    shards = shards_in(packed).values()
    parameters = [shard.args[3] for shard in shards if shard.target is ops.update]
    if len(parameters) < len(shards) or not _is_whole_bucket(parameters, packed, table):
        return None
    seen = aliases(wait)
    writes = []
    for shard, index in zip(shards, parameters, strict=True):
        write = _only_write(shard, index, seen)
        if write is None:
            return None
        writes.append(write)
    others = readers(wait) - set(writes)
    if any(other.op == "output" or mutated_inputs(other) for other in others):
        return None
    return writes


def _is_whole_bucket(parameters: list[int], packed: fx.Node, table: ParameterTable) -> bool:
    info = table[parameters[0]]
    if not info.shares_bucket:
        return packed.target is not ops.pack
    members = [member.index for member in table.bucket(info.place.bucket)]
    return sorted(parameters) == sorted(members)


def _only_write(update: fx.Node, index: int, gathered: set[fx.Node]) -> fx.Node | None:
    """The copy that ends a parameter's only update; None if its old value is needed later."""
    cut = update.args[0]
    before = {update.args[1].args[0]} if is_owned(update) else set()
    if cut.target is not ops.take_shard or set(cut.users) - before != {update}:
        return None
    parameter = cut.args[0]
    if parameter.op != "placeholder" or input_role(parameter).parameter != index:
        return None
    found = readers(parameter)
    writes = writers(parameter)
    if len(writes) != 1 or "output" in {node.op for node in found}:
        return None
    (write,) = writes
    value = write.args[1]
    if write.users or write.args[0] is not parameter or value not in gathered:
        return None
    if role(value) != Role.WHOLE or parameter_of(value) != index:
        return None
    found -= {write, cut}
    if any(reader.target is ops.take_shard for reader in found):  # taken for a copy
        return None
    return None if any(reader > update for reader in found) else write
