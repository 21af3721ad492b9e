"""``start=at_once``: steps run operator by operator until a process has compiled what they need."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import shutil
import sys
import types
from unittest import mock

import pytest
import torch
import torch._inductor.config
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.models import features, squared_loss
from tests.kit.programs import capture, rewritten
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.small_regions import every_region_is_compiled  # noqa: F401
from tests.kit.step_forms.form import step_with
from tests.kit.trainings import Tower, clipped, program_of
from zerofx import backend, compat
from zerofx.errors import StepError
from zerofx.lower import at_once
from zerofx.lower.at_once import AtOnce, Record
from zerofx.lower.compile_process import NICE, CompileProcess
from zerofx.lower.regions import CompiledRegion, _Compiled
from zerofx.runtime.comm.agreement import AgreementError

pytestmark = pytest.mark.usefixtures("every_region_is_compiled")

aten = torch.ops.aten


def body(is_alike=False):
    graph = fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    if is_alike:
        compat.inductor.mark_alike(values)
    x = graph.call_function(operator.getitem, (values, 0))
    x.meta["val"] = torch.empty(4)
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    return fx.GraphModule({}, graph)


class Process:
    """Compiles what a test says."""

    has_ended = False

    def __init__(self):
        self.given, self.done, self.is_closed = [], set(), False

    def compile(self, works):
        self.given += [work.text for work in works]

    def is_done(self, text):
        return text in self.done

    def wait(self, text):
        self.done.add(text)

    def close(self):
        self.is_closed = True


def uncompiled(region, values):
    return _Compiled(region.run_operators, lambda values: True)


@pytest.fixture
def process(monkeypatch):
    """The one process of all ranks of a test."""
    one = Process()
    monkeypatch.setattr(at_once, "CompileProcess", lambda: one)
    monkeypatch.setattr(CompiledRegion, "_known", {})
    monkeypatch.setattr(CompiledRegion, "_compile", uncompiled)
    monkeypatch.setattr(AtOnce, "_most", lambda self: 9)
    return one


def program(*sizes, is_alike=False):
    """A program of one region for each size."""
    root = nn.Module()
    for number, size in enumerate(sizes):
        gm = body(is_alike)
        list(gm.graph.nodes)[1].meta["val"] = torch.empty(size)
        root.add_module(f"region_{number}", CompiledRegion(gm, ()))
    return root


class Ranks:
    """Two ranks that begin each step together."""

    def __init__(self, *records):
        self.theirs = b""
        self.programs = [program(4, 8), program(4, 9)]
        self.ranks = [AtOnce("step", self.exchange, record) for record in records or (None, None)]
        for rank, one in zip(self.ranks, self.programs, strict=True):
            rank.add(one)

    def exchange(self, value):
        return [value, self.theirs or value]

    def step(self):
        """One step of both: each sees what the other says."""
        said = []
        for rank in self.ranks:
            ready = {name: rank._is_ready(name, None) for name in rank._units}
            replays = rank.record is not None and rank.record.is_replayed
            said.append(json.dumps([replays, rank._most(), ready]).encode())
        for rank, theirs in zip(self.ranks, reversed(said), strict=True):
            self.theirs = theirs
            with rank.running():
                pass

    def waiting(self):
        return [[one.waits for one in of.children()] for of in self.programs]


def test_ranks_take_over_in_the_same_step(process):
    both = Ranks()
    first, second, others = (
        one.text for one in (*both.programs[0].children(), list(both.programs[1].children())[1])
    )
    both.step()
    process.done.add(first)
    both.step()
    assert both.waiting() == [[False, True], [False, True]]
    process.done.add(second)  # and not the other rank's
    both.step()
    assert both.waiting() == [[False, True], [False, True]] and not process.is_closed
    process.done.add(others)
    both.step()
    assert both.waiting() == [[False, False], [False, False]] and process.is_closed
    assert [rank.taken for rank in both.ranks] == [{"region_0": 2, "region_1": 4}] * 2
    assert all(rank.is_over for rank in both.ranks)


def test_a_step_takes_over_no_more_than_the_rank_with_least_time_for_it(process, monkeypatch):
    both = Ranks()
    both.step()
    process.done.update(one.text for of in both.programs for one in of.children())
    monkeypatch.setattr(AtOnce, "_most", lambda self: 1 + both.ranks.index(self))
    both.step()
    assert both.waiting() == [[False, True], [False, True]]
    both.step()
    assert both.waiting() == [[False, False], [False, False]]
    assert [rank.taken for rank in both.ranks] == [{"region_0": 2, "region_1": 3}] * 2


def test_a_step_takes_over_what_takes_no_longer_than_the_last_one():
    rank = AtOnce("step", lambda value: [value])
    assert rank._most() == 1, "nothing has been measured"
    rank._took_s, rank._takes_s = 1.0, 0.3
    assert rank._most() == 3


def test_equal_regions_are_taken_over_together(process):
    rank, of = AtOnce("step", lambda value: [value]), program(4, 8, 4)
    rank.add(of)
    assert list(rank._units) == ["region_0", "region_1"]
    with rank.running():
        assert [one.waits for one in of.children()] == [True] * 3
    process.done.update(text for unit in rank._units.values() for text in unit.texts)
    with rank.running():
        assert [one.waits for one in of.children()] == [False] * 3
    assert rank.taken == {"region_0": 2, "region_1": 2}


def test_regions_that_ranks_have_alike_are_taken_over_together_whatever_their_shapes(process):
    """One of the next program has the shapes of another batch: other ranks run the first one."""
    rank = AtOnce("step", lambda value: [value])
    first, later = program(4, 8, is_alike=True), program(9, is_alike=True)
    rank.add(first)
    regions = [*first.children(), *later.children()]
    waiting = []
    for one in regions:
        if one is regions[2]:
            rank.join(later)
        with rank.running():
            waiting.append([each.waits for each in regions])
        process.done.add(one.text)
    assert waiting == [[True, True, False]] * 2 + [[True] * 3]
    with rank.running():
        assert [each.waits for each in regions] == [False] * 3
    assert rank.taken == {at_once.ALIKE: 4} and len(process.given) == 3


def test_a_region_that_ranks_have_alike_waits_for_those_that_have_not_compiled_it(process):
    rank, of = AtOnce("step", lambda value: [value]), program(4, is_alike=True)
    with mock.patch.object(CompiledRegion, "is_to_compile", new=False):  # in an earlier function
        rank.add(of)
    assert [one.waits for one in of.children()] == [True] and list(rank._units) == [at_once.ALIKE]


def test_a_rank_takes_over_alone_what_only_its_later_program_has(process):
    """The other rank is not in that program, and takes no part."""
    both, later = Ranks(), program(4, 7, 7)
    for _ in range(3):
        both.step()
    rank = both.ranks[0]
    rank.join(later)
    regions = list(later.children())
    process.done.update(one.text for of in both.programs for one in of.children())
    both.step()
    assert all(each.is_over for each in both.ranks) and rank._process is process
    assert [one.waits for one in regions] == [False, True, True]
    process.done.add(regions[1].text)
    rank.exchange = None
    with rank.running():
        assert [one.waits for one in regions] == [False] * 3
    assert rank._process is None and list(rank.taken) == ["region_0", "region_1"]


def test_a_later_program_starts_another_process(process):
    rank, later = AtOnce("step", lambda value: [value]), program(7)
    for _ in range(3):
        with rank.running():
            pass
    assert rank.is_over
    rank.join(later)
    (region,) = later.children()
    with rank.running():
        assert region.waits
    process.done.add(region.text)
    with rank.running():
        assert not region.waits
    assert process.given == [region.text] and process.is_closed


def test_where_the_process_has_ended_a_later_program_asks_for_another(process):
    asked = []
    rank = AtOnce("step", lambda value: [value], asks=lambda: asked.append(1) or Process())
    rank.add(program(4))
    with rank.running():
        pass
    rank._process.has_ended = True
    rank.join(program(7))
    with rank.running():
        pass
    assert len(asked) == 2 and len(rank._process.given) == 1


def test_a_later_program_is_compiled_before_it_runs_where_a_record_says_what_ran(process, tmp_path):
    rank = AtOnce("step", lambda value: [value], Record(str(tmp_path / "steps.json"), True))
    rank.add(program(4))
    with rank.running():
        pass
    rank.join(later := program(4, 7))
    assert [one.waits for one in later.children()] == [True, False]


def test_a_program_that_needs_nothing_compiled_is_over_with_its_third_step(process):
    rank = AtOnce("step", lambda value: [value])
    for _ in range(3):
        with rank.running():
            assert compat.inductor.AT_ONCE.get() is not None
    assert rank.is_over and compat.inductor.AT_ONCE.get() is None


def test_a_record_is_written_and_replayed(process, tmp_path):
    path = tmp_path / "steps.json"
    rank = AtOnce("step", lambda value: [value], Record(str(path), is_writer=True))
    rank.add(program(4, 8))
    for number in (0, 1, 1, 2):
        process.done.update(process.given[:number])
        with rank.running():
            pass
    assert json.loads(path.read_text()) == {"step": {"region_0": 2, "region_1": 4}}
    process.done.clear()
    CompiledRegion._known.clear()
    again = AtOnce("step", lambda value: [value], Record(str(path), is_writer=True))
    again.add(program(4, 8))
    for _ in range(4):
        with again.running():
            pass
    assert again.taken == rank.taken and again.is_over


def test_a_record_that_some_ranks_do_not_find(process, tmp_path):
    (tmp_path / "steps.json").write_text("{}")
    records = [Record(str(tmp_path / name), False) for name in ("steps.json", "elsewhere.json")]
    with pytest.raises(StepError, match="some ranks find this file and others do not"):
        Ranks(*records).step()


def test_a_record_that_cannot_be_written_is_refused_at_once(tmp_path):
    path = str(tmp_path / "nowhere" / "steps.json")
    with pytest.raises(StepError, match="it cannot be written"):
        Record(path, is_writer=True)
    assert not Record(path, is_writer=False).is_replayed


def test_a_record_that_can_no_longer_be_written_is_said_and_left(tmp_path, caplog):
    (folder := tmp_path / "folder").mkdir()
    record = Record(str(folder / "steps.json"), is_writer=True)
    record.note("one", {"region_0": 2})
    record.note("other", {"region_0": 3})
    assert json.loads(record.path.read_text()) == {"one": {"region_0": 2}, "other": {"region_0": 3}}
    shutil.rmtree(folder)
    for _ in range(2):
        record.note("one", {"region_0": 2})
    assert caplog.text.count("is not written any longer") == 1


def test_what_is_asked_for_again_is_not_taken_over_twice(process):
    rank = AtOnce("step", lambda value: [value])
    kernels = [compat.inductor.CompiledForAnyLength(body()) for _ in range(2)]
    inputs = [torch.ones(4)]
    with rank.running():
        assert rank._later(kernels[0], inputs) and rank._later(kernels[0], inputs)
    assert len(process.given) == 1
    (name,) = rank._units
    with mock.patch.object(compat.inductor.CompiledForAnyLength, "compile") as compiles:
        process.done.update(process.given)
        with rank.running():
            assert not rank._later(kernels[1], inputs), "Inductor's cache has it"
    assert compiles.call_count == 1 and rank.taken == {name: 2} and process.is_closed


def test_a_kernel_that_cannot_be_compiled_goes_on_operator_by_operator(
    process, caplog, monkeypatch
):
    """So does that of a later program, when nothing is taken over any more."""
    rank = AtOnce("step", lambda value: [value])
    kernel, later = (compat.inductor.CompiledForAnyLength(body()) for _ in range(2))
    failure = RuntimeError("no compiler")
    monkeypatch.setattr(compat.inductor.CompiledForAnyLength, "_left", set())
    with mock.patch.object(compat.inductor.CompiledForAnyLength, "_compile", side_effect=failure):
        for _ in range(3):
            with rank.running():
                (found,) = kernel(torch.ones(4))
            process.done.update(process.given)
        (of_later,) = later(torch.ones(4))
    assert found == of_later == torch.ones(()).sin() and rank.is_over
    assert caplog.text.count("RuntimeError: no compiler") == 1


def test_a_kernel_has_one_name_on_all_ranks_whatever_their_devices(process, monkeypatch):
    ranks = [AtOnce("step", lambda value: [value]) for _ in range(2)]
    for number, rank in enumerate(ranks):
        device = torch.device("cuda", number)
        text = f"full(4, device={device!r})\n{device}"
        kernel = mock.Mock(text=lambda inputs, text=text: text, graph=body())
        with FakeTensorMode(allow_non_fake_inputs=True), rank.running():
            assert rank._later(kernel, [torch.empty(4, device=device)])
    assert len({name for rank in ranks for name in rank._units}) == 1


def test_regions_look_at_their_inputs_again_when_one_is_taken_over(process):
    of = program(4, 8)
    one, other = of.children()
    other.take()
    rank = AtOnce("step", lambda value: [value])
    rank.add(of)
    with rank.running():
        other([torch.ones(8)])
    assert other.found is not None
    process.done.add(one.text)
    with rank.running():
        assert not one.waits and other.found is None


def normalise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(parameter.norm())


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def read_norm(model):
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize(("step", "is_common"), [(normalise, 1), (clip, 1), (read_norm, 0)])
def test_what_writes_replicas_is_taken_over_with_all_ranks(step, is_common):
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made = mock.Mock(gm=rewritten(capture(step, model, world_size=2), stage=0).gm, digest=1)
    of = mock.Mock(options=mock.Mock(start="at_once"), starting={})
    with mock.patch.object(backend, "Agreement") as meetings:
        of.communicator.world_size = 2
        at = backend.CompiledFunction.at_once(of, made, communicates=False)
        at.exchange(b"ready")
    assert meetings.return_value.exchange.called == (at.record is not None) == bool(is_common)


def test_programs_that_a_rank_calls_alone_count_in_no_record():
    of = mock.Mock(options=mock.Mock(start="at_once"), starting={})
    of.name, of.communicator.world_size = "step1", 2

    def name_of(digest, communicates):
        made = mock.Mock(gm=fx.GraphModule({}, fx.Graph()), digest=digest)
        return backend.CompiledFunction.at_once(of, made, communicates).name

    assert name_of(1, True) == "step1_0"
    name_of(2, False)  # an evaluation
    name_of(3, False)
    assert name_of(3, True) == "step1_1"


@pytest.mark.parametrize("text", ["{", "[1]", '{"step": 3}', '{"step": {"region_0": "2"}}'])
def test_a_record_that_is_none(text, tmp_path):
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(StepError, match="is no record of steps"):
        Record(str(tmp_path / "steps.json"), is_writer=True)


def trained(options, rows=(8,) * 12, process_seen=None, seen_in=2, **arguments):
    """Train a tower on so many rows a step; return losses, parameters, and what was taken over."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tower(200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_of = step_with(squared_loss)
    compiled = torch.compile(step_of, backend="zero", options=options, **arguments)
    losses = []
    for step, number in enumerate(rows):
        batch = features(0, number)[0][:, :6], torch.ones(number, 3)
        with mock.patch.object(AtOnce, "_most", lambda self: 99):
            losses.append(compiled(model, optimizer, *batch).item())
        at = program_of(compiled).at_once
        if process_seen is not None and step < seen_in:
            process_seen(at)
    return losses, [value.clone() for value in model.state_dict().values()], at


def wait_for_all(at):
    """Have the next step find all compiled that the first one has asked for."""
    for unit in (*at._units.values(), *at._own.values()):
        for text in unit.texts:
            at._process.wait(text)


@pytest.fixture
def imported_first():
    """Has the process import a module of its own before all others, as scripts do."""
    module = types.ModuleType("a_module_of_a_script")
    module.torch = torch
    others = dict(sys.modules)
    sys.modules.clear()
    sys.modules.update({module.__name__: module, **others})
    yield module.__name__
    sys.modules.pop(module.__name__, None)


@pytest.mark.usefixtures("imported_first")
@pytest.mark.nightly
def test_a_step_takes_over_what_is_compiled_meanwhile(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(CompiledRegion, "_known", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    with caplog.at_level(logging.INFO, "zerofx"):
        losses, parameters, at = trained(
            {"start": "at_once", "stage": 3}, process_seen=wait_for_all
        )
    assert counters["inductor"]["fxgraph_cache_hit"] >= 5
    assert not counters["inductor"]["fxgraph_cache_miss"], "all is in the cache"
    monkeypatch.undo()
    assert at.is_over and set(at.taken.values()) == {2} and len(at.taken) > 4
    assert "update_" in " ".join(at.taken)
    assert "step 2 takes over region_" in caplog.text
    eager, _, _ = trained({"lowering": "eager", "stage": 3})
    assert losses[0] == eager[0], "the first step runs operator by operator"
    compiled, others, _ = trained({"stage": 3})
    torch.testing.assert_close(losses, compiled, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_batches_of_other_sizes_compile_nothing_in_the_training(monkeypatch, tmp_path):
    """With symbolic sizes from the first call on: one program, and one kernel a region."""
    rows = (4, 4, 2, 4, 4, 2, 3, 4, 9, 5)
    monkeypatch.setattr(CompiledRegion, "_known", known := {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    priorities = set()

    def see(at):
        wait_for_all(at)
        if at._process is not None:
            priorities.add(os.getpriority(os.PRIO_PROCESS, at._process.process.pid))

    losses, parameters, at = trained(
        {"start": "at_once", "stage": 3}, rows, process_seen=see, dynamic=True
    )
    assert priorities == {os.getpriority(os.PRIO_PROCESS, 0) + NICE}, "the training goes first"
    assert counters["inductor"]["fxgraph_cache_hit"] >= 5
    assert not counters["inductor"]["fxgraph_cache_miss"], "all is in the cache"
    assert counters["stats"]["unique_graphs"] == 1
    monkeypatch.undo()
    assert at.is_over and set(at.taken.values()) == {2}
    assert {len(compiled) for compiled in known.values()} == {1}
    eager, others, _ = trained({"lowering": "eager", "stage": 3}, rows)
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_size_that_comes_later_is_compiled_beside_the_training(monkeypatch, tmp_path):
    """Torch captures the second size again; what its program needs is compiled meanwhile."""
    rows = (4,) * 5 + (2, 4, 2, 3, 3)
    monkeypatch.setattr(CompiledRegion, "_known", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    waited = []

    def see(at):
        wait_for_all(at)
        waited.append(len(at._own))

    options = {"start": "at_once", "stage": 3}
    losses, parameters, at = trained(options, rows, see, seen_in=len(rows))
    assert counters["stats"]["unique_graphs"] == 2
    assert max(waited) > 0 and not at._own and at.is_over
    assert not counters["inductor"]["fxgraph_cache_miss"], "all is in the cache"
    monkeypatch.undo()
    eager, others, _ = trained({"lowering": "eager", "stage": 3}, rows)
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_process_that_dies_leaves_the_compiling_to_the_training(monkeypatch):
    monkeypatch.setattr(CompiledRegion, "_known", {})

    def kill(at):
        if at._process is not None:  # until the second step has taken over all
            at._process.process.kill()
        wait_for_all(at)

    _, parameters, at = trained({"start": "at_once", "stage": 2}, process_seen=kill)
    assert at.is_over and at.taken
    _, others, _ = trained({"stage": 2})
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_record_repeats_a_training_to_the_bit(tmp_path, monkeypatch):
    path = tmp_path / "steps.json"
    monkeypatch.setattr(CompiledRegion, "_known", {})
    options = {"start": f"at_once:{path}", "stage": 1}
    first, parameters, at = trained(options, process_seen=wait_for_all)
    assert json.loads(path.read_text()) == {at.name: at.taken}
    number = int(at.name.removeprefix("step").removesuffix("_0"))
    path.write_text(json.dumps({f"step{number + 1}_0": at.taken}))  # a process of its own counts so
    monkeypatch.setattr(backend.zero, "records", {})
    monkeypatch.setattr(CompiledRegion, "_known", {})
    again, others, at_again = trained(options)
    assert at.taken == at_again.taken
    assert first == again
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)


def test_without_a_cache_it_is_refused():
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        pytest.raises(StepError, match="start=at_once takes what another process compiles"),
    ):
        trained({"start": "at_once"}, rows=(8,))


@pytest.mark.parametrize("start", ["later", "compiled:x", "at_once:", ""])
def test_a_start_that_is_none(start):
    with pytest.raises(ValueError, match="must be compiled, at_once or at_once:FILE"):
        trained({"start": start}, rows=(8,))


def on_rank(stage, slow_rank):
    """Train where one rank has compiled what it needs only in its tenth step."""
    started = []

    def see(at):
        started.append(at._process.process is not None)
        wait_for_all(at)
        if torch.distributed.get_rank() == slow_rank:
            at._is_ready = lambda name, step: at.step >= 10

    losses, parameters, at = trained({"start": "at_once", "stage": stage}, (8,) * 16, see)
    return started[0], parameters, at.taken


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_ranks_stay_equal_to_the_bit(ranks, stage):  # noqa: F811
    (started, one, steps), (its_started, other, its_steps) = ranks(2).run(
        on_rank, stage, 1, timeout_s=300.0
    )
    assert started != its_started, "one process compiles for both"
    assert min(steps.values()) == 10 and steps == its_steps
    for mine, its in zip(one, other, strict=True):
        assert torch.equal(mine, its)


def other_shapes_in_other_steps(stage):
    """Train where each rank has its own number of rows in each step; return parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tower(200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"start": "at_once", "stage": stage}
    compiled = torch.compile(clipped, backend="zero", options=options, dynamic=False)
    rows = ((4, 6, 4, 6, 4, 4), (5, 5, 5, 7, 5, 5))[torch.distributed.get_rank()]
    for number in rows:
        compiled(model, optimizer, torch.ones(number, 6), torch.ones(number, 3))
    (first, second) = program_of(compiled).function.programs
    assert first.at_once is second.at_once
    assert first.at_once.step == len(rows) or first.at_once.is_over
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 3))
def test_ranks_whose_shapes_change_in_other_steps(ranks, stage):  # noqa: F811
    one, other = ranks(2).run(other_shapes_in_other_steps, stage, timeout_s=200.0)
    for mine, its in zip(one, other, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.nightly
def test_the_process_ends_when_it_is_told_to_though_others_hold_the_connection():
    process = CompileProcess()
    held = os.dup(process._connection.fileno())
    process.close()
    assert process.process.wait(timeout=60) == 0
    os.close(held)


@contextlib.contextmanager
def compiling_nothing():
    """Ranks run regions operator by operator, and no process beside them compiles any."""
    with (
        mock.patch.object(backend, "CompileProcess", lambda store, ranks: Process()),
        mock.patch.object(CompiledRegion, "_known", {}),
        mock.patch.object(CompiledRegion, "_compile", uncompiled),
    ):
        yield


@compiling_nothing()
def fail_alone():
    model = Tower(200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = torch.compile(step_with(squared_loss), backend="zero", options={"start": "at_once"})
    step(model, optimizer, torch.ones(4, 6), torch.ones(4, 3))
    if torch.distributed.get_rank():
        with (
            mock.patch.object(backend, "StepCapture", side_effect=StepError("no such batch")),
            pytest.raises(StepError, match="no such batch"),
        ):
            step(model, optimizer, torch.ones(5, 6), torch.ones(5, 3))
    else:
        with pytest.raises(AgreementError, match="no such batch"):
            step(model, optimizer, torch.ones(4, 6), torch.ones(4, 3))


@pytest.mark.slow(reason="ranks trace")
def test_a_rank_that_cannot_compile_is_heard_where_a_step_begins(ranks):  # noqa: F811
    ranks(2).run(fail_alone, timeout_s=100.0)


@compiling_nothing()
def start_apart():
    start = "at_once" if torch.distributed.get_rank() else "compiled"
    with pytest.raises(AgreementError, match="start: compiled"):
        trained({"start": start}, rows=(8,))


@pytest.mark.slow(reason="ranks trace")
def test_ranks_that_start_otherwise_are_told(ranks):  # noqa: F811
    ranks(2).run(start_apart)
