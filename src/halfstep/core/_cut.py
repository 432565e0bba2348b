"""The cheapest choice between two labels, where neighbours that differ cost something, too."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_NEGLIGIBLE = 1e-12


class Boundary(NamedTuple):
    """What it costs that two places differ.

    Args:
        first: The index of a place.
        second: The index of another.
        cost: What is paid if one of them takes the first label and one the second.

    Example:
        >>> Boundary(0, 1, 2.5).cost
        2.5
    """

    first: int
    second: int
    cost: float


def cheapest(costs: Sequence[tuple[float, float]], boundaries: Iterable[Boundary]) -> list[bool]:
    """Returns for each place whether it takes the second label, so that all in all costs least.

    It is the minimum cut of a graph with a node for each place, found by augmenting along shortest
    paths (Dinic). Where both labels cost the same in all, a place takes the first.

    Args:
        costs: What a place costs with the first and with the second label; may be infinite.
        boundaries: What it costs that two of them differ, at least zero.

    Example:
        >>> cheapest([(3.0, 1.0), (1.0, 3.0)], [Boundary(0, 1, 1.0)])
        [True, False]
        >>> cheapest([(3.0, 1.0), (1.0, 2.5)], [Boundary(0, 1, 4.0)])
        [True, True]
    """
    flow = _Flow(len(costs) + 2)
    first, second = len(costs), len(costs) + 1
    for place, (as_first, as_second) in enumerate(costs):
        shared = min(as_first, as_second)
        # A place on the side of `first` is cut from `second`, and pays for the first label.
        flow.connect(first, place, as_second - shared, 0.0)
        flow.connect(place, second, as_first - shared, 0.0)
    for each in boundaries:
        flow.connect(each.first, each.second, each.cost, each.cost)
    flow.fill(first, second)
    # What still reaches `second` must be on its side; the rest is free, and takes the first label.
    on_second = flow.reaching(second)
    return [place in on_second for place in range(len(costs))]


class _Flow:
    """Capacities of a graph, less what flows already.

    Args:
        count: How many nodes there are.
    """

    def __init__(self, count: int) -> None:
        self._ends: list[list[int]] = [[] for _ in range(count)]
        self._heads: list[int] = []
        self._left: list[float] = []

    def connect(self, tail: int, head: int, there: float, back: float) -> None:
        """Adds an edge, which is its neighbour's reverse."""
        for start, end, capacity in ((tail, head, there), (head, tail, back)):
            self._ends[start].append(len(self._heads))
            self._heads.append(end)
            self._left.append(capacity)

    def fill(self, source: int, sink: int) -> None:
        """Lets as much flow as can."""
        while (level := self._levels(source))[sink] >= 0:
            untried = [iter(ends) for ends in self._ends]
            while path := self._path(source, sink, level, untried):
                self._push(path)

    def reaching(self, sink: int) -> set[int]:
        """Returns the nodes from which more could flow to the sink."""
        found, waiting = {sink}, [sink]
        while waiting:
            for edge in self._ends[waiting.pop()]:
                tail = self._heads[edge]
                if tail not in found and self._left[edge ^ 1] > _NEGLIGIBLE:
                    found.add(tail)
                    waiting.append(tail)
        return found

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._ends)
        level[source], waiting = 0, deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._ends[node]:
                head = self._heads[edge]
                if level[head] < 0 and self._left[edge] > _NEGLIGIBLE:
                    level[head] = level[node] + 1
                    waiting.append(head)
        return level

    def _path(
        self, source: int, sink: int, level: list[int], untried: list[Iterator[int]]
    ) -> list[int]:
        """Returns edges from source to sink with something left, each one level further."""
        path: list[int] = []
        node = source
        while node != sink:
            edge = next((e for e in untried[node] if self._leads_on(e, level, node)), None)
            if edge is not None:
                path.append(edge)
                node = self._heads[edge]
            elif path:
                level[node] = -1
                node = self._heads[path.pop() ^ 1]
            else:
                return []
        return path

    def _leads_on(self, edge: int, level: list[int], node: int) -> bool:
        return self._left[edge] > _NEGLIGIBLE and level[self._heads[edge]] == level[node] + 1

    def _push(self, path: list[int]) -> None:
        amount = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
