"""Keep in files what host memory does not hold: read before it is used there, let go after it."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import fx

from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir import ops
from zerofx.ir.aliases import is_kept_on_host, memory_of, mutated_inputs, shard_of
from zerofx.ir.graph import Builder
from zerofx.ir.interface import placeholders
from zerofx.ir.offload import copies_activation, copies_to_device, released_at, uses_of_files
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.roles import Role, bucket_of
from zerofx.ir.sizes import hinted_bytes
from zerofx.passes.base import Conflict, Counts, PassContext


def _about_files(name: str) -> Conflict:
    return Conflict(
        lambda options: options.offload_tier != "nvme" and getattr(options, name),
        f"{name} is about files, and offload_tier={{offload_tier!r}} makes none. Add"
        f" offload_tier='nvme', or drop {name}",
        is_lack=True,
    )


CONFLICTS = (
    *map(_about_files, ("offload_dir", "offload_cache_bytes", "offload_checksums")),
    Conflict(
        lambda options: options.offload_tier == "nvme" and not options.offload,
        "offload_tier='nvme' says where to, and offload does not say what: add"
        " offload='optimizer', 'params' or 'activations', or drop offload_tier",
        is_lack=True,
    ),
    Conflict(
        lambda options: options.offload_tier == "nvme" and not options.offload_dir,
        "offload_tier='nvme' keeps in files what offload names, and nobody has said where: add"
        " offload_dir, a folder on a fast local disk, or several on different disks",
        is_lack=True,
    ),
)

MOMENTS = 2
"""The values that AdamW keeps of each element, beside a master."""

BUCKETS_AHEAD = 4
"""The number of largest buckets that plans assume host memory has room for, by default."""


def place_files(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Have what updates and moves use in host memory while they do, and in files else.

    Before::

        h_to_host = zerofx.copy_start([h], [], "host", slot=7)
        h_on_host = zerofx.wait(h_to_host)
        ...
        h_to_device = zerofx.copy_start([h_on_host], [], "cuda");  h_1 = zerofx.wait(h_to_device)
        ...
        values = zerofx.copy_start([r], [2], "host", 0);  grads = zerofx.copy_start([g], ...)
        update = zerofx.update_start(values, grads, 1, [2])
        ...
        s = zerofx.wait(update)

    After::

        h_to_host = zerofx.copy_start([h], [], "host", slot=7)
        h_on_host = zerofx.wait(h_to_host);  h_in_file = zerofx.evict(h_on_host, "value")
        ...
        h_there = zerofx.wait(zerofx.fetch_start(h_in_file, "value"))
        h_to_device = zerofx.copy_start([h_there], [], "cuda");  h_1 = zerofx.wait(h_to_device)
        zerofx.evict(h_there, "value", changed=False)
        ...
        states = zerofx.fetch_start(None, "states", [2], optimizer=1, nbytes=8192)
        values = zerofx.copy_start([r], [2], "host", 0);  grads = zerofx.copy_start([g], ...)
        there = zerofx.wait(states);  update = zerofx.update_start(values, grads, 1, [2])
        ...
        s = zerofx.wait(update);  zerofx.evict(there, "states", [2], optimizer=1)

    So are shards that are kept on the host, around each move and update of them.

    Reads start in the order of their waits, each as soon as what is used up to it fits
    ``offload_cache_bytes`` (or ``BUCKETS_AHEAD`` of the largest), and what is written to the same
    place has been let go of.  The runtime goes by the order alone.
    Source: ZeRO-Infinity, Rajbhandari et al. 2021.
    """
    filing = _Filing(gm, ctx)
    counts = {
        "buckets of states": filing.file_states() if "optimizer" in ctx.options.offload else 0,
        "uses of shards": filing.file_shards() if ctx.filed_parameters else 0,
        "activations": filing.file_values() if "activations" in ctx.options.offload else 0,
    }
    filing.start_ahead(ctx.options.offload_cache_bytes)
    return counts


class _Filing:
    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.graph, self.table = gm.graph, ctx.table
        self.precision = Precision.of(ctx.options)
        self.filed = ctx.filed_parameters
        self.builder = Builder(gm, "place_files", ctx.table)

    def file_states(self) -> int:
        """Read states for each group of updates on the host; count the groups."""
        updates = list(filter(ops.updates_on_host, self.graph.nodes))
        for update in updates:
            _, _, optimizer, indices, *_ = update.args
            nbytes = sum(assumed_state_bytes(self.table[i], self.precision) for i in indices)
            of = ("states", indices, optimizer)
            roles = Role.STATES_FROM_FILE, Role.STATES, Role.STATES_TO_FILE
            self._have_there(update, of, nbytes, roles)
        return len(updates)

    def file_shards(self) -> int:
        """Read shards for each move and update that is about them there; count these."""
        nodes = [n for n in self.graph.nodes if ops.is_move(n) or ops.updates_on_host(n)]
        uses = [node for node in nodes if not self.filed.isdisjoint(_parameters_of(node))]
        for use in uses:
            indices = [index for index in _parameters_of(use) if index in self.filed]
            infos = [self.table[index] for index in indices]
            nbytes = sum(info.share_numel * info.dtype.itemsize for info in infos)
            roles = Role.SHARDS_FROM_FILE, Role.SHARDS, Role.SHARDS_TO_FILE
            changed = bool(mutated_inputs(use))
            self._have_there(use, ("shards", indices, None), nbytes, roles, [changed])
        return len(uses)

    def _have_there(
        self,
        use: fx.Node,
        of: tuple[str, Sequence[int], int | None],
        nbytes: int,
        roles: tuple[Role, Role, Role],
        changed: Sequence[bool] = (),
    ) -> None:
        """Read what a use is about, wait for it, and let go of it when the use is over."""
        read, there, let_go = roles
        origin = {"like": use, "bucket": bucket_of(use)}
        if bucket_of(use) < 0:
            origin["parameter"] = of[1][0]
        with self.builder.before(use, **origin) as call:
            start = call(ops.fetch_start, None, *of, nbytes, role=read)
            wait = call(ops.wait, start, role=there)
        (end,) = use.users
        with self.builder.before(end.next, **origin) as call:
            call(ops.evict, wait, *of, *changed, role=let_go)

    def file_values(self) -> int:
        """Let go of each activation on the host, and read it before it returns; count them."""
        reloads = [n for n in self.graph.nodes if copies_activation(n) and copies_to_device(n)]
        for reload in reloads:
            (on_host,) = reload.args[0]
            with self.builder.before(on_host.next, like=on_host) as call:
                filed = call(ops.evict, on_host, "value", role=Role.TO_FILE)
            with self.builder.before(reload) as call:
                start = call(ops.fetch_start, filed, "value", role=Role.FROM_FILE)
                there = call(ops.wait, start, role=Role.VALUE)
            reload.args = ([there], *reload.args[1:])
            (wait,) = reload.users
            with self.builder.before(wait.next, like=reload) as call:
                call(ops.evict, there, "value", changed=False, role=Role.DROP_VALUE)
        return len(reloads)

    def start_ahead(self, cache_bytes: int | None) -> None:
        """Start each read as early as host memory has room for it, in the order of their waits."""
        uses = uses_of_files(self.graph)
        sizes = [hinted_bytes(use) for use in uses]
        room = cache_bytes or BUCKETS_AHEAD * max(sizes, default=0)
        behind = max(placeholders(self.graph), default=None)
        let_go: dict[object, fx.Node] = {}  # by what it is of, the last node that has
        gone: list[fx.Node] = []  # with which what is no longer there has been let go of, sorted
        last_start, num_gone, held = None, 0, 0
        for position, use in enumerate(uses):
            held += sizes[position]
            while held > room and num_gone < position:
                held -= sizes[num_gone]
                insort(gone, released_at(uses[num_gone]))
                num_gone += 1
            if ops.is_wait(use):
                (start,) = use.args
                earlier = bisect_left(gone, use)
                needs = gone[earlier - 1 : earlier] if earlier else []
                parts = (let_go[part] for part in _parts_of(start) if part in let_go)
                needs += [release for release in parts if release < use]
                needs += [*start.all_input_nodes, *([behind] if behind else [])]
                latest = max(needs)
                if last_start is not None and latest is behind:
                    last_start.append(start)
                else:
                    latest.append(start)
                behind, last_start = latest, start
                let_go.update(dict.fromkeys(_parts_of(start), released_at(use)))


def _parts_of(start: fx.Node) -> list[object]:
    """Return the subject of a read, which an earlier use may have changed."""
    optimizer = ops.argument(start, "optimizer")
    return [(optimizer, index) for index in ops.argument(start, "parameters")]


def _parameters_of(use: fx.Node) -> list[int]:
    """Whose shards on the host a use is about, in the table's order."""
    kept = filter(is_kept_on_host, use.all_input_nodes)
    sources = itertools.chain.from_iterable(map(memory_of, kept))
    return sorted({shard_of(source) for source in sources if source.op == "placeholder"})


def assumed_state_bytes(info: ParameterInfo, precision: Precision) -> int:
    """Bytes of AdamW's states of an equal share of a parameter: ranks plan alike.

    Nobody knows what an optimizer keeps before its update has been traced.
    """
    per_element = MOMENTS * precision.moment_storage(info.dtype, info.numel).itemsize
    if precision.keeps_master(info.dtype):
        per_element += torch.float32.itemsize
    return info.share_numel * per_element
