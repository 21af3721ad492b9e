"""Models of which there is only a configuration, and an ordinary training step of them."""

from __future__ import annotations

import difflib
import json
import textwrap
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.deferred.block import deferred_init
from zerofx.errors import CommandError
from zerofx.garbage import without_collections
from zerofx.planning.stopped import StoppedCall, capture

LENGTH = 4096
"""The tokens of the sequence, if nobody says, in a model that has so many positions."""

CLIPPED_AT = 1.0

_SHAPES = resources.files(__package__) / "shapes"


@dataclass(frozen=True)
class CallOfModel:
    """A training step of a model, captured; ``words`` say what was assumed of it."""

    words: str
    call: StoppedCall


def shipped() -> list[str]:
    """Return the names of the configurations that come with zerofx."""
    return sorted(each.name.removesuffix(".json") for each in _SHAPES.iterdir())


@without_collections()
def call_of_model(name: str, tokens: int | None = None) -> CallOfModel:
    """Capture the step that trains a model on one sequence of so many tokens.

    ``name`` is one of ``shipped``, a ``config.json``, a folder that has one, or an id of the hub,
    from which the configuration alone is read.  The model has float32 parameters that are recorded
    and not made, its own loss under bfloat16 autocast, clipping and AdamW.

    Raises: CommandError for a configuration that cannot be had, or that makes no such model, and
    for more tokens than the model has positions.
    """
    with deferred_init():
        model = model_of(name)
        optimizer = torch.optim.AdamW(model.parameters())
    positions = getattr(model.config, "max_position_embeddings", None) or LENGTH
    tokens = min(LENGTH, positions) if tokens is None else tokens
    if not 1 < tokens <= positions:
        raise CommandError(
            f"--tokens is {tokens}, and {name} takes from 2 to {positions} in a sequence "
            "(max_position_embeddings): give so many, or a config.json with more positions"
        )
    rows = torch.zeros(1, tokens, dtype=torch.int64)  # any will do: nothing is looked up
    try:
        call = capture(training_step, (model, optimizer, rows), {}, {})
    except Exception as error:
        raise _no_step(name, error) from error
    words = (
        f"{name} as nobody has said otherwise: AdamW, float32 parameters, bfloat16 autocast, "
        f"gradients clipped at {CLIPPED_AT}, one sequence of {tokens} tokens a rank"
    )
    return CallOfModel(words, call)


def model_of(name: str) -> nn.Module:
    """Make the model that a name means, as ``call_of_model`` has it, with values of no meaning.

    Raises: CommandError.
    """
    config = _configuration(name)
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise _no_step(name, error) from error


def _no_step(name: str, error: Exception) -> CommandError:
    return CommandError(
        f"{name} has a configuration of which no training step can be made: "
        f"{_short(error)}. Give one of a causal language model, or the script that trains it"
    )


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """Train a causal language model of Hugging Face.  Shapes: tokens i64[rows, length]."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _configuration(name: str) -> Any:
    """Return the configuration that a name means.  Raises: CommandError."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CommandError(
            "--model makes models with the package transformers, which is not installed: "
            "pip install 'zerofx[huggingface]'"
        ) from error
    path = Path(name)
    try:
        if name in shipped():
            fields = json.loads((_SHAPES / f"{name}.json").read_text(encoding="utf-8"))
            return AutoConfig.for_model(**fields)
        if (name and path.exists()) or _is_hub_id(name):
            return AutoConfig.from_pretrained(name)
        why = "it is no file, no folder, none that comes with zerofx, and no owner/name of the hub"
    except Exception as error:
        why = _short(error)
    (nearest,) = difflib.get_close_matches(path.name, shipped(), n=1, cutoff=0.0)
    raise CommandError(
        f"the configuration of {name!r} cannot be had: {why}. Name one that comes with zerofx "
        f"({', '.join(shipped())}; the nearest is {nearest}), or give a config.json"
    )


def _is_hub_id(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and "/" not in rest and not name.endswith(".json")


def _short(error: Exception) -> str:
    """Return an error's words in a line: transformers names all classes that it has."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...").rstrip(".")
