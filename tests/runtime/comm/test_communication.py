"""The collectives, against local arithmetic; their bytes, against the wire."""

import contextlib
import math
import os
import sys
import time
from contextlib import closing
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.allocations import Allocations
from tests.kit.covering import first, only
from tests.kit.ranks import Ranks, ranks_either_way_fixture, ranks_on_sockets_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx import compat
from zerofx.runtime.comm import communication
from zerofx.runtime.comm.communication import Communicator, NativeTransport, default_group
from zerofx.runtime.comm.peer_memory import PeerMemory
from zerofx.runtime.comm.transport import SCALAR_BYTES

WORLDS = (2, 3, 4)
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
MIB = 1 << 20


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) > 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def reduced_in_rank_order(numel, dtype, reduction, world_size):
    combine = {"max": torch.maximum, "min": torch.minimum}.get(reduction, torch.add)
    result = values(0, numel, dtype)
    for rank in range(1, world_size):
        result = combine(result, values(rank, numel, dtype))
    return result / world_size if reduction == "mean" else result


def assert_bitwise(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def check_every_collective():
    comm = Communicator.of(None)
    world_size, rank = comm.world_size, comm.rank
    whole_dtypes = (torch.int64, torch.int16, torch.bool)
    for dtype in (*FLOATS, torch.float16, torch.complex64, *whole_dtypes):
        # Lengths that need padding; below and above what counts as a scalar.
        for numel in (1, 7, SCALAR_BYTES + 3):
            gathered = comm.wait(comm.all_gather_start(values(rank, numel, dtype), world_size))
            pieces = [values(peer, numel, dtype) for peer in range(world_size)]
            assert_bitwise(gathered, torch.cat(pieces))
            parts = [values(peer, numel * world_size, dtype) for peer in range(world_size)]
            sent = comm.wait(comm.all_to_all_start(parts[rank].clone()))
            assert_bitwise(sent, torch.cat([part.chunk(world_size)[rank] for part in parts]))
            assert_bitwise(comm.gather_whole(values(rank, numel, dtype)), torch.cat(pieces))
            received = values(rank, numel, dtype)
            comm.broadcast(received, world_size - 1)
            assert_bitwise(received, values(world_size - 1, numel, dtype))
            for reduction in ("mean", "sum", "max", "min"):
                if reduction == "mean" and dtype in whole_dtypes:
                    continue
                if reduction in ("max", "min") and dtype.is_complex:
                    continue
                expected = reduced_in_rank_order(numel, dtype, reduction, world_size)
                started = comm.all_reduce_start(values(rank, numel, dtype), reduction)
                result = comm.wait(started)
                assert result is started
                assert_bitwise(result, expected)
                flat = values(rank, numel * world_size, dtype)
                expected = reduced_in_rank_order(flat.numel(), dtype, reduction, world_size)
                shard = comm.wait(comm.reduce_scatter_start(flat, reduction, world_size))
                assert_bitwise(shard, expected.chunk(world_size)[rank])


def test_a_world_of_one_without_a_group_computes_the_same():
    check_every_collective()


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("world_size", only((3,), WORLDS))
def test_every_collective_equals_local_arithmetic_in_rank_order(ranks, world_size):
    ranks(world_size).run(check_every_collective)


def check_shapes_and_layouts():
    comm = Communicator.of(None)
    rank, world_size = comm.rank, comm.world_size
    scalar = comm.wait(comm.all_reduce_start(torch.tensor(float(rank)), "max"))
    assert scalar.shape == () and scalar == world_size - 1
    empty = comm.wait(comm.all_gather_start(torch.empty(0), world_size))
    assert empty.shape == (0,)
    transposed = values(rank, 35, torch.float32).view(5, 7).t()
    result = comm.wait(comm.all_reduce_start(transposed, "mean"))
    expected = reduced_in_rank_order(35, torch.float32, "mean", world_size).view(5, 7).t()
    assert result.is_contiguous()
    assert_bitwise(result, expected.contiguous())
    weight = torch.nn.Parameter(torch.full((2, 3, 4, 4), float(rank)))
    weight.data = weight.data.to(memory_format=torch.channels_last)
    comm.broadcast(weight, world_size - 1)
    assert_bitwise(weight.detach(), torch.full((2, 3, 4, 4), world_size - 1.0))
    gradient = comm.wait(comm.all_reduce_start(weight, "sum"))
    assert not gradient.requires_grad


@pytest.mark.parametrize("world_size", (2, 3))
def test_shapes_layouts_and_leaves_that_require_gradients(ranks, world_size):
    ranks(world_size).run(check_shapes_and_layouts)


def allocated_by_a_gather() -> list[int]:
    comm = Communicator.of(None)
    shard = torch.ones(3001)
    comm.buffers.is_on = False
    for _ in range(2):
        with Allocations() as allocations:
            comm.wait(comm.all_gather_start(shard, comm.world_size))
    comm.buffers.is_on = True
    return allocations.sizes()


def test_on_two_ranks_a_gather_allocates_its_result_and_nothing_else(ranks):
    assert ranks(2).run(allocated_by_a_gather) == [[2 * 4 * 3001]] * 2


def check_stages_agree(dtype):
    comm = Communicator.of(None)
    world_size = comm.world_size
    for numel in (world_size, 60, 12_000):
        flat = values(comm.rank, numel, dtype)
        shard = comm.wait(comm.reduce_scatter_start(flat, "mean", world_size))
        gathered = comm.wait(comm.all_gather_start(shard, world_size))
        assert_bitwise(comm.wait(comm.all_reduce_start(flat, "mean")), gathered)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world_size", first(2, WORLDS))
def test_all_reduce_is_bitwise_reduce_scatter_then_gather(ranks, world_size, dtype):
    ranks(world_size).run(check_stages_agree, dtype)


def check_native_transport():
    comm = Communicator(dist.group.WORLD)
    comm._transports["cpu"] = NativeTransport(dist.group.WORLD)
    world_size, numel = comm.world_size, 12
    for reduction in ("mean", "sum", "max", "min"):
        flat = values(comm.rank, numel * world_size, torch.float32)
        expected = reduced_in_rank_order(flat.numel(), flat.dtype, reduction, world_size)
        result = comm.wait(comm.all_reduce_start(flat, reduction))
        torch.testing.assert_close(result, expected)
        shard = comm.wait(comm.reduce_scatter_start(flat, reduction, world_size))
        torch.testing.assert_close(shard, expected.chunk(world_size)[comm.rank])
    for reduction in ("max", "min"):
        for rank in range(world_size):  # whichever has it
            number = torch.tensor([math.nan if comm.rank == rank else 1.0, -math.inf, math.inf])
            result = comm.wait(comm.all_reduce_start(number, reduction))
            assert result.tolist()[1:] == [-math.inf, math.inf] and result[0].isnan()
            whole = comm.wait(comm.all_reduce_start(number[0], reduction))
            assert whole.shape == () and whole.isnan()
    gathered = comm.gather_whole(torch.full((2,), float(comm.rank)))
    assert_bitwise(gathered, torch.arange(world_size).repeat_interleave(2).float())
    imaginary = torch.full((2,), 1j * comm.rank)
    assert_bitwise(comm.gather_whole(imaginary), gathered * 1j)
    shard = comm.wait(comm.reduce_scatter_start(gathered * 1j, "sum", world_size))
    assert_bitwise(shard, imaginary * world_size)
    received = torch.full((2,), float(comm.rank))
    comm.broadcast(received, 1)
    assert_bitwise(received, torch.ones(2))


def test_a_backends_own_collectives_mean_the_same(ranks):
    # gloo has all of them too, which stands in for NCCL.
    ranks(3).run(check_native_transport)


def of_nccl(monkeypatch, world_size):
    """Return a communicator whose group records the operations that it is asked for, and these."""
    asked, group = [], SimpleNamespace(size=lambda: world_size, rank=lambda: 0)
    monkeypatch.setattr(communication, "_backend_for", lambda device, group: "nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: asked.append(a[1]))
    monkeypatch.setattr(compat.tensors, "start_reduce_scatter", lambda *a, **k: asked.append(a[2]))
    return Communicator(group), asked


def test_nccl_averages_by_itself(monkeypatch):
    """A sum in fp16 overflows where the mean does not, and a division is a kernel more."""
    comm, asked = of_nccl(monkeypatch, 2)
    flat = torch.full((4,), 6e4, dtype=torch.float16)
    assert comm.wait(comm.all_reduce_start(flat, "mean")).equal(flat)
    comm.wait(comm.reduce_scatter_start(flat, "mean", 2))
    comm.wait(comm.reduce_scatter_start(flat, "sum", 2))
    assert asked == [dist.ReduceOp.AVG, dist.ReduceOp.AVG, dist.ReduceOp.SUM]


@pytest.mark.parametrize("world_size", (3, 4, 6, 8))
def test_nccl_averages_in_bf16_only_where_the_factor_is_exact(monkeypatch, world_size):
    """It multiplies by 1/N in the tensor's dtype: in bf16 a third is 0.2 % too large."""
    comm, asked = of_nccl(monkeypatch, world_size)
    factor = torch.tensor(1 / world_size, dtype=torch.bfloat16)
    averages = factor.item() * world_size == 1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        flat = torch.ones(2 * world_size, dtype=dtype)
        by_itself = averages or dtype != torch.bfloat16
        divided = flat if by_itself else flat / world_size
        assert comm.wait(comm.all_reduce_start(flat, "mean")).equal(divided)
        comm.wait(comm.reduce_scatter_start(flat, "mean", world_size))
        assert asked == [dist.ReduceOp.AVG if by_itself else dist.ReduceOp.SUM] * 2
        asked.clear()


def fail_and_go_on(failing):
    """Return what ranks say to the next collective after some of them have failed in a call."""
    group = dist.new_group()  # of this test alone: a rank that has failed may not go on in it
    PeerMemory.decline(group)
    comm, flat = Communicator(group), torch.ones(6)
    with contextlib.suppress(InterruptedError), comm.running(7):
        if failing == "early":
            raise InterruptedError
        comm.wait(comm.all_reduce_start(flat, "mean"))
        if comm.rank == 0 or failing == "all":
            raise InterruptedError
    if comm.rank > 0 and failing == "one":
        return ""  # which waits for the rest of the call, elsewhere
    try:
        with mock.patch.object(communication, "FAILED_TIMEOUT_S", 1.0):
            assert comm.wait(comm.all_reduce_start(flat, "sum")).equal(flat * comm.world_size)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("failing", ("one", "all", "early"))
def test_a_rank_that_failed_alone_in_the_middle_is_kept_from_going_on(ranks_on_sockets, failing):
    """The others would take its next collective of so many bytes for the one they wait in."""
    found = ranks_on_sockets(2).run(fail_and_go_on, failing)
    assert found[1] == ""
    assert ("End the process, and go on from a checkpoint" in found[0]) is (failing == "one")


def check_cuts():
    comm = Communicator.of(None)
    flat = values(comm.rank, 10_007, torch.float32)
    for reduction in ("mean", "sum"):
        whole = comm.wait(comm.all_reduce_start(flat, reduction))
        for cut in (1, 5, 1000, 9_999):
            pieces = [
                comm.all_reduce_start(piece, reduction) for piece in flat.split([cut, 10_007 - cut])
            ]
            assert_bitwise(torch.cat([comm.wait(piece) for piece in pieces]), whole)


@pytest.mark.parametrize("world_size", first(2, WORLDS))
def test_a_sum_does_not_depend_on_how_buffers_are_cut(ranks, world_size):
    ranks(world_size).run(check_cuts)


def count_traffic():
    comm = Communicator.of(None)
    world_size = comm.world_size
    traffic_of(comm).reset()
    flat = torch.ones(world_size * 2000)
    gathered = [comm.all_gather_start(torch.ones(500), world_size) for _ in range(2)]
    started = [
        comm.reduce_scatter_start(flat, "mean", world_size),
        comm.all_reduce_start(flat, "mean"),
        comm.all_reduce_start(torch.ones(1), "mean"),
        comm.all_reduce_start(torch.ones(1), "sum"),
        *gathered,
    ]
    for result in started:
        comm.wait(result)
    comm.broadcast(torch.ones(world_size * 100))
    comm.gather_whole(torch.ones(10))
    # Rank r sends r + 1 elements to each rank.
    mine = comm.rank + 1
    parts = comm.all_to_all(
        torch.ones(world_size * mine), [mine] * world_size, [r + 1 for r in range(world_size)]
    )
    assert parts.numel() == sum(range(world_size + 1))
    for buffer in gathered:
        comm.free(buffer)
    return traffic_of(comm).snapshot()


@pytest.mark.parametrize("world_size", first(2, WORLDS))
def test_counters_equal_the_formula(ranks, world_size):
    others = world_size - 1
    for rank, snapshot in enumerate(ranks(world_size).run(count_traffic)):
        assert snapshot["sent_bytes"] == {
            "gather": 2 * others * 500 * 4,
            # A mean of one element is padded to one per rank.
            "reduce": 3 * others * 2000 * 4 + 2 * others * 4,
            "exchange": others * (rank + 1) * 4,
            "scalar": others * 4,
            "setup": others * 100 * 4 + others * 10 * 4,
        }
        assert snapshot["collectives"] == {
            "all_gather": 3,
            "reduce_scatter": 1,
            "all_reduce": 3,
            "all_to_all": 1,
            "broadcast": 1,
        }
        assert snapshot["gathered_bytes"] == 0


def test_peak_is_of_gathers_alive_together():
    comm = Communicator(None)
    traffic_of(comm)
    one = comm.wait(comm.all_gather_start(torch.ones(10), 1))
    comm.free(one)
    two = comm.all_gather_start(torch.ones(4), 1)
    assert (traffic_of(comm).gathered_bytes, traffic_of(comm).peak_gathered_bytes) == (16, 40)
    traffic_of(comm).reset_peak()
    assert traffic_of(comm).peak_gathered_bytes == 16
    comm.free(comm.wait(two))
    assert traffic_of(comm).gathered_bytes == 0


def test_a_world_of_one_gathers_without_a_copy_and_free_leaves_the_shard():
    comm = Communicator(None)
    shard = torch.arange(4.0)
    gathered = comm.wait(comm.all_gather_start(shard, 1))
    assert gathered is not shard and gathered.data_ptr() == shard.data_ptr()
    comm.free(gathered)
    assert torch.equal(shard, torch.arange(4.0))


def loopback_bytes() -> int:
    for line in open("/proc/net/dev"):
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise AssertionError("no loopback interface")


def send(kind):
    """64 MiB of full tensor, four times; the smallest difference: others use loopback too."""
    comm = Communicator.of(None)
    whole, shard = torch.ones(16 * MIB), torch.ones(16 * MIB // comm.world_size)
    measured = []
    for _ in range(4):
        dist.barrier()
        time.sleep(0.05)
        before = loopback_bytes()
        traffic_of(comm).reset()
        if kind == "gather":
            comm.free(comm.wait(comm.all_gather_start(shard, comm.world_size)))
        else:
            comm.wait(comm.reduce_scatter_start(whole, "sum", comm.world_size))
        counted = traffic_of(comm).sent_bytes[kind]
        dist.barrier()
        measured.append(loopback_bytes() - before)
    return min(measured), counted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/dev")
@pytest.mark.parametrize("kind", ("gather", "reduce"))
def test_the_wire_carries_what_is_counted(ranks_on_sockets, kind):
    results = ranks_on_sockets(2).run(send, kind)
    on_the_wire = min(measured for measured, _ in results)
    counted = sum(counted for _, counted in results)
    assert counted == 64 * MIB
    assert on_the_wire == pytest.approx(counted, rel=0.05)


def soak(steps):
    """12 gathers in flight, other collectives among them, garbage around."""
    comm = Communicator.of(None)
    traffic_of(comm)
    world_size = comm.world_size
    sizes = torch.Generator().manual_seed(0)
    for step in range(steps):
        gathers, reduces = [], []
        for index in range(12):
            numel = int(torch.randint(1, 2000, (1,), generator=sizes))
            gathers.append(comm.all_gather_start(torch.full((numel,), float(index)), world_size))
            if index % 4 == 0:
                flat = torch.full((numel * world_size,), float(index))
                reduces.append(comm.reduce_scatter_start(flat, "mean", world_size))
                reduces.append(comm.all_reduce_start(flat, "mean"))
            garbage = [torch.randn(numel * world_size) for _ in range(3)]
        for index, gathered in enumerate(gathers):
            assert (comm.wait(gathered) == index).all(), (step, index)
            comm.free(gathered)
        for index, reduced in enumerate(reduces):
            assert (comm.wait(reduced) == 4 * (index // 2)).all(), (step, index)
        del garbage
    assert traffic_of(comm).gathered_bytes == 0


@pytest.mark.nightly
def test_soak_with_12_gathers_in_flight(ranks):
    ranks(2).run(soak, 200)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", (2, 4))
def test_soak_of_2000_steps(ranks, world_size):
    ranks(world_size).run(soak, 2000, timeout_s=900)


def start_and_leave(destroy):
    comm = Communicator.of(None)
    for _ in range(12):
        comm.all_gather_start(torch.ones(MIB // 4), comm.world_size)
        comm.all_reduce_start(torch.ones(MIB // 4), "mean")
    if comm.rank == 0:  # one that nobody else joins
        comm.all_gather_start(torch.ones(MIB // 4), comm.world_size)
    if destroy:
        dist.destroy_process_group()


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("peer_memory", first(1, (True, False)))
@pytest.mark.parametrize("destroy", only((True,), (True, False)))
def test_exit_with_work_in_flight_is_clean(destroy, peer_memory):
    # What nobody else joins ends, over sockets, when the group's time is up.
    with closing(Ranks(3, group_timeout_s=10, peer_memory=peer_memory)) as own:
        own.run(start_and_leave, destroy)
        assert own.close() == [0, 0, 0]


def lose_a_rank(folder):
    comm = Communicator.of(None)
    comm.wait(comm.all_reduce_start(torch.ones(1), "sum"))
    dist.barrier()
    if comm.rank == 1:
        os._exit(7)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            comm.wait(comm.all_reduce_start(torch.ones(10_000), "mean"))
    (folder / str(comm.rank)).write_text(caught.value.__notes__[0])


@pytest.mark.parametrize("peer_memory", (True, False))
def test_a_rank_that_dies_ends_the_others_with_a_named_error(tmp_path, peer_memory):
    with closing(Ranks(3, group_timeout_s=5, peer_memory=peer_memory)) as own:
        with pytest.raises(RuntimeError, match="rank 1 died, exit code 7"):
            own.run(lose_a_rank, tmp_path, timeout_s=30)
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text().startswith("in all_reduce of 40000 bytes")


def abandon_and_go_on():
    comm = Communicator.of(None)
    traffic_of(comm)
    for _ in range(3):
        comm.all_gather_start(torch.ones(100), comm.world_size)
        comm.all_reduce_start(torch.ones(100), "mean")
    comm.abandon()
    assert traffic_of(comm).gathered_bytes == 0
    assert_bitwise(comm.wait(comm.all_reduce_start(torch.ones(5), "mean")), torch.ones(5))


def test_a_step_that_failed_on_all_ranks_leaves_the_group_usable(ranks):
    ranks(3).run(abandon_and_go_on)


def check_groups():
    assert Communicator.of(None) is Communicator.of(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    comm = Communicator.of(mesh["dp"])
    assert comm.world_size == 2 and comm is Communicator.of(mesh.get_group("dp"))
    total = comm.wait(comm.all_reduce_start(torch.tensor([dist.get_rank()]), "sum"))
    assert total.item() == sum(dist.get_process_group_ranks(mesh.get_group("dp")))
    with pytest.raises(ValueError, match=r"2 dimensions .*one or two: .*mesh\['dp'\]"):
        Communicator.of(mesh)
    outsiders = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="this rank is in"):
            Communicator.of(outsiders)


def test_a_group_is_a_process_group_or_a_mesh_of_one_dim(ranks):
    ranks(4).run(check_groups)


def make_default_group():
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    assert default_group({}) is None
    group = default_group(os.environ)
    assert group is dist.group.WORLD and group.rank() == rank
    assert default_group({}) is group
    comm = Communicator.of(group)
    comm.all_gather_start(torch.ones(1000), comm.world_size)


def set_torchrun_variables(port):
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the launcher serves the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_default_group_comes_from_torchrun_and_goes_at_exit():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Ranks(2)) as own:
        own.run(set_torchrun_variables, store.port)
        own.run(make_default_group)
        assert own.close() == [0, 0]


def test_refuses_what_cannot_be_meant():
    comm = Communicator(None)
    started = comm.all_gather_start(torch.ones(1), 1)
    with pytest.raises(RuntimeError, match="not in flight"):
        comm.wait(started[:])
    comm.wait(started)
    with pytest.raises(RuntimeError, match="waited on before"):
        comm.wait(started)
