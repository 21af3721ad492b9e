"""Ranks that read each other's memory: who may, what is kept for them, and what failures say."""

import time
from contextlib import closing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.kit.covering import each_value, exhaustive, nightly, only
from tests.kit.ranks import Ranks, ranks_fixture, ranks_on_sockets_fixture  # noqa: F401
from zerofx.errors import StepError
from zerofx.runtime.comm import peer_memory
from zerofx.runtime.comm.communication import Communicator, GlooTransport, PeerTransport
from zerofx.runtime.comm.peer_memory import PeerMemory

LATE_S = 0.3


def transport():
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    return type(comm._transport(torch.ones(1)))


def test_ranks_of_one_machine_read_each_others_memory(ranks):
    assert ranks(2).run(transport) == [PeerTransport] * 2


def connect_with_wrong_nonce():
    if dist.get_rank() == 1:  # as a process of that number on another machine would have
        peer_memory.secrets.randbits = lambda bits: 7
        original = PeerMemory._nonce
        PeerMemory._nonce = lambda self, peer: original(self, peer) + 1
    return transport()


def test_one_rank_that_cannot_read_another_leaves_all_to_their_sockets():
    with closing(Ranks(3)) as own:
        assert own.run(connect_with_wrong_nonce) == [GlooTransport] * 3


def step(layer, optimizer, x):
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled_step(**options):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    return lambda x: compiled(layer, optimizer, x)


def decline_by_option():
    compiled_step(peer_memory=False)(torch.ones(2, 64))
    declined = transport()
    other = Communicator.of(dist.new_group())
    other.wait(other.all_reduce_start(torch.ones(1), "sum"))
    with pytest.raises(ValueError, match="choose alike for all, or pass another process_group"):
        PeerMemory.decline(other.group)
    return declined


@pytest.mark.slow(reason="ranks compile and train")
def test_the_option_leaves_a_group_to_its_sockets():
    with closing(Ranks(2)) as own:
        assert own.run(decline_by_option) == [GlooTransport] * 2


def keep_source():
    """Rank 1 reads late: rank 0 waits for it, and its source lives until then and no longer."""
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    source = torch.full((1000 * comm.world_size,), float(comm.rank))
    storage = StorageWeakRef(source.untyped_storage())
    started = comm.reduce_scatter_start(source, "sum", comm.world_size)
    del source
    if comm.rank == 1:
        time.sleep(LATE_S)
    begun = time.monotonic()
    held = not storage.expired()
    comm.wait(started)
    return held, not storage.expired(), started[0].item(), time.monotonic() - begun


def test_a_source_is_kept_until_the_slowest_rank_has_read_it(ranks):
    first, second = ranks(2).run(keep_source)
    assert first[:3] == second[:3] == (True, False, 1.0)
    assert first[3] > LATE_S / 2


def write_after_step():
    """What a step returns is the caller's, even while another rank is late."""
    comm = Communicator.of(None)
    sums = []
    for _ in range(20):
        gathered = comm.gather_whole(torch.full((50_000,), float(comm.rank)))
        sums.append(gathered.sum().item())
        gathered.fill_(-1.0)
    return sums


def test_what_was_gathered_whole_may_be_overwritten_at_once(ranks):
    assert ranks(3).run(write_after_step) == [[150_000.0] * 20] * 3


def fail_on_one_rank():
    """Rank 1's step fails between two collectives; rank 0 waits for the second."""
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    first = comm.all_reduce_start(torch.ones(4), "sum")
    comm.wait(first)
    if comm.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(StepError, match="failed on rank 1.* go on from a checkpoint"):
            comm.wait(comm.all_reduce_start(torch.ones(8), "sum"))
        comm.abandon()
    return comm.wait(comm.all_reduce_start(torch.ones(3), "sum")).tolist()


def test_a_step_that_fails_on_one_rank_fails_on_those_that_wait_for_it(ranks):
    started = time.monotonic()
    assert ranks(3).run(fail_on_one_rank) == [[3.0] * 3] * 3
    assert time.monotonic() - started < 30  # the group's timeout is 60


def fail_between_steps():
    """Rank 1 has no memory for what all gather outside of any program."""
    comm = Communicator.of(None)
    ones = torch.ones(4)
    comm.wait(comm.all_reduce_start(ones, "sum"))
    if comm.rank == 1:
        with (
            mock.patch.object(comm, "_transport", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            comm.gather_whole(ones)
    else:
        with pytest.raises(StepError, match="failed on rank 1"):
            comm.gather_whole(ones)
    return comm.wait(comm.all_reduce_start(ones, "sum")).tolist()


def test_a_gather_between_steps_that_fails_on_one_rank_leaves_the_group_usable(ranks):
    assert ranks(2).run(fail_between_steps, timeout_s=30) == [[2.0] * 4] * 2


def gather_without_kept_buffers() -> bool:
    """Gather in a program whose budget counts every byte."""
    comm = Communicator.of(None)
    comm.buffers.is_on = False
    try:
        comm.gather_whole(torch.ones(4))
        return comm.buffers.is_on
    finally:
        comm.buffers.is_on = True


def test_to_gather_leaves_buffers_uncounted_or_not_as_it_was(ranks):
    assert ranks(2).run(gather_without_kept_buffers) == [False, False]


def raise_in_step():
    """An index out of range, in rank 1's batch alone."""

    def lookup(table, optimizer, index):
        loss = table(index).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    table = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    compiled = torch.compile(lookup, backend="zero", options={"lowering": "eager"})
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 99])
    compiled(table, optimizer, good)
    with pytest.raises((StepError, IndexError)) as caught:
        compiled(table, optimizer, bad if dist.get_rank() == 1 else good)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.nightly
def test_an_error_in_one_ranks_batch_is_named_on_the_others(ranks):
    (first, message), (second, _) = ranks(2).run(raise_in_step)
    assert second == "IndexError"
    assert first == "StepError" and "the step failed on rank 1" in message


def call_different_collectives():
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    with pytest.raises(StepError, match="the ranks call different functions"):
        comm.wait(comm.all_reduce_start(torch.ones(100 + comm.rank), "sum"))
    comm.abandon()


def test_different_collectives_are_an_error_not_garbage(ranks):
    ranks(2).run(call_different_collectives)


def finish_first():
    """Rank 0 ends its process as soon as it is done; rank 1 still has to read its memory."""
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    started = comm.all_reduce_start(torch.full((300_000,), float(comm.rank)), "sum")
    if comm.rank == 1:
        time.sleep(LATE_S)
    total = comm.wait(started).sum().item()
    if comm.rank == 0:
        raise SystemExit  # past the worker's loop, to an orderly exit
    return total


def test_a_process_stays_until_the_others_have_read_its_memory():
    with closing(Ranks(2)) as own:
        with pytest.raises(RuntimeError, match="rank 0 died, exit code 0"):
            own.run(finish_first)


def differences_of_sparse_layouts(stage):
    """Gradients of stride 0, of a stride, and of a column: what others read is what they hold."""
    torch.manual_seed(0)
    weights = torch.randn(64, 9)

    def parameters():
        return [torch.nn.Parameter(torch.zeros(64)) for _ in range(5)] + [
            torch.nn.Parameter(torch.zeros(64, 8)),
            torch.nn.Parameter(torch.zeros(64, 1)),
        ]

    def learn(model, optimizer):
        a, b, c, d, e, wide, column = model
        loss = (a + b).sum() + (torch.stack([c, d], 1) * weights[:, :2]).sum()
        loss = loss + (torch.cat([wide, column], 1) * weights).sum() + (e * a).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, plain = torch.nn.ParameterList(parameters()), torch.nn.ParameterList(parameters())
    options = {"stage": stage, "lowering": "eager"}
    compiled = torch.compile(learn, backend="zero", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, plain)]
    for _ in range(2):
        compiled(model, optimizers[0])
        learn(plain, optimizers[1])
    whole = model.state_dict()
    return max((whole[name] - p).abs().max().item() for name, p in plain.state_dict().items())


@pytest.mark.nightly
@pytest.mark.parametrize("stage, world_size", each_value((0, 1, 2, 3), (2, 3)))
def test_gradients_that_are_not_dense_arrive(ranks, stage, world_size):
    assert max(ranks(world_size).run(differences_of_sparse_layouts, stage)) < 1e-5


@pytest.mark.parametrize("stage", (nightly(0), exhaustive(1), exhaustive(2), nightly(3)))
def test_gradients_that_are_not_dense_arrive_over_sockets(ranks_on_sockets, stage):
    assert max(ranks_on_sockets(2).run(differences_of_sparse_layouts, stage)) < 1e-5


def post_with_holes():
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    with pytest.raises(ValueError, match="make it contiguous"):
        PeerMemory.of(dist.group.WORLD).post([torch.ones(8)[::2]])


def test_a_source_with_holes_is_refused(ranks):
    ranks(2).run(post_with_holes)


class SwapsGradients(torch.autograd.Function):
    """The gradient of each factor is the other's very memory."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return b.view_as(b), a.view_as(a)


def sources_in_parameters(stage):
    def learn(model, optimizer):
        loss = SwapsGradients.apply(*model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(50)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"stage": stage, "lowering": "eager"}
    compiled = torch.compile(learn, backend="zero", options=options)
    a, b = (p.detach().clone() for p in model)
    kept = {p.untyped_storage().data_ptr() for p in model}
    found = []
    post = PeerMemory.post

    def watched(self, sources):
        found.extend(source.untyped_storage().data_ptr() in kept for source in sources)
        return post(self, sources)

    with mock.patch.object(PeerMemory, "post", watched):
        compiled(model, optimizer)
    expected = [a - 0.1 * b, b - 0.1 * a]
    off = [(p.detach() - q).abs().max().item() for p, q in zip(model, expected, strict=True)]
    return len(found), any(found), max(off)


@pytest.mark.parametrize("stage", only((2,), [0, 1, 2]))
def test_a_gradient_that_is_a_parameters_memory_is_copied_first(ranks, stage):
    for posted, in_parameters, off in ranks(2).run(sources_in_parameters, stage):
        assert posted > 0 and not in_parameters and off < 1e-6
