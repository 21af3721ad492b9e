"""Run an optimizer's update on what this rank holds of each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.codegen.arguments import read_arguments
from zerofx.codegen.elementwise import UpdateError
from zerofx.codegen.gradient_norm import squares_of, with_squares
from zerofx.codegen.gradient_work import GradientWork
from zerofx.codegen.independence import check_independent
from zerofx.codegen.kernels import Choice, Keep, Kernels, runs_triton
from zerofx.codegen.rounding import BLOCK
from zerofx.codegen.storage import NATIVE, Precision
from zerofx.codegen.trace import Update
from zerofx.codegen.triton_kernel import Launches
from zerofx.codegen.whole_tensors import DividedUpdate, divide
from zerofx.plan import ParameterInfo
from zerofx.runtime.communication import Communicator
from zerofx.runtime.draws import Draws
from zerofx.runtime.file_tier import Group
from zerofx.runtime.filed_states import Parts, bring_back, parts_of
from zerofx.runtime.host_memory import HostMemory
from zerofx.runtime.joined import adjoin, join, joined_state, keep_state
from zerofx.runtime.owners import compute_on_owners
from zerofx.runtime.stored import StateStorage, is_scale
from zerofx.runtime.traces import GroupOfStep, Traces

FEWEST_ELEMENTS = 8192
"""Below this, a CPU kernel's call costs more than it saves: 55 us against 25 at 5,200 elements."""


PLAIN = Precision()


class OptimizerRunner:
    """Updates parameters as an optimizer's ``step`` would, one at a time.

    Between steps ``optimizer.state`` holds this rank's states: flat shards if ``sharded``, laid
    out like the parameter's shard, and 0-dim tensors and numbers as they are.  Whole states from
    elsewhere have been cut by ``attach_optimizer``.  Hyperparameters are read from the live
    ``optimizer.param_groups`` once per step and group.

    ``parameters`` maps the index that the program uses to the user's parameter and its layout;
    ``rank`` is named in errors; ``gradients_read_later`` are the parameters whose gradient
    somebody reads after the update; ``keep_source`` is given the kernels that are generated;
    ``precision`` is what states are kept in.  ``owned`` are the parameters whose update may need
    them whole: ``run_on_owners`` begins it and ``run`` ends it.  With ``host``, updates run on CPU
    tensors and their states are kept there.

    A step is ``begin()``, one ``run()`` per parameter in any order, ``end()``.  For ``run``,
    ``ready`` may do all but the elements, which another thread can do, and ``finish`` the rest.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, ParameterInfo]],
        *,
        rank: int,
        sharded: bool,
        gradients_read_later: Collection[int] = (),
        keep_source: Keep | None = None,
        precision: Precision = PLAIN,
        owned: Collection[int] = (),
        host: HostMemory | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._optimizer_name = type(optimizer).__name__
        self._parameters = {
            index: (weakref.ref(parameter), info) for index, (parameter, info) in parameters.items()
        }
        self._host = host
        if host is not None:
            cpu = torch.device("cpu")
            self._parameters = {
                index: (reference, replace(info, device=cpu))
                for index, (reference, info) in self._parameters.items()
            }
        self._traces = Traces(
            self._optimizer_name,
            self._parameters,
            sharded=sharded,
            owned=owned,
            gradients_read_later=gradients_read_later,
            precision=precision,
            on_host=host is not None,
        )
        self._storage = StateStorage(precision, self._optimizer_name)
        self._draws = Draws(precision, self._parameters, rank=rank, sharded=sharded)
        self._rank = rank
        self._sharded = sharded
        self._owned = owned
        self._divided: dict[int, DividedUpdate] = {}  # by the id of what it is made of
        self._begun: dict[int, _BegunUpdate] = {}
        self._extensions: dict[Hashable, tuple[Update, Update]] = {}  # whose ids are in use
        self._kernels = Kernels(keep_source)
        self._groups: dict[int, GroupOfStep] | None = None

    @property
    def trace_count(self) -> int:
        """How many traces of the optimizer's Python have been made."""
        return self._traces.count

    def begin(self) -> None:
        """Start one optimizer step: look up every parameter's group as it is now."""
        optimizer = self.live_optimizer()
        self._traces.begin(optimizer)
        self._groups = {}
        self._begun.clear()  # what a step that failed has left
        for values in optimizer.param_groups:
            group = GroupOfStep(values)
            for parameter in values["params"]:
                self._groups[id(parameter)] = group
        self._draws.begin(optimizer)

    def prepare(self, parameters: Iterable[int]) -> None:
        """Trace the first update of these parameters without running it.

        An optimizer that cannot be compiled is refused here, before anything has changed.
        Parameters that have states already are left for their first run.

        Raises: UpdateError if an update cannot be traced, or not run on shards.
        """
        optimizer = self.live_optimizer()
        check_independent(optimizer)
        self.begin()
        assert self._groups is not None
        nothing = read_arguments({}, shard_shape=None, inputs=())
        for parameter in parameters:
            user_parameter = self._parameters[parameter][0]()
            group = self._groups.get(id(user_parameter))
            info = self._parameters[parameter][1]
            self._storage.check(info)
            if parameter in self._owned:
                self._check_owned_precision(info)
            if group is not None and not optimizer.state.get(user_parameter):
                update, _ = self._traces.find(optimizer, parameter, group, nothing)
                if parameter in self._owned:
                    self._divide(update, info)
        self._groups = None

    def host_bytes_to_come(self, parameters: Iterable[int]) -> int:
        """Bytes that the states of these parameters will take in host memory and do not yet.

        Before the first step; those that there are may be whole still.
        """
        assert self._host is not None
        optimizer = self.live_optimizer()
        total = 0
        for parameter, kept in self._kept(list(parameters)):
            reference, info = self._parameters[parameter]
            state = optimizer.state.get(reference()) or {}
            there = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            if not state:
                total += sum(dtype.itemsize * numel for dtype, numel in kept.values())
            for value in there:
                if not self._host.holds(value):
                    is_whole = value.shape == info.shape
                    numel = info.shard_numel if is_whole else value.numel()
                    total += numel * value.itemsize
        return total

    def parts_to_come(self, parameters: Sequence[int]) -> Parts:
        """How the states of these parameters will be laid out in files, after their next update."""
        return parts_of([kept for _, kept in self._kept(parameters)])

    def _kept(
        self, parameters: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, tuple[torch.dtype, int]]]]:
        """What will be kept per element of each parameter's shard; outside of a step."""
        optimizer = self.live_optimizer()
        self.begin()
        assert self._groups is not None
        nothing = read_arguments({}, shard_shape=None, inputs=())
        for parameter in parameters:
            reference, info = self._parameters[parameter]
            group = self._groups.get(id(reference()))
            few = torch.zeros(2, dtype=self._storage.precision.compute_dtype(info.dtype))
            made = optimizer.state.get(reference()) or {}
            if made:
                shapes = (info.shape, (info.shard_numel,))
                made = {
                    name: few.to(value.dtype) if _has_shape(value, shapes) else value
                    for name, value in made.items()
                }
            elif group is not None:
                update, arguments = self._traces.find(optimizer, parameter, group, nothing)
                made, _ = update(few, few.clone(), arguments.tensors, arguments.scalars)
            yield parameter, self._storage.kept(made, few, info.shard_numel, info)
        self._groups = None

    def group_of(self, parameters: Sequence[int]) -> Group:
        """What ``FileTier.reserve`` takes for the states of these parameters."""
        optimizer = self.live_optimizer()
        users, names = [], []
        for parameter in parameters:
            reference, info = self._parameters[parameter]
            users.append(reference())
            names.append(info.name)
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        words = f"{self._optimizer_name} of {span}"
        return optimizer, users, words, self.parts_to_come(parameters)

    def host_bytes(self) -> int:
        """Bytes of these parameters' states that are in host memory now."""
        optimizer = self._optimizer()
        if self._host is None or optimizer is None:
            return 0
        users = [reference() for reference, _ in self._parameters.values()]
        values = [v for user in users for v in optimizer.state.get(user, {}).values()]
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
        return sum(value.nbytes for value in tensors if self._host.holds(value))

    def place_states(self, parameters: Sequence[int], memory: HostMemory) -> None:
        """Have these parameters' states in host memory, side by side, if that is where they are
        updated, and else on the device.
        """
        optimizer = self.live_optimizer()
        users = [self._parameters[parameter][0]() for parameter in parameters]
        states = [optimizer.state[user] for user in users if user in optimizer.state]
        bring_back(states)  # from files, where another function has put them
        if self._host is not None:
            memory.take_in(states)
        else:
            memory.give_back(states, self._parameters[parameters[0]][1].device)

    def run(self, data: Tensor, grad: Tensor, parameter: int) -> Tensor:
        """Update ``data`` in place with ``grad``, and this parameter's state; return ``data``.

        Shapes: both flat [n] of the parameter's shard if sharded (n may be 0), else both of the
        parameter's shape.

        Raises: UpdateError if the update cannot be traced, or not run on shards; ValueError if
        a state is neither a shard like ``data`` nor a scalar (if sharded).
        """
        if self.has_begun(parameter):
            return self._finish(data, grad, parameter)
        self.ready(data, grad, parameter).run()
        return data

    def ready(self, data: Tensor, grad: Tensor, parameter: int) -> ReadyUpdate:
        """Do of ``run`` what only the step's thread may: trace, compile and read numbers."""
        optimizer = self.live_optimizer()
        user_parameter, info, group = self._of_step(parameter)
        with torch.no_grad():
            values = optimizer.state.get(user_parameter) or {}
            self._storage.adopt(values, data, info)
            if self._sharded:
                self._check_shards(values, data, info)
            shard_shape = tuple(data.shape) if self._sharded else None
            logical = self._storage.logical(values, info)
            state = read_arguments(logical, shard_shape=shard_shape, inputs=logical)
            traced, arguments = self._traces.find(optimizer, parameter, group, state)
            draw = self._draws.of(parameter, values)
            update, tensors, numbers = self._storage.rewrite(
                traced, values, arguments, state, data, grad.dtype, draw
            )
            run = self._in_blocks(update, data, grad) if update.scales else None

        def compute() -> Any:
            converted = grad.to(update.gradient_dtype or data.dtype)  # eager's is the parameter's
            return update(data, converted, tensors, numbers, run)

        def finish(found: Any) -> None:
            new_state, new_group = found
            self._storage.settle(new_state, values, data, info, draw)
            self._keep(user_parameter, group, values, new_state, new_group)

        return ReadyUpdate(compute, finish)

    def _of_step(self, parameter: int) -> tuple[nn.Parameter, ParameterInfo, GroupOfStep]:
        """The user's parameter, its layout, and its group in the step under way."""
        if self._groups is None:
            raise RuntimeError(
                f"{self._optimizer_name}: an update ran outside of a step; call begin() before "
                "the step's first run() and end() after its last"
            )
        reference, info = self._parameters[parameter]
        user_parameter = reference()
        group = self._groups.get(id(user_parameter))
        if user_parameter is None or group is None:
            raise UpdateError(
                f"{self._optimizer_name} no longer has parameter '{info.name}' in any parameter "
                "group, but the compiled step updates it. Add it with add_param_group."
            )
        return user_parameter, info, group

    def _keep(
        self,
        user_parameter: nn.Parameter,
        group: GroupOfStep,
        values: Mapping[str, Any],
        new_state: Mapping[str, Any],
        new_group: Mapping[str, Any],
    ) -> None:
        group.changed.update(new_group)
        if new_state or values:
            live = self.live_optimizer().state[user_parameter]
            for name in [name for name in live if name not in new_state]:
                del live[name]
            live.update(new_state)

    def has_begun(self, parameter: int) -> bool:
        """Whether ``run_on_owners`` has begun this parameter's update."""
        return parameter in self._begun

    def run_on_owners(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        owners: Sequence[int],
        communicator: Communicator,
    ) -> list[Tensor]:
        """Begin these updates; return what ``run`` takes for their gradients.  Collective.

        What of an update needs the parameter whole is computed by the rank that owns it.

        Shapes: flat ``[n]`` of each parameter's shard, in and out.
        """
        members = list(zip(data, grads, parameters, strict=True))
        with torch.no_grad():
            begun = [self._begin(*member) for member in members]
            self._begun.update(zip(parameters, begun, strict=True))
            results = list(grads)
            divided = [place for place, one in enumerate(begun) if one.divided.core is not None]
            if not divided:
                return results
            found = compute_on_owners(
                [begun[place].taken for place in divided],
                [self._parameters[parameters[place]][1] for place in divided],
                [owners[place] for place in divided],
                [begun[place].divided.core_dtype for place in divided],
                lambda number, whole: begun[divided[number]].compute(whole),
                communicator,
            )
            for place, result in zip(divided, found, strict=True):
                results[place] = result
        return results

    def _begin(self, data: Tensor, grad: Tensor, parameter: int) -> _BegunUpdate:
        """Run the part of an update that comes before what needs the parameter whole."""
        optimizer = self.live_optimizer()
        user_parameter, info, group = self._of_step(parameter)
        values = optimizer.state.get(user_parameter) or {}
        self._check_shards(values, data, info)
        state = read_arguments(values, shard_shape=tuple(data.shape), inputs=values)
        update, arguments = self._traces.find(optimizer, parameter, group, state)
        divided = self._divide(update, info)
        grad = grad.to(data.dtype)
        if update.clones_gradient:
            grad = grad.clone()
        inputs = [grad, *arguments.tensors, *state.tensors, *arguments.scalars, *state.scalars]
        taken, numbers, left = divided.run_first(data, inputs)
        return _BegunUpdate(divided, inputs, taken, numbers, left)

    def _finish(self, data: Tensor, result: Tensor, parameter: int) -> Tensor:
        """Run the rest of an update that has begun."""
        begun = self._begun.pop(parameter)
        user_parameter, _, group = self._of_step(parameter)
        values = self.live_optimizer().state.get(user_parameter) or {}
        with torch.no_grad():
            new_state, new_group = begun.divided.run_last(data, begun.inputs, begun.left, result)
        self._keep(user_parameter, group, values, new_state, new_group)
        return data

    def _divide(self, update: Update, info: ParameterInfo) -> DividedUpdate:
        if id(update) not in self._divided:
            self._divided[id(update)] = divide(update, info.shape)
        return self._divided[id(update)]

    def _check_owned_precision(self, info: ParameterInfo) -> None:
        precision = self._storage.precision
        kept_in = precision.moment_storage(info.dtype, info.numel)
        if not precision.compute_dtype(info.dtype) is kept_in is info.dtype:
            raise UpdateError(
                f"parameter '{info.name}' is updated as a whole tensor, and {self._optimizer_name} "
                "then keeps its states in the parameter's dtype: train it in float32, without "
                "master_weights, stochastic_rounding and moment_dtype."
            )

    def run_together(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Do as ``run`` does to each of several sharded parameters, in one kernel where it can.

        That is where shards, gradients and states lie next to each other and the same update
        holds for all.  States are laid out so when they are first met.  ``work``, if given, is
        done to each gradient first, in the same kernel.
        """
        if any(map(self.has_begun, parameters)):
            assert work is None, "what began an update has read its gradient, so that it is there"
            return [self.run(*one) for one in zip(data, grads, parameters, strict=True)]
        self._run_pieces(data, grads, parameters, work, coefficients, None)
        return list(data)

    def ready_together(
        self, data: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[int]
    ) -> list[ReadyUpdate]:
        """Do of ``run_together``, on a CPU, what only the step's thread may."""
        found = []
        for members in self._neighbours(data, grads, parameters):
            joined = self._joined(members)
            if joined is None:
                found += [self.ready(*member) for member in members]
            else:
                found.append(joined.ready())
        return found

    def run_together_and_sum(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
    ) -> Tensor:
        """Do as ``run_together`` does, and return the sum of all gradients' squares.

        It is of the gradients after ``work``, 0-dim, in float32.
        """
        squares: list[Tensor] = []
        self._run_pieces(data, grads, parameters, work, coefficients, squares)
        return squares[0] if len(squares) == 1 else torch.stack(squares).sum()

    def _run_pieces(
        self,
        data: Sequence[Tensor],
        grads: Sequence[Tensor],
        parameters: Sequence[int],
        work: GradientWork | None,
        coefficients: Sequence[Tensor],
        squares: list[Tensor] | None,
    ) -> None:
        """Run updates piece by piece; add what the gradients' squares are in sum to ``squares``."""
        launches = Launches()
        for members in self._neighbours(data, grads, parameters):
            if not self._run_joined(members, launches, work, coefficients, squares):
                for shard, grad, parameter in members:
                    done = grad if work is None else work(grad, *coefficients)
                    if squares is not None:
                        squares.append(squares_of(done))
                    self.run(shard, done, parameter)
        sums = launches.run()
        if squares is not None:
            squares += sums

    def _neighbours(
        self, data: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[int]
    ) -> Iterator[list[tuple[Tensor, Tensor, int]]]:
        """Sort updates by where their shards lie, and cut where groups change or memory does.

        What has no elements on this rank lies nowhere, and goes with the first of its group.
        """
        assert self._groups is not None
        precision = self._storage.precision
        is_plain, draws = precision.is_plain, precision.draws
        pieces: list[tuple[Any, list[tuple[Tensor, Tensor, int]]]] = []
        members = sorted(
            zip(data, grads, parameters, strict=True),
            key=lambda member: (not member[0].numel(), member[0].data_ptr()),
        )
        for member in members:
            reference, info = self._parameters[member[2]]
            group = self._groups.get(id(reference()))
            storage = None if is_plain else precision.moment_storage(info.dtype, info.numel)
            kind = (id(group), member[0].dtype, member[1].dtype, storage)
            if member[0].numel():
                candidates = [
                    piece
                    for known, piece in pieces[-1:]
                    if known == kind
                    and adjoin(piece[-1][0], member[0])
                    and adjoin(piece[-1][1], member[1])
                    and (not draws or self._counts_on(piece, member, storage))
                ]
            else:
                candidates = [piece for known, piece in pieces if known == kind][:1]
            if candidates:
                candidates[0].append(member)
            else:
                pieces.append((kind, [member]))
        yield from (piece for _, piece in pieces)

    def _counts_on(
        self,
        piece: list[tuple[Tensor, Tensor, int]],
        member: tuple[Tensor, Tensor, int],
        storage: torch.dtype | None,
    ) -> bool:
        """Whether elements are numbered on from a piece, and its blocks end where it does."""
        last, _, parameter = piece[-1]
        if storage is torch.int8 and any(len(data) % BLOCK for data, *_ in piece):
            return False
        return self._draws.number_of_first(parameter) + len(last) == self._draws.number_of_first(
            member[2]
        )

    def _in_blocks(
        self, update: Update, data: Tensor, grad: Tensor
    ) -> Callable[..., Sequence[Any]]:
        """What runs an update of moments in eight bits, operator by operator."""
        choice = self._kernels.find(update, data, grad, is_compiled=False)
        if choice is None:
            raise UpdateError(
                f"{self._optimizer_name}.step changes a tensor that is one number after using it, "
                "and such an update does not run on blocks of moments in eight bits. Change it "
                "before its first use, keep it as a Python number, or use "
                "options={'moment_dtype': 'bfloat16'}."
            )
        return choice.run

    def _run_joined(
        self,
        members: list[tuple[Tensor, Tensor, int]],
        launches: Launches,
        work: GradientWork | None,
        coefficients: Sequence[Tensor],
        squares: list[Tensor] | None,
    ) -> bool:
        """Update shards that are one piece of memory with one kernel; False if that cannot be.

        On a GPU the kernel waits for ``launches``, and goes with those of other pieces.  The sum of
        the gradient's squares goes to ``squares``, or comes from ``launches``.
        """
        joined = self._joined(members, work, coefficients, squares is not None)
        if joined is None:
            return False
        results = joined.run(launches)
        if squares is not None and results[-1] is not None:  # it does not wait
            squares.append(results[-1].sum())
        return True

    def _joined(
        self,
        members: list[tuple[Tensor, Tensor, int]],
        work: GradientWork | None = None,
        coefficients: Sequence[Tensor] = (),
        gives_squares: bool = False,
    ) -> _JoinedUpdate | None:
        """One kernel's call for shards that are one piece of memory; None if that cannot be."""
        optimizer = self.live_optimizer()
        parameters = tuple(parameter for *_, parameter in members)
        users = [self._parameters[parameter][0]() for parameter in parameters]
        info = self._parameters[parameters[0]][1]
        assert self._groups is not None
        group = self._groups.get(id(users[0]))
        states = [optimizer.state.get(user) or {} for user in users]
        lengths = [member[0].numel() for member in members]
        is_short = sum(lengths) < FEWEST_ELEMENTS and not runs_triton(members[0][0].device)
        if group is None or is_short:
            return None
        for state, (data, *_) in zip(states, members, strict=True):
            self._storage.adopt(state, data, info)
        values = joined_state(states, lengths)
        if values is None:
            return None
        with torch.no_grad():
            logical = self._storage.logical(values, info)
            state = read_arguments(logical, shard_shape=(sum(lengths),), inputs=logical)
            traced, arguments = self._traces.find(optimizer, parameters[0], group, state)
            layouts = {self._traces.layouts[parameter]: parameter for parameter in parameters}
            for parameter in layouts.values():
                other, _ = self._traces.find(optimizer, parameter, group, state)
                if other.computation != traced.computation:
                    return None
            if traced.writes_gradient:
                for parameter in parameters:
                    self._traces.check_gradient(traced, parameter)
            data = join([member[0] for member in members])
            grad = join([member[1] for member in members])
            draw = self._draws.of(parameters[0], values)
            gradient_dtype = grad.dtype if work is None else work.dtype
            update, tensors, numbers = self._storage.rewrite(
                traced, values, arguments, state, data, gradient_dtype, draw
            )
            update = self._extended(update, work, data.dtype, gives_squares)
            if work is not None:
                numbers += coefficients
            kernel = self._kernels.find(update, data, grad)
            if kernel is None:
                return None
            # New states are settled below, and rounded: what makes them cannot wait.
            is_settled = draw is None or all(name in values for name, _ in update.state)
            inputs = [data, grad, *tensors, *numbers]

        def finish(results: Sequence[Any]) -> None:
            new_state, new_group = update.filled(results)
            self._storage.settle(new_state, values, data, info, draw)
            group.changed.update(new_group)
            if new_state:
                live = self.live_optimizer().state
                keep_state(new_state, values, [live[user] for user in users], lengths)

        return _JoinedUpdate(kernel, inputs, kernel.may_wait and is_settled, finish)

    def _extended(
        self,
        update: Update,
        work: GradientWork | None,
        parameter_dtype: torch.dtype,
        gives_squares: bool,
    ) -> Update:
        """An update that sums its gradient's squares, with work in front of both: made once."""
        if work is None and not gives_squares:
            return update
        key = (id(update), work, parameter_dtype, gives_squares)
        if key not in self._extensions:
            made = with_squares(update) if gives_squares else update
            if work is not None:
                made = work.before(made, parameter_dtype)
            self._extensions[key] = update, made
        return self._extensions[key][1]

    def end(self) -> Callable[[], None]:
        """Finish the step: write changed group entries back, and let LR schedulers know.

        What it returns writes back what updates change that finish later.
        """
        groups = list((self._groups or {}).values())

        def keep_groups() -> None:
            for group in groups:
                group.values.update(group.changed)

        keep_groups()
        self._groups = None
        self.live_optimizer()._opt_called = True
        return keep_groups

    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.  Raises: RuntimeError if it is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                f"the {self._optimizer_name} of a compiled step is gone: keep a reference to it "
                "for as long as the step is called"
            )
        return optimizer

    def _check_shards(self, values: Mapping[str, Any], data: Tensor, info: ParameterInfo) -> None:
        """Refuse a state that is neither this rank's shard nor a number."""
        native = values.get(NATIVE, {})
        for name, value in values.items():
            if is_scale(name, native):
                continue
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != data.shape:
                raise ValueError(
                    f"state '{name}' of parameter '{info.name}' has shape {tuple(value.shape)} on "
                    f"rank {self._rank}; expected that rank's shard, {tuple(data.shape)}, or a "
                    "scalar. Set states with optimizer.load_state_dict, which takes them whole, "
                    f"of the parameter's shape {info.shape}."
                )


def _has_shape(value: Any, shapes: Collection[tuple[int, ...]]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) in shapes


@dataclass(frozen=True)
class ReadyUpdate:
    """An update of which the elements are left to ``compute``, in any thread.

    ``finish`` takes what that returns, and keeps new states; in the step's thread.
    """

    compute: Callable[[], Any]
    finish: Callable[[Any], None]

    def run(self) -> None:
        with torch.no_grad():
            self.finish(self.compute())


@dataclass(frozen=True)
class _JoinedUpdate:
    """The call of a kernel that updates neighbours; it ``waits`` for others to launch with."""

    kernel: Choice
    inputs: Sequence[Any]
    waits: bool
    finish: Callable[[Sequence[Any]], None]

    def run(self, launches: Launches) -> Sequence[Any]:
        with torch.no_grad():
            run = partial(self.kernel.run, launches=launches) if self.waits else self.kernel.run
            data, grad, *others = self.inputs
            results = run(data, grad.to(self.kernel.gradient_dtype), *others)
            self.finish(results)
        return results

    def ready(self) -> ReadyUpdate:
        """As one that another thread computes; the gradient may be there only then."""
        assert self.kernel.ready is not None, "updates on the host run on its CPU"
        data, grad, *others = self.inputs
        converted = grad
        if grad.dtype is not self.kernel.gradient_dtype:
            converted = torch.empty_like(grad, dtype=self.kernel.gradient_dtype)
        with torch.no_grad():
            run = self.kernel.ready(data, converted, *others)

        def compute() -> Any:
            if converted is not grad:
                converted.copy_(grad)
            return run()

        return ReadyUpdate(compute, self.finish)


@dataclass(frozen=True)
class _BegunUpdate:
    """An update between its first part and its last."""

    divided: DividedUpdate
    inputs: Sequence[Any]
    taken: Tensor
    numbers: Sequence[Any]
    left: Sequence[Any]

    def compute(self, whole: Tensor) -> Tensor:
        """Run the part between the two, on the rank that owns the parameter."""
        assert self.divided.core is not None
        return self.divided.core(whole, *self.numbers)
