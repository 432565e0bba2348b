import copy
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from halfstep.core import subscribe
from halfstep.torch import GradScaler
from halfstep.torch._watch import FOUND, watch


@pytest.fixture
def told():
    """Returns the events of the test, watched from its start."""
    events = []
    unsubscribe = subscribe(lambda event, values: events.append((event, values)))
    end = watch()
    yield events
    end()
    unsubscribe()


def names(events):
    return [event for event, _ in events]


def losses(events):
    return [float(values["value"]) for event, values in events if event == "loss"]


def records(events):
    return [values["record"] for event, values in events if event == "step"]


def make(optimizer=torch.optim.SGD, **options):
    model = nn.Linear(4, 1)
    return model, optimizer(model.parameters(), **({"lr": 0.1} | options))


def loss_of(model):
    return model(torch.ones(2, 4)).square().mean()


def test_a_plain_loop(told):
    model, optimizer = make()
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
    assert names(told) == ["backward", "loss", "step", "update"] * 2
    assert losses(told)[-1] == loss.item()
    assert told[3][1] == {"scale": 1.0, "scaler": id(optimizer)}
    assert not told[1][1]["value"].requires_grad


def test_gradient_accumulation(told):
    model, optimizer = make()
    for _ in range(3):
        loss_of(model).backward()
    optimizer.step()
    assert names(told) == ["backward", "loss"] * 3 + ["step", "update"]


def test_two_optimizers(told):
    pairs = [make(), make()]
    for _ in range(2):
        for model, optimizer in pairs:
            loss_of(model).backward()
            optimizer.step()
    scalers = [values["scaler"] for event, values in told if event == "update"]
    assert scalers == [id(optimizer) for _, optimizer in pairs] * 2


def test_a_closure_that_is_evaluated_again(told):
    model, optimizer = make(torch.optim.LBFGS, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert names(told).count("step") == names(told).count("update") == 1
    assert names(told)[-2:] == ["step", "update"]
    assert len(losses(told)) >= 3


def test_several_roots_and_roots_of_several_elements(told):
    weight = nn.Parameter(torch.ones(3))
    torch.autograd.backward([weight.sum(), (2 * weight).sum()])
    torch.autograd.backward(tensors=(weight * 2), grad_tensors=torch.ones(3))
    weight.exp().backward(torch.ones(3))
    assert losses(told) == [3.0, 6.0]
    assert names(told).count("backward") == 3


def test_a_checkpoint_within_backward_is_no_loss(told):
    weight = nn.Parameter(torch.ones(1))
    for reentrant in (True, False):
        checkpoint(lambda x: (x * weight).sum(), weight * 1, use_reentrant=reentrant).backward()
    assert len(losses(told)) == 2


def test_double_backward(told):
    weight = nn.Parameter(torch.ones(3))
    loss = weight.pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (loss + gradient.square().sum()).backward()
    assert losses(told) == [30.0]


def test_a_tensor_of_a_subclass(told):
    class Own(torch.Tensor):
        pass

    loss = nn.Parameter(torch.ones(2)).sum().as_subclass(Own)
    loss.backward()
    assert type(told[1][1]["value"]) is torch.Tensor


def test_what_has_no_number_is_not_told(told):
    weight = nn.Parameter(torch.ones(2, device="meta"))
    weight.sum().backward()
    assert names(told) == ["backward"]


class TestScalerOfPyTorch:
    def test_the_loss_is_the_unscaled_one(self, told):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        sources = [values["source"] for event, values in told if event == "loss"]
        assert sources == ["scale", "backward"]
        assert losses(told)[0] == loss.item()
        assert names(told)[-3:] == ["step", "update", "scale"]
        assert told[-1][1] == {"scale": 1024.0, "scalers": [id(optimizer)]}
        assert told[-2][1]["scale"] == 1024.0
        assert not records(told)[0].skipped

    def test_the_scale_after_the_update(self, told):
        model, optimizer = make()
        other = make()[1]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for factor, scale in ((1.0, 8.0), (torch.inf, 4.0)):
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert told[-1][1]["scale"] == scale
        loss_of(model).backward()
        other.step()
        scales = [values for event, values in told if event == "scale"]
        assert [values["scalers"] for values in scales] == [[id(optimizer)]] * 2

    @pytest.mark.parametrize("options", [{}, {"fused": True}])
    def test_a_skipped_step(self, told, options):
        model, optimizer = make(torch.optim.Adam, **options)
        before = copy.deepcopy(model.state_dict())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model) * torch.inf).backward()
        scaler.step(optimizer)
        (record,) = records(told)
        assert (record.skipped, record.reason) == (True, FOUND)
        assert names(told).count("update") == 1
        assert model.state_dict()["weight"].equal(before["weight"])

    def test_a_disabled_one(self, told):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert names(told) == ["backward", "loss", "step", "update"]

    def test_several_losses_and_an_iterator(self, told):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale([torch.ones(()), torch.ones(())])
        assert losses(told) == [1.0, 1.0]
        assert list(scaler.scale(iter([torch.ones(())]))) == [torch.tensor(2.0)]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_of_halfstep_tells_for_itself(told, enabled):
    model, optimizer = make()
    scaler = GradScaler("cpu", enabled=enabled)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [name for name in names(told) if name != "backward"] == [
        "loss",
        "loss",
        "step",
        "update",
    ]
    assert told[-1][1]["scaler"] == id(scaler)
    assert [values.get("source") for event, values in told if event == "loss"] == [None, "backward"]


class Child(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Wrapper(Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)
        return self.inner.step(closure)


def test_steps_within_a_step_are_not_steps_of_the_script(told):
    model, plain = make()  # hooks the step of SGD itself
    child, wrapper = Child(model.parameters(), lr=0.1), Wrapper(plain)
    for optimizer in (child, wrapper, plain):
        optimizer.step()
    updates = [values["scaler"] for event, values in told if event == "update"]
    assert updates == [id(child), id(wrapper), id(plain)]


def test_a_step_that_fails_hides_no_later_one(told):
    _, optimizer = make()

    def broken():
        raise ValueError("a broken closure")

    for _ in range(2):
        with pytest.raises(ValueError, match="a broken closure"):
            Wrapper(optimizer).step(broken)
    optimizer.step()
    assert names(told) == ["step", "update"]


def test_every_thread_is_seen(told):
    def train():
        model, optimizer = make()
        loss_of(model).backward()
        optimizer.step()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(told)) == sorted(["backward", "loss", "step", "update"] * 3)


def parts():
    hooks = sys.modules[Optimizer.__module__]
    return (
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler.step,
        torch.amp.GradScaler.update,
        len(hooks._global_optimizer_pre_hooks),
        len(hooks._global_optimizer_post_hooks),
    )


def test_nothing_is_left_behind():
    before = parts()
    ends = [watch(), watch()]
    during = parts()
    assert during[:4] != before[:4]
    ends[0]()
    ends[0]()
    assert parts() == during
    ends[1]()
    assert parts() == before
    watch()()
    assert parts() == before


def test_what_somebody_else_replaced_stays(monkeypatch):
    end, seen = watch(), []
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        seen.append("theirs")
        ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    end()
    weight = nn.Parameter(torch.ones(2))
    unsubscribe = subscribe(lambda event, values: seen.append(event))
    weight.sum().backward()
    unsubscribe()
    assert torch.autograd.backward is theirs
    assert seen == ["theirs"]
    assert weight.grad.tolist() == [1.0, 1.0]


def trained(optimizer, watched):
    torch.manual_seed(1)
    end = watch() if watched else lambda: None
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 1))
    optimizer = optimizer(model.parameters(), lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    end()
    return list(model.parameters())


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS], ids=lambda it: it.__name__
)
def test_no_number_changes(optimizer):
    unsubscribe = subscribe(lambda event, values: None)
    pairs = zip(trained(optimizer, False), trained(optimizer, True), strict=True)
    unsubscribe()
    assert all(plain.equal(watched) for plain, watched in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step(told, backend):
    model, optimizer = make()

    def step():
        loss_of(model).backward()
        optimizer.step()

    compiled = torch.compile(step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about itself
        for _ in range(3):
            compiled()
    torch._dynamo.reset()
    assert names(told) == ["backward", "loss", "step", "update"] * 3


@pytest.mark.slow
def test_a_compiled_model_has_no_more_graphs(told):
    model, _ = make()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    compiled(model).backward()
    torch._dynamo.reset()
    assert len(losses(told)) == 1
