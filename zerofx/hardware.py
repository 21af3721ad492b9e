"""The speed of ranks and of their link: the numbers that plans are made with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerofx.calibration import AS_ADDED_UP, Calibration, Cost, calibration_of

LARGEST_BUCKET_BYTES = 64 * 2**20
"""Two gathered buckets of this size are a small part of any memory that trains such layers."""

SMALLEST_BUCKET_BYTES = 2**20

PIECE_BYTES = 2**20
"""Ranks of one machine reduce each other's memory in pieces of so much, which stay in a cache."""

LATENCY_SHARE = 0.1
"""The share of a bucket's transfer that may be latency."""

NEEDED = ("latency_s", "bytes_per_s")


@dataclass(frozen=True)
class Link:
    """Figures of the link between some ranks: of all, or of those along one axis of a mesh.

    ``latency_s`` is what a collective takes that carries nothing, ``bytes_per_s`` what each rank
    sends in a second; ``overlaps`` says whether that goes on while the rank computes: reads of a
    neighbour's memory happen where the program waits for them.
    """

    latency_s: float
    bytes_per_s: float
    overlaps: bool = True

    def transfer_s(self, nbytes: float, world_size: int) -> float:
        """Seconds to gather or reduce-scatter a whole buffer; none in a world of one."""
        if world_size == 1:
            return 0.0
        return self.latency_s + nbytes * (world_size - 1) / world_size / self.bytes_per_s

    def bucket_bytes(self, world_size: int) -> int:
        """The bytes of a bucket that travels over this link alone."""
        return bucket_bytes(partial(self.transfer_s, world_size=world_size))

    def __str__(self) -> str:
        return _text({name: getattr(self, name) for name in LINK_FIGURES})


LINK_FIGURES = tuple(each.name for each in fields(Link))
"""The names of figures that each axis of a mesh may have of its own."""


@dataclass(frozen=True)
class Hardware(Link):
    """Figures of a group's slowest rank and link.

    The fields of ``Link`` are those of all ranks together.  On a mesh ``links`` may have those of
    each axis, by its name, and of several at once, by their names with commas; those of all ranks
    are then the slowest of them at each thing.
    ``copy_bytes_per_s`` is what goes between device and host in one direction,
    ``host_bytes_per_s`` what the host's memory carries, ``file_bytes_per_s`` what a rank's files
    do: nobody measures these three, they are of PCIe 4, of a few memory channels and of one NVMe
    disk.  ``flops_per_s`` is that of matrices, ``float32_flops_per_s`` of those in float32, if they
    are slower than others.  ``spread`` is the factor within which four of five times of a lane are
    taken to lie, above or below.  A ``calibration`` says what each operator and collective takes,
    in place of the figures that programs are made with.  Units: seconds, bytes, floating point
    operations.
    """

    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 1e12
    copy_bytes_per_s: float = 2.5e10
    host_bytes_per_s: float = 5e10
    file_bytes_per_s: float = 3e9
    source: str = "given"
    float32_flops_per_s: float | None = None
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    spread: float = 2.0
    calibration: Calibration | None = field(default=None, hash=False)

    def flops_per_s_in(self, dtype: torch.dtype) -> float:
        """The arithmetic of matrices of a dtype in a second."""
        if self.float32_flops_per_s is None or dtype.itemsize < torch.float32.itemsize:
            return self.flops_per_s
        return self.float32_flops_per_s

    def whole(self, lowering: str) -> Cost:
        """Return what steps take, by their collectives and the seconds that they add up to."""
        known = self.calibration.whole if self.calibration else {}
        return known.get(lowering, AS_ADDED_UP)

    def along(self, axis: str) -> Link:
        """The link between the ranks along an axis; along several, or all, the slowest of theirs.

        One link is that of every axis, unless each has figures of its own.
        """
        if not self.links:
            return self
        if axis in self.links:
            return self.links[axis]
        named = [self.links[name] for name in axis.split(",") if name in self.links]
        return slowest_link(named or self.links.values())

    def on_one_axis(self, axes: Iterable[str]) -> Hardware:
        """Return the same for ranks that are not told apart by axes: those along ``axes``."""
        axes = list(axes)
        together = self.links.get(",".join(axes))
        of_axes = [self.links[axis] for axis in axes] or self.links.values()
        link = asdict(together or slowest_link(of_axes))
        values = {name: getattr(self, name) for name in _OF_RANKS}
        return Hardware(**link, **values, **self._known_beside)

    @property
    def _known_beside(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _BESIDE}

    @property
    def of_ranks(self) -> str:
        """The text of what is no link's, without what is assumed of the host."""
        names = ("copy_bytes_per_s", "host_bytes_per_s", "file_bytes_per_s")
        assumed = {name: getattr(Hardware, name) for name in names}
        found = {name: getattr(self, name) for name in _OF_RANKS}
        return _text({n: v for n, v in found.items() if v not in (None, assumed.get(n))})

    def __str__(self) -> str:
        """The text that the option ``hardware`` takes."""
        if not self.links:
            return f"{super().__str__()} {self.of_ranks}"
        figures = {axis: asdict(link) for axis, link in self.links.items() if "," not in axis}
        values = {f"{axis}.{n}": value for axis, of in figures.items() for n, value in of.items()}
        return f"{_text(values)} {self.of_ranks}"


def _text(figures: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in figures.items())


_BESIDE = ("source", "spread", "calibration")
"""The names of what is known of figures, and no figure that plans are made with."""

_OF_RANKS = tuple(
    name
    for each in fields(Hardware)
    if (name := each.name) not in (*LINK_FIGURES, "links", *_BESIDE)
)
"""The names of figures that are of ranks, and the same whichever axis they communicate along."""


def slowest_link(links: Iterable[Link]) -> Link:
    """Return the figures that all of these reach: over several links the slowest sets the pace."""
    links = list(links)
    return Link(
        max(link.latency_s for link in links),
        min(link.bytes_per_s for link in links),
        all(link.overlaps for link in links),
    )


def with_links(links: Mapping[str, Link], **figures: Any) -> Hardware:
    """Return figures of ranks whose links along the axes of a mesh differ."""
    return Hardware(**asdict(slowest_link(links.values())), links=dict(links), **figures)


def bucket_bytes(seconds: Callable[[int], float]) -> int:
    """The smallest bucket of 1, 8 or 64 MiB of whose transfer a tenth or less is latency.

    ``seconds`` are those that a bucket of so many bytes travels.  Coarse, for a layout should not
    change with the noise of a measurement.  If a tenth is not to be had, or nothing travels, 64
    MiB.
    """
    chosen, latency_s = SMALLEST_BUCKET_BYTES, seconds(0)
    while chosen < LARGEST_BUCKET_BYTES:
        if latency_s <= LATENCY_SHARE * seconds(chosen) and seconds(chosen) > 0:
            return chosen
        chosen *= 8
    return LARGEST_BUCKET_BYTES


NOMINAL = Hardware(latency_s=1e-4, bytes_per_s=2.5e10, source="assumed")
"""Accelerators on a fast network: for programs that no group of ranks will run."""


def of(figures: str | Mapping[str, object]) -> Hardware:
    """Figures by name, or ``latency_s=3e-4 bytes_per_s=1e9 overlaps=0``; commas are as good.

    Or the path of a JSON file with these names, as ``python -m zerofx calibrate`` writes it, and
    ``benchmarks/first_contact.py``.
    ``latency_s`` and ``bytes_per_s`` must be among them.  If they are not the same along all axes
    of a mesh, each axis has its own: ``node.latency_s=1e-3``, or a mapping by the axis's name.

    Raises: ValueError for a name that is unknown or missing, and for what is no positive number;
    ``overlaps`` is 0 or 1, and a latency may be 0.
    """
    given = _items(figures) if isinstance(figures, str) else dict(figures)
    beside = _beside(given)
    common, axes = _by_axis(given)
    values = {name: value for name, value in common.items() if value is not None or name in _NEVER}
    _check_known(values, (*LINK_FIGURES, *_OF_RANKS))
    link = _link(values, "") if not axes else None
    of_ranks: dict[str, Any] = {
        name: _number(name, values[name]) for name in values if name in _OF_RANKS
    }
    if link is not None:
        return Hardware(**asdict(link), **of_ranks, **beside)
    for name in NEEDED:
        if name in values:
            raise ValueError(
                f"{name} is given beside that of {', '.join(axes)}: give it to each axis alone"
            )
    shared = {name: values[name] for name in values if name == "overlaps"}
    links = {axis: _link({**shared, **given}, f"{axis}.") for axis, given in axes.items()}
    return with_links(links, **of_ranks, **beside)


def _beside(given: dict[str, object]) -> dict[str, Any]:
    """Take out of a file's figures what a calibration has written beside them."""
    found: dict[str, Any] = {}
    if "calibration" in given:
        found["calibration"] = calibration_of(given.pop("calibration"))
    if "source" in given:
        found["source"] = str(given.pop("source"))
    if "spread" in given:
        found["spread"] = _number("spread", given.pop("spread"))
        if found["spread"] < 1:
            raise ValueError(f"spread is a factor of 1 or more, not {found['spread']:g}")
    return found


_NEVER = tuple(each.name for each in fields(Hardware) if each.default is not None)
"""The names of figures that may not be None, which is to say that nobody knows."""


def _by_axis(
    given: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Return the figures of all ranks, and those of each axis by its name."""
    common: dict[str, object] = {}
    axes: dict[str, dict[str, object]] = {}
    for name, value in given.items():
        axis, dot, figure = name.rpartition(".") if isinstance(name, str) else ("", "", name)
        if isinstance(value, Mapping):
            axis, of_axis = name, dict(value)
        elif dot:
            of_axis = {figure: value}
        else:
            common[name] = value
            continue
        known = axes.setdefault(axis, {})
        for figure in of_axis:
            if figure in known:
                raise ValueError(f"{axis}.{figure} is given twice")
            if figure in _OF_RANKS:
                raise ValueError(
                    f"{axis}.{figure} is none of a link, and the same along all axes: give "
                    f"{figure} alone"
                )
        _check_known(of_axis, LINK_FIGURES, f"{axis}.")
        known |= of_axis
    return common, axes


def _check_known(names: Iterable[str], known: Sequence[str], prefix: str = "") -> None:
    for name in names:
        if name not in known:
            full = f"{prefix}{name}" if prefix else name
            raise ValueError(f"{full!r} is unknown; known: {', '.join(known)}")


def _link(values: Mapping[str, object], prefix: str) -> Link:
    """Return the link of these figures, whose names have the ``prefix`` where they are given."""
    for name in NEEDED:
        if name not in values:
            raise ValueError(f"{prefix}{name} is missing; needed: {', '.join(NEEDED)}")
    latency_s, bytes_per_s = (_number(f"{prefix}{name}", values[name]) for name in NEEDED)
    overlaps = _number(f"{prefix}overlaps", values.get("overlaps", True))
    if overlaps not in (0.0, 1.0):
        raise ValueError(f"{prefix}overlaps is 0 or 1, not {values['overlaps']!r}")
    return Link(latency_s, bytes_per_s, bool(overlaps))


def _items(text: str) -> dict[str, object]:
    if text.strip().lower().endswith(".json"):
        try:
            content = Path(text.strip()).read_text(encoding="utf-8-sig")
            values = json.loads(content, object_pairs_hook=_each_once)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{text} holds no figures by name")
        return values
    items = [item.partition("=") for item in text.replace(",", " ").split()]
    for name, separator, _ in items:
        if not separator:
            raise ValueError(f"{name!r} is not of the form name=number, nor a .json file's path")
    return _each_once([(name, value) for name, _, value in items])


def _each_once(items: Sequence[tuple[str, object]]) -> dict[str, object]:
    values = dict(items)
    for name in values:
        if sum(name == other for other, _ in items) > 1:
            raise ValueError(f"{name} is given twice")
    return values


def _number(name: str, value: object) -> float:
    figure = name.rpartition(".")[2]
    is_switch, may_be_zero = figure == "overlaps", figure in ("latency_s", "overlaps")
    what = "0 or 1" if is_switch else "a positive number" + " or 0" * may_be_zero
    try:
        if isinstance(value, bool) and not is_switch:
            raise ValueError(value)
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {what}, not {value!r}") from None
    if not (0 < number < float("inf") or (may_be_zero and number == 0)):
        raise ValueError(f"{name} is {what}, not {value!r}")
    return number
