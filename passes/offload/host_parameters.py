"""Keep this rank's shards of parameters in host memory: who reads one has it brought."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.aliases import is_kept_on_host, mutated_inputs, shard_of, writers
from zerofx.ir.graph import Builder, is_backward, updated_by
from zerofx.ir.interface import input_role, placeholders, set_input_role
from zerofx.ir.roles import Role, role
from zerofx.ir.source import source_line
from zerofx.passes.base import Counts, PassContext

aten = torch.ops.aten


def keep_on_host(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Let the program receive shards of parameters where they are to be: in host memory."""
    if not ctx.host_parameters:
        return
    mode = Builder(gm, "place_offload").fake_mode
    for node in placeholders(gm.graph, "parameter"):
        given = input_role(node)
        if given.parameter not in ctx.host_parameters:
            continue
        assert given.sharded, "a whole parameter stays on its device"
        set_input_role(node, replace(given, on_host=True))
        with mode:
            node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, device="cpu")


def place_parameters(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Bring shards to the device where they are read, and store there what they become.

    Before (``p`` and ``q``, of one bucket, in host memory)::

        w = zerofx.wait(zerofx.all_gather_start(zerofx.pack([p, q], [0, 1], n), 2))
        ...
        zerofx.update(p, g, 1, 0);  zerofx.update(q, h, 1, 1)

    After::

        up = zerofx.wait(zerofx.copy_start([p, q], [0, 1], "cuda"))
        w = zerofx.wait(zerofx.all_gather_start(zerofx.pack([up[0:k], up[k:n]], [0, 1], n), 2))
        ...
        again = zerofx.wait(zerofx.copy_start([p, q], [0, 1], "cuda"))
        s = zerofx.update(again[0:k], g, 1, 0);  t = zerofx.update(again[k:n], h, 1, 1)
        zerofx.wait(zerofx.copy_start([s, t], [0, 1], shards=[p, q]))

    Each gather brings a shard again, in one move of all that it puts together; it is cast when it
    has been brought.  An update that runs on the host writes to the shard there, and nothing moves.
    Buckets are updated one after the other, each brought while the one before is updated, or while
    its gradients are reduced if that is later; at most one is on its way back.
    Source: ZeRO-Infinity, Rajbhandari et al. 2021, section 5.

    Raises: StepError for a step that writes to a parameter in a way that has no shard.
    """
    if not ctx.host_parameters:
        return {}
    placing = _Placing(gm, ctx)
    counts = {
        "updated on the device": placing.bring_to_updates(),
        "stored": placing.store_writes(),
        "brought to gathers": placing.bring_to_gathers(),
        "brought to others": placing.bring_to_readers(),
    }
    placing.wait_for_stores()
    return counts


class _Placing:
    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.graph, self.table = gm.graph, ctx.table
        self.builder = Builder(gm, "place_offload", ctx.table)

    def bring_to_updates(self) -> int:
        """Run the updates of the device's on copies that are stored afterwards; count them."""
        updates = self.graph.find_nodes(op="call_function", target=ops.update)
        updates = [update for update in updates if is_kept_on_host(update.args[0])]
        before: fx.Node | None = None
        for run in self._runs(updates):
            before = self._update_on_device(run, before)
        return len(updates)

    def _runs(self, updates: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Updates of one bucket with nothing in between that must stand between them."""
        runs: list[list[fx.Node]] = []
        for update in updates:
            run = runs[-1] if runs else []
            if run and self._bucket(run[0]) == self._bucket(update) and _may_wait(run, update):
                run.append(update)
            else:
                runs.append([update])
        for run in runs:
            run.sort(key=lambda update: self.table[update.args[3]].place.offset)
        return runs

    def _bucket(self, update: fx.Node) -> int:
        return self.table[update.args[3]].place.bucket

    def _update_on_device(self, run: list[fx.Node], before: fx.Node | None) -> fx.Node:
        """Bring, update and store one run; return the wait for what it has brought."""
        last = max(run)
        shards = [update.args[0] for update in run]
        indices = [update.args[3] for update in run]
        behind = [node for node in (before, *map(_reduction_of, run)) if node is not None]
        here = max([*behind, *shards]).next if behind else last
        wait, pieces = self._bring(shards, here, last)
        for update, piece in zip(run, pieces, strict=True):
            if update is not last:
                last.prepend(update)
            update.args = (piece, *update.args[1:])
            self.builder.refresh(update)
        self._store(list(run), indices, shards, last)
        return wait

    def store_writes(self) -> int:
        """Store what the step computes for a parameter by itself; count these writes."""
        count = 0
        for node in list(self.graph.nodes):
            written = [target for target in mutated_inputs(node) if is_kept_on_host(target)]
            if not written or updated_by(node) or ops.is_move(node):
                continue
            if node.target is not aten.copy_.default:
                name = self.table[shard_of(written[0])].name if shard_of(written[0]) >= 0 else "?"
                raise StepError(
                    f"the step writes to parameter {name!r} with {node.target}, and "
                    "options={'offload': 'params'} stores what is computed for a shard and then "
                    "copied to it. Write it with p.copy_(...), or leave 'params' out. "
                    f"{source_line(node)}"
                )
            value, shard = node.args[1], _latest(node.args[0], node)
            index = shard_of(shard)
            if is_kept_on_host(value):
                _, (value,) = self._bring([value], node, node)
            self._store([value], [index], [shard], node, replaced=node)
            self.graph.erase_node(node)
            count += 1
        return count

    def _store(
        self,
        values: list[fx.Node],
        indices: list[int],
        shards: list[fx.Node],
        after: fx.Node,
        replaced: fx.Node | None = None,
    ) -> None:
        """Copy new values to the host, behind ``after``; who read these then reads the shards."""
        origin = {"role": Role.STORE, "like": after, **self.builder.serving(indices)}
        with self.builder.before(after.next, **origin) as call:
            start = call(ops.copy_start_shards, values, indices, shards)
            stored = call(ops.wait_shards, start)
            for position, index in enumerate(indices):
                of = {"role": Role.STORED, "parameter": index, "bucket": -1}
                renewed = call(operator.getitem, stored, position, **of)
                old = replaced or values[position]
                old.replace_all_uses_with(renewed, delete_user_cb=lambda user: user is not start)

    def bring_to_gathers(self) -> int:
        """Bring what each gather puts together, in one move; count them."""
        count = 0
        for head in list(self.graph.nodes):
            if not _begins_gather(head):
                continue
            shards = list(head.all_input_nodes)
            _, pieces = self._bring(
                shards, head, head, (Role.SHARD_TO_DEVICE, Role.SHARD_ON_DEVICE)
            )
            for shard, piece in zip(shards, pieces, strict=True):
                head.replace_input_with(shard, piece)
            self.builder.refresh(head)
            count += 1
        return count

    def bring_to_readers(self) -> int:
        """Bring each shard once for all that is computed of it on the device; count them."""
        readers: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
        for node in self.graph.nodes:
            for shard in node.all_input_nodes:
                if is_kept_on_host(shard) and not _reads_host(node):
                    readers.setdefault((shard, is_backward(node)), []).append(node)
        for (shard, _), nodes in readers.items():
            _, (piece,) = self._bring([shard], nodes[0], nodes[0])
            for node in nodes:
                node.replace_input_with(shard, piece)
        return len(readers)

    def wait_for_stores(self) -> None:
        """Wait for each store where the next one begins, or where somebody reads the shards."""
        starts = [node for node in self.graph.nodes if node.target is ops.copy_start_shards]
        output = self.graph.output_node()
        for start, following in zip(starts, [*starts, output][1:], strict=True):
            (wait,) = start.users
            renewed = list(wait.users)
            readers = [reader for node in renewed for reader in node.users]
            here = min([following, output, *readers])
            for node in (wait, *renewed):
                here.prepend(node)

    def _bring(
        self,
        shards: list[fx.Node],
        here: fx.Node,
        there: fx.Node,
        roles: tuple[Role, Role] = (Role.VALUE_TO_DEVICE, Role.VALUE_ON_DEVICE),
    ) -> tuple[fx.Node, list[fx.Node]]:
        """Start a move in front of ``here``; wait for it ``there``, and take apart what arrives."""
        indices = [shard_of(shard) for shard in shards]
        device = str(self.table[indices[0]].device)
        origin = {"like": there, **self.builder.serving(indices)}
        with self.builder.before(here, role=roles[0], **origin) as call:
            start = call(ops.copy_start, shards, indices, device)
        with self.builder.before(there, role=roles[1], **origin) as call:
            wait = call(ops.wait, start)
            return wait, take_apart(self.builder, wait, shards, indices, roles[1], there)


def take_apart(
    builder: Builder,
    flat: fx.Node,
    shards: Sequence[fx.Node],
    indices: Sequence[int],
    role: Role,
    like: fx.Node,
) -> list[fx.Node]:
    """Insert each parameter's range of ``flat``, where what these shards became lies in a row."""
    lengths = (shard.meta["val"].shape[0] for shard in shards)
    stops = itertools.accumulate(lengths, initial=0)
    cut = partial(builder.call, aten.slice.Tensor, flat, 0, role=role, like=like)
    ranges = zip(indices, itertools.pairwise(stops), strict=True)
    return [cut(start, stop, parameter=index) for index, (start, stop) in ranges]


def _latest(shard: fx.Node, before: fx.Node) -> fx.Node:
    """The result of the last node that writes to a shard before another one does, or the shard."""
    last = max([writer for writer in writers(shard) if writer < before], default=None)
    waits = [user for user in last.users if user.target is ops.wait_shards] if last else []
    if last is None or not waits:
        return last or shard
    (wait,) = waits
    return next(stored for stored in wait.users if shard_of(stored) == shard_of(shard))


def _reduction_of(update: fx.Node) -> fx.Node | None:
    """The start of the reduction that an update's gradient comes from as it is, if from one."""
    source = update.args[1]
    while source.target in (aten.slice.Tensor, ops.wait):
        source = source.args[0]
    return source if ops.is_collective(source) else None


def _may_wait(run: list[fx.Node], update: fx.Node) -> bool:
    """Return whether all of a run can be updated where ``update`` stands."""
    indices = {member.args[3] for member in run}
    if update.args[3] in indices or update.args[0].op != "placeholder":
        return False
    node = min(run).next
    while node is not update:
        reads_new = any(operand in run for operand in node.all_input_nodes)
        if node not in run and (reads_new or mutated_inputs(node)):
            return False
        node = node.next
    return True


def _begins_gather(node: fx.Node) -> bool:
    """Return whether a node takes shards from the host to a gather, by whatever comes first."""
    if not any(map(is_kept_on_host, node.all_input_nodes)):
        return False
    prepares = node.target in (ops.pack, ops.quantize) or role(node) == Role.GATHER_CAST
    return prepares or ops.rules(node).gathers


def _reads_host(node: fx.Node) -> bool:
    """Return whether a node may have a shard that is in host memory for an operand."""
    passes_on = node.op == "output" or node.target in (ops.wait_shards, operator.getitem)
    return passes_on or ops.is_move(node) or ops.updates_on_host(node)
