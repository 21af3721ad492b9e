"""``python -m zerofx calibrate``: measure this machine, for plans."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from zerofx.accelerator import kind
from zerofx.options import environment
from zerofx.planning.calibrate import as_json, calibrate
from zerofx.runtime.comm.communication import Communicator, default_group


def add_to(subparsers: Any) -> None:
    """Add the command ``calibrate``."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine, for plans",
        description="Train small models for some seconds and write down what operators, "
        "collectives and whole steps took, for plan --hardware and the option hardware. Under "
        "torchrun its ranks measure together, and share what they share in a training.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--inductor",
        action="store_true",
        help="measure a step that Inductor compiles too, which takes longer",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure, and print the figures on rank 0 or write them."""
    if chosen.json is not None and not chosen.json.parent.is_dir():
        raise FileNotFoundError(f"{chosen.json.parent} is no folder: {chosen.json} has no place")
    started = time.perf_counter()
    device = torch.device("cpu")
    if (accelerator := kind()) is not None:
        device = torch.device(accelerator, int(environment().get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    communicator = Communicator.of(default_group(environment(), device))
    figures = calibrate(communicator, device, with_inductor=chosen.inductor)
    if communicator.rank == 0:
        text = json.dumps(as_json(figures), indent=1)
        if chosen.json is not None:
            chosen.json.write_text(text + "\n", encoding="utf-8")
        print(f"{figures} ({figures.source})" if chosen.json else text)
        print(
            f"measured in {time.perf_counter() - started:.0f} s; four of five steps are expected "
            f"within a factor of {figures.spread:.2f} of what a plan says"
        ) if chosen.json else None
    return 0
