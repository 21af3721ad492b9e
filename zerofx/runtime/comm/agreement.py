"""Ranks compare what they are about to communicate, through the store and never a collective.

Two ranks with different programs would hang in their first collective.  The store answers
whatever the ranks are doing, so the difference is found, and named, before that.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch.distributed as dist

from zerofx.errors import GraphError

LONGEST_POLL_S = 0.01

SAME_EVERYWHERE = (
    "All ranks must communicate the same things in the same order: remove from the step, the model "
    "and the options whatever differs between ranks"
)


class AgreementError(GraphError):
    """The ranks' programs differ, or a rank has none."""


class _Round:
    """One meeting of all ranks under a name: it has one outcome, which every rank sees.

    The outcome is set once, by compare-and-set: by the last rank to arrive, or by one that
    gives up or fails first.  So no rank goes on while another has stopped waiting.  Rounds are
    numbered by counters in the store, which outlive the objects of this process.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self.store = store
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.number = store.add(f"{name}/entered/{rank}", 1)

    def key(self, kind: str, rank: int | None = None, *, number: int | None = None) -> str:
        owner = "" if rank is None else f"/{rank}"
        return f"{self.name}/{self.number if number is None else number}/{kind}{owner}"

    def post(self, kind: str, value: bytes) -> None:
        self.store.set(self.key(kind, self.rank), value)

    def posted(self, kind: str, rank: int) -> bytes:
        return self.store.get(self.key(kind, rank))

    def decide(self, outcome: str) -> str:
        """Propose an outcome; return the one that holds."""
        return self.store.compare_set(self.key("outcome"), "", outcome).decode()

    def arrive(self) -> bool:
        """Return whether this rank is the last to arrive."""
        return self.store.add(self.key("arrived"), 1) == self.world_size

    def is_decided(self) -> bool:
        return self.store.check([self.key("outcome")])

    def outcome(self, timeout_s: float) -> str:
        """Wait for the outcome; after ``timeout_s`` seconds it is ``abandoned <rank>``.

        Polls: a blocking wait would hold the store's connection, which NCCL's watchdog shares.
        """
        deadline = time.monotonic() + timeout_s
        pause = 1e-4
        while not self.is_decided():
            if time.monotonic() > deadline:
                return self.decide(f"abandoned {self.rank}")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_S)
        return self.store.get(self.key("outcome")).decode()

    def missing_ranks(self) -> list[int]:
        return [
            rank
            for rank in range(self.world_size)
            if self.store.add(f"{self.name}/entered/{rank}", 0) < self.number
        ]

    def forget_previous(self, *own_kinds: str) -> None:
        """Delete the keys of the round before: all ranks are here, so none still reads them."""
        previous = self.number - 1
        for kind in own_kinds:
            self.store.delete_key(self.key(kind, self.rank, number=previous))
        if self.rank == 0:
            self.store.delete_key(self.key("arrived", number=previous))
            self.store.delete_key(self.key("outcome", number=previous))


def rendezvous(
    store: dist.Store, name: str, rank: int, world_size: int, timeout_s: float = 30.0
) -> None:
    """Return once every rank has called this with ``name``; the n-th calls meet each other.

    A call that others have given up waiting for meets their next one, so that one rank's lone call
    costs no later one.

    Raises: RuntimeError on every rank that came, if one does not within ``timeout_s`` seconds.
    """
    if world_size == 1:
        return
    rule = f"{name} is collective: call it on all ranks; "
    while True:
        meeting = _Round(store, f"rendezvous/{name}", rank, world_size)
        is_over = meeting.is_decided()
        outcome = meeting.decide("complete") if meeting.arrive() else meeting.outcome(timeout_s)
        if outcome == "complete":
            return meeting.forget_previous()
        verdict, by = outcome.split()
        assert verdict == "abandoned"
        if is_over:
            rule = f"{name} is collective: call it on all ranks; rank {by} gave up waiting; then "
        elif int(by) == rank:
            raise RuntimeError(
                f"{rule}rank(s) {meeting.missing_ranks()} did not join within {timeout_s:g} s"
            )
        else:
            raise RuntimeError(f"{rule}rank {by} gave up waiting before all ranks had joined")


class Agreement:
    """The schedules that the ranks of one group have agreed on for one compiled function.

    A schedule is lines of text: every collective in order, and the parameter table.  ``scope``
    names the function and is equal on all ranks.  ``end_step`` ends the step that others wait in,
    if only some ranks have come and there is a program that the others can run.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        scope: str,
        end_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.scope = scope
        self.end_step = end_step
        self._agreed: list[tuple[str, ...]] = []

    def check(
        self,
        lines: Sequence[str],
        timeout_s: float,
        value: bytes = b"",
        beside: Sequence[str] = (),
    ) -> bool:
        """Return once all ranks have posted these very lines; at once if they did before.

        Lines ``beside`` them are compared where ranks meet, and only there.  What is returned is
        whether they have come with this very ``value`` too, the same on all; not if they did
        before.

        Raises: AgreementError if a rank posted others (the first difference is named, the same
        on all ranks), failed while compiling, or posted none within ``timeout_s`` seconds.
        """
        if self.world_size == 1 or tuple(lines) in self._agreed:
            return self.world_size == 1
        values = self.exchange((*lines, *beside), value, timeout_s)
        self._agreed.append(tuple(lines))
        return bool(value) and all(its == value for its in values)

    def exchange(self, lines: Sequence[str], value: bytes, timeout_s: float) -> list[bytes]:
        """Return every rank's ``value``, by rank, once all have come with these very lines.

        Raises: AgreementError as ``check``, with which it takes turns: the n-th of either meets
        the other ranks' n-th.
        """
        if self.world_size == 1:
            return [value]
        meeting = _Round(self.store, f"agreement/{self.scope}", self.rank, self.world_size)
        meeting.post("text", zlib.compress("\n".join(lines).encode()))
        meeting.post("value", value)
        if meeting.arrive():
            outcome = meeting.decide(self._verdict(meeting))
        else:
            outcome = meeting.outcome(timeout_s)
        if outcome != "complete":
            if self._agreed and outcome.startswith("abandoned"):
                self.end_step()
            raise AgreementError(self._explanation(meeting, outcome, lines, timeout_s))
        meeting.forget_previous("text", "value", "failure")
        return [meeting.posted("value", rank) for rank in range(self.world_size)]

    def news(self, lines: Sequence[str]) -> str:
        """Say what another rank has posted and waits for while this one runs ``lines``.

        Empty if there is no such rank.  Waits for nobody.
        """
        if self.world_size == 1:
            return ""
        name = f"agreement/{self.scope}"
        mine, *others = (
            self.store.add(f"{name}/entered/{rank}", 0)
            for rank in (self.rank, *range(self.world_size))
        )
        for rank, entered in enumerate(others):
            key = f"{name}/{mine + 1}/text/{rank}"
            if entered <= mine or not self.store.check([key]):
                continue
            where = where_they_part(self.rank, rank, lines, _lines_of(self.store.get(key)))
            return (
                f"rank {rank} has compiled another program of {self.scope!r} meanwhile, so rank "
                f"{self.rank} cannot finish this step. {where} {SAME_EVERYWHERE}"
            )
        return ""

    def fail(self, message: str) -> None:
        """Tell ranks that wait in ``check``, or will, that this one could not compile.

        Call it once per compilation that fails, and not for what ``check`` or ``exchange`` raised:
        all ranks have seen that.  The message should name the error and its place.
        """
        if self.world_size == 1:
            return
        meeting = _Round(self.store, f"agreement/{self.scope}", self.rank, self.world_size)
        meeting.post("failure", message.encode())
        meeting.decide(f"failed {self.rank}")

    def _verdict(self, meeting: _Round) -> str:
        """Compare every rank's schedule with rank 0's.  Only the last to arrive reads them all."""
        expected = _lines_of(meeting.posted("text", 0))
        for rank in range(1, self.world_size):
            if _lines_of(meeting.posted("text", rank)) != expected:
                return f"differs {rank}"
        return "complete"

    def _explanation(
        self, meeting: _Round, outcome: str, lines: Sequence[str], timeout_s: float
    ) -> str:
        verdict, by = outcome.split()
        if verdict == "differs":
            both = (_lines_of(meeting.posted("text", rank)) for rank in (0, int(by)))
            return (
                f"ranks 0 and {by} compiled different programs of {self.scope!r}. "
                f"{where_they_part(0, int(by), *both)} {SAME_EVERYWHERE}"
            )
        if verdict == "failed":
            return (
                f"rank {by} could not compile {self.scope!r}, so no rank can run it. "
                f"Rank {by} says: {meeting.posted('failure', int(by)).decode()}"
            )
        if int(by) != self.rank:
            return (
                f"rank {by} gave up waiting for the schedule of {self.scope!r} before all ranks "
                "had posted theirs: one of them compiled too late. Give the first call on all "
                "ranks about the same time, or look at what rank "
                f"{by} says"
            )
        return (
            f"rank(s) {meeting.missing_ranks()} posted no schedule for {self.scope!r} within "
            f"{timeout_s:g} s: what made rank {self.rank} compile did not happen there, or they "
            f"died. {self._what_is_new(lines)} Make the step the same program on every rank, or "
            "look at those ranks' logs"
        )

    def _what_is_new(self, lines: Sequence[str]) -> str:
        """Say where a new schedule leaves the last one agreed on."""
        if not self._agreed:
            return "It is the first schedule of this function."
        number, before, now = _first_difference(self._agreed[-1], lines)
        return f"Its new schedule first differs in line {number}: {before} before, {now} now."


def where_they_part(rank: int, other: int, lines: Sequence[str], its: Sequence[str]) -> str:
    """The first line in which two ranks' unequal schedules differ, in words."""
    number, here, there = _first_difference(lines, its)
    return f"Line {number} of the schedule is {here} on rank {rank} and {there} on rank {other}."


def _first_difference(one: Sequence[str], two: Sequence[str]) -> tuple[int, str, str]:
    """Return the 1-based line where two unequal schedules part, and both versions, quoted."""
    quoted = ([f"`{line}`" for line in lines] for lines in (one, two))
    pairs = enumerate(zip_longest(*quoted, fillvalue="absent"), 1)
    return next((number, here, there) for number, (here, there) in pairs if here != there)


def _lines_of(text: bytes) -> list[str]:
    return zlib.decompress(text).decode().split("\n")
