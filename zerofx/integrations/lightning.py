"""``ZeroStrategy``: a strategy of Lightning's Trainer, whose updates are whole compiled steps.

Trainer(strategy=ZeroStrategy(), devices=2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zerofx
from zerofx.checkpoint.contents import bound_parameters
from zerofx.integrations.checkpoints import TOKEN, is_saved_in, save_beside, shards_in
from zerofx.integrations.default_dtype import DTYPES, DefaultDtype
from zerofx.integrations.fabric import REST
from zerofx.integrations.lightning_parts import check, check_batches
from zerofx.integrations.models import check_library, meet, plain, whole_values

check_library("lightning", ">=2.6,<3", _FitLoop, "_skip_backward", "_should_accumulate")


class ZeroStrategy(DDPStrategy):
    """Lightning's Trainer through ``backend="zero"``, with automatic optimization.

    It takes ``zero``, a dict of options of the backend, beside what DDPStrategy takes.
    ``training_step``, backward, clipping and the update are one compiled function, called once for
    each micro-batch; what it gives to ``self.log`` is logged after the call.  Losses are means over
    ranks, as DDP has them; ``zero={"loss": "global"}`` makes them one over all batches.

    A checkpoint is a folder, in which each rank writes its shards; of weights alone
    (``save_weights_only``) it is a file, as Lightning's own.

    Raises: ValueError, when a training begins, for what does not go together with it.
    """

    def __init__(self, zero: dict[str, Any] | None = None, **named: Any) -> None:
        super().__init__(**named)
        self._zero = dict(zero or {})
        self._compiled: dict[str, Callable] = {}
        self._logged: list[tuple[tuple, dict[str, Any]]] = []
        self._is_sharded = False
        self._folder: Path | None = None
        self._token: str | None = None

    # What is prepared

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        is_training = trainer.state.fn == TrainerFn.FITTING
        self._is_sharded = bool(bound_parameters(self._module))  # another trainer may have done it
        if not self._is_sharded:
            self.model = self.precision_plugin.convert_module(plain(self._module))
            self.model_to_device()
            _sync_module_states(self.model)
        if is_training:
            check(trainer, self._module)
            if self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
                self._zero.setdefault("batch_norm", "global")
            self._compiled.clear()
            self.setup_optimizers(trainer)
            trainer.fit_loop._skip_backward = True  # training_step has done it
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """End, and leave the model and its optimizers where they are: ranks have them in shards."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # The step

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        trainer = self._module.trainer
        is_last = not trainer.fit_loop._should_accumulate()
        parts = trainer.accumulate_grad_batches
        self._is_sharded = True
        return self._call("training_step", self._update, parts, is_last, arguments, named)

    def _update(
        self, parts: int, is_last: bool, arguments: tuple, named: dict[str, Any]
    ) -> tuple[Any, list]:
        """Compute a micro-batch's gradients, and update with those of all where it is the last."""
        module, (optimizer,) = self._module, self.optimizers
        with self._precision():
            output = module.training_step(*arguments, **named)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            raise zerofx.StepError(
                "training_step returned None: other ranks would wait for this one's gradients. "
                "Return a loss of zero, multiplied by 0."
            )
        (loss / parts).backward()
        if is_last:
            trainer = module.trainer
            most, by = trainer.gradient_clip_val or 0, trainer.gradient_clip_algorithm
            clipped = [p for group in optimizer.param_groups for p in group["params"]]
            if most > 0 and by == "value":
                clip_grad_value_(clipped, most)
            elif most > 0:
                clip_grad_norm_(clipped, most)
            optimizer.step()
            optimizer.zero_grad()
        return apply_to_collection(output, torch.Tensor, _detached), list(self._logged)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Call ``training_step``, which updates."""
        return closure()

    def _precision(self) -> AbstractContextManager:
        """Return what a step of the module's is under, as in Lightning."""
        precision = self.precision_plugin.precision
        if precision == "bf16-mixed":
            return torch.autocast(self.root_device.type, torch.bfloat16)
        return DefaultDtype(DTYPES[precision]) if precision in DTYPES else nullcontext()

    def _call(self, name: str, function: Callable, *arguments: Any) -> Any:
        """Call a function compiled, and log what it has given to ``self.log``."""
        if name not in self._compiled:
            options = self._zero if name == "training_step" else {**self._zero, "loss": "rank"}
            self._compiled[name] = torch.compile(function, backend="zero", options=options)
        module = self._module
        self._logged.clear()  # what is compiled is compiled for as many as there are
        with _logging(module, self._log):
            output, logged = self._compiled[name](*arguments)
        for values, settings in logged:
            module.log(*values, **settings)
        return output

    def _log(self, name: str, value: Any, *others: Any, **settings: Any) -> None:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        self._logged.append(((name, value, *others), settings))

    # Evaluation

    def on_predict_start(self) -> None:
        if self._is_sharded:
            numbers = self._module.trainer.predict_loop.max_batches
            check_batches(self._module, numbers, self._zero)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        return self._evaluate("validation_step", arguments, named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        return self._evaluate("test_step", arguments, named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        return self._evaluate("predict_step", arguments, named)

    def _evaluate(self, name: str, arguments: tuple, named: dict[str, Any]) -> Any:
        """Call a step on shards, compiled, once the model is in shards."""
        if not self._is_sharded:
            return getattr(super(), name)(*arguments, **named)
        with torch.inference_mode(False), torch.no_grad():
            return self._call(name, self._forward, name, arguments, named)

    @torch.no_grad()
    def _forward(self, name: str, arguments: tuple, named: dict[str, Any]) -> tuple[Any, list]:
        with self._precision():
            output = getattr(self._module, name)(*arguments, **named)
        return output, list(self._logged)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` writes shards, or what is whole."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder with the ranks' shards, or a file of weights alone.  Collective."""
        module, path = self._module, Path(filepath)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = whole_values(module)
            save = super().save_checkpoint
            meet(module).together(lambda: save(checkpoint, filepath, storage_options))
            return
        saved = save_beside(path, [module], self.optimizers)
        rest, write = {**checkpoint, TOKEN: saved.token}, self.checkpoint_io.save_checkpoint
        saved.ranks.on_first(lambda: write(rest, path / REST, storage_options))
        saved.replace_old()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Read what is no shard; these ``load_model_state_dict`` and the optimizer's read."""
        path = Path(checkpoint_path)
        self._folder = path if path.is_dir() and is_saved_in(path) else None
        rest = super().load_checkpoint(path / REST if self._folder else path, weights_only)
        self._token = rest.pop(TOKEN, None)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module
        if self._folder is not None:
            shards = shards_in(self._folder, self._token, module)
            zerofx.load(shards, module, strict=strict)
        elif self._is_sharded:
            with zerofx.full_params(module):
                module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            shards = shards_in(self._folder, self._token, self._module)
            strict = self._module.strict_loading
            zerofx.load(shards, self._module, self.optimizers, strict=strict)


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach()


@contextmanager
def _logging(module: pl.LightningModule, log: Callable) -> Iterator[None]:
    """Have a module give what it logs to another function."""

    def log_all(values: Mapping[str, Any], *others: Any, **settings: Any) -> None:
        for name, value in values.items():
            log(name, value, *others, **settings)

    module.log, module.log_dict = log, log_all  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del module.log, module.log_dict
