"""Forms of steps trained on the simulated device, in a process that has it."""

from __future__ import annotations

import contextlib
import functools
import gc
import tempfile
import threading
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.nn.attention import SDPBackend, sdpa_kernel

import tests.simulated_device as simulated
import zerofx
import zerofx.runtime.storage.memory as memory
import zerofx.runtime.storage.ring as ring
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.step_forms.form import FORMS
from tests.kit.step_forms.training import (
    assert_close,
    assert_same,
    change_lr,
    eager,
    rank_and_world_size,
    state_of,
    zero,
)
from tests.kit.trainings import moving_small_values
from zerofx.runtime.parameters.snapshots import Snapshot
from zerofx.runtime.storage.copies import Copies

STEPS = 6
TO_ROUNDING = {
    "channels_last_weights": "convolutions are the CPU's on contiguous copies here",
    "parameters_read_after_the_update": "it returns a sum that each rank takes over its shard",
}
"""Forms not bitwise the CPU's, beside those that sum over shards: an accelerator has more padding,
which orders these sums otherwise."""


def give_group_a_device() -> None:
    """Have this rank's group, which is gloo's, serve the simulated device too."""
    simulated.use()
    if not dist.is_initialized() or "sim" in dist.get_backend_config():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("with a device", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,sim:simulated", store=store, rank=rank, world_size=world_size)


def trained_on(
    device: str, name: str, stage: int | None, steps: int = STEPS, options: dict | None = None
) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """Train a form on a device, uncompiled without a stage: its results and its final state."""
    torch._dynamo.reset()
    this = FORMS[name]
    rank, world_size = rank_and_world_size()
    wrap = eager if stage is None else zero(stage, **{"validate": False, **(options or {})})
    with sdpa_kernel(SDPBackend.MATH), torch._dynamo.config.patch(allow_rnn=True):
        torch.manual_seed(rank)
        with torch.device(device):
            training = this.build(wrap)
        results = []
        for number in range(steps):
            if not training.scheduled:
                change_lr(training, number)
            ranks = 1 if this.same_batch else world_size
            batch = this.batch(number, this.rows[number % len(this.rows)] * ranks)
            if not this.same_batch:
                batch = [tensor.chunk(world_size)[rank].clone() for tensor in batch]
            torch.manual_seed(number)
            leaves = pytree.tree_leaves(training.step(*(one.to(device) for one in batch)))
            results.append([torch.as_tensor(leaf).detach().cpu().clone() for leaf in leaves])
        return results, {name: value.cpu() for name, value in state_of(training).items()}


@functools.cache
def expected(name: str, stage: int, steps: int = STEPS) -> tuple:
    """What the CPU computes: uncompiled where that is the same, as one rank and without norms."""
    alone = rank_and_world_size()[1] == 1
    is_plain = alone and (stage == 0 or not FORMS[name].sums_over_shards)
    if is_plain and not FORMS[name].functional_rounding:
        return trained_on("cpu", name, None, steps)
    return trained_on("cpu", name, stage, steps)


class Pinned:
    """The bytes that are pinned, by their address, and the most there have been."""

    def __init__(self) -> None:
        self.by_address: dict[int, int] = {}
        self.peak_nbytes = 0


@contextlib.contextmanager
def pinning() -> Iterator[Pinned]:
    """Have host memory pinned as on CUDA, by registering it, so that copies of it are in streams.

    It is an error to end that while one is under way.
    """
    extension, pinned = simulated.use(), Pinned()
    torch.empty(1, pin_memory=True)  # before, torch takes nothing for pinned

    def register(address: int, nbytes: int, _flags: int) -> int:
        extension.register_host(address, nbytes)
        pinned.by_address[address] = nbytes
        pinned.peak_nbytes = max(pinned.peak_nbytes, sum(pinned.by_address.values()))
        return 0

    def unregister(address: int) -> None:
        extension.unregister_host(address)
        del pinned.by_address[address]

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    with (
        mock.patch.object(memory, "kind", lambda: "cuda"),
        mock.patch.object(torch.cuda, "cudart", lambda: cudart),
    ):
        yield pinned


def check(name: str, stage: int, policy: str, seed: int = 0, options: dict | None = None) -> int:
    """Train on the device under a schedule; return how many values left it for backward.

    Raises: AssertionError unless all is what the CPU computes.
    """
    give_group_a_device()
    results, state = expected(name, stage)
    options = dict(options or {})
    with contextlib.ExitStack() as stack:
        if options.get("offload_tier") == "nvme":
            options["offload_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(simulated.schedule(policy, seed))
        stack.enter_context(pinning())
        stack.enter_context(moving_small_values())
        leaving = mock.patch.object(
            Copies, "offload_start", autospec=True, side_effect=Copies.offload_start
        )
        moves = stack.enter_context(leaving)
        ours, our_state = trained_on("sim", name, stage, options=options)
    is_exact = not FORMS[name].sums_over_shards and name not in TO_ROUNDING
    same = assert_same if is_exact else assert_close
    for number, (mine, theirs) in enumerate(zip(ours, results, strict=True)):
        for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            same(one, other, f"result {position} of step {number}")
    assert our_state.keys() == state.keys()
    for key in state:
        same(our_state[key], state[key], key)
    return moves.call_count


def check_save(
    folder: str,
    stage: int,
    policy: str,
    seed: int = 0,
    ring_bytes: tuple[int, int] = (ring.RING_BYTES, ring.CHUNK_BYTES),
    thread_begins_after: int = 0,
) -> None:
    """Save beside a training that goes on: what is loaded is what was there at the save.

    It goes through a ring of so many bytes in chunks of so many, which are all that is pinned.  The
    thread that copies begins after so many steps, whose updates then have to.
    """
    give_group_a_device()
    torch._dynamo.reset()
    may_run, run = threading.Event(), Snapshot.run

    def waiting(snapshot: Snapshot) -> None:
        may_run.wait(60)
        run(snapshot)

    with (
        simulated.schedule(policy, seed),
        pinning() as pinned,
        mock.patch.multiple(ring, RING_BYTES=ring_bytes[0], CHUNK_BYTES=ring_bytes[1]),
        mock.patch.object(Snapshot, "run", waiting),
    ):
        torch.manual_seed(0)
        model = Mlp().to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @zero(stage, validate=False)
        def step(*batch):
            loss = squared_loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def train(number: int) -> None:
            # The loss is read: late, the updates then run and the copies of the save do not.
            step(*(one.to("sim") for one in features(number, 4))).item()

        train(0)
        then = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        saving = zerofx.save(folder, model, optimizer, asynchronous=True)
        for number in range(1, 4):
            if number > thread_begins_after:
                may_run.set()
            train(number)
        may_run.set()
        saving.wait()
        gc.collect()
        assert pinned.peak_nbytes == ring_bytes[0] and not pinned.by_address
        zerofx.load(folder, model, optimizer)
        for name, value in model.state_dict().items():
            assert_same(value.cpu(), then[name], name)
