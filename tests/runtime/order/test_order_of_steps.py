"""Nothing in a step is unordered: every form, stage, place and tier, saves beside a training.

Bugs are planted: each wait and record of an event in turn does nothing.  Each is reported in some
run.
"""

from __future__ import annotations

import pytest
import torch

from tests.kit import trainings
from tests.kit.covering import exhaustive, first, nightly
from tests.kit.order.cases import RUNS, Case, cases, outcome_of
from tests.kit.order.history import After
from tests.kit.order.watching import watching
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import SLOW
from zerofx.order.clocks import MAIN, Operator

OFFLOADED = {"offload": "optimizer,params"}

IN_FILES = {"bucket_bytes": 256, "offload_cache_bytes": 24576}

CASES = cases()


def check(outcomes) -> None:
    for outcome in outcomes:
        assert outcome.num_entries > 100
        assert not outcome.races, f"{outcome.case}\n" + "\n".join(outcome.races)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["on the device", "on the host"])
def test_a_step_is_in_order(options, tmp_path):
    check([outcome_of(Case("clipped", 3, options), str(tmp_path), plants=False)])


def in_bfloat16(model, optimizer, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return trainings.clipped(model, optimizer, x, y)


def host_waits(step, stage: int) -> list[str]:
    """The host's waits for the device in a third call: numbers read, events, streams, devices."""
    torch._dynamo.reset()
    with watching() as run:
        compiled, pair = trainings.zero(step, stage), trainings.built()
        trainings.SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0)]
        trainings.run(compiled, pair, range(2))
        begin = len(run.history.entries)
        trainings.run(compiled, pair, range(2, 3))
        entries = run.history.entries[begin:]
    found = [str(one.site) for one in entries if isinstance(one, After) and one.line == MAIN]
    for one in entries:
        if (
            isinstance(one, Operator)
            and one.waits
            and any(r.block.is_on_device for r in one.ranges)
        ):
            found.append(f"{one.name} at {one.site}")
    return found


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("stage", first(1, (3, 0, 1, 2)))
def test_the_host_never_waits_in_a_default_step(stage):
    assert host_waits(in_bfloat16, stage) == []


@pytest.mark.nightly
def test_a_scaler_waits_once():
    (wait,) = host_waits(trainings.scaled, 3)
    assert "is_skipped" in wait


def tier_of(case: Case):
    """All runs at their highest stage at night; forms at stage 3; the rest in the long run."""
    is_last = case.stage == 3 and (case.run in RUNS or not case.options)
    return (nightly if is_last else exhaustive)(case)


@pytest.mark.parametrize("case", list(map(tier_of, CASES)), ids=list(map(str, CASES)))
def test_every_run_is_in_order(case, tmp_path):
    check([outcome_of(case, str(tmp_path), plants=False)])


@pytest.mark.nightly
def test_a_shard_is_not_taken_into_a_buffer_that_travels(tmp_path):
    """Its last write to a parameter stands behind the update: a bucket is packed twice."""
    check([outcome_of(Case("weights_decayed_by_hand", 1), str(tmp_path), plants=False)])


OF_RANKS = [
    Case("clipped", 0),
    Case("clipped", 1),
    Case("clipped", 2, {"offload": "optimizer"}),
    Case("clipped", 3),
    Case("clipped", 3, OFFLOADED),
    Case("accumulated", 3, OFFLOADED, files=True),
    Case("save", 3, {"offload": "optimizer"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", OF_RANKS, ids=map(str, OF_RANKS))
def test_ranks_are_in_order(case, ranks, tmp_path):  # noqa: F811
    check(ranks(2).run(outcome_of, case, str(tmp_path), False))


ACTIVATIONS = {"offload": "activations", "recompute": False, "hardware": SLOW}

PLANTED = [
    Case("clipped", 0),
    Case("clipped", 3),
    Case("clipped", 1, {"offload": "optimizer"}),
    Case("clipped", 3, {"offload": "optimizer", "delayed_update": True}),
    Case("clipped", 3, OFFLOADED),
    Case(
        "clipped", 3, {"offload": "params", "bucket_bytes": 256, "offload_cache_bytes": 8192}, True
    ),
    Case("clipped", 3, {**OFFLOADED, **IN_FILES}, True),
    Case("stepped_twice", 3, OFFLOADED),
    Case("plain", 3, ACTIVATIONS),
    Case("stepped_twice", 0, {**ACTIVATIONS, "offload_cache_bytes": 8192}, True),
    Case("write", 3, {**OFFLOADED, **IN_FILES}, True),
    Case("save", 0),
    Case("save", 3, {"offload": "optimizer"}),
    Case("evaluated", 3, {"offload": "params"}),
    Case("growing", 0, ACTIVATIONS),
    Case("streams", 0, ACTIVATIONS),
    Case("failed", 3, {**OFFLOADED, "bucket_bytes": 256}),
]


@pytest.mark.nightly
def test_every_planted_bug_is_reported_at_its_place_in_the_code(tmp_path):
    """In a case that needs it: in others a wait may be redundant, behind another one."""
    found: dict = {}
    for number, case in enumerate(PLANTED):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = outcome_of(case, str(folder))
        check([outcome])
        for place, race in outcome.planted.items():
            found[place] = found.get(place) or race
    missed = [place for place, race in found.items() if race is None]
    print(f"{len(found)} places of waits, {len(found) - len(missed)} reported")
    assert len(found) > 25 and not missed, missed
