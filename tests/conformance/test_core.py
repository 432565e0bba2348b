import pytest

from tests.conformance.traces import TRACES


def replay_with_core(trace):
    state = trace.rule.init()
    for finite, expected in trace:
        state = trace.rule.next(state, finite=finite)
        yield state, expected


@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_core_replays(trace):
    for state, expected in replay_with_core(trace):
        assert state == expected


@pytest.mark.parametrize("trace", [trace for trace in TRACES if trace.like_torch], ids=str)
def test_torch_replays_what_is_marked(trace):
    torch = pytest.importorskip("torch")
    rule = trace.rule
    scale, tracker = torch.tensor(rule.init_scale), torch.tensor(0, dtype=torch.int32)
    for finite, expected in trace:
        found = torch.tensor(0.0 if finite else 1.0)
        factors = (rule.growth_factor, rule.backoff_factor, rule.growth_interval)
        torch._amp_update_scale_(scale, tracker, found, *factors)
        assert (scale.item(), tracker.item()) == expected[:2]


def test_names_are_unique():
    assert len({trace.name for trace in TRACES}) == len(TRACES)
