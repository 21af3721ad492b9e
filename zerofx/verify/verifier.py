"""The invariants of a program, checked before the first pass and after every one.

A program that breaks one would corrupt training in silence, or hang a cluster.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from zerofx.errors import GraphError
from zerofx.ir import ops
from zerofx.ir.aliases import (
    Heirs,
    aliases,
    heirs_in,
    memory_of,
    mutated_inputs,
    readers,
    shard_of,
    uses,
)
from zerofx.ir.graph import updated_by, updates
from zerofx.ir.interface import gradient_of, input_role, placeholders, recorded, region_of
from zerofx.ir.mesh import Mesh
from zerofx.ir.offload import copies_activation, is_staged
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.ir.roles import Role, bucket_of, parameter_of, provenance, role
from zerofx.ir.rules import TO_DEVICE, TO_HOST
from zerofx.ir.source import call_text, layout_text
from zerofx.ir.wire_graph import exact_behind
from zerofx.verify.broken import broken
from zerofx.verify.feedback import verify_feedback
from zerofx.verify.files import verify_files
from zerofx.verify.gradients import LAYS_OUT, verify_averages
from zerofx.verify.kept import verify_kept
from zerofx.verify.names import verify_names
from zerofx.verify.offload import verify_offload
from zerofx.verify.reductions import verify_reductions
from zerofx.verify.wires import verify_wires

aten = torch.ops.aten


@dataclass
class CheckedMetadata:
    """Results of earlier checks: running operators' fakes is the slowest check by far.

    ``made_from`` says which nodes' metadata has been compared, and the identities that it was
    made from; ``computed`` what a call gives for operands of these layouts, as in every layer.
    """

    made_from: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    computed: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)

    def follow(self, copies: Mapping[fx.Node, fx.Node]) -> None:
        """Go on with a copy of the program: node -> its copy."""
        self.made_from |= {copies[n]: made for n, made in self.made_from.items() if n in copies}


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
    verify_names(gm.graph, table)
    _starts_are_waited_once(gm.graph)
    verify_offload(gm.graph, table)
    verify_files(gm.graph, table)
    verify_wires(gm.graph, table)
    verify_reductions(gm.graph, table)
    verify_feedback(gm.graph)
    verify_kept(gm.graph, table)
    _nothing_reads_freed_memory(gm.graph)
    _gathers_are_freed(gm.graph, table)
    _nothing_reads_what_was_overwritten(gm.graph, table)
    _metadata_is_fresh(gm.graph, checked or CheckedMetadata())
    _sharded_inputs_are_read_as_shards(gm.graph)
    _buckets_hold_what_they_say(gm.graph, table)
    _regions_are_runs_of_compute(gm.graph)
    _updates_are_those_captured(gm.graph, table)
    _ends_without_data(gm.graph)
    if "averaged_gradients" in facts:
        verify_averages(gm.graph, table)


def _starts_are_waited_once(graph: fx.Graph) -> None:
    """Check that what is started is waited for; on the host, an update may wait for it too."""
    for node in graph.nodes:
        if ops.is_wait(node) and not ops.starts(node.args[0]):
            raise broken(node, "waits for something that was never started.")
        if not ops.starts(node):
            continue
        updates = [reader for reader in node.users if ops.updates_on_host(reader)]
        others = [reader for reader in node.users if reader not in updates]
        # What goes to the host is there for one update, which begins when it has arrived.
        is_for_update = is_staged(node) and not copies_activation(node)
        is_read = len(updates) == is_for_update
        if not is_read or len(others) != 1 or not ops.is_wait(others[0]):
            names = ", ".join(reader.name for reader in sorted(node.users)) or "nobody"
            raise broken(
                node,
                "is started and must have one wait and no other reader, but for the update of what "
                f"goes to the host; it has {names}.",
            )
        if ops.is_collective(node):
            axis, mesh = ops.argument(node, "axis"), recorded(graph).mesh or Mesh()
            if axis not in mesh.names:
                names = ", ".join(map(repr, mesh.names))
                raise broken(node, f"is over axis {axis!r}, and the mesh has {names}.")


def _ends_without_data(graph: fx.Graph) -> None:
    """Check that a step ends in time where no rank has data: before it writes to anything."""
    flags = graph.find_nodes(op="call_function", target=ops.has_data)
    if not flags or graph.find_nodes(op="call_function", target=ops.over_ranks):
        return
    ends = graph.find_nodes(op="call_function", target=ops.end_without_data)
    if not ends:
        raise broken(flags[0], "is read, and nothing ends a call in which no rank has data.")
    for end in ends:
        if _summed_part(end.args[0]) not in flags:
            raise broken(end, "reads what is no sum of has_data over the ranks.")
    for node in graph.nodes:
        if node < ends[0] and (mutated_inputs(node) or updated_by(node)):
            raise broken(node, f"writes before {ends[0].name} has ended a call without data.")


def _summed_part(node: fx.Node) -> fx.Node | None:
    """Return what a slice of a sum over ranks is the sum of; None if it is no such slice."""
    while node.target is aten.view.default:
        node = node.args[0]
    if node.target is not aten.slice.Tensor or not ops.is_wait(node.args[0]):
        return None
    (begin,), start = node.args[2:3], node.args[0].args[0]
    if start.target is not ops.all_reduce_start or start.args[1] != "sum":
        return None
    for part in start.args[0].args[0]:
        if begin == 0:
            return part.args[0]
        begin -= part.meta["val"].numel()
    return None


def _nothing_reads_freed_memory(graph: fx.Graph) -> None:
    for free in [node for node in graph.nodes if node.target is ops.free]:
        for reader, alias in uses(free.args[0]):
            if reader > free:
                what = f"reads {alias.name}, whose memory {free.name} has freed before."
                raise broken(reader, what)


def _gathers_are_freed(graph: fx.Graph, table: ParameterTable) -> None:
    output = graph.output_node()
    for wait in graph.nodes:
        if wait.target is not ops.wait or role(wait) != Role.GATHER:
            continue
        _goes_over_all_that_is_cut(wait, table)
        frees = [user for user in wait.users if user.target is ops.free]
        if len(frees) != (0 if output in readers(wait) else 1):
            raise broken(wait, f"gathered memory is freed {len(frees)} times; it must be once.")


def _goes_over_all_that_is_cut(wait: fx.Node, table: ParameterTable) -> None:
    """Check that a gather goes the way of reductions back: shards lie so."""
    if not isinstance(wait.args[0].args[0], fx.Node):
        raise broken(wait, f"waits for {wait.args[0].name}, which gathers no shard.")
    axes = [ops.argument(hop, "axis") for hop in ops.hops_of(wait)]
    mesh = recorded(wait.graph).mesh or Mesh()
    hops = mesh.hops
    if mesh.parts > 1:  # how it is cut, its size says
        index = max(parameter_of(wait), bucket_of(wait))
        numel = exact_behind(wait).meta["val"].numel()
        hops = hops[:1] if numel == table[index].kept.place.shard_numel else hops
    if tuple(axes) != hops:
        cut = ", then ".join(hops)
        raise broken(wait, f"gathers over {', '.join(reversed(axes))} what is cut over {cut}.")


def _nothing_reads_what_was_overwritten(graph: fx.Graph, table: ParameterTable) -> None:
    """Whoever wants the old value reads it before; the new value is the writer's result.

    A gathered buffer counts as the shard's memory, which it is in a world of one; the ranges of a
    bucket's others in it do not.  A result that is an input's memory is returned as it is at the
    end.
    """
    output, heirs = graph.output_node(), heirs_in(graph)
    for writer in graph.nodes:
        for target in mutated_inputs(writer):
            renewed = _renewed_by(writer, heirs)
            shared = aliases(target, heirs)
            others = _of_others(shared, target, table)
            renewed |= set().union(*(aliases(part, heirs) for part in others))
            late = [
                (reader, alias)
                for alias in shared - renewed
                for reader in alias.users
                if reader > writer
                and not (reader is output and _is_of_input(alias))
                and reader not in renewed
                and reader.target is not ops.free
                and ops.waits_on(reader) not in (TO_HOST, TO_DEVICE)
                and not _only_overwrites(reader, alias)
            ]
            if late:
                reader, alias = min(late)
                raise broken(reader, f"reads {alias.name} after {writer.name} has overwritten it.")


def _of_others(shared: set[fx.Node], shard: fx.Node, table: ParameterTable) -> list[fx.Node]:
    """Return the parts of a gathered bucket that are no part of this shard's parameter."""
    if shard_of(shard) < 0:
        return []
    info = table[shard_of(shard)]
    begin, end = info.place.offset, info.place.offset + info.numel
    return [
        node
        for node in shared
        if node.target is aten.slice.Tensor
        and node.args[0] in shared
        and (role(node), role(node.args[0])) == (Role.WHOLE, Role.GATHER)
        and not (node.args[2] < end and begin < node.args[3])
    ]


def _is_of_input(node: fx.Node) -> bool:
    return any(source.op == "placeholder" for source in memory_of(node))


def _renewed_by(writer: fx.Node, heirs: Heirs) -> set[fx.Node]:
    """Return the nodes with the new value: the writer's result, or those of its wait."""
    first = [writer, *(writer.users if writer.target is ops.update_together else ())]
    first += [new for user in writer.users if user.target is ops.wait_shards for new in user.users]
    return set().union(*(aliases(node, heirs) for node in first))


def _only_overwrites(node: fx.Node, target: fx.Node) -> bool:
    if node.target is ops.copy_start_shards:
        return target not in node.args[0]
    return (
        node.target is aten.copy_.default and node.args[0] is target and node.args[1] is not target
    )


def _metadata_is_fresh(graph: fx.Graph, checked: CheckedMetadata) -> None:
    """Shapes and dtypes of inserted nodes, and of who reads one, are what operators compute."""
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or not any(map(provenance, (node, *sources))):
            continue
        recorded = node.meta["val"]
        # A program that an operator takes as an argument has no value.
        made_from = (id(recorded), *(id(source.meta.get("val")) for source in sources))
        if checked.made_from.get(node) == made_from:
            continue
        checked.made_from[node] = made_from
        if getattr(recorded, "fake_mode", None) is None or any(
            isinstance(size, torch.SymInt) for size in recorded.shape
        ):  # comparing symbolic sizes would make guards of the comparison
            continue
        call = call_text(node, lambda source: layout_text(source.meta["val"]))
        if call not in checked.computed:
            actual = _run_fake(node)
            checked.computed[call] = actual.dtype, actual.shape
        dtype, shape = checked.computed[call]
        if (dtype, shape) != (recorded.dtype, recorded.shape):
            said = f"is recorded as {recorded.dtype}{list(recorded.shape)}"
            raise broken(node, f"{said} but computes {dtype}{list(shape)}.")


def _run_fake(node: fx.Node) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        with node.meta["val"].fake_mode, torch.no_grad():
            return (ops.rules(node).fake or node.target)(*args, **kwargs)
    except Exception as error:
        raise broken(node, f"refuses its operands: {error}") from error


def _sharded_inputs_are_read_as_shards(graph: fx.Graph) -> None:
    for node in placeholders(graph):
        if not input_role(node).sharded:
            continue
        for reader in node.users:
            understands = provenance(reader) is not None or reader.target is aten.copy_.default
            if not understands and reader.op != "output":
                raise broken(reader, f"reads {node.name} as if it were whole, but it is a shard.")


def _buckets_hold_what_they_say(graph: fx.Graph, table: ParameterTable) -> None:
    """Check that a parameter's part of a bucket is its own, and is read from its place."""
    for node in graph.nodes:
        if node.target is ops.write_back:
            _writes_back_what_was_gathered(node)
        elif node.target is ops.pack:
            for part, info in _members(node, table, num_shards=1):
                if shard_of(part) != info.index:
                    what = f"packs {part.name} as if it were the shard of {info.name!r}."
                    raise broken(node, what)
        elif node.target in LAYS_OUT:
            num_shards = table[node.args[1][0]].world_size
            for part, info in _members(node, table, num_shards):
                is_cast = role(part) == Role.REDUCE_CAST
                marked = {parameter_of(part)} if is_cast else gradient_of(part)
                fits = tuple(part.meta["val"].shape) == info.shape
                if not fits or (marked and info.index not in marked):
                    what = f"lays out {part.name} as if it were the gradient of {info.name!r}."
                    raise broken(node, what)
        elif role(node) == Role.WHOLE and node.args[0].target in (ops.wait, ops.dequantize):
            packed = exact_behind(node.args[0])
            if packed.target is ops.pack:
                _reads_its_own_range(node, packed, table[parameter_of(node)])


def _writes_back_what_was_gathered(node: fx.Node) -> None:
    """The parameters may lie in what was gathered: nothing reads an old value after its update."""
    gathered, wholes, indices = node.args
    sent = ops.gathered_from(gathered)
    packed, held = ([sent], indices) if sent.target is not ops.pack else sent.args[:2]
    updated = dict(zip(held, packed, strict=False))
    if sorted(updated) != sorted(indices):
        raise broken(node, f"does not write back the parameters that {gathered.name} has.")
    if [input_role(whole).parameter for whole in wholes] != list(indices):
        raise broken(node, "does not write to the parameters that it names.")
    for whole, index in zip(wholes, indices, strict=True):
        made = updated[index]
        update = made.args[0] if made.target is operator.getitem else made
        for reader in readers(whole):
            if reader is not node and reader > update:
                raise broken(
                    reader,
                    f"reads {whole.name} after {update.name}, which may have written it in place.",
                )


def _members(
    node: fx.Node, table: ParameterTable, num_shards: int
) -> list[tuple[fx.Node, ParameterInfo]]:
    """The parts of a ``pack`` or ``flatten_bucket`` and the parameters that they are of."""
    parts, indices, numel = node.args[:3]
    axis = ops.argument(node, "axis") if node.target is ops.pack else ""
    infos = [table.cut(index, axis) for index in indices]
    place = infos[0].place
    same = all(
        (info.place.bucket, info.place.shard_numel) == (place.bucket, place.shard_numel)
        for info in infos
    )
    if not same or len(set(indices)) != len(parts) or numel != place.shard_numel * num_shards:
        raise broken(node, "does not hold parameters of one bucket, each once, and nothing else.")
    return list(zip(parts, infos, strict=True))


def _reads_its_own_range(node: fx.Node, packed: fx.Node, info: ParameterInfo) -> None:
    start, stop = info.place.offset, info.place.offset + info.numel
    whole = node.target is aten.slice.Tensor and tuple(node.args[1:]) == (0, start, stop)
    alone = node.target is not aten.slice.Tensor and info.numel == node.args[0].meta["val"].numel()
    if info.index not in packed.args[1] or not (whole or alone):
        raise broken(node, f"does not read what {packed.name} holds of {info.name!r}.")


def _regions_are_runs_of_compute(graph: fx.Graph) -> None:
    """A region is one run, of what can be compiled: neither our operators nor writes."""
    ended: set[int | None] = set()
    for region, run in itertools.groupby(list(graph.nodes), region_of):
        for node in run:
            if region is None:
                break
            if region in ended:
                raise broken(node, f"is in region {region}, which has ended before it.")
            if ops.is_ours(node.target) or mutated_inputs(node):
                raise broken(node, f"is in region {region}, and is none of its compute.")
        ended.add(region)


def _updates_are_those_captured(graph: fx.Graph, table: ParameterTable) -> None:
    """No pass loses or adds an update."""
    expected = recorded(graph).updates
    if expected is None:
        return
    found = updates(graph)
    for difference, words in ((expected - found, "are missing"), (found - expected, "too many")):
        for (optimizer, parameter), count in difference.items():
            of = f"{table[parameter].name!r} by optimizer {optimizer}"
            raise GraphError(f"{count} update(s) of {of} {words}.")
