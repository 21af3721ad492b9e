"""ZeroAccelerator: a loop of Accelerate's on several ranks trains as torch alone would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType, DynamoBackend, load_checkpoint_in_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainers import as_torchrun
from zerofx.errors import CheckpointError, RankError, StepError
from zerofx.integrations.accelerate import ZeroAccelerator, _check

ROWS, CLASSES, MOST = 24, 3, 0.5


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, CLASSES))


def training():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
    return model, optimizer, schedule


def batches(rows: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 8, generator=generator)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=rows)


def loss_of(model, x, y):
    model[2].eval()  # its statistics would be each rank's own
    return F.cross_entropy(model(x), y)


class Loop:
    """A loop of Accelerate's."""

    def __init__(self, rows: int, zero: dict | None = None, **given):
        options = {"lowering": "eager", **(zero or {})}
        self.accelerator = accelerator = ZeroAccelerator(zero=options, cpu=True, **given)
        model, optimizer, schedule = training()
        made = accelerator.prepare(model, optimizer, batches(rows), schedule)
        model, optimizer, self.loader, self.schedule = made
        self.model, self.optimizer = model, optimizer

        @accelerator.compile
        def step(x, y):
            loss, norm = loss_of(model, x, y), None
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        @accelerator.compile
        @torch.no_grad()
        def evaluate(x, y):
            return loss_of(model, x, y)

        self.step, self.evaluate = step, evaluate

    def epoch(self, to: int | None = None) -> list[float]:
        """Train; return the mean of the ranks' losses, and of each update the norm and rate."""
        found: list[float] = []
        for x, y in list(self.loader)[:to]:
            with self.accelerator.accumulate(self.model):
                loss, norm = self.step(x, y)
                self.schedule.step()
            found.append(self.accelerator.reduce(loss.detach(), "mean").item())
            if norm is not None:
                found += [norm.item(), *self.schedule.get_last_lr()]
        return found


def train_on_rank(rows, zero=None, **given):
    with as_torchrun():
        loop = Loop(rows, zero, **given)
        found = [*loop.epoch(), *loop.epoch()]
        return found, loop.accelerator.get_state_dict(loop.model)


def train_alone(rows, micro_batches=1, per_update=1):
    """Train as torch would: the schedule takes as many steps at once as there are ranks."""
    model, optimizer, schedule = training()
    found = []
    for at, (x, y) in enumerate([*batches(rows), *batches(rows)]):
        loss = loss_of(model, x, y)
        (loss / micro_batches).backward()
        found.append(loss.item())
        if (at + 1) % micro_batches == 0:
            norm = clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(per_update):
                schedule.step()
            found += [norm.item(), *schedule.get_last_lr()]
    return found, model.state_dict()


def check(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


@pytest.mark.slow(reason="two ranks train through Accelerate")
@pytest.mark.parametrize("micro_batches", (3, pytest.param(1, marks=pytest.mark.nightly)))
def test_a_loop_trains_as_torch_does_with_all_batches(micro_batches, ranks):  # noqa: F811
    given = {"gradient_accumulation_steps": micro_batches}
    found = ranks(2).run(_run, 4, None, given, timeout_s=300)
    expected, values = train_alone(8, micro_batches, per_update=2)
    for losses, state in found:
        check(losses, expected)
        assert not state or state.keys() == values.keys()
    assert not found[1][1], "the main process alone has the values"
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, values[name], rtol=1e-4, atol=1e-5)


def _run(rows, zero, given):
    return train_on_rank(rows, zero, **given)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize(
    "zero",
    ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"lowering": "inductor"}, {"loss": "global"}),
    ids=str,
)
def test_options_of_the_backend(zero, num_ranks, ranks):  # noqa: F811
    found = ranks(num_ranks).run(_run, 12 // num_ranks, zero, {}, timeout_s=600)
    expected, _ = train_alone(12, per_update=num_ranks)
    check(found[0][0], expected)


def adapters_on_rank(folder):
    with as_torchrun():
        accelerator = ZeroAccelerator(zero={"lowering": "eager", "stage": 3}, cpu=True)
        config = LoraConfig(target_modules=["0"], modules_to_save=["3"], r=2)
        model = get_peft_model(built(), config)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=1e-2))

        @accelerator.compile
        def step(x):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        step(torch.ones(2, 8))
        state, is_main = accelerator.get_state_dict(model), accelerator.is_main_process
        model.save_pretrained(folder, is_main_process=is_main, state_dict=state)
        with zerofx.full_params(model):
            own = model.get_submodule("base_model.model.3.modules_to_save.default")
            return {name: value.detach().clone() for name, value in own.named_parameters()}


@pytest.mark.nightly
def test_adapters_are_saved_as_the_library_saves_them(ranks, tmp_path):  # noqa: F811
    found, other = ranks(2).run(adapters_on_rank, str(tmp_path), timeout_s=300)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("lora_" in name for name in saved) == 2
    for name, value in found.items():
        assert torch.equal(value, other[name])
        assert torch.equal(saved[f"base_model.model.3.{name}"], value)


def in_bfloat16(rows):
    with as_torchrun():
        loop = Loop(rows, mixed_precision="bf16")
        return loop.epoch(), loop.model[0].weight.dtype


@pytest.mark.nightly
def test_mixed_precision_is_that_of_accelerate(ranks):  # noqa: F811
    (found, dtype), _ = ranks(2).run(in_bfloat16, 4, timeout_s=300)
    model, optimizer, schedule = training()
    expected = []
    for x, y in batches(8):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.eval()(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(), schedule.step()
        expected += [loss.item(), norm.item(), *schedule.get_last_lr()]
    assert dtype == torch.float32
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-2)


def saved_midway(rows, folder):
    with as_torchrun():
        loop = Loop(rows)
        loop.epoch(to=1)
        loop.accelerator.save_state(folder)  # to be written over
        loop.epoch(to=1)
        loop.accelerator.save_state(folder)
        loop.accelerator.save_model(loop.model, f"{folder}/model")
        return loop.epoch(), [loop.evaluate(x, y).item() for x, y in loop.loader]


def resumed(rows, folder):
    with as_torchrun():
        loop = Loop(rows)
        if rows == 2:
            loop.epoch()
        loop.accelerator.load_state(folder)
        return loop.epoch(), [loop.evaluate(x, y).item() for x, y in loop.loader]


@pytest.mark.nightly
def test_what_two_ranks_save_is_resumed_on_others(ranks, tmp_path):  # noqa: F811
    folder = str(tmp_path / "saved")
    (whole, last), _ = ranks(2).run(saved_midway, 6, folder, timeout_s=300)
    # The schedule goes on by as many as there are ranks, as Accelerate has it: losses at first.
    for num_ranks in (1, 2, 3):
        (losses, _), *_ = ranks(num_ranks).run(resumed, 12 // num_ranks, folder, timeout_s=300)
        check(losses[:2], whole[:2])
    (again, end), _ = ranks(2).run(resumed, 6, folder, timeout_s=300)
    check(again, whole)
    check(end, last)
    model = built()
    load_checkpoint_in_model(model, f"{folder}/model")
    assert not torch.equal(model[0].weight, built()[0].weight)


class TwoModels:
    """Two models under one optimizer, prepared as one."""

    def __init__(self):
        torch.manual_seed(0)
        parts = {"unet": nn.Linear(8, CLASSES), "text_encoder": nn.Linear(8, 8)}
        self.models = nn.ModuleDict(parts)
        self.optimizer = torch.optim.AdamW(self.models.parameters(), lr=1e-2)

    def compiled(self):
        zero = {"lowering": "eager", "stage": 3}
        accelerator = ZeroAccelerator(zero=zero, cpu=True)
        models, optimizer = accelerator.prepare(self.models, self.optimizer)

        @accelerator.compile
        def step(x, y):
            loss = F.cross_entropy(models["unet"](models["text_encoder"](x)), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return accelerator, step

    def losses(self):
        """Train as torch would."""
        found = []
        for x, y in batches(8):
            loss = F.cross_entropy(self.models["unet"](self.models["text_encoder"](x)), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found


def two_models_resumed(folder):
    """Train and save after a batch; go on with that, and with others that load it."""
    first, *rest = batches(8)
    with as_torchrun():
        accelerator, step = TwoModels().compiled()
        found = [step(*first).item()]
        accelerator.save_state(folder)
        found += [step(*batch).item() for batch in rest]
        accelerator, step = TwoModels().compiled()
        accelerator.load_state(folder)
        return found, [step(*batch).item() for batch in rest]


@pytest.mark.nightly
def test_two_models_under_one_optimizer_are_prepared_as_one(ranks, tmp_path):  # noqa: F811
    folder = str(tmp_path / "saved")
    ((found, again),) = ranks(1).run(two_models_resumed, folder, timeout_s=300)
    expected = TwoModels().losses()
    check(found, expected)
    check(again, expected[1:])


class Unsaved:
    """An object of the user's whose state cannot be saved the second time."""

    times = 0

    def state_dict(self):
        self.times += 1
        if self.times == 2:
            raise OSError("as if killed here")
        return {}

    def load_state_dict(self, state):
        pass


def saved_in_part(folder):
    """Save once, and once in part; return what is said of loading that, and what is left then."""
    with as_torchrun():
        loop = Loop(4)
        loop.accelerator.register_for_checkpointing(Unsaved())
        loop.accelerator.save_state(folder)
        loop.schedule.step()
        rate, bias = loop.schedule.get_last_lr(), loop.model[0].bias.tolist()
        with torch.no_grad():
            loop.model[0].bias += 1
        with pytest.raises((OSError, RankError), match="as if killed here"):
            loop.accelerator.save_state(folder)
        with pytest.raises(CheckpointError) as caught:
            loop.accelerator.load_state(folder)
        assert loop.schedule.get_last_lr() == rate, "nothing was loaded"
        zerofx.load(f"{folder}/zero", loop.model)
        assert loop.model[0].bias.tolist() == bias
        loop.accelerator.save_state(folder)
        loop.accelerator.load_state(folder)
        return str(caught.value)


def test_a_state_that_was_saved_in_part_is_not_loaded(ranks, tmp_path):  # noqa: F811
    for message in ranks(2).run(saved_in_part, str(tmp_path / "saved")):
        assert "was not saved to the end" in message and "Load another checkpoint" in message


def counted(folder):
    """Return the count of micro-batches that a rank goes on with, of which the first has saved."""
    with as_torchrun():
        accelerator = Loop(4, gradient_accumulation_steps=3).accelerator
        accelerator.step = 2
        accelerator.save_state(folder)
        if not accelerator.is_main_process:  # as if it had not been there
            Path(folder, f"random_states_{accelerator.process_index}.pkl").unlink()
        accelerator.step = 0
        accelerator.load_state(folder)
        return accelerator.step


def test_a_rank_that_has_come_later_counts_micro_batches_as_the_others(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(counted, str(tmp_path / "saved")) == [2, 2]


def refusal(given):
    with as_torchrun():
        return str(pytest.raises(ValueError, ZeroAccelerator, cpu=True, **given).value)


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"mixed_precision": "fp16"}, "train with fp16: bf16 needs no scaling of the loss"),
        ({"dynamo_backend": "inductor"}, "train with dynamo_backend: the whole step is compiled"),
    ),
    ids=str,
)
def test_what_does_not_go_together_is_refused_when_it_is_made(given, message, ranks):  # noqa: F811
    assert all(message in found for found in ranks(2).run(refusal, given))


@pytest.mark.parametrize(
    ("state", "config", "message"),
    (
        ({"distributed_type": DistributedType.FSDP}, None, r"FSDP: zero=\{'stage': 3\} shards"),
        ({"distributed_type": DistributedType.DEEPSPEED}, None, r"DeepSpeed: zero=\{'stage': 3\}"),
        ({"distributed_type": DistributedType.MEGATRON_LM}, None, r"Megatron-LM: zero=\{'stage'"),
        ({"distributed_type": DistributedType.XLA}, None, "XLA: it has a compiler of its own"),
        ({"mixed_precision": "fp8"}, None, "fp8: no kernel of its products"),
        ({}, "a config", "parallelism_config: all ranks share the batches"),
    ),
    ids=str,
)
def test_so_is_what_needs_another_machine(state, config, message):
    """As Accelerator would have it there: on a CPU it does not get so far."""
    plain = {"distributed_type": DistributedType.MULTI_CPU, "mixed_precision": "no"}
    plugin = SimpleNamespace(backend=DynamoBackend.NO)
    as_made = SimpleNamespace(**{**plain, **state}, dynamo_plugin=plugin)
    with pytest.raises(ValueError, match=f"ZeroAccelerator cannot train with {message}"):
        _check(SimpleNamespace(state=as_made, parallelism_config=config))
    _check(
        SimpleNamespace(
            state=SimpleNamespace(**plain, dynamo_plugin=plugin), parallelism_config=None
        )
    )


def misused():
    with as_torchrun():
        loop = Loop(4)
        x, y = next(iter(loop.loader))
        with pytest.raises(StepError, match=r"belongs into a function that accelerator\.compile"):
            loop.accelerator.backward(loss_of(loop.model, x, y))

        @loop.accelerator.compile
        def step(x, y):
            with loop.accelerator.accumulate(loop.model):
                loss = loss_of(loop.model, x, y)
                loop.accelerator.backward(loss)
            return loss

        with pytest.raises(Exception, match="put it around the call"):
            step(x, y)
        with pytest.raises(StepError, match=r"behind the loop: while zerofx\.no_data\(step\)"):
            loop.accelerator.join_uneven_inputs([loop.model], even_batches=False)
        uneven = ZeroAccelerator(zero={"uneven": 1}, gradient_accumulation_steps=2, cpu=True)
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2: .*even_batches=True"):
            uneven.compile(step)
        sharded = fully_shard(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="wrapped in .* already.*give the plain one"):
            loop.accelerator.prepare(sharded)
        wrapped = nn.Linear(2, 2)
        assert loop.accelerator.prepare(nn.parallel.DistributedDataParallel(wrapped)) is wrapped


def without_batches_at_the_end():
    with as_torchrun():
        loop = Loop(4, {"uneven": 1, "stage": 3})
        seen = list(loop.loader)
        rank = loop.accelerator.process_index
        for x, y in seen[: 2 - rank]:
            loop.step(x, y)
        others = []
        while number := zerofx.no_data(loop.step):
            others.append(number)
        return others


@pytest.mark.nightly
def test_a_rank_without_batches_goes_with_the_others(ranks):  # noqa: F811
    assert ranks(2).run(without_batches_at_the_end) == [[], [1]]


def test_what_belongs_elsewhere_is_said(ranks):  # noqa: F811
    ranks(2).run(misused)
