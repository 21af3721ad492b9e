"""One compiled program at run time: its inputs swapped for shards, its operators' kernels."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.accelerator import check_copies_beside, is_accelerator
from zerofx.codegen.rewrite.storage import Precision
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Source
from zerofx.errors import StepError
from zerofx.ir import effects, ops
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.ir.offload import uses_of_files
from zerofx.ir.rules import LINK, TO_DEVICE, TO_HOST, UPDATES
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.file_operators import ProgramFiles
from zerofx.runtime.host_needs import host_needs
from zerofx.runtime.memory.flat import (
    in_memory_of_its_own,
    make_equal,
    ordinary_tensors,
    with_own_storage,
    without_base,
)
from zerofx.runtime.optimizer.host import HostUpdates
from zerofx.runtime.optimizer.lazy_states import check_states
from zerofx.runtime.optimizer.setup import ProgramSetup, Trained
from zerofx.runtime.optimizer.state_dict import attach_optimizer, refuse_step_hooks
from zerofx.runtime.optimizer.steps import OptimizerSteps
from zerofx.runtime.parameters.buckets import Buckets
from zerofx.runtime.parameters.first_values import read_by_all
from zerofx.runtime.parameters.guarded import refuse_gradient_hooks
from zerofx.runtime.parameters.parameter import ParameterState, State
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import SNAPSHOTS
from zerofx.runtime.storage.bucket import Location
from zerofx.runtime.turns import NoDataAnywhere
from zerofx.runtime.wires import Wires

logger = logging.getLogger("zerofx")


class StepRuntime:
    """Runs one lowered program for one compiled function.

    ``graph`` is the program after all passes.  ``keep_source`` is given the name and the text of
    each kernel that is generated for an update.  ``host_needs`` are the bytes that all this will
    take of host memory, by what for.

    Raises: UpdateError if an optimizer's update cannot be compiled, StepError if the host has no
    room for it; nothing has changed then.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: fx.Graph,
        trained: Trained,
        setup: ProgramSetup,
        keep_source: Callable[[str, str], object] | None = None,
    ):
        self.communicator = communicator
        self.table = trained.table
        # Weakly: a compiled function outlives the models that it has trained.
        self.tensors = [weakref.ref(tensor) for tensor in trained.tensors]
        self.buffers = [weakref.ref(buffer) for buffer in trained.buffers]
        self.replaced_gradients = trained.replaced
        self.optimizers = [weakref.ref(optimizer) for optimizer in trained.optimizers.values()]
        self.options, self.copies = setup.options, setup.copies
        self.turns = setup.turns
        self.program: Callable | None = None
        self.bound: list[ParameterState] = []
        self._read_interface(graph)
        self.communicates = any(map(ops.is_collective, graph.nodes))
        self.moves = any(map(ops.is_move, graph.nodes))
        self.groups_on_host = effects.groups_on_host(graph)
        self.steps = OptimizerSteps(graph, communicator, trained, setup, keep_source)
        self.files: ProgramFiles | None = None
        if uses_of_files(graph):
            self.files = ProgramFiles(
                setup.open_files(), graph, trained, self.steps.runners, self.copies
            )
        self.host_needs: dict[str, int] = {}
        if self.moves:
            for device in {info.device for info in self.table if is_accelerator(info.device)}:
                check_copies_beside(device)
            is_delayed = setup.delayed is not None
            kept = [
                (trained.tensors[index], self.table[index])
                for index in self.on_host
                if not self._goes_to_file_at_once(index, trained.tensors[index])
            ]
            self.host_needs = host_needs(
                graph, kept, self.copies, self.steps, self.files, is_delayed
            )
            REGISTRY.host.check_room(self.host_needs)
        LEDGER.check(trained.tensors)
        check_states(list(trained.optimizers.values()))
        moved_out = effects.moved_out(graph)
        self.buckets = Buckets(communicator, self.table, setup.in_place, moved_out)
        changed_in_files = self.files.note_changes if self.files is not None else None
        self.host_updates = HostUpdates(self.steps, setup, changed_in_files)
        is_compiled = setup.options.lowering == "inductor"
        self.wires = Wires(graph, self.table, communicator, is_compiled, keep_source)

    def _goes_to_file_at_once(self, index: int, parameter: nn.Parameter) -> bool:
        """Return whether a shard is still to be made, to be filed before the next bucket's."""
        in_files = self.files is not None and index in self.files.parameters
        return in_files and REGISTRY.lookup(parameter) is None

    def _read_interface(self, graph: fx.Graph) -> None:
        """Note what the program's inputs and results stand for, by position."""
        roles = list(enumerate(map(input_role, placeholders(graph))))
        self.inputs = [(position, role) for position, role in roles if role.sharded]
        self.on_host = frozenset(role.parameter for _, role in roles if role.on_host)
        self.parameter_inputs = [
            (position, self.tensors[role.parameter])
            for position, role in roles
            if role.kind == "parameter"
        ]
        self.buffer_inputs = [position for position, role in roles if role.kind == "buffer"]
        gradients = [(position, role) for position, role in roles if role.kind == "gradient"]
        self.whole_gradients = [
            (position, role.parameter)
            for position, role in gradients
            if not role.sharded and not role.unreduced
        ]
        self.gradient_inputs = gradients
        self.unreduced_gradients = [(at, role) for at, role in gradients if role.unreduced]
        self.other_inputs = [position for position, role in roles if role.kind == "other"]
        self.results = recorded(graph)
        self.written_of_batch = (
            effects.written_of_batch(graph) if self.options.may_lack_data else []
        )
        self.why_not_without_data = effects.why_not_without_data(graph)
        self.changed_gradients = effects.changed_gradients(graph)
        self.changed_by_user = effects.shards_changed_by_user(graph)
        self.written = effects.shards_written(graph)

    def sources(self) -> dict[int, Source]:
        """Return the files of new parameters, by index, if each rank reads its own part."""
        if self.options.stage < 3:
            return {}
        tensors = zip(map(_alive, self.tensors), self.table, strict=True)
        return read_by_all(one for one in tensors if REGISTRY.lookup(one[0]) is None)

    def bind(self, sources: Mapping[int, Source]) -> None:
        """Take charge of the parameters, and of the optimizers' states.

        ``sources`` are those that all ranks have agreed to read.
        """
        self.bound = REGISTRY.bind(
            list(zip(map(_alive, self.tensors), self.table, strict=True)),
            [buffer for one in self.buffers if (buffer := one()) is not None],
            self.communicator,
            self.options.stage,
            self.options.bucket,
            self.on_host,
            self.files.take_in if self.files is not None else lambda bounds: None,
            sources,
        )
        self.buckets.bind(self.bound)
        self.wires.bind(self.bound)
        self.host_updates.bind(self.bound, self.groups_on_host)
        is_plain = Precision.of(self.options).is_plain
        for optimizer in map(_alive, self.optimizers):
            attach_optimizer(optimizer, keeps_loaded_dtypes=not is_plain)

    def kernels(self) -> dict[object, Callable]:
        """The function that runs each ``zerofx::`` operator of the program."""
        communicator, buckets, files = self.communicator, self.buckets, self.files
        on_device, on_host = self.steps, self.host_updates
        wires = self.wires
        kernels: dict[object, Callable] = {
            ops.has_data: self.turns.has_data,
            ops.end_without_data: self.turns.end_without_data,
            ops.all_reduce_start: buckets.all_reduce_start,
            ops.all_reduce_bucket_start: buckets.all_reduce_bucket_start,
            ops.reduce_scatter_start: buckets.reduce_scatter_start,
            ops.all_gather_start: buckets.all_gather_start,
            ops.refill_start: buckets.refill_start,
            (ops.wait, LINK): communicator.wait,
            ops.free: communicator.free,
            ops.quantize: wires.quantize,
            ops.dequantize: wires.dequantize,
            ops.all_to_all_start: buckets.all_to_all_start,
            ops.dequantize_sum: wires.dequantize_sum,
            ops.fill_up: wires.fill_up,
            ops.correct: wires.correct,
            ops.rounding_error: wires.rounding_error,
            ops.keep_error: wires.keep_error,
            ops.take_shard: buckets.take_shard,
            ops.pack: buckets.pack,
            ops.flatten_bucket: buckets.flatten_bucket,
            ops.mask_padding: buckets.mask_padding,
            ops.on_owners: on_device.on_owners,
            ops.update: on_device.update,
            ops.update_together: on_device.update_together,
            ops.reduce_bucket_start: buckets.reduce_bucket_start,
            ops.write_back: buckets.write_back,
            ops.copy_start: self.copy_start,
            ops.copy_start_shards: lambda values, of, shards: self.copies.store_start(
                values, shards
            ),
            (ops.wait, TO_HOST): self.copies.wait,
            (ops.wait, TO_DEVICE): self.copies.wait,
            ops.update_start: on_host.update_start,
            ops.update_start_shards: on_host.update_start_shards,
            (ops.wait, UPDATES): on_host.wait_update,
        }
        if files is not None:
            kernels |= files.kernels()
        return kernels

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the program once on Dynamo's inputs; empties the list it is given.

        Raises: NoDataAnywhere if no rank has data, and nothing has been changed.
        """
        if any(
            bound.state is State.RETIRED for bound in self.bound
        ):  # unsharded since: take charge again
            self.bind({})
        values = list(inputs)
        inputs.clear()
        try:
            self._begin_call(values)
        except BaseException:
            if self.communicates:  # other ranks wait
                self.communicator.abandon()
            self._end_call()
            raise
        try:
            with self.turns.kept_without(values[at] for at in self.written_of_batch):
                results = self._run(values)
        except NoDataAnywhere:
            self._end_under_way()
            raise
        except BaseException as error:
            self._leave_after(error)
            raise
        finally:
            self._end_call()
        self._store_gradients(results, values)
        return results

    def _begin_call(self, values: list[Any]) -> None:
        """Refuse what this call cannot be of, and make its inputs the program's."""
        self.turns.check(self.why_not_without_data)
        self.host_updates.begin_call(self.bound, self._live_optimizers())
        self._check_model(values)
        for optimizer in self._live_optimizers():
            refuse_step_hooks(optimizer)
        self._check_hooks()
        if self.options.batch_norm == "rank0":
            make_equal([values[at] for at in self.buffer_inputs], self.communicator)
        self.buckets.begin_call(
            [values[position] for position, _ in self.parameter_inputs]
            if self.options.stage < 3
            else []
        )
        self._swap_inputs(values)
        # Kept buffers would be bytes that a budget does not know of, and a limit may not have.
        of = self.options
        self.communicator.buffers.is_on = of.memory_budget is None and of.memory_limit is None

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for one in self.optimizers if (optimizer := one()) is not None]

    def _check_hooks(self) -> None:
        with compat.tensors.without_torch_function():
            for bound in self.bound:
                if bound.parameter is not None:
                    refuse_gradient_hooks(bound.parameter, bound.name, bound.accumulation_hook)

    def _check_model(self, values: list[Any]) -> None:
        for position, parameter in self.parameter_inputs:
            if values[position] is not parameter():
                raise StepError(
                    "this program was compiled for another model than the one it is called with. "
                    "Compile the step once per model: torch.compile(step, backend='zero')."
                )

    def _swap_inputs(self, values: list[Any]) -> None:
        """Put what is stored of parameters and gradients in the place of what stands for it."""
        for position in self.other_inputs:
            REGISTRY.gradients.refuse_stub(values[position])
        given = {role.parameter for _, role in self.gradient_inputs}  # what the user has kept
        for index in self.replaced_gradients - given:
            REGISTRY.gradients.clear(self.bound[index])
        for position, index in self.whole_gradients:
            REGISTRY.gradients.check_averaged(self.bound[index], values[position])
        for position, role in self.unreduced_gradients:
            is_changed = role.parameter in self.changed_gradients
            kept = REGISTRY.gradients.sum_inside if role.sharded else REGISTRY.gradients.unreduced
            values[position] = kept(self.bound[role.parameter], values[position], is_changed)
        self._place_shards()
        for position, role in self.inputs:
            bound = self.bound[role.parameter]
            if role.kind == "parameter":
                values[position] = bound.shard
            elif not role.unreduced:
                values[position] = REGISTRY.gradients.shard(bound, values[position])
        for index in self.replaced_gradients & given:
            REGISTRY.gradients.clear(self.bound[index])

    def _place_shards(self) -> None:
        """Have this program's shards where it expects them: another may have moved them since."""
        misplaced: dict[Location, list[ParameterState]] = {}
        filed = self.files.parameters if self.files is not None else ()
        for _, role in self.inputs:
            if role.kind != "parameter":
                continue
            index, bound = role.parameter, self.bound[role.parameter]
            is_on_device = bound.location is Location.DEVICE
            is_filed = bound.location is Location.FILE
            if is_on_device is role.on_host or (is_filed and index not in filed):
                to = Location.HOST if role.on_host else Location.DEVICE
                misplaced.setdefault(to, []).append(bound)
        for location, bounds in misplaced.items():
            REGISTRY.place(bounds, location)

    def _run(self, values: list[Any]) -> list[Any]:
        """Run the program, and complete what it has left under way but for this call's own."""
        assert self.program is not None, "lowered before it is first called"
        if self.files is not None:
            self.files.begin(self.bound)
        if REGISTRY.barrier.written:
            REGISTRY.barrier.confirm_writes(self.bound)
        if self.changed_by_user:
            SNAPSHOTS.before_change(self.bound[i].parameter for i in self.changed_by_user)
        with torch.no_grad():
            run = getattr(self.program, "forward", self.program)  # past hooks on all modules
            results = list(run(*values))
        self._finish()
        self.host_updates.finish()
        return results

    def _finish(self) -> None:
        """Complete what goes on beside the step."""
        self.steps.finish()
        if self.files is not None:
            self.files.tier.finish()

    def _end_under_way(self) -> None:
        """Complete what has been started of a call that ends, on all ranks at the same place.

        What the call before has left to do is left: this one has stored nothing.
        """
        self.communicator.complete()
        if self.moves:
            self.copies.complete()
        if self.files is not None:  # what is read ahead of its use
            self.files.failed(NoDataAnywhere(), self._live_optimizers())
        self._finish()

    def _leave_after(self, error: BaseException) -> None:
        """Leave nothing under way of a call that has failed."""
        for bound in self.bound:  # a second shard may not be whole
            bound.version += 1
        if updated := self.steps.num_updated():
            words = (
                f"updates of {updated} parameter(s) had begun when the call failed, for an update "
                "runs as soon as its gradients are there: go on from a checkpoint. With "
                "update_in_backward=0 nothing is updated before backward has ended."
            )
            logger.warning("%s", words)
            error.add_note(words)
        self.host_updates.failed(error, self.bound)
        if self.moves:
            self.copies.abandon()
        if self.files is not None:  # what no update writes to any more
            self.files.failed(error, self._live_optimizers())
        if self.communicates:
            self.communicator.abandon()

    def _end_call(self) -> None:
        """Forget what was of this call alone."""
        for index in self.written:
            self.bound[index].version += 1
        self.steps.end_call()
        self.host_updates.end_call()
        if self.files is not None:
            self.files.end_call()
        self.buckets.end_call()
        self.communicator.buffers.clear()

    def _store_gradients(self, results: list[Any], inputs: list[Any]) -> None:
        """Store the gradients among the results, and put what stands for them in their place."""
        given = set(map(id, inputs))
        shared: set[int] = set()
        if self.options.stage < 2 and self.communicator.world_size == 1:  # nothing is averaged
            once = {id(v): v for v in (*inputs, *results) if isinstance(v, torch.Tensor)}
            begins = Counter(value.data_ptr() for value in once.values())
            shared = {begin for begin, number in begins.items() if number > 1}
        for position, index in self.results.gradients.items():
            if position not in self.results.unreduced:
                is_new = id(results[position]) not in given
                results[position] = self._stored_average(index, results[position], is_new, shared)
        if self.results.unreduced or self.results.written_gradients:
            self._keep_unreduced(results, inputs)

    def _stored_average(
        self, index: int, gradient: torch.Tensor | None, is_new: bool, shared: Collection[int]
    ) -> torch.Tensor | None:
        """Keep a gradient; return what is ``p.grad``: in memory of its own, in none ``shared``."""
        bound = self.bound[index]
        if gradient is not None and gradient is bound.gradient:  # as it came in
            return bound.stub
        if self.options.stage >= 2:
            return REGISTRY.gradients.store(bound, gradient)
        if gradient is None:
            return None
        is_part = 0 < gradient.nbytes < gradient.untyped_storage().nbytes()
        if is_new and gradient.data_ptr() in shared:
            with ordinary_tensors():
                gradient = gradient.clone()
        elif is_new and is_part and gradient.is_contiguous():
            with ordinary_tensors():  # it knows nothing of its bucket's others
                gradient = with_own_storage(gradient.view(-1), bound.info.contiguous)
        return REGISTRY.gradients.mark_averaged(without_base(gradient), bound)

    def _keep_unreduced(self, results: list[Any], inputs: list[Any]) -> None:
        """Store gradients left unreduced, and take off the results that replace such."""
        users = Counter(
            value.untyped_storage().data_ptr()
            for value in (*inputs, *results)
            if isinstance(value, torch.Tensor)
        )
        outer = self.communicator.mesh.outer
        stored = {position: self.results.gradients[position] for position in self.results.unreduced}
        for position, index in {**stored, **self.results.written_gradients}.items():
            bound, value = self.bound[index], results[position]
            if value is not bound.gradient:
                is_whole = position not in self.results.sharded
                if is_whole:
                    value = in_memory_of_its_own(value, bound.info, users)
                is_sum = not is_whole and self.results.unreduced.get(position) == outer
                REGISTRY.gradients.store(bound, value, unreduced=is_whole, is_sum=is_sum)
            results[position] = bound.stub
        del results[len(results) - len(self.results.written_gradients) :]

    def copy_start(
        self, values: list[torch.Tensor], parameters: list[int], place: str, slot: int = -1
    ) -> torch.Tensor:
        if place == ops.HOST and parameters:
            return self.copies.to_host_start(values, slot)
        if place == ops.HOST:
            return (self.files or self.copies).offload_start(values[0], slot)
        if parameters:
            buffers = self.communicator.buffers
            return self.copies.to_device_start(values, torch.device(place), buffers)
        return self.copies.reload_start(values[0], torch.device(place))


def _alive(reference: weakref.ref) -> Any:
    value = reference()
    assert value is not None, "whoever calls the step holds what it was compiled for"
    return value
