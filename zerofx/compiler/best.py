"""Choose for ``plan="auto"``: of the forms that fit a rank, the one predicted to be fastest."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zerofx.capture.step import CapturedStep
from zerofx.compiler.choices import refuse_conflicts
from zerofx.compiler.forecast import Forecast, Ranks
from zerofx.cost.program import flops, seconds
from zerofx.cost.timeline import milliseconds
from zerofx.cost.traffic import size_text
from zerofx.errors import BudgetError, StepError
from zerofx.hardware import LARGEST_BUCKET_BYTES, SMALLEST_BUCKET_BYTES
from zerofx.ir.interface import recorded
from zerofx.options import Options
from zerofx.passes.memory.exact import solver

BUCKETS = (SMALLEST_BUCKET_BYTES, 8 * SMALLEST_BUCKET_BYTES, LARGEST_BUCKET_BYTES)

AWAY = (
    (("optimizer",), ("activations",)),
    (("optimizer", "activations"),),
    (("optimizer", "params", "activations"),),
)
"""Targets of offload, those first that free least: others are tried if none of these fits."""

NEAR = 0.01
"""A choice this near to what no form beats is good enough."""

EQUAL = 2e-3
"""Forms whose predicted steps differ by less are as fast as each other."""

MOST_PROGRAMS = 24
LEAST_PROGRAMS = 3
MOST_NODES = 55_000
"""What is made to choose: so many programs, of so many nodes together, as those are all alike."""

Key = tuple[int, int | None, int | None, tuple[str, ...], bool]
"""What tells forms apart: stage, outer stage, bytes of a bucket, what leaves, recomputation."""


def key_of(options: Options) -> Key:
    """Return what tells a form with these options from others."""
    of = options
    return of.stage, of.outer_stage, of.bucket_bytes, of.offload, of.recompute


def words_of(options: Options) -> str:
    """Say a form in words."""
    words = [f"stage {options.stage}"]
    if options.outer_stage is not None:
        words = [f"stage {options.stage} within nodes and {options.outer_stage} between them"]
    if options.bucket_bytes is not None:
        words.append(f"buckets of {size_text(options.bucket_bytes)}")
    if not options.recompute:
        words.append("nothing recomputed")
    if options.memory_budget is not None and options.stage == 3:
        words.append("layers kept gathered as far as they fit")
    if options.offload:
        as_far = " as far as they have to" if options.memory_budget is not None else ""
        words.append(f"{', '.join(options.offload)} away{as_far}")
    return ", ".join(words)


@dataclass(frozen=True)
class Form:
    """One way to run a step: its options, and what its program would take of a rank.

    ``needs`` are all of the process's bytes on the device, with what lies outside the program, and
    ``spare`` what a process with more room takes beside them; ``states`` are the optimizers'.  What
    stays on the device may be improved by the share ``gap``, if it has been chosen.  Units: bytes,
    seconds.
    """

    options: Options
    needs: int
    step_s: float
    transfer_s: float = 0.0
    spare: int = 0
    states: int = 0
    gap: float | None = None

    @classmethod
    def of(cls, made: Forecast) -> Form:
        """Return what a forecast comes to, without its program, which takes memory."""
        residency = recorded(made.rewritten.gm.graph).decisions.residency
        return cls(
            made.options,
            made.device_bytes,
            made.expected_s,
            made.timeline.transfer_s,
            sum(row.nbytes for row in made.outside.values() if row.place == "spare"),
            made.kept.get("optimizer states", 0),
            residency.gap if residency is not None else None,
        )

    def is_better_than(self, other: Form) -> bool:
        """Return whether it is faster, or as fast with less to send."""
        if abs(self.step_s - other.step_s) > EQUAL * other.step_s:
            return self.step_s < other.step_s
        return self.transfer_s < (1 - EQUAL) * other.transfer_s

    def __str__(self) -> str:
        return words_of(self.options)


@dataclass(frozen=True)
class Choice:
    """The form that was chosen, and why.

    ``bound_s`` are the seconds of the step's matrix products alone, which no form beats.  ``tried``
    are the forms that were made, those that need more than ``limit`` bytes too; ``refused`` says
    why others cannot be.
    """

    form: Form
    limit: int
    bound_s: float
    tried: Sequence[Form]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> Options:
        """The form's; with the limit if that has no room for what a process can do without."""
        if self.form.needs + self.form.spare > self.limit:
            return replace(self.form.options, memory_limit=self.limit)
        return self.form.options

    @property
    def has_budget(self) -> bool:
        """Return whether something stays on the device for as far as it fits."""
        return self.form.options.memory_budget is not None

    @property
    def gap(self) -> float:
        """How much longer than the bound its step takes, as a share of the bound."""
        return self.form.step_s / self.bound_s - 1 if self.bound_s else 0.0

    @cached_property
    def more(self) -> list[tuple[int, Form]]:
        """What more memory would buy: bytes above the limit, and a form that is faster each."""
        bought: list[tuple[int, Form]] = []
        best = self.form
        for form in sorted(self.tried, key=lambda form: form.needs):
            if form.needs > self.limit and form.step_s < (1 - EQUAL) * best.step_s:
                best = form
                bought.append((form.needs - self.limit, form))
        return bought

    @property
    def reasons(self) -> list[str]:
        """Say in words what was chosen, and why nothing else."""
        needs = f"{size_text(self.form.needs)} of {size_text(self.limit)}"
        lines = [
            f"{self.form}: {milliseconds(self.form.step_s)} a step, with {needs}; "
            f"its matrix products alone take {milliseconds(self.bound_s)}"
        ]
        if self.form.gap is not None:
            lines.append(f"what stays on the device is within {self.form.gap:.2%} of the best")
        by_key: dict[Key, list[Form]] = {}
        for form in self.tried:
            by_key.setdefault(key_of(form.options), []).append(form)
        by_key.pop(key_of(self.options), None)
        for forms in by_key.values():
            fits = [form for form in forms if form.needs <= self.limit]
            if fits:
                fastest = min(fits, key=lambda form: form.step_s)
                lines.append(f"{fastest}: takes {milliseconds(fastest.step_s)}")
            else:
                least = min(forms, key=lambda form: form.needs)
                lines.append(f"{least}: needs {size_text(least.needs)}")
        lines += [f"{name}: {why}" for name, why in self.refused.items()]
        lines += [
            f"{size_text(nbytes)} more would allow {form}: {milliseconds(form.step_s)}"
            for nbytes, form in self.more
        ]
        return lines

    @property
    def facts(self) -> dict[str, Any]:
        """The same as plain data.  Units: bytes, seconds."""
        of = self.options
        return {
            "stage": of.stage,
            "outer_stage": of.outer_stage,
            "bucket_bytes": of.bucket_bytes,
            "offload": list(of.offload),
            "recompute": of.recompute,
            "memory_budget": of.memory_budget,
            "needs": self.form.needs,
            "limit": self.limit,
            "step_s": self.form.step_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "reasons": self.reasons,
            "more": [
                {"bytes": nbytes, "form": str(form), "step_s": form.step_s}
                for nbytes, form in self.more
            ],
        }


class Search:
    """Looks for the best form of one step, from the stage on that does best by itself.

    ``given`` has what the user chose: the options ``named`` stay as they are.  Every stage is tried
    with all else by default, and if none fits, with what may leave the device, as little as has to;
    then, from the best one on, what differs from it in one thing, for as long as that helps.  Each
    form's program is made by the passes, as it would be to run; within it an integer program says
    what stays on the device.  A step for which there is a reason ``why_whole`` has its states
    whole.  ``known`` are the places of parameters that have one, ``made`` the forecasts that there
    are, ``more`` the bytes above the limit of which the choice is to say what they buy, ``room``
    those within it that are left to states of optimizers which the step does not count.
    """

    def __init__(
        self,
        step: CapturedStep,
        given: Options,
        named: Collection[str],
        ranks: Ranks,
        limit: int,
        *,
        why_whole: str = "",
        known: Mapping[int, Any] | None = None,
        made: Iterable[Forecast] = (),
        more: int = 0,
        room: int = 0,
    ) -> None:
        self.step, self.given, self.ranks, self.limit = step, given, ranks, limit - room
        self.within = f"memory_limit is {limit} bytes"
        if room:
            self.within += f", of which {room} are for states of optimizers"
        self.named, self.why_whole, self.known = frozenset(named), why_whole, known or {}
        self.more = more
        self.tried: dict[Options, Form] = {}
        self.forecasts: dict[Options, Forecast] = {}  # of those
        self.fitting: dict[Key, list[Form]] = {}
        self.refused: dict[str, str] = {}
        self.least: list[tuple[int, Options]] = []  # what forms that do not fit need at the least
        nodes = max(len(step.gm.graph.nodes), 1)
        self.left = min(max(MOST_NODES // nodes, LEAST_PROGRAMS), MOST_PROGRAMS)
        for one in made:
            self._note(one)

    def run(self) -> Choice:
        """Choose.

        Raises: BudgetError if nothing fits; StepError without a solver, and for a stage that cannot
        be.
        """
        solver()
        if self.why_whole and any(stage for stage, _ in self._stages()):
            raise StepError(self.why_whole)
        figures = self.ranks.figures_for(self.given)
        nodes = [node for node in self.step.gm.graph.nodes if flops(node)]
        compute_s = sum(seconds(node, figures, self.step.table) for node in nodes)
        compute_s = figures.whole(self.given.lowering).seconds(0, compute_s)
        self.left += max(len(self._stages()) - len(self.tried), 0)  # each of them is tried
        best: Form | None = None
        for stage, outer in self._stages():
            best = self._better(best, replace(self.given, stage=stage, outer_stage=outer))
        if best is None:
            best = self._least()
        while self.left > 0 and best.step_s > (1 + NEAR) * compute_s:
            found: Form | None = best
            for options in self._beside(best.options):
                found = self._better(found, options)
            if found is best or found is None:
                break
            best = found
        best = self._or_greedy(best)
        if self.more and best.options.memory_budget is not None:
            budget = best.options.memory_budget + self.more
            self._made(replace(best.options, memory_budget=budget))
        return Choice(best, self.limit, compute_s, [*self.tried.values()], self.refused)

    def form_of(self, key: Key, has_budget: bool) -> Form | None:
        """Return the form that these stand for; None if it does not fit."""
        stage, outer, bucket, away, recompute = key
        names: dict[str, Any] = {"bucket_bytes": bucket, "offload": away, "recompute": recompute}
        self.left = max(self.left, 1)
        for form in self._fitting(replace(self.given, stage=stage, outer_stage=outer, **names)):
            if (form.options.memory_budget is not None) == has_budget:
                return form
        return None

    def _stages(self) -> list[tuple[int, int | None]]:
        """Return the stages to choose from, those that cut most first; on a mesh pairs of them."""
        if "stage" in self.named:
            return [(self.given.stage, self.given.outer_stage)]
        if self.why_whole:
            return [(0, None)]
        if len(self.ranks.axes) == 1 or self.ranks.axes[0][1] == 1:
            return [(stage, None) for stage in (3, 2, 1, 0)]
        return [(inner, outer) for inner in (3, 2, 1, 0) for outer in range(inner, -1, -1)]

    def _beside(self, options: Options) -> Iterator[Options]:
        """Yield options that differ in one thing from these."""
        options = replace(options, memory_budget=None, plan=self.given.plan)
        if "bucket_bytes" not in self.named and options.bucket and len(self.ranks) > 1:
            for nbytes in (None, *BUCKETS):
                yield replace(options, bucket_bytes=nbytes)
        if "recompute" not in self.named and options.lowering == "inductor":
            yield replace(options, recompute=not options.recompute)

    def _least(self) -> Form:
        """Return the first form that fits with as little on the device as can be.

        Raises: BudgetError if none does, with what the least one needs.
        """
        for level in AWAY if "offload" not in self.named else ():
            found: Form | None = None
            for (stage, outer), targets in itertools.product(self._stages(), level):
                if found is None and (stage, outer) != self._stages()[0]:
                    break  # what is cut most does not fit, and the others hold more
                if stage < 3 and "params" in targets or stage == 0 and "optimizer" in targets:
                    continue
                options = replace(self.given, stage=stage, outer_stage=outer, offload=targets)
                self.left = max(self.left, 0 if found else 2)  # until something fits
                found = self._better(found, options)
            if found is not None:
                return found
        if not self.tried:
            raise StepError("; ".join(f"{name}: {why}" for name, why in self.refused.items()))
        needs, options = self._needed()
        if needs <= self.limit:  # a budget had said a little more
            return self.tried[options]
        stage, outer = self._stages()[0]  # what cuts most
        forms = dict.fromkeys((options, replace(options, stage=stage, outer_stage=outer)))
        may_fit = [
            one
            for one in forms
            if one not in self.tried or self.forecasts[one].at_least(more_ranks=True) <= self.limit
        ]
        number, fits = ranks_that_fit(self.step, self.ranks, may_fit, self.limit)
        more = "with a smaller batch"
        if fits is not None:
            more = f"on {number} ranks, where {words_of(fits)} fits"
        raise BudgetError(
            f"{self.within}, and the least that this step takes of a rank's device is {needs}, "
            f"with {words_of(options)}: give it that much, train {more}, or let "
            "torch.utils.checkpoint drop activations.",
            needed=needs,
        )

    def _needed(self) -> tuple[int, Options]:
        """Return what the form needs that needs least, of those that have not been found to fit."""
        self.least += [(form.needs, form.options) for form in self.tried.values()]
        while True:
            needs, options = found = min(self.least, key=lambda pair: pair[0])
            if options in self.tried and needs == self.tried[options].needs:
                return found
            self.least.remove(found)  # it is what a budget has said, or what stays at the least
            try:
                self.least.append((self._made(options).needs, options))
            except BudgetError as error:
                if error.needed is not None and error.needed > (options.memory_budget or 0):
                    options = replace(options, memory_budget=error.needed)
                    self.least.append((max(needs, error.needed), options))
            except ValueError as error:  # a StepError is one too
                self.refused[words_of(options)] = str(error)

    def _better(self, best: Form | None, options: Options) -> Form | None:
        for found in self._fitting(options):
            best = found if best is None or found.is_better_than(best) else best
        return best

    def _fitting(self, options: Options) -> list[Form]:
        """Return the forms with these options that fit."""
        key = key_of(options)
        if key not in self.fitting and self.left <= 0:
            return []
        if key not in self.fitting:
            options = _plain(options)
            try:
                refuse_conflicts(options)
                self.fitting[key] = self._within_limit(options)
            except ValueError as error:  # a StepError is one too
                self.fitting[key] = []
                self.refused[words_of(options)] = str(error)
        return self.fitting[key]

    def _within_limit(self, options: Options) -> list[Form]:
        """Make a form's programs: with as little as can be on the device, and with what fits.

        None is made where what stays of the same form with everything there exceeds the limit.
        """
        whole = self.forecasts.get(replace(options, offload=())) if options.offload else None
        if whole is not None and self._is_left_out(options, whole):
            return []
        least = self._made(options)
        found = [least] if least.needs <= self.limit else []
        forecast = self.forecasts[options]
        keeps = options.stage == 3 and any(forecast.sent.values())
        if not (keeps or options.offload) or self._is_left_out(options, forecast):
            return found
        fixed = least.needs - forecast.budgeted
        room = self.limit - fixed
        for _ in range(3):
            budget = max(room, 1)
            try:
                more = self._made(replace(options, plan="auto", memory_budget=budget))
            except BudgetError as error:
                if error.needed is not None:
                    options = replace(options, plan="auto", memory_budget=error.needed)
                    self.least.append((fixed + error.needed, options))
                break
            over = more.needs - self.limit
            if over <= 0:
                return [*found, more]
            room -= over
        return found

    def _is_left_out(self, options: Options, made: Forecast) -> bool:
        """Return whether options fit no budget, by what stays of a forecast; note what that is."""
        at_least = made.at_least(options.offload)
        if at_least <= self.limit:
            return False
        for one in (options, replace(options, plan="auto", memory_budget=1)):
            self.least.append((at_least, one))
        return True

    def _or_greedy(self, best: Form) -> Form:
        """Return what choosing one thing after the other gives, if that is predicted better."""
        if best.gap is None:
            return best
        greedy = self._made(replace(best.options, plan=None))
        return greedy if greedy.needs <= self.limit and greedy.is_better_than(best) else best

    def _made(self, options: Options) -> Form:
        if options not in self.tried:
            self.left -= 1
            self._note(self.ranks.forecast(self.step, options, self.known))
        return self.tried[options]

    def _note(self, made: Forecast) -> None:
        self.tried[made.options] = Form.of(made)
        self.forecasts[made.options] = made


def _plain(options: Options) -> Options:
    """Return options of a form that nothing is to fit."""
    return replace(options, plan=None, memory_limit=None, memory_budget=None)


SEARCHED = 2**16
"""Ranks to which what fits nothing looks for some that would do."""


def ranks_that_fit(
    step: CapturedStep, ranks: Ranks, forms: Sequence[Options], limit: int
) -> tuple[int | None, Options | None]:
    """Return on how many ranks, doubling those of the outer axis, which of these options fit.

    Of those that fit, what takes least of the device.  It ends where more ranks no longer save a
    thousandth: what is left is the same on any number.
    """
    before = math.inf
    while forms and 2 * len(ranks) <= SEARCHED:
        (name, size), *inner = ranks.axes
        ranks = replace(ranks, axes=((name, 2 * size), *inner))
        needs: list[tuple[int, Options]] = []
        for options in forms:
            with contextlib.suppress(ValueError):  # what cannot be; a StepError is one too
                needs.append((ranks.forecast(step, options).device_bytes, options))
        now, least = min(needs, key=lambda pair: pair[0], default=(math.inf, None))
        if now <= limit:
            return len(ranks), least
        if before - now < before / 1000 or math.isinf(now):
            break
        before = now
        gc.collect()  # programs that nobody needs any more, where it does not happen by itself
    return None, None


STATE_BYTES = 8
"""An optimizer is taken to keep these of each element until it is known: two float32, as AdamW."""


def searches(
    search: Callable[..., Search],
    step: CapturedStep,
    given: Options,
    named: Collection[str],
    ranks: Ranks,
    kept: int | None = None,
) -> Iterator[Search]:
    """Yield where to look for a step's form: in the next one if nothing is found in one.

    A step without updates leaves room for what optimizers have on the device meanwhile: the bytes
    that they have ``kept``, or will if nobody has updated yet.  Then it cuts as much as fits, and
    if it finds nothing beside them, they will have to leave.
    """
    if step.updates:
        yield search(given=given, named=named)
        return
    cut = given
    if "stage" not in named:
        has_axes = len(ranks.axes) > 1 and ranks.axes[0][1] > 1
        cut = replace(given, stage=3, outer_stage=3 if has_axes else None)
    room = kept
    if room is None:
        shards = ranks.mesh_for(cut).num_shards if cut.stage else 1
        trained = sum(info.numel for info in step.table if info.requires_grad)
        room = 0 if "optimizer" in cut.offload else STATE_BYTES * -(-trained // shards)
    yield search(given=cut, named={*named, "stage", "offload"}, room=room)
    if kept is None:
        yield search(given=cut, named={*named, "stage"})
    if kept is None and cut is not given:
        yield search(given=given, named=named)


def first_found(looked: Iterable[Search], choose: Callable[[Search], Choice]) -> Choice:
    """Return what the first search finds that finds anything.

    Raises: StepError, what the last one has raised, if none does.
    """
    refused: StepError | None = None
    for search in looked:
        try:
            return choose(search)
        except StepError as error:  # it does not fit, or cannot be
            refused = error
    assert refused is not None
    raise refused


def agreed(search: Search, exchange: Callable[[Sequence[str], bytes], Sequence[bytes]]) -> Choice:
    """Choose what fits all ranks: those whose batches have other shapes may choose differently.

    ``exchange`` gives every rank's value, by rank, for lines that are the same on all.  Where the
    ranks differ, each tries what the others have chosen, and what fits all is taken whose slowest
    rank is fastest.

    Raises: BudgetError, on all ranks, if nothing fits one of them.
    """
    lines = (f"plan auto within {search.limit} bytes",)

    def told(value: object) -> list[Any]:
        return [json.loads(its) for its in exchange(lines, json.dumps(value).encode())]

    mine: Choice | None = None
    try:
        mine = search.run()
        says: dict[str, Any] = {"form": (key_of(mine.form.options), mine.has_budget)}
    except BudgetError as error:
        says = {"error": str(error)}
    every = told(says)
    _raise_first(every)
    assert mine is not None
    named = [_read(each["form"]) for each in every]
    if any(each != named[0] for each in named):
        keys = sorted(set(named), key=repr)
        forms = [search.form_of(*key) for key in keys]
        rows = told([None if form is None else form.step_s for form in forms])
        columns = zip(*rows, strict=True)
        slowest = [math.inf if None in column else max(column) for column in columns]
        form = forms[min(range(len(keys)), key=slowest.__getitem__)]
        if math.isinf(min(slowest)) or form is None:
            raise BudgetError(
                f"{search.within}, and ranks whose batches have other shapes need "
                f"different plans for it: none of {len(keys)} fits all of them. Give batches "
                "of one shape, or choose by options."
            )
        mine = replace(mine, form=form)
    if not mine.has_budget:
        return mine
    # Nobody takes more than the one who has least, and all solve it, or none.
    options = mine.form.options
    least = min(told(options.memory_budget))
    plan = "auto" if all(told(options.plan)) else None
    options = replace(options, memory_budget=least, plan=plan)
    return replace(mine, form=replace(mine.form, options=options))


def _read(form: Sequence[Any]) -> tuple[Key, bool]:
    (stage, outer, bucket, away, recompute), has_budget = form
    return (stage, outer, bucket, tuple(away), recompute), has_budget


def _raise_first(every: Sequence[Mapping[str, Any]]) -> None:
    for rank, each in enumerate(every):
        if "error" in each:
            raise BudgetError(f"rank {rank}: {each['error']}" if len(every) > 1 else each["error"])
