"""Whether two sets of loss curves differ by more than chance explains.

Each run is cut into windows of equal shares, so that runs of different lengths can be compared. In
each window, the difference of the means over the seeds is divided by how far seeds differ; the
largest of those is the statistic. Chance is what it is when the runs are dealt out to the two
policies anew, which needs no assumption of how losses are distributed, and counts that there are
several windows: https://en.wikipedia.org/wiki/Permutation_test.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

_WINDOWS = 10
_MOST_DEALS = 2000
# Of fewer, no deal is rare: that all of one policy are above all of the other is one in ten of 3.
FEWEST = 4
LEVEL = 0.05

Row = Sequence[float]


@dataclass(frozen=True)
class Difference:
    """How two sets of curves differ where they do most.

    Args:
        chance: How often chance alone makes them differ as much.
        window: Where that is, from 0 at the start.
        firsts: The losses there, one per run.
        others: Those of the other policy.
    """

    chance: float
    window: int
    firsts: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def place(self) -> str:
        """The part of the run."""
        return f"{self.window * 100 // _WINDOWS} to {(self.window + 1) * 100 // _WINDOWS} %"


def curves_apart(firsts: Sequence[Row], others: Sequence[Row]) -> Difference | None:
    """Returns how curves differ, None where that cannot be told from chance.

    Args:
        firsts: The losses of each run of the first policy.
        others: Those of the other one.

    Example:
        >>> lower, upper = [[1.0 + seed / 9] * 20 for seed in range(4)], [[2.0] * 20] * 4
        >>> found = curves_apart(lower, upper)
        >>> round(found.chance, 3), found.place
        (0.029, '0 to 10 %')
        >>> curves_apart(lower[:3], upper[:3]) is None  # too few seeds
        True
    """
    curves = [_windows(each) for each in (*firsts, *others)]
    if not _can_tell(firsts, others):
        return None
    dealt = [_largest(curves, deal) for deal in _deals(len(firsts), len(others))]
    statistic, window = dealt[0]
    chance = sum(each >= statistic for each, _ in dealt) / len(dealt)
    found = [curve[window] for curve in curves]
    return Difference(chance, window, tuple(found[: len(firsts)]), tuple(found[len(firsts) :]))


def _can_tell(firsts: Sequence[Row], others: Sequence[Row]) -> bool:
    enough = min(len(firsts), len(others)) >= FEWEST
    long_enough = all(len(each) >= _WINDOWS for each in (*firsts, *others))
    finite = all(math.isfinite(loss) for each in (*firsts, *others) for loss in each)
    # A script that seeds itself says nothing of chance.
    return enough and long_enough and finite and len(set(map(tuple, firsts))) > 1


def _windows(losses: Row) -> list[float]:
    """Returns the mean loss in each of the windows."""
    edges = [len(losses) * number // _WINDOWS for number in range(_WINDOWS + 1)]
    return [fmean(losses[a:b]) if a < b else math.nan for a, b in itertools.pairwise(edges)]


def _deals(firsts: int, others: int) -> Iterator[tuple[int, ...]]:
    """Yields which of all runs are those of the first policy: as it was, then dealt out anew."""
    runs = firsts + others
    if math.comb(runs, firsts) <= _MOST_DEALS:
        yield from itertools.combinations(range(runs), firsts)
        return
    yield tuple(range(firsts))
    generator = random.Random(0)
    for _ in range(_MOST_DEALS - 1):
        yield tuple(generator.sample(range(runs), firsts))


def _largest(curves: Sequence[Row], deal: tuple[int, ...]) -> tuple[float, int]:
    """Returns the largest statistic of all windows, and the window."""
    chosen = set(deal)
    ours = [curve for index, curve in enumerate(curves) if index in chosen]
    theirs = [curve for index, curve in enumerate(curves) if index not in chosen]
    each = map(_distance, zip(*ours, strict=True), zip(*theirs, strict=True))
    return max(((distance, window) for window, distance in enumerate(each)), key=lambda at: at[0])


def _distance(ours: Row, theirs: Row) -> float:
    """Returns the difference of two means, in units of how far their numbers are apart."""
    apart = abs(fmean(ours) - fmean(theirs))
    noise = math.sqrt(variance(ours) + variance(theirs))
    return apart / noise if noise else apart and math.inf
