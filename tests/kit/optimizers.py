"""Every elementwise optimizer of torch with each of its flags, and a user's own."""

from __future__ import annotations

import torch
from torch import optim

from tests.kit.models import Lion


def _of(kind, **values):
    def make(parameters):
        given = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        return kind(parameters, foreach=False, **given)

    return make


def _adams(kind):
    return {
        "": _of(kind, lr=1e-2),
        "decay": _of(kind, lr=1e-2, weight_decay=0.1),
        "amsgrad": _of(kind, lr=1e-2, amsgrad=True),
        "maximize": _of(kind, lr=1e-2, weight_decay=0.1, maximize=True),
        "amsgrad_maximize": _of(kind, lr=1e-2, amsgrad=True, maximize=True),
        "tensor_lr": _of(kind, lr=torch.tensor(1e-2), weight_decay=0.1),
        "betas": _of(kind, lr=1e-2, betas=(0.3, 0.8)),  # lerp takes its other branch
    }


_KINDS = {
    "adam": _adams(optim.Adam) | {"decoupled": _of(optim.Adam, weight_decay=0.1, lr=1e-2)},
    "adamw": _adams(optim.AdamW),
    "sgd": {
        "": _of(optim.SGD, lr=0.1),
        "decay": _of(optim.SGD, lr=0.1, weight_decay=0.1),
        "momentum": _of(optim.SGD, lr=0.1, momentum=0.9),
        "nesterov": _of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "dampening": _of(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        "maximize": _of(optim.SGD, lr=0.1, momentum=0.9, maximize=True),
        "tensor_lr": _of(optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
    },
    "rmsprop": {
        "": _of(optim.RMSprop),
        "momentum": _of(optim.RMSprop, momentum=0.9),
        "centered": _of(optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.01),
        "maximize": _of(optim.RMSprop, maximize=True),
        "tensor_lr": _of(optim.RMSprop, lr=torch.tensor(1e-2)),
    },
    "adagrad": {
        "": _of(optim.Adagrad, lr=0.1),
        "lr_decay": _of(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01),
        "maximize": _of(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, maximize=True),
        "tensor_lr": _of(optim.Adagrad, lr=torch.tensor(0.1)),
    },
    "adadelta": {
        "": _of(optim.Adadelta),
        "decay": _of(optim.Adadelta, weight_decay=0.1),
        "maximize": _of(optim.Adadelta, maximize=True),
        "tensor_lr": _of(optim.Adadelta, lr=torch.tensor(1.0)),
    },
    "adamax": {
        "": _of(optim.Adamax),
        "decay": _of(optim.Adamax, weight_decay=0.1),
        "maximize": _of(optim.Adamax, maximize=True),
        "tensor_lr": _of(optim.Adamax, lr=torch.tensor(2e-3)),
    },
    "nadam": {
        "": _of(optim.NAdam),
        "decay": _of(optim.NAdam, weight_decay=0.1),
        "decoupled": _of(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
        "maximize": _of(optim.NAdam, maximize=True),
        "tensor_lr": _of(optim.NAdam, lr=torch.tensor(2e-3)),
    },
    "radam": {
        "": _of(optim.RAdam, lr=1e-2),
        "decay": _of(optim.RAdam, lr=1e-2, weight_decay=0.1),
        "decoupled": _of(optim.RAdam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
        "maximize": _of(optim.RAdam, lr=1e-2, maximize=True),
        "tensor_lr": _of(optim.RAdam, lr=torch.tensor(1e-2)),
    },
    "asgd": {
        "": _of(optim.ASGD),
        "averages": _of(optim.ASGD, t0=3, lambd=0.1),
        "decay": _of(optim.ASGD, weight_decay=0.1),
        "maximize": _of(optim.ASGD, maximize=True),
        "tensor_lr": _of(optim.ASGD, lr=torch.tensor(1e-2)),
    },
    "rprop": {
        "": _of(optim.Rprop),
        "etas": _of(optim.Rprop, etas=(0.3, 1.5), step_sizes=(1e-4, 0.1)),
        "maximize": _of(optim.Rprop, maximize=True),
    },
    "lion": {"": Lion},
}

VARIANTS = {
    f"{kind}_{variant}".rstrip("_"): make
    for kind, variants in _KINDS.items()
    for variant, make in variants.items()
}
"""Makers, each of an optimizer for a list of parameters, by name.

None is ``capturable``: torch allows that for parameters on an accelerator only.
"""
