"""Ranks of one machine divide among themselves what they compile; what fails runs uncompiled."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from multiprocessing import connection
from unittest import mock

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.models import squared_loss
from tests.kit.ranks import ranks_fixture, start  # noqa: F401
from zerofx import compat
from zerofx.compat.compile_cache import LOCKS, turn_to_compile
from zerofx.lower.regions import CompiledRegion


def hold(folder: str, held: connection.Connection) -> None:
    """Have a program's turn in a process of its own, until that is killed."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    with turn_to_compile("a program"):
        held.send("held")
        time.sleep(600)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("ranks")  # so that what processes are forked from is there
def test_a_program_is_compiled_by_one_process_until_that_has_ended(cache):
    context = multiprocessing.get_context("forkserver")
    held, says = context.Pipe()
    holder = context.Process(target=hold, args=(str(cache), says), daemon=True)
    start(holder, 0)
    says.close()  # or nobody would hear that it has ended
    assert held.recv() == "held"
    with turn_to_compile("a program", waits=False) as is_mine:
        assert not is_mine
    with turn_to_compile("another program", waits=False) as is_mine:
        assert is_mine
    holder.kill()
    with turn_to_compile("a program") as is_mine:
        assert is_mine
    holder.join()
    assert [path.name for path in cache.glob("zerofx*")] == [LOCKS]


def tries(folder: str, says: connection.Connection) -> None:
    """Say of each name that comes whether it is free, in a process of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    while name := says.recv():
        with turn_to_compile(name, waits=False) as is_mine:
            pass
        says.send(is_mine)


@pytest.mark.usefixtures("ranks")
def test_a_process_has_several_turns_and_ends_each_for_itself(cache):
    context = multiprocessing.get_context("forkserver")
    other, says = context.Pipe()
    process = context.Process(target=tries, args=(str(cache), says), daemon=True)
    start(process, 0)

    def is_free(name):
        other.send(name)
        return other.recv()

    with turn_to_compile("first"):
        with turn_to_compile("second"):
            assert not is_free("first") and not is_free("second")
            assert is_free("third")
            with turn_to_compile("third", waits=False) as is_mine:
                assert is_mine
        assert not is_free("first") and is_free("second")
    assert is_free("first")
    (cache / LOCKS).unlink()  # as whoever deletes the folder does
    with turn_to_compile("first") as is_mine:
        assert is_mine and not is_free("first")
    other.send("")
    process.join()


def test_nobody_waits_where_inductor_keeps_nothing(cache):
    with torch._inductor.config.patch(fx_graph_cache=False), turn_to_compile("x") as is_mine:
        assert is_mine
    assert not (cache / LOCKS).exists()


def test_a_folder_without_locks_lets_everyone_compile(cache):
    (cache / LOCKS).mkdir()
    with turn_to_compile("a program", waits=False) as is_mine:
        assert is_mine


class Mixed(nn.Module):
    """Layers that are equal, and some that are not."""

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(12, 24), *layers, nn.Linear(24, 5))

    def forward(self, x):
        return self.layers(x)


def trained(losses_of, options):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = losses_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = step if options is None else torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 12, generator=generator), torch.randn(4, 5, generator=generator))
        for _ in range(3)
    ]
    return torch.stack([compiled(*batch).detach() for batch in batches])


def compile_in(folder: str, stage: int) -> tuple[int, int, list[float]]:
    """Train with an empty cache; return what this rank generated code for, and what it needed."""
    pick_vec_isa()  # which an empty folder would have tried anew
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.distributed.barrier()
    counters.clear()
    try:
        with mock.patch.object(CompiledRegion, "_known", {}):
            losses = trained(squared_loss, {"stage": stage, "lowering": "inductor"})
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    found = counters["inductor"]
    assert not found["fxgraph_cache_bypass"]
    missed, hit = found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]
    return missed, missed + hit, losses.tolist()


@pytest.mark.nightly
@pytest.mark.parametrize(("num_ranks", "stage", "least"), ((2, 1, 2), (4, 3, 5)))
def test_every_region_and_kernel_is_compiled_once_in_all(num_ranks, stage, least, ranks, tmp_path):  # noqa: F811
    found = ranks(num_ranks).run(compile_in, str(tmp_path / "cache"), stage, timeout_s=300.0)
    missed, needed, losses = zip(*found, strict=True)
    assert len(set(needed)) == 1 and needed[0] >= least, found
    assert sum(missed) == needed[0], found
    expected = trained(squared_loss, None)
    for its in losses:
        torch.testing.assert_close(torch.tensor(its), expected, rtol=1e-4, atol=1e-6)


def failing(gm, *arguments):
    raise RuntimeError("the C++ compiler is gone\nand more")


@pytest.mark.slow(reason="trains twice")
def test_a_region_that_cannot_be_compiled_runs_operator_by_operator(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compat.inductor, "compile_with_inductor", failing)
    monkeypatch.setattr(CompiledRegion, "_known", {})
    options = {"lowering": "inductor", "dump": str(tmp_path)}
    with caplog.at_level(logging.WARNING, "zerofx"):
        losses = trained(squared_loss, options)
    assert losses.tolist() == trained(squared_loss, None).tolist()
    said = [record.getMessage() for record in caplog.records if "cannot compile" in record.message]
    assert len(said) == sum(map(len, CompiledRegion._known.values())) > 2, "each once, in 3 steps"
    assert "operator by operator" in said[0] and "the C++ compiler is gone" in said[0]
    errors = list(tmp_path.glob("**/region_*_error.txt"))
    assert 2 < len(errors) <= len(said), "each once, though layers are equal"
    assert all("and more" in path.read_text() for path in errors)
