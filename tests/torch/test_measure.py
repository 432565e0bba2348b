import time

import pytest
import torch

from halfstep.torch._measure import Probe


def test_values_of_all_kinds_become_floats():
    values = [
        torch.tensor(1.5),
        2,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([3.0, 5.0]),
    ]
    assert Probe().floats(values) == [1.5, 2.0, 2.5, 4.0]
    assert Probe().floats([]) == []


def test_a_snapshot_is_not_reached_by_what_follows():
    loss = torch.tensor(1.0, requires_grad=True) * 2
    snapshot = Probe().snapshot(loss)
    with torch.no_grad():
        loss.zero_()
    assert Probe().floats([snapshot]) == [2.0]
    assert not snapshot.requires_grad
    assert Probe().snapshot("text") == "text"


def test_the_time_between_marks():
    probe = Probe()
    before = time.perf_counter()
    marks = [probe.tick() for _ in range(3)]
    seconds = probe.seconds(marks)
    assert len(seconds) == 2
    assert all(0 <= each <= time.perf_counter() - before for each in seconds)
    assert probe.seconds([]) == probe.seconds(marks[:1]) == []


def test_the_seed():
    numbers = []
    for _ in range(2):
        Probe().seed(3)
        numbers.append(torch.rand(()).item())
    assert numbers[0] == numbers[1]


def test_saved_bytes_are_counted():
    with Probe().saved_bytes() as saved:
        torch.ones(8, requires_grad=True).exp()
    assert saved.bytes == 32


def test_without_cuda_the_processor_is_measured():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    assert Probe().peak_memory() is None
    assert Probe().device() == ""
    assert Probe().versions() == {"torch": torch.__version__}


@pytest.mark.gpu
def test_on_cuda():
    probe = Probe()
    data = torch.ones(2**20, device="cuda")
    marks = [probe.tick() for _ in range(4) if data.add_(1) is not None]
    assert len(probe.seconds(marks)) == 3
    assert all(seconds >= 0 for seconds in probe.seconds(marks))
    peak, kind = probe.peak_memory()
    assert peak >= 2**22
    assert kind == "allocated on CUDA"
    assert probe.device()
    assert probe.floats([data[0], 1.0, torch.tensor(2.0)]) == [5.0, 1.0, 2.0]


def test_counting_makes_way_for_what_cannot_run_beside_it():
    weight = torch.ones(8, requires_grad=True)
    with Probe().saved_bytes() as saved:
        weight.exp()
        assert torch.func.grad(torch.sum)(torch.ones(2)).tolist() == [1.0, 1.0]
        weight.exp()
    assert saved.bytes is None
    with Probe().saved_bytes() as saved:
        weight.exp()
    assert saved.bytes == 32


def test_counting_gets_out_of_the_way_of_an_error():
    with pytest.raises(ValueError, match="of the script"), Probe().saved_bytes():
        raise ValueError("of the script")
    with Probe().saved_bytes() as saved:
        torch.ones(8, requires_grad=True).exp()
    assert saved.bytes == 32


@pytest.mark.parametrize(
    ("capability", "policy"), [((9, 0), "mixed_float16"), ((6, 1), "mixed_bfloat16")]
)
def test_the_policy_is_chosen_again_once_cuda_is_in_use(monkeypatch, capability, policy):
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    chosen, later = [], []
    monkeypatch.setattr(torch.cuda, "_lazy_call", later.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    Probe().choose_policy(chosen.append)
    assert chosen == ["mixed_bfloat16"]
    later.pop()()
    assert chosen == ["mixed_bfloat16", policy]


@pytest.mark.gpu
def test_float16_is_chosen_on_cuda():
    torch.cuda.init()
    chosen = []
    Probe().choose_policy(chosen.append)
    assert chosen == ["mixed_bfloat16", "mixed_float16"]
