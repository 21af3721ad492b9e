"""One compiled program at run time: its inputs swapped for shards, its operators' kernels."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from zerofx import effects, ops
from zerofx.codegen.gradient_norm import squares_of
from zerofx.codegen.gradient_work import GradientWork
from zerofx.codegen.storage import Precision
from zerofx.errors import StepError
from zerofx.graph import (
    gradient_outputs,
    groups_in_files,
    hinted_bytes,
    input_role,
    placeholders,
    sharded_results,
    staging_bytes,
    unreduced_results,
    written_gradients,
)
from zerofx.plan import ParameterTable
from zerofx.runtime.bound import BoundParameter
from zerofx.runtime.bucket_memory import BucketMemory
from zerofx.runtime.carried import Key
from zerofx.runtime.communication import Communicator
from zerofx.runtime.delayed import DelayedUpdates
from zerofx.runtime.delayed import Key as DelayedKey
from zerofx.runtime.file_tier import FileTier
from zerofx.runtime.filed_states import StateBucket
from zerofx.runtime.flat import (
    copy_range,
    flat_pieces,
    flatten_bucket,
    in_memory_of_its_own,
    pack,
    take_shard,
    whole_from_flat,
    without_base,
)
from zerofx.runtime.moves import Mover
from zerofx.runtime.parameters import REGISTRY
from zerofx.runtime.update import PLAIN, OptimizerRunner
from zerofx.runtime.whole import attach_optimizer, confirm_writes, join


class StepRuntime:
    """Runs one lowered program for one compiled function.

    ``graph`` is the program after all passes, ``tensors`` the table's parameters; ``updates``
    are the (optimizer, parameter) pairs that it updates.  With ``moves_whole`` whole
    parameters live in their bucket's memory; ``in_place`` are the buckets, as their parameters'
    indices, that the program may write to before its last copies do.  ``keep_source`` is given
    the name and the text of each kernel that is generated for an update.  A ``mover`` makes
    the program's moves; with ``states_on_host`` optimizer states live there, and updates run there,
    those of a bucket as one with ``joins_updates``.  ``open_files`` opens the tier for those that a
    program reads from files.  ``host_needs`` are the bytes that all this will take there, by what
    for.  With ``delayed`` updates go on into the next call, which stores what they have made.

    Raises: UpdateError if an optimizer's update cannot be compiled, StepError if the host has no
    room for it; nothing has changed then.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: fx.Graph,
        table: ParameterTable,
        tensors: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        stage: int,
        updates: Iterable[tuple[int, int]],
        optimizers: Mapping[int, torch.optim.Optimizer],
        reuses_buffers: bool = True,
        moves_whole: bool = False,
        in_place: Iterable[Sequence[int]] = (),
        keep_source: Callable[[str, str], None] | None = None,
        precision: Precision = PLAIN,
        mover: Mover | None = None,
        states_on_host: bool = False,
        joins_updates: bool = False,
        open_files: Callable[[], FileTier] | None = None,
        delayed: DelayedUpdates | None = None,
    ):
        self.communicator = communicator
        self.table = table
        # Weakly: a compiled function outlives the models that it has trained.
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        self.buffers = [weakref.ref(buffer) for buffer in buffers]
        self.stage = stage
        self.reuses_buffers = reuses_buffers
        self.moves_whole = moves_whole
        self.in_place = list(in_place)
        self.precision = precision
        roles = list(enumerate(map(input_role, placeholders(graph))))
        self.inputs = [(position, role) for position, role in roles if role.sharded]
        self.on_host = frozenset(role.parameter for _, role in roles if role.on_host)
        self.parameter_inputs = [
            (position, self.tensors[role.parameter])
            for position, role in roles
            if role.kind == "parameter"
        ]
        gradients = [(position, role) for position, role in roles if role.kind == "gradient"]
        self.whole_gradients = [
            (position, role.parameter)
            for position, role in gradients
            if not role.sharded and not role.unreduced
        ]
        self.unreduced_gradients = [
            (position, role.parameter) for position, role in gradients if role.unreduced
        ]
        self.gradient_outputs = gradient_outputs(graph)
        self.unreduced_results = frozenset(unreduced_results(graph))
        self.renewed_gradients = dict(written_gradients(graph))
        self.sharded_results = frozenset(sharded_results(graph))
        self.changed_gradients = effects.changed_gradients(graph)
        self.written = effects.written_shards(graph)
        self.resumes = [
            (node.args[1], node.meta["val"].dtype)
            for node in graph.nodes
            if node.target is ops.resume_gather
        ]
        self.resumed: list[Key] = []
        self.optimizers = [weakref.ref(optimizer) for optimizer in optimizers.values()]
        self.communicates = any(node.target in ops.STARTS for node in graph.nodes)
        self.program: Callable | None = None
        self.bound: list[BoundParameter] = []
        parameters = {info.index: (tensors[info.index], info) for info in table}
        updates = list(updates)
        self.mover = mover
        self.states_on_host = states_on_host
        self.joins_updates = joins_updates
        self.delayed = delayed
        self._updates_on_host = effects.groups_on_host(graph)
        self._delayed_keys: dict[tuple[int, tuple[int, ...]], DelayedKey] = {}
        self.moved_out = effects.moved_out(graph)
        read_later = effects.gradients_read_after_update(graph)
        owned = effects.owned_parameters(graph)

        def runners(on_host: bool) -> dict[int, OptimizerRunner]:
            return {
                handle: OptimizerRunner(
                    optimizer,
                    parameters,
                    rank=communicator.rank,
                    sharded=stage > 0,
                    gradients_read_later=read_later,
                    keep_source=keep_source,
                    precision=precision,
                    owned=owned.get(handle, frozenset()),
                    host=REGISTRY.host if on_host else None,
                )
                for handle, optimizer in optimizers.items()
            }

        self.runners, self.host_runners = runners(False), runners(True) if states_on_host else {}
        on_host = effects.updated_on_host(graph)
        for handle, runner in self.runners.items():
            runner.prepare(p for h, p in updates if h == handle and (h, p) not in on_host)
        for handle, runner in self.host_runners.items():
            runner.prepare(p for h, p in on_host if h == handle)
        self.tier: FileTier | None = None
        self.filed: list[StateBucket] = []  # as the program uses them, each time it does
        self._filed_groups: dict[tuple[int, tuple[int, ...]], StateBucket] = {}
        if open_files is not None and groups_in_files(graph):
            self._reserve_files(groups_in_files(graph), open_files)
        self.host_needs: dict[str, int] = {}
        if mover is not None:
            self._check_room_on_host(graph, on_host)
        # Weakly too: a bucket's memory goes with its parameters.
        self._memories: list[tuple[weakref.ref[BucketMemory], Sequence[int]]] = []
        self._lent: dict[int, BucketMemory] = {}  # of those that are only moved out from there
        self._homes: dict[int, BucketMemory] = {}  # of this call's parameters that have moved in
        self._gathered_into: dict[int, torch.Tensor] = {}  # by where their own parts are
        self._carried: list[tuple[Key, torch.Tensor]] = []
        self._updated: dict[int, set[int]] = {}
        self._updating: dict[int, _HostUpdate] = {}  # by the id of what it writes
        self._asked: dict[int, _Asked] = {}  # updates that begin when they are waited for, as well
        self._found_inf: dict[int, tuple[torch.Tensor, bool]] = {}
        self._reading: dict[int, tuple[torch.Tensor, StateBucket]] = {}  # by what stands for it
        self._changed: set[tuple[int, int]] = set()  # whose states are not as they were in files
        self._parameter_storages: set[int] = set()
        self._cuts: dict[object, tuple[torch.Tensor, set[int]]] = {}  # buffers, and who is in them

    def _reserve_files(
        self, groups: Sequence[tuple[int, tuple[int, ...]]], open_files: Callable[[], FileTier]
    ) -> None:
        """Find the buckets that the program's states are in, or make room for them."""
        self.tier = open_files()
        known = list(dict.fromkeys(groups))
        buckets = self.tier.reserve(
            [self.host_runners[handle].group_of(of) for handle, of in known]
        )
        self._filed_groups = dict(zip(known, buckets, strict=True))
        self.filed = [self._filed_groups[group] for group in groups]

    def _check_room_on_host(self, graph: fx.Graph, updates: Iterable[tuple[int, int]]) -> None:
        mine: dict[int, list[int]] = {}
        for handle, parameter in dict.fromkeys(updates):
            mine.setdefault(handle, []).append(parameter)
        assert self.mover is not None
        needs = {
            "staging buffers": self.mover.bytes_to_come(staging_bytes(graph, (ops.to_host_start,))),
            "parameter shards": self._shards_to_come(),
            "activations": self.mover.bytes_to_come(staging_bytes(graph, (ops.offload_start,))),
            "delayed updates": self._delayed_bytes(graph),
        }
        if self.tier is not None:
            cached = self.tier.cache_bytes_to_come(self.filed)
            needs = {"a cache of optimizer states": cached, **needs}
        else:
            states = sum(
                self.host_runners[handle].host_bytes_to_come(of) for handle, of in mine.items()
            )
            needs = {"optimizer states": states, **needs}
        self.host_needs = {what: nbytes for what, nbytes in needs.items() if nbytes}
        REGISTRY.host.check_room(self.host_needs)

    def _delayed_bytes(self, graph: fx.Graph) -> int:
        """Bytes of values and gradients that updates have to themselves between two calls."""
        if self.delayed is None:
            return 0
        moves = (node for node in graph.nodes if node.target is ops.to_host_start)
        return sum(hinted_bytes(move) for move in moves)

    def _shards_to_come(self) -> int:
        """Bytes of shards that will be in host memory and are not there yet."""
        known = {index: REGISTRY.lookup(_alive(self.tensors[index])) for index in self.on_host}
        return sum(
            self.table[index].shard_numel * self.table[index].dtype.itemsize
            for index, bound in known.items()
            if bound is None or bound.host is None
        )

    def host_state_bytes(self) -> int:
        """Bytes of optimizer states in host memory, of the parameters that this program updates.

        Of states in files, what is cached of all.
        """
        if self.tier is not None:
            return self.tier.cached_bytes
        return sum(runner.host_bytes() for runner in self.host_runners.values())

    def bind(self) -> None:
        """Take charge of the parameters, and of the optimizers' states."""
        self.bound = REGISTRY.bind(
            list(zip(map(_alive, self.tensors), self.table, strict=True)),
            list(map(_alive, self.buffers)),
            self.communicator,
            self.stage,
            self.moves_whole,
            self.on_host,
        )
        self._memories = []
        for parameters in self.in_place:
            memory = self.bound[parameters[0]].memory
            if memory is not None and len(memory.infos) == len(parameters):
                if all(self.bound[index].memory is memory for index in parameters):
                    self._memories.append((weakref.ref(memory), parameters))
        self.resumed = [self._key(parameters, dtype) for parameters, dtype in self.resumes]
        self._delayed_keys = {
            (handle, of): (
                weakref.ref(self.runners[handle].live_optimizer()),
                tuple(self.bound[index] for index in of),
            )
            for handle, of in self._updates_on_host
            if self.delayed is not None
        }
        for optimizer in map(_alive, self.optimizers):
            attach_optimizer(optimizer, keeps_loaded_dtypes=not self.precision.is_plain)

    def _key(self, parameters: Iterable[int], dtype: torch.dtype) -> Key:
        return tuple(self.bound[index] for index in parameters), dtype

    def kernels(self) -> dict[object, Callable]:
        """The function that runs each ``zerofx::`` operator of the program."""
        communicator = self.communicator
        return {
            ops.all_reduce_start: self.all_reduce_start,
            ops.reduce_scatter_start: communicator.reduce_scatter_start,
            ops.all_gather_start: self.all_gather_start,
            ops.resume_gather: self.resume_gather,
            ops.carry: self.carry,
            ops.wait: communicator.wait,
            ops.free: communicator.free,
            ops.take_shard: self.take_shard,
            ops.pack: self.pack,
            ops.flatten_bucket: self.flatten_bucket,
            ops.mask_padding: self.mask_padding,
            ops.on_owners: self.on_owners,
            ops.update: self.update,
            ops.to_host_start: self.to_host_start,
            ops.to_device_start: self.to_device_start,
            ops.store_start: self.store_start,
            ops.offload_start: self.offload_start,
            ops.reload_start: self.reload_start,
            ops.wait_move: self.wait_move,
            ops.update_on_host_start: self.update_on_host_start,
            ops.update_kept_start: self.update_kept_start,
            ops.wait_update: self.wait_update,
            ops.wait_store: self.wait_store,
            ops.states_from_file_start: self.states_from_file_start,
            ops.wait_states: self.wait_states,
            ops.states_to_file: self.states_to_file,
        }

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the program once on Dynamo's inputs; empties the list it is given."""
        if any(bound.retired for bound in self.bound):  # unsharded since: take charge again
            self.bind()
        self._settle_what_is_not_taken_over()
        values = list(inputs)
        inputs.clear()
        for position, parameter in self.parameter_inputs:
            if values[position] is not parameter():
                raise StepError(
                    "this program was compiled for another model than the one it is called with. "
                    "Compile the step once per model: torch.compile(step, backend='zero')."
                )
        for reference, parameters in self._memories:
            memory = _alive(reference)
            if memory.move_in() and memory.flat.numel():  # what is empty lies nowhere
                self._homes.update(dict.fromkeys(parameters, memory))
                self._gathered_into[memory.own.data_ptr()] = memory.flat
        moved_in: set[BucketMemory] = set()
        for index in self.moved_out:
            home = self.bound[index].memory
            if home is not None and (home in moved_in or home.move_in()):
                self._lent[index] = home
                moved_in.add(home)
        if self.stage < 3:
            self._parameter_storages = {
                values[position].untyped_storage().data_ptr()
                for position, _ in self.parameter_inputs
            }
        for position, index in self.whole_gradients:
            REGISTRY.check_averaged(self.bound[index], values[position])
        for position, index in self.unreduced_gradients:
            is_changed = index in self.changed_gradients
            values[position] = REGISTRY.unreduced_gradient(
                self.bound[index], values[position], is_changed
            )
        self._place_shards()
        for position, role in self.inputs:
            bound = self.bound[role.parameter]
            if role.kind == "parameter":
                values[position] = bound.shard
            else:
                values[position] = REGISTRY.gradient_shard(bound, values[position])
        assert self.program is not None, "lowered before it is first called"
        self.communicator.buffers.is_on = self.reuses_buffers
        try:
            if self.tier is not None:
                self.tier.begin(self.filed)
            if REGISTRY.written:
                confirm_writes(self.bound)
            REGISTRY.carried.enter_call(self.resumed, [self.bound[i] for i in self.written])
            with torch.no_grad():
                results = list(self.program(*values))
            self._finish_updates()
            for key, gathering in self._carried:
                REGISTRY.carried.put(key, self.communicator, gathering)
            if self.communicates:
                self.communicator.settle()
            if self.tier is not None:
                self.tier.finish()
            if self.delayed is not None:
                self.delayed.end(self._delayed_keys.values())
        except BaseException as error:
            self._updating.clear()
            if self.delayed is not None:
                self._settle_after(error)
            if self.mover is not None:
                self.mover.abandon()
            if self.tier is not None:  # what no update writes to any more
                self.tier.failed(error)
            REGISTRY.carried.step_failed(self.communicator, self.resumed)
            if self.communicates:
                self.communicator.abandon()
            raise
        finally:
            self._carried.clear()
            self._updated.clear()
            self._found_inf.clear()
            self._reading.clear()
            self._asked.clear()
            self._changed.clear()
            self._cuts.clear()
            self._homes.clear()
            self._lent.clear()
            self._gathered_into.clear()
            self.communicator.buffers.clear()
        for position, index in self.gradient_outputs.items():
            if position not in self.unreduced_results:
                results[position] = self._stored_average(index, results[position])
        if self.unreduced_results or self.renewed_gradients:
            self._keep_unreduced(results, values)
        return results

    def _settle_what_is_not_taken_over(self) -> None:
        """Settle delayed updates of what this call is about, but for those that it stores."""
        optimizers = [optimizer for one in self.optimizers if (optimizer := one()) is not None]
        for delayed in list(REGISTRY.delayed):
            mine = self._delayed_keys.values() if delayed is self.delayed else ()
            delayed.settle(self.bound, optimizers, taken_over=mine)

    def _settle_after(self, error: BaseException) -> None:
        """Leave no update half done: the call before's, nor what this one has started."""
        assert self.delayed is not None
        try:
            self.delayed.settle(self.bound)
        except Exception as another:
            error.add_note(f"An update that had been started failed too: {another!r}")

    def _place_shards(self) -> None:
        """Have this program's shards where it expects them: another may have moved them since."""
        for on_host in (False, True):
            misplaced = [
                self.bound[role.parameter]
                for _, role in self.inputs
                if role.kind == "parameter" and role.on_host is on_host
                if (self.bound[role.parameter].host is not None) is not on_host
            ]
            if misplaced:
                REGISTRY.place(misplaced, on_host)

    def all_gather_start(self, shard: torch.Tensor, world_size: int) -> torch.Tensor:
        into = self._gathered_into.get(shard.data_ptr())
        return self.communicator.all_gather_start(shard, world_size, into)

    def write_back(
        self, gathered: torch.Tensor, wholes: list[torch.Tensor], parameters: list[int]
    ) -> None:
        """Copy a bucket's new values to its parameters, if they do not live there already."""
        if self._homes.get(parameters[0]) is None:
            for whole, index in zip(wholes, parameters, strict=True):
                info = self.table[index]
                whole.copy_(whole_from_flat(gathered[info.place.offset :], info))
            return
        for whole in wholes:  # as a copy would: a graph built on the old values is stale
            torch.autograd.graph.increment_version(whole)

    def _stored_average(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        bound = self.bound[index]
        if gradient is not None and gradient is bound.gradient:  # as it came in
            return bound.stub
        if self.stage >= 2:
            return REGISTRY.store_gradient(bound, gradient)
        if gradient is None:
            return None
        return REGISTRY.mark_averaged(without_base(gradient), bound)

    def _keep_unreduced(self, results: list[Any], inputs: list[Any]) -> None:
        """Store gradients left unreduced, and take off the results that replace such."""
        users = Counter(
            value.untyped_storage().data_ptr()
            for value in (*inputs, *results)
            if isinstance(value, torch.Tensor)
        )
        stored = {position: self.gradient_outputs[position] for position in self.unreduced_results}
        for position, index in {**stored, **self.renewed_gradients}.items():
            bound, value = self.bound[index], results[position]
            if value is not bound.gradient:
                is_whole = position not in self.sharded_results
                if is_whole:
                    value = in_memory_of_its_own(value, bound.info, users)
                REGISTRY.store_gradient(bound, value, unreduced=is_whole)
            results[position] = bound.stub
        del results[len(results) - len(self.renewed_gradients) :]

    def resume_gather(
        self, shard: torch.Tensor, parameters: list[int], world_size: int
    ) -> torch.Tensor:
        key = self._key(parameters, shard.dtype)
        carried = REGISTRY.carried.take(key)
        if carried is not None:
            if carried.gathering is not None:
                return carried.gathering
            if carried.unsure_since:
                join(key[0], f"{carried.unsure_since} before a step that prefetches across steps")
        return self.communicator.all_gather_start(shard, world_size)

    def carry(self, gathering: torch.Tensor, parameters: list[int]) -> None:
        self._carried.append((self._key(parameters, gathering.dtype), gathering))

    def take_shard(self, whole: torch.Tensor, parameter: int, shard_numel: int) -> torch.Tensor:
        """Copy this rank's range, next to those of its bucket's other parameters.

        Of a parameter that lives in its bucket's memory, it is the range itself.
        """
        info = self.table[parameter]
        memory = self._homes.get(parameter)
        if memory is None:
            memory = self._lent.get(parameter)
        if memory is not None and id(whole) in memory.shards:
            return memory.shards[id(whole)]
        if not info.shares_bucket:
            return take_shard(whole, info, self.communicator.rank)
        key = (info.place.bucket, whole.dtype)
        buffer, taken = self._cuts.get(key, (None, {parameter}))
        if parameter in taken:  # once more, maybe of another value: into memory of its own
            buffer = self.communicator.buffers.empty(info.place.shard_numel, whole).zero_()
            taken = set()
            self._cuts[key] = buffer, taken
        taken.add(parameter)
        shard = buffer.narrow(0, info.position_in_shard, info.shard_numel)
        copy_range(shard, whole, info, self.communicator.rank)
        return shard

    def pack(self, shards: list[torch.Tensor], parameters: list[int], numel: int) -> torch.Tensor:
        memory = self._homes.get(parameters[0])
        if memory is not None and memory.is_made_of(shards):
            return memory.own
        return pack(shards, [self.table[index] for index in parameters])

    def flatten_bucket(
        self, wholes: list[torch.Tensor], parameters: list[int], numel: int
    ) -> torch.Tensor:
        infos = [self.table[index] for index in parameters]
        return flatten_bucket(wholes, infos, self.communicator.buffers)

    def reduce_bucket_start(
        self,
        wholes: list[torch.Tensor],
        parameters: list[int],
        numel: int,
        reduction: str,
        world_size: int,
    ) -> torch.Tensor:
        """Start reducing a bucket, from where its gradients are if the transport can."""
        infos = [self.table[index] for index in parameters]
        pieces, offsets = flat_pieces(list(map(self._own_memory, wholes)), infos)
        communicator = self.communicator
        numel = infos[0].place.shard_numel * infos[0].world_size
        if pieces:
            started = communicator.reduce_scatter_pieces_start(pieces, offsets, numel, reduction)
            if started is not None:
                return started
        flat = flatten_bucket(wholes, infos, communicator.buffers)
        return communicator.reduce_scatter_start(flat, reduction, world_size)

    def all_reduce_start(self, input: torch.Tensor, reduction: str) -> torch.Tensor:
        return self.communicator.all_reduce_start(self._own_memory(input), reduction)

    def _own_memory(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of what is a parameter's memory, which an update may write before others read.

        The gradient of ``a`` in ``(a * b).sum()`` is ``b``, and a compiler may say just that.
        """
        storage = value.untyped_storage().data_ptr()
        return value.clone() if storage in self._parameter_storages else value

    def mask_padding(self, shard: torch.Tensor, parameter: int, identity: float) -> torch.Tensor:
        start, stop = self.table[parameter].owned_by(self.communicator.rank)
        valid = stop - start
        length = max(shard.numel(), 1)
        if valid == length:
            return shard
        return F.pad(shard[:valid], (0, length - valid), value=identity)

    def on_owners(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        owners: list[int],
        flops: int,
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Begin these updates, as far as what needs whole tensors; ``update`` goes on with it."""
        if found_inf is not None and self._is_set(found_inf):
            return grads
        runner = self._runner(optimizer, parameters)
        shards = [value.detach() for value in values]
        return runner.run_on_owners(shards, grads, parameters, owners, self.communicator)

    def to_host_start(
        self, pieces: list[torch.Tensor], parameters: list[int], slot: int
    ) -> torch.Tensor:
        assert self.mover is not None
        return self.mover.to_host_start(pieces, slot)

    def to_device_start(
        self, pieces: list[torch.Tensor], parameters: list[int], device: torch.device
    ) -> torch.Tensor:
        assert self.mover is not None
        return self.mover.to_device_start(pieces, device, self.communicator.buffers)

    def store_start(
        self, pieces: list[torch.Tensor], parameters: list[int], shards: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        assert self.mover is not None
        return self.mover.store_start(pieces, shards)

    def offload_start(self, value: torch.Tensor, slot: int) -> torch.Tensor:
        assert self.mover is not None
        return self.mover.offload_start(value, slot)

    def reload_start(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert self.mover is not None
        return self.mover.reload_start(host, device)

    def wait_move(self, started: Any) -> Any:
        assert self.mover is not None
        return self.mover.wait(started)

    def update_on_host_start(
        self,
        values: torch.Tensor,
        grads: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.delayed is not None:
            is_skipped = found_inf is not None and self._is_set(found_inf)
            self._asked[id(values)] = _Asked(values, grads, optimizer, parameters, is_skipped)
            return values
        data = self._parts(values, parameters)
        self._start_updates(values, data, [values, grads], optimizer, parameters, found_inf)
        return values

    def _parts(self, flat: torch.Tensor, parameters: list[int]) -> Sequence[torch.Tensor]:
        return flat.detach().split([self.table[index].shard_numel for index in parameters])

    def update_kept_start(
        self,
        shards: list[torch.Tensor],
        grads: torch.Tensor,
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        for shard in shards:
            REGISTRY.host.settle(shard)  # it has left for the device
        data = [shard.detach() for shard in shards]
        self._start_updates(shards, data, [grads], optimizer, parameters, found_inf)
        return shards

    def _start_updates(
        self,
        written: Any,
        data: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None,
    ) -> None:
        """Prepare updates here, and have their elements computed beside the step.

        They begin when what is ``arriving`` is there, the last of which are the gradients.

        What traces, compiles, reads hyperparameters or changes ``optimizer.state`` is done in the
        step's thread: here, or where ``written`` is waited for.
        """
        if found_inf is not None and self._is_set(found_inf):
            self._updating[id(written)] = _HostUpdate(written, None)
            return
        assert self.mover is not None
        arrivals = [self.mover.arrival(move) for move in arriving]
        self._updating[id(written)] = self._started_update(
            written, data, arriving[-1], arrivals, optimizer, parameters
        )

    def _started_update(
        self,
        written: Any,
        data: Sequence[torch.Tensor],
        gradients: torch.Tensor,
        arrivals: Sequence[Callable[[], object]],
        optimizer: int,
        parameters: list[int],
    ) -> _HostUpdate:
        """Start the updates of ``data``; ``arrivals`` return when all is there that they read."""
        assert self.mover is not None
        self._runner(optimizer, parameters)  # in the same step as this one
        runner = self.host_runners[optimizer]
        pieces = gradients.split([shard.numel() for shard in data])
        self._place_states(runner, optimizer, parameters)
        if self.joins_updates:
            ready = runner.ready_together(data, pieces, parameters)
        else:
            ready = [runner.ready(*one) for one in zip(data, pieces, parameters, strict=True)]

        def compute() -> list[Any]:
            for has_arrived in arrivals:
                has_arrived()
            with torch.no_grad():
                return [update.compute() for update in ready]

        def finish(results: list[Any]) -> None:
            for update, result in zip(ready, results, strict=True):
                update.finish(result)
            self._place_states(runner, optimizer, parameters)  # those it has made

        computing = self.mover.updates.start(compute)
        return _HostUpdate(written, computing, finish, optimizer)

    def _place_states(self, runner: OptimizerRunner, optimizer: int, parameters: list[int]) -> None:
        """Have states in host memory; those in files, ``wait_states`` has brought there."""
        if self.tier is None:
            runner.place_states(parameters, REGISTRY.host)
        else:
            self._changed.update((optimizer, parameter) for parameter in parameters)

    def wait_update(self, started: Any) -> Any:
        """The new values: if updates are delayed, those that the call before's has made.

        Both moves have been waited for then, and this call's begins from those values.
        """
        if id(started) in self._asked:
            return self._exchange(self._asked.pop(id(started)))
        update = self._updating.pop(id(started))
        update.complete()
        return update.values

    def _exchange(self, asked: _Asked) -> torch.Tensor:
        assert self.delayed is not None
        key = self._delayed_keys[asked.optimizer, tuple(asked.parameters)]
        self.delayed.exchange(key, asked.values)
        if asked.is_skipped:
            return asked.values
        if asked.optimizer not in self._updated:  # its step reads states and groups
            self.delayed.complete(self.runners[asked.optimizer].live_optimizer())
        update = self.delayed.leave(key, asked.values, asked.gradients)
        data = self._parts(update.values, asked.parameters)
        update.updating = self._started_update(
            update.values, data, update.gradients, [], asked.optimizer, asked.parameters
        )
        return asked.values

    def wait_store(self, started: list[torch.Tensor]) -> list[torch.Tensor]:
        is_update = id(started) in self._updating
        return self.wait_update(started) if is_update else self.wait_move(started)

    def states_from_file_start(
        self, optimizer: int, parameters: list[int], nbytes: int
    ) -> torch.Tensor:
        """Ask for states: the cache reads ahead by itself, in the order of the waits."""
        started = torch.empty(0, dtype=torch.uint8)
        self._reading[id(started)] = started, self._filed_groups[optimizer, tuple(parameters)]
        return started

    def wait_states(self, started: torch.Tensor) -> torch.Tensor:
        assert self.tier is not None
        self.tier.fetch(self._reading[id(started)][1])
        return started

    def states_to_file(self, states: torch.Tensor, optimizer: int, parameters: list[int]) -> None:
        assert self.tier is not None
        _, bucket = self._reading.pop(id(states))
        group = {(optimizer, parameter) for parameter in parameters}
        self.tier.release(bucket, is_dirty=not group.isdisjoint(self._changed))
        self._changed -= group

    def update(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        optimizer: int,
        parameter: int,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if found_inf is not None and self._is_set(found_inf):
            return values
        runner = self._with_states_of(optimizer, [parameter])
        return runner.run(values.detach(), grad, parameter)

    def update_together(
        self,
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        optimizer: int,
        parameters: list[int],
        found_inf: torch.Tensor | None = None,
        work: GradientWork | None = None,
        coefficients: Sequence[torch.Tensor] = (),
        norm: int | None = None,
    ) -> list[torch.Tensor]:
        """Several updates of one optimizer that follow one another, as one.

        Each with ``work`` of these coefficients done to its gradient first.  For a ``norm``,
        numbers follow the new values, as many: the gradients' squares, divided among them.
        """
        if found_inf is not None and self._is_set(found_inf):
            if norm is None:
                return values
            done = grads if work is None else [work(grad, *coefficients) for grad in grads]
            return [*values, *map(squares_of, done)]
        data = [value.detach() for value in values]
        runner = self._with_states_of(optimizer, parameters)
        if norm is None:
            return runner.run_together(data, grads, parameters, work, coefficients)
        squares = runner.run_together_and_sum(data, grads, parameters, work, coefficients)
        nothing = torch.zeros_like(squares)
        return [*data, squares, *[nothing] * (len(data) - 1)]

    def _with_states_of(self, optimizer: int, parameters: list[int]) -> OptimizerRunner:
        """The optimizer's runner, with these parameters' states on the device."""
        runner = self._runner(optimizer, parameters)
        if not (REGISTRY.host.is_empty and REGISTRY.files.is_empty):
            runner.place_states(parameters, REGISTRY.host)
        return runner

    def _runner(self, optimizer: int, parameters: list[int]) -> OptimizerRunner:
        """The optimizer's runner, in a step that has not updated these parameters yet."""
        runner = self.runners[optimizer]
        if all(map(runner.has_begun, parameters)):
            return runner
        updated = self._updated.get(optimizer)
        if updated is None or not updated.isdisjoint(parameters):  # a second step of it
            if updated is not None:
                for update in self._updating.values():
                    if update.optimizer == optimizer:
                        update.complete()
                self._end(optimizer)
            for one in self._runners_of(optimizer):
                one.begin()
            updated = self._updated[optimizer] = set()
        updated.update(parameters)
        return runner

    def _is_set(self, found_inf: torch.Tensor) -> bool:
        known = self._found_inf.get(id(found_inf))
        if known is None:
            known = self._found_inf[id(found_inf)] = (found_inf, bool(found_inf.item()))
        return known[1]

    def _runners_of(self, optimizer: int) -> list[OptimizerRunner]:
        """The device's and the host's, which step together."""
        every = (self.runners, self.host_runners)
        return [runners[optimizer] for runners in every if optimizer in runners]

    def _end(self, optimizer: int) -> None:
        for runner in self._runners_of(optimizer):
            keep_groups = runner.end()
            if self.delayed is not None and runner is self.host_runners.get(optimizer):
                self.delayed.keep_groups(runner.live_optimizer(), keep_groups)

    def _finish_updates(self) -> None:
        for optimizer in self._updated:
            self._end(optimizer)


@dataclass(frozen=True)
class _Asked:
    """A delayed update before it begins: its operands, in staging buffers."""

    values: torch.Tensor
    gradients: torch.Tensor
    optimizer: int
    parameters: list[int]
    is_skipped: bool


class _HostUpdate:
    """An update that goes on beside the step, and what is left to do with what it returns.

    ``computing`` is None where there is nothing to do.
    """

    def __init__(
        self,
        values: Any,
        computing: Future | None,
        finish: Callable[[list[Any]], None] | None = None,
        optimizer: int = -1,
    ) -> None:
        self.values, self.optimizer = values, optimizer
        self._computing, self._finish = computing, finish

    def complete(self) -> None:
        """Wait for it and keep its states.  Raises: what it has raised."""
        if self._computing is not None:
            computing, self._computing = self._computing, None
            results = computing.result()
            assert self._finish is not None
            with torch.no_grad():
                self._finish(results)

    def forget_states(self) -> None:
        """Keep no states when it completes: there is no optimizer to keep them."""
        if self._finish is not None:
            self._finish = lambda results: None


def _alive(reference: weakref.ref) -> Any:
    value = reference()
    assert value is not None, "whoever calls the step holds what it was compiled for"
    return value
