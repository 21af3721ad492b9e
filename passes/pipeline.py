"""The compiler, top to bottom: every pass in the order it runs."""

from __future__ import annotations

from zerofx.passes.base import Pass
from zerofx.passes.memory.recompute import recompute
from zerofx.passes.offload.offload_activations import offload_activations
from zerofx.passes.offload.place_files import place_files
from zerofx.passes.offload.place_offload import place_offload
from zerofx.passes.schedule.prefetch import prefetch
from zerofx.passes.schedule.update_in_backward import update_in_backward
from zerofx.passes.zero.bucket import bucket
from zerofx.passes.zero.data_parallel import data_parallel
from zerofx.passes.zero.hoist_casts import hoist_casts
from zerofx.passes.zero.shard_gradients import shard_gradients
from zerofx.passes.zero.shard_optimizer import shard_optimizer
from zerofx.passes.zero.shard_parameters import shard_parameters

PIPELINE = (
    Pass(
        "recompute",
        recompute,
        optional=True,
    ),
    Pass(
        "data_parallel",
        data_parallel,
        provides=frozenset({"averaged_gradients"}),
        preserves_numerics=False,
    ),
    Pass(
        "hoist_casts",
        hoist_casts,
        requires=frozenset({"averaged_gradients"}),
        optional=True,
        smallest_stage=3,
    ),
    Pass(
        "bucket",
        bucket,
        requires=frozenset({"averaged_gradients"}),
        optional=True,
        smallest_stage=1,
    ),
    Pass(
        "shard_optimizer",
        shard_optimizer,
        requires=frozenset({"averaged_gradients"}),
        provides=frozenset({"sharded_updates"}),
        preserves_numerics=False,  # norms are summed shard by shard
        smallest_stage=1,
    ),
    Pass(
        "shard_gradients",
        shard_gradients,
        requires=frozenset({"sharded_updates"}),
        provides=frozenset({"sharded_gradients"}),
        preserves_numerics=False,  # so are norms of gradients that cross calls
        smallest_stage=2,
    ),
    Pass(
        "shard_parameters",
        shard_parameters,
        requires=frozenset({"sharded_gradients"}),
        provides=frozenset({"sharded_parameters"}),
        smallest_stage=3,
    ),
    Pass(
        "update_in_backward",
        update_in_backward,
        requires=frozenset({"averaged_gradients"}),
        optional=True,
    ),
    Pass(
        "place_offload",
        place_offload,
        requires=frozenset({"sharded_updates"}),
        smallest_stage=1,
        offloads=frozenset({"optimizer", "params"}),
    ),
    Pass(
        "offload_activations",
        offload_activations,
        requires=frozenset({"averaged_gradients"}),
        offloads=frozenset({"activations"}),
    ),
    Pass(
        "prefetch",
        prefetch,
        requires=frozenset({"sharded_updates"}),
        optional=True,
        smallest_stage=1,
    ),
    Pass(
        "place_files",
        place_files,
        requires=frozenset({"averaged_gradients"}),
        offloads=frozenset({"optimizer", "params", "activations"}),
        tiers=frozenset({"nvme"}),
    ),
)
