"""Optimizers whose updates cannot run on shards: which, why, and who owns what of them.

Such an optimizer's own step runs as it is, on whole parameters, each on the rank that owns it.  A
rank has the whole states of the parameters that it owns, and none of the others'.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import is_torchs, read_arguments
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.nested import leaves
from zerofx.codegen.trace.step import holds_parameters
from zerofx.ir.mesh import balanced
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.own_step import shares_states
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.states import states_after_a_step
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY

logger = logging.getLogger("zerofx")

_SHAPE = (4, 4)
_STEPS_ALONE = 24
"""That show whether an update is one by itself: no trace shows it of a step that runs as it is."""

Described = Sequence[tuple[nn.Parameter, ParameterInfo]]

_REASONS: weakref.WeakKeyDictionary[Optimizer, dict[bool, str]] = weakref.WeakKeyDictionary()
"""By whether updates are of shards."""

_OWNERS: weakref.WeakKeyDictionary[Optimizer, dict[int, WeakIdKeyDictionary]]
_OWNERS = weakref.WeakKeyDictionary()
"""By the number of shards."""


def why_own_step(optimizer: Optimizer, parameters: Described, *, sharded: bool) -> str:
    """Return why an optimizer's own step is to run on whole parameters; "" if it is not.

    It is if an update, of these ``parameters`` or of the optimizer's others, cannot be traced, or
    not for shards (if ``sharded``), and each parameter's is one by itself.  Muon has a way of its
    own.  The answer stays the same for as long as the optimizer lives.
    """
    known = _REASONS.setdefault(optimizer, {})
    if sharded not in known:
        with compat.tensors.real_tensors():
            known[sharded] = _why(optimizer, _with_others(optimizer, parameters), sharded)
        if known[sharded]:
            where = "each on one rank, with its states" if sharded else "on every rank"
            name = type(optimizer).__name__
            logger.info(
                "%s's own step updates whole parameters, %s: %s", name, where, known[sharded]
            )
    return known[sharded]


def _why(optimizer: Optimizer, parameters: Described, sharded: bool) -> str:
    if isinstance(optimizer, Muon):
        return ""
    if is_torchs(type(optimizer)) and not isinstance(optimizer, Adafactor):
        return ""
    if holds_parameters(optimizer) or shares_states(optimizer.state):
        return ""
    if any(info.dtype.is_complex for _, info in parameters):
        return ""
    settings = UpdateSettings(rank=0, sharded=sharded)
    runner = OptimizerRunner(optimizer, dict(enumerate(parameters)), settings)
    try:
        if not check_independent(optimizer, num_steps=_STEPS_ALONE):
            return ""
    except UpdateError:
        return ""
    try:
        runner.trace_first(range(len(parameters)))
        for number, index in _one_of_each_group(optimizer, parameters):
            _trace_second(runner, optimizer, number, index)
    except UpdateError as error:
        return str(error).partition(": ")[0].partition(". ")[0]
    return ""


def _with_others(optimizer: Optimizer, parameters: Described) -> Described:
    """Return these and the optimizer's other parameters that may train some day."""
    infos = {id(parameter): info for parameter, info in parameters}
    found: list[tuple[nn.Parameter, ParameterInfo]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            bound = REGISTRY.lookup(p)
            info = infos.get(id(p)) or (bound.info if bound is not None else None)
            if info is None:
                layout = (tuple(p.shape), p.stride(), p.dtype, p.device)
                info = ParameterInfo(len(found), f"parameter {len(found)}", *layout, True, 1, 0)
            if info.dtype.is_floating_point or info.dtype.is_complex:
                found.append((p, info))
    return found


def _one_of_each_group(optimizer: Optimizer, parameters: Described) -> Iterator[tuple[int, int]]:
    """Yield each group's number with that of one of these parameters in it, of two elements."""
    for number, group in enumerate(optimizer.param_groups):
        members = set(map(id, group["params"]))
        found = (
            index
            for index, (parameter, info) in enumerate(parameters)
            if id(parameter) in members and info.numel > 1
        )
        yield from ((number, index) for index in itertools.islice(found, 1))


def _trace_second(runner: OptimizerRunner, optimizer: Optimizer, number: int, index: int) -> None:
    """Trace a parameter's second update, with the states that the first makes of a small one.

    Raises: UpdateError if it cannot be traced, or if states are no shards of anything.
    """
    dtype = runner.parameters[index].info.dtype
    made = states_after_a_step(optimizer, number, _SHAPE, dtype) or {}
    shapes = {leaf.shape for leaf in leaves(dict(made)) if isinstance(leaf, torch.Tensor)}
    if shapes <= {(), _SHAPE}:
        runner.trace_first([index], read_arguments(made, shard_shape=_SHAPE, inputs=made))
    elif runner.settings.sharded:
        raise UpdateError(
            f"{runner.name} keeps states that are neither of the parameter's shape nor a number"
        )


def owner_of(optimizer: Optimizer, bound: ParameterState) -> int | None:
    """Return the shard's number of the rank that has a parameter's whole states.

    None if each rank has a shard of them.
    """
    if bound.stage == 0 or bound.parameter is None:
        return None
    if optimizer not in _REASONS:  # loaded before any step has been compiled
        found = [REGISTRY.lookup(p) for group in optimizer.param_groups for p in group["params"]]
        described = [(one.parameter, one.info) for one in found if one is not None]
        why_own_step(optimizer, described, sharded=True)
    if not _REASONS[optimizer].get(True):
        return None
    return owners_among(optimizer, bound.communicator.mesh.num_shards)[bound.parameter]


def owners_among(optimizer: Optimizer, num_shards: int) -> Mapping[torch.Tensor, int]:
    """Return the shard's number of the rank that owns a parameter, for all of an optimizer's.

    All ranks have about as many elements.  A parameter that is added later takes none from others.
    """
    owners = _OWNERS.setdefault(optimizer, {}).setdefault(num_shards, WeakIdKeyDictionary())
    loads = [0] * num_shards
    new = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in owners:
                new.append(parameter)
            elif parameter.requires_grad:
                loads[owners[parameter]] += parameter.numel()
    work = [parameter.numel() * parameter.requires_grad for parameter in new]
    found, _ = balanced(work, num_shards, loads)
    owners.update(zip(new, found, strict=True))
    return owners
