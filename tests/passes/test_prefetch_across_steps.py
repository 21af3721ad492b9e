"""prefetch_across_steps: a step starts the gather that the next one reads first."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import each_value, exhaustive, only
from tests.kit.models import VOCABULARY, language_loss, tokens
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    gathered_bytes,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    run_passes,
    smallest_step,
)
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx import GraphError
from zerofx.backend import zero
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import gathered_peak, wire_bytes
from zerofx.ir import ops
from zerofx.ir.graph import program_order, provenance, value_bytes
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE
from zerofx.runtime.comm.communication import Communicator, default_group
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.verify.verifier import verify

aten = torch.ops.aten


def carrying(captured, **options):
    return rewritten(captured, prefetch_across_steps=True, **options)


def carried_start(program) -> fx.Node:
    (carry,) = nodes_of(program, ops.carry)
    return carry.args[0]


def autocast_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, 5), world_size=2)


def frozen_step():
    """The layer that is read first is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 5), world_size=2)


# The program


def test_gathers_at_the_end_what_is_read_first():
    assert_program(
        rewritten(smallest_step()),
        """
        ...
        all_gather_start = zerofx.all_gather_start(w, 2)
        wait = zerofx.wait(all_gather_start)
        ...
        update = zerofx.update(w, wait_1, SGD, 0, None)
        return []
        """,
    )
    assert_program(
        carrying(smallest_step()),
        """
        ...
        resume_gather = zerofx.resume_gather(w, [0], 2)
        wait = zerofx.wait(resume_gather)
        ...
        update = zerofx.update(w, wait_1, SGD, 0, None)
        all_gather_start = zerofx.all_gather_start(update, 2)
        zerofx.carry(all_gather_start, [0])
        return []
        """,
    )


@pytest.mark.nightly
def test_changes_nothing_else():
    for captured in (mlp_step(4, clip=True), autocast_step(), frozen_step()):
        before, after = rewritten(captured), carrying(captured)
        (resume,) = nodes_of(after, ops.resume_gather)
        resume.target = ops.all_gather_start
        added = [n for n in after.graph.nodes if inserted_here(n) and n is not resume]
        assert added[-1].target is ops.carry and added[-2].target is ops.all_gather_start
        left = [node.target for node in after.graph.nodes if node not in added]
        assert left == [node.target for node in before.graph.nodes]


def inserted_here(node: fx.Node) -> bool:
    origin = provenance(node)
    return origin is not None and origin.inserted_by == "prefetch_across_steps"


def test_starts_behind_the_last_update_of_its_bucket_and_the_last_wait():
    program = carrying(mlp_step(4, clip=True))
    order = program_order(program.graph)
    start = carried_start(program)
    (own,) = [n for n in nodes_of(program, ops.update) if n is start.args[0]]
    assert order[start] > max(map(order.__getitem__, nodes_of(program, ops.wait)))
    assert order[start] == order[own] + 1
    # Clipping leaves all updates to the end, and other parameters' overlap with the gather.
    assert any(order[node] > order[start] for node in nodes_of(program, ops.update))


def test_a_bucket_is_packed_again_from_what_the_updates_have_written():
    for program in rewritten_by_rank(mlp_step(3), prefetch_across_steps=True):
        (resume,) = nodes_of(program, ops.resume_gather)
        packed = carried_start(program).args[0]
        assert packed.target is ops.pack and packed.args[1] == resume.args[1] == [0, 1]
        assert [part.target for part in packed.args[0]] == [ops.update, ops.update]


def test_a_cast_is_repeated_on_the_new_value():
    program = carrying(autocast_step())
    start = carried_start(program)
    assert start.meta["val"].dtype == torch.bfloat16
    assert start.args[0].target is aten._to_copy.default
    assert start.args[0].args[0].target is ops.update


def test_a_parameter_that_is_not_trained_is_carried_too():
    program = carrying(frozen_step())
    assert carried_start(program).args[0].op == "placeholder"
    assert_same_numerics(execute(rewritten(frozen_step())), execute(program))


def test_leaves_programs_alone_that_update_nothing_or_read_no_parameter_first():
    assert listing(carrying(evaluation())) == listing(rewritten(evaluation()))

    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def update_first(x):
        (x @ w).backward(torch.ones(3, 2))
        optimizer.step()
        optimizer.zero_grad()
        return (x @ w).sum().detach()

    captured = capture(update_first, torch.randn(3, 4), world_size=2)
    assert nodes_of(rewritten(captured), ops.update, ops.all_gather_start)
    assert listing(carrying(captured)) == listing(rewritten(captured))


def test_has_nothing_to_do_in_a_world_of_one():
    one = clone(smallest_step(), 1)
    reports = run_passes(one, prefetch_across_steps=True)
    assert reports["prefetch_across_steps"].counts == {"carried": 0}
    assert not nodes_of(one, ops.carry, ops.resume_gather)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_does_nothing_below_stage_3_and_says_so(stage):
    reports = run_passes(clone(mlp_step()), stage=stage, prefetch_across_steps=True)
    assert reports["prefetch_across_steps"].skipped == f"stage {stage} (needs 3)"


def test_is_off_by_default():
    reports = run_passes(clone(mlp_step()))
    assert reports["prefetch_across_steps"].skipped == "turned off"
    reports = run_passes(clone(mlp_step()), prefetch_across_steps=True)
    assert reports["prefetch_across_steps"].counts == {"carried": 1}


def test_requires_sharded_parameters():
    program = clone(mlp_step())
    names = ("data_parallel", "shard_optimizer", "prefetch_across_steps")
    passes = [step for step in PIPELINE if step.name in names]
    with pytest.raises(GraphError, match="requires sharded_parameters"):
        run_pipeline(program.gm, context_of(program, prefetch_across_steps=True), passes)


def test_is_bitwise_the_program_before_it():
    for captured in (mlp_step(4, clip=True), autocast_step(), frozen_step()):
        assert_same_numerics(execute(rewritten(captured)), execute(carrying(captured)))


def test_runs_last_of_those_that_move_anything():
    assert [step.name for step in PIPELINE[-2:]] == ["prefetch_across_steps", "place_files"]


# What it costs


def test_sends_no_more_in_a_step():
    before, after = rewritten(mlp_step(4)), carrying(mlp_step(4))
    assert wire_bytes(after.gm, 2) == wire_bytes(before.gm, 2)


def test_its_bytes_are_alive_from_the_start_and_to_the_end():
    before, after = rewritten(mlp_step(4)), carrying(mlp_step(4))
    nbytes = value_bytes(carried_start(after))
    (resume,) = nodes_of(after, ops.resume_gather)
    assert nbytes > 0 and live_bytes(before.graph, 2)[0] == 0
    alive, order = live_bytes(after.graph, 2), program_order(after.graph)
    assert set(alive[: order[resume] + 1]) == {nbytes}
    assert alive[-1] - live_bytes(before.graph, 2)[-1] == nbytes
    assert gathered_bytes(after)[-1] == nbytes


def test_counts_into_the_most_that_is_gathered_at_once():
    program = carrying(smallest_step())
    peak = gathered_peak(program.gm, program.table)
    assert peak.nbytes == value_bytes(carried_start(program)) and peak.parameters == ("w",)
    # From the start: an embedding that somebody else's gather comes before.
    program = carrying(mlp_step(4))
    assert gathered_peak(program.gm, program.table).nbytes >= max(gathered_bytes(program))


DEEP = {"num_layers": 6, "width": 33}


@pytest.mark.parametrize("share", only((0.3,), (0.0, 0.3, 0.6)))
def test_counts_in_the_memory_budget(share):
    """Nothing is kept gathered that would push what is carried past the budget."""
    captured = mlp_step(**DEEP)

    def peak(program):
        return max(live_bytes(program.graph, 2))

    least, most = (peak(carrying(captured, memory_budget=budget)) for budget in (None, 10**9))
    budget = least + int(share * (most - least)) + 2000
    assert peak(carrying(captured, memory_budget=budget)) <= budget


def test_a_budget_that_only_what_is_carried_exceeds_is_refused():
    """Most is alive before the first parameter is read; now that parameter is there too."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(3001))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        factor = x.repeat(2000).sin().mean()
        (w.mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(10), world_size=2)
    least = max(live_bytes(rewritten(captured).graph, 2))
    run_passes(clone(captured), memory_budget=least)
    with pytest.raises(zerofx.StepError, match=f"this step allocates {least + 4 * 3002} "):
        run_passes(clone(captured), memory_budget=least, prefetch_across_steps=True)
    assert max(live_bytes(carrying(captured).graph, 2)) == least + 4 * 3002


# The verifier


def broken(program, message):
    with pytest.raises(GraphError, match=message):
        verify(program.gm, program.table)


def test_a_gather_is_waited_for_or_carried_and_not_both():
    program = carrying(smallest_step())
    start = carried_start(program)
    with program.graph.inserting_after(start):
        wait = program.graph.call_function(ops.wait, (start,))
    wait.meta.update(start.meta)
    broken(program, "1 waits and 2 readers")


def test_what_is_carried_is_resumed_once():
    program = carrying(smallest_step())
    (resume,) = nodes_of(program, ops.resume_gather)
    resume.target, resume.args = ops.all_gather_start, (resume.args[0], 2)
    broken(program, "carries this gather 1 times and resumes it 0 times")

    program = carrying(smallest_step())
    (carry,) = nodes_of(program, ops.carry)
    program.graph.erase_node(carry)
    program.graph.erase_node(nodes_of(program, ops.all_gather_start)[0])
    broken(program, "carries this gather 0 times and resumes it 1 times")


def test_the_names_of_what_is_carried_are_its_own():
    program = carrying(mlp_step())
    for node in nodes_of(program, ops.carry, ops.resume_gather):
        node.args = (node.args[0], [3], *node.args[2:])
    broken(program, "does not gather the parameters that it names")


def test_nothing_is_written_to_what_is_carried():
    program = carrying(smallest_step())
    (update,) = nodes_of(program, ops.update)
    start, w = carried_start(program), update.args[0]
    start.args = (w, 2)
    (carry,) = start.users
    update.prepend(start)
    update.prepend(carry)
    broken(program, "overwrites .*w.*, which .* carries over")


def test_only_what_comes_in_is_resumed():
    program = carrying(smallest_step())
    (resume,) = nodes_of(program, ops.resume_gather)
    with program.graph.inserting_before(resume):
        copied = program.graph.call_function(aten.clone.default, (resume.args[0],))
    copied.meta.update(resume.args[0].meta)
    copied.meta["zerofx"] = resume.meta["zerofx"]
    resume.args = (copied, *resume.args[1:])
    broken(program, "resumes a gather of what only this call computes")


# Between steps, on two ranks


class Training:
    """A language model, a step that prefetches across steps or not, and what each call cost."""

    def __init__(self, carry: bool | None, **options):
        torch._dynamo.reset()
        gc.collect()  # models of tests before, and what was carried for them
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, 7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.options = dict(options)
        if carry is not None:
            self.options["prefetch_across_steps"] = carry
        self.communicator = Communicator.of(None)
        self.rank = self.communicator.rank
        self.step = self.compiled(train)
        self.evaluate = self.compiled(evaluate)
        self.losses: list[float] = []
        self.number = 0

    def compiled(self, function):
        return torch.compile(
            function, backend="zero", options={"lowering": "eager", **self.options}
        )

    def call(self, function=None, rows: int = 3, **arguments) -> int:
        """Run one step; return how many gathers it started."""
        self.number += 1
        batch = tokens(10 * self.number + self.rank, rows)
        gathers = self.communicator.traffic.collectives["all_gather"]
        function = function or self.step
        self.losses.append(function(self.model, self.optimizer, *batch, **arguments).item())
        return self.communicator.traffic.collectives["all_gather"] - gathers

    def carried(self) -> int:
        return REGISTRY.carried.nbytes

    def outcome(self) -> list[torch.Tensor]:
        values = list(self.model.state_dict().values())
        states = self.optimizer.state_dict()["state"].values()
        values += [value for state in states for value in state.values()]
        return [torch.tensor(self.losses), *values]


def train(model, optimizer, inputs, targets):
    loss = language_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_twice_as_much(model, optimizer, inputs, targets):
    loss = 2 * language_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model, optimizer, inputs, targets):
    with torch.no_grad():
        return language_loss(model, inputs, targets)


def check_steady_state() -> None:
    plain, carrying = Training(False), Training(True)
    gathers = [plain.call() for _ in range(3)]
    assert len(set(gathers)) == 1 and plain.carried() == 0
    assert [carrying.call() for _ in range(3)] == [gathers[0] + 1, gathers[0], gathers[0]]
    assert carrying.carried() == carrying.communicator.traffic.gathered_bytes > 0
    assert REGISTRY.persistent_bytes()["carried"] == carrying.carried()
    (function,) = [f for f in zero.functions if f.programs and f.options.prefetch_across_steps]
    nodes = function.programs[0].gm.graph.nodes
    resumed = [value_bytes(node) for node in nodes if node.target is ops.resume_gather]
    assert carrying.carried() == sum(resumed)
    assert f"{carrying.carried()} B (0.weight)" in zerofx.explain(carrying.step)


@pytest.mark.nightly
def test_one_gather_more_in_the_first_step_and_no_more_in_the_others(ranks):
    ranks(2).run(check_steady_state)


# What may happen between two steps -> whether what is carried survives it.


def evaluate_in_between(training):
    training.call(training.evaluate)


def save_the_model(training):
    training.model.state_dict()


def save_the_optimizer(training):
    training.optimizer.state_dict()


def load_the_model(training):
    state = training.model.state_dict()
    training.model.load_state_dict({key: 0.9 * value for key, value in state.items()})


def load_the_optimizer(training):
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def write_one_parameter(training):
    with torch.no_grad():
        training.model[0].weight.copy_(torch.ones(VOCABULARY, 7))


def write_whole_parameters(training):
    with zerofx.full_params(training.model), torch.no_grad():
        training.model[0].weight.mul_(0.9)


def train_with_another_function(training):
    if not hasattr(training, "other"):
        training.other = training.compiled(train_twice_as_much)
    training.call(training.other)


def train_with_one_that_does_not_carry(training):
    if not hasattr(training, "plain"):
        options = {**training.options, "prefetch_across_steps": False}
        training.plain = torch.compile(
            train_twice_as_much, backend="zero", options={"lowering": "eager", **options}
        )
    training.call(training.plain)


def fail(training):
    beyond = torch.full((3, 6), 10_000)
    with pytest.raises(IndexError):
        training.step(training.model, training.optimizer, beyond, beyond)


def unshard(training):
    zerofx.unshard(training.model, training.optimizer)


def nothing(training):
    pass


SURVIVES = {
    nothing: True,
    evaluate_in_between: True,
    save_the_model: True,
    save_the_optimizer: True,
    load_the_optimizer: True,
    train_with_another_function: True,  # which takes it and leaves its own
    load_the_model: False,
    write_one_parameter: False,
    write_whole_parameters: False,
    train_with_one_that_does_not_carry: False,
    fail: False,
    unshard: False,
}


def check_interruption(interrupt, carry: bool) -> tuple[list[int], int, list[torch.Tensor]]:
    training = Training(carry)
    training.call(), training.call()
    before = training.carried()
    interrupt(training)
    left, gathers = training.carried(), [training.call()]
    interrupt(training)
    gathers += [training.call(), training.call()]
    assert training.communicator.traffic.gathered_bytes == training.carried()
    assert (before > 0) == (training.carried() > 0) == carry
    return gathers, left, training.outcome()


@pytest.mark.parametrize(
    "interrupt", only((write_one_parameter,), SURVIVES), ids=lambda function: function.__name__
)
def test_what_happens_between_two_steps(ranks, interrupt):
    """It changes no result, and costs a gather only where the carried one is out of date."""
    plain = ranks(2).run(check_interruption, interrupt, False)
    carrying = ranks(2).run(check_interruption, interrupt, True)
    for (expected_gathers, _, expected), (gathers, left, outcome) in zip(
        plain, carrying, strict=True
    ):
        usual = expected_gathers[-1]
        again = 0 if SURVIVES[interrupt] else 1
        assert gathers == [usual + again, usual + again, usual]
        assert (left > 0) == SURVIVES[interrupt]
        torch.testing.assert_close(outcome, expected, rtol=0, atol=0)


def check_journey(carry: bool | None, **options) -> list[torch.Tensor]:
    """Twenty-four steps, and everything that may come between them."""
    training = Training(carry, **options)
    for interrupt in SURVIVES:
        training.call(), interrupt(training)
        training.call(rows=4)
    return training.outcome()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    (
        {},
        exhaustive({"bucket": False, "prefetch": False}),
        exhaustive({"memory_budget": 10**9}),
    ),
    ids=lambda options: " ".join(options) or "as usual",
)
def test_is_bitwise_the_same_training(ranks, options):
    plain = ranks(2).run(run_with, check_journey, {"carry": False, **options})
    carrying = ranks(2).run(run_with, check_journey, {"carry": True, **options})
    torch.testing.assert_close(carrying, plain, rtol=0, atol=0)
    assert len(plain[0][0]) > 24 and plain[0][0].isfinite().all()


def run_with(function, options):
    return function(**options)


def check_compiled_lowering(carry: bool) -> list[torch.Tensor]:
    training = Training(carry, lowering="inductor")
    gathers = [training.call() for _ in range(3)]
    assert gathers[0] - gathers[1] == carry
    return training.outcome()


@pytest.mark.nightly
def test_the_compiled_lowering_carries_too(ranks):
    plain, carrying = (
        ranks(2).run(check_compiled_lowering, carry, timeout_s=400) for carry in (False, True)
    )
    torch.testing.assert_close(carrying, plain, rtol=0, atol=0)


def check_retrace_on_one_rank() -> None:
    """Rank 1 gets a program of its own, which takes what the first one has carried."""
    training = Training(True)
    training.call(), training.call()
    usual = training.call()
    assert training.call(rows=3 + training.rank) == usual
    assert training.call() == usual


@pytest.mark.nightly
def test_a_retrace_on_one_rank_takes_what_the_other_program_carried(ranks):
    ranks(2).run(check_retrace_on_one_rank)


def check_environment() -> int:
    with mock.patch.dict(os.environ, ZEROFX_PREFETCH_ACROSS_STEPS="1"):
        training = Training(None)
        training.call()
    return training.carried()


@pytest.mark.nightly
def test_the_environment_turns_it_on(ranks):
    assert all(nbytes > 0 for nbytes in ranks(2).run(check_environment))


def check_a_model_that_goes() -> None:
    training = Training(True)
    training.call()
    assert training.carried() > 0
    torch._dynamo.reset()
    training.model = training.optimizer = training.step = None
    gc.collect()
    assert training.carried() == 0
    assert training.communicator.traffic.gathered_bytes == 0


@pytest.mark.nightly
def test_what_is_carried_goes_with_its_model(ranks):
    with closing(Ranks(2)) as own:
        own.run(check_a_model_that_goes)


def write_on_one_rank() -> None:
    training = Training(True)
    training.call()
    with mock.patch.object(REGISTRY.barrier, "load_timeout_s", 1.0):
        if training.rank == 0:
            write_one_parameter(training)
        training.call()


@pytest.mark.slow(reason="two ranks train with and without")
def test_a_write_on_one_rank_only_is_an_error_and_no_wrong_answer():
    with closing(Ranks(2)) as own:
        with pytest.raises(
            RuntimeError, match=r"copy_\(\) before a step.*rank\(s\) \[1\] did not join"
        ):
            own.run(write_on_one_rank, timeout_s=60)


# Exit


def leave_in_flight(peer_memory: bool) -> None:
    """Rank 1 starts what it carries half a second after rank 0, which is about to exit by then."""
    group = default_group(os.environ)
    if not peer_memory:
        PeerMemory.decline(group)
    training = Training(True)
    training.call()
    run = OptimizerRunner.run

    def slow(*arguments):
        time.sleep(0.1 * training.rank)
        return run(*arguments)

    with mock.patch.object(OptimizerRunner, "run", slow):
        training.call()
    (carried,) = REGISTRY.carried._gathers.values()
    started = training.communicator._in_flight[id(carried.gathering)]
    # What reads another's memory does so at the wait, which never comes.
    is_complete = not peer_memory and started.work.work.is_completed()
    print("complete" if is_complete else "in flight", flush=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "last, peer_memory", each_value(("", "t.dist.destroy_process_group()"), (True, False))
)
def test_a_process_may_exit_with_a_gather_in_flight(last, peer_memory):
    module = "from tests.passes import test_prefetch_across_steps as t"
    code = f"{module}; t.leave_in_flight({peer_memory}); {last}"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # As under torchrun: the launcher serves the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=root,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    assert "in flight" in ends[0][0]
    assert not any("terminate" in error for _, error in ends)
