"""A step that compiles says nothing, or a line in the log or on a terminal."""

import io
import logging
import operator
import re
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from tests.kit.small_regions import every_region_is_compiled  # noqa: F401
from zerofx.compiler import progress
from zerofx.compiler.progress import CLEAR_LINE
from zerofx.lower.regions import CompiledRegion

pytestmark = pytest.mark.usefixtures("every_region_is_compiled")


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
    """A terminal that shows one line."""

    def isatty(self):
        return True

    @property
    def line(self):
        """Return what can be read there now."""
        return self.getvalue().rpartition(CLEAR_LINE)[2]

    @property
    def lines(self):
        return self.getvalue().split(CLEAR_LINE)


@pytest.fixture
def terminal(monkeypatch):
    """One on which a call need not take long to be shown."""
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(progress, "PERIOD_S", 0.01)
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def program(monkeypatch):
    """A program of two regions, equal to nothing compiled."""
    monkeypatch.setattr(CompiledRegion, "_known", {})
    regions = []
    for function in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
        graph = fx.Graph()
        value = graph.call_function(operator.getitem, (graph.placeholder("values"), 0))
        value.meta["val"] = torch.ones(1)
        graph.output((graph.call_function(function, (value,)),))
        regions.append(CompiledRegion(fx.GraphModule({}, graph), []))
    return nn.Sequential(*regions)


def compiling(monkeypatch, does):
    def compile_region(gm, inputs, donated):
        does()
        return gm.forward

    monkeypatch.setattr("zerofx.compat.inductor.compile_with_inductor", compile_region)


def wait_for(text, terminal):
    """Wait until a terminal shows a text."""
    until = time.monotonic() + 30
    while text not in terminal.line:
        assert time.monotonic() < until, terminal.lines[-3:]
        time.sleep(0.001)


def test_a_terminal_shows_what_a_call_is_doing_and_how_many_regions_are_compiled(
    terminal, program, monkeypatch
):
    call = progress.FirstCall(time.perf_counter())
    call.show()
    wait_for("zerofx compiles a step: Dynamo 0 s", terminal)
    call.name = "step0"
    with call.part("AOTAutograd"):
        wait_for("zerofx compiles step0: AOTAutograd 0 s (Dynamo 0)", terminal)
        with call.part("passes"):
            wait_for("step0: passes 0 s (Dynamo 0, AOTAutograd 0)", terminal)
        wait_for("step0: AOTAutograd 0 s (Dynamo 0, passes 0)", terminal)
    ready = iter(("(0 of 2)", "(1 of 2)"))
    compiling(monkeypatch, lambda: wait_for(f"compiling regions {next(ready)} 0 s", terminal))
    call.compile_regions(program)
    assert all(len(region.compiled) == 1 for region in program)
    with call.part("running"):
        wait_for("step0: running 0 s (Dynamo 0, ", terminal)
    call.end()
    assert terminal.line == ""


def test_a_step_shows_its_first_call_and_leaves_nothing_on_the_terminal(terminal):
    train(batches=((2, 4), (2, 4)))
    shown = "".join(terminal.lines)
    assert "zerofx compiles a step: Dynamo" in shown and "zerofx compiles step" in shown
    assert terminal.line == "" and not any(
        thread.name.startswith("zerofx compiles") for thread in threading.enumerate()
    )


def test_the_line_is_gone_after_a_compilation_that_ends_early(terminal, program, monkeypatch):
    def interrupted():
        wait_for("compiling regions (0 of 2)", terminal)
        raise KeyboardInterrupt

    compiling(monkeypatch, interrupted)
    call = progress.FirstCall(time.perf_counter())
    call.show()
    with pytest.raises(KeyboardInterrupt):
        call.compile_regions(program)
    call.end()
    assert terminal.line == "" and "(0 of 2)" in "".join(terminal.lines)


class Silent:
    """Takes what is written, and has no word on what it is: as some notebooks' do."""

    def write(self, text):
        return len(text)


class Gone(Terminal):
    def write(self, text):
        raise BrokenPipeError


def closed():
    stream = Terminal()
    stream.close()
    return stream


class ClosedLater(Terminal):
    """Is closed while the line is written."""

    def write(self, text):
        self.close()
        return super().write(text)


@pytest.mark.parametrize("stream", (None, Silent(), closed(), Gone(), ClosedLater()))
def test_what_is_no_terminal_stops_no_training(stream, terminal, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))
    call = progress.FirstCall(time.perf_counter())
    call.show()
    with call.part("passes"):
        time.sleep(0.02)
    call.end()
    assert not raised


def test_a_line_that_is_written_while_a_part_begins_has_its_seconds():
    call, read = progress.FirstCall(time.perf_counter()), []

    class UnderWay(list):
        def append(self, name):
            super().append(name)
            read.append(call._words())

    call._under_way = UnderWay(call._under_way)
    with call.part("passes"):
        pass
    assert read == ["zerofx compiles a step: passes 0 s (Dynamo 0)"]


@pytest.mark.parametrize("why", ("another rank", "no terminal", "it is quick"))
def test_nothing_is_shown(why, terminal, monkeypatch):
    if why == "another rank":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
    elif why == "no terminal":
        monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    else:
        monkeypatch.setattr(progress, "DELAY_S", 1000.0)
    call = progress.FirstCall(time.perf_counter())
    call.show()
    with call.part("passes"):
        time.sleep(0.05)
    call.end()
    assert terminal.getvalue() == ""
