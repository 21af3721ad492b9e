"""A program that runs operator by operator at first, while a process compiles what it needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx, nn

from zerofx import compat
from zerofx.compat.inductor import CompiledForAnyLength, Like
from zerofx.errors import StepError
from zerofx.ir.aliases import writers
from zerofx.ir.effects import shards_changed_by_user
from zerofx.ir.graph import updates
from zerofx.ir.interface import input_role, placeholders
from zerofx.ir.packing import packed
from zerofx.lower.compile_process import CompileProcess, Work
from zerofx.lower.regions import REGION_META, CompiledRegion

logger = logging.getLogger("zerofx")

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's value for one's own, by rank."""

STEPS_THAT_ASK = 2
"""Steps after which no update asks for another kernel: the first ones are of states yet to make."""

LONGEST_PAUSE_S = 2.0

TAKES_S = 0.3
"""The seconds that a step counts for each thing it takes over, until they have been measured."""


def changes_replicas(graph: fx.Graph) -> bool:
    """Return whether a program changes what ranks have in common, as an evaluation does not.

    It updates or writes to parameters, or writes to averaged gradients.
    """
    gradients = placeholders(graph, "gradient")
    averages = (node for node in gradients if not input_role(node).unreduced)
    return bool(updates(graph) or shards_changed_by_user(graph) or any(map(writers, averages)))


ALIKE = "alike"
"""All regions that replicas have in common: one of them may hold compute of the batch too, which
has other shapes on each rank, so that no rank knows it by what another one calls it."""

Steps = Mapping[str, int]
"""The step in which each region and kernel was taken over, by its name."""


class Record:
    """A file of which step took over what, by program: written, or replayed if it is there.

    One for all functions of a process that name the file.

    Raises: StepError for a file that is none, or that cannot be written.
    """

    def __init__(self, path: str, is_writer: bool) -> None:
        self.path, self.is_writer = Path(path), is_writer
        self.steps: dict[str, Steps] = {}
        self.is_replayed = self.path.exists()
        try:
            if self.is_replayed:
                self.steps = json.loads(self.path.read_text())
                steps = [step for of in self.steps.values() for step in of.values()]
                assert all(isinstance(step, int) for step in steps), "steps are numbers"
            elif is_writer:
                self._part.write_text("")
                self._part.unlink()
        except (OSError, ValueError, AttributeError, AssertionError) as error:
            what = "this is no record of steps" if self.is_replayed else "it cannot be written"
            raise StepError(
                f"start=at_once:{path}: {what} ({error}). Name a file that start=at_once:FILE has "
                "written, to repeat that training, or one that is not there, in a folder that is."
            ) from None

    @property
    def _part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.{os.getpid()}")

    def note(self, program: str, steps: Steps) -> None:
        """Write what a program has taken over so far."""
        if self.is_replayed or not self.is_writer:
            return
        self.steps[program] = dict(steps)
        try:
            self._part.write_text(json.dumps(self.steps, indent=1) + "\n")
            self._part.replace(self.path)
        except OSError as error:
            logger.warning("start=at_once:%s is not written any longer: %s", self.path, error)
            self.is_writer = False


@dataclass
class _Unit:
    """Regions, or an update's kernels, that are to be taken over once all are compiled."""

    texts: set[str] = field(default_factory=set)
    takes: dict[int, Callable[[], object]] = field(default_factory=dict)  # by who takes it


def _is_alike(region: CompiledRegion) -> bool:
    return compat.inductor.ALIKE in region.text


def _to_take_over(program: nn.Module) -> dict[str, CompiledRegion]:
    """Return the regions that are ever compiled, by their names."""
    return {
        name: one
        for name, one in program.named_children()
        if isinstance(one, CompiledRegion) and not one.is_one_operator
    }


def _take(region: CompiledRegion, others: Iterable[CompiledRegion]) -> None:
    """Run what is compiled of a region; it may lay out otherwise what the others of it read."""
    region.take()
    for other in others:
        other.found = None


class AtOnce:
    """Takes over what is compiled at the beginning of a step, all ranks in the same one.

    Ranks that compute the same, as whole parameters at stage 0, would else drift apart by last
    bits: every step before all is taken over begins with an ``exchange``.  A step takes over as
    much as takes no longer than the last one did, or one thing.  With a ``record`` that is
    replayed, steps take over what it says, and wait for it.

    Regions of a later program that no other rank has to have alike are this rank's ``own``: it
    takes them over without asking, be the others in that program or not.

    What compiles is the ``process`` that it is given, and where that is let go of, or there is
    none, one that it ``asks`` for.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        record: Record | None = None,
        pause: float = 0.0,
        threads: int | None = None,
        asks: Callable[[], CompileProcess] | None = None,
        process: CompileProcess | None = None,
    ) -> None:
        self.name = name  # of the program
        self.exchange = exchange
        self.record = record
        self.pause = pause  # before a step, times what the fastest one took
        self.threads = threads  # the most that a region has until it is taken over
        self._took_s = 0.0
        self._fastest_s = LONGEST_PAUSE_S
        self._takes_s = TAKES_S
        self.step = 0
        self.is_over = False
        self.taken: dict[str, int] = {}
        self._units: dict[str, _Unit] = {}  # those that are not taken over yet
        self._own: dict[str, _Unit] = {}  # of later programs, by their texts
        self._asks = asks or CompileProcess
        self._process: CompileProcess | None = None
        if process is not None:
            self._compile_in(process)
        self._works: list[Work] = []  # of the first step: the process would make it slower

    def add(self, program: nn.Module) -> None:
        """Have a program's regions compiled, but for those that are already.

        Equal ones are taken over together, under the first one's name; and all that are alike, of
        which other ranks may have compiled others.
        """
        names: dict[str, str] = {}
        regions = _to_take_over(program)
        for name, region in regions.items():
            if _is_alike(region) and region.sample is not None:  # others may not have it yet
                self._compile_later(ALIKE, region, regions.values())
            elif region.is_to_compile:
                name = names.setdefault(region.text, name)
                self._compile_later(name, region, regions.values())

    def join(self, program: nn.Module) -> None:
        """Have regions of a later program wait where an equal one does, and be taken over with it.

        Another rank may run the earlier program still, and may have that region in common.  So it
        has one that is alike, whatever else is in it.  All others are this rank's own, but where a
        record says what ran compiled: then they are left to be compiled before they run.
        """
        units = {text: unit for unit in self._units.values() for text in unit.texts}
        regions = list(_to_take_over(program).values())
        for region in regions:
            if (unit := units.get(region.text)) is not None:
                region.waits, region.threads = True, self.threads
                unit.takes[id(region)] = partial(_take, region, regions)
            elif _is_alike(region):
                if ALIKE in self._units and region.sample is not None:
                    self._compile_later(ALIKE, region, regions)
            elif region.is_to_compile and self.record is None:
                self._compile_later(region.text, region, regions, self._own)

    def _compile_later(
        self,
        name: str,
        region: CompiledRegion,
        regions: Collection[CompiledRegion],
        units: dict[str, _Unit] | None = None,
    ) -> None:
        """Have a region compiled, and wait; without a text of it, it is when it first runs."""
        assert region.sample is not None
        beside = list(map(Like.of, region.sample)), region.like, region.donated
        data = packed([region.gm.graph], REGION_META, beside)
        if data is not None:
            region.waits, region.threads = True, self.threads
            take = partial(_take, region, regions)
            self._send(name, Work(region.text, data), id(region), take, units)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround one step: it begins by taking over what is compiled on all ranks."""
        if self.is_over and not self._own:
            yield
            return
        self._begin_step()
        token = compat.inductor.AT_ONCE.set(self._later)
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            compat.inductor.AT_ONCE.reset(token)
        self._took_s = time.perf_counter() - begun_s
        self._fastest_s = min(self._fastest_s, self._took_s)
        if self._works:
            self._compile_in(self._living() or self._asks()).compile(self._works)
            self._works = []

    def _compile_in(self, process: CompileProcess) -> CompileProcess:
        """Have works compiled there; it is let go of with this, at the latest."""
        if process is not self._process:
            self._process = process
            weakref.finalize(self, process.close)
        return process

    def _living(self) -> CompileProcess | None:
        """Return what compiles, unless it has ended."""
        process = self._process
        return None if process is None or process.has_ended else process

    def _later(self, kernel: CompiledForAnyLength, inputs: Sequence[Any]) -> bool:
        """Have an update's kernel compiled; return whether it is taken over later."""
        text, like = kernel.text(inputs), tuple(map(Like.of, inputs))
        on_all = text  # ranks have devices of their own
        for device in {tensor.device for tensor in inputs}:
            on_all = on_all.replace(repr(device), device.type).replace(str(device), device.type)
        name = f"update_{hashlib.sha256(on_all.encode()).hexdigest()[:8]}"
        if self.is_over or name in self.taken:  # then Inductor's cache has it
            return False
        if name in self._units and id(kernel) in self._units[name].takes:
            return True
        data = packed([kernel.graph.graph], [compat.inductor.EMPTIED], [like])
        if data is None:
            return False

        def take() -> None:
            try:
                kernel.compile([one.made() for one in like])
            except Exception as error:  # which the other ranks would wait for in a collective
                logger.warning(
                    "Inductor cannot compile %s, which runs operator by operator from now on: its "
                    "results are the same to rounding, and its steps slower. It says: %s: %s",
                    *(name, type(error).__name__, error),
                )
                kernel.leave(text)

        self._send(name, Work(text, data, of_any_length=True), id(kernel), take)
        return True

    def _send(
        self,
        name: str,
        work: Work,
        by: int,
        take: Callable[[], object],
        units: dict[str, _Unit] | None = None,
    ) -> None:
        unit = (self._units if units is None else units).setdefault(name, _Unit())
        unit.texts.add(work.text)
        unit.takes[by] = take
        process = self._living()
        if process is None or self.step < 2:
            self._works.append(work)
        else:
            process.compile([work])

    def _begin_step(self) -> None:
        """Take over what is ready, alone and with all ranks; pause if that is nothing."""
        self.step += 1
        own = [text for text, unit in self._own.items() if self._is_compiled(unit)]
        most = self._most()
        if own := own[:most]:
            self._take_over(self._own, own)
            logger.info(
                "%s: step %d takes over %d region(s) of a later program, on this rank; %d are left",
                *(self.name, self.step, len(own), len(self._own)),
            )
        common = [] if self.is_over else self._take_over_with_all(most - len(own))
        if not own and not common and (self._units or self._own) and self.step > STEPS_THAT_ASK:
            pause_s = self.pause * self._fastest_s  # in which the process has the core
            time.sleep(min(pause_s, LONGEST_PAUSE_S))
        if self.step > 1 and not self._units and not self._own and self._process is not None:
            self._process.close()
            self._process = None

    def _take_over_with_all(self, most: int) -> list[str]:
        """Take over what is ready on all ranks, ``most`` at most; return its names.

        Note whether that is all.
        """
        replayed = self._replayed()
        ready = {name: self._is_ready(name, replayed.get(name)) for name in self._units}
        is_replayed = self.record is not None and self.record.is_replayed
        said = json.dumps([is_replayed, most, ready]).encode()
        every = [json.loads(its) for its in self.exchange(said)]
        if any(its != is_replayed for its, _, _ in every):
            assert self.record is not None
            raise StepError(
                f"start=at_once:{self.record.path}: some ranks find this file and others do not. "
                "Put it where all ranks can read it."
            )
        names = set().union(*(its for _, _, its in every))
        taken = sorted(name for name in names if all(its.get(name, True) for _, _, its in every))
        if not is_replayed:
            taken = taken[: min(most for _, most, _ in every)]
        self.taken.update(dict.fromkeys(taken, self.step))
        if taken:
            self._take_over(self._units, taken)
            logger.info(
                "%s: step %d takes over %s; %d of %d are compiled",
                *(self.name, self.step, ", ".join(taken)),
                *(len(self.taken), len(self.taken) + len(names) - len(taken)),
            )
            if self.record is not None:
                self.record.note(self.name, self.taken)
        self.is_over = self.step > STEPS_THAT_ASK and len(taken) == len(names)
        return taken

    def _take_over(self, units: dict[str, _Unit], names: Sequence[str]) -> None:
        begun_s = time.perf_counter()
        for name in names:
            unit = units.pop(name, None)
            for take in unit.takes.values() if unit else ():
                take()
        took_s = (time.perf_counter() - begun_s) / len(names)
        self._takes_s = max(took_s, self._takes_s / 2)  # the next one may take longer

    def _most(self) -> int:
        """Return how much this rank would take over in this step."""
        return max(1, int(self._took_s / max(self._takes_s, 1e-3)))

    def _replayed(self) -> Steps:
        if self.record is None or not self.record.is_replayed:
            return {}
        return self.record.steps.get(self.name, {})

    def _is_ready(self, name: str, step: int | None) -> bool:
        """Return whether something is compiled, or is to be waited for and then is."""
        if step is None:
            return self._is_compiled(self._units[name])
        if self._process is None or self._works:
            return False
        for text in self._units[name].texts if step <= self.step else ():
            self._process.wait(text)
        return step <= self.step

    def _is_compiled(self, unit: _Unit) -> bool:
        if self._process is None or self._works:
            return False
        return all(map(self._process.is_done, unit.texts))
