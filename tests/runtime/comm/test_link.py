"""What plans are made with: measured once for a group, agreed on by its ranks, or given."""

from __future__ import annotations

import dataclasses
import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import first
from tests.kit.ranks import Ranks, ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx import backend
from zerofx.hardware import LARGEST_BUCKET_BYTES, NOMINAL, SMALLEST_BUCKET_BYTES, Hardware, of
from zerofx.options import resolve
from zerofx.runtime.comm import measure
from zerofx.runtime.comm.agreement import AgreementError
from zerofx.runtime.comm.communication import Communicator

MIB = 2**20
MEASURING = {"ZEROFX_HARDWARE": ""}


def figures(**values) -> Hardware:
    return dataclasses.replace(Hardware(latency_s=1e-4, bytes_per_s=1e9), **values)


# The rule for buckets.


@pytest.mark.parametrize(
    "latency_s, bytes_per_s, expected",
    [
        (0.0, 1e9, MIB),
        (1e-5, 1e9, MIB),  # nine latencies carry 180 kB of a bucket
        (1e-4, 1e9, 8 * MIB),  # 1.8 MB
        (3e-4, 1e9, 8 * MIB),  # 5.4 MB
        (1e-4, 1.2e10, 64 * MIB),  # 21.6 MB
        (1.0, 1e12, 64 * MIB),
    ],
)
def test_the_smallest_bucket_whose_latency_is_a_tenth_of_its_time(latency_s, bytes_per_s, expected):
    given = figures(latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert given.bucket_bytes(2) == expected
    if SMALLEST_BUCKET_BYTES < expected < LARGEST_BUCKET_BYTES:
        assert latency_s <= 0.1 * given.transfer_s(expected, 2)
        assert latency_s > 0.1 * given.transfer_s(expected // 8, 2)


def test_a_group_of_one_transfers_nothing_and_has_the_largest_buckets():
    assert figures().transfer_s(MIB, 1) == 0.0
    assert figures(latency_s=0.0).bucket_bytes(1) == LARGEST_BUCKET_BYTES


def test_what_is_shown_can_be_given_back():
    shown = str(figures(overlaps=False))
    assert of(shown) == figures(overlaps=False)


def test_arithmetic_in_float32_has_a_figure_of_its_own():
    assert figures(flops_per_s=8e12).flops_per_s_in(torch.float32) == 8e12
    both = figures(flops_per_s=8e12, float32_flops_per_s=1e12)
    assert both.flops_per_s_in(torch.float32) == both.flops_per_s_in(torch.float64) == 1e12
    assert both.flops_per_s_in(torch.bfloat16) == 8e12
    assert of(str(both)) == both


def test_figures_are_read_from_a_file(tmp_path):
    given = tmp_path / "hardware.json"
    given.write_text(json.dumps({"latency_s": 1e-3, "bytes_per_s": 1e9}))
    assert of(str(given)) == Hardware(1e-3, 1e9)
    for text, words in {"[1]": "holds no figures", "{": "cannot be read", "{}": "missing"}.items():
        given.write_text(text)
        with pytest.raises(ValueError, match=words):
            of(str(given))
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        of(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "value, words",
    (
        ("true", "latency_s is a positive number or 0, not True"),
        ("1" + "0" * 400, "latency_s is a positive number or 0, not 1000"),
        ('"soon"', "latency_s is a positive number or 0, not 'soon'"),
        ('1, "latency_s": 2', "latency_s is given twice"),
        ("[" * 10**5, "cannot be read as JSON"),
    ),
    ids=lambda text: text[:20],
)
def test_a_file_with_what_is_no_figure_is_refused(tmp_path, value, words):
    given = tmp_path / "hardware.json"
    given.write_text(f'{{"latency_s": {value}, "bytes_per_s": 1e9}}')
    with pytest.raises(ValueError, match=words):
        of(str(given))


def test_a_file_may_say_what_nobody_knows_and_be_any_systems(tmp_path):
    given = tmp_path / "first contact.JSON"
    figures = {"latency_s": 0, "bytes_per_s": 1e9, "float32_flops_per_s": None, "overlaps": False}
    given.write_text(json.dumps(figures), encoding="utf-8-sig")
    for path in (given, f" {given}"):
        assert resolve({"hardware": path}, {}).hardware == Hardware(0, 1e9, overlaps=False)


# What the ranks agree on.


def test_the_slowest_at_each_thing_counts_rounded():
    ranks = [
        figures(bytes_per_s=1e9, latency_s=9e-5, flops_per_s=3e10),
        figures(bytes_per_s=3e9, latency_s=3e-4, flops_per_s=5e10, overlaps=False),
    ]
    agreed = measure.slowest(ranks)
    assert agreed.bytes_per_s == 2.0**30 and agreed.flops_per_s == 2.0**35
    assert agreed.latency_s == 2.0**-12 and not agreed.overlaps


@pytest.mark.parametrize("noise", first(2, [0.8, 0.95, 1.05, 1.25]))
def test_a_little_noise_changes_nothing(noise):
    quiet = figures(latency_s=2.0**-12, bytes_per_s=2.0**30, flops_per_s=2.0**36)
    noisy = {name: getattr(quiet, name) * noise for name in ("latency_s", "bytes_per_s")}
    noisy |= {"memory_bytes_per_s": 2.0**33 * noise, "flops_per_s": quiet.flops_per_s * noise}
    quiet = figures(**{**dataclasses.asdict(quiet), "memory_bytes_per_s": 2.0**33})
    assert measure.slowest([figures(**noisy)]) == measure.slowest([quiet])


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def other_step(model, optimizer, x):
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(function=step, calls: int = 1, **options):
    """Compile and call; the compiled function, its one program and its communicator."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = set(backend.zero.functions)
    compiled = torch.compile(function, backend="zero", options={"lowering": "eager", **options})
    for _ in range(calls):
        compiled(model, optimizer, torch.ones(2, 8))
    (made,) = [f for f in backend.zero.functions if f not in known]
    (program,) = made.programs
    return compiled, program, made.communicator


def measure_with_a_slow_rank() -> tuple[Hardware, Hardware, int, dict]:
    """The figures of two functions' programs, how often this rank measured, bytes it sent."""
    measure._known.clear()
    own, calls = measure.own_figures, []

    def slow_on_rank_1(probe, device):
        seen = own(probe, device)
        calls.append(seen)
        if probe.rank == 0:
            return figures(overlaps=seen.overlaps, flops_per_s=2.0**36)
        return figures(overlaps=seen.overlaps, latency_s=2e-3, bytes_per_s=2e8, flops_per_s=1e11)

    communicator = Communicator.of(None)
    traffic_of(communicator).reset()
    with (
        mock.patch.dict(os.environ, MEASURING),
        mock.patch.object(measure, "own_figures", slow_on_rank_1),
    ):
        first = train()[1].figures
        sent = traffic_of(communicator).snapshot()["sent_bytes"]
        second = train(other_step)[1].figures
    return first, second, len(calls), sent


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("ranks_of", first(1, ("ranks", "ranks_on_sockets")))
def test_ranks_plan_with_the_figures_of_the_slow_one_measured_once(ranks_of, request):
    two = request.getfixturevalue(ranks_of)(2)
    (here, later, times, sent), (there, *_, sent_there) = two.run(measure_with_a_slow_rank)
    assert here == there == later and times == 1
    assert (here.latency_s, here.bytes_per_s) == (2.0**-9, 2.0**28)
    assert here.flops_per_s == 2.0**36, "the one that computes slowly"
    assert here.source == "measured, the slowest of 2 ranks"
    assert sent == sent_there, "a step's traffic, and no measurement's"
    assert sent["gather"] < 3 * 4 * 2 * 80


def measure_what_is_there() -> tuple[Hardware, bool]:
    measure._known.clear()
    with mock.patch.dict(os.environ, MEASURING):
        _, program, communicator = train()
    return program.figures, communicator.overlaps(torch.ones(1))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks_of", ("ranks", "ranks_on_sockets"))
def test_reads_of_a_neighbours_memory_do_not_overlap(ranks_of, request):
    for measured, overlaps in request.getfixturevalue(ranks_of)(2).run(measure_what_is_there):
        assert measured.overlaps == overlaps == (ranks_of == "ranks_on_sockets")
        assert 0 < measured.latency_s < 1 and measured.bytes_per_s > 1e5
        assert measured.flops_per_s > 1e7 and measured.memory_bytes_per_s > 1e6


def test_a_world_of_one_measures_nothing(monkeypatch):
    monkeypatch.setenv("ZEROFX_HARDWARE", "")
    with mock.patch.object(measure, "own_figures", side_effect=AssertionError("measured")):
        assert train()[1].figures == NOMINAL


def test_a_group_that_only_pretends_to_communicate_measures_nothing():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    try:
        with mock.patch.object(measure, "own_figures", side_effect=AssertionError("measured")):
            communicator = Communicator(dist.group.WORLD)
            assert measure.measured(communicator, torch.device("cpu"), "", 0.1) is None
    finally:
        dist.destroy_process_group()


GIVEN = "latency_s=0.001 bytes_per_s=5e+07 overlaps=0"


def explained(folder: str) -> str:
    measure._known.clear()
    with (
        mock.patch.object(measure, "own_figures", side_effect=AssertionError("measured")),
        mock.patch.dict(os.environ, {"ZEROFX_HARDWARE": GIVEN, "ZEROFX_DUMP": folder}),
    ):
        compiled, _, _ = train()
        return zerofx.explain(compiled)


def test_given_figures_are_taken_and_shown(ranks, tmp_path):  # noqa: F811
    for text in ranks(2).run(explained, str(tmp_path)):
        assert f"{GIVEN} flops_per_s=1e+14 memory_bytes_per_s=1e+12 (given)" in text
        assert "of transfers," in text and "1.00 MiB" in text
    for rank in (0, 1):
        (folder,) = (tmp_path / f"rank{rank}").iterdir()
        programs = sorted(folder.glob("*.py"))
        assert len(programs) > 5
        for program in programs:
            header = program.read_text().partition("\n\n")[0].splitlines()
            assert any(line.startswith(f"# hardware: {GIVEN}") for line in header)
        assert "predicted: " in (folder / "summary.txt").read_text()


# Ranks that do not measure together.


def one_is_given_figures(text: str) -> tuple[str, str]:
    measure._known.clear()
    torch._dynamo.reset()
    measures = dist.get_rank() == 0
    own_timeout = backend.AGREEMENT_TIMEOUT_S
    # Only the rank that measures gives up: the other hears of it.
    backend.AGREEMENT_TIMEOUT_S = 2.0 if measures else 120.0
    try:
        with mock.patch.dict(os.environ, MEASURING if measures else {}):
            train()
    except (RuntimeError, AgreementError) as error:
        return type(error).__name__, str(error)
    finally:
        backend.AGREEMENT_TIMEOUT_S = own_timeout
    return "", "trained"


@pytest.mark.slow(reason="ranks compile and train")
def test_a_rank_that_measures_alone_says_so():
    fresh = Ranks(2)
    try:
        (own_kind, waited), (kind, told) = fresh.run(one_is_given_figures, "")
    finally:
        fresh.kill()
    assert "is collective: call it on all ranks; rank(s) [1] did not join within 2 s" in waited
    assert "unless all are given its figures" in waited
    assert own_kind == kind == "AgreementError"
    assert "rank 0 could not compile" in told and "did not join within 2 s" in told
