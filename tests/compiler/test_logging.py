"""What a step says while it compiles: nothing, or a line if asked, or a bar on a terminal."""

import io
import logging
import operator
import re
import sys

import pytest
import torch
from torch import fx, nn

from tests.kit.covering import first
from zerofx.compiler import progress as bars
from zerofx.lower.regions import CompiledRegion


def train(batches=((2, 4),), **options):
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(
        step, backend="zero", dynamic=False, options={"lowering": "eager", **options}
    )
    for shape in batches:
        compiled(torch.ones(shape))


def lines(caplog, level):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "zerofx" and record.levelno == level
    ]


def test_a_step_says_nothing_unless_it_is_asked(capfd):
    train()
    assert capfd.readouterr() == ("", "")


def test_the_first_compilation_of_a_function_is_one_line(caplog):
    with caplog.at_level(logging.DEBUG, logger="zerofx"):
        train(batches=((2, 4), (2, 4), (3, 4)))
    (line,) = lines(caplog, logging.INFO)
    assert re.fullmatch(
        r"step\d+: stage 3 on 1 rank\(s\), this is 0; of 2 parameters, 80 B, a rank keeps 80 B; a "
        r"step allocates \d+ B at most, \d+ B as captured; 2 collectives; normalize, "
        r"chunk_loss, recompute, .*prefetch, reduce_unflattened",
        line,
    ), line
    (retraced,) = [line for line in lines(caplog, logging.DEBUG) if line.startswith("step")]
    assert retraced.split(";")[:2] == line.split(";")[:2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def program(monkeypatch):
    """A program of two regions, equal to nothing compiled, whose bar needs no long compilation."""
    monkeypatch.setattr(bars, "DELAY_S", 0.0)
    monkeypatch.setattr(CompiledRegion, "_known", {})
    monkeypatch.setattr(
        "zerofx.compat.inductor.compile_with_inductor", lambda gm, inputs, donated: gm.forward
    )
    regions = []
    for function in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
        graph = fx.Graph()
        value = graph.call_function(operator.getitem, (graph.placeholder("values"), 0))
        value.meta["val"] = torch.ones(1)
        graph.output((graph.call_function(function, (value,)),))
        regions.append(CompiledRegion(fx.GraphModule({}, graph), []))
    return nn.Sequential(*regions)


@pytest.mark.parametrize(("rank", "terminal"), first(1, ((0, True), (1, True), (0, False))))
def test_a_terminal_shows_how_many_regions_are_compiled_on_rank_0(
    rank, terminal, program, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", stream := Terminal() if terminal else io.StringIO())
    bars.compile_with_bar(program, "step0", rank)
    if rank == 0 and terminal:
        assert "zerofx compiles step0" in stream.getvalue() and "/2 " in stream.getvalue()
    else:
        assert stream.getvalue() == ""
    assert all(len(region.compiled) == 1 for region in program)


def test_a_bar_is_gone_after_a_compilation_that_ends_early_and_after_what_is_quick(
    program, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("zerofx.compat.inductor.compile_with_inductor", interrupted)
        bars.compile_with_bar(program, "step0", 0)
    assert "zerofx compiles step0" in stream.getvalue()
    assert stream.getvalue().rsplit("\r", 1)[-1].strip() == ""
    monkeypatch.setattr(bars, "DELAY_S", 1000.0)
    monkeypatch.setattr(sys, "stderr", quick := Terminal())
    bars.compile_with_bar(program, "step0", 0)
    assert "zerofx" not in quick.getvalue()


@pytest.mark.nightly
def test_without_tqdm_there_is_no_bar(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    bars.compile_with_bar(program, "step0", 0)
    assert stream.getvalue() == "" and all(region.compiled for region in program)
