"""Say what each operator takes on a machine that has been measured, and how far that goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

CONFIDENCE = 0.8
"""The share of steps that an interval of a plan is to contain."""


@dataclass(frozen=True)
class Cost:
    """The seconds of one call: so many, and so many for each byte and for each operation."""

    call_s: float = 0.0
    byte_s: float = 0.0
    flop_s: float = 0.0

    def seconds(self, nbytes: float, flops: float = 0.0) -> float:
        return self.call_s + nbytes * self.byte_s + flops * self.flop_s


AS_ADDED_UP = Cost(flop_s=1.0)
"""Takes a step to last as long as its nodes add up to: nobody has measured whole ones."""


@dataclass(frozen=True)
class Calibration:
    """Costs that some ranks have measured, of steps that run operator by operator.

    ``operators`` are by name, as ``aten.mm`` or ``aten.mm bfloat16``, and under ``OTHERS`` all
    that do no arithmetic of matrices;
    ``collectives`` by kind, as ``zerofx.all_gather_start``, of the bytes that each rank sends.
    ``step`` is what a call takes beside its operators, by parameters in place of bytes.  ``whole``
    is what steps took, by lowering: by collectives, at which ranks wait for each other, in place of
    bytes, and by the seconds that all this adds up to in place of operations.
    """

    operators: Mapping[str, Cost]
    collectives: Mapping[str, Cost] = field(default_factory=dict)
    step: Cost = field(default_factory=Cost)
    whole: Mapping[str, Cost] = field(default_factory=dict)
    ranks: int = 1

    def of(self, name: str) -> Cost | None:
        """Return what an operator costs; None if it has not been measured."""
        return self.operators.get(name)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


OTHERS = "others"


def calibration_of(values: Any) -> Calibration:
    """Return the calibration that a file has written down.

    Raises: ValueError for what is no such thing, which says where.
    """
    known = {each.name for each in fields(Calibration)}
    if not isinstance(values, Mapping) or not {"operators"} <= set(values) <= known:
        raise ValueError(
            f"calibration holds {', '.join(sorted(known))}, as `python -m zerofx calibrate` writes "
            "them; measure again"
        )
    read: dict[str, Any] = {}
    for name in ("operators", "collectives", "whole"):
        costs = _mapping(name, values.get(name, {}))
        read[name] = {key: _cost(f"{name}.{key}", value) for key, value in costs.items()}
    if OTHERS not in read["operators"]:
        raise ValueError(f"calibration.operators has no {OTHERS!r}; measure again")
    read["step"] = _cost("step", values.get("step", {}))
    read["ranks"] = int(_figure("ranks", values.get("ranks", 1)))
    return Calibration(**read)


def _mapping(name: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"calibration.{name} is figures by name, not {values!r}")
    return values


def _cost(name: str, values: Any) -> Cost:
    given, known = _mapping(name, values), {each.name for each in fields(Cost)}
    if not set(given) <= known:
        raise ValueError(f"calibration.{name} holds {', '.join(sorted(known))}, not {set(given)}")
    return Cost(**{key: _figure(f"{name}.{key}", value) for key, value in given.items()})


def _figure(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"calibration.{name} is a number, not {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"calibration.{name} is 0 or more, not {value!r}")
    return float(value)


Point = tuple[float, float, float]
"""The bytes, the operations and the seconds of a call."""


def fitted(points: Sequence[Point], *, call: float = 1.0) -> Cost:
    """Return the cost that is nearest to measured calls: least squares of relative errors.

    With ``call=0`` no call takes anything by itself.  No part of it is negative: of all sets of
    parts, the best one is taken that has none.
    """
    rows = torch.tensor(points, dtype=torch.float64)
    seconds = rows[:, 2:].clamp_min(1e-9)
    wanted = torch.ones(len(points), dtype=torch.float64)
    terms = torch.cat([torch.full_like(seconds, call), rows[:, :2]], 1) / seconds
    found, least = Cost(call_s=float(seconds.min())), float("inf")
    for parts in _sets(terms):
        scale = terms[:, parts].norm(dim=0)
        solved = torch.linalg.lstsq(terms[:, parts] / scale, wanted[:, None]).solution[:, 0]
        error = float((terms[:, parts] / scale @ solved - wanted).square().sum())
        if bool((solved >= 0).all()) and error < least - 1e-12:
            values = [0.0, 0.0, 0.0]
            for at, value in zip(parts, (solved / scale).tolist(), strict=True):
                values[at] = value
            found, least = Cost(*values), error
    return found


def _sets(terms: torch.Tensor) -> Iterable[list[int]]:
    """Return the sets of terms that are not all zero and do not outnumber the points."""
    there = [at for at in range(terms.shape[1]) if bool((terms[:, at] != 0).any())]
    for size in range(1, min(len(there), len(terms)) + 1):
        yield from map(list, itertools.combinations(there, size))
