"""Kernels run by Triton's interpreter: they compute what torch.optim computes, where it does."""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tests.codegen import interpreted, work
from tests.codegen.updates import OPTIMIZERS
from tests.codegen.variants import STORED, VARIANTS
from tests.kit.covering import each_pair, each_value, first, nightly, only

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


@pytest.fixture(scope="module")
def run():
    """Run a function of ``interpreted`` in a process where Triton interprets."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            process.submit(interpreted.start).result()
        yield lambda function, *args: process.submit(function, *args).result()


BF16, FP16 = torch.bfloat16, torch.float16
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", first(1, OPTIMIZERS))
def test_errors_are_of_the_size_of_torch_optims(name, run):
    """20 steps at each length: at most twice torch.optim's own error, or a rounding."""
    for tensor, (own, plain, largest) in run(interpreted.errors_against_float64, name).items():
        assert own <= max(2 * plain, EPS * largest), (tensor, own, plain, largest)


@pytest.mark.parametrize("length", only((1500,), [1, 257, 1500]))
@pytest.mark.parametrize("name", first(15, VARIANTS))
def test_a_golden_kernels_step_is_that_of_float64(name, length, run):
    """From the same values, up to the roundings of what it computes in and is kept in."""
    for tensor, worst in run(interpreted.excess, name, length).items():
        assert worst <= 1, (tensor, worst)


@pytest.mark.nightly
def test_a_large_shard_takes_one_launch(run):
    errors = run(interpreted.errors_of_one_launch, "adamw", 2**20 + 7)
    for tensor, (own, plain) in errors.items():
        assert own <= max(2 * plain, 2 * EPS), (tensor, own, plain)


@pytest.mark.parametrize("name", ["adamw_amsgrad", "sgd_nesterov", "adamax", "rprop", "lion"])
def test_nan_and_inf_go_where_torch_optim_takes_them(name, run):
    run(interpreted.check_not_finite, name)


def test_groups_with_their_own_hyperparameters_share_a_launch(run):
    run(interpreted.check_groups_in_one_launch)


@pytest.mark.parametrize("offset, length", each_value((1, 16), (1, 15, 1024, 9001)))
def test_nothing_beside_a_segment_is_touched(offset, length, run):
    run(interpreted.check_neighbours_are_left_alone, offset, length)


@pytest.mark.parametrize("name", only(("sgd_momentum",), ["adamw", "sgd_momentum", "rprop"]))
def test_all_pieces_of_a_bucket_take_one_launch(name, run):
    run(interpreted.check_the_runtime_updates_a_bucket, name)


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
def test_bf16_parameters_are_computed_in_fp32(name, run):
    run(interpreted.check_bf16_parameters, name)


PRECISIONS = {
    "masters": {"master_weights": True},
    "rounded": {"stochastic_rounding": True},
    "bf16 moments": {"moment_dtype": BF16},
    "masters, bf16 moments": {"master_weights": True, "moment_dtype": BF16},
    "rounded, int8 moments": {"stochastic_rounding": True, "moment_dtype": torch.int8},
    "masters, int8 moments": {"master_weights": True, "moment_dtype": torch.int8},
}


@pytest.mark.parametrize(
    "name, options",
    each_pair(
        ("adamw", "sgd_nesterov"),
        PRECISIONS,
        default=[("adamw", "masters"), ("adamw", "bf16 moments"), ("sgd_nesterov", "rounded")],
    ),
)
def test_what_is_kept_otherwise_is_widened_and_narrowed_in_the_kernel(name, options, run):
    run(interpreted.check_precision, name, PRECISIONS[options])


@pytest.mark.parametrize("name", only(("sgd_nesterov",), ["adamw", "sgd_nesterov"]))
def test_a_block_with_a_nan_or_an_infinity_is_lost_as_on_the_cpu(name, run):
    run(interpreted.check_precision, name, PRECISIONS["rounded, int8 moments"], True)


@pytest.mark.nightly
@pytest.mark.parametrize("offset", [1, 16])
def test_blocks_of_codes_are_updated_wherever_they_are(offset, run):
    run(interpreted.check_blocks_of_codes, offset, STORED["adamw_rounded_int8_moments"])


@pytest.mark.parametrize("name", ["adamw", "adamax", "rprop"])
def test_float64_parameters_keep_their_precision(name, run):
    run(interpreted.check_float64, name)


WORKS = {
    "clipped": (work.clip, torch.float32, torch.tensor(0.3)),
    "clipped, in bf16": (work.clip, BF16, torch.tensor(0.3, dtype=BF16)),
    "clipped, in bf16, by a number in fp32": (work.clip, BF16, torch.tensor(0.3)),
    "unscaled and clipped": (work.unscale_and_clip, FP16, torch.tensor(0.3), torch.tensor(0.7)),
    "bounded": (work.clamp_and_drop, torch.float32, torch.tensor(0.3), torch.tensor(False)),
    "bounded, in bf16": (
        work.clamp_and_drop,
        BF16,
        torch.tensor(0.3, dtype=BF16),
        torch.tensor(False),
    ),
    "dropped": (work.clamp_and_drop, torch.float32, torch.tensor(0.3), torch.tensor(True)),
}


@pytest.mark.parametrize(
    "name", [nightly(name) if name.startswith("bounded") else name for name in WORKS]
)
def test_a_gradient_is_worked_on_in_the_kernel(name, run):
    run(interpreted.check_work_on_the_gradient, *WORKS[name])


def test_tuning_never_sees_a_steps_memory(run):
    run(interpreted.check_a_steps_memory_is_not_tuned_on)


@pytest.mark.parametrize(
    "name, dtype",
    each_pair(
        ("adamw", "sgd_nesterov", "rmsprop"),
        (torch.float32, BF16, FP16),
        default=[("sgd_nesterov", BF16)],
    ),
)
def test_the_gradients_squares_are_summed_beside_the_update(name, dtype, run):
    run(interpreted.check_squares, name, dtype)


CHECKS = {
    "squares that are not finite make the sum so": interpreted.check_squares_of_what_is_not_finite,
    "a bucket's squares are summed": interpreted.check_the_runtime_sums_a_buckets_squares,
    "no elements have no squares": interpreted.check_squares_of_nothing,
    "squares are of the gradient as the step makes it": interpreted.check_squares_of_work,
    "a shard of no elements has a state": interpreted.check_an_empty_shard,
    "a bf16 gradient goes in": interpreted.check_bf16_gradient,
    "bits and integers are those of torch": interpreted.check_bits_and_integers,
    "a number is read when it is used": interpreted.check_a_number_that_changes_after_its_use,
    "functions are those of torch": interpreted.check_functions,
    "rounding errors are what is left": interpreted.check_an_update_that_makes_up_for_its_rounding,
    "a rewritten update draws the same bits": interpreted.check_functions_in_a_rewritten_graph,
    "tables are sent when they are new": (
        interpreted.check_tables_are_sent_when_they_say_something_new
    ),
    "a default device is nothing to a launch": interpreted.check_a_default_device_changes_nothing,
    "streams that do not fit are refused": interpreted.check_streams_that_do_not_fit_are_refused,
}


@pytest.mark.parametrize("claim", CHECKS)
def test_that(claim, run):
    run(CHECKS[claim])
