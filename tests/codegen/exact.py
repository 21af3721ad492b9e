"""One step of a golden kernel against torch.optim in float64, on any device that runs Triton.

All start from the same values, those that the kernel is given: as far as they are kept in fewer
bits, a step is exact up to what its results are rounded to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.codegen.updates import Shards, kept
from tests.codegen.variants import VARIANTS
from zerofx.codegen.rewrite.rounding import CODES, decode_blocks, in_blocks
from zerofx.codegen.rewrite.storage import MASTER, SCALE, narrow

NEAREST, AT_RANDOM = 2.0**-8, 2.0**-7
"""The largest relative error of rounding to bfloat16."""

COEFFICIENT = 0.3


def excess(name: str, length: int, device: str = "cpu") -> dict[str, float]:
    """Return the largest error of each of a step's results, in units of what it may be at most.

    That is twice torch.optim's own error at the dtype that the kernel computes in, or a rounding
    (four in float64), and the rounding of what is kept in fewer bits.
    """
    step = _Step(name, length, device)
    return {tensor: worst for tensor, worst in step.run()}


class _Step:
    def __init__(self, name: str, length: int, device: str) -> None:
        variant: dict[str, Any] = {"steps": 2, "dtype": torch.float32, **VARIANTS[name]}
        make = variant.pop("make_optimizer")
        num_steps, dtype = variant.pop("steps"), variant.pop("dtype")
        self.stored, self.work = variant.pop("stored", None), variant.pop("work", None)
        self.squares = variant.pop("squares", False)
        self.device, self.make = device, make
        self.generator = torch.Generator().manual_seed(length)
        parameter = nn.Parameter(self.random(length).to(dtype))
        self.optimizer = make([parameter])
        for _ in range(num_steps):
            parameter.grad = self.random(length).to(dtype)
            self.optimizer.step()
        self.gradient = self.random(length).to(self._gradient_dtype(variant, dtype))
        self.variant, self.dtype = variant, dtype

    def random(self, length: int) -> Tensor:
        return torch.randn(length, generator=self.generator)

    def _gradient_dtype(self, variant: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
        if self.work is not None:
            gradient = next(iter(self.work.graph_module.graph.nodes))
            return gradient.meta["val"].dtype
        if self.stored is not None:
            return self.stored.gradient
        return variant.get("gradient_dtype", dtype)

    def run(self) -> Iterator[tuple[str, float]]:
        from zerofx.codegen.pointwise import pointwise_program
        from zerofx.codegen.triton.launch import TritonKernel

        def kernel(update, **options):
            made.append(kept(update, self.stored) if self.stored else update)
            return TritonKernel(pointwise_program(made[-1], **options))

        made: list[Any] = []
        work, squares = self.work, self.squares
        shards = Shards(self.optimizer, kernel, self.variant, work, squares)
        traced, run, group, state = shards.trace()
        (update,) = made
        given = [shards.parameter.detach(), self.gradient]
        given += [*group.tensors, *state.tensors, *group.scalars, *state.scalars]
        given, before = self._as_stored(given, traced.inputs)
        coefficients = []
        if work is not None:
            _, *inputs = work.graph_module.graph.find_nodes(op="placeholder")
            coefficients = [torch.tensor(COEFFICIENT).to(n.meta["val"].dtype) for n in inputs]
        worked = self.gradient if work is None else work(self.gradient, *coefficients)
        exact, plain = self._expected(before, worked, torch.float64), self._plain(before, worked)
        on_device = [self._moved(value) for value in given]
        with torch.no_grad():
            results = run(*on_device, *(value.to(self.device) for value in coefficients))
            after, _ = update.filled(results)
        after = {"param": on_device[0], **after}
        for name, (value, rounding) in self._decoded(after, before).items():
            yield name, _worst(value, exact[name], plain[name], rounding)
        if squares:
            total = worked.double().square().sum()
            yield "squares", ((results[-1].cpu().double() - total) / total).abs().item() / 1e-6

    def _moved(self, value: Any) -> Any:
        """What has elements goes to the device; numbers stay with the host, as in a step."""
        is_shard = isinstance(value, Tensor) and value.dim() > 0
        return value.clone().to(self.device) if is_shard else value

    def _as_stored(self, given: list, inputs: tuple[str, ...]) -> tuple[list, dict[str, Tensor]]:
        """The kernel's inputs, and the values of parameter and moments that they stand for."""
        names = ["param", "grad", *(path.removeprefix("state.") for path in inputs[2:])]
        before = dict(zip(names, given, strict=True))
        if self.stored is None:
            return given, before
        extras: dict[str, Any] = {"offset": torch.tensor(7), "key": torch.tensor(99).int()}
        place = {name: at for at, name in enumerate(names)}
        if self.stored.has_master:
            extras[MASTER] = before["param"].clone()
        given[0] = given[0].to(self.stored.parameter)
        if not self.stored.has_master:
            before["param"] = given[0].to(self.stored.compute)
        for name, dtype in self.stored.moments:
            bits = torch.randint(2**16, given[0].shape, generator=self.generator).int()
            value, scale = narrow(before[name], dtype, bits)
            given[place[name]], extras[name + SCALE] = value, scale
            before[name] = _widened(value, scale)
        return [*given, *(extras[name] for name in self.stored.extras)], before

    def _expected(self, before: dict, gradient: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """What torch.optim itself makes of the same values at a dtype."""
        parameter = nn.Parameter(before["param"].to(dtype, copy=True))
        optimizer = self.make([parameter])
        (old,) = self.optimizer.param_groups[0]["params"]
        values = copy.deepcopy(dict(self.optimizer.state[old]))
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                values[name] = before[name].to(dtype, copy=True)
        optimizer.state[parameter].update(values)
        parameter.grad = gradient.to(dtype)
        optimizer.step()
        return {"param": parameter.detach(), **optimizer.state[parameter]}

    def _plain(self, before: dict, gradient: Tensor) -> dict[str, Tensor]:
        computed_in = self.stored.compute if self.stored else self.dtype
        if computed_in is torch.bfloat16:  # such a kernel computes in float32, and rounds once
            computed_in = torch.float32
        return self._expected(before, gradient, computed_in)

    def _decoded(self, after: dict, before: dict) -> dict[str, tuple[Tensor, Tensor]]:
        """Each result's values, and the largest error of the rounding that it is kept with."""
        found = {}
        for name, value in after.items():
            if name == MASTER:
                found["param"] = value.cpu(), torch.zeros(value.shape)
            elif isinstance(value, Tensor) and value.dim() and not name.endswith(SCALE):
                scale = after.get(name + SCALE)
                wide = _widened(value.cpu(), None if scale is None else scale.cpu())
                found[name] = wide, self._rounding(name, value.dtype, wide)
        return found

    def _rounding(self, name: str, dtype: torch.dtype, wide: Tensor) -> Tensor:
        if dtype is torch.int8:
            return torch.cat([_code_step(wide[rows]) for rows, _ in in_blocks(len(wide), 1)])
        if dtype is not torch.bfloat16:
            return torch.zeros(wide.shape)
        at_random = self.stored is not None and (
            self.stored.rounds_parameter if name == "param" else True
        )
        return wide.abs() * (AT_RANDOM if at_random else NEAREST)


def _widened(value: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return value.float() if value.dtype is torch.bfloat16 else value
    blocks = in_blocks(len(value), 1)
    return torch.cat([decode_blocks(value[r].view(1, -1), scale[b]).view(-1) for r, b in blocks])


def _code_step(values: Tensor) -> Tensor:
    """The distance of neighbouring codes above each value of a block."""
    scale = values.abs().max()
    level = (values.abs() / scale).sqrt().sqrt().nan_to_num() + 1 / CODES
    return 4 / CODES * level**3 * scale


def _worst(own: Tensor, exact: Tensor, plain: Tensor, rounding: Tensor) -> float:
    error, plain_error = (own.double() - exact).abs(), (plain.double() - exact).abs()
    epsilon = torch.finfo(plain.dtype).eps
    if plain.dtype is torch.float64:  # torch.optim's own error is not known then
        epsilon *= 4
    allowed = max(2 * plain_error.max().item(), epsilon * exact.abs().max().item())
    return (error / (allowed + rounding.double()).clamp(min=1e-300)).max().item()
