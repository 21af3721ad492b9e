"""The memory that compiled regions take, of a program that nobody runs.

Inductor orders a region's work itself, computes values where they are read, and writes results over
what nobody reads later.  Its own code says where: it runs here without kernels and without memory.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from zerofx import compat
from zerofx.compat.rehearsal import Storage
from zerofx.cost.own import Call, own_of_calls
from zerofx.cost.program import Lifetime, Rehearsal
from zerofx.ir.aliases import aliased_inputs
from zerofx.ir.interface import region_of, set_region
from zerofx.ir.key import key_of
from zerofx.ir.sizes import hinted_bytes
from zerofx.lower.regions import CompiledRegion, Region, run_operators, runs, shared_unasked

logger = logging.getLogger("zerofx")

_KNOWN: dict[str, _Trace | None] = {}
"""Holds what regions were found to allocate, by what they compute and torch's settings."""

NEXT_TO_NOTHING = 1e-4
"""Regions count operator by operator whose values are at most this of the bytes of inputs."""


def rehearsals_of(gm: fx.GraphModule) -> Iterator[Rehearsal]:
    """Yield what each region of a program allocates and frees; large ones are cut in it.

    Left out are those whose sizes were not known when they were captured, which do not run without
    memory, or all of whose values together are next to nothing, as norms: some regions have
    hundreds, for which Inductor takes a minute.
    """
    _cut(gm.graph)
    inputs = gm.graph.find_nodes(op="placeholder")
    next_to_nothing = NEXT_TO_NOTHING * sum(map(hinted_bytes, inputs))
    settings = repr(compat.inductor.settings())
    for run in runs(gm):
        if not isinstance(run, Region):
            continue
        made = [node for node in run.nodes if not aliased_inputs(node)]
        if sum(map(hinted_bytes, made)) <= next_to_nothing:
            continue
        key = key_of(run.text, settings)
        if key not in _KNOWN and run.module.sample is not None:
            _KNOWN[key] = _traced(run.module)
        trace = _KNOWN.get(key)
        if trace is not None:
            yield trace.of(run)


MOST_OPERATORS = 600
"""A larger region is cut: Inductor's time grows faster than its size, and layers become alike."""


def _cut(graph: fx.Graph) -> None:
    """Cut large regions where least of what has just been computed is read later.

    That is between two layers, and as many of them lie between two cuts.
    """
    number = 0
    for region, run in itertools.groupby(list(graph.nodes), region_of):
        nodes = list(run)
        number += 1
        if region is None:
            continue
        ends = _ends_of_parts(nodes) if len(nodes) > MOST_OPERATORS else set()
        for at, node in enumerate(nodes):
            set_region(node, number)
            number += at in ends


def _ends_of_parts(nodes: Sequence[fx.Node]) -> set[int]:
    """Return the positions of the last nodes of parts."""
    order = {node: at for at, node in enumerate(nodes)}
    last = [
        max((order.get(user, at) for user in node.users), default=at) for node, at in order.items()
    ]
    recent = MOST_OPERATORS // 4
    ends, begin = set(), 0
    while len(nodes) - begin > MOST_OPERATORS:
        window = range(begin + MOST_OPERATORS // 2, begin + MOST_OPERATORS)
        crossing = {
            at: sum(last[made] > at for made in range(at - recent, at + 1)) for at in window
        }
        end = min(window, key=crossing.__getitem__)
        ends.add(end)
        begin = end + 1
    return ends


class _Place(NamedTuple):
    """Names what a tensor lies in: an input, or what the region makes, by its number."""

    in_input: bool
    number: int


@dataclass
class _Trace:
    """Notes what a region allocates and frees, moment by moment: a call of an operator is one.

    ``held_until`` is the last moment at which an input is held, None for one that is to the end.
    """

    num_moments: int = 0
    made: list[Lifetime] = field(default_factory=list)
    held_until: list[int | None] = field(default_factory=list)
    results: list[_Place | None] = field(default_factory=list)

    def of(self, region: Region) -> Rehearsal:
        """Return this of one of the regions that are alike."""
        results: dict[fx.Node, int | fx.Node] = {}
        for node, place in zip(region.outputs, self.results, strict=True):
            if place is not None:
                number = place.number
                results[node] = region.inputs[number] if place.in_input else number
        until = zip(region.inputs, self.held_until, strict=True)
        held = {node: moment for node, moment in until if moment is not None}
        return Rehearsal(region.nodes, self.num_moments, self.made, results, held)


def _traced(region: CompiledRegion) -> _Trace | None:
    """Run a region without memory, on a CPU: what Inductor makes of it, or operator by operator.

    None if it cannot run so: an operator has nothing to say of tensors without memory.
    """
    assert region.sample is not None
    gm, sample = compat.rehearsal.on_cpu(region.gm, region.sample)

    def by_operators() -> Callable:
        return functools.partial(run_operators, gm)

    def compiled() -> Callable:
        with compat.rehearsal.without_kernels():
            return compat.inductor.compile_with_inductor(gm, [list(sample)], region.donated)

    for made in [by_operators] if region.is_one_operator else [compiled, by_operators]:
        watched = _Watched()
        try:
            results = compat.rehearsal.watch(made(), sample, watched.begin, watched.ran)
            return watched.end(region, results)
        except Exception as error:  # Inductor's, or an operator's: then it is an estimate
            logger.debug("a region that is planned does not run without memory: %s", error)
    return None


@dataclass
class _Watched:
    """Sees a region run.

    ``calls`` are of operators that may take memory for themselves, each with its moment.
    """

    trace: _Trace = field(default_factory=_Trace)
    inputs: list[Storage | None] = field(default_factory=list)
    storages: list[Storage | None] = field(default_factory=list)
    calls: list[tuple[int, Call]] = field(default_factory=list)

    def begin(self, values: Sequence[Any]) -> None:
        self.inputs = list(map(_storage_of, values))
        self.trace.held_until = [None] * len(values)

    def ran(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator that has run; it is a moment if it may have allocated something."""
        made = map(_storage_of, result if isinstance(result, tuple | list) else (result,))
        new = dict.fromkeys(of for of in made if of is not None and self._place(of) is None)
        if not new and not target._schema.is_mutable:
            return
        self._free()
        call = Call.of(target, args, kwargs, result)
        if call is not None:
            self.calls.append((self.trace.num_moments, call))
        for storage in new:
            self._make(storage, storage.nbytes)
        self.trace.num_moments += 1

    def end(self, region: CompiledRegion, results: Sequence[Any]) -> _Trace:
        """Return what has been noted.  Some results are copied, as when the region runs."""
        self._free()
        trace = self.trace
        given = [None if at in region.donated else of for at, of in enumerate(self.inputs)]
        returned = list(map(_storage_of, results))
        copied = shared_unasked(region.gm.graph, given, returned)
        for at, storage in enumerate(returned):
            if storage is not None and at in copied:
                trace.results.append(_Place(False, len(trace.made)))
                self._make(None, storage.nbytes)
            else:
                trace.results.append(self._place(storage))
        if copied or not trace.num_moments:
            trace.num_moments += 1
        kept = {place.number for place in trace.results if place and not place.in_input}
        for number, of in enumerate(trace.made):
            if of.end is None and number not in kept:
                trace.made[number] = of._replace(end=trace.num_moments - 1)
        owns = own_of_calls([call for _, call in self.calls])
        for (moment, _), own in zip(self.calls, owns, strict=True):
            first = next((at for at, of in enumerate(trace.made) if of.begin == moment), None)
            if own.kept and first is not None:
                of = trace.made[first]
                trace.made[first] = of._replace(nbytes=of.nbytes + own.kept)
            if own.during:
                trace.made.append(Lifetime(moment, moment, own.during))
        return trace

    def _make(self, storage: Storage | None, nbytes: int) -> None:
        self.storages.append(storage)
        self.trace.made.append(Lifetime(self.trace.num_moments, None, nbytes))

    def _place(self, storage: Storage | None) -> _Place | None:
        for in_input, known in ((True, self.inputs), (False, self.storages)):
            if storage is not None and storage in known:
                return _Place(in_input, known.index(storage))
        return None

    def _free(self) -> None:
        """Note what nobody holds any more: it was there until the last moment."""
        last = self.trace.num_moments - 1
        until, made = self.trace.held_until, self.trace.made
        for at, storage in enumerate(self.inputs):
            if storage is not None and until[at] is None and storage.is_gone:
                until[at] = last
        for at, storage in enumerate(self.storages):
            if storage is not None and made[at].end is None and storage.is_gone:
                made[at] = made[at]._replace(end=last)


def _storage_of(value: Any) -> Storage | None:
    """Return a tensor's storage; None for what has no bytes."""
    storage = Storage(value) if isinstance(value, torch.Tensor) else None
    return storage if storage is not None and storage.nbytes else None
