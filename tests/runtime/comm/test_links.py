"""The links of a mesh's axes differ: each is measured, agreed on and shown by itself."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.slow_link import slow_between_nodes
from zerofx import backend
from zerofx.hardware import Hardware, Link, of, with_links
from zerofx.runtime.comm import measure
from zerofx.runtime.comm.communication import Communicator

AXES = ("node", "gpu")
MEASURING = {"ZEROFX_HARDWARE": ""}
NODE = {"latency_s": 1e-3, "bytes_per_s": 1e8}
GPU = {"latency_s": 1e-5, "bytes_per_s": 1e10, "overlaps": False}


def train(mesh, stage, **options) -> tuple[str, Hardware, list[float]]:
    """Compile a step and call it; what ``explain`` says, the figures, the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    known = set(backend.zero.functions)
    options = {"lowering": "eager", "process_group": mesh, "stage": stage, **options}
    compiled = torch.compile(step, backend="zero", options=options)
    losses = [compiled(torch.ones(2, 8) * (1 + dist.get_rank())).item() for _ in range(2)]
    (made,) = [f for f in backend.zero.functions if f not in known]
    return zerofx.explain(compiled), made.programs[0].figures, losses


# Given


def test_figures_by_axis_are_text_that_can_be_given_back():
    given = of({"node": NODE, "gpu": GPU, "flops_per_s": 1e12})
    links = {"node": Link(1e-3, 1e8), "gpu": Link(1e-5, 1e10, False)}
    assert given == with_links(links, flops_per_s=1e12)
    assert of(str(given)) == given
    assert str(given) == (
        "node.latency_s=0.001 node.bytes_per_s=1e+08 node.overlaps=1 gpu.latency_s=1e-05 "
        "gpu.bytes_per_s=1e+10 gpu.overlaps=0 flops_per_s=1e+12 memory_bytes_per_s=1e+12"
    )


def test_what_goes_along_several_axes_goes_at_the_pace_of_the_slowest():
    given = of({"node": {**NODE, "latency_s": 1e-6}, "gpu": GPU})
    slowest = Link(1e-5, 1e8, overlaps=False)
    assert given.along("node,gpu") == given.along("data") == slowest
    assert given.along("gpu") == Link(**GPU) and given.along("node") == Link(1e-6, 1e8)
    assert given.on_one_axis(["gpu"]) == Hardware(**GPU)
    assert given.on_one_axis(AXES) == Hardware(1e-5, 1e8, False)


def test_one_link_is_that_of_every_axis():
    given = of("latency_s=1e-4 bytes_per_s=1e9")
    assert given.along("node") is given.along("data") is given


def test_overlap_given_once_is_that_of_each_axis_which_has_none():
    text = "node.latency_s=0 node.bytes_per_s=1 gpu.latency_s=0 gpu.bytes_per_s=1 overlaps=0"
    assert not any(link.overlaps for link in of(text).links.values())
    assert of(f"{text} node.overlaps=1").along("node").overlaps


# Measured


def figures_of_four(stage, latency_s: float, bytes_per_s: float):
    """The figures on a mesh whose outer link is slow, as they are and as ranks see them."""
    measure._known.clear()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    with (
        mock.patch.dict(os.environ, MEASURING),
        slow_between_nodes(mesh, latency_s, bytes_per_s),
    ):
        return train(mesh, stage)[:2]


SLOW = 0.02, 2e6


@pytest.mark.nightly
def test_each_axis_is_measured_and_the_slow_one_found(ranks):
    results = ranks(4).run(figures_of_four, {"gpu": 3, "node": 0}, *SLOW)
    text, figures = results[0]
    assert all(other == figures for _, other in results)
    node, gpu = figures.along("node"), figures.along("gpu")
    assert 2.0**-6 <= node.latency_s <= 2.0**-4, "20 ms and what gloo takes"
    assert 2.0**20 <= node.bytes_per_s <= 2.0**21, "2 MB/s"
    assert gpu.latency_s < node.latency_s and gpu.bytes_per_s > node.bytes_per_s
    assert figures.source == "measured, the slowest of 4 ranks"
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert {f"link along node {node}", f"link along gpu {gpu}"} <= rows
    assert f"compute {figures.of_ranks} ({figures.source})" in rows


def slow_on_one_rank():
    """Figures where the last rank alone has a slow link inside its node, and how often measured."""
    measure._known.clear()
    own, calls = measure.own_link, []

    def seen(probe, device):
        found = own(probe, device)
        calls.append(probe)
        ranks = dist.get_process_group_ranks(probe.group)
        is_slow = ranks == [2, 3] and dist.get_rank() == 3
        return Link(2e-3, 2e8, found.overlaps) if is_slow else Link(1e-3, 1e9, found.overlaps)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    with (
        mock.patch.dict(os.environ, MEASURING),
        mock.patch.object(measure, "own_link", seen),
    ):
        first = train(mesh, {"gpu": 2, "node": 2})[1]
        return first, train(mesh, {"gpu": 3, "node": 0})[1], len(calls)


@pytest.mark.nightly
def test_all_nodes_plan_with_the_slowest_rank_of_any(ranks):
    for first, later, times in ranks(4).run(slow_on_one_rank):
        assert first == later and times == 2, "once along each axis"
        assert first.along("gpu") == Link(2.0**-9, 2.0**28, first.along("gpu").overlaps)
        assert first.along("node").latency_s == 2.0**-10


def given_on_a_mesh(folder: str):
    text = str(of({"node": NODE, "gpu": GPU}))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    with (
        mock.patch.object(measure, "own_link", side_effect=AssertionError("measured")),
        mock.patch.dict(os.environ, {"ZEROFX_HARDWARE": text, "ZEROFX_DUMP": folder}),
    ):
        explained, figures, _ = train(mesh, {"gpu": 3, "node": 3})
        flat = train(mesh, 0)[1]
    return explained, figures, flat


@pytest.mark.nightly
def test_given_figures_are_taken_and_shown_by_axis(ranks, tmp_path):
    expected = of({"node": NODE, "gpu": GPU})
    for explained, figures, flat in ranks(4).run(given_on_a_mesh, str(tmp_path)):
        assert figures == expected
        for link in expected.links.values():
            assert str(link) in explained
        assert "outer link" in explained
        assert flat == Hardware(1e-3, 1e8, overlaps=False), "stage 0 goes along both at once"
    header = f"# hardware: {expected} (given)"
    programs = list((tmp_path / "rank0").glob("*/*_prefetch.py"))
    assert any(header in path.read_text() for path in programs)


def figures_of_two(shape, hardware: str, stage):
    measure._known.clear()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    with mock.patch.dict(os.environ, {"ZEROFX_HARDWARE": hardware}):
        return train(mesh, stage)[1]


@pytest.mark.nightly
def test_in_one_node_the_figures_are_those_of_its_ranks(ranks):
    given = str(of({"node": NODE, "gpu": GPU}))
    for figures in ranks(2).run(figures_of_two, (1, 2), given, {"gpu": 3, "node": 0}):
        assert figures == Hardware(**GPU)


def test_an_axis_of_one_rank_counts_as_the_other(ranks):
    for figures in ranks(2).run(figures_of_two, (2, 1), "", {"gpu": 1, "node": 0}):
        assert figures.along("gpu") == figures.along("node")
        assert list(figures.links) == list(AXES), "so that they can be given back"
        assert figures.source == "measured, the slowest of 2 ranks"


# The slow link of the tests


def send_over_a_slow_link(latency_s: float, bytes_per_s: float):
    """Seconds of one gather over the slow link, of three in flight, of one inside the node."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    shard = torch.ones(50_000)

    def took(axis: str, number: int) -> float:
        along = communicator.along(axis)
        dist.barrier()
        started_s = time.perf_counter()
        started = [along.all_gather_start(shard, 2) for _ in range(number)]
        for one in started:
            assert torch.equal(along.wait(one), torch.ones(100_000))
        return time.perf_counter() - started_s

    with slow_between_nodes(mesh, latency_s, bytes_per_s) as link:
        communicator = Communicator.of(mesh, False)
        took("node", 1), took("gpu", 1)  # connect
        sent = link.sent_bytes
        seconds = took("node", 1), took("node", 3), min(took("gpu", 1) for _ in range(3))
        return *seconds, link.sent_bytes - sent


def test_what_is_in_flight_shares_the_slow_link(ranks):
    latency_s, bytes_per_s = 0.05, 2e6  # 0.1 s for 200 kB
    for one, three, inside, sent in ranks(4).run(send_over_a_slow_link, latency_s, bytes_per_s):
        assert 0.15 <= one < three and 0.35 <= three
        assert inside < 0.1, "which gloo alone takes a few milliseconds for"
        assert sent == 4 * 200_000
