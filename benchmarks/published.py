"""Set what others have published of their runs beside what a plan says of the same training.

    python benchmarks/published.py
    python benchmarks/published.py --only "8B" --json OUT

Each run is planned in this process, for the device and the ranks that it had; nothing is trained.
The plan is of zerofx's own program: the model is Hugging Face's, under bfloat16 autocast, with
float32 parameters, AdamW and clipping at 1.0, and operators count one by one.

Prints tokens per second and device beside the interval, and memory reserved by the allocator where
that was published.  Fails if a figure lies outside without a reason that the table has for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofx.deferred.block import deferred_init
from zerofx.devices import DEVICES, GIB, Device
from zerofx.planning.models import model_of, training_step
from zerofx.planning.plan import axes_of, plan_of
from zerofx.planning.stopped import StoppedCall, capture

NEAR = 0.05
"""Memory has no interval: it counts as met if it differs by so much."""

_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
SHAPES = {
    "Llama 3 8B": "llama-3-8b",
    "Llama 3 70B": "llama-3-70b",
    "Llama 2 7B": {**_LLAMA_2, "hidden_size": 4096, "intermediate_size": 11008,
                   "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama 2 13B": {**_LLAMA_2, "hidden_size": 5120, "intermediate_size": 13824,
                    "num_hidden_layers": 40, "num_attention_heads": 40},
}  # fmt: skip

A100 = DEVICES["a100"]
A100_400 = dataclasses.replace(
    A100, title=f"{A100.title} with 400 Gb/s a machine", outer_bytes_per_s=50e9 / 8
)
"""IBM's, whose eight devices share a network of 400 Gb/s."""

H100_96 = dataclasses.replace(
    DEVICES["h100"],
    title="NVIDIA H100 96GB HBM2e",
    memory_bytes=95 * GIB,
    memory_bytes_per_s=2.4e12,
)
"""Meta's Grand Teton: 2.4 TB/s, held at 500 W of 700."""

TITAN_2024 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md at 0413364 (2024)"
FMS = "foundation-model-stack/fms-fsdp, README.md at 0d31998 (2024)"


UNCOMPILED = (
    "a plan is of one compiled program; torchtitan's own compiled run of this step reserves "
    "5.4 GiB less than this one"
)


@dataclass(frozen=True)
class Step:
    """A training step: ``recompute`` is ``none``, ``full`` (each layer) or ``selective``.

    Selective is torchtitan's: of a layer every second matrix product and attention are kept.
    """

    model: str
    rows: int
    length: int
    recompute: str


@dataclass(frozen=True)
class Published:
    """A run that somebody has published.  Units: tokens per second and device, GiB reserved.

    ``time`` and ``memory`` say why the figure lies outside, if it does.
    """

    step: Step
    how: str
    device: Device
    ranks: int
    tokens_per_s: float
    source: str
    memory_gib: float | None = None
    mesh: Mapping[str, int] | None = None
    stage: Any = 3
    time: str = ""
    memory: str = ""


EIGHT = Step("Llama 3 8B", 2, 8192, "selective")
RUNS = (
    Published(EIGHT, "FSDP2", H100_96, 8, 5762, TITAN_2024, 82.4, memory=UNCOMPILED),
    Published(EIGHT, "FSDP2 + compile", H100_96, 8, 6667, TITAN_2024, 77.0),
    Published(EIGHT, "FSDP2", H100_96, 128, 5605, TITAN_2024, 67.0),
    Published(EIGHT, "FSDP2 + compile", H100_96, 128, 6514, TITAN_2024, 62.0),
    Published(dataclasses.replace(EIGHT, rows=1), "FSDP2", A100, 64, 2973, TITAN_A100),
    Published(Step("Llama 2 13B", 2, 4096, "none"), "FSDP2", A100, 64, 2162, TITAN_A100),
    Published(
        Step("Llama 2 7B", 2, 4096, "none"),
        "HSDP",
        A100_400,
        128,
        3760,
        FMS,
        mesh={"node": 16, "gpu": 8},
        stage={"gpu": 3, "node": 0},
    ),
    Published(Step("Llama 3 70B", 1, 8192, "full"), "FSDP2", A100, 64, 331, TITAN_A100),
)

LEFT_OUT = (
    "torchtitan's other runs: float8, tensor, context and pipeline parallel",
    "Megatron Bridge's performance summary (25.11): dense models on data parallel alone are float8",
    "DeepCompile (arXiv 2504.09983): throughputs are drawn, and the text has ratios alone",
    "ZeRO and ZeRO-Infinity: V100s, with tensor parallel",
)
"""Names runs that cannot be planned, or have no figure."""


def selective() -> Any:
    """Return the contexts of torchtitan's checkpointing by operator, for one layer."""
    seen = {False: 0, True: 0}

    def keeps(ctx: Any, op: Callable, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "scaled_dot_product" in str(op)
        if op == torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            kept = seen[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keeps)


@functools.lru_cache(maxsize=1)
def captured(step: Step) -> StoppedCall:
    with tempfile.TemporaryDirectory() as folder, deferred_init():
        shape = SHAPES[step.model]
        if not isinstance(shape, str):
            path = Path(folder, "config.json")
            path.write_text(json.dumps(shape))
            shape = str(path)
        model = model_of(shape)
        optimizer = torch.optim.AdamW(model.parameters())
    if step.recompute != "none":
        how: dict[str, Any] = {"use_reentrant": False}
        if step.recompute == "selective":
            how["context_fn"] = selective
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    model.train()
    torch.compiler.reset()  # shapes of the last model would be taken to change
    tokens = torch.zeros(step.rows, step.length, dtype=torch.int64)
    return capture(training_step, (model, optimizer, tokens), {}, {}).on_device("cuda")


def planned(run: Published) -> Mapping[str, Any]:
    """Return the facts of a run's stage."""
    axes = axes_of(run.ranks, run.mesh)
    figures = run.device.hardware(axes)
    made = plan_of(captured(run.step), axes, {}, [run.stage], figures=figures)
    (facts,) = made.facts["stages"].values()
    return facts


def row_of(run: Published, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was published, what is planned, and whether they agree."""
    step = run.step
    tokens = step.rows * step.length
    high, expected, low = (
        tokens / each for each in (facts["step_s"][0], facts["expected_s"], facts["step_s"][1])
    )
    reserved = sum(facts["peak"].values()) + facts["outside"]["allocator"]["nbytes"]
    return {
        "run": f"{step.model}, {step.rows} x {step.length}, {step.recompute} recompute, {run.how}",
        "on": f"{run.ranks} {run.device.title}",
        "tokens_per_s": run.tokens_per_s,
        "expected": expected,
        "interval": [low, high],
        "is_inside": low <= run.tokens_per_s <= high,
        "memory_gib": run.memory_gib,
        "reserved_gib": reserved / GIB,
        "is_near": run.memory_gib is None or abs(reserved / GIB / run.memory_gib - 1) <= NEAR,
        "lanes_s": facts["lanes_s"],
        "peak_gib": {kind: nbytes / GIB for kind, nbytes in facts["peak"].items()},
        "time": run.time,
        "memory": run.memory,
        "source": run.source,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the runs whose line has these words")
    parser.add_argument("--json", type=Path, help="write all that is known down too")
    chosen = parser.parse_args()
    rows, plans = [], {}
    for run in RUNS:
        if chosen.only in f"{run.step} {run.how} {run.device.title}":
            same = run.step, run.ranks, run.device.title
            if same not in plans:
                plans[same] = planned(run)
            rows.append(row_of(run, plans[same]))
            print(rows[-1]["run"], file=sys.stderr, flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(rows, indent=1))
    cells = [
        [
            each["run"],
            each["on"],
            f"{each['tokens_per_s']:,.0f}",
            f"{each['expected']:,.0f} ({each['interval'][0]:,.0f} to {each['interval'][1]:,.0f})",
            "inside" if each["is_inside"] else "outside",
            f"{each['memory_gib'] or '-'}",
            f"{each['reserved_gib']:.1f}",
        ]
        for each in rows
    ]
    headers = ["run", "on", "published tokens/s", "planned", "", "GiB published", "planned"]
    print(tabulate(cells, headers=headers, disable_numparse=True))
    unexplained = False
    for each in rows:
        for is_met, why in (("is_inside", "time"), ("is_near", "memory")):
            if not each[is_met]:
                unexplained |= not each[why]
                print(f"{each['run']}, {why}: {each[why] or 'NO REASON IS KNOWN'}")
    print("Left out:", *LEFT_OUT, sep="\n  ")
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
