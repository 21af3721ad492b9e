"""How many bytes an optimizer keeps of each parameter, before it keeps any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerofx import compat
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.trace.shadow import shadow_of
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.precision import StateStorage

_SHAPE = (4, 4)


def bytes_of_states(
    optimizer: torch.optim.Optimizer,
    infos: Mapping[int, ParameterInfo],
    precision: Precision,
) -> dict[int, float]:
    """What the optimizer keeps per element, by the ``id`` of the parameter.  Units: bytes.

    ``infos`` are the parameters that count, by ``id`` too.  States that there are decide; else the
    optimizer's own step runs once on a copy with one small tensor for each group and dtype.
    Parameters are left out for which that step fails.
    """
    storage = StateStorage(precision, type(optimizer).__name__)
    made: dict[tuple[int, torch.dtype], Mapping[str, Any] | None] = {}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            info = infos.get(id(parameter))
            if info is None:
                continue
            kept: Mapping[str, Any] = optimizer.state.get(parameter, {})
            tensors = [v for v in kept.values() if isinstance(v, Tensor) and v.numel() > 1]
            if tensors:
                like = max(tensors, key=Tensor.numel)
            else:
                compute = precision.compute_dtype(info.dtype)
                if (number, compute) not in made:
                    made[number, compute] = _tried(optimizer, number, compute)
                states = made[number, compute]
                if states is None:
                    continue
                kept, like = states, torch.empty(_SHAPE, device="meta")
            parts = storage.kept(kept, like, info.numel, info).values()
            nbytes = sum(dtype.itemsize * numel for dtype, numel in parts)
            found[id(parameter)] = nbytes / max(info.numel, 1)
    return found


def _tried(
    optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype
) -> Mapping[str, Any] | None:
    """The states that one step makes of a small parameter; None if it fails."""
    with (
        compat.real_tensors(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        parameter = torch.nn.Parameter(torch.ones(_SHAPE, dtype=dtype))
        parameter.grad = torch.ones(_SHAPE, dtype=dtype)
        try:
            shadow = shadow_of(optimizer, {(group, 0): parameter})
            type(shadow).step(shadow)
        except Exception:
            return None
        return dict(shadow.state[parameter])
