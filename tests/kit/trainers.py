"""Trainer of transformers, on ranks and alone, with data whose rows count for more or less."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from zerofx.integrations.transformers import ZeroTrainer

CLASSES, LENGTH, ROWS = 61, 12, 24
SEEN = ("loss", "grad_norm", "learning_rate")


def built(**settings: Any) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": CLASSES,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            "use_cache": False,
            **settings,
        }
    )
    return LlamaForCausalLM(config)


def of_experts(**settings: Any) -> MixtralForCausalLM:
    """Of so many experts that most have no token on a rank."""
    set_seed(0)
    config = MixtralConfig(
        **{
            "vocab_size": CLASSES,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 32,
            "num_experts_per_tok": 1,
            "use_cache": False,
            **settings,
        }
    )
    return MixtralForCausalLM(config)


def rows(number: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Texts of which other shares of tokens count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(number):
        tokens = torch.randint(CLASSES, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(LENGTH - 2, (1,), generator=generator))] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: Any, kind: type = TrainingArguments, **given: Any) -> Any:
    return kind(
        **{
            "output_dir": str(folder),
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **given,
        }
    )


@contextlib.contextmanager
def as_torchrun() -> Iterator[None]:
    """Have the environment of a rank that torchrun has started, for Accelerate and Lightning."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    names |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in names.items()})
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)  # Accelerate takes all cores, and later tests' bits change
        for name in names:
            del os.environ[name]
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def logged(trainer: Any, *names: str) -> list[tuple[float, ...]]:
    """Return what was logged of each step."""
    history = [entry for entry in trainer.state.log_history if names[0] in entry]
    return [tuple(float(entry[name]) for name in names) for entry in history]


def train_on_rank(folder, given, zero=None, resume=None, rows_of_eval=0, build=built):
    """Train on this rank; return what was logged of each step, and the evaluations' losses."""
    with as_torchrun():
        trainer = ZeroTrainer(
            build(),
            arguments(folder, **given),
            train_dataset=rows(),
            eval_dataset=rows(rows_of_eval) if rows_of_eval else None,
            zero={"lowering": "eager", **(zero or {})},
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return logged(trainer, *SEEN), logged(trainer, "eval_loss")


def train_alone(folder, given, rows_of_eval=0, build=built):
    trainer = Trainer(
        build(),
        arguments(folder, **given),
        train_dataset=rows(),
        eval_dataset=rows(rows_of_eval) if rows_of_eval else None,
    )
    trainer.train()
    return logged(trainer, *SEEN), logged(trainer, "eval_loss"), trainer.model


def check(found, expected):
    assert len(found) == len(expected) > 1
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)
