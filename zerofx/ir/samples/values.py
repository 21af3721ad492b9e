"""Describes a value: its kind, its dimensions of samples, the powers that it grows with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from torch import fx

from zerofx.ir.samples.nodes import shape_of

Span = tuple[int, int]
"""Says where in a dimension samples are counted: how much lies outside of them, how many."""

Dims = tuple[Span | None, ...]
"""Of each dimension how it counts samples; None if it does not."""


class Part(NamedTuple):
    """Says which of ``size`` samples a value is of, and of which value they were cut."""

    origin: fx.Node | None
    begin: Fraction
    end: Fraction
    size: int


WHOLE = Part(None, Fraction(0), Fraction(1), 0)


class Objection(NamedTuple):
    """Says which node a value cannot be averaged over ranks for, and what it does."""

    node: fx.Node
    why: str


class Kind(StrEnum):
    """The kinds of values."""

    SAME = "same"
    """Made of nothing that a batch has to do with."""
    SAMPLES = "samples"
    """Of one sample each, along some dimension."""
    COUNT = "count"
    """Made of sums over samples of what the batch has: no parameter has to do with it."""
    TOTAL = "total"
    """Linear in sums over samples."""
    MIXED = "mixed"
    """None of these: it depends on a whole batch in some other way."""


@dataclass(frozen=True)
class Value:
    """Says how a value depends on the batch.

    ``degrees`` are the powers of a batch's size that its terms grow with: 1 for a sum, 0 for a sum
    that has been divided by a count.  ``is_scaled``: of one sample each, but for a count of all.
    ``is_data``: it has no gradient, as no parameter has to do with it or it is whole numbers of
    one sample each.  ``is_marked``: a count that capture knows to be divided by.
    ``may_count`` says what is in it that may be a count of a rank's batch.
    ``is_sorted``: its samples are in an order that the batch has made.
    ``objection`` says what made a ``MIXED`` one; of a sum that is divided by nothing yet, or of its
    terms, what scales it by a number which may be a count.  ``part`` says which of the batch's
    samples these are.
    """

    kind: Kind
    dims: Dims = ()
    degrees: frozenset[int] = frozenset({0})
    is_scaled: bool = False
    is_data: bool = True
    is_marked: bool = False
    may_count: str = ""
    is_sorted: bool = False
    objection: Objection | None = None
    part: Part = WHOLE

    @property
    def is_plain(self) -> bool:
        """Return whether no number of the whole batch has to do with it."""
        return self.kind == Kind.SAME or (self.kind == Kind.SAMPLES and not self.is_scaled)

    @property
    def is_linear(self) -> bool:
        """Return whether it is followed by what is linear alone."""
        return self.kind in (Kind.TOTAL, Kind.COUNT) or self.is_scaled


class MixedError(Exception):
    """Ends a rule: a node's value depends on a whole batch in some other way than by sums."""

    def __init__(self, node: fx.Node, why: str, dims: Dims = ()):
        super().__init__(why)
        self.objection, self.dims = Objection(node, why), dims


NOT_LINEAR = "computes something that is not linear of a batch's sums"
"""Why most rules give up."""

COMPARES = "compares samples with one another"
MIXES = "mixes the samples of a batch"
OF_OTHERS = "takes samples that others decide on"

ONE = frozenset({1})
"""The powers of a batch's size that a sum grows with."""


def first_objection(values: Iterable[Value]) -> Objection | None:
    """Return what is objected to in the first value of which something is."""
    return next((value.objection for value in values if value.objection), None)


def parts_of(values: Iterable[Value]) -> list[Part]:
    """Return the parts of the batch that values are of, but for those that are of all samples."""
    found = dict.fromkeys(value.part for value in values if any(value.dims))
    return [part for part in found if part != WHOLE]


def check_parts(node: fx.Node, values: Iterable[Value], dims: Dims) -> None:
    """Raise MixedError where samples meet others: parts of the batch overlap, or differ in length.

    Two halves may be compared, as of pairs that lie one behind the other.
    """
    for one, other in itertools.combinations(parts_of(values), 2):
        is_of_one = one.origin is other.origin or one.size == other.size
        is_same = (one.begin, one.end) == (other.begin, other.end)
        overlap = one.begin < other.end and other.begin < one.end
        are_equal = one.end - one.begin == other.end - other.begin
        if is_of_one and not is_same and (overlap or not are_equal):
            raise MixedError(node, COMPARES, dims)


def first_of(spans: Iterable[Span | None]) -> Span | None:
    return next(filter(None, spans), None)


def at_the_right(dims: Dims, ndim: int) -> Dims:
    return (*(None,) * (ndim - len(dims)), *dims)


def no_dims(node: fx.Node) -> Dims:
    return (None,) * len(shape_of(node))


def first_dim(node: fx.Node) -> Dims:
    shape = shape_of(node)
    return ((1, shape[0]), *(None,) * (len(shape) - 1))
