"""The host memory that a program will take and has not taken yet."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from zerofx.ir.offload import copies_activation, is_staged, staging_bytes
from zerofx.ir.parameters import ParameterInfo
from zerofx.ir.sizes import hinted_bytes
from zerofx.runtime.file_operators import ProgramFiles
from zerofx.runtime.optimizer.steps import OptimizerSteps
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Location, words_for
from zerofx.runtime.storage.copies import Copies


def host_needs(
    graph: fx.Graph,
    kept: Iterable[tuple[nn.Parameter, ParameterInfo]],
    copies: Copies,
    steps: OptimizerSteps,
    files: ProgramFiles | None,
    is_delayed: bool,
) -> dict[str, int]:
    """Return the bytes to come, by what for.  ``kept`` are the parameters with shards there."""
    needs = {
        "staging buffers": copies.bytes_to_come(staging_bytes(graph, _is_of_bucket)),
        "parameter shards": _shards_to_come(kept),
        "activations": copies.bytes_to_come(staging_bytes(graph, copies_activation)),
        "delayed updates": _delayed_bytes(graph) if is_delayed else 0,
    }
    if files is not None:
        cached = files.tier.cache_bytes_to_come(files.buckets)
        needs = {f"a cache of {words_for(files.buckets)}": cached, **needs}
    else:
        needs = {"optimizer states": steps.host_bytes_to_come(), **needs}
    return {what: nbytes for what, nbytes in needs.items() if nbytes}


def _shards_to_come(kept: Iterable[tuple[nn.Parameter, ParameterInfo]]) -> int:
    """Bytes of shards that will be in host memory and are not there yet."""
    known = [(REGISTRY.lookup(parameter), info) for parameter, info in kept]
    return sum(
        info.kept.shard_numel * info.dtype.itemsize
        for bound, info in known
        if bound is None or bound.location is Location.DEVICE
    )


def _delayed_bytes(graph: fx.Graph) -> int:
    """Bytes of values and gradients that updates have to themselves between two calls."""
    return sum(map(hinted_bytes, filter(_is_of_bucket, graph.nodes)))


def _is_of_bucket(start: fx.Node) -> bool:
    return is_staged(start) and not copies_activation(start)
