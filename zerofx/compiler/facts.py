"""The facts that a step's passes are given."""

from __future__ import annotations

from collections.abc import Mapping

from zerofx.capture import substitutes
from zerofx.capture.step import CapturedStep
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.rewrite.whole_tensors import whole_update_flops
from zerofx.hardware import Hardware
from zerofx.ir.mesh import EVERY_RANK, Mesh
from zerofx.ir.parameters import KeptGathered, Place
from zerofx.options import Options
from zerofx.passes.base import PassContext, WholeUpdate
from zerofx.runtime.optimizer.owners import owners_among, why_own_step
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
        whole_updates=whole_updates(step, options.stage, mesh),
        state_bytes=state_bytes(step, options),
        host_parameters=on_host,
        filed_parameters=in_files,
    )


def whole_updates(step: CapturedStep, stage: int, mesh: Mesh) -> dict[tuple[int, int], WholeUpdate]:
    """Return the updates that may need whole tensors, or the optimizer's own step."""
    found: dict[tuple[int, int], WholeUpdate] = {}
    for handle in step.optimizers:
        optimizer = substitutes.optimizer_of(handle)
        mine = [parameter for of, parameter in step.updates if of == handle]
        described = [(step.tensors[parameter], step.table[parameter]) for parameter in mine]
        flops = whole_update_flops(optimizer) if stage > 0 else {}
        why = why_own_step(optimizer, described, sharded=stage > 0)
        owners = owners_among(optimizer, mesh.num_shards) if why and stage > 0 else {}
        for tensor, info in described:
            if why:
                owner = owners.get(tensor, EVERY_RANK)
                found[handle, info.index] = WholeUpdate(info.numel, why, owner)
            elif id(tensor) in flops:
                found[handle, info.index] = WholeUpdate(flops[id(tensor)])
    return found


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
