"""The protocol of a pass: what it is given, what it declares, what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import fx

from zerofx.accelerator import is_accelerator
from zerofx.hardware import NOMINAL, Hardware, bucket_bytes
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import Decisions, KeptGathered, ParameterTable
from zerofx.options import Options

Counts = Mapping[str, int]


class WholeUpdate(NamedTuple):
    """An update that may need a parameter whole, and the floating point operations of that.

    If ``own_step`` says why, it is the optimizer's own step that runs, on the rank of its ``owner``
    (a shard's number), where states stay; of its operations as many are assumed as it has elements.
    """

    flops: int
    own_step: str = ""
    owner: int = 0


@dataclass(frozen=True)
class PassContext:
    """Facts a pass may use; no process group, environment or clock.

    ``num_backwards`` is how many times the step calls backward; ``bound`` holds the parameters,
    by index, whose layout an earlier program has settled.  ``kept_gathered`` is what the ranks have
    agreed to keep, of gathers and of states, by what they could keep.  ``figures``
    are the same on all ranks.  ``whole_updates`` are the updates that may need whole tensors,
    as (optimizer, parameter); ``state_bytes`` is what
    updates keep per element, where that is known and needed.  ``host_parameters`` are the
    parameters, by index, whose shards are kept in host memory, ``filed_parameters`` those of them
    that are in files while nothing is done with them there.  What is ``decided`` passes apply.
    """

    options: Options
    table: ParameterTable
    mesh: Mesh
    num_backwards: int = 1
    bound: frozenset[int] = frozenset()
    kept_gathered: Mapping[tuple[str, ...], KeptGathered] = field(default_factory=dict)
    figures: Hardware = NOMINAL
    whole_updates: Mapping[tuple[int, int], WholeUpdate] = field(default_factory=dict)
    state_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    host_parameters: frozenset[int] = frozenset()
    filed_parameters: frozenset[int] = frozenset()
    decided: Decisions = field(default_factory=Decisions)

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def on_accelerator(self) -> bool:
        """Return whether an accelerator computes with some parameter."""
        return any(is_accelerator(info.device) for info in self.table)

    @property
    def bucket_bytes(self) -> float:
        """The most that travels together; by default no limit but a layer on an accelerator."""
        if self.options.bucket_bytes is None and self.on_accelerator:
            return math.inf
        return self.options.bucket_bytes or bucket_bytes(partial(self.travels_s, reduces=True))

    def travels_s(self, nbytes: int, *, reduces: bool) -> float:
        """Seconds to gather a whole buffer, or to reduce it, one axis after the other."""
        return sum(
            self.figures.along(axis).transfer_s(times * nbytes, self.mesh.size(axis))
            for axis, times in self.mesh.carried(reduces)
        )

    @property
    def gathers_overlap(self) -> bool:
        """Return whether a gather's last hop goes on while the rank computes."""
        return self.figures.along(self.mesh.inner).overlaps

    @property
    def offloads(self) -> frozenset[str]:
        """The targets kept off the device, by option or as the program finds parameters."""
        found = {"params"} if self.host_parameters else set()
        return frozenset({*self.options.offload, *found})

    @property
    def tiers(self) -> frozenset[str]:
        """Their tiers, by option or as it finds parameters."""
        found = {"nvme"} if self.filed_parameters else set()
        return frozenset({self.options.offload_tier, *found})


@dataclass(frozen=True)
class Conflict:
    """Options that make no sense together, if ``when`` holds of them.

    ``words`` say why, and what to do; ``{stage}`` and the like in them are options.  ``is_lack``:
    something is missing, which another source of options may add.
    """

    when: Callable[[Options], object]
    words: str
    is_lack: bool = False


@dataclass(frozen=True)
class Pass:
    """A rewrite of the program in place: ``run(gm, ctx) -> counts``, called by ``run``'s name.

    ``requires`` and ``provides`` are facts about the program, checked over the pipeline.
    An ``optional`` pass is switched by the option of its name, or of its ``switch``.  One that
    ``preserves_numerics`` leaves every result bitwise the same at two ranks; one that does not
    sums in another order, or rounds values that are computed with, if the option that it
    ``quantizes`` by says so.  One that
    ``offloads`` some targets runs if the option ``offload`` names one of them, and if it is for
    some ``tiers``, with one of these.  One that ``lowers`` makes a form that only runs: costs are
    predicted, and ranks compare, the program before the first of them.  ``why_not`` gives any
    other reason to leave the pass out; ``conflicts`` are about what it does.
    """

    run: Callable[[fx.GraphModule, PassContext], Counts]
    name: str = ""
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    optional: bool = False
    preserves_numerics: bool = True
    quantizes: str = ""
    smallest_stage: int = 0
    offloads: frozenset[str] = frozenset()
    tiers: frozenset[str] = frozenset()
    switch: str = ""
    lowers: bool = False
    why_not: Callable[[PassContext], str] = lambda ctx: ""
    conflicts: tuple[Conflict, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.run.__name__)

    @property
    def option(self) -> str:
        """The option that turns an optional pass off."""
        return self.switch or self.name
