"""Updates that need a parameter whole: the rank that owns it computes them for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.whole_tensors import DividedUpdate, divide
from zerofx.codegen.trace.trace import Update
from zerofx.ir.mesh import EVERY_RANK, NUMBERS_TOGETHER
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import in_storage_order, whole_from_flat
from zerofx.runtime.optimizer.own_step import OwnStep, WholeParameter
from zerofx.runtime.optimizer.piece import Piece
from zerofx.runtime.optimizer.traces import TracedOptimizer


def compute_on_owners(
    shards: Sequence[Tensor],
    infos: Sequence[ParameterInfo],
    owners: Sequence[int],
    dtypes: Sequence[torch.dtype],
    compute: Callable[[int, Tensor], Tensor],
    communicator: Communicator,
) -> list[Tensor]:
    """Gather each tensor on its owner, compute there, and scatter the results.  Collective.

    ``compute(position, whole)`` returns a tensor of the parameter's shape and of this ``dtypes``;
    the owner calls it.  Otherwise as ``gather_on_owners`` and ``scatter_from_owners``.
    """
    wholes = gather_on_owners(shards, infos, owners, communicator)
    results = {place: compute(place, whole) for place, whole in wholes.items()}
    lengths = list(map(len, shards))
    return scatter_from_owners(results, infos, owners, dtypes, lengths, communicator)


def gather_on_owners(
    shards: Sequence[Tensor],
    infos: Sequence[ParameterInfo],
    owners: Sequence[int],
    communicator: Communicator,
) -> dict[int, Tensor]:
    """Return the whole tensors that this rank owns, by position.  Collective.

    Owners, as all ranks here, go by the numbers of their shards.  ``infos`` say what each rank
    holds.  All tensors of one owner travel together, as bytes, without padding.

    Shapes: ``[info.shard_numel]`` each -> the parameters'.
    """
    rank, ranks = communicator.mesh.shard, range(communicator.world_size)
    parts = [shard[: _length(info, rank)] for shard, info in zip(shards, infos, strict=True)]
    owned = _owned(owners, communicator)
    received = _exchanged(
        [[parts[i] for i in theirs] for theirs in owned],
        [[(_length(infos[i], other), shards[i].dtype) for i in owned[rank]] for other in ranks],
        shards[0],
        communicator,
    )
    return {
        i: whole_from_flat(torch.cat([received[other][number] for other in ranks]), infos[i])
        for number, i in enumerate(owned[rank])
    }


def scatter_from_owners(
    wholes: Mapping[int, Tensor],
    infos: Sequence[ParameterInfo],
    owners: Sequence[int],
    dtypes: Sequence[torch.dtype],
    lengths: Sequence[int],
    communicator: Communicator,
) -> list[Tensor]:
    """Return this rank's shards of the tensors that their owners have as ``wholes``.  Collective.

    Shapes: the parameters' -> ``[length]`` each; padding comes out as zero.
    """
    rank, ranks = communicator.mesh.shard, range(communicator.world_size)
    owned = _owned(owners, communicator)
    flat = {i: in_storage_order(wholes[i], infos[i]) for i in owned[rank]}
    returned = _exchanged(
        [[flat[i][slice(*infos[i].owned_by(other))] for i in owned[rank]] for other in ranks],
        [[(_length(infos[i], rank), dtypes[i]) for i in theirs] for theirs in owned],
        torch.empty(0, device=infos[0].device),
        communicator,
    )
    pieces = {owner: iter(found) for owner, found in enumerate(returned)}
    return [
        pad(piece, (0, length - len(piece)))
        for length, owner in zip(lengths, owners, strict=True)
        for piece in [next(pieces[owner])]
    ]


def _owned(owners: Sequence[int], communicator: Communicator) -> list[list[int]]:
    """Return the positions of what each rank owns."""
    ranks = range(communicator.world_size)
    return [[place for place, owner in enumerate(owners) if owner == other] for other in ranks]


def _length(info: ParameterInfo, rank: int) -> int:
    start, stop = info.owned_by(rank)
    return stop - start


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[tuple[int, torch.dtype]]],
    like: Tensor,
    communicator: Communicator,
) -> list[list[Tensor]]:
    """Send flat tensors to each rank; return those that each has sent here, as announced."""
    by_rank = list(map(communicator.mesh.shard_of, range(len(sent))))
    pieces = [[one.contiguous().view(torch.uint8) for one in sent[shard]] for shard in by_rank]
    nothing = torch.empty(0, dtype=torch.uint8, device=like.device)
    flat = torch.cat([nothing, *(piece for part in pieces for piece in part)])
    sizes = [[numel * of.itemsize for numel, of in expected[shard]] for shard in by_rank]
    received = communicator.all_to_all(
        flat, [sum(map(len, part)) for part in pieces], [sum(part) for part in sizes]
    )
    parts = iter(received.split([size for part in sizes for size in part]))
    found = {
        shard: [_of_dtype(next(parts), dtype) for _, dtype in expected[shard]] for shard in by_rank
    }
    return [found[shard] for shard in range(len(sent))]


def _of_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers; a copy where they do not begin at a multiple of a number's size."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


class OwnedUpdates:
    """Updates in three parts: of the shard, of the whole parameter on its owner, of the shard.

    ``begin`` runs the first two of several, ``finish`` the last of one.
    """

    def __init__(self, optimizer: TracedOptimizer) -> None:
        self._optimizer = optimizer
        self._divided: dict[Update, DividedUpdate] = {}
        self._begun: dict[int, _BegunUpdate | None] = {}
        self._own_step = OwnStep(optimizer)

    def forget_traces(self) -> None:
        """Forget how updates are cut; what has begun goes on."""
        self._divided.clear()

    def forget(self) -> None:
        """Forget what has begun: a step that failed has left it."""
        self._begun.clear()

    def has_begun(self, parameter: int) -> bool:
        """Return whether ``begin`` has begun this parameter's update."""
        return parameter in self._begun

    @torch.no_grad()
    def begin(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        owners: Sequence[int],
        communicator: Communicator,
    ) -> list[Tensor]:
        """Begin these updates; return what ``finish`` takes for their gradients.  Collective.

        What of an update needs the parameter whole is computed by the rank that owns it.

        Shapes: flat ``[n]`` of each parameter's shard, in and out.
        """
        if self._optimizer.settings.own_step:
            results = self._by_own_step(data, grads, parameters, owners, communicator)
            self._begun.update(dict.fromkeys(parameters))
            return results
        begun = [self._first_part(*one) for one in zip(data, grads, parameters, strict=True)]
        self._begun.update(zip(parameters, begun, strict=True))
        results = list(grads)
        divided = [place for place, one in enumerate(begun) if one.divided.core is not None]
        if not divided:
            return results
        found = compute_on_owners(
            [begun[place].taken for place in divided],
            [begun[place].piece.info for place in divided],
            [owners[place] for place in divided],
            [begun[place].divided.core_dtype for place in divided],
            lambda number, whole: begun[divided[number]].compute(whole),
            communicator,
        )
        for place, result in zip(divided, found, strict=True):
            results[place] = result
        return results

    def _by_own_step(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        owners: Sequence[int],
        communicator: Communicator,
    ) -> list[Tensor]:
        """Run the optimizer's own step on each parameter's owner, or everywhere; return values."""
        gradients = [grad.to(one.dtype) for one, grad in zip(data, grads, strict=True)]
        if EVERY_RANK in owners:
            copies = [
                (one.clone(), grad.clone()) for one, grad in zip(data, gradients, strict=True)
            ]
            wholes = dict(zip(parameters, itertools.starmap(WholeParameter, copies), strict=True))
            return list(self._own_step.run(wholes, parameters).values())
        infos = [self._optimizer.parameters[index].info for index in parameters]
        tensors, count = [*data, *gradients], len(parameters)
        found = gather_on_owners(tensors, [*infos] * 2, [*owners] * 2, communicator)
        mine = [place for place in range(count) if place in found]
        wholes = {parameters[i]: WholeParameter(found[i], found[count + i]) for i in mine}
        del found
        made = self._own_step.run(wholes, parameters)
        self._make_alike(parameters, owners, communicator)
        results = {place: made[parameters[place]] for place in mine}
        dtypes, lengths = [one.dtype for one in data], list(map(len, data))
        return scatter_from_owners(results, infos, owners, dtypes, lengths, communicator)

    def _make_alike(
        self, parameters: Sequence[int], owners: Sequence[int], communicator: Communicator
    ) -> None:
        """Compare the numbers that owners have in their groups; take them where nothing is owned.

        Raises: UpdateError for floats that differ.  Integers may count what a rank owns.
        """
        own = self._own_step.numbers()
        numel = -(-max(len(own), 1) // NUMBERS_TOGETHER) * NUMBERS_TOGETHER
        device = next(iter(self._optimizer.parameters.values())).info.device
        sent = torch.zeros(numel, dtype=torch.float64, device=device)
        sent[: len(own)] = torch.tensor([value for _, value in own], dtype=torch.float64)
        of_all = communicator.gather_whole(sent).view(-1, numel)[:, : len(own)].tolist()
        of_group: dict[int, list[int]] = {-1: list(range(len(of_all)))}
        users = {
            id(self._optimizer.parameters[i].user()): o
            for i, o in zip(parameters, owners, strict=True)
        }
        for number, group in enumerate(self._optimizer.live_optimizer().param_groups):
            of_group[number] = sorted({users[id(p)] for p in group["params"] if id(p) in users})
        for place, (number, value) in enumerate(own):
            found = {repr(of_all[owner][place]) for owner in of_group[number]}
            if type(value) is float and len(found) > 1:
                raise UpdateError(
                    f"{self._optimizer.name}.step has left numbers in its parameter groups or "
                    "attributes that differ between ranks, each of which updates the parameters "
                    "that it owns: an update depends on other parameters. zerofx updates "
                    "parameters one by one. Use an optimizer whose step treats each parameter by "
                    "itself."
                )
        for number, its in of_group.items():
            if number >= 0 and its and communicator.mesh.shard not in its:
                places = [place for place, (of, _) in enumerate(own) if of == number]
                self._own_step.take_numbers(number, iter(of_all[its[0]][p] for p in places))

    def _first_part(self, data: Tensor, grad: Tensor, parameter: int) -> _BegunUpdate:
        """Run the part of an update that comes before what needs the parameter whole."""
        piece = self._optimizer.piece([(data, grad.to(data.dtype), parameter)])
        traced = self._optimizer.traced(piece)
        if traced.update.clones_gradient:
            piece = piece._replace(grad=piece.grad.clone())
        divided = self.divide(traced.update, piece.info)
        inputs = [piece.grad, *traced.inputs]
        return _BegunUpdate(piece, divided, inputs, *divided.run_first(data, inputs))

    @torch.no_grad()
    def finish(self, data: Tensor, result: Tensor, parameter: int) -> Tensor:
        """Run the rest of an update that has begun."""
        begun = self._begun.pop(parameter)
        if begun is None:  # its own step has run
            return data.copy_(result)
        new_state, new_group = begun.divided.run_last(data, begun.inputs, begun.left, result)
        begun.piece.group.changed.update(new_group)
        self._optimizer.keep_state(begun.piece, new_state)
        return data

    def divide(self, update: Update, info: ParameterInfo) -> DividedUpdate:
        """Cut an update into its parts.  Raises: UpdateError if it cannot be."""
        if update not in self._divided:
            self._divided[update] = divide(update, info.shape)
        return self._divided[update]

    def check_precision(self, info: ParameterInfo) -> None:
        """Refuse a parameter that is kept otherwise than it is computed.  Raises: UpdateError."""
        precision = self._optimizer.settings.precision
        kept_in = precision.moment_storage(info.dtype, info.numel)
        if not precision.compute_dtype(info.dtype) is kept_in is info.dtype:
            raise UpdateError(
                f"parameter '{info.name}' is updated as a whole tensor, and {self._optimizer.name} "
                "then keeps its states in the parameter's dtype: train it in float32, without "
                "master_weights, stochastic_rounding and moment_dtype."
            )


@dataclass(frozen=True)
class _BegunUpdate:
    """An update between its first part and its last."""

    piece: Piece
    divided: DividedUpdate
    inputs: Sequence[Any]
    taken: Tensor
    numbers: Sequence[Any]
    left: Sequence[Any]

    def compute(self, whole: Tensor) -> Tensor:
        """Run the part between the two, on the rank that owns the parameter."""
        assert self.divided.core is not None
        return self.divided.core(whole, *self.numbers)
