"""``stop_after``: a step as it is behind one pass, without those that come later."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.kit.programs import clone, mlp_step
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import built, plain, program_of, run, zero
from zerofx.compiler.choices import attempts, choose, stopped
from zerofx.ir.mesh import Mesh
from zerofx.options import STOPS
from zerofx.passes.pipeline import PIPELINE, rewrites

EVERYTHING = {
    "offload": "optimizer,params,activations",
    "offload_tier": "nvme",
    "offload_dir": "scratch",
}


def of(name, **options):
    return stopped(choose({**options, "stop_after": name}, {}))


def test_there_is_a_stop_behind_every_pass_but_the_first_and_the_last():
    names = [step.name for step in rewrites(PIPELINE)]
    assert list(STOPS) == names[names.index("data_parallel") : -1]


@pytest.mark.parametrize(
    ("name", "stage"),
    (("data_parallel", 0), ("bucket", 0), ("shard_optimizer", 1), ("shard_gradients", 2))
    + (("shard_parameters", 3), ("prefetch", 3)),
)
def test_the_stage_is_what_the_passes_so_far_shard(name, stage):
    assert of(name).stage == stage
    assert of(name, stage=1).stage == min(stage, 1)


def test_what_later_passes_would_offload_stays():
    assert of("shard_parameters", **EVERYTHING).offload == ()
    assert of("place_offload", **EVERYTHING).offload == ("optimizer", "params")
    held = of("offload_activations", **EVERYTHING)
    assert held.offload == ("optimizer", "params", "activations")
    assert (held.offload_tier, held.offload_dir) == ("cpu", ())
    automatic = {"offload": "auto", "memory_budget": 1000}
    assert of("prefetch", **automatic).offload == ("auto",)
    assert of("place_offload", **automatic).offload == ()


def test_parameters_that_have_a_second_shard_stay_on_the_device():
    mesh = Mesh((("node", 2), ("gpu", 2)), outer_stage=3)
    axes = SimpleNamespace(mesh_dim_names=("node", "gpu"))
    given = {"offload": "auto", "memory_budget": 10_000, "process_group": axes}
    table = clone(mlp_step(), 4).table
    shards = sum(info.largest_shard_numel * info.dtype.itemsize for info in table)
    plain = attempts(choose(given, {}), table, mesh)
    second = attempts(choose({**given, "secondary_shard": "gpu"}, {}), table, mesh)
    assert [options.offload for options in second] == [options.offload for options in plain[:2]]
    assert [options.memory_budget for options in plain] == [10_000 - shards] * 2 + [10_000]
    assert [options.memory_budget for options in second] == [10_000 - 3 * shards] * 2


def test_later_optional_passes_are_off_and_earlier_ones_as_they_were():
    options = of("bucket", hoist_casts=False)
    assert options.bucket and not options.hoist_casts
    assert not (options.update_in_backward or options.prefetch)


def test_updates_are_not_delayed_that_run_on_the_device():
    delayed = {"offload": "optimizer", "delayed_update": True}
    assert of("place_offload", **delayed).delayed_update
    assert not of("shard_parameters", **delayed).delayed_update
    assert not of("shard_gradients", **delayed).delayed_update


def test_without_a_stop_nothing_changes():
    options = choose(EVERYTHING, {})
    assert stopped(options) is options
    last = dataclasses.replace(of("prefetch"), stop_after=None)
    assert last == choose({}, {})


@pytest.mark.parametrize("option", ({"master_weights": True}, {"moment_dtype": "bfloat16"}))
def test_states_that_have_to_be_sharded_are_said(option):
    with pytest.raises(ValueError, match="needs them sharded: stop after 'shard_optimizer' or"):
        of("bucket", **option)
    assert of("shard_optimizer", **option).stage == 1


def test_a_pass_that_there_is_not_is_said():
    with pytest.raises(ValueError, match="stop_after must be one of data_parallel, hoist_casts"):
        of("place_files")


def losses_with(names, folder):
    """Two ranks' losses with nothing left out, then with each stop, and which rewrites ran."""
    options = {**EVERYTHING, "offload_dir": folder, "recompute": False, "bucket_bytes": 200}
    rewriting = {step.name for step in rewrites(PIPELINE)}
    found = []
    for name in (None, *names):
        torch._dynamo.reset()
        pair = built()
        compiled = zero(plain, **options, stop_after=name)
        losses = run(compiled, pair, range(3))
        reports = program_of(compiled).reports
        found.append(
            (losses, [one.name for one in reports if one.name in rewriting and not one.skipped])
        )
    return found


@pytest.mark.nightly
def test_what_is_computed_is_the_same_wherever_it_stops(ranks, tmp_path):
    names = ("data_parallel", "shard_optimizer", "shard_parameters", "place_offload")
    for found in ranks(2).run(losses_with, names, str(tmp_path)):
        (losses, everything), *others = found
        assert everything[-1] == "place_files"
        for name, (stopped_losses, ran) in zip(names, others, strict=True):
            assert stopped_losses == losses and ran[-1] == name
