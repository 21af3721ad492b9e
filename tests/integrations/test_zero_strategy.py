"""ZeroStrategy: Lightning's Trainer, and Fabric, on several ranks train as in one process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricsMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainers import as_torchrun
from zerofx import full_params
from zerofx.errors import RankError
from zerofx.integrations import fabric as of_fabric
from zerofx.integrations.lightning import ZeroStrategy

ROWS, CLASSES, MOST = 24, 3, 0.5

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning").setLevel(logging.ERROR)


def rate(update: int) -> float:
    return 1 / (1 + update)


class Classifier(pl.LightningModule):
    """Logs a loss of each step, and what it has seen of a batch."""

    def __init__(self, rate_s: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss, sync_dist=True)
        self.log_dict(
            {"right": (out.argmax(-1) == y).float().mean()}, on_epoch=True, sync_dist=True
        )
        return {"loss": loss, "largest": out.max()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch, batch_idx):
        self.log("held_out", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("tested", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate_s)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(rows: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 8, generator=generator)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    data = TensorDataset(inputs, targets)
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
    return DataLoader(data, batch_size=rows, sampler=sampler)


def trainer_of(folder, strategy, ranks, **given):
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        default_root_dir=folder,
        **quiet,
        **{"max_epochs": 2, "gradient_clip_val": MOST, **given},
    )


def strategy_of(zero: dict | None = None) -> ZeroStrategy:
    return ZeroStrategy(zero={"lowering": "eager", "stage": 3, **(zero or {})})


def found_of(trainer, model):
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rates = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    return model.losses, metrics, rates, trainer.global_step


def fit_on_rank(folder, rows, given, zero=None, checkpoint=None):
    with as_torchrun():
        trainer, model = trainer_of(folder, strategy_of(zero), _ranks(), **given), Classifier()
        trainer.fit(model, batches(rows), batches(rows), ckpt_path=checkpoint)
        return found_of(trainer, model)


def fit_and_count(folder) -> int:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        return len(fit_on_rank(folder, 8, {})[0])


@pytest.mark.slow(reason="compiles a step and an evaluation")
def test_a_step_and_an_evaluation_are_compiled_once(ranks, tmp_path):  # noqa: F811
    assert ranks(1).run(fit_and_count, str(tmp_path)) == [6]


def _ranks() -> int:
    return dist.get_world_size()


def fit_alone(folder, rows, given):
    trainer, model = trainer_of(folder, "auto", 1, **given), Classifier()
    trainer.fit(model, batches(rows), batches(rows))
    return found_of(trainer, model)


def check(found, expected):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), **CLOSE)
    assert found[1].keys() == expected[1].keys() and {"held_out", "right"} < found[1].keys()
    for name, value in found[1].items():
        assert value == pytest.approx(expected[1][name], rel=2e-6, abs=1e-6), name
    assert found[2:] == expected[2:]


CLOSE = {"rtol": 2e-6, "atol": 1e-6}


@pytest.mark.nightly
@pytest.mark.parametrize("micro_batches", (1, 3))
def test_losses_metrics_rates_and_steps_are_those_of_one_process(micro_batches, ranks, tmp_path):  # noqa: F811
    given = {"accumulate_grad_batches": micro_batches}
    found = ranks(2).run(fit_on_rank, str(tmp_path / "two"), 4, given, timeout_s=300)
    expected = fit_alone(str(tmp_path / "one"), 8, given)
    for each in found:
        check(each, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize(
    ("given", "zero"),
    (
        ({}, {"stage": 1}),
        ({}, {"lowering": "inductor"}),
        ({}, {"loss": "global"}),
        ({"gradient_clip_algorithm": "value"}, {}),
        ({"gradient_clip_val": -1.0}, {}),
        ({"precision": "64-true"}, {}),
    ),
    ids=str,
)
def test_every_way_to_train(given, zero, num_ranks, ranks, tmp_path):  # noqa: F811
    several = str(tmp_path / "several"), 12 // num_ranks, given, zero
    found = ranks(num_ranks).run(fit_on_rank, *several, timeout_s=600)
    check(found[0], fit_alone(str(tmp_path / "one"), 12, given))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ("bf16-mixed", "bf16-true"))
def test_precision_is_that_of_lightning(precision, ranks, tmp_path):  # noqa: F811
    given = {"precision": precision}
    found = ranks(2).run(fit_on_rank, str(tmp_path / "two"), 6, given, timeout_s=300)
    losses, metrics, *_ = fit_alone(str(tmp_path / "one"), 12, given)
    torch.testing.assert_close(
        torch.tensor(found[0][0]), torch.tensor(losses), rtol=1e-2, atol=1e-2
    )
    assert found[0][1]["held_out"] == pytest.approx(metrics["held_out"], rel=1e-2)


class Penalised(Classifier):
    """Has a loss of parameters that the optimizer does not have; makes tensors without a dtype."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        assert torch.full((), 0.1).dtype == self.net[0].weight.dtype
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss + 100 * self.other.weight.square().sum() * torch.tensor(0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=1e-1)


def weights(kind, folder, strategy, ranks, given):
    trainer, model = trainer_of(folder, strategy, ranks, max_epochs=1, **given), kind()
    trainer.fit(model, batches(ROWS // 2 // ranks))
    with full_params(model):
        return [parameter.detach().clone() for parameter in model.net.parameters()]


def weights_on_rank(kind, folder, given):
    with as_torchrun():
        return weights(kind, folder, strategy_of(), _ranks(), given)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ("32-true", "64-true", "bf16-true"))
def test_the_norm_is_of_what_the_optimizer_has_and_the_dtype_is_lightnings(
    precision,
    ranks,  # noqa: F811
    tmp_path,
):
    given = {"precision": precision}
    found = ranks(1).run(weights_on_rank, Penalised, str(tmp_path), given, timeout_s=300)[0]
    close = {"rtol": 2e-2, "atol": 1e-3} if precision == "bf16-true" else CLOSE
    torch.testing.assert_close(found, weights(Penalised, tmp_path, "auto", 1, given), **close)


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        first = nn.Linear(8, 32, bias=False)  # a bias's gradient would be zero but for rounding
        self.net = nn.Sequential(first, nn.BatchNorm1d(32), nn.Linear(32, CLASSES))


@pytest.mark.nightly
def test_batch_norms_are_synchronised_as_lightning_is_told(ranks, tmp_path):  # noqa: F811
    given = {"sync_batchnorm": True}
    found = ranks(2).run(weights_on_rank, Normalised, str(tmp_path), given, timeout_s=300)[0]
    expected = weights(Normalised, tmp_path, "auto", 1, {})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def predict_unequally(folder):
    with as_torchrun():
        trainer, model = trainer_of(folder, strategy_of(), _ranks(), max_epochs=1), Classifier()
        trainer.fit(model, batches(4))
        five = TensorDataset(torch.zeros(5, 8))
        with pytest.raises(
            ValueError, match=r"as many batches as ranks have here, \[\[3\], \[2\]\]"
        ):
            trainer.predict(model, DataLoader(five))
        sampler = DistributedSampler(five, shuffle=False)
        return len(trainer.predict(model, DataLoader(five, sampler=sampler)))


@pytest.mark.nightly
def test_ranks_predict_as_many_batches_or_say_so(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(predict_unequally, str(tmp_path), timeout_s=300) == [3, 3]


@pytest.mark.nightly
def test_a_checkpoint_of_two_ranks_is_resumed_on_others(ranks, tmp_path):  # noqa: F811
    given = {"max_epochs": 3}
    whole = ranks(2).run(fit_on_rank, str(tmp_path / "two"), 6, given, timeout_s=300)[0]
    first = {"max_epochs": 1}
    ranks(2).run(fit_on_rank, str(tmp_path / "first"), 6, first, timeout_s=300)
    (saved,) = Path(tmp_path / "first" / "checkpoints").iterdir()
    assert saved.is_dir()
    for num_ranks in (1, 2, 3):
        settings = str(tmp_path / f"on {num_ranks}"), 12 // num_ranks, given, None, str(saved)
        losses, metrics, rates, steps = ranks(num_ranks).run(fit_on_rank, *settings, timeout_s=300)[
            0
        ]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole[0][2:]), **CLOSE)
        assert metrics["held_out"] == pytest.approx(whole[1]["held_out"], rel=2e-6)
        assert (rates, steps) == whole[2:]


def whole_life(folder):
    with as_torchrun():
        saving = pl.callbacks.ModelCheckpoint(
            folder, "best", monitor="held_out", save_weights_only=True
        )
        trainer = trainer_of(folder, strategy_of(), _ranks(), callbacks=[saving])
        model, given = Classifier(), batches(4)
        before = trainer.validate(model, given, verbose=False)
        trainer.fit(model, given, given)
        (tested,) = trainer.test(model, given, verbose=False)
        (best,) = trainer.validate(model, given, ckpt_path="best", verbose=False)
        predicted = trainer.predict(model, given)
        trainer.save_checkpoint(f"{folder}/last.ckpt", weights_only=True)
        return (
            before,
            tested,
            best,
            len(predicted),
            float(trainer.checkpoint_callback.best_model_score),
        )


@pytest.mark.nightly
def test_all_that_a_trainer_does(ranks, tmp_path):  # noqa: F811
    (_, tested, best, predicted, score), _ = ranks(2).run(whole_life, str(tmp_path), timeout_s=300)
    assert predicted == 3 and best["held_out"] == pytest.approx(score)
    loaded = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    mean = sum(F.cross_entropy(loaded.net(x), y).item() for x, y in batches(8)) / 3
    assert mean == pytest.approx(tested["tested"], rel=1e-5)


class Apart(Classifier):
    """Begins on each rank with other weights."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.net[0].bias, 1.0 + dist.get_rank())

    def predict_step(self, batch, batch_idx):
        return self.net[0].bias.mean().item()


def before_a_fit(folder):
    with as_torchrun():
        return trainer_of(folder, strategy_of(), _ranks()).predict(Apart(), batches(12))


@pytest.mark.nightly
def test_an_evaluation_before_a_training_is_of_the_first_ranks_weights(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(before_a_fit, str(tmp_path)) == [[1.0], [1.0]]


def several_trainers_and_modules(folder):
    """Train a module, and have another trainer test it; have the first one fit another module."""
    with as_torchrun():
        given = {"max_steps": 1, "precision": "64-true"}
        trainer, model = trainer_of(folder, strategy_of(), 1, **given), Classifier()
        trainer.fit(model, batches(8))
        other = Classifier()
        trainer.fit(other, batches(8))  # it has made its one step
        again = trainer_of(folder, strategy_of(), 1, **given)
        (tested,) = again.test(model, batches(8), verbose=False)
        return tested["tested"], other.net[0].weight.dtype


@pytest.mark.nightly
def test_a_module_is_in_shards_for_any_trainer_and_another_is_not(ranks, tmp_path):  # noqa: F811
    (found,) = ranks(1).run(several_trainers_and_modules, str(tmp_path), timeout_s=300)
    assert found == (pytest.approx(1.1, abs=0.5), torch.float64)


def refuse(*arguments, **named):
    raise OSError("No space left on device")


def saved_in_part(folder):
    """Save, and save once more without room for the rest; return what is gone on from."""
    with as_torchrun():
        trainer, model = trainer_of(folder, strategy_of(), _ranks(), max_steps=1), Classifier()
        trainer.fit(model, batches(4))
        with full_params(model):
            bias = model.net[0].bias.tolist()
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        trainer.fit_loop.epoch_loop.max_steps = 2
        trainer.fit(model, batches(4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.strategy.checkpoint_io, "save_checkpoint", refuse)
            with pytest.raises((OSError, RankError), match="No space left on device"):
                trainer.save_checkpoint(f"{folder}/last.ckpt")
            with pytest.raises((OSError, RankError), match="No space left on device"):
                trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        trainer.save_checkpoint(f"{folder}/file.ckpt", weights_only=True)
        with pytest.raises(FileExistsError, match="is a file, and ranks write their shards"):
            trainer.save_checkpoint(f"{folder}/file.ckpt")
        trainer, again = trainer_of(folder, strategy_of(), _ranks(), max_steps=1), Classifier()
        trainer.fit(again, batches(4), ckpt_path=f"{folder}/last.ckpt")
        return trainer.global_step, again.net[0].bias.tolist() == bias


@pytest.mark.nightly
def test_shards_of_a_save_that_had_no_room_for_the_rest_do_not_count(ranks, tmp_path):  # noqa: F811
    assert ranks(2).run(saved_in_part, str(tmp_path), timeout_s=300) == [(1, True)] * 2


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Looks(Classifier):
    def on_after_backward(self):
        print(self.net[0].weight.grad.norm())


class Clips(Classifier):
    def configure_gradient_clipping(self, *arguments):
        pass


class Watches(pl.Callback):
    def on_before_optimizer_step(self, *arguments):
        pass


class OwnUpdate(Classifier):
    def optimizer_step(self, *arguments):
        super().optimizer_step(*arguments)


class Before(pl.Callback):
    def on_before_backward(self, *arguments):
        pass


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None


def scaling():
    """As on an accelerator: on a CPU Lightning takes bfloat16 instead."""
    return MixedPrecision("16-mixed", "cuda")


REFUSED = {
    "Manual": (Manual, {}, 'compile your step yourself, with torch.compile(step, backend="zero")'),
    "Looks": (Looks, {}, "Looks.on_after_backward: gradients are nowhere but inside"),
    "Clips": (Clips, {"gradient_clip_val": None}, "Clips.configure_gradient_clipping: gradients"),
    "Watches": (Classifier, {"callbacks": [Watches()]}, "Watches.on_before_optimizer_step: grad"),
    "OwnUpdate": (OwnUpdate, {}, "OwnUpdate.optimizer_step: gradients are nowhere but inside"),
    "Before": (Classifier, {"callbacks": [Before()]}, "Before.on_before_backward: gradients are"),
    "set on an instance": (
        Classifier,
        {"callbacks": [pl.callbacks.LambdaCallback(on_after_backward=print)]},
        "LambdaCallback.on_after_backward: gradients are nowhere but inside",
    ),
    "sent by DDP": (
        Classifier,
        {"strategy": ZeroStrategy(ddp_comm_hook=print)},
        "ddp_comm_hook: the compiled step sends gradients, and no DDP does",
    ),
    "averaged": (
        Classifier,
        {"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]},
        "StochasticWeightAveraging: it averages whole parameters",
    ),
    "fp16": (Classifier, {"plugins": scaling()}, "precision='16-mixed': bf16-mixed needs no"),
    "Skips": (Skips, {}, "training_step returned None"),
}


def refusal(case, folder):
    kind, given, _ = REFUSED[case]
    with as_torchrun():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            max_steps=1,
            **{"strategy": strategy_of(), **given},
        )
        errors = (ValueError, RuntimeError, MisconfigurationException)
        return str(pytest.raises(errors, trainer.fit, kind(), batches(4)).value)


@pytest.mark.nightly
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(case, ranks, tmp_path):  # noqa: F811
    for message in ranks(2).run(refusal, case, str(tmp_path), timeout_s=300):
        assert REFUSED[case][2] in message, message


# Fabric


def with_fabric(rows, precision="32-true", folder=None, then=None):
    with as_torchrun():
        fabric = Fabric(
            accelerator="cpu",
            devices=_ranks(),
            strategy=of_fabric.ZeroStrategy(),
            precision=precision,
        )
        fabric.launch()
        module = Classifier().net
        made = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        model, optimizer = made
        loader = fabric.setup_dataloaders(batches(rows))

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=MOST)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        options = {"stage": 3, "lowering": "eager"}
        step = torch.compile(step, backend="zero", options=options)
        state = {"model": model, "optimizer": optimizer, "epoch": 1}
        found = []
        if then is not None:
            state["epoch"] = 0
            assert fabric.load(then, state) == {} and state["epoch"] == 1
        for x, y in loader:
            loss, norm = step(x, y)
            found.append((fabric.all_reduce(loss.detach(), reduce_op="mean").item(), norm.item()))
        if folder is not None:
            fabric.save(folder, state)
            with pytest.raises(ValueError, match="leave the filter out"):
                fabric.save(folder, state, filter={"model": lambda name, value: True})
        return found


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        tenths = torch.full((4,), 0.1)
        assert tenths.dtype == self.weight.dtype != torch.float32
        return (x * self.weight + tenths).sum()


def loss_of_made(precision):
    with as_torchrun():
        strategy = of_fabric.ZeroStrategy()
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
        fabric.launch()
        module = Made()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))

        def step(x):
            loss = model(x)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        loss = torch.compile(step, backend="zero", options={"lowering": "eager"})(torch.ones(4))
        return loss.item()


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ("64-true", "bf16-true"))
def test_fabrics_precision_is_the_default_dtype(precision, ranks):  # noqa: F811
    (loss,) = ranks(1).run(loss_of_made, precision, timeout_s=300)
    assert loss == pytest.approx(4.4, rel=2e-3)


def several_models(folder):
    with as_torchrun():
        fabric = Fabric(accelerator="cpu", devices=1, strategy=of_fabric.ZeroStrategy())
        fabric.launch()

        def model(value, width=2):
            made = nn.Linear(width, 2)
            nn.init.constant_(made.weight, value)
            return fabric.setup_module(made)

        fabric.save(folder, {"student": model(1.0), "teacher": model(2.0), "epoch": 3})
        given = {"teacher": model(0.0), "epoch": 0}
        assert fabric.load(folder, given) == {} and given["epoch"] == 3
        found = [given["teacher"].weight.mean().item()]
        with pytest.raises(KeyError, match="no model 'pupil', but .'student', 'teacher'."):
            fabric.load(folder, {"pupil": model(0.0)})
        with pytest.raises(ValueError, match="has models .'student', 'teacher'., in shards"):
            fabric.load(folder)
        given = {"pupil": model(0.0), "student": model(0.0)}
        fabric.load(folder, given, strict=False)
        found += [given[name].weight.mean().item() for name in ("pupil", "student")]
        rest = torch.load(f"{folder}/{of_fabric.REST}")
        del rest[of_fabric._MODELS]
        torch.save(rest, f"{folder}/{of_fabric.REST}")  # as older versions wrote it
        given = {"first": model(0.0), "second": model(0.0)}
        fabric.load(folder, given)
        return [*found, *(given[name].weight.mean().item() for name in ("first", "second"))]


@pytest.mark.nightly
def test_fabrics_models_are_loaded_by_their_names(ranks, tmp_path):  # noqa: F811
    found = ranks(1).run(several_models, str(tmp_path / "saved"), timeout_s=300)[0]
    assert found == [2.0, 0.0, 1.0, 1.0, 2.0]


def saved_by_fabric_in_part(folder):
    """Save, and save once more without room for the rest; return what is loaded."""
    with as_torchrun():
        fabric = Fabric(accelerator="cpu", devices=_ranks(), strategy=of_fabric.ZeroStrategy())
        fabric.launch()
        models = [fabric.setup_module(nn.Linear(2, 2)) for _ in range(2)]
        state = {"first": models[0], "second": models[1], "epoch": 1}

        def fill(value):
            with torch.no_grad():
                for model in models:
                    model.weight.fill_(value)
            state["epoch"] = value

        fill(1)
        fabric.save(folder, state)
        fill(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fabric.strategy.checkpoint_io, "save_checkpoint", refuse)
            with pytest.raises((OSError, RankError), match="No space left on device"):
                fabric.save(folder, state)
        fill(0)
        assert fabric.load(folder, state) == {}
        return [state["epoch"], *(model.weight.mean().item() for model in models)]


def test_all_that_fabric_loads_is_of_one_save(ranks, tmp_path):  # noqa: F811
    found = ranks(2).run(saved_by_fabric_in_part, str(tmp_path / "saved"))
    assert found == [[1, 1.0, 1.0]] * 2


def by_hand(rows, epochs=1, precision=torch.float32):
    model = Classifier().net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for x, y in [*batches(rows)] * epochs:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        found.append((loss.item(), clip_grad_norm_(model.parameters(), MOST).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.nightly
def test_a_loop_of_fabrics_trains_saves_and_resumes(ranks, tmp_path):  # noqa: F811
    folder, expected = str(tmp_path / "saved"), by_hand(12, epochs=2)
    first = ranks(2).run(with_fabric, 6, "32-true", folder, timeout_s=300)[0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(expected[:2]), **CLOSE)
    second = ranks(1).run(with_fabric, 12, "32-true", None, folder, timeout_s=300)[0]
    torch.testing.assert_close(torch.tensor(second), torch.tensor(expected[2:]), **CLOSE)


@pytest.mark.nightly
def test_fabrics_mixed_precision(ranks):  # noqa: F811
    found = ranks(2).run(with_fabric, 6, "bf16-mixed", timeout_s=300)[0]
    expected = by_hand(12, precision=torch.bfloat16)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-2)


def scaled():
    with as_torchrun():
        strategy = of_fabric.ZeroStrategy()
        plugins = [FabricsMixedPrecision("16-mixed", "cuda")]
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
        fabric.launch()
        return str(pytest.raises(ValueError, fabric.setup, nn.Linear(2, 2)).value)


@pytest.mark.nightly
def test_scaled_losses_are_refused(ranks):  # noqa: F811
    assert all("precision='16-mixed': bf16-mixed" in found for found in ranks(2).run(scaled))
