"""The invariants of a program, checked before the first pass and after every one.

A program that breaks one would corrupt training in silence, or hang a cluster.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx import ops
from zerofx.errors import GraphError
from zerofx.graph import (
    aliases,
    brought_from,
    call_text,
    captured_updates,
    gradient_of,
    gradient_outputs,
    input_role,
    is_kept_on_host,
    layout_text,
    memory_of,
    moved_values,
    mutated_inputs,
    operands_of_updates,
    parameter_of,
    placeholders,
    program_order,
    provenance,
    rank_varying,
    role,
    shard_of,
    slot_of,
    source_line,
    staged_until,
    unreduced_results,
    updates,
    writers,
    written_gradients,
)
from zerofx.plan import ParameterInfo, ParameterTable

aten = torch.ops.aten


@dataclass
class CheckedMetadata:
    """What earlier checks have found, as running operators' fakes is the slowest check by far.

    ``made_from`` says which nodes' metadata has been compared, and the identities that it was
    made from; ``computed`` what a call gives for operands of these layouts, as in every layer.
    """

    made_from: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    computed: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)


def verify(
    gm: fx.GraphModule,
    table: ParameterTable,
    facts: Set[str] = frozenset(),
    checked: CheckedMetadata | None = None,
) -> None:
    """Check every rule that holds of a program with these facts.

    ``checked`` is what to remember from call to call.

    Raises: GraphError naming the node, the rule and the user's line.
    """
    order = program_order(gm.graph)
    _starts_are_waited_once(gm.graph)
    _what_is_carried_is_resumed(gm.graph, order)
    _moves_are_waited_once(gm.graph)
    _nothing_changes_while_it_moves(gm.graph, order)
    _staging_buffers_are_free(gm.graph, order)
    _what_left_comes_back(gm.graph, order)
    _moves_carry_what_they_say(gm.graph, table)
    _states_are_there_for_updates(gm.graph, table, order)
    _nothing_reads_freed_memory(gm.graph, order)
    _gathers_are_freed(gm.graph)
    _nothing_reads_what_was_overwritten(gm.graph, order)
    _metadata_is_fresh(gm.graph, checked or CheckedMetadata())
    _sharded_inputs_are_read_as_shards(gm.graph)
    _buckets_hold_what_they_say(gm.graph, table)
    _updates_are_those_captured(gm.graph, table)
    if "averaged_gradients" in facts:
        _updates_read_averaged_gradients(gm.graph, table)
        _stored_gradients_are_what_they_are_called(gm.graph, table)


def _broken(node: fx.Node, rule: str) -> GraphError:
    origin = provenance(node)
    made_by = f", inserted by {origin.inserted_by!r}" if origin else ""
    line = source_line(node)
    return GraphError(
        f"{node.format_node() or node.name}{made_by}: {rule}{' at ' + line if line else ''}"
    )


def _starts_are_waited_once(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in ops.STARTS:
            waits = [user for user in node.users if user.target is ops.wait]
            if [user.target for user in node.users] == [ops.carry]:
                continue  # the next call's to wait for
            if len(waits) != 1 or len(node.users) != 1:
                raise _broken(
                    node,
                    f"a started collective has {len(waits)} waits and {len(node.users)} readers; "
                    "it must have exactly one wait and no other reader.",
                )
        elif node.target is ops.wait and node.args[0].target not in ops.STARTS:
            raise _broken(node, "waits for something that was never started.")


def _what_is_carried_is_resumed(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """What one call leaves in flight the next one takes, and nothing is written to it before."""
    resumed = Counter(map(_of, (n for n in graph.nodes if n.target is ops.resume_gather)))
    carried = Counter(map(_of, (n for n in graph.nodes if n.target is ops.carry)))
    for node in graph.nodes:
        if node.target is ops.carry:
            if node.args[0].target is not ops.all_gather_start:
                raise _broken(node, "carries over what is no gather.")
            _nothing_is_written_later(graph, node, order)
        elif node.target is ops.resume_gather:
            if any(part.op != "placeholder" for part in _gathered_shards(node)):
                raise _broken(node, "resumes a gather of what only this call computes.")
        else:
            continue
        if list(map(shard_of, _gathered_shards(node))) != list(node.args[1]):
            raise _broken(node, "does not gather the parameters that it names.")
        if (resumed[_of(node)], carried[_of(node)]) != (1, 1):
            raise _broken(
                node,
                "what a program carries over it must resume, once: it carries this gather "
                f"{carried[_of(node)]} times and resumes it {resumed[_of(node)]} times.",
            )


def _of(node: fx.Node) -> tuple:
    """What a ``carry`` and its ``resume_gather`` have in common."""
    value = (node.args[0] if node.target is ops.carry else node).meta["val"]
    return tuple(node.args[1]), value.dtype, value.shape


def _gathered_shards(node: fx.Node) -> list[fx.Node]:
    """The shards that a gather puts together, or the gather that is carried over."""
    sent = node.args[0].args[0] if node.target is ops.carry else node.args[0]
    if role(sent) == "gather_cast":
        sent = sent.args[0]
    return list(sent.args[0]) if sent.target is ops.pack else [sent]


def _nothing_is_written_later(graph: fx.Graph, carry: fx.Node, order: dict[fx.Node, int]) -> None:
    """What is gathered for the next call is what this one leaves behind."""
    started = order[carry.args[0]]
    for parameter in placeholders(graph, "parameter"):
        if input_role(parameter).parameter not in carry.args[1]:
            continue
        for writer in writers(parameter):
            if order[writer] > started:
                raise _broken(
                    writer, f"overwrites {parameter.name}, which {carry.name} carries over."
                )


_WAITS = {
    ops.to_host_start: ops.wait_move,
    ops.to_device_start: ops.wait_move,
    ops.store_start: ops.wait_store,
    ops.offload_start: ops.wait_move,
    ops.reload_start: ops.wait_move,
    ops.update_on_host_start: ops.wait_update,
    ops.update_kept_start: ops.wait_store,
}
"""What completes each operator that goes on beside the step."""


def _moves_are_waited_once(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _WAITS:
            readers = sorted(node.users)
            updates = [reader for reader in readers if reader.target in ops.HOST_UPDATES]
            waits = [reader.target for reader in readers if reader not in updates]
            # What goes to the host is there for one update, which begins when it has arrived.
            is_read = len(updates) == 1 if node.target is ops.to_host_start else not updates
            if waits != [_WAITS[node.target]] or not is_read:
                names = ", ".join(reader.name for reader in readers) or "nobody"
                what = "move" if ops.is_move(node.target) else "update"
                raise _broken(
                    node,
                    f"a started {what} must have one wait and no other reader, but for the update "
                    f"of what goes to the host; it has {names}.",
                )
        elif node.target in _WAITS.values():
            if _WAITS.get(node.args[0].target) is not node.target:
                raise _broken(node, "waits for something that was never started.")


def _nothing_changes_while_it_moves(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """What a move copies, and a started update reads, nobody overwrites before its wait."""
    for start in graph.nodes:
        if start.target not in _WAITS:
            continue
        wait = _wait_of(start)
        is_move = ops.is_move(start.target)
        pieces = moved_values(start) if is_move else start.args[:2]
        if start.target is ops.update_kept_start:
            pieces = [*start.args[0], start.args[1]]
        for piece in pieces:
            for writer in {w for source in memory_of(piece) for w in writers(source)}:
                if order[start] < order[writer] < order[wait]:
                    what = "copies" if is_move else "reads"
                    raise _broken(writer, f"overwrites {piece.name} while {start.name} {what} it.")


def _wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if user.target is _WAITS[start.target])


def _staging_buffers_are_free(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """A staging buffer is written to again only when all of it has been read."""
    used: dict[int, tuple[fx.Node, int]] = {}
    for start in graph.nodes:
        if start.target not in ops.TO_HOST or slot_of(start) < 0:
            continue
        slot = slot_of(start)
        if slot in used and used[slot][1] >= order[start]:
            raise _broken(
                start, f"writes to staging buffer {slot}, which {used[slot][0].name} still uses."
            )
        used[slot] = start, staged_until(start, order)


def _what_left_comes_back(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """What has left the device is read no more, but for what comes back of it, once."""
    for start in graph.nodes:
        if start.target is ops.offload_start:
            _is_read_before_it_leaves(start, order)
        elif start.target is ops.reload_start:
            origin = start.args[0]
            if origin.target is not ops.wait_move or origin.args[0].target is not ops.offload_start:
                raise _broken(start, f"brings back {origin.name}, which has not left the device.")
            (wait,) = start.users
            left = origin.args[0].args[0]
            if not wait.users:
                raise _broken(start, f"brings back {left.name}, and nobody reads it there.")
            if torch.device(start.args[1]) != left.meta["val"].device:
                raise _broken(start, f"brings {left.name} back to another device.")


def _is_read_before_it_leaves(start: fx.Node, order: dict[fx.Node, int]) -> None:
    (wait,) = start.users
    value = start.args[0]
    for source in memory_of(value) - {value}:
        if isinstance(source.meta["val"], torch.Tensor):
            raise _broken(start, f"moves a view: {source.name} keeps its memory on the device.")
    if value.op == "placeholder":
        raise _broken(start, f"moves {value.name}, which the caller keeps on the device.")
    if [reader.target for reader in wait.users] != [ops.reload_start]:
        readers = ", ".join(reader.name for reader in wait.users) or "nobody"
        raise _broken(
            wait, f"is in host memory, to be brought back to the device once; {readers} reads it."
        )
    for alias in aliases(value):
        for reader in alias.users:
            if order[reader] > order[wait]:
                raise _broken(
                    reader, f"reads {alias.name}, which has left the device at {wait.name}."
                )


def _moves_carry_what_they_say(graph: fx.Graph, table: ParameterTable) -> None:
    """A bucket's pieces in its order; each is updated once, with its gradient, and comes back."""
    for node in graph.nodes:
        if node.target in _WAITS and node.target not in ops.ACTIVATION_MOVES:
            indices = node.args[1] if node.target in ops.MOVES else node.args[3]
            infos = [table[index] for index in indices]
            offsets = [info.place.offset for info in infos]
            if len({info.place.bucket for info in infos}) > 1:
                raise _broken(node, "is not of parts of one bucket.")
            if offsets != sorted(offsets) or len(set(indices)) != len(indices):
                raise _broken(node, "does not take a bucket's parts in the order of the bucket.")
        if node.target is ops.to_host_start:
            if len(node.args[0]) != len(indices):
                raise _broken(node, "does not move one part for each parameter.")
            _host_memory_is_for_updates(node)
        if node.target is ops.to_device_start:
            _pieces_are_read_where_they_lie(node, infos)
            if any(map(is_kept_on_host, node.args[0])):
                _brings_what_it_says(node, table)
            else:
                _is_return_of_an_update(node, table)
        if node.target is ops.store_start:
            _stores_what_it_says(node, infos)
        if node.target in ops.HOST_UPDATES:
            _is_update_of_what_has_arrived(node, table)
        if node.target is ops.update and brought_from(node.args[0]) is not None:
            _is_stored(node, table)
        if node.op == "placeholder" and input_role(node).on_host:
            _is_read_where_it_is(node)
        is_copy = node.target is aten.copy_.default
        if (
            is_copy
            and role(node) == "store"
            and shard_of(node.args[0]) != parameter_of(node.args[1])
        ):
            raise _broken(node, f"stores {node.args[1].name}, which is of another parameter.")


def _is_return_of_an_update(move: fx.Node, table: ParameterTable) -> None:
    for piece in move.args[0]:
        start = piece.args[0] if piece.target is ops.wait_update else None
        if len(move.args[0]) > 1 or start is None or start.args[3] != move.args[1]:
            names = ", ".join(table[index].name for index in move.args[1])
            raise _broken(move, f"moves {piece.name} as if it were the update of {names}.")


def _pieces_are_read_where_they_lie(start: fx.Node, infos: list[ParameterInfo]) -> None:
    """Of what has arrived, each parameter's range is read, and nothing else."""
    (wait,) = start.users
    position, ranges = 0, {}
    for info in infos:
        ranges[info.index] = (0, position, position + info.shard_numel)
        position += info.shard_numel
    read = set()
    for piece in wait.users:
        index = parameter_of(piece)
        if piece.target is not aten.slice.Tensor or tuple(piece.args[1:]) != ranges.get(index):
            raise _broken(piece, f"is not the range of a parameter in what {start.name} moves.")
        read |= {index} if piece.users else set()
    for info in infos:
        if info.index not in read:
            raise _broken(start, f"moves what is of {info.name!r}, and nobody reads it there.")


def _stores_what_it_says(start: fx.Node, infos: list[ParameterInfo]) -> None:
    """Each new value goes to its own parameter's shard, and is read as that."""
    values, _, shards = start.args
    if len(shards) != len(infos) or not all(map(is_kept_on_host, shards)):
        raise _broken(start, "does not store to shards that are kept in host memory.")
    for value, info, shard in zip(values, infos, shards, strict=True):
        is_update = value.target is ops.update
        if shard_of(shard) != info.index or (is_update and value.args[3] != info.index):
            raise _broken(start, f"stores {value.name} as if it were of {info.name!r}.")
    (wait,) = start.users
    for stored in wait.users:
        if stored.target is not operator.getitem or (
            parameter_of(stored) != infos[stored.args[1]].index
        ):
            raise _broken(stored, f"is not the shard that {start.name} stores at that place.")


def _is_stored(update: fx.Node, table: ParameterTable) -> None:
    """Whether what an update makes of a shard that was brought to the device is stored, once."""
    index = update.args[3]
    shard = brought_from(update.args[0])
    if shard_of(shard) != index:
        raise _broken(update, f"updates {table[index].name!r} from the value of another parameter.")
    stores = [user for user in update.users if user.target is ops.store_start]
    if len(stores) != 1 or len(update.users) != 1:
        raise _broken(
            update,
            f"what it makes of {table[index].name!r} is stored in host memory {len(stores)} times "
            f"and read by {len(update.users)}; it must be stored once, and read from there.",
        )


def _is_read_where_it_is(shard: fx.Node) -> None:
    """Whether only moves, and updates that run on the host, read a shard that is kept there."""
    for alias in aliases(shard):
        for reader in alias.users:
            on_host = reader.target is ops.update_kept_start
            passes_on = reader.target in (ops.wait_store, operator.getitem)
            moves = reader.target is ops.to_device_start or (
                reader.target is ops.store_start and alias not in reader.args[0]
            )
            if not (on_host or passes_on or moves or reader.op == "output"):
                raise _broken(reader, f"reads {alias.name}, which is in host memory.")


def _host_memory_is_for_updates(start: fx.Node) -> None:
    for alias in aliases(start):
        for reader in alias.users:
            if reader.target not in (*_WAITS, *_WAITS.values()):
                raise _broken(reader, f"reads {alias.name}, which is in host memory.")


def _is_update_of_what_has_arrived(update: fx.Node, table: ParameterTable) -> None:
    """Whether an update reads what has been moved for it, and what it makes is moved back, once.

    Of shards that are kept on the host, neither the values are moved nor what they become.
    """
    indices = update.args[3]
    is_kept = update.target is ops.update_kept_start
    moved = update.args[1:2] if is_kept else update.args[:2]
    for operand in moved:
        if operand.target is not ops.to_host_start:
            raise _broken(update, f"reads {operand.name}, which is not moved to the host.")
        if list(operand.args[1]) != list(indices):
            raise _broken(update, f"reads {operand.name}, which is of another parameter.")
    if is_kept and len(update.args[0]) != len(indices):
        raise _broken(update, "does not update one shard for each parameter.")
    for operands in operands_of_updates(update):
        name = table[operands.parameter].name
        if is_kept and not is_kept_on_host(operands.value):
            raise _broken(update, f"updates {name!r} on the host, and its shard is not kept there.")
        is_a_shard = operands.value.op == "placeholder" or role(operands.value) is not None
        if is_a_shard and shard_of(operands.value) not in (operands.parameter, -1):
            raise _broken(update, f"updates {name!r} from the value of another parameter.")
    wait = _wait_of(update)
    if any(_wait_of(operand) > wait for operand in moved):
        raise _broken(update, "is waited for before what it reads.")
    if not is_kept and [user.target for user in wait.users] != [ops.to_device_start]:
        raise _broken(update, f"what it makes is moved back {len(wait.users)} times, not once.")


def _brings_what_it_says(start: fx.Node, table: ParameterTable) -> None:
    """Whether a move to the device takes the shards of the parameters that it names."""
    for piece, index in zip(*start.args[:2], strict=True):
        if not is_kept_on_host(piece) or shard_of(piece) != index:
            raise _broken(
                start, f"moves {piece.name} as if it were the shard of {table[index].name!r}."
            )


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
        wait = _only_reader(start, ops.wait_states, "states that are read")
        release = _only_reader(wait, ops.states_to_file, "states that are there")
        optimizer, indices = start.args[:2]
        if list(release.args[1:]) != [optimizer, indices]:
            raise _broken(release, f"lets go of other states than {start.name} reads.")
        if order[wait] < before:
            raise _broken(wait, "waits for states out of the order in which they are read.")
        before = order[wait]
        inside = {
            update
            for update in updates
            if update.args[2:4] == (optimizer, indices)
            and order[wait] < order[update]
            and order[_wait_of(update)] < order[release]
        }
        if len(inside) != 1:
            names = ", ".join(table[index].name for index in indices)
            raise _broken(wait, f"is not followed by one update each of {names}, and no others.")
        covered |= inside
    for node in graph.nodes:
        if node.target in (ops.wait_states, ops.states_to_file):
            source = ops.states_from_file_start
            if node.target is ops.states_to_file:
                source = ops.wait_states
            if node.args[0].target is not source:
                raise _broken(node, "is about states that nobody has asked for.")
        if starts and node.target in ops.HOST_UPDATES and node not in covered:
            raise _broken(node, "changes states that may be in files: nobody has read them.")


def _only_reader(node: fx.Node, target: object, what: str) -> fx.Node:
    if [user.target for user in node.users] != [target]:
        readers = ", ".join(user.name for user in node.users) or "nobody"
        raise _broken(node, f"{what} must have one {target} and no other reader, not {readers}.")
    return next(iter(node.users))


def _nothing_reads_freed_memory(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    for free in graph.nodes:
        if free.target is not ops.free:
            continue
        for alias in aliases(free.args[0]):
            for reader in alias.users:
                if reader is not free and order[reader] > order[free]:
                    raise _broken(
                        reader, f"reads {alias.name}, whose memory {free.name} has freed before."
                    )


def _gathers_are_freed(graph: fx.Graph) -> None:
    output = graph.output_node()
    for wait in graph.nodes:
        if wait.target is not ops.wait or role(wait) != "gather":
            continue
        frees = [user for user in wait.users if user.target is ops.free]
        escapes = any(output in alias.users for alias in aliases(wait))
        if len(frees) != (0 if escapes else 1):
            raise _broken(wait, f"gathered memory is freed {len(frees)} times; it must be once.")


def _nothing_reads_what_was_overwritten(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """Whoever wants the old value reads it before; the new value is the writer's result.

    A gathered buffer counts as the shard's memory, which it is in a world of one.
    """
    output = graph.output_node()
    for writer in graph.nodes:
        for target in mutated_inputs(writer):
            renewed = _renewed_by(writer)
            late = [
                (order[reader], reader, alias)
                for alias in aliases(target, through_gathers=True) - renewed
                for reader in alias.users
                if order[reader] > order[writer]
                and reader is not output
                and reader not in renewed
                and reader.target not in (ops.free, ops.wait_move)
                and not _only_overwrites(reader, alias)
            ]
            if late:
                _, reader, alias = min(late, key=lambda found: found[0])
                raise _broken(reader, f"reads {alias.name} after {writer.name} has overwritten it.")


def _renewed_by(writer: fx.Node) -> set[fx.Node]:
    """What has the new value: the writer's result, or those of its wait."""
    renewed = aliases(writer, through_gathers=True)
    if writer.target in (ops.store_start, ops.update_kept_start):
        for stored in [stored for wait in writer.users for stored in wait.users]:
            renewed |= aliases(stored, through_gathers=True)
    return renewed


def _only_overwrites(node: fx.Node, target: fx.Node) -> bool:
    if node.target is ops.store_start:
        return target not in node.args[0]
    return (
        node.target is aten.copy_.default and node.args[0] is target and node.args[1] is not target
    )


def _metadata_is_fresh(graph: fx.Graph, checked: CheckedMetadata) -> None:
    """Shapes and dtypes of inserted nodes, and of who reads one, are what operators compute."""
    for node in graph.nodes:
        if node.op != "call_function" or not _is_touched(node):
            continue
        recorded = node.meta["val"]
        made_from = (id(recorded), *(id(source.meta["val"]) for source in node.all_input_nodes))
        if checked.made_from.get(node) == made_from:
            continue
        checked.made_from[node] = made_from
        if getattr(recorded, "fake_mode", None) is None or _is_symbolic(recorded):
            continue
        call = call_text(node, lambda source: layout_text(source.meta["val"]))
        if call not in checked.computed:
            actual = _run_fake(node)
            checked.computed[call] = actual.dtype, actual.shape
        dtype, shape = checked.computed[call]
        if (dtype, shape) != (recorded.dtype, recorded.shape):
            raise _broken(
                node,
                f"is recorded as {recorded.dtype}{list(recorded.shape)} but computes "
                f"{dtype}{list(shape)}.",
            )


def _run_fake(node: fx.Node) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        with node.meta["val"].fake_mode, torch.no_grad():
            return node.target(*args, **kwargs)
    except Exception as error:
        raise _broken(node, f"refuses its operands: {error}") from error


def _is_touched(node: fx.Node) -> bool:
    return any(provenance(n) is not None for n in (node, *node.all_input_nodes))


def _is_symbolic(value: torch.Tensor) -> bool:
    """Comparing symbolic sizes would make guards of the comparison."""
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _sharded_inputs_are_read_as_shards(graph: fx.Graph) -> None:
    for node in placeholders(graph):
        if not input_role(node).sharded:
            continue
        for reader in node.users:
            understands = provenance(reader) is not None or reader.target is aten.copy_.default
            if not understands and reader.op != "output":
                raise _broken(reader, f"reads {node.name} as if it were whole, but it is a shard.")


def _buckets_hold_what_they_say(graph: fx.Graph, table: ParameterTable) -> None:
    """What is put into a bucket as a parameter's is that, and is read from where it lies."""
    for node in graph.nodes:
        if node.target is ops.pack:
            for part, info in _members(node, table, num_shards=1):
                if shard_of(part) != info.index:
                    raise _broken(
                        node, f"packs {part.name} as if it were the shard of {info.name!r}."
                    )
        elif node.target is ops.flatten_bucket:
            num_shards = table[node.args[1][0]].world_size
            for part, info in _members(node, table, num_shards):
                is_cast = role(part) == "reduce_cast"
                marked = {parameter_of(part)} if is_cast else gradient_of(part)
                fits = tuple(part.meta["val"].shape) == info.shape
                if not fits or (marked and info.index not in marked):
                    raise _broken(
                        node, f"lays out {part.name} as if it were the gradient of {info.name!r}."
                    )
        elif role(node) == "whole" and node.args[0].target is ops.wait:
            packed = node.args[0].args[0].args[0]
            if role(packed) == "gather_cast":
                packed = packed.args[0]
            if packed.target is ops.pack:
                _reads_its_own_range(node, packed, table[parameter_of(node)])


def _members(
    node: fx.Node, table: ParameterTable, num_shards: int
) -> list[tuple[fx.Node, ParameterInfo]]:
    """The parts of a ``pack`` or ``flatten_bucket`` and the parameters that they are of."""
    parts, indices, numel = node.args
    infos = [table[index] for index in indices]
    place = infos[0].place
    same = all(
        (info.place.bucket, info.place.shard_numel) == (place.bucket, place.shard_numel)
        for info in infos
    )
    if not same or len(set(indices)) != len(parts) or numel != place.shard_numel * num_shards:
        raise _broken(node, "does not hold parameters of one bucket, each once, and nothing else.")
    return list(zip(parts, infos, strict=True))


def _reads_its_own_range(node: fx.Node, packed: fx.Node, info: ParameterInfo) -> None:
    start, stop = info.place.offset, info.place.offset + info.numel
    whole = node.target is aten.slice.Tensor and tuple(node.args[1:]) == (0, start, stop)
    alone = node.target is not aten.slice.Tensor and info.numel == node.args[0].meta["val"].numel()
    if info.index not in packed.args[1] or not (whole or alone):
        raise _broken(node, f"does not read what {packed.name} holds of {info.name!r}.")


def _updates_are_those_captured(graph: fx.Graph, table: ParameterTable) -> None:
    """No pass loses or adds an update."""
    expected = captured_updates(graph)
    if expected is None:
        return
    found = updates(graph)
    for (optimizer, parameter), count in (expected - found).items():
        raise GraphError(
            f"{count} update(s) of {table[parameter].name!r} by optimizer {optimizer} are missing."
        )
    for (optimizer, parameter), count in (found - expected).items():
        raise GraphError(
            f"{count} update(s) of {table[parameter].name!r} by optimizer {optimizer} too many."
        )


def _updates_read_averaged_gradients(graph: fx.Graph, table: ParameterTable) -> None:
    """Every update's gradient is a mean over ranks, or came in as one; no two share a value."""
    written: dict[fx.Node, fx.Node] = {}
    varying = rank_varying(graph, max((info.world_size for info in table), default=1))
    for node in graph.nodes:
        if node.target is ops.gradient:
            raise _broken(node, "is a gradient that nobody averages over the ranks.")
        if node.target is ops.optimizer_step:
            operands = list(zip(node.args[1], node.args[4], strict=True))
        else:
            operands = [(update.gradient, update.parameter) for update in operands_of_updates(node)]
        if node.target in (ops.update, *ops.HOST_UPDATES):
            is_kept = node.target is ops.update_kept_start
            for value in node.args[0] if is_kept else node.args[:1]:
                if value in written:
                    raise _broken(node, f"updates what {written[value].name} has updated.")
                written[value] = node
        for gradient, parameter in operands:
            if not _is_average_of(gradient, table[parameter]):
                raise _broken(
                    node,
                    f"updates {table[parameter].name!r} with {gradient.name}, which is not "
                    "computed from the average of its gradient.",
                )
            if gradient in varying:
                raise _broken(
                    node,
                    f"updates {table[parameter].name!r} with {gradient.name}, which differs "
                    "between ranks.",
                )


def _stored_gradients_are_what_they_are_called(graph: fx.Graph, table: ParameterTable) -> None:
    """What a step leaves in ``p.grad`` is the same on all ranks, or declared to be unreduced."""
    results = graph.output_node().args[0]
    varying = rank_varying(graph, max((info.world_size for info in table), default=1))
    declared = unreduced_results(graph)
    for position, parameter in {**gradient_outputs(graph), **written_gradients(graph)}.items():
        result = results[position]
        if result in varying and position not in declared and result.op != "placeholder":
            raise _broken(
                result,
                f"becomes the gradient of {table[parameter].name!r}, and is neither averaged over "
                "the ranks nor declared to be unreduced.",
            )


def _is_own_range(node: fx.Node, info: ParameterInfo) -> bool:
    """Whether a node is the parameter's range of its bucket's averaged gradients."""
    reduced, dim, start, stop = node.args
    if reduced.target is not ops.wait or reduced.args[0].target is not ops.reduce_scatter_start:
        return False
    flat, reduction = reduced.args[0].args[:2]
    return (
        reduction == "mean"
        and flat.target is ops.flatten_bucket
        and info.index in flat.args[1]
        and (dim, start) == (0, info.position_in_shard)
        and stop - start == info.shard_numel
    )


def _is_average_of(gradient: fx.Node, info: ParameterInfo) -> bool:
    """Whether the parameter's averaged gradient is among what ``gradient`` is computed from."""
    parameter = info.index
    pending, seen = [gradient], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            role_of_input = input_role(node)
            is_gradient = role_of_input.kind == "gradient" and not role_of_input.unreduced
            if is_gradient and role_of_input.parameter == parameter:
                return True
            continue
        origin = provenance(node)
        if origin and origin.role == "reduce_gradient" and node.target is ops.wait:
            if origin.parameter == parameter and node.args[0].args[1] == "mean":
                return True
            continue
        if origin and origin.role == "reduced_gradient":
            if origin.parameter == parameter and _is_own_range(node, info):
                return True
            continue
        pending.extend(node.all_input_nodes)
    return False
