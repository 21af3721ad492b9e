"""Measure what a group's links carry and its ranks compute, once, and agree on it."""

from __future__ import annotations

import logging
import math
import pickle
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerofx import compat
from zerofx.accelerator import is_accelerator
from zerofx.hardware import NOMINAL, Hardware, Link, slowest_link, with_links
from zerofx.ir.key import NoKeyError, described, described_package, key_of
from zerofx.runtime.comm.agreement import AgreementError, rendezvous
from zerofx.runtime.comm.communication import Communicator

logger = logging.getLogger("zerofx")

TIMES = 3
"""The number of times that each thing is timed: the fastest counts."""

SMALL_BYTES = 2**18
LONGEST_S = 0.1
"""If the small buffer says that large ones take longer than this, the small one decides."""

# Of a CPU, and of an accelerator:
LARGE_BYTES = (2**22, 2**26)
IN_A_ROW = (1, 8)
"""The calls that are timed together: the host starts an accelerator's while others run."""
MATRIX = ({torch.float32: 512}, {torch.bfloat16: 4096, torch.float32: 4096})
NUMEL = (2**22, 2**25)
"""Of a sum: enough to leave the caches, and two of them a quarter of a GB of an accelerator."""

LIFE_S = 86400.0
"""How long figures are taken for those of the machines still: a start that follows a crash makes
the same plans, and need not capture and compile what it has."""

_Kind = tuple[str, tuple[tuple[str, int], ...]]
"""A kind of device, and the axes along which ranks communicate with it."""

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, Hardware]] = (
    weakref.WeakKeyDictionary()
)


def measured(
    communicator: Communicator,
    device: torch.device,
    name: str,
    timeout_s: float,
    is_kept: bool = False,
) -> Hardware | None:
    """The group's figures for tensors of this device; measured, collectively, at the first call.

    If they are ``is_kept``, what all its ranks have measured within a day on the same machines is
    not measured again.

    The slowest rank's, rounded to powers of two, so that noise rarely changes a plan.  On a mesh of
    two axes each has figures of its link.  ``name`` says what the ranks meet for.  None where there
    is nothing to measure: a world of one, or a group that only pretends to communicate.

    Raises: AgreementError if a rank does not join within ``timeout_s``.
    """
    group = communicator.group
    if group is None or communicator.world_size == 1 or "fake" in dist.get_backend_config(group):
        return None
    known, of = _known.setdefault(group, {}), (device.type, communicator.mesh.axes)
    if of not in known:
        store = compat.tensors.agreement_store(group)
        try:
            rendezvous(store, name, communicator.rank, communicator.world_size, timeout_s)
        except RuntimeError as error:
            raise AgreementError(
                f"{error}. All ranks measure the link there, unless all are given its figures: "
                "options={'hardware': ...} or ZEROFX_HARDWARE"
            ) from None
        with torch.no_grad(), compat.tensors.real_tensors():
            known[of] = _measure(communicator, device, is_kept)
    return known[of]


def rounded(figure: float) -> float:
    """The nearest power of two."""
    return 2.0 ** round(math.log2(figure))


WORST = {
    "latency_s": max,
    "bytes_per_s": min,
    "flops_per_s": min,
    "float32_flops_per_s": min,
    "memory_bytes_per_s": min,
}
"""Of each figure that ranks measure, the slowest rank's."""


def slowest(figures: Iterable[Hardware], source: str = "given") -> Hardware:
    """Return the figures that all ranks reach, along each axis if they have links of several."""
    figures = list(figures)
    reached: dict[str, Any] = {}
    for name, worst in WORST.items():
        of_ranks = [figure for one in figures if (figure := getattr(one, name)) is not None]
        reached[name] = rounded(worst(of_ranks)) if of_ranks else None
    overlaps = all(each.overlaps for each in figures)
    links = {
        axis: _rounded_link(slowest_link([each.links[axis] for each in figures]))
        for axis in figures[0].links
    }
    return Hardware(**reached, overlaps=overlaps, links=links, source=source)


def _rounded_link(link: Link) -> Link:
    return Link(rounded(link.latency_s), rounded(link.bytes_per_s), link.overlaps)


def _measure(communicator: Communicator, device: torch.device, is_kept: bool) -> Hardware:
    # Communicators of their own: what they send is no step's traffic.
    probe, mesh = Communicator(communicator.group), communicator.mesh
    # On all ranks, whatever they keep: it connects them.
    like = torch.empty(0, device=device)
    peers = [part.takes_pieces(like) for part in communicator.parts()]
    name = _name_of(communicator, device, peers) if is_kept else ""
    measured_s, mine = _kept(name)
    is_new = time.time() - measured_s < LIFE_S
    if probe.gather_whole(torch.tensor([float(is_new)], device=device)).min().item() < 1:
        if mesh.outer:
            axes = [axis for axis, _ in mesh.axes]
            groups = [communicator.along(axis).group for axis in axes]
            mine = figures_of_axes(dict(zip(axes, map(Communicator, groups), strict=True)), device)
        else:
            mine = own_figures(probe, device)
        if name:
            compat.compile_cache.keep(name, pickle.dumps((time.time(), mine)))
    # By the ranks of all nodes, as all make the same plan.
    numbers = _numbers(mine)
    every = probe.gather_whole(torch.tensor(numbers, dtype=torch.float64, device=device))
    return slowest(
        (_with_numbers(mine, row) for row in every.view(-1, len(numbers)).tolist()),
        source=f"measured, the slowest of {probe.world_size} ranks",
    )


def _name_of(communicator: Communicator, device: torch.device, peers: Sequence[bool]) -> str:
    """Return what a rank's figures are kept under: its place among the ranks, and its machine.

    And the ways they communicate: their backends, and which ``peers`` read each other's memory.
    Empty if the package's code has changed since it was imported.
    """
    kind = torch.get_device_module(device).get_device_name() if is_accelerator(device) else ""
    mesh, threads = communicator.mesh, torch.get_num_threads()
    groups = [part.group for part in communicator.parts()]
    backends = [str(dist.get_backend_config(group)) for group in groups]
    place = str(torch.__version__), platform.node(), device.type, kind, threads, mesh
    try:
        return key_of(described_package(), described((*place, backends, peers)))
    except (NoKeyError, OSError) as reason:
        logger.info("a start after this one measures anew: it has %s", reason)
        return ""


def _kept(name: str) -> tuple[float, Hardware]:
    """Return when figures were measured, and these; at no time if there are none to be read."""
    found = compat.compile_cache.kept(name) if name else None
    try:
        measured_s, figures = pickle.loads(found or b"")
        if isinstance(measured_s, float) and isinstance(figures, Hardware):
            return measured_s, figures
    except Exception:  # whatever it is that some other version has written
        pass
    return -math.inf, NOMINAL


def _numbers(figures: Hardware) -> list[float]:
    """Return what a rank tells the others: 0 for what there is none of."""
    numbers = [getattr(figures, name) or 0.0 for name in WORST]
    for link in figures.links.values():
        numbers += [link.latency_s, link.bytes_per_s]
    return numbers


def _with_numbers(figures: Hardware, numbers: Sequence[float]) -> Hardware:
    """Return the figures of the rank that has told these numbers."""
    own, of_links = numbers[: len(WORST)], numbers[len(WORST) :]
    changed: dict[str, Any] = {
        name: figure for name, figure in zip(WORST, own, strict=True) if figure
    }
    links = {
        axis: replace(link, latency_s=latency_s, bytes_per_s=bytes_per_s)
        for (axis, link), latency_s, bytes_per_s in zip(
            figures.links.items(), of_links[::2], of_links[1::2], strict=True
        )
    }
    return replace(figures, links=links, **changed)


def figures_of_axes(probes: Mapping[str, Communicator], device: torch.device) -> Hardware:
    """Return this rank's figures on a mesh, of the link along each axis.

    The ranks of all nodes measure at the same time, and share what they share in a step.  Along an
    axis of one rank nothing travels: it counts as the other one.
    """
    links = {a: own_link(probe, device) for a, probe in probes.items() if probe.world_size > 1}
    every = {axis: links.get(axis, slowest_link(links.values())) for axis in probes}
    return with_links(every, **own_compute(device))


def own_figures(probe: Communicator, device: torch.device) -> Hardware:
    """Return this rank's figures.  Collective: all ranks exchange the same buffers."""
    return Hardware(**asdict(own_link(probe, device)), **own_compute(device))


def own_link(probe: Communicator, device: torch.device) -> Link:
    """Return the figures of a group's link on this rank; collective."""
    ranks, on_accelerator = probe.world_size, is_accelerator(device)
    large_bytes = LARGE_BYTES[on_accelerator]

    def exchange(nbytes: int) -> float:
        """Seconds of a gather and a reduce-scatter of a buffer, on average."""
        numel = max(nbytes // 4 // ranks, 1)
        shard, whole = (torch.ones(n, device=device) for n in (numel, numel * ranks))

        def both() -> None:
            probe.wait(probe.all_gather_start(shard, ranks))
            probe.wait(probe.reduce_scatter_start(whole, "mean", ranks))

        return _fastest(both, device) / 2

    latency_s = exchange(4 * ranks)
    nbytes, seconds = SMALL_BYTES, exchange(SMALL_BYTES)
    # All ranks go by the slowest of them, or they would exchange different buffers.
    sending_s = max(seconds - latency_s, seconds / 10)
    here = torch.tensor([sending_s], dtype=torch.float64, device=device)
    times = large_bytes / SMALL_BYTES * TIMES * IN_A_ROW[on_accelerator]
    if probe.gather_whole(here).max().item() * times < LONGEST_S:
        nbytes, seconds = large_bytes, exchange(large_bytes)
    sent = nbytes * (ranks - 1) / ranks
    bytes_per_s = sent / max(seconds - latency_s, seconds / 10)
    return Link(latency_s, bytes_per_s, probe.overlaps(here))


def own_compute(device: torch.device) -> dict[str, Any]:
    """Return what this rank computes in a second, by the names that ``Hardware`` has."""
    on_accelerator = is_accelerator(device)
    flops_per_s = {}
    for dtype, size in MATRIX[on_accelerator].items():
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        flops_per_s[dtype] = 2 * size**3 / _fastest(partial(torch.mm, matrix, matrix), device)
    vector = torch.ones(NUMEL[on_accelerator], device=device)
    other = torch.ones_like(vector)
    return {
        "flops_per_s": max(flops_per_s.values()),
        "float32_flops_per_s": flops_per_s[torch.float32],
        "memory_bytes_per_s": 3 * vector.nbytes / _fastest(lambda: vector.add_(other), device),
    }


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    run()  # connects, allocates, compiles
    seconds, times = [], IN_A_ROW[is_accelerator(device)]
    for _ in range(TIMES):
        _finish(device)
        started = time.perf_counter()
        for _ in range(times):
            run()
        _finish(device)
        seconds.append((time.perf_counter() - started) / times)
    return min(seconds)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
