"""Any accelerator that torch knows: nothing but its name tells it from CUDA."""

import gc
import operator
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import zerofx.checkpoint.contents as contents
import zerofx.runtime.comm.communication as communication
import zerofx.runtime.storage.copies as copies
import zerofx.runtime.storage.memory as memory
from tests.kit.fake_cuda import Cuda
from zerofx import accelerator, compat
from zerofx.accelerator import check_copies_beside, is_accelerator, kind, module_of
from zerofx.checkpoint.barrier import Saving
from zerofx.errors import StepError
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.comm.communication import TORCHRUN_VARIABLES, default_group
from zerofx.runtime.memory.flat import with_own_storage
from zerofx.runtime.parameters import snapshots
from zerofx.runtime.parameters.parameter import ShardBucket
from zerofx.runtime.storage.bucket import ValueBucket
from zerofx.worker import Worker


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_a_device_is_asked_for_by_its_own_module(name):
    device = torch.device(name)
    assert is_accelerator(device)
    assert module_of(device) is getattr(torch, name)


def test_the_cpu_and_meta_are_no_accelerators():
    assert not any(map(is_accelerator, map(torch.device, ("cpu", "meta"))))


@pytest.mark.parametrize(
    "name, backend", [(None, "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_a_group_that_is_made_has_the_accelerators_own_backend(monkeypatch, name, backend):
    asked = []
    monkeypatch.setattr(communication, "kind", lambda: name)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: asked.append((*a, k)))
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(asked))
    monkeypatch.setattr(communication.atexit, "register", lambda *_: None)
    device = torch.device(name or "cpu", None if name is None else 3)
    default_group(dict.fromkeys(TORCHRUN_VARIABLES, "1"), device)
    assert asked == [(backend, {"device_id": device} if name else {})]


def test_ranks_on_one_device_are_told_what_to_do(monkeypatch):
    def refuse(*_arguments, **_more):
        raise RuntimeError("NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on 50000")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RuntimeError, match="Duplicate GPU") as caught:
        default_group(dict.fromkeys(TORCHRUN_VARIABLES, "1"))
    assert "set_device(int(os.environ['LOCAL_RANK']))" in caught.value.__notes__[0]


@pytest.fixture
def third_device(monkeypatch):
    """The device 3 is current in this thread; by thread, those that have been made current."""
    made_current = {}
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: made_current.update({threading.get_ident(): index}),
    )
    return made_current


def test_threads_have_the_device_of_the_one_that_starts_them(third_device, tmp_path):
    saving = Saving(tmp_path)
    threads = []
    saving.start(lambda: threads.append(threading.get_ident()))
    saving.wait()
    threads.append(Worker("a test").start(threading.get_ident).result())
    threads.append(compat.inductor._in_thread_of_its_own(threading.get_ident))
    assert third_device == dict.fromkeys(threads, 3) and threading.get_ident() not in threads


def test_a_storage_of_its_own_is_made_on_any_device(monkeypatch):
    """``__dlpack__`` refuses the memory of a device that is not the current one."""
    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    flat, info = torch.ones(2), SimpleNamespace(shape=(2,), stride=(1,))
    alone = with_own_storage(flat, info)
    assert alone.data_ptr() == flat.data_ptr()
    assert alone.untyped_storage()._cdata != flat.untyped_storage()._cdata


def test_a_copy_to_a_device_leaves_its_memory_to_one_stream(monkeypatch):
    """What waits for it orders the rest; noted for both streams, memory would come back late."""
    cuda = Cuda()
    monkeypatch.setattr(copies, "is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(copies, "module_of", lambda device: cuda)
    moves = copies.Copies(memory.HostMemory())
    started = moves.to_device_start([torch.ones(4)], torch.device("meta"))  # has no record_stream
    assert moves.wait(started) is started and "current after event of stream0" in cuda.asked


def test_pinned_memory_goes_when_nothing_copies_it_any_more(monkeypatch):
    calls = []
    cudart = mock.MagicMock()
    cudart.cudaHostRegister.return_value = 0
    cudart.cudaHostUnregister = lambda address: calls.append("unregistered")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(memory, "kind", lambda: "cuda")
    host = memory.HostMemory()
    values = host.empty(4096, torch.float32, pinned=True)
    event = mock.MagicMock(synchronize=lambda: calls.append("copied"))
    host.is_copied_until(event, values, "stream")
    del values
    gc.collect()
    assert calls == ["copied", "unregistered"]


def test_regions_have_no_cuda_graphs_whatever_torch_is_told(monkeypatch):
    """TORCHINDUCTOR_CUDAGRAPHS=1 is for a whole program, of which regions are parts."""
    import torch._inductor.compile_fx as inductor

    seen, compile_inner = [], inductor.compile_fx_inner

    def inner(*arguments, **options):
        seen.append(torch._inductor.config.triton.cudagraphs)
        return compile_inner(*arguments, **options)

    monkeypatch.setattr(inductor, "compile_fx_inner", inner)
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    compat.inductor.mark_emptied(values)
    ones = graph.call_function(operator.getitem, (values, 0))
    graph.output((graph.call_function(torch.ops.aten.exp.default, (ones,)),))
    gm = torch.fx.GraphModule({}, graph)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch({"triton.cudagraphs": True}), uncached:
        run = compat.inductor.compile_with_inductor(gm, [[torch.ones(3)]], donated=[0])
    assert run([torch.zeros(3)])[0].equal(torch.ones(3)) and seen == [False]


def test_a_device_without_streams_is_refused_by_what_it_lacks(monkeypatch):
    monkeypatch.delattr(torch.mps, "Stream", raising=False)  # from torch 2.15 on it has them
    with pytest.raises(
        StepError, match=r"no torch.mps.Stream, .*leave out offload, and save without"
    ):
        check_copies_beside(torch.device("mps"))
    check_copies_beside(torch.device("cuda"))
    copy = snapshots._Copy(torch.nn.Parameter(torch.ones(1)), [], torch.ones, "a state")
    copy._sources = [(SimpleNamespace(device=torch.device("mps")), 0)]
    with pytest.raises(StepError, match="torch.mps.Stream"):
        copy.start({})


def test_a_machine_without_one_has_no_kind(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert kind() is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert kind() == "xpu"


def test_an_accelerator_that_is_not_cuda_needs_nothing_of_cuda(monkeypatch):
    for module in (contents, memory):
        monkeypatch.setattr(module, "kind", lambda: "mps")
    assert "mps" not in contents.rng_state(torch.nn.Linear(1, 1))
    values = memory.HostMemory().empty(4096, torch.float32, pinned=True)
    assert not values.is_pinned()


def test_host_memory_is_pinned_for_values_that_an_accelerator_uses(monkeypatch):
    """And not because the machine has one: a training on its CPU leaves that alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    for device in map(torch.device, ("cpu", "cuda:1")):
        info = ParameterInfo(0, "w", (4,), (1,), torch.float32, device, True, 1)
        buckets = [ShardBucket(None, "", [info]), ValueBucket(None, "", 4, device)]
        assert [bucket.is_pinned for bucket in buckets] == [device.type == "cuda"] * 2


def test_random_numbers_are_those_of_the_models_device(monkeypatch):
    """A rank may compute on another device than its current one."""
    generators = {number: torch.Generator().manual_seed(number) for number in (0, 3)}

    def of(device="cuda"):
        return generators[torch.device(device).index or 0]  # the current one is the first

    device_module = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state=lambda *device: of(*device).get_state(),
        set_rng_state=lambda state, *device: of(*device).set_state(state),
    )
    monkeypatch.setattr(contents, "kind", lambda: "cuda")
    monkeypatch.setattr(contents, "module_of", lambda device: device_module)
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(1, device="cuda:3"))
    model = torch.nn.ParameterList([parameter])
    state, other = contents.rng_state(model), generators[0].get_state()
    assert state["cuda"].equal(generators[3].get_state())
    drawn = torch.rand(4, generator=generators[3])
    contents.set_rng_state(state, model)
    assert torch.rand(4, generator=generators[3]).equal(drawn)
    assert generators[0].get_state().equal(other)
    assert contents.rng_state(torch.nn.Linear(1, 1))["cuda"].equal(other)  # computes on the CPU
