"""What is seen of a training that goes on, against what its values are."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from halfstep import Exponents
from halfstep.core import listening
from halfstep.errors import UsageError
from halfstep.torch import GradScaler, autocast, prepare, watch
from tests.torch.stepping import CASES

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def train(case, model, steps=1, optimizer=None):
    for _ in range(steps):
        model.zero_grad()
        case.loss(model, case.batch()).backward()
        if optimizer is not None:
            optimizer.step()


def calls(seen):
    return [sample.call for sample in seen.samples]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3}, [1, 3, 6]),
        ({"every": 3, "first": 0}, [3, 6]),
        ({"every": 4, "first": 2}, [1, 2, 4]),
        ({"every": 3, "keep": 2}, [3, 6]),
        ({"first": 0}, []),
    ],
)
def test_the_steps_that_are_looked_at(options, expected):
    case, model = CASES["mlp"], CASES["mlp"].model()
    with watch(model, **options) as seen:
        train(case, model, 7)
    assert calls(seen) == expected
    assert seen.calls == 7


@EVERY
def test_the_values_are_those_of_the_step(case):
    model = case.model()
    with watch(model) as seen:
        train(case, model)
    (sample,) = seen.samples
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        if own:
            expected = sum((Exponents.of(each.grad.numpy()) for each in own), Exponents())
            assert sample.find(path, "grad_weight").exponents == expected
            weights = sum((Exponents.of(each.detach().numpy()) for each in own), Exponents())
            assert sample.find(path, "weight").exponents == weights
    roles = {reading.role for reading in sample.readings}
    assert roles == {"input", "output", "weight", "grad_input", "grad_output", "grad_weight"}


@EVERY
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_numbers_of_a_training_do_not_change(case, policy):
    trained = []
    for every in (None, 2):
        model = case.model()
        optimizer = torch.optim.Adam(model.parameters())
        prepare(model, optimizer, policy)
        seen = watch(model, every=every) if every else None
        train(case, model, 5, optimizer)
        trained.append([each.clone() for each in model.state_dict().values()])
    assert calls(seen) == [1, 2, 4]
    assert all(map(torch.equal, *trained))


def test_between_samples_no_module_inside_has_a_hook():
    case, model = CASES["mlp"], CASES["mlp"].model()
    seen = watch(model, every=2, first=0)
    hooks = []
    for _ in range(4):
        train(case, model)
        inner = [*model.children()]
        hooks.append(sum(len(each._forward_hooks) for each in inner))
    assert hooks == [0, 5, 0, 5]
    seen.close()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert not any(each._backward_hooks for each in model.parameters())


def test_inside_of_a_region_it_sees_scaled_values_in_the_format():
    case, model = CASES["mlp"], CASES["mlp"].model()
    prepare(model, policy="mixed_float16")
    plain = case.model()
    with watch(model) as seen, watch(plain) as exact:
        train(case, model)
        train(case, plain)
    scaled, true = (each.samples[0].find("2", "grad_output") for each in (seen, exact))
    assert (scaled.form, true.form) == ("float16", "float32")
    assert scaled.exponents.highest > true.exponents.highest + 10
    assert scaled.headroom == scaled.exponents.window("float16").highest


def test_after_a_skipped_step_it_looks_at_more():
    case, model = CASES["mlp"], CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepare(model, optimizer, "mixed_float16, scale=static(65536.0)")
    with watch(model, every=50, first=0, after_fault=2) as seen:
        train(case, model, 3, optimizer)
        with torch.no_grad():
            model[0].weight[0, 0] = torch.inf
        train(case, model, 1, optimizer)
        with torch.no_grad():
            model[0].weight[0, 0] = 0.0
        train(case, model, 5, optimizer)
    assert [(each.call, each.reason) for each in seen.samples] == [(5, "fault"), (6, "fault")]
    assert str(seen).startswith("call 6, after a skipped step\nmodule  role")


def test_a_step_that_a_scaler_skips_is_one_too():
    case, model = CASES["mlp"], CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", init_scale=2.0**60)
    with watch(model, every=50, first=0, after_fault=1) as seen:
        for _ in range(3):
            with autocast("cpu", dtype=torch.float16):
                loss = case.loss(model, case.batch())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert calls(seen) == [2, 3]
    found = seen.samples[0].find("4", "grad_weight").exponents
    assert found.infs + found.nans > 0


def test_validation_is_not_looked_at():
    case, model = CASES["mlp"], CASES["mlp"].model()
    with watch(model, every=1) as seen:
        train(case, model)
        with torch.no_grad():
            model(case.batch()[0])
        model.eval()
        model(case.batch()[0])
        model.train()
    assert calls(seen) == [1]
    assert seen.samples[0].find("0", "output").exponents.total == 64 * 64


def test_two_calls_before_a_backward_are_one_step():
    case, model = CASES["mlp"], CASES["mlp"].model()
    with watch(model, every=3) as seen:
        for _ in range(2):
            (case.loss(model, case.batch()) + case.loss(model, case.batch())).backward()
    assert calls(seen) == [1, 3]
    assert seen.samples[0].find("0", "output").exponents.total == 2 * 64 * 64


def test_a_model_with_a_watch_is_copied_and_pickled_without():
    case, model = CASES["mlp"], CASES["mlp"].model()
    with watch(model) as seen:
        train(case, model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            train(case, other)
        counted = seen.samples[0].find("0", "output").exponents.total
    assert (seen.calls, counted) == (1, 64 * 64)


def test_a_watch_ends_with_its_model():
    model = nn.Linear(2, 1)
    seen = watch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not listening()
    seen.close()
    assert seen.samples == ()
    assert str(seen) == "no step was looked at"


def test_it_ends_once_and_can_begin_again():
    case, model = CASES["mlp"], CASES["mlp"].model()
    with watch(model) as seen:
        train(case, model)
    seen.close()
    with watch(model) as other:
        train(case, model)
    assert (seen.calls, other.calls) == (1, 1)
    assert seen.to_dict()["samples"] == other.to_dict()["samples"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every >= 1, got 0. Write"),
        ({"every": 2.0}, "every >= 1, got 2.0"),
        ({"first": -1}, "first >= 0, got -1"),
        ({"after_fault": True}, "after_fault >= 0, got True"),
        ({"keep": 0}, "keep >= 1, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, text):
    with pytest.raises(UsageError) as caught:
        watch(nn.Linear(2, 1), **options)
    assert text in str(caught.value)


def test_what_cannot_be_watched_is_refused():
    model = nn.Linear(2, 1)
    with watch(model), pytest.raises(UsageError, match="not watched yet, got Linear"):
        watch(model)
    with pytest.raises(UsageError, match=r"got OptimizedModule\. What happens"):
        watch(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="not compiled, got Linear"):
        watch(model)
    with pytest.raises(UsageError, match=r"a torch\.nn\.Module, got str"):
        watch("model")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_nothing_waits_for_the_device():
    case, model = CASES["mlp"], CASES["mlp"].model().cuda()
    batch = [each.cuda() for each in case.batch()]
    seen = watch(model, every=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            case.loss(model, batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert calls(seen) == [1, 2, 4]
    weight = model[0].weight.detach().cpu().numpy()
    bias = model[0].bias.detach().cpu().numpy()
    found = seen.samples[-1].find("0", "weight").exponents
    assert found == Exponents.of(weight) + Exponents.of(bias)
