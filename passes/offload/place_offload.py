"""Keep optimizer states and parameters in host memory: what is needed elsewhere travels."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.aliases import is_kept_on_host, memory_of, writers
from zerofx.ir.graph import Builder, is_owned
from zerofx.ir.interface import note_decisions, recorded
from zerofx.ir.offload import assign_slots, is_staged
from zerofx.ir.roles import Role
from zerofx.passes.base import Conflict, Counts, PassContext
from zerofx.passes.memory.decisions import decide
from zerofx.passes.offload.delay import DELAYED_CONFLICTS, check_can_be_delayed
from zerofx.passes.offload.host_parameters import keep_on_host, place_parameters, take_apart
from zerofx.passes.zero.shard_optimizer import needs_sharded_states

aten = torch.ops.aten

CONFLICTS = (
    needs_sharded_states("offload 'optimizer'", lambda options: "optimizer" in options.offload),
    needs_sharded_states("offload 'auto'", lambda options: "auto" in options.offload),
    Conflict(
        lambda options: "auto" in options.offload and len(options.offload) > 1,
        "offload='auto' chooses what leaves the device: drop it, or what stands beside it",
    ),
    Conflict(
        lambda options: "auto" in options.offload and options.memory_budget is None,
        "offload='auto' lets leave the device what does not fit: say how much fits with"
        " memory_budget, in bytes for parameters, optimizer states and all that a step"
        " allocates, for example int(0.9 * torch.cuda.mem_get_info()[0]) before the model is there",
    ),
    Conflict(
        lambda options: "params" in options.offload and options.stage < 3,
        "offload='params' needs stage 3: stage {stage} keeps whole parameters on the device."
        " Choose stage 3, or drop 'params'",
    ),
    Conflict(
        lambda options: "params" in options.offload and options.outer_stage in (1, 2),
        "offload='params' needs parameters that are cut over both axes of the mesh or over the"
        " inner one alone, with what updates them: its outer axis has stage {outer_stage}. Give it"
        " stage 3 or 0, or drop 'params'",
    ),
    *DELAYED_CONFLICTS,
)

UPDATES_UNDER_WAY = 2
"""The number of buckets' updates in flight: with two the host is never idle."""


def place_offload(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Run every update in host memory, and move what it reads there and what it writes back.

    Before::

        zerofx.update(p, g, 1, 0);  zerofx.update(q, h, 1, 1)    # of one bucket
        dx = mm(dy, w);  ...;  zerofx.update(r, i, 1, 2)         # of the next one

    After::

        values = zerofx.copy_start([p, q], [0, 1], "host", slot=0)
        grads = zerofx.copy_start([g, h], [0, 1], "host", slot=1)
        update = zerofx.update_start(values, grads, 1, [0, 1])
        dx = mm(dy, w);  ...
        ...                                                      # the next one starts
        zerofx.wait(values);  zerofx.wait(grads)
        ...
        back = zerofx.copy_start([zerofx.wait(update)], [0, 1], "cuda")
        ...
        new = zerofx.wait(back);  copy_(p, new[0:n]);  copy_(q, new[n:m])

    A bucket moves at once, its pieces in the order in which they lie in it: one kernel takes them.
    What has left is waited for when the next bucket has started to, as its gradients' memory is
    free then; an update when so many more have started that ``UPDATES_UNDER_WAY`` would be
    exceeded, or its new values are read.  So at most two buckets are on their way out and one on
    its way back.  Where parameters are kept on the host too, ``place_parameters`` says what moves.
    With ``delayed_update`` the program is the same: at run time the update's ``wait`` gives what
    the call before has made.  With a ``memory_budget`` what fits it stays on the device.
    Source: ZeRO-Offload, Ren et al. 2021.

    Raises: StepError for updates that need whole tensors, or that nothing reads.
    """
    keep_on_host(gm, ctx)
    residency = recorded(gm.graph).decisions.residency or ctx.decided.residency
    if residency is None:  # nothing is gathered that could be kept
        residency = decide(gm.graph, ctx, {})
    note_decisions(gm.graph, residency=residency)
    updates = []
    if "optimizer" in ctx.options.offload:
        updates = gm.graph.find_nodes(op="call_function", target=ops.update)
        updates = [update for update in updates if update.args[2:4] not in residency.states]
    for update in updates:
        if is_owned(update):
            raise StepError(
                f"parameter {ctx.table[update.args[3]].name!r} is updated as a whole tensor by the "
                "rank that owns it, as Muon's are, and options={'offload': 'optimizer'} moves "
                "elementwise updates. Leave offload out, or train it with another optimizer."
            )
        if not update.users and not _is_stored(update):
            raise StepError(
                f"parameter {ctx.table[update.args[3]].name!r} is overwritten after its update, "
                "which nothing reads then: options={'offload': 'optimizer'} has nothing to move "
                "back. Overwrite it before backward(), in a compiled function of its own, or take "
                "stage 3."
            )
    if ctx.options.delayed_update:
        check_can_be_delayed(gm.graph, updates, ctx.table)
    groups = _groups(updates, ctx)
    for group in groups:
        group.ready = group.updates[-1]
    _find_readers(groups, gm.graph.output_node())
    moving = _Moving(gm, ctx)
    for group, following in itertools.zip_longest(groups, groups[1:]):
        moving.begin(group)
        moving.settle_before(following.ready if following else None)
    for update in updates:
        gm.graph.erase_node(update)
    staged = list(filter(is_staged, gm.graph.nodes))
    num_slots = assign_slots(staged, lambda start, free, sizes: min(free, default=None))
    brought = place_parameters(gm, ctx)
    moves = sum(map(ops.is_move, gm.graph.nodes))
    return {"moves": moves, "updates": len(updates), "staging buffers": num_slots, **brought}


@dataclass(eq=False)
class _Group:
    """Updates of one bucket that move together.

    ``ready`` stands where all their gradients are there, ``needed`` is the first node that reads
    what they have made.  ``values`` and ``gradients`` are the moves to the host, ``updating`` the
    update there, ``back`` the move to the device; ``origin`` is the provenance of all these.
    """

    updates: list[fx.Node] = field(default_factory=list)
    ready: Any = None
    needed: Any = None
    values: Any = None
    gradients: Any = None
    updating: Any = None
    back: Any = None
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        return [update.args[3] for update in self.updates]


def _groups(updates: list[fx.Node], ctx: PassContext) -> list[_Group]:
    """Sort updates into groups, in the order in which their gradients are complete.

    All of a group wait for the last one's gradient, so nobody may read what one of them has made
    or write to what one reads before that.
    """
    groups: list[_Group] = []
    opened: dict[tuple, _Group] = {}
    for update in updates:
        values, gradient, optimizer, index, *rest = update.args
        dtypes = tuple(operand.meta["val"].dtype for operand in (values, gradient))
        key = (ctx.table[index].place.bucket, optimizer, tuple(rest), dtypes)
        group = opened.get(key)
        if group is None or not _may_wait_for(group, update):
            group = opened[key] = _Group()
            groups.append(group)
        group.updates.append(update)
    return sorted(groups, key=lambda group: group.updates[-1])


def _may_wait_for(group: _Group, update: fx.Node) -> bool:
    for member in group.updates:
        if member.args[3] == update.args[3] or any(user < update for user in member.users):
            return False
        for operand in member.args[:2]:
            if any(member < writer < update for writer in writers(operand)):
                return False
    return True


def _find_readers(groups: Sequence[_Group], output: fx.Node) -> None:
    """Note who needs what each group makes: for another group's update, where that begins."""
    ready = {update: group.ready for group in groups for update in group.updates}
    for group in groups:
        readers = {user for update in group.updates for user in update.users}
        group.needed = min([ready.get(reader, reader) for reader in readers] + [output])


def _is_stored(update: fx.Node) -> bool:
    """Return whether an update writes to memory that outlives the program."""
    return any(source.op == "placeholder" for source in memory_of(update.args[0]))


class _Moving:
    """The groups under way, first in first out: on their way to the host, there, and back."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.graph, self.table = gm.graph, ctx.table
        self.builder = Builder(gm, "place_offload", ctx.table)
        # Of states in files, host memory has to hold those of two buckets.
        self.most_under_way = 2 if ctx.options.offload_tier == "nvme" else UPDATES_UNDER_WAY + 1
        self.leaving: list[_Group] = []
        self.updating: list[_Group] = []
        self.returning: list[_Group] = []

    def begin(self, group: _Group) -> None:
        """Start moving a group to the host and updating it; wait for who has left before it."""
        group.updates.sort(key=lambda update: self.table[update.args[3]].place.offset)
        group.origin = {"like": group.updates[-1], **self.builder.serving(group.indices)}
        while len(self.updating) >= self.most_under_way:
            self._send_back(group.ready)
        targets = [update.args[0] for update in group.updates]
        start, values = ops.update_start_shards, targets
        if not all(map(is_kept_on_host, targets)):
            group.values = self._to_host(group, targets, Role.VALUES_TO_HOST)
            start, values = ops.update_start, group.values
        gradients = [update.args[1] for update in group.updates]
        group.gradients = self._to_host(group, gradients, Role.GRADIENTS_TO_HOST)
        _, _, optimizer, _, *found_inf = group.updates[0].args
        given = (values, group.gradients, optimizer, group.indices, *found_inf)
        with self.builder.before(group.ready, role=Role.UPDATE, **group.origin) as call:
            group.updating = call(start, *given)
        self.leaving.append(group)
        self.updating.append(group)
        while len(self.leaving) > 1:
            self._leave(group.ready)
        while len(self.updating) > UPDATES_UNDER_WAY:
            self._send_back(group.ready)

    def _to_host(self, group: _Group, pieces: list[fx.Node], role: Role) -> fx.Node:
        with self.builder.before(group.ready, role=role, **group.origin) as call:
            return call(ops.copy_start, pieces, group.indices, ops.HOST, -1)

    def settle_before(self, here: fx.Node | None) -> None:
        """Have back on the device, where it is needed, what is needed up to ``here`` or at all."""
        while under_way := self.returning + self.updating:
            due = min(under_way, key=lambda group: group.needed)
            if here is not None and here < due.needed:
                return
            while due in self.updating:
                self._send_back(due.needed)
            while due in self.returning:
                self._land(due.needed)

    def _leave(self, here: fx.Node) -> None:
        """Wait until the oldest group that is leaving has left."""
        group = self.leaving.pop(0)
        with self.builder.before(here, **group.origin) as call:
            if group.values is not None:
                call(ops.wait, group.values, role=Role.VALUES_ON_HOST)
            call(ops.wait, group.gradients, role=Role.GRADIENTS_ON_HOST)

    def _send_back(self, here: fx.Node) -> None:
        """Wait for the oldest update; land what has come back, then send its new values back.

        Shards that are kept on the host stay there: their readers read what the update gives.
        """
        group = self.updating.pop(0)
        while group in self.leaving:
            self._leave(here)
        with self.builder.before(here, role=Role.UPDATED_ON_HOST, **group.origin) as call:
            if group.values is None:
                updated = call(ops.wait_shards, group.updating)
                part = partial(self.builder.call, operator.getitem, updated)
                renewed = [
                    part(position, role=Role.UPDATED_VALUE, parameter=update.args[3], like=update)
                    for position, update in enumerate(group.updates)
                ]
                self._renew(group, renewed)
                return
            updated = call(ops.wait, group.updating)
        while self.returning:
            self._land(here)
        with self.builder.before(here, role=Role.VALUES_TO_DEVICE, **group.origin) as call:
            device = str(self.table[group.indices[0]].device)
            group.back = call(ops.copy_start, [updated], group.indices, device)
        self.returning.append(group)

    def _land(self, here: fx.Node) -> None:
        """Wait for what is back longest, and have its readers read it.

        What was memory that outlives the program is written to, as the update did.
        """
        group = self.returning.pop(0)
        with self.builder.before(here, role=Role.UPDATED_VALUE, **group.origin) as call:
            arrived = call(ops.wait, group.back)
            like = group.origin["like"]
            shards = [update.args[0] for update in group.updates]
            given = (arrived, shards, group.indices, Role.UPDATED_VALUE, like)
            pieces = take_apart(self.builder, *given)
            renewed = []
            for update, piece in zip(group.updates, pieces, strict=True):
                target = update.args[0]
                if _is_stored(update):
                    of = {"role": Role.STORE, "parameter": update.args[3], "like": update}
                    piece = self.builder.call(aten.copy_.default, target, piece, **of)
                renewed.append(piece)
        self._renew(group, renewed)

    def _renew(self, group: _Group, renewed: Sequence[fx.Node]) -> None:
        """Have the readers of a group's updates read the new values."""
        for update, new in zip(group.updates, renewed, strict=True):
            update.replace_all_uses_with(new)
