"""The meaning of every ``zerofx::`` operator in plain torch: dumped programs run with these.

They run one after another, with nothing beside the program and no buffer used twice, so that what
they give is what a program says.  Compare the runtime, which is what a step runs with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.codegen.wires import blocks, errors, sums
from zerofx.ir import ops
from zerofx.ir.mesh import DATA, EVERY_RANK, Mesh
from zerofx.ir.ops import HOST
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.replay.in_process_group import Exchange
from zerofx.runtime.memory.flat import (
    copy_range,
    filled_up,
    kept_ranges,
    pack,
    take_shard,
    whole_from_flat,
    without_gaps,
)

MakeOptimizer = Callable[[int, list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer, by its number in a program, of a stand-in for every parameter."""

NoteUpdate = Callable[[int, int, Tensor, bool], None]
"""Is told of an update: its optimizer and parameter, the gradient, and whether that is whole."""


class Updates:
    """Optimizers that update any tensor in place of their parameters, and ``note`` each update."""

    def __init__(self, table: ParameterTable, make: MakeOptimizer, note: NoteUpdate | None = None):
        self._table, self._make, self._note = table, make, note
        self._made: dict[int, tuple[torch.optim.Optimizer, list[nn.Parameter]]] = {}

    def step(
        self,
        optimizer: int,
        parameters: Sequence[int],
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        found_inf: Tensor | None,
        whole: bool = False,
    ) -> None:
        """Update ``values`` in place, unless a scaler has found an overflow.

        ``whole`` says that they are no shards, whatever the stage is.
        """
        if self._note is not None:
            for index, grad in zip(parameters, grads, strict=True):
                self._note(optimizer, index, grad, whole)
        if found_inf is not None and found_inf.item():
            return
        if optimizer not in self._made:
            stand_ins = list(map(_stand_in, self._table))
            self._made[optimizer] = self._make(optimizer, stand_ins), stand_ins
        made, stand_ins = self._made[optimizer]
        for index, value, grad in zip(parameters, values, grads, strict=True):
            if not whole:
                self._cut_states(made.state.get(stand_ins[index], {}), self._table[index], value)
            stand_ins[index].data = value.detach()
            stand_ins[index].grad = grad.detach().to(value.device, value.dtype)
        with torch.enable_grad():
            made.step()
        for index, value in zip(parameters, values, strict=True):
            stand_ins[index].grad = None
            if stand_ins[index].data_ptr() != value.data_ptr():  # it has assigned `p.data`
                value.copy_(stand_ins[index].detach())

    def _cut_states(self, states: dict[str, Any], info: ParameterInfo, value: Tensor) -> None:
        """Cut states that are whole, for an optimizer makes them when it is made, as Adagrad."""
        for name, state in states.items():
            is_whole = isinstance(state, Tensor) and state.dim() and state.shape == info.shape
            if is_whole and value.shape != info.shape:
                states[name] = take_shard(state.to(value.device), info, info.rank)


class Reference:
    """The operators' kernels for one rank, as attributes of their names.

    ``table`` is as the program's passes have laid it out.  What no correct program looks at is NaN
    where it can be, freed memory and the padding of shards and buckets: who reads it, shows.
    """

    def __init__(self, table: ParameterTable, mesh: Mesh, exchange: Exchange, updates: Updates):
        self.table = ParameterTable(tuple(replace(info, rank=mesh.shard) for info in table))
        self.mesh, self.exchange, self.updates = mesh, exchange, updates
        self._wholes: dict[tuple[int, int], Tensor] = {}  # that owners have updated
        self.errors: dict[tuple[int, str], Tensor] = {}  # of wires, by bucket and axis

    def poison(self, dtype: torch.dtype) -> float:
        """What memory holds that no correct program looks at."""
        return math.nan if dtype.is_floating_point or dtype.is_complex else 0

    # Communication

    def _along(self, axis: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of the ranks along an axis, in their order; all ranks exchange theirs."""
        of_all = self.exchange(tensor)
        return [of_all[rank] for rank in self.mesh.ranks_along(axis)]

    def _reduced(self, axis: str, tensor: Tensor, reduction: str) -> Tensor:
        return reduced(self._along(axis, tensor), reduction, mean_of=self.mesh.world_size)

    def gradient(self, grad: Tensor, parameter: int) -> Tensor:
        return self._reduced(self.mesh.everywhere, grad, "mean")

    def count(self, number: Tensor, of: str, total: Tensor | None = None) -> Tensor:
        return number

    def loss_part(self, value: Tensor, of: str, backward: int = -1) -> Tensor:
        return value

    def over_ranks(self, value: Tensor, reduction: str) -> Tensor:
        return self._reduced(self.mesh.everywhere, value, reduction)

    def has_data(self, dtype: torch.dtype, device: torch.device, why_not: str = "") -> Tensor:
        """Part of a batch, on each rank another: what multiplies by it in vain shows."""
        return torch.full((), 1 / (1 + self.mesh.rank), dtype=dtype, device=device)

    def end_without_data(self, ranks: Tensor) -> None:
        """Every rank of a replay has data."""

    def all_reduce_start(self, input: Tensor, reduction: str, axis: str = DATA) -> Tensor:
        return self._reduced(axis, input.contiguous(), reduction)

    def all_reduce_bucket_start(
        self,
        wholes: list[Tensor],
        parameters: list[int],
        numel: int,
        reduction: str,
        axis: str = DATA,
    ) -> Tensor:
        infos = [self.table[index].contiguous for index in parameters]
        return self.all_reduce_start(self._laid_out(wholes, infos, numel), reduction, axis)

    def reduce_scatter_start(
        self, flat: Tensor, reduction: str, world_size: int, axis: str = DATA
    ) -> Tensor:
        total = self._reduced(axis, flat, reduction)
        place = self.mesh.ranks_along(axis).index(self.mesh.rank)
        return total.view(world_size, -1)[place].clone()

    def all_gather_start(self, shard: Tensor, world_size: int, axis: str = DATA) -> Tensor:
        return torch.cat(self._along(axis, shard))

    def refill_start(
        self,
        shard: Tensor,
        parameters: list[int],
        world_size: int,
        is_new: bool = False,
        axis: str = DATA,
    ) -> Tensor:
        """Gathered every time, which gives what was gathered last."""
        return self.all_gather_start(shard, world_size, axis)

    def all_to_all_start(self, parts: Tensor, world_size: int, axis: str = DATA) -> Tensor:
        place = self.mesh.ranks_along(axis).index(self.mesh.rank)
        sent = self._along(axis, parts)
        return torch.cat([flat.view(world_size, -1)[place] for flat in sent])

    def wait(self, started: Any) -> Any:
        return started

    def free(self, gathered: Tensor) -> None:
        gathered.fill_(self.poison(gathered.dtype))

    # Wires

    def quantize(
        self, flat: Tensor, code: str, parts: int = 1, parameters: Sequence[int] = ()
    ) -> Tensor:
        infos = [self.table[index] for index in parameters]
        return blocks.quantize(without_gaps(flat, infos), code, parts)

    def dequantize(
        self, wire: Tensor, code: str, parts: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        return blocks.dequantize(wire, code, parts, numel, dtype)

    def dequantize_sum(
        self,
        received: Tensor,
        code: str,
        parts: int,
        numel: int,
        reduction: str,
        dtype: torch.dtype,
    ) -> Tensor:
        divisor = self.mesh.world_size if reduction == "mean" else 1
        return sums.dequantize_sum(received, code, parts, numel, divisor, dtype)

    def fill_up(self, flat: Tensor, parameters: Sequence[int], numel: int) -> Tensor:
        return filled_up(flat, [self.table[index] for index in parameters], numel)

    def correct(
        self,
        flat: Tensor,
        parameters: Sequence[int],
        numel: int,
        axis: str = DATA,
        scale: Tensor | None = None,
        rest: Tensor | None = None,
    ) -> Tensor:
        ranges = self._ranges(parameters, flat.numel())
        error = self._error(parameters, axis, numel, flat.device) if rest is None else rest
        return errors.corrected(flat, error, ranges, scale)

    def rounding_error(
        self, exact: Tensor, wire: Tensor, code: str, parts: int, scale: Tensor | None = None
    ) -> Tensor:
        return errors.rounding_error(exact, wire, code, parts, scale)

    def keep_error(
        self,
        rest: Tensor,
        sums: Sequence[Tensor],
        parameters: Sequence[int],
        axis: str = DATA,
        found_inf: Tensor | None = None,
    ) -> None:
        error = self._error(parameters, axis, rest.numel(), rest.device)
        begin, ranges = 0, self._ranges(parameters, rest.numel())
        if sums:
            begin = self.mesh.ranks_along(axis).index(self.mesh.rank) * sums[0].numel()
        errors.keep(error, rest, sums, begin, self.mesh.world_size, ranges, found_inf)

    def _ranges(self, parameters: Sequence[int], numel: int) -> list[tuple[int, int]]:
        return kept_ranges([self.table[index] for index in parameters], numel)

    def _error(
        self, parameters: Sequence[int], axis: str, numel: int, device: torch.device
    ) -> Tensor:
        key = self.table[parameters[0]].place.bucket, axis
        if key not in self.errors:
            self.errors[key] = torch.zeros(numel, dtype=torch.float32, device=device)
        return self.errors[key]

    # Shards and buckets

    def take_shard(self, whole: Tensor, parameter: int, shard_numel: int, axis: str = "") -> Tensor:
        info = self.table.cut(parameter, axis)
        shard = whole.new_full((shard_numel,), self.poison(whole.dtype))
        copy_range(shard, whole, info, info.rank)
        return shard

    def mask_padding(
        self, shard: Tensor, parameter: int, identity: float, axis: str = ""
    ) -> Tensor:
        if not shard.numel():
            return shard.new_full((1,), identity)
        info = self.table.cut(parameter, axis)
        start, stop = info.owned_by(info.rank)
        masked = shard.clone()
        masked[stop - start :] = identity
        return masked

    def pack(
        self, shards: list[Tensor], parameters: list[int], numel: int, axis: str = ""
    ) -> Tensor:
        return pack(shards, [self.table.cut(index, axis) for index in parameters])

    def flatten_bucket(self, wholes: list[Tensor], parameters: list[int], numel: int) -> Tensor:
        return self._laid_out(wholes, [self.table[index] for index in parameters], numel)

    def _laid_out(self, wholes: list[Tensor], infos: list[ParameterInfo], numel: int) -> Tensor:
        flat = wholes[0].new_full((numel,), self.poison(wholes[0].dtype))
        for whole, info in zip(wholes, infos, strict=True):
            whole_from_flat(flat[info.place.offset :], info).copy_(whole)
        return flat

    def reduce_bucket_start(
        self,
        wholes: list[Tensor],
        *,
        reduction: str,
        world_size: int,
        axis: str = DATA,
        **bucket: Any,
    ) -> Tensor:
        flat = self.flatten_bucket(wholes, **bucket)
        return self.reduce_scatter_start(flat, reduction, world_size, axis)

    def write_back(self, gathered: Tensor, wholes: list[Tensor], parameters: list[int]) -> None:
        for whole, index in zip(wholes, parameters, strict=True):
            info = self.table[index]
            whole.copy_(whole_from_flat(gathered[info.place.offset :], info))

    # Updates

    def optimizer_step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        optimizer: int,
        found_inf: Tensor | None = None,
        parameters: Sequence[int] = (),
    ) -> list[Tensor]:
        values = [value.clone() for value in params]
        self.updates.step(optimizer, parameters, values, grads, found_inf, whole=True)
        return values

    def update(
        self,
        values: Tensor,
        grad: Tensor,
        optimizer: int,
        parameter: int,
        found_inf: Tensor | None = None,
    ) -> Tensor:
        whole = self._wholes.pop((optimizer, parameter), None)
        if whole is None:
            self.updates.step(optimizer, [parameter], [values], [grad], found_inf)
        else:
            is_whole = values.shape == whole.shape
            values.copy_(whole if is_whole else self.take_shard(whole, parameter, values.numel()))
        return values

    def update_together(
        self,
        values: list[Tensor],
        grads: list[Tensor],
        optimizer: int,
        parameters: list[int],
        found_inf: Tensor | None = None,
        work: str = "",
        coefficients: Sequence[Tensor] | None = None,
        norm: int | None = None,
    ) -> list[Tensor]:
        given = worked_on(grads, work, coefficients or ())
        for value, grad, index in zip(values, given, parameters, strict=True):
            self.update(value, grad, optimizer, index, found_inf)
        if norm is None:
            return values
        whole = map(self.mask_padding, given, parameters, itertools.repeat(0.0))
        return [*values, *(one.float().square().sum() for one in whole)]

    def on_owners(
        self,
        values: list[Tensor],
        grads: list[Tensor],
        optimizer: int,
        parameters: list[int],
        owners: list[int],
        flops: int,
        found_inf: Tensor | None = None,
        *,
        own_step: bool = False,
    ) -> list[Tensor]:
        """Update the whole tensors on every rank; ``update`` then keeps what a rank owns of it."""
        if EVERY_RANK in owners:
            updated, averaged = [value.clone() for value in values], grads
        else:
            updated = list(map(self.whole, values, parameters))
            averaged = list(map(self.whole, grads, parameters))
        self.updates.step(optimizer, parameters, updated, averaged, found_inf, whole=True)
        for index, whole in zip(parameters, updated, strict=True):
            self._wholes[optimizer, index] = whole
        return [torch.full_like(grad, math.nan) for grad in grads]

    def whole(self, shard: Tensor, index: int, axis: str = "") -> Tensor:
        """The tensor of which every rank has a shard, that of this parameter.  Collective."""
        info = self.table.cut(index, axis)
        over = axis or self.mesh.across
        padded = shard.new_zeros(info.largest_shard_numel)
        padded[: shard.numel()] = shard
        flat = shard.new_zeros(info.place.extent)
        for place, its in enumerate(self._along(over, padded)):
            shard_of_it = self.mesh.shard_of(place) if over == self.mesh.everywhere else place
            start, stop = info.extent_of(shard_of_it)
            flat[start:stop] = its[: stop - start]
        return whole_from_flat(flat, info).clone(memory_format=torch.preserve_format)

    def whole_value(self, kept: Tensor, index: int) -> Tensor:
        """The whole parameter of which every rank keeps a part at stage 3.  Collective."""
        over = self.mesh.cut_in(self.table[index].kept.world_size)
        return self.whole(kept, index, **over)

    def average(self, value: Tensor, index: int, is_shard: bool, unreduced: str) -> Tensor:
        """The whole gradient that a value is of, averaged if it is not yet.  Collective."""
        if is_shard and unreduced in ("", self.mesh.everywhere):  # a shard is of an average
            return self.whole(value, index)
        if is_shard:
            value = self.whole_value(value, index)
        return self._reduced(unreduced, value, "mean") if unreduced else value

    # Host memory and files

    def copy_start(
        self,
        values: list[Tensor],
        parameters: list[int],
        place: str = HOST,
        slot: int = -1,
        shards: list[Tensor] | None = None,
    ) -> Tensor | list[Tensor]:
        if shards is not None:
            for value, shard in zip(values, shards, strict=True):
                shard.copy_(value)
            return shards
        device = "cpu" if place == HOST else place
        if parameters:
            return torch.cat([value.to(device) for value in values])
        (value,) = values
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)

    def update_start(
        self,
        values: Tensor | list[Tensor],
        grads: Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: Tensor | None = None,
    ) -> Tensor | list[Tensor]:
        lengths = [self.table[index].shard_numel for index in parameters]
        parts = values.split(lengths) if isinstance(values, Tensor) else values
        for index, value, grad in zip(parameters, parts, grads.split(lengths), strict=True):
            self.updates.step(optimizer, [index], [value], [grad], found_inf)
        return values

    def fetch_start(self, evicted: Tensor | None, **_what: Any) -> Tensor:
        """Nothing: states stay with the optimizer, shards where they are, values as they are."""
        return torch.empty(0, dtype=torch.uint8) if evicted is None else evicted

    def evict(self, there: Tensor, what: str, changed: bool = True, **_whose: Any) -> Tensor:
        """What stands for it: a value's copy, and poison in the memory that it was in."""
        if what != "value":
            return there
        evicted = there.clone(memory_format=torch.preserve_format)
        there.fill_(self.poison(there.dtype))
        return evicted if changed else there


Watch = Callable[[fx.Node, Any], None]


class Interpreter(fx.Interpreter):
    """Runs a program with a reference's kernels for our operators; shows ``watch`` each result."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, reference: Reference, watch: Watch | None = None
    ) -> None:
        super().__init__(root, graph=graph)
        self.reference, self.watch = reference, watch

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if self.watch is not None:
            self.watch(node, result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if ops.is_ours(target):
            schema = target._schema
            names = (argument.name for argument in schema.arguments)
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            target = getattr(self.reference, schema.name.split("::")[1])
        return super().call_function(target, args, kwargs)


def worked_on(
    grads: Sequence[Tensor], work: str, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradients after the ``work`` that an ``update_together`` says is done to them first."""
    if not work:
        return grads
    others = ["coefficient", *(f"coefficient_{n}" for n in range(1, len(coefficients)))]
    names = ", ".join(["gradient", *others[: len(coefficients)]])
    namespace = {"aten": torch.ops.aten, "torch": torch, "inf": math.inf, "nan": math.nan}
    exec(f"def work({names}): {work}", namespace)
    return [namespace["work"](grad, *coefficients) for grad in grads]


def _stand_in(info: ParameterInfo) -> nn.Parameter:
    """A parameter that looks like another to an optimizer's checks, and takes no memory."""
    element = torch.zeros((), dtype=info.dtype, device=info.device)
    return nn.Parameter(element.expand(info.shape), requires_grad=info.requires_grad)


def reduced(values: Sequence[Tensor], reduction: str, mean_of: int | None = None) -> Tensor:
    """Return the sum, mean, maximum or minimum of ranks' values, added up in their order.

    A mean may be that of a larger number: of values that have been added up before.
    """
    combine: Mapping[str, Any] = {"max": torch.maximum, "min": torch.minimum}
    total = values[0].clone()
    for value in values[1:]:
        total = combine.get(reduction, torch.add)(total, value)
    return total / (mean_of or len(values)) if reduction == "mean" else total
