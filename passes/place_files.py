"""Keep the optimizer's states in files: read before an update on the host, let go after it."""

from __future__ import annotations

import torch
from torch import fx

from zerofx import ops
from zerofx.codegen.storage import Precision
from zerofx.graph import Builder, bucket_of
from zerofx.passes.base import Counts, PassContext
from zerofx.plan import ParameterInfo, shard_numel

MOMENTS = 2
"""What AdamW keeps of each element, beside a master."""


def place_files(gm: fx.GraphModule, ctx: PassContext) -> Counts:
    """Have every update's states in host memory while it runs, and in files else.

    Before::

        values = zerofx.to_host_start([p, q], [0, 1], 0)
        grads = zerofx.to_host_start([g, h], [0, 1], 1)
        update = zerofx.update_on_host_start(values, grads, 1, [0, 1])
        ...                                                   # the next bucket starts to leave
        s = zerofx.wait_update(update);  back = zerofx.to_device_start([s], [0, 1], "cuda")

    After::

        states = zerofx.states_from_file_start(1, [0, 1], 8192)
        values = zerofx.to_host_start([p, q], [0, 1], 0)
        grads = zerofx.to_host_start([g, h], [0, 1], 1)
        there = zerofx.wait_states(states)
        update = zerofx.update_on_host_start(values, grads, 1, [0, 1])
        ...
        s = zerofx.wait_update(update);  zerofx.states_to_file(there, 1, [0, 1])
        back = zerofx.to_device_start([s], [0, 1], "cuda")

    A bucket's states are read while the one before it is updated, at the latest: the runtime reads
    as far ahead as its memory goes, in the order of these waits.  What it writes, and when, follows
    from that order too.
    Source: ZeRO-Infinity, Rajbhandari et al. 2021.
    """
    builder = Builder(gm, "place_files", ctx.table)
    precision = Precision.of(ctx.options)
    updates = [node for node in gm.graph.nodes if node.target in ops.HOST_UPDATES]
    for update in updates:
        _, gradients, optimizer, indices, *_ = update.args
        nbytes = sum(assumed_state_bytes(ctx.table[index], precision) for index in indices)
        origin = {"like": update}
        if bucket_of(update) >= 0:
            origin["bucket"] = bucket_of(update)
        else:
            origin["parameter"] = indices[0]
        moves = [move for move in (update.args[0], gradients) if isinstance(move, fx.Node)]
        with gm.graph.inserting_before(min(moves)):
            start = builder.call(
                ops.states_from_file_start,
                optimizer,
                indices,
                nbytes,
                role="states_from_file",
                **origin,
            )
        with gm.graph.inserting_before(update):
            there = builder.call(ops.wait_states, start, role="states", **origin)
        (wait,) = update.users
        with gm.graph.inserting_after(wait):
            builder.call(
                ops.states_to_file, there, optimizer, indices, role="states_to_file", **origin
            )
    num_updates = sum(len(update.args[3]) for update in updates)
    return {"buckets of states": len(updates), "updates": num_updates}


def assumed_state_bytes(info: ParameterInfo, precision: Precision) -> int:
    """Bytes of AdamW's states of an equal share of a parameter: ranks plan alike.

    Nobody knows what an optimizer keeps before its update has been traced.
    """
    per_element = MOMENTS * precision.moment_storage(info.dtype, info.numel).itemsize
    if precision.keeps_master(info.dtype):
        per_element += torch.float32.itemsize
    return shard_numel(info.numel, info.world_size) * per_element
