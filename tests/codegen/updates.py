"""Optimizers for the tests of kernels, and one's update traced and run on flat shards."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

from tests.codegen.lion import Lion
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.rewrite.storage import rewritten
from zerofx.codegen.trace.arguments import group_values, read_arguments
from zerofx.codegen.trace.step import ChangingIntegers
from zerofx.codegen.trace.trace import trace_update
from zerofx.ir.parameters import ParameterInfo

SINGLE = {"foreach": False}

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, **SINGLE),
    "adamw_amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True, **SINGLE),
    "adamw_maximize": lambda p: optim.AdamW(p, lr=1e-2, maximize=True, **SINGLE),
    "adamw_tensor_lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), **SINGLE),
    "adam": lambda p: optim.Adam(p, lr=1e-2, **SINGLE),
    "adam_l2": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, **SINGLE),
    "sgd_plain": lambda p: optim.SGD(p, lr=0.1, **SINGLE),
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01, **SINGLE),
    "sgd_momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, **SINGLE),
    "sgd_nesterov": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True, **SINGLE
    ),
    "sgd_tensor_lr": lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, **SINGLE),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-2, **SINGLE),
    "rmsprop_centered": lambda p: optim.RMSprop(
        p, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.01, **SINGLE
    ),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01, **SINGLE),
    "adadelta": lambda p: optim.Adadelta(p, weight_decay=0.01, **SINGLE),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2, weight_decay=0.01, **SINGLE),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, weight_decay=0.01, **SINGLE),
    "nadam_decoupled": lambda p: optim.NAdam(
        p, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=True, **SINGLE
    ),
    "radam": lambda p: optim.RAdam(p, lr=1e-2, weight_decay=0.01, **SINGLE),
    "radam_decoupled": lambda p: optim.RAdam(
        p, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=True, **SINGLE
    ),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2, weight_decay=0.01, **SINGLE),
    "rprop": lambda p: optim.Rprop(p, lr=1e-2, **SINGLE),
    "lion": Lion,
}


@dataclass
class Shards:
    """An optimizer of one flat parameter, whose update is traced and run by what ``make`` gives.

    ``work`` is done to the gradient in front of it.  With ``squares`` it gives the sum of the
    gradient's squares: ``step`` returns all that the run has.
    """

    optimizer: torch.optim.Optimizer
    make: Any
    variant: dict[str, Any] = field(default_factory=dict)
    work: GradientWork | None = None
    squares: bool = False
    known: dict[Any, list] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)

    @property
    def parameter(self):
        return self.optimizer.param_groups[0]["params"][0]

    def trace(self):
        """The update that holds now, its arguments, and what runs it."""
        p = self.parameter
        values = self.optimizer.state.get(p) or {}
        group = read_arguments(
            group_values(self.optimizer.param_groups[0]), shard_shape=None, inputs=self.changing
        )
        state = read_arguments(values, shard_shape=tuple(p.shape), inputs=values)
        scalars = (*group.scalars, *state.scalars)
        known = self.known.setdefault((p.dtype, group.key, state.key), [])
        for update, run in known:
            if update.guard is None or update.guard(scalars):
                return update, run, group, state
        try:
            update = trace_update(
                self.optimizer, layout(p, (7,)), group=group, state=state, sharded=True
            )
        except ChangingIntegers as changing:
            self.changing |= changing.names
            return self.trace()
        options = dict(self.variant)
        if self.squares:
            options["squares"] = True
        if self.work is not None:
            options["work"] = self.work
        known.append((update, self.make(update, **options)))
        return *known[-1], group, state

    def step(self, gradient, coefficients=(), **options):
        update, run, group, state = self.trace()
        with torch.no_grad():
            results = run(
                self.parameter.detach(),
                gradient,
                *group.tensors,
                *state.tensors,
                *group.scalars,
                *state.scalars,
                *coefficients,
                **options,
            )
            new_state, new_group = update.filled(results)
        self.optimizer.param_groups[0].update(new_group)
        if new_state:
            self.optimizer.state[self.parameter].update(new_state)
        return results


def layout(p, shape):
    """The layout of a whole parameter that ``p`` could be a flat shard of."""
    return ParameterInfo(
        index=0,
        name="w",
        requires_grad=True,
        world_size=1,
        shape=shape,
        stride=(1,),
        dtype=p.dtype,
        device=p.device,
    )


def program(
    make_optimizer,
    *,
    steps=2,
    dtype=torch.float32,
    work=None,
    stored=None,
    squares=False,
    **variant,
):
    """The pointwise program of the update that an optimizer makes after some steps.

    ``stored`` is how it is kept, if not as it is computed; ``squares`` asks for the gradient's.
    """

    def make(update, **variant):
        update = kept(update, stored) if stored else update
        return pointwise_program(update, **variant)

    p = nn.Parameter(torch.ones(7, dtype=dtype))
    optimizer = make_optimizer([p])
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    shards = Shards(optimizer, make, variant, work, squares)
    return shards.trace()[1]


def kept(update, stored):
    """An update of what is stored."""
    places = {path.rpartition(".")[2]: place for place, path in enumerate(update.inputs)}
    return rewritten(update, stored, {name: places[name] for name, _ in stored.moments})
