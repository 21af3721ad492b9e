"""A minimum cut between what is never repeated and what backward wants."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from torch import fx

UNLIMITED = 2**63

_IN, _OUT = 0, 1
_Vertex = tuple[fx.Node | None, int]
_BEGIN: _Vertex = None, _OUT


class Network:
    """Values as pipes as wide as they have bytes, from what is never repeated to what is wanted.

    The pipes of a minimum cut are the values to keep: all that is wanted can be computed from
    them, and no other such values have fewer bytes.  Of several minimum cuts it is the one
    nearest to what is wanted, whatever the order of additions.

    Source: Edmonds and Karp 1972, "Theoretical Improvements in Algorithmic Efficiency".
    """

    def __init__(self) -> None:
        self.values: list[fx.Node] = []
        self.wanted: list[fx.Node] = []
        # How much more can flow to a vertex, by where it comes from.
        self.room: dict[_Vertex, dict[_Vertex, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, node: fx.Node, width: int, sources: list[fx.Node] | None = None) -> None:
        """Add a value; without ``sources``, one that is never repeated."""
        self.values.append(node)
        self.room[node, _OUT][node, _IN] = width
        before = [_BEGIN] if sources is None else [(source, _OUT) for source in sources]
        self.room[node, _IN].update(dict.fromkeys(before, UNLIMITED))

    def want(self, node: fx.Node) -> None:
        self.wanted.append(node)

    def minimum_cut(self) -> tuple[list[fx.Node], set[fx.Node]]:
        """The values to keep, and those that are to be repeated from them."""
        for node in self.wanted:
            while _BEGIN in (towards := self._search([node])):
                self._augment(towards)
        reached = self._search(self.wanted)
        beyond = {node for node in self.values if (node, _IN) in reached}
        return [n for n in self.values if (n, _OUT) in reached and n not in beyond], beyond

    def _search(self, ends: list[fx.Node]) -> dict[_Vertex, _Vertex | None]:
        """Where more can flow to one of ``ends`` from, and where it flows from there."""
        towards: dict[_Vertex, _Vertex | None] = {(node, _OUT): None for node in ends}
        pending = list(towards)
        for vertex in pending:
            for previous, room in self.room[vertex].items():
                if room and previous not in towards:
                    towards[previous] = vertex
                    if previous == _BEGIN:
                        return towards
                    pending.append(previous)
        return towards

    def _augment(self, towards: dict[_Vertex, _Vertex | None]) -> None:
        path = [_BEGIN]
        while (following := towards[path[-1]]) is not None:
            path.append(following)
        steps = list(pairwise(path))
        amount = min(self.room[stop][start] for start, stop in steps)
        for start, stop in steps:
            self.room[stop][start] -= amount
            self.room[start][stop] += amount
