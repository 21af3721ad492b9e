"""The compiler, top to bottom: every pass in the order it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zerofx.passes.base import Pass, PassContext
from zerofx.passes.fuse.fold_gradient_norms import fold_gradient_norms
from zerofx.passes.fuse.fold_gradient_work import fold_gradient_work
from zerofx.passes.fuse.form_regions import form_regions
from zerofx.passes.fuse.merge_updates import merge_updates
from zerofx.passes.fuse.reduce_unflattened import reduce_unflattened
from zerofx.passes.fuse.write_back import write_back
from zerofx.passes.loss.chunk_loss import chunk_loss
from zerofx.passes.loss.global_loss import global_loss
from zerofx.passes.memory.recompute import recompute
from zerofx.passes.normalize import normalize
from zerofx.passes.offload.offload_activations import offload_activations
from zerofx.passes.offload.place_files import CONFLICTS as FILES_CONFLICTS
from zerofx.passes.offload.place_files import place_files
from zerofx.passes.offload.place_offload import CONFLICTS as OFFLOAD_CONFLICTS
from zerofx.passes.offload.place_offload import place_offload
from zerofx.passes.schedule.prefetch import prefetch
from zerofx.passes.schedule.update_in_backward import update_in_backward
from zerofx.passes.wire.quantize_gathers import CONFLICTS as GATHER_CONFLICTS
from zerofx.passes.wire.quantize_gathers import quantize_gathers
from zerofx.passes.wire.quantize_reductions import CONFLICTS as REDUCTION_CONFLICTS
from zerofx.passes.wire.quantize_reductions import quantize_reductions
from zerofx.passes.zero.bucket import bucket
from zerofx.passes.zero.data_parallel import data_parallel
from zerofx.passes.zero.hoist_casts import hoist_casts
from zerofx.passes.zero.shard_gradients import shard_gradients
from zerofx.passes.zero.shard_optimizer import CONFLICTS as PRECISION_CONFLICTS
from zerofx.passes.zero.shard_optimizer import shard_optimizer
from zerofx.passes.zero.shard_parameters import CONFLICTS as SECOND_SHARD_CONFLICTS
from zerofx.passes.zero.shard_parameters import shard_parameters


def _eager(ctx: PassContext) -> str:
    is_eager = ctx.options.lowering == "eager"
    return "lowering eager (needs inductor)" if is_eager else ""


def _in_one(ctx: PassContext) -> str:
    return "chunk_loss is 0" if ctx.options.chunk_loss == 0 else ""


def _of_each_rank(ctx: PassContext) -> str:
    of = ctx.options
    return "" if of.may_lack_data or of.batch_norm == "global" else "loss rank"


def _gathers_exactly(ctx: PassContext) -> str:
    return "" if ctx.options.gather_dtype else "no gather_dtype"


def _reduces_exactly(ctx: PassContext) -> str:
    return "" if ctx.options.quantizes_reductions else "no reduce_wire"


def _no_whole_buckets(ctx: PassContext) -> str:
    if ctx.options.stage == 3:
        return "stage 3 (whole parameters live in buckets at 1 and 2)"
    return "" if ctx.options.bucket else "bucket is off"


def _buffers_count(ctx: PassContext) -> str:
    return "" if ctx.options.memory_budget is None else "memory_budget counts buckets' buffers"


# What reads the averages that ``data_parallel`` makes, what moves sharded updates, and what fuses
# updates into kernels: together these are the option ``fuse_optimizer``.
_of_averages = partial(Pass, requires=frozenset({"averaged_gradients"}))
_of_updates = partial(Pass, requires=frozenset({"sharded_updates"}), smallest_stage=1)
_fusing = partial(_of_averages, optional=True, switch="fuse_optimizer", lowers=True, why_not=_eager)

PIPELINE = (
    Pass(normalize),
    Pass(chunk_loss, preserves_numerics=False, why_not=_in_one),  # it sums in another order
    Pass(global_loss, why_not=_of_each_rank),
    Pass(recompute, optional=True),
    Pass(data_parallel, provides=frozenset({"averaged_gradients"}), preserves_numerics=False),
    _of_averages(hoist_casts, optional=True, smallest_stage=3),
    _of_averages(bucket, optional=True),
    _of_averages(
        shard_optimizer,
        provides=frozenset({"sharded_updates"}),
        preserves_numerics=False,  # norms are summed shard by shard
        smallest_stage=1,
        conflicts=PRECISION_CONFLICTS,
    ),
    _of_updates(
        shard_gradients,
        provides=frozenset({"sharded_gradients"}),
        preserves_numerics=False,  # so are norms of gradients that cross calls
        smallest_stage=2,
    ),
    _of_updates(
        quantize_reductions,
        preserves_numerics=False,  # it rounds what is summed
        quantizes="reduce_wire",
        why_not=_reduces_exactly,
        conflicts=REDUCTION_CONFLICTS,
    ),
    _of_averages(update_in_backward, optional=True),
    Pass(
        shard_parameters,
        requires=frozenset({"sharded_gradients"}),
        provides=frozenset({"sharded_parameters"}),
        smallest_stage=3,
        conflicts=SECOND_SHARD_CONFLICTS,
    ),
    Pass(
        quantize_gathers,
        requires=frozenset({"sharded_parameters"}),
        preserves_numerics=False,  # it rounds what is computed with
        quantizes="gather_dtype",
        smallest_stage=3,
        why_not=_gathers_exactly,
        conflicts=GATHER_CONFLICTS,
    ),
    _of_updates(
        place_offload, offloads=frozenset({"optimizer", "params"}), conflicts=OFFLOAD_CONFLICTS
    ),
    _of_averages(offload_activations, offloads=frozenset({"activations"})),
    _of_updates(prefetch, optional=True),
    _of_averages(
        place_files,
        offloads=frozenset({"optimizer", "params", "activations"}),
        tiers=frozenset({"nvme"}),
        conflicts=FILES_CONFLICTS,
    ),
    _of_updates(write_back, lowers=True, why_not=_no_whole_buckets),
    _fusing(
        fold_gradient_norms,
        preserves_numerics=False,  # kernels sum in another order
        smallest_stage=1,
    ),
    _fusing(fold_gradient_work),
    _fusing(merge_updates),
    _of_averages(reduce_unflattened, smallest_stage=1, lowers=True, why_not=_buffers_count),
    Pass(form_regions, lowers=True, why_not=_eager),
)


def rewrites(pipeline: Sequence[Pass]) -> list[Pass]:
    """The passes that make the program that is predicted, and that ranks agree on."""
    return [step for step in pipeline if not step.lowers]


def lowerings(pipeline: Sequence[Pass]) -> list[Pass]:
    """The passes behind those, which make of it the program that runs."""
    return [step for step in pipeline if step.lowers]
