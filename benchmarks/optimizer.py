"""Time one AdamW step over a flat parameter: zerofx's kernel against its peers and the memory.

    python benchmarks/optimizer.py
    python benchmarks/optimizer.py --elements 1e9 --device cuda
    python benchmarks/optimizer.py --systems zerofx "zerofx rounded" "zerofx rounded, int8 moments"
    python benchmarks/optimizer.py --systems zerofx "zerofx clipped" "zerofx clipped apart"

Every system has its own parameter and moments, and all the same gradient.  Rounds go through the
systems and the bounds in turn, so that what disturbs one disturbs its neighbours; figures are
medians over rounds of the fastest step of each.  GB/s counts what the update must read and write
once: 28 bytes an element in float32 (parameter, gradient and two moments in; all but the gradient
out).  "clipped" multiplies the gradient by a coefficient (of 1): in the kernel, or apart, compiled,
into memory of its own.  The bounds are STREAM's: copy (8 bytes an element) and triad (12).  What a
store reads into the cache before it writes is not counted, for any of them.

Exit status 1 if the systems' parameters differ by more than rounding.  On a CPU it uses the
threads that torch has; --threads sets them.  It has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tabulate import tabulate
from torch import fx, nn

from zerofx.codegen.rewrite.gradient_work import GradientWork
from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.pages import in_huge_pages
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import Fused, OptimizerRunner

HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
LARGEST_DIFFERENCE = 1e-5

ADAMW_BYTES = 28


@dataclass
class System:
    """One thing to time: ``run`` once per step; ``parameter`` is what it has trained, if any.

    Units: bytes of memory that it has to move per element.
    """

    name: str
    run: Callable[[], object]
    bytes_per_element: int
    parameter: torch.Tensor | None = None
    fastest_s: list[float] = field(default_factory=list)


# zerofx: how parameter and moments are kept, and the bytes that a step then moves.
PRECISIONS = {
    "zerofx": (torch.float32, Precision(), ADAMW_BYTES),
    "zerofx masters": (torch.bfloat16, Precision(master_weights=True), 30),
    "zerofx rounded": (torch.bfloat16, Precision(stochastic_rounding=True), 14),
    "zerofx int8 moments": (torch.float32, Precision(moment_dtype=torch.int8), 16),
    "zerofx rounded, int8 moments": (
        torch.bfloat16,
        Precision(stochastic_rounding=True, moment_dtype=torch.int8),
        10,
    ),
}


# zerofx too: where the gradient is clipped; apart it is read and written once more.
CLIPPED = {"zerofx clipped": ADAMW_BYTES, "zerofx clipped apart": ADAMW_BYTES + 8}


def zerofx(name: str, start: torch.Tensor, gradient: torch.Tensor) -> System:
    dtype, precision, num_bytes = PRECISIONS.get(name) or (*PRECISIONS["zerofx"][:2], CLIPPED[name])
    parameter = nn.Parameter(in_huge_pages(start.to(dtype, copy=True)))  # as a compiled step's are
    optimizer = torch.optim.AdamW([parameter], **HYPERPARAMETERS)
    info = ParameterInfo(
        index=0,
        name="flat",
        shape=tuple(parameter.shape),
        stride=parameter.stride(),
        dtype=dtype,
        device=parameter.device,
        requires_grad=True,
        world_size=1,
    )
    runner = OptimizerRunner(
        optimizer, {0: (parameter, info)}, UpdateSettings(rank=0, sharded=True, precision=precision)
    )
    data, grad = parameter.detach(), gradient.to(dtype)
    coefficient = torch.ones((), device=grad.device)
    work, coefficients, multiply = None, [], None
    if name == "zerofx clipped":
        work, coefficients = clipping(grad, coefficient), [coefficient]
    elif name == "zerofx clipped apart":
        multiply = torch.compile(torch.mul)

    def run(_kept_alive=optimizer) -> None:
        clipped = multiply(grad, coefficient) if multiply else grad
        runner.begin()
        runner.run_together([data], [clipped], [0], Fused(work, coefficients))
        runner.end()

    return System(name, run, num_bytes, data)


def clipping(gradient: torch.Tensor, coefficient: torch.Tensor) -> GradientWork:
    """What the program folds into the kernel of a step that clips."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("gradient", "coefficient")]
    for operand, value in zip(operands, (gradient, coefficient), strict=True):
        operand.meta["val"] = value
    product = graph.call_function(torch.ops.aten.mul.Tensor, tuple(operands))
    product.meta["val"] = gradient
    return GradientWork.of([product], operands[0])[0]


def torch_optimizer(name: str, start: torch.Tensor, gradient: torch.Tensor) -> System:
    parameter = nn.Parameter(start.clone())
    parameter.grad = gradient
    if name == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **HYPERPARAMETERS)
        return System(name, optimizer.step, ADAMW_BYTES, parameter.detach())
    how = {"fused": True} if name == "AdamW(fused=True)" else {"foreach": True}
    optimizer = torch.optim.AdamW([parameter], **HYPERPARAMETERS, **how)
    run = torch.compile(optimizer.step) if name == "torch.compile(step)" else optimizer.step
    return System(name, run, ADAMW_BYTES, parameter.detach())


PEERS = ["AdamW(fused=True)", "AdamW(foreach=True)", "torch.compile(step)", "DeepSpeedCPUAdam"]
DEFAULT = ["zerofx", *PEERS]
ZEROFX = [*PRECISIONS, *CLIPPED]


def available(names: list[str], device: str) -> list[str]:
    """Leave out what is not installed, and say so."""
    if "DeepSpeedCPUAdam" in names and (
        device != "cpu" or importlib.util.find_spec("deepspeed") is None
    ):
        print("DeepSpeedCPUAdam left out: needs deepspeed, on a CPU", file=sys.stderr)
        return [name for name in names if name != "DeepSpeedCPUAdam"]
    return names


def bounds(start: torch.Tensor) -> list[System]:
    """STREAM's copy and triad, on arrays as long as the parameter."""
    one, other, third = start.clone(), start.clone(), torch.empty_like(start)
    return [
        System("copy", lambda: third.copy_(one), 8),
        System("triad", lambda: torch.add(one, other, alpha=3.0, out=third), 12),
    ]


def timed(run: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def timed_in_turn(
    systems: list[System], start: torch.Tensor, device: str, rounds: int, steps: int
) -> list[System]:
    """Time the systems and the bounds, which it returns behind them."""
    for system in systems:
        for _ in range(3):  # states are made, kernels compiled, and compiled again with states
            timed(system.run, device)
    systems = systems + bounds(start)
    for _ in range(rounds):
        for system in systems:
            system.fastest_s.append(min(timed(system.run, device) for _ in range(steps)))
    return systems


def differences(systems: list[System]) -> dict[str, float]:
    """How far each float32 parameter is from the first peer's, or the first's, at most."""
    trained = [s for s in systems if s.parameter is not None and s.parameter.dtype is torch.float32]
    trained = [s for s in trained if s.bytes_per_element in (ADAMW_BYTES, *CLIPPED.values())]
    if not trained:
        return {}
    expected = next((s for s in trained if s.name in PEERS), trained[0]).parameter
    return {s.name: (s.parameter - expected).abs().max().item() for s in trained}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=64e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of each system in a round")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--systems", nargs="+", default=DEFAULT, choices=[*ZEROFX, *PEERS])
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    device, length = arguments.device, int(arguments.elements)
    generator = torch.Generator(device).manual_seed(0)
    start, gradient = (torch.randn(length, device=device, generator=generator) for _ in range(2))
    systems = [
        (zerofx if name in ZEROFX else torch_optimizer)(name, start, gradient)
        for name in available(arguments.systems, device)
    ]
    systems = timed_in_turn(systems, start, device, arguments.rounds, arguments.steps)
    found = differences(systems)
    first = systems[0]
    *_, copy, _triad = systems
    rows = []
    for system in systems:
        seconds = statistics.median(system.fastest_s)
        ratio = statistics.median(
            mine / its for mine, its in zip(system.fastest_s, first.fastest_s, strict=True)
        )
        of_copy = statistics.median(
            (system.bytes_per_element / mine) / (copy.bytes_per_element / its)
            for mine, its in zip(system.fastest_s, copy.fastest_s, strict=True)
        )
        rows.append(
            [
                system.name,
                seconds * 1e3,
                system.bytes_per_element * length / seconds / 1e9,
                f"{of_copy:.2f}",
                f"{ratio:.2f}x",
                found.get(system.name, ""),
            ]
        )
    where = torch.cuda.get_device_name() if device == "cuda" else f"{arguments.threads} threads"
    print(f"AdamW, {length:,} elements, torch {torch.__version__}, {device} ({where})")
    headers = ["system", "ms", "GB/s", "of copy", f"time / {first.name}", "largest difference"]
    print(tabulate(rows, headers, floatfmt=("", ".2f", ".1f", "", "", ".0e")))
    return int(any(difference > LARGEST_DIFFERENCE for difference in found.values()))


if __name__ == "__main__":
    sys.exit(main())
