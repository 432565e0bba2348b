"""Every front-end moves its loss scale exactly as core does, in each of its ways."""

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep import LossScale
from tests.conformance.front_ends import FRONT_ENDS, After
from tests.conformance.traces import TRACES
from tests.core.strategies import LOSS_SCALES

WAYS = [
    pytest.param(
        row, way, id=f"{row.name}-{way}", marks=[pytest.mark.slow] if row.environment else []
    )
    for row in FRONT_ENDS
    for way in row.ways
]
# One process for all tests of a front-end.
every_way = pytest.mark.parametrize(
    ("front_end", "way"), WAYS, indirect=["front_end"], scope="module"
)

# Limits that short traces come to, and factors that are no powers of two.
NARROW = st.builds(
    LossScale,
    init_scale=st.sampled_from([1.0, 3.0, 64.0, 2.0**15]),
    growth_factor=st.sampled_from([1.0, 1.1, 2.0, 4.0, 1e6]),
    backoff_factor=st.sampled_from([0.3, 0.5, 0.9, 1e-6]),
    growth_interval=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-126, 2.0**-3, 1.0]),
    max_scale=st.sampled_from([2.0**16, 1e30, 3.4028234663852886e38]),
    hysteresis=st.integers(1, 3),
)
# Runs, so that short traces come to the limits.
STEPS = st.lists(st.sampled_from(["+", "x", "++++", "xxxx"]), min_size=5, max_size=20).map("".join)


@pytest.fixture(scope="module")
def front_end(request):
    for package in request.param.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with request.param.running() as replay:
        yield request.param, replay


def by_core(rule, steps):
    state, skipped = rule.init(), 0
    for letter in steps:
        state = rule.next(state, finite=letter == "+")
        skipped += letter == "x"
        yield After(*state, skipped)


@every_way
@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_a_front_end_replays_the_table(front_end, way, trace):
    row, replay = front_end
    if trace.rule.kind not in row.ways[way]:
        pytest.skip(f"a {way} does not count where the scale is {trace.rule.kind}")
    skipped = [trace.steps[: place + 1].count("x") for place in range(len(trace.steps))]
    expected = [After(*state, count) for state, count in zip(trace.states, skipped, strict=True)]
    assert list(replay(way, trace.rule, trace.steps)) == expected


@every_way
def test_a_front_end_agrees_with_core_on_random_traces(front_end, way):
    row, replay = front_end
    rules = (NARROW | LOSS_SCALES).filter(lambda rule: rule.kind in row.ways[way])

    @settings(max_examples=row.examples, suppress_health_check=[HealthCheck.too_slow])
    @given(rules, STEPS)
    def agrees(rule, steps):
        assert list(replay(way, rule, steps)) == list(by_core(rule, steps))

    agrees()
