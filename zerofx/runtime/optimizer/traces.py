"""One optimizer on one rank: the traces of its step, and the step that is under way."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.accelerator import is_accelerator
from zerofx.codegen.kernels import Kernels
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.storage import NATIVE, is_scale
from zerofx.codegen.trace.arguments import (
    Arguments,
    constant_attributes,
    constants,
    group_values,
    is_torchs,
    read_arguments,
)
from zerofx.codegen.trace.independence import check_independent
from zerofx.codegen.trace.shadow import count_step
from zerofx.codegen.trace.step import ChangingIntegers
from zerofx.codegen.trace.trace import Update, trace_update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import join
from zerofx.runtime.optimizer.piece import (
    GroupOfStep,
    Piece,
    Traced,
    UpdatedParameter,
    keep_state,
)
from zerofx.runtime.optimizer.precision import StateStorage
from zerofx.runtime.optimizer.setup import UpdateSettings

Member = tuple[Tensor, Tensor, int]
"""A parameter's shard, its gradient's, both flat ``[n]``, and the parameter's number."""

# A parameter that needs more traces than this has something that is another at every step.
_MANY_TRACES = 8
_MOST_KEPT = 4 * _MANY_TRACES
"""Traces kept for each parameter: then all are dropped."""


class TracedOptimizer:
    """An optimizer with its parameters on this rank, and the traces of their updates.

    ``parameters`` maps the index that the program uses to the user's parameter and its layout.
    ``trace_count`` is the number of traces of the optimizer's Python that have been made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[int, tuple[nn.Parameter, ParameterInfo]],
        settings: UpdateSettings,
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.settings = settings
        self.storage = StateStorage(settings.precision, self.name)
        self.kernels = Kernels(settings.keep_source)
        # Of their own: they run beside the others, and no kernel does so twice at once.
        self.host_kernels = Kernels(settings.keep_source)
        self.parameters = {
            index: self._updated(index, parameter, info)
            for index, (parameter, info) in parameters.items()
        }
        self._by_id = {id(one.user()): one for one in self.parameters.values()}
        self.trace_count = 0
        self._groups: dict[int, GroupOfStep] | None = None  # of the step under way
        self._known: dict[Hashable, list[Update]] = {}
        self._checked: set[Hashable] = set()
        self._stay_whole: set[Hashable] = set()  # of which, seen flat, there is no trace
        self._shared_keys: dict[Hashable, int] = {}
        self._next_key = itertools.count()
        self._num_traces: Counter[int] = Counter()  # of each parameter
        self._changing_integers: set[str] = set()
        self._attributes: tuple = ()

    def _updated(self, index: int, user: nn.Parameter, info: ParameterInfo) -> UpdatedParameter:
        on_host = index in self.settings.on_host
        if on_host:
            info = replace(info, device=torch.device("cpu"))
        is_sharded = self.settings.sharded and index not in self.settings.owned
        return UpdatedParameter(index, weakref.ref(user), info, on_host, is_sharded)

    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.  Raises: RuntimeError if it is gone."""
        optimizer = self.optimizer()
        if optimizer is None:
            raise RuntimeError(
                f"the {self.name} of a compiled step is gone: keep a reference to it for as long "
                "as the step is called"
            )
        return optimizer

    def begin(self) -> None:
        """Start one optimizer step: look up every parameter's group as it is now."""
        optimizer = self.live_optimizer()
        self._attributes = constant_attributes(optimizer)
        self._groups = {}
        number, draws = 0, self.settings.precision.draws
        for values in optimizer.param_groups:
            groups = [GroupOfStep(values, on_host) for on_host in (False, True)]
            for user in values["params"]:
                parameter = self._by_id.get(id(user))
                if parameter is not None and parameter.user() is user:
                    self._groups[parameter.index] = groups[parameter.on_host]
                    attributes = vars(user)
                    if attributes or parameter.attributes:
                        parameter.attributes = constants(attributes)
                    if draws:
                        start, _ = parameter.info.owned_by(parameter.info.rank)
                        parameter.first_element = number + (start if self.settings.sharded else 0)
                number += user.numel() if draws else 0

    def end(self) -> list[GroupOfStep]:
        """Finish the step: write changed group entries back, and let LR schedulers know.

        Groups none of whose parameters has been updated count the step as others do.

        Returns the groups of updates on the host, which may finish and change entries later.
        """
        groups, self._groups = dict.fromkeys((self._groups or {}).values()), None
        for group in groups:
            group.keep_changes()
        optimizer = self.live_optimizer()
        updated = {id(group.values) for group in groups if group.is_updated}
        idle = [values for values in optimizer.param_groups if id(values) not in updated]
        if idle and not self.settings.own_step:
            count_step(optimizer, idle)
        optimizer._opt_called = True
        return [group for group in groups if group.on_host]

    def _group_of(self, index: int) -> GroupOfStep | None:
        """The group of a parameter in the step under way; None if it is in none any more."""
        return (self._groups or {}).get(index)

    def piece(self, members: Sequence[Member]) -> Piece:
        """Put together what the update of a parameter changes, or of neighbours of one group.

        Its ``values`` are the state of the first.

        Raises: UpdateError if the parameter is in no group any more; ValueError if a state is
        neither a shard like the data nor a scalar (if sharded).
        """
        if self._groups is None:
            raise RuntimeError(
                f"{self.name}: an update ran outside of a step; call begin() before the step's "
                "first run() and end() after its last"
            )
        shards, grads, indices = zip(*members, strict=True)
        parameters = [self.parameters[index] for index in indices]
        users = [user for one in parameters if (user := one.user()) is not None]
        first, group = parameters[0].info, self._group_of(parameters[0].index)
        if group is None or len(users) < len(parameters):
            raise UpdateError(
                f"{self.name} no longer has parameter '{first.name}' in any parameter group, but "
                "the compiled step updates it. Add it with add_param_group."
            )
        group.is_updated = True
        entries = self.live_optimizer().state
        states = [entries.get(user) or {} for user in users]
        counts_on_cpu = bool(first.shape) and self._counts_on_cpu(first.device)
        for state, shard in zip(states, shards, strict=True):
            self.storage.adopt(state, shard, first)
            if counts_on_cpu and any(map(_is_count_elsewhere, state.values())):
                state.update((k, v.cpu()) for k, v in state.items() if _is_count_elsewhere(v))
        if len(members) == 1:
            ((data, grad, _),) = members
            if self.settings.sharded:
                self._check_shards(states[0], data, first)
        else:
            data, grad = join(shards), join(grads)
        lengths = [shard.numel() for shard in shards]
        return Piece(parameters, users, group, lengths, data, grad, states, states[0])

    def _counts_on_cpu(self, device: torch.device) -> bool:
        """Return whether numbers such as ``step`` are kept on the CPU for parameters there.

        To read one on an accelerator, where ``fused`` and ``capturable`` have it, is to wait for
        it.  An optimizer that is not torch's may compute with its own there.
        """
        return is_torchs(type(self.live_optimizer())) and is_accelerator(device)

    def _check_shards(self, state: Mapping[str, Any], data: Tensor, info: ParameterInfo) -> None:
        """Refuse a state that is neither this rank's shard nor a number."""
        native = state.get(NATIVE, {})
        for name, value in state.items():
            if is_scale(name, native):
                continue
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != data.shape:
                raise ValueError(
                    f"state '{name}' of parameter '{info.name}' has shape {tuple(value.shape)} on "
                    f"rank {self.settings.rank}; expected that rank's shard, {tuple(data.shape)}, "
                    "or a scalar. Set states with optimizer.load_state_dict, which takes them "
                    f"whole, of the parameter's shape {info.shape}."
                )

    def keep_state(self, piece: Piece, new_state: Mapping[str, Any]) -> None:
        """Keep what a piece's update has made of its parameters' states."""
        if new_state or piece.values:
            entries = self.live_optimizer().state
            states = [entries[user] for user in piece.users]
            keep_state(new_state, piece.values, states, piece.lengths, piece.whole)

    def traced(self, piece: Piece) -> Traced:
        """Return the trace that holds for a piece's first parameter as its group and state are now.

        Raises: UpdateError if there is none and none can be made.
        """
        logical = self.storage.logical(piece.values, piece.info)
        is_flat = self.settings.sharded or piece.whole is not None
        shape = tuple(piece.data.shape) if is_flat else None
        state = read_arguments(logical, shard_shape=shape, inputs=logical)
        return self.find(piece.parameters[0], piece.group, state)

    def find(self, parameter: UpdatedParameter, group: GroupOfStep, state: Arguments) -> Traced:
        """Return the trace that holds for these arguments.

        Raises: UpdateError if there is none and none can be made.
        """
        arguments = self._read(group)
        scalars = (*arguments.scalars, *state.scalars)
        own = (parameter.attributes, group.key, state.key)
        keys = [(layout, *own) for layout in parameter.layouts]
        for key in keys:
            for update in self._known.get(key, ()):
                if update.guard is None or update.guard(scalars):
                    self.check_gradient(update, parameter)
                    return Traced(update, arguments, state)
        optimizer = self.live_optimizer()
        if keys[-1] in self._stay_whole:
            raise UpdateError(f"{self.name}'s update of '{parameter.info.name}' is none of shards.")
        moment = (group.key, scalars)
        if state.values and moment not in self._checked:
            check_independent(optimizer, state.values)
            self._checked.add(moment)
        self.trace_count += 1
        compute = self.settings.precision.compute_dtype(parameter.info.dtype)
        info = replace(parameter.info, dtype=compute)
        try:
            update = trace_update(
                optimizer,
                info,
                group=arguments,
                state=state,
                sharded=parameter.is_sharded or parameter.seen_flat,
                attributes=vars(parameter.user()),
            )
        except ChangingIntegers as changing:
            self._changing_integers |= changing.names
            group.arguments = None
            return self.find(parameter, group, state)
        except UpdateError:
            if parameter.seen_flat:
                self._stay_whole.add(keys[-1])
            raise
        self.check_gradient(update, parameter)
        if sum(map(len, self._known.values())) >= _MOST_KEPT * len(self.parameters):
            self._forget_traces()
        self._known.setdefault(keys[0 if update.of_any_sizes else -1], []).append(update)
        self._num_traces[parameter.index] += 1
        if self._num_traces[parameter.index] == _MANY_TRACES + 1:
            others = ["branches on hyperparameters, or attributes and integers that change"]
            lines = sorted(set(update.conversions)) or others
            warnings.warn(
                f"{self.name}.step has been traced {_MANY_TRACES + 1} times for parameter "
                f"'{info.name}', because of {', '.join(lines)}: every new value costs a trace. "
                "Keep what changes as floats of the parameter group, out of int() and numpy.",
                stacklevel=2,
            )
        return Traced(update, arguments, state)

    def _forget_traces(self) -> None:
        """Drop all traces, with their kernels: what they were made for may never come again."""
        self._known.clear()
        self._checked.clear()
        self._stay_whole.clear()
        self._shared_keys.clear()
        self.kernels, self.host_kernels = (Kernels(self.settings.keep_source) for _ in range(2))

    def _read(self, group: GroupOfStep) -> Arguments:
        """Return the arguments that a group gives to its parameters' updates in this step."""
        if group.arguments is None:
            given = group_values(group.values)
            if "capturable" in given and self._counts_on_cpu(group.values["params"][0].device):
                given["capturable"] = False
            if group.on_host:  # a tensor's learning rate is read once a step
                given = {
                    k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v
                    for k, v in given.items()
                }
            group.arguments = read_arguments(
                given, shard_shape=None, inputs=self._changing_integers
            )
            # A number for the part of the key that all parameters of the group share.
            shared = (self._attributes, group.arguments.key)
            if shared not in self._shared_keys:
                self._shared_keys[shared] = next(self._next_key)
            group.key = self._shared_keys[shared]
        return group.arguments

    def check_gradient(self, update: Update, parameter: UpdatedParameter) -> None:
        """Refuse an update that changes a gradient that is read after it."""
        if update.writes_gradient:
            self.check_written_gradient(parameter)

    def check_written_gradient(self, parameter: UpdatedParameter) -> None:
        """Refuse that an update has changed or replaced a gradient which is read after it."""
        if parameter.index in self.settings.gradients_read_later:
            raise UpdateError(
                f"{self.name}.step writes to p.grad, or replaces or clears it, and the gradient of "
                f"'{parameter.info.name}' is read after it, in the step or as p.grad once the step "
                "is over: zerofx's update works on a copy. Write `grad = p.grad.clone()` in the "
                "optimizer, or call optimizer.zero_grad() right after optimizer.step()."
            )


def _is_count_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and not value.is_cpu
