"""``ZeroSFTTrainer``: the SFTTrainer of TRL, whose updates are whole compiled steps.

from zerofx.integrations.trl import ZeroSFTTrainer as SFTTrainer
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from trl import SFTTrainer

import zerofx
from zerofx.integrations.transformers import ZeroTrainer


class ZeroSFTTrainer(ZeroTrainer, SFTTrainer):
    """``trl.SFTTrainer`` through ``backend="zero"``: see ``ZeroTrainer``.

    TRL reads a loss's entropy and accuracy while it computes it; here the compiled step returns
    their sums, and they are read behind it.  So is an evaluation's loss computed of a model that is
    in shards, or by a ``loss_and_seen`` of one's own.

    Raises: ValueError, when it is made, for a loss or an option that needs more of TRL's own code.
    """

    replaces = (SFTTrainer,)

    def __init__(self, *arguments: Any, compute_loss_func: Any = None, **named: Any) -> None:
        _check_loss(type(self))
        if compute_loss_func is not None:
            raise _cannot("compute_loss_func", _COMPILED)
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.label_smoothing_factor:
            raise _cannot("label_smoothing_factor", "leave it out")
        if self.args.activation_offloading:
            raise _cannot("activation_offloading", "give zero={'offload': 'activations'} instead")
        super().create_accelerator_and_postprocess()

    def loss_and_seen(self, inputs: dict[str, Any], count: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss from logits, which the compiler has in chunks of tokens only."""
        asked = {name: value for name, value in inputs.items() if "labels" not in name}
        if self.aux_loss_enabled:
            asked["output_router_logits"] = True
        outputs = self.model(**asked, use_cache=False)
        logits, labels = outputs.logits, inputs.get("shift_labels")
        length = inputs["input_ids"].size(1)
        if logits.size(1) > length:  # in front are those of a prompt that is learnt
            logits = logits[:, -length:]
        if labels is None:
            logits, labels = logits[:, :-1], inputs["labels"][:, 1:]
        logits, labels = logits.flatten(0, 1).float(), labels.flatten()
        losses = F.cross_entropy(logits, labels, reduction="none")  # zero where none counts
        if self.args.loss_type == "dft":
            losses = losses * (-losses).exp().detach()
        mask = labels != -100
        valid = mask.sum()
        loss = losses.sum() / (valid if count is None else count).clamp(min=1)
        with torch.no_grad():
            logs = F.log_softmax(logits, -1)
            entropy = torch.where(mask, -(logs.exp() * logs).sum(-1), 0).sum()
            correct = (mask & (logits.argmax(-1) == labels)).sum()
        seen = {"valid": valid, "entropy": entropy, "correct": correct}
        if self.aux_loss_enabled:
            seen["aux_loss"] = outputs.aux_loss.detach()
            steps = 1 if count is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * zerofx.per_rank(outputs.aux_loss) / steps
        return loss, seen

    def measure(self, inputs: dict[str, Any], seen: Any) -> None:
        gathered = {name: self.accelerator.gather(value) for name, value in seen.items()}
        found = self._metrics["train" if self.model.training else "eval"]
        valid = max(gathered["valid"].sum().item(), 1)
        found["entropy"].append(gathered["entropy"].sum().item() / valid)
        found["mean_token_accuracy"].append(gathered["correct"].sum().item() / valid)
        if self.aux_loss_enabled:
            found["aux_loss"].append(gathered["aux_loss"].mean().item())
        if self.model.training:
            tokens = inputs.get("attention_mask")
            number = (
                tokens.sum()
                if tokens is not None
                else inputs["position_ids"].new_tensor(inputs["position_ids"].size(1))
            )
            self._total_train_tokens += self.accelerator.gather(number).sum().item()
        found["num_tokens"] = [self._total_train_tokens]

    # Evaluation

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute an evaluation's loss: TRL's own way has no whole graph, which shards need."""
        is_trls = type(self).loss_and_seen is ZeroSFTTrainer.loss_and_seen
        if self.model.training or (self._zero_is_whole and is_trls):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        evaluate = self._zero_evaluate_loss if self._zero_is_whole else self._zero_loss_on_shards
        loss, seen = evaluate(inputs)
        self.measure(inputs, seen)
        if not return_outputs:
            return loss
        asked = {name: value for name, value in inputs.items() if "labels" not in name}
        return loss, model(**asked, use_cache=False)

    @functools.cached_property
    def _zero_loss_on_shards(self) -> Callable:
        options = {**self._zero_options, "loss": "rank"}
        return torch.compile(self._zero_evaluate_loss, backend="zero", options=options)

    @torch.no_grad()
    def _zero_evaluate_loss(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        return self.loss_and_seen(inputs, None)


_COMPILED = "override loss_and_seen, which is compiled"


def _check_loss(kind: Any) -> None:
    """Raises: ValueError for a ``compute_loss`` that no step would call."""
    order = kind.__mro__[: kind.__mro__.index(SFTTrainer)]
    known = {ZeroSFTTrainer, *(one for each in order for one in vars(each).get("replaces", ()))}
    lost = [other for other in order if "compute_loss" in vars(other) and other not in known]
    if lost and kind.loss_and_seen is ZeroSFTTrainer.loss_and_seen:
        name = lost[0].__name__
        given_up = f"replaces = ({name},) in your class says that training does without"
        raise _cannot(f"{name}.compute_loss", f"{_COMPILED}; {given_up}")


def _cannot(name: str, remedy: str) -> ValueError:
    return ValueError(f"ZeroSFTTrainer cannot train with `{name}`: {remedy}.")
