"""The facts that a step's passes are given."""

from __future__ import annotations

from collections.abc import Mapping

from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.rewrite.whole_tensors import whole_update_flops
from zerofx.hardware import Hardware
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import KeptGathered, Place
from zerofx.options import Options
from zerofx.passes.base import PassContext
from zerofx.runtime.optimizer.states import bytes_of_states
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Location


def context_of(
    step: CapturedStep,
    options: Options,
    mesh: Mesh,
    figures: Hardware,
    kept_gathered: Mapping[tuple[str, ...], KeptGathered],
    known: Mapping[int, Place | None],
) -> PassContext:
    """Collect what is known of a step before its passes; ``known`` places are parameters' own."""
    step.table.assign({index: place for index, place in known.items() if place is not None})
    on_host, in_files = parameters_elsewhere(step, options)
    return PassContext(
        options,
        step.table,
        mesh,
        step.num_backwards,
        bound=frozenset(known),
        kept_gathered=kept_gathered,
        figures=figures,
        whole_updates=whole_updates(step),
        state_bytes=state_bytes(step, options),
        host_parameters=on_host,
        filed_parameters=in_files,
    )


def whole_updates(step: CapturedStep) -> dict[tuple[int, int], int]:
    """The updates that may need whole tensors, (optimizer, parameter) -> what each computes."""
    flops = {
        handle: whole_update_flops(substitutes.optimizer_of(handle)) for handle in step.optimizers
    }
    return {
        (handle, parameter): flops[handle][id(step.tensors[parameter])]
        for handle, parameter in step.updates
        if id(step.tensors[parameter]) in flops.get(handle, ())
    }


def state_bytes(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """Return each update's bytes per element, as (optimizer, parameter), if a plan needs them."""
    if "optimizer" not in options.offload or options.memory_budget is None:
        return {}
    return bytes_kept(step, options)


def bytes_kept(step: CapturedStep, options: Options) -> dict[tuple[int, int], float]:
    """Return each update's bytes per element, as (optimizer, parameter), where they are known."""
    infos = {id(t): info for t, info in zip(step.tensors, step.table, strict=True)}
    kept = {
        handle: bytes_of_states(substitutes.optimizer_of(handle), infos, Precision.of(options))
        for handle in step.optimizers
    }
    return {
        (handle, parameter): kept[handle][id(step.tensors[parameter])]
        for handle, parameter in step.updates
        if id(step.tensors[parameter]) in kept[handle]
    }


def parameters_elsewhere(
    step: CapturedStep, options: Options
) -> tuple[frozenset[int], frozenset[int]]:
    """The parameters whose shards the program is to find in host memory, by index.

    The second are those of them that are in files while nothing is done with them there.  What
    updates nothing, an evaluation, takes shards from where they are: they need not move for it,
    nor fit the device.
    """
    if "params" in options.offload:
        everything = frozenset(info.index for info in step.table)
        return everything, everything if options.offload_tier == "nvme" else frozenset()
    if options.stage < 3 or step.updates:
        return frozenset(), frozenset()
    bounds = {i: REGISTRY.lookup(tensor) for i, tensor in enumerate(step.tensors)}
    away = {i: bound for i, bound in bounds.items() if bound and bound.location != Location.DEVICE}
    return frozenset(away), frozenset(i for i, bound in away.items() if bound.file is not None)
