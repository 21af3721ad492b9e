"""What the examples share: how a run is started, trained, measured and judged.

Nothing here knows about sharding; the model and its step are in the examples themselves.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import zerofx

SMOOTHED_STEPS = 20
VALIDATION_BATCHES = 8
OUT = Path(__file__).parent / "out"


@dataclass(frozen=True)
class Launch:
    """Which of torchrun's processes this is, where it computes, and with which backend."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    stage: int

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Launch:
        """Read torchrun's variables and pick the device and the number of CPU threads.

        Raises: SystemExit if several processes would each train a model of their own.
        """
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if world_size > 1 and arguments.backend != "zero":
            sys.exit(f"--backend {arguments.backend} is one process's: start it without torchrun")
        device = arguments.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        # torchrun gives each process one thread, whatever the machine has.
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local))
        return cls(rank, world_size, torch.device(device), arguments.backend, arguments.stage)

    @property
    def compile_arguments(self) -> dict[str, Any]:
        """What ``torch.compile`` is called with; ``eager`` leaves a function as it is."""
        if self.backend == "eager":
            return {"disable": True}
        if self.backend == "zero":
            return {"backend": "zero", "options": {"stage": self.stage}}
        return {"backend": self.backend}

    def log(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)


def argument_parser(
    description: str | None, *, steps: int, batch: int, lr: float
) -> argparse.ArgumentParser:
    """Return a parser of the options that every example has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("zero", "eager", "inductor"), default="zero")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch, help="rows per step, over all ranks")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="where the curve is saved")
    return parser


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int):
    """Return a schedule that rises over the first 5% of steps and falls to a tenth."""
    warmup = max(1, steps // 20)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def train(
    step: Callable[[], torch.Tensor],
    *,
    steps: int,
    tokens_per_step: int,
    launch: Launch,
    losses: Sequence[float] = (),
    save: Callable[[list[float]], object] | None = None,
    save_every: int = 0,
) -> list[float]:
    """Call ``step`` until ``steps`` have been done, and return their losses.

    ``losses`` are those of the steps that a resumed training has behind it.  ``save`` is called
    with all losses so far every ``save_every`` steps and at the end.  The first step, which
    compiles, is left out of the tokens per second.
    """
    losses, recent = list(losses), []
    num_earlier = len(losses)
    if num_earlier >= steps:
        launch.log(f"{num_earlier} steps have been done before: nothing is left to train")
        return losses
    start = time.perf_counter()
    with tqdm(
        total=steps, initial=num_earlier, unit="step", mininterval=1, disable=launch.rank != 0
    ) as bar:
        for done in range(num_earlier + 1, steps + 1):
            recent.append(step())
            bar.update()
            if done == num_earlier + 1:
                recent[0].item()
                compiled_at = time.perf_counter()
            # Reading a loss waits for the device, so not at every step.
            elif done % 10 == 0 or done == steps:
                loss = recent[-1].item()
                rate = (done - num_earlier - 1) * tokens_per_step
                rate /= time.perf_counter() - compiled_at
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
            if done == steps or (save is not None and done % save_every == 0):
                losses += mean_over_ranks(recent, launch)
                recent.clear()
                if save is not None:
                    save(losses)
    end = time.perf_counter()
    num_steps = steps - num_earlier
    launch.log(
        f"{num_steps} steps in {end - start:.1f} s (the first, with compilation: "
        f"{compiled_at - start:.1f} s), "
        f"{(num_steps - 1) * tokens_per_step / max(end - compiled_at, 1e-9):,.0f} tokens/s"
    )
    return losses


def mean_over_ranks(losses: Sequence[torch.Tensor], launch: Launch) -> list[float]:
    """Return each step's loss over the whole batch: a rank's is that of its own rows.

    Every rank must call this.  The ranks have equal numbers of rows.
    """
    mean = torch.stack(list(losses))
    if launch.world_size > 1:
        torch.distributed.all_reduce(mean)
        mean /= launch.world_size
    return mean.tolist()


def mean_loss(evaluate: Callable[[torch.Tensor], torch.Tensor], batches: Iterator) -> float:
    """Return the mean of ``evaluate`` over ``VALIDATION_BATCHES`` batches.

    Every rank must call this with the same batches: each evaluation gathers the sharded
    parameters, and all ranks then see the same figure.
    """
    losses = [evaluate(next(batches)).item() for _ in range(VALIDATION_BATCHES)]
    return sum(losses) / len(losses)


def resident_peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def report_memory(
    launch: Launch,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compiled_step: Callable,
    *,
    baseline_bytes: int,
) -> None:
    """Print this rank's peak memory, what of it came after ``baseline_bytes``, and what it keeps.

    What it keeps of the parameters stands, for a zero-compiled step, in ``zerofx.explain``'s
    tables, which rank 0 prints: between steps a sharded parameter only has a shape.
    """
    peak = resident_peak_bytes()
    values = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    kept = f"{state_bytes / 2**20:,.2f} MiB of optimizer states"
    if launch.backend != "zero":
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        kept = f"{parameter_bytes / 2**20:,.2f} MiB of parameters and {kept}"
    line = (
        f"rank {launch.rank}: {peak / 2**20:,.0f} MiB of memory at peak, "
        f"{(peak - baseline_bytes) / 2**20:,.0f} MiB of it since the imports"
    )
    if launch.device.type == "cuda":
        line += f"; {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on the GPU"
    print(f"{line}; keeps {kept} between steps", flush=True)
    if launch.backend == "zero":
        launch.log(f"\n{zerofx.explain(compiled_step)}\n")


def smoothed(losses: list[float]) -> float:
    """Return the mean of the last losses."""
    tail = losses[-SMOOTHED_STEPS:]
    return sum(tail) / len(tail)


def save_loss_curve(losses: list[float], path: Path, title: str, launch: Launch) -> None:
    """Plot the losses and their running mean to a PNG, on rank 0."""
    if launch.rank != 0:
        return
    # Here, not at the top: only rank 0 needs it, and memory is compared between ranks.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    running = [smoothed(losses[: i + 1]) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, color="tab:blue", alpha=0.3, label="loss")
    axes.plot(running, color="tab:blue", label=f"mean of {SMOOTHED_STEPS} steps")
    axes.set(xlabel="step", ylabel="training loss (nats)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    launch.log(f"loss curve: {path}")


def exit_status(losses: list[float], target: float, launch: Launch) -> int:
    """Return 0 if the smoothed training loss reached ``target``, else say so and return 1."""
    final = smoothed(losses)
    if final <= target:
        launch.log(f"training loss {losses[0]:.3f} to {final:.3f}: reached the target {target}")
        return 0
    print(
        f"rank {launch.rank}: FAILED: the training loss ended at {final:.3f} (mean of the last "
        f"{SMOOTHED_STEPS} steps), above the target {target}. The target is for the default "
        "settings: a run of another size needs its own --target-loss.",
        file=sys.stderr,
        flush=True,
    )
    return 1
