"""Run everything that only a GPU can show, in one command, and write a report.

    python benchmarks/first_contact.py OUT
    python benchmarks/first_contact.py OUT --section kernels --section tuning
    python benchmarks/first_contact.py OUT --resume

For any CUDA machine with torch 2.11 to 2.15; nothing is downloaded.  Each section of
contact/sections.py runs in a process of its own: what fails, dies or takes too long leaves the
others alone.  OUT gets ``report.md``, ``<section>.json`` and ``<section>.log``, and
``hardware.json``, whose contents the option ``hardware`` takes.

Without a GPU the sections are rehearsed on the CPU, tiny, and the report says so.  Exit status 0
only if all sections passed that were asked for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from contact.driver import drive, read
from contact.findings import PASSED, Findings, write_json
from contact.report import hardware, opening, report
from contact.sections import SECTIONS, TOGETHER_S, Section

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 4.0
"""A rehearsal's limits are so many times those of a GPU: a small CPU compiles slowly."""


def versions() -> dict[str, str]:
    """Return what there is, without which a figure says little."""
    import torch

    found = {"zerofx": importlib.metadata.version("zerofx"), "torch": torch.__version__}
    found["triton"] = "not installed"
    for name in ("triton", "pytorch-triton"):
        try:
            found["triton"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    found["python"] = sys.version.split()[0]
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        found["driver"] = (answer.splitlines() or ["unknown"])[0].strip()
    return found


def header() -> dict[str, Any]:
    """Return what a run is of; equal headers make records comparable."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if gpus else "no GPU"
    return {"rehearsal": not gpus, "gpus": gpus, "gpu": name, "versions": versions()}


def inside(name: str, out: Path, patience: float) -> int:
    """Run one section in this process; its record says whether it passed."""
    (section,) = (each for each in SECTIONS if each.name == name)
    found = Findings(out / f"{name}.json")
    sys.path.insert(0, str(ROOT))  # some checks are those of the tests
    with found.part("the section runs"):
        from contact.place import Place

        run = getattr(importlib.import_module(f"contact.{section.module}"), name)
        run(Place.here(patience), found)
    found.end()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder that gets the report")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--section", action="append", choices=names, help="only these")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed")
    parser.add_argument("--patience", type=float, help="times the limits (4 without a GPU)")
    parser.add_argument("--inside", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.inside:
        return inside(arguments.inside, out, arguments.patience)
    if not any(
        e.name == "zero" for e in importlib.metadata.entry_points(group="torch_dynamo_backends")
    ):
        sys.exit(
            "zerofx is not installed, so that torch does not know its backend: pip install -e ."
        )

    this = header()
    patience = arguments.patience or (PATIENCE if this["rehearsal"] else 1.0)
    asked = [each for each in SECTIONS if each.name in (arguments.section or names)]
    print(opening(asked, this), flush=True)

    def command_of(section: Section) -> list[str]:
        how = ["--inside", section.name, "--patience", str(patience)]
        return [sys.executable, __file__, str(out), *how]

    records = drive(
        asked,
        out,
        command_of,
        header=this,
        together_s=TOGETHER_S,
        patience=patience,
        resume=arguments.resume,
        say=lambda line: print(line, flush=True),
    )
    every = {name: record for name in names if (record := read(out, name))} | records
    (out / "report.md").write_text(report(SECTIONS, every, this), encoding="utf-8")
    name = "hardware.rehearsed.json" if this["rehearsal"] else "hardware.json"
    write_json(out / name, hardware(every, this))
    passed = sum(record["status"] == PASSED for record in records.values())
    words = " (a rehearsal: there is no GPU)" if this["rehearsal"] else ""
    print(f"{out / 'report.md'}: {passed} of {len(records)} sections passed{words}")
    return 0 if passed == len(records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
