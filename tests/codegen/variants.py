"""The updates whose kernels are golden: an optimizer, its step, and how its numbers are kept."""

from dataclasses import replace

import torch

from tests.codegen import work
from tests.codegen.lion import Lion
from tests.codegen.updates import OPTIMIZERS
from zerofx.codegen.rewrite.storage import Stored

BF16 = torch.bfloat16

MASTERS = Stored(
    parameter=BF16,
    gradient=BF16,
    compute=torch.float32,
    keeps_master=True,
    has_master=True,
    rounds_parameter=False,
    moments=(),
)
HALF_MOMENTS = (("exp_avg", BF16), ("exp_avg_sq", BF16))
CODED_MOMENTS = (("exp_avg", torch.int8), ("exp_avg_sq", torch.int8))
STORED = {
    "adamw_masters": MASTERS,
    "adamw_masters_first_kept": replace(MASTERS, has_master=False),
    "adamw_rounded": replace(
        MASTERS, keeps_master=False, has_master=False, rounds_parameter=True, moments=HALF_MOMENTS
    ),
    "adamw_bf16_moments": Stored(
        *(torch.float32,) * 3,
        keeps_master=False,
        has_master=False,
        rounds_parameter=False,
        moments=HALF_MOMENTS,
    ),
    "adamw_rounded_int8_moments": replace(
        MASTERS, keeps_master=False, has_master=False, rounds_parameter=True, moments=CODED_MOMENTS
    ),
    "adamw_masters_int8_moments": replace(MASTERS, moments=CODED_MOMENTS),
}

VARIANTS = {
    **{name: dict(make_optimizer=make) for name, make in OPTIMIZERS.items()},
    "adamw_first_step": dict(make_optimizer=OPTIMIZERS["adamw"], steps=0),
    "adamw_bf16_gradient": dict(make_optimizer=OPTIMIZERS["adamw"], gradient_dtype=BF16),
    "adamw_bf16_parameters": dict(make_optimizer=OPTIMIZERS["adamw"], dtype=BF16),
    "adamw_clipped_and_scaled": dict(
        make_optimizer=OPTIMIZERS["adamw"],
        work=work.traced(work.unscale_and_clip, torch.float16, torch.float32, torch.float32),
    ),
    "adamw_bf16_clipped": dict(
        make_optimizer=OPTIMIZERS["adamw"], dtype=BF16, work=work.traced(work.clip, BF16, BF16)
    ),
    "adamw_float64": dict(make_optimizer=OPTIMIZERS["adamw"], dtype=torch.float64),
    **{
        name: dict(make_optimizer=OPTIMIZERS["adamw"], stored=stored)
        for name, stored in STORED.items()
    },
    "adamw_squares": dict(make_optimizer=OPTIMIZERS["adamw"], squares=True),
    "adamw_scaled_squares": dict(
        make_optimizer=OPTIMIZERS["adamw"],
        work=work.traced(work.clip, torch.float16, torch.float32),
        squares=True,
    ),
    "adamw_rounded_int8_moments_squares": dict(
        make_optimizer=OPTIMIZERS["adamw"],
        stored=STORED["adamw_rounded_int8_moments"],
        squares=True,
    ),
    "sgd_nesterov_bf16_gradient_squares": dict(
        make_optimizer=OPTIMIZERS["sgd_nesterov"], gradient_dtype=BF16, squares=True
    ),
    "radam_rectified": dict(make_optimizer=OPTIMIZERS["radam"], steps=7),
    "rprop_first_step": dict(make_optimizer=OPTIMIZERS["rprop"], steps=0),
    "sgd_first_step": dict(make_optimizer=OPTIMIZERS["sgd_momentum"], steps=0),
    "lion_bf16_gradient": dict(make_optimizer=Lion, gradient_dtype=BF16),
}
