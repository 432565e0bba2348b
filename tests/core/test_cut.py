import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import Boundary, cheapest

# Few values, so that ties are common; whole numbers, so that sums are exact.
COSTS = st.integers(0, 6).map(float) | st.just(math.inf)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 7))
    finite = st.tuples(COSTS, COSTS).filter(lambda pair: min(pair) < math.inf)
    costs = draw(st.lists(finite, min_size=count, max_size=count))
    places = st.integers(0, count - 1)
    edges = st.builds(Boundary, places, places, st.integers(0, 5).map(float))
    return costs, draw(st.lists(edges, max_size=12))


def total(costs, boundaries, labels):
    own = sum(pair[label] for pair, label in zip(costs, labels, strict=True))
    return own + sum(each.cost for each in boundaries if labels[each.first] != labels[each.second])


@given(problems())
def test_nothing_costs_less(problem):
    costs, boundaries = problem
    every = itertools.product((False, True), repeat=len(costs))
    least = min(total(costs, boundaries, labels) for labels in every)
    assert total(costs, boundaries, cheapest(costs, boundaries)) == least


@given(problems())
def test_of_choices_that_cost_the_same_the_first_label_wins(problem):
    costs, boundaries = problem
    found = cheapest(costs, boundaries)
    least = total(costs, boundaries, found)
    for labels in itertools.product((False, True), repeat=len(costs)):
        if total(costs, boundaries, labels) == least:
            assert all(second for first, second in zip(found, labels, strict=True) if first)


def test_a_long_chain_is_cut_once():
    count = 2000
    costs = [(0.0, 9.0)] + [(1.0, 1.0)] * (count - 2) + [(9.0, 0.0)]
    chain = [Boundary(place, place + 1, 2.0 if place != 700 else 1.0) for place in range(count - 1)]
    assert cheapest(costs, chain) == [place > 700 for place in range(count)]


@pytest.mark.parametrize("costs", [[], [(1.0, 0.0)]])
def test_without_boundaries_each_place_decides_for_itself(costs):
    assert cheapest(costs, []) == [first > second for first, second in costs]
