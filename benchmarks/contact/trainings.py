"""Sections that train: as eager torch does, with offload, beside a save, under the sanitizer."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from contact.findings import Findings
from contact.place import Place
from contact.steps import (
    Tower,
    batches,
    differing,
    everything,
    gpt,
    moved,
    program,
    squares_of,
    step_of,
    tower,
    train,
    vectors,
    with_zerofx,
)
from zerofx import compat

STEPS = 5
CLIP = 0.5

Results = dict[str, Any]


def parity(place: Place, found: Findings) -> None:
    cases = list(itertools.product((0, 1, 2, 3), (False, True), ("eager", "inductor")))
    alone = [case for case in cases if case[0] == 3 or case[2] == "eager"]
    with found.part("one rank"):
        for case in alone:
            _compare_with_eager(found, "one rank", [_parities(place, [case])])
    with found.part(place.words):
        _compare_with_eager(found, place.words, place.on_ranks(_parities, cases))


def _parities(place: Place, cases: list[tuple]) -> dict[tuple, tuple[float, float]]:
    """Of each case, how far the parameters and the losses are from the eager ones."""
    return {case: _parity(place, *case) for case in cases}


def _parity(place: Place, stage: int, autocast: bool, lowering: str) -> tuple[float, float]:
    torch.compiler.reset()
    start = gpt(place)
    how = {"clip": CLIP, "autocast": place.device.type if autocast else None}
    own, whole = copy.deepcopy(start), copy.deepcopy(start)
    options = {"stage": stage, "lowering": lowering}
    losses = train(own, _adamw(own), batches(place, STEPS), options, **how)
    # One process that sees the rows of all ranks.
    expected = train(whole, _adamw(whole), batches(place, STEPS, all_ranks=True), **how)
    mean = torch.stack(losses).double()
    if dist.is_initialized():
        on_host = mean.cpu()
        dist.all_reduce(on_host)
        mean = on_host / dist.get_world_size()
    eager = torch.stack(expected).double()
    off = ((mean.cpu() - eager.cpu()).abs() / eager.cpu().abs()).max().item()
    return moved(own, whole, start), off


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """One that does not blow up rounding where a gradient is nearly zero."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def _compare_with_eager(found: Findings, where: str, ranks: list[dict]) -> None:
    for stage, autocast, lowering in ranks[0]:
        results = [rank[stage, autocast, lowering] for rank in ranks]
        name = f"{where}: stage {stage}, {'autocast' if autocast else 'fp32'}, {lowering}"
        move, loss = map(max, zip(*results, strict=True))
        found.at_most(f"{name}: parameters off by so much of their move", move,
                      0.1 if autocast else 2e-3)  # fmt: skip
        found.at_most(f"{name}: losses off by", loss, 2e-2 if autocast else 1e-4)


# Offload

EVERYTHING = "optimizer,params,activations"
MOVED: list[tuple[int, str, str]] = [
    *((stage, "optimizer", "cpu") for stage in (1, 2, 3)),
    *((3, target, "cpu") for target in ("params", "activations", EVERYTHING)),
    *((3, target, "nvme") for target in ("optimizer", "params", "activations", EVERYTHING)),
]


def offload(place: Place, found: Findings) -> None:
    """Where updates move to the host they are compared among each other: kernels differ there."""
    with found.part("one rank"):
        _note_all(found, "one rank", [_offloaded(place)])
    with found.part(place.words):
        _note_all(found, place.words, place.on_ranks(_offloaded))


Checks = list[tuple[str, bool, str]]
"""What a rank has found: names, whether they hold, and details."""


def _note_all(found: Findings, where: str, ranks: list[Checks]) -> None:
    for rank, checks in enumerate(ranks):
        for name, passed, detail in checks:
            found.check(f"{where}, rank {rank}: {name}", passed, detail)


def _offloaded(place: Place) -> Checks:
    plain = {stage: _trained(place, {"stage": stage}) for stage in (1, 2, 3)}
    checks = [_bitwise("the same step twice", _trained(place, {"stage": 3}), plain[3])]
    on_host: Results = {}  # of each stage, what updates in host memory gave
    with tempfile.TemporaryDirectory(prefix=f"offload-{_rank()}-", dir=place.folder) as folder:
        for stage, target, tier in MOVED:
            options: dict[str, Any] = {"stage": stage, "offload": target, "offload_tier": tier}
            if tier == "nvme":
                options |= {"offload_dir": folder, "offload_cache_bytes": 2**22}
            own, name = _trained(place, options), f"stage {stage}, {target}, {tier}"
            if "optimizer" not in target or place.is_rehearsal:
                checks.append(_bitwise(f"{name}, and without", own, plain[stage]))
                continue
            # AdamW's update rounds otherwise on a CPU.
            off = max(_relative(own[key], value) for key, value in plain[stage].items())
            checks.append((f"{name}: as without, but for roundings", off <= 1e-3, f"{off:.1e}"))
            expected = on_host.setdefault(stage, own)
            checks.append(_bitwise(f"{name}, and states alone in host memory", own, expected))
    return checks


def _bitwise(name: str, own: Results, expected: Results) -> tuple[str, bool, str]:
    different = differing(own, expected)
    return f"{name}: bitwise alike", not different, ", ".join(different[:4])


def _trained(place: Place, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    torch.compiler.reset()
    model = tower(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"lowering": "eager", **options}
    losses = train(model, optimizer, vectors(place, 4), options, loss_of=squares_of)
    return {**everything(model, optimizer), "losses": torch.stack(losses).cpu()}


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other).norm() / other.double().norm().clamp(min=1e-30)).item()


# Snapshots


def snapshot(place: Place, found: Findings) -> None:
    with found.part("one rank"):
        _note_all(found, "one rank", [_saved(place)])
    with found.part(place.words):
        _note_all(found, place.words, place.on_ranks(_saved))


def _saved(place: Place) -> Checks:
    checks = []
    for name, options in {
        "stage 3": {"stage": 3},
        "stage 1": {"stage": 1},
        "states on the host": {"stage": 3, "offload": "optimizer"},
    }.items():
        different = _saved_with(place, options)
        words = ", ".join(different[:4])
        checks.append((f"{name}: what is saved is as at the call", not different, words))
    return checks


def _saved_with(place: Place, options: Mapping[str, Any]) -> list[str]:
    """The names of what a save has otherwise than it was when it was called."""
    torch.compiler.reset()
    model = _large_tower(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = with_zerofx(step_of(loss_of=squares_of), {"lowering": "eager", **options})
    given = [batch[:8] for batch in _large_vectors(place, 8)]  # short steps: updates come soon
    for batch in given[:3]:
        step(model, optimizer, batch)
    expected = everything(model, optimizer)
    folder = shared_folder(place)
    try:
        saving = zerofx.save(folder / "saved", model, optimizer, asynchronous=True)
        for batch in given[3:]:
            step(model, optimizer, batch)
        saving.wait()
        other = _large_tower(place)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        zerofx.load(folder / "saved", other, other_optimizer)
        different = differing(everything(other, other_optimizer), expected)
        if not differing(everything(model, optimizer), expected):
            different.append("nothing was trained meanwhile")
        return different
    finally:
        together()
        shutil.rmtree(folder, ignore_errors=True)


def _large_tower(place: Place) -> torch.nn.Module:
    """Large enough that copies of its shards are still under way when an update comes."""
    torch.manual_seed(0)
    return Tower(*place.pick((4096, 4), (128, 3))).to(place.device)


def _large_vectors(place: Place, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (8, place.pick(4096, 128))
    return [torch.randn(shape, generator=generator).to(place.device) for _ in range(number)]


def shared_folder(place: Place) -> Path:
    """A new folder in which all ranks meet."""
    name = [tempfile.mkdtemp(prefix="snapshot-", dir=place.folder)] if _rank() == 0 else [""]
    if dist.is_initialized():
        dist.broadcast_object_list(name, device=torch.device("cpu"))
    return Path(name[0])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def together() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        flag = torch.zeros(1)
        dist.all_reduce(flag)  # on the CPU: a barrier would take a GPU that it guesses


# Sanitizer


def sanitizer(place: Place, found: Findings) -> None:
    """It raises in the operator that races.  Compiled kernels and Triton's are out of its sight."""
    if not place.is_rehearsal:
        with found.part("a planted race"):
            found.check("a planted race is reported", _planted_race_is_reported(place))
    for name, options in {
        "stage 3": {"stage": 3},
        "stage 2": {"stage": 2},
        "states on the host": {"stage": 3, "offload": "optimizer"},
        "all on the host": {"stage": 3, "offload": EVERYTHING},
    }.items():
        with found.part(name):
            found.check(f"{name}: {STEPS} steps without an error", _sanitized(place, options))
    with found.part("beside a save"):
        found.check("beside a save: without an error", _sanitized(place, {"stage": 3}, saving=True))
    if place.gpus != 1:  # gloo's copies are its own affair
        with found.part(place.words):
            fine = place.on_ranks(_sanitized, {"stage": 3})
            found.check(f"{place.words}: without an error", all(fine))


def _planted_race_is_reported(place: Place) -> bool:
    values = torch.ones(2**20, device=place.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            values.mul_(2)  # without waiting for the stream that writes the ones
    except Exception as error:
        return type(error).__name__ == "CUDASanitizerErrors"
    return False


def _sanitized(place: Place, options: Mapping[str, Any], saving: bool = False) -> bool:
    """Whether all steps ran under the sanitizer; it raises what it finds."""
    if place.is_rehearsal:
        torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)  # it asks for that
    torch.compiler.reset()
    model = tower(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = with_zerofx(step_of(loss_of=squares_of), {"lowering": "eager", **options})
    given = vectors(place, STEPS + 2)
    # zerofx refuses to be called under a dispatch mode, for Dynamo compiles nothing there: the mode
    # is left around a call, and entered again around what has been lowered.
    with compat.tensors.without_dispatch_modes() as modes, contextlib.ExitStack() as stack:
        for batch in given[:2]:
            step(model, optimizer, batch)
        ran = _watch_lowered(modes)
        saved = None
        if saving:
            folder = tempfile.TemporaryDirectory(prefix="sanitizer-", dir=place.folder)
            path = Path(stack.enter_context(folder)) / "a"
            saved = zerofx.save(path, model, optimizer, asynchronous=True)
        for batch in given[2:]:
            step(model, optimizer, batch)
        if saved is not None:
            saved.wait()
    place.finish()
    is_there = "CUDASanitizerDispatchMode" in (type(mode).__name__ for mode in modes)
    return is_there and len(ran) == STEPS


def _watch_lowered(modes: Sequence[Any]) -> list[Any]:
    """Have the programs of the last step run under these dispatch modes; the list grows by each."""
    ran: list[Any] = []

    def watched(lowered: Callable) -> Callable:
        def run(*values: Any) -> Any:
            ran.append(lowered)
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return lowered(*values)

        return run

    for compiled in program().function.programs:
        if compiled.runtime is not None:
            compiled.runtime.program = watched(compiled.runtime.program)
    return ran
