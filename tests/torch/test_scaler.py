import copy
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from halfstep.core import SkippedStepsWarning, override_policy, subscribe
from halfstep.errors import (
    MissingKeyError,
    NoCheckError,
    NonFiniteError,
    ScaleError,
    ScalerStateError,
    UsageError,
)
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._optimizers import lacks_state


class Loop:
    """One parameter of two ones, whose loss is the sum of its squares times a factor."""

    def __init__(self, optimizer=torch.optim.SGD, scaler=None, **options):
        self.parameter = nn.Parameter(torch.ones(2))
        self.optimizer = optimizer([("weight", self.parameter)], lr=0.125)
        self.scaler = scaler or GradScaler("cpu", **{"init_scale": 8.0, **options})

    def backward(self, factor=1.0, poison=None):
        loss = (self.parameter * self.parameter).sum() * factor
        self.scaler.scale(loss).backward()
        if poison is not None:
            self.parameter.grad[0] = poison

    def run(self, factor=1.0, poison=None):
        self.optimizer.zero_grad()
        self.backward(factor, poison)
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result


# Construction


def test_it_is_a_scaler_of_torch_but_inherits_nothing():
    theirs = torch.amp.GradScaler
    assert issubclass(GradScaler, theirs)
    inherited = [
        name
        for name, member in vars(theirs).items()
        if inspect.isfunction(member) and getattr(GradScaler, name) is member
    ]
    assert inherited == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"init_scale": 4.0}),
        (("cpu", 4.0), {}),
        ((4.0,), {}),
        ((4, 2.0, 0.5, 2000, True), {}),
        ((4.0,), {"device": "cpu"}),
        ((torch.device("cpu"), 4.0), {}),
    ],
)
def test_old_and_new_forms(args, kwargs):
    scaler = GradScaler(*args, **kwargs)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.is_enabled()) == (
        4,
        2000,
        True,
    )


def test_the_old_form_shifts_every_position():
    scaler = GradScaler(4.0, 3.0, 0.25, 7, False, min_scale=1.0)
    assert not scaler.is_enabled()
    scaler = GradScaler(4.0, 3.0, 0.25, 7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)
    assert scaler.get_growth_interval() == 7


def test_the_device_is_the_accelerator_or_the_cpu():
    current = torch.accelerator.current_accelerator()
    assert GradScaler()._device == (current.type if current else "cpu")


def test_cuda_without_cuda_scales_where_the_tensors_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = GradScaler("cuda")
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 65536.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": -1.0}, "GradScaler needs min_scale <= init_scale"),
        ({"init_scale": "1024"}, "GradScaler needs init_scale to be a finite number, got '1024'"),
        ({"init_scale": float("nan")}, "init_scale to be a finite number, got nan"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"growth_factor": 0.5}, "growth_factor >= 1"),
        ({"backoff_factor": 1.5}, "backoff_factor <= 1"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
    ],
)
def test_settings_that_could_destroy_a_run(options, words):
    with pytest.raises(ScaleError, match=words):
        GradScaler("cpu", **options)


def test_bad_arguments():
    with pytest.raises(UsageError, match="device such as 'cuda' or 'cpu', got 'gpu'"):
        GradScaler("gpu")
    with pytest.raises(UsageError, match="max_consecutive_skips >= 1 or None, got 0"):
        GradScaler("cpu", max_consecutive_skips=0)
    with pytest.raises(UsageError, match="named_parameters needs a module or pairs"):
        GradScaler("cpu", named_parameters=[nn.Parameter(torch.ones(1))])


def test_an_initial_scale_below_the_default_floor_brings_its_own():
    assert GradScaler("cpu", init_scale=2.0**-20).get_scale() == 2.0**-20


def test_only_enabled_disables():
    for first in (1.0, 8.0):
        loop = Loop(init_scale=first, growth_factor=1.0, backoff_factor=1.0)
        assert loop.scaler.is_enabled()
        loop.run(poison=torch.inf)
        assert loop.scaler.last_step.skipped
        assert loop.parameter.tolist() == [1.0, 1.0]
        assert loop.scaler.get_scale() == first
        assert loop.scaler.state_dict()["scale"] == first


def test_setters_are_checked():
    scaler = GradScaler("cpu")
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    assert scaler.state_dict()["growth_factor"] == 4.0
    assert (scaler._backoff_factor, scaler._growth_interval) == (0.25, 3)
    with pytest.raises(ScaleError, match="growth_factor"):
        scaler.set_growth_factor(float("nan"))
    with pytest.raises(ScaleError, match="backoff_factor"):
        scaler.set_backoff_factor(0.0)
    with pytest.raises(ScaleError, match="GradScaler needs 1 <= growth_interval"):
        scaler.set_growth_interval(-1)


# Disabled


def test_a_disabled_scaler_only_steps():
    loop = Loop(enabled=False)
    loss = loop.parameter.sum()
    assert loop.scaler.scale(loss) is loss
    loss.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer, closure=None)
    loop.scaler.update()
    assert loop.parameter.tolist() == [0.875, 0.875]
    assert loop.scaler.state_dict() == {}
    loop.scaler.load_state_dict({})
    assert (loop.scaler.get_scale(), loop.scaler.is_enabled()) == (1.0, False)
    assert not loop.scaler.last_step.skipped
    assert loop.scaler.history.steps == 1


def test_a_disabled_scaler_hands_closures_on():
    loop = Loop(enabled=False)
    assert loop.scaler.step(loop.optimizer, lambda: 3.0) == 3.0


# Order of calls


def test_calls_before_scale():
    loop = Loop()
    for name, call in {
        "step": lambda: loop.scaler.step(loop.optimizer),
        "unscale_": lambda: loop.scaler.unscale_(loop.optimizer),
        "update": loop.scaler.update,
    }.items():
        with pytest.raises(NoCheckError, match=f"Attempted {name} but _scale is None") as error:
            call()
        assert "scaler.scale(loss).backward()" in str(error.value)


def test_unscale_twice_or_after_step():
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(ScalerStateError, match="has already been called on this optimizer since"):
        loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    with pytest.raises(ScalerStateError, match=r"unscale_\(\) is being called after step\(\)"):
        loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(ScalerStateError, match=r"step\(\) has already been called since"):
        loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.run()


def test_update_twice():
    loop = Loop()
    loop.run()
    with pytest.raises(NoCheckError, match="No inf checks were recorded prior to update") as error:
        loop.scaler.update()
    assert "once per iteration" in str(error.value)


def test_a_skipped_accumulation_goes_on_after_update():
    loop = Loop()
    for _ in range(3):
        loop.backward()
        loop.scaler.unscale_(loop.optimizer)
        loop.optimizer.zero_grad()
        loop.scaler.update()
    assert loop.scaler.history.steps == 0


def test_a_step_without_gradients_is_no_step():
    loop = Loop()
    loop.scaler.scale(torch.ones((), requires_grad=True)).backward()
    assert loop.scaler.step(loop.optimizer) is None
    loop.scaler.update()
    assert (loop.scaler.last_step.skipped, loop.scaler.last_step.reason) == (True, "no gradients")
    assert loop.scaler.get_scale() == 8.0
    assert loop.scaler._get_growth_tracker() == 0
    assert loop.scaler.history.consecutive_skips == 0


def test_a_fused_step_without_gradients_is_no_step():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.reason == "no gradients"


# Setting the scale


@pytest.mark.parametrize("value", [4, 4.0, torch.tensor(4.0), torch.tensor([4]), True and 4])
def test_update_takes_any_number(value):
    loop = Loop()
    loop.run()
    loop.scaler.update(value)
    assert loop.scaler.get_scale() == 4.0
    assert loop.scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    "value", [0.0, -1, float("nan"), float("inf"), "8", True, torch.tensor(0.0)]
)
def test_update_refuses_what_is_no_scale(value):
    loop = Loop()
    loop.run()
    with pytest.raises(ScaleError, match="finite number above 0"):
        loop.scaler.update(value)
    assert loop.scaler.get_scale() == 8.0


@pytest.mark.parametrize("value", [0.5, 64.0])
def test_update_keeps_to_the_limits(value):
    loop = Loop(min_scale=1.0, max_scale=32.0)
    loop.run()
    with pytest.raises(ScaleError, match=r"min_scale <= new_scale <= max_scale") as error:
        loop.scaler.update(value)
    for words in (f"new_scale={value}", "min_scale=1.0", "max_scale=32.0"):
        assert words in str(error.value)
    assert loop.scaler.get_scale() == 8.0
    loop.scaler.update(32.0)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("loaded", "kept"), [(0.5, 1.0), (64.0, 32.0), (2.0, 2.0)])
def test_a_loaded_scale_is_brought_within_the_limits(started, loaded, kept):
    loop = Loop(min_scale=1.0, max_scale=32.0)
    if started:
        loop.run()
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "scale": loaded})
    assert loop.scaler.get_scale() == kept
    changes = [(each.before, each.after) for each in loop.scaler.history.scale_changes]
    assert changes == [(8.0, loaded), (loaded, kept)][: 1 if loaded == kept else 2]
    loop.run()
    assert loop.scaler.get_scale() == kept


def test_update_refuses_tensors_of_another_kind():
    loop = Loop()
    loop.run()
    with pytest.raises(UsageError, match="one element without requires_grad"):
        loop.scaler.update(torch.ones(2))
    with pytest.raises(UsageError, match="one element without requires_grad"):
        loop.scaler.update(torch.ones((), requires_grad=True))


# The scale


def test_growth_back_off_and_history():
    loop = Loop(growth_interval=2)
    for poison in (None, None, torch.inf, None):
        loop.run(poison=poison)
    changes = [(each.before, each.after, each.reason) for each in loop.scaler.history.scale_changes]
    assert changes == [
        (8.0, 16.0, "2 steps in a row were finite"),
        (16.0, 8.0, "gradients held inf"),
    ]
    assert str(loop.scaler.history).splitlines() == [
        "4 steps, 1 skipped, 0 of them in a row up to now",
        "after step 2: 8 -> 16, 2 steps in a row were finite",
        "after step 3: 16 -> 8, gradients held inf",
    ]


def test_an_interval_below_the_count_lets_the_scale_grow_at_the_next_good_step():
    scales = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        loop = Loop(scaler=scaler)
        for _ in range(3):
            loop.run()
        loop.scaler.set_growth_interval(2)
        loop.run()
        scales.append(loop.scaler.get_scale())
    assert scales == [16.0, 8.0]


def test_the_cap_and_the_hysteresis():
    loop = Loop(growth_interval=1, max_scale=16.0, hysteresis=2)
    scales = []
    for poison in (None, None, torch.inf, torch.inf, torch.inf, None):
        loop.run(poison=poison)
        scales.append(loop.scaler.get_scale())
    assert scales == [16.0, 16.0, 16.0, 8.0, 4.0, 8.0]


def test_at_the_floor_an_error_says_what_to_do_and_training_can_go_on():
    loop = Loop(init_scale=2.0, min_scale=1.0)
    loop.run(poison=torch.inf)
    with pytest.raises(NonFiniteError) as error:
        loop.run(poison=torch.inf)
    for words in ("smallest scale", "min_scale", "weight (inf)", "The loss was finite", "float32"):
        assert words in str(error.value)
    assert loop.scaler.get_scale() == 1.0
    loop.run()
    assert not loop.scaler.last_step.skipped
    assert loop.parameter.tolist() == [0.75, 0.75]


def test_a_bad_loss_leaves_the_scale_alone():
    loop = Loop(growth_interval=3)
    loop.run()
    loop.run(factor=float("nan"))
    record = loop.scaler.last_step
    assert (record.skipped, record.reason) == (True, "the loss was not finite")
    assert record.loss_nonfinite
    assert record.nonfinite == (("weight", "nan"),)
    assert (loop.scaler.get_scale(), loop.scaler._get_growth_tracker()) == (8.0, 1)


def test_one_bad_loss_of_several():
    loop = Loop()
    losses = [loop.parameter.sum(), (loop.parameter * torch.inf).sum()]
    for loss in loop.scaler.scale(losses):
        loss.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.loss_nonfinite
    assert loop.scaler.get_scale() == 8.0


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_loss_of_one_optimizer_does_not_hide_the_overflow_of_another(bad):
    loops = [Loop(growth_interval=3)]
    scaler = loops[0].scaler
    loops.append(Loop(scaler=scaler))
    for number, loop in enumerate(loops):
        loop.backward(torch.nan if number == bad else 1.0, poison=torch.inf)
    for loop in loops:
        scaler.step(loop.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for loop in loops:
        record = scaler.last_step_of(loop.optimizer)
        assert (record.skipped, record.loss_nonfinite) == (True, False)
        assert record.reason.startswith("gradients held")


def test_only_bad_losses_of_several_optimizers_leave_the_scale_alone():
    loops = [Loop()]
    scaler = loops[0].scaler
    loops.append(Loop(scaler=scaler))
    for loop in loops:
        loop.backward(torch.nan)
        scaler.step(loop.optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert scaler.last_step.reason == "the loss was not finite"


def test_skipped_steps_warn_ever_more_rarely():
    loop = Loop()
    told = []
    for step in range(1, 202):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.run(factor=float("nan"))
        told += [(step, warning) for warning in caught]
    assert [step for step, _ in told] == [25, 50, 100, 200]
    warning = told[0][1]
    assert warning.category is SkippedStepsWarning
    assert warning.filename == __file__
    for words in ("25 optimizer steps in a row", "loss itself was not finite", "weight (nan)"):
        assert words in str(warning.message)
    assert loop.scaler.history.consecutive_skips == 201


def test_too_many_skipped_steps_can_end_the_run():
    loop = Loop(max_consecutive_skips=3)
    for _ in range(2):
        loop.run(poison=torch.nan)
    with pytest.raises(NonFiniteError, match="max_consecutive_skips=3 skipped steps in a row"):
        loop.run(poison=torch.nan)
    loop.scaler.update()
    loop.run()
    assert loop.scaler.history.consecutive_skips == 0


def test_skips_are_counted_for_each_optimizer():
    scaler = GradScaler("cpu", init_scale=2.0**20)
    good, bad = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter]) for parameter in (good, bad)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(good.sum() + bad.sum()).backward()
        bad.grad[0] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.history.consecutive_skips == 4
    assert (scaler.history.steps, scaler.history.skipped) == (8, 4)
    assert not scaler.last_step_of(optimizers[0]).skipped
    assert scaler.last_step_of(optimizers[1]).skipped
    assert scaler.last_step is scaler.last_step_of(optimizers[1])


@pytest.mark.filterwarnings("ignore::halfstep.core.SkippedStepsWarning")
def test_no_sequence_of_overflows_harms_a_weight():
    loop = Loop(init_scale=65536.0)
    for _ in range(150):
        try:
            loop.run(poison=torch.inf)
        except NonFiniteError as error:
            loop.error = error
    assert loop.scaler.get_scale() == 2.0**-16
    loop.run()
    assert loop.parameter.tolist() == [0.75, 0.75]


# Gradients after unscale_


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_written_after_unscale_is_caught(fused):
    loop = Loop(lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=fused))
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.parameter.grad[1] = torch.nan
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.reason == "a gradient became non-finite after unscale_()"
    assert loop.parameter.tolist() == [1.0, 1.0]
    assert (loop.scaler.get_scale(), loop.scaler._get_growth_tracker()) == (8.0, 1)


def test_a_gradient_replaced_after_unscale_is_checked():
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.parameter.grad = torch.tensor([1.0, torch.inf])
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.last_step.nonfinite == (("weight", "inf"),)


def test_a_gradient_changed_after_clipping_is_checked():
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_([loop.parameter], 1.0)
    loop.parameter.grad[0] = torch.nan
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.last_step.skipped


# Skipped steps and what counts them


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_changes_nothing(fused):
    loop = Loop(lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=fused))
    loop.run()
    before = copy.deepcopy(loop.optimizer.state_dict()["state"]), loop.parameter.tolist()
    assert loop.run(poison=torch.inf) is None
    assert loop.scaler.last_step_of(loop.optimizer).skipped
    after = loop.optimizer.state_dict()["state"], loop.parameter.tolist()
    assert before[1] == after[1]
    for key, value in before[0][0].items():
        assert torch.equal(value, after[0][0][key])


@pytest.mark.parametrize("fused", [False, True])
def test_the_schedule_counts_real_steps_and_does_not_complain(fused):
    loop = Loop(lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=fused))
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for poison in (torch.inf, None, torch.inf, None):
            loop.run(poison=poison)
            if not loop.scaler.last_step.skipped:
                scheduler.step()
        assert scheduler.last_epoch == 2


def test_an_always_stepping_schedule_does_not_complain_about_a_skipped_step():
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.run(poison=torch.inf)
        scheduler.step()


def test_before_any_step_none_was_taken():
    loop = Loop()
    assert loop.scaler.last_step.skipped
    assert loop.scaler.last_step_of(loop.optimizer).reason == "step() was not called yet"


@pytest.mark.parametrize("what", [None, 3, nn.Linear(2, 2), torch.ones(2)])
def test_what_is_no_optimizer(what):
    loop = Loop()
    loop.backward()
    for name in ("step", "unscale_"):
        with pytest.raises(UsageError, match=rf"{name}\(\) needs an optimizer, got ") as error:
            getattr(loop.scaler, name)(what)
        assert "Pass the torch.optim.Optimizer" in str(error.value)
    loop.scaler.step(loop.optimizer)


def test_it_shows_its_scale_and_its_rule():
    assert repr(GradScaler("cpu")) == "GradScaler(scale=65536, rule=dynamic)"
    loop = Loop(growth_interval=7)
    loop.run(poison=torch.inf)
    assert (
        repr(loop.scaler) == "GradScaler(scale=4, rule=dynamic(init_scale=8.0, growth_interval=7))"
    )
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler(enabled=False)"


# Checkpoints


def test_a_state_dict_with_missing_keys():
    scaler = GradScaler("cpu")
    with pytest.raises(MissingKeyError, match="without 'scale', '_growth_tracker'") as error:
        scaler.load_state_dict(
            {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "other": 3}
        )
    assert isinstance(error.value, KeyError)
    assert isinstance(error.value, ValueError)
    assert str(error.value).startswith("load_state_dict() needs 'scale', 'growth_factor'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_growth_tracker": -1}, "'_growth_tracker' to be a whole number >= 0, got -1"),
        ({"_growth_tracker": 1.5}, "whole number"),
        ({"_growth_tracker": "1"}, "got '1'"),
        ({"_growth_tracker": None}, "got None"),
        ({"_growth_tracker": float("nan")}, "got nan"),
        ({"_growth_tracker": float("inf")}, "got inf"),
        ({"_growth_tracker": 2**31}, "whole number"),
        ({"_overflows": -1}, "'_overflows'"),
        ({"scale": "8"}, r"load_state_dict\(\) needs a scale"),
        ({"growth_factor": "2"}, "GradScaler needs growth_factor"),
        ({"growth_interval": 2.5}, "GradScaler needs growth_interval"),
        ({"backoff_factor": None}, "GradScaler needs backoff_factor"),
    ],
)
def test_a_state_dict_with_wrong_values_changes_nothing(change, words):
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=words):
        scaler.load_state_dict({**before, **change})
    assert scaler.state_dict() == before


def test_a_state_dict_that_is_none():
    with pytest.raises(UsageError, match="needs a state dict, got NoneType"):
        GradScaler("cpu").load_state_dict(None)


def test_a_state_dict_of_tensors():
    scaler = GradScaler("cpu")
    saved = {**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 3}
    scaler.load_state_dict({key: torch.tensor(value) for key, value in saved.items()})
    assert scaler.state_dict() == saved


def test_state_dicts_are_exchanged_with_torch():
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=4.0), GradScaler("cpu")
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    loop = Loop(scaler=ours)
    loop.run()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_a_count_of_overflows_is_saved_where_it_matters():
    loop = Loop(hysteresis=3)
    loop.run(poison=torch.inf)
    saved = loop.scaler.state_dict()
    assert saved["_overflows"] == 1
    resumed = Loop(hysteresis=3)
    resumed.scaler.load_state_dict(saved)
    for each in (loop, resumed):
        each.run(poison=torch.inf)
        assert each.scaler.get_scale() == 8.0
        each.run(poison=torch.inf)
        assert each.scaler.get_scale() == 4.0
    torch.amp.GradScaler("cpu").load_state_dict(saved)


def test_bad_state_dicts():
    scaler = GradScaler("cpu")
    with pytest.raises(ScalerStateError, match="The source state dict is empty"):
        scaler.load_state_dict({})
    saved = scaler.state_dict()
    with pytest.raises(KeyError):
        scaler.load_state_dict({"scale": 4.0})
    for scale in (0.0, float("nan"), float("inf"), -2.0):
        with pytest.raises(ScaleError, match=r"load_state_dict\(\) needs a scale"):
            scaler.load_state_dict({**saved, "scale": scale, "growth_interval": 7})
    assert scaler.state_dict() == saved


def test_a_resumed_scaler_may_step_first():
    saved = {**GradScaler("cpu").state_dict(), "scale": 4.0}
    loop = Loop()
    loop.scaler.load_state_dict(saved)
    loop.parameter.grad = torch.full((2,), 4.0)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.parameter.tolist() == [0.875, 0.875]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
)
def test_copies_keep_every_setting(copied, started):
    settings = {
        "init_scale": 32.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 3,
        "min_scale": 2.0,
        "max_scale": 128.0,
        "hysteresis": 2,
        "max_consecutive_skips": 5,
    }
    loop = Loop(**settings)
    if started:
        loop.run()
        loop.run(poison=torch.inf)
    again = copied(loop.scaler)
    assert again._cell.rule == loop.scaler._cell.rule
    assert again.state_dict() == loop.scaler.state_dict()
    assert again.history.skipped == loop.scaler.history.skipped
    assert repr(again.last_step) == repr(loop.scaler.last_step)
    one, other = Loop(scaler=again), loop
    for each in (one, other):
        for poison in (torch.inf, None, None, None):
            each.run(poison=poison)
    assert one.scaler.state_dict() == other.scaler.state_dict()


def test_a_copy_of_a_disabled_scaler_is_disabled():
    assert not pickle.loads(pickle.dumps(GradScaler(enabled=False))).is_enabled()


def test_pickling_in_the_middle_of_an_iteration():
    loop = Loop()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(NoCheckError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(loop.scaler)


def test_a_run_stopped_and_resumed_is_the_same_run():
    def fresh():
        torch.manual_seed(0)
        return Loop(torch.optim.Adam, growth_interval=2)

    straight, first, second = fresh(), fresh(), fresh()
    poisons = [None, None, torch.inf, None, None, None]
    for poison in poisons:
        straight.run(poison=poison)
    for poison in poisons[:3]:
        first.run(poison=poison)
    second.parameter.data.copy_(first.parameter.data)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scaler.load_state_dict(first.scaler.state_dict())
    for poison in poisons[3:]:
        second.run(poison=poison)
    assert torch.equal(second.parameter, straight.parameter)
    assert second.scaler.state_dict() == straight.scaler.state_dict()


# Policies and events


def test_a_policy_of_the_process_wins():
    with override_policy("scale=static(4.0)"):
        loop = Loop(init_scale=1024.0)
    loop.run(poison=torch.inf)
    loop.run()
    assert loop.scaler.get_scale() == 4.0
    with override_policy("float32"):
        assert not GradScaler("cpu").is_enabled()
    with override_policy("mixed_float16"):
        assert GradScaler("cpu", enabled=False).is_enabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_events(enabled):
    loop, heard = Loop(enabled=enabled), []
    unsubscribe = subscribe(lambda event, values: heard.append((event, values)))
    loop.run()
    unsubscribe()
    loop.run()
    assert [event for event, _ in heard] == ["loss", "step", "update"]
    assert float(heard[0][1]["value"]) == 2.0
    assert heard[1][1]["record"].skipped is False
    assert float(heard[2][1]["scale"]) == (8.0 if enabled else 1.0)


# What other libraries do with a scaler


def test_private_names_of_torch():
    loop = Loop()
    scaler = loop.scaler
    assert (scaler._scale, scaler._growth_tracker, scaler._init_growth_tracker) == (None, None, 0)
    assert (scaler._enabled, scaler._device, scaler._init_scale) == (True, "cpu", 8.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    with pytest.raises(NoCheckError, match="_growth_tracker initialized before _scale"):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._get_scale_async() is scaler._scale
    loop.backward()
    assert scaler._check_scale_growth_tracker("x") == (scaler._scale, scaler._growth_tracker)
    found = scaler._check_inf_per_device(loop.optimizer)
    assert found == scaler._found_inf_per_device(loop.optimizer) == {torch.device("cpu"): 0.0}
    state = scaler._per_optimizer_states[id(loop.optimizer)]
    assert state["stage"].name == "READY"
    scaler.step(loop.optimizer)
    assert state["stage"].name == "STEPPED"
    scaler._scale.fill_(2.0)
    assert scaler.get_scale() == 2.0
    scaler._growth_factor = 3.0
    assert scaler.get_growth_factor() == 3.0


def test_a_replaced_unscale_function_is_used():
    loop, asked = Loop(), []
    original = loop.scaler._unscale_grads_

    def replacement(optimizer, inverse, found, allow_fp16):
        asked.append(allow_fp16)
        return original(optimizer, inverse, found, True)

    loop.scaler._unscale_grads_ = replacement
    loop.run()
    assert asked == [False]
    assert loop.parameter.tolist() == [0.75, 0.75]


def test_a_subclass_may_override_unscale():
    class Sharded(GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    loop = Loop(scaler=Sharded("cpu", init_scale=8.0))
    loop.run()
    assert loop.scaler.last_step.skipped
    assert loop.scaler.get_scale() == 4.0


def test_the_fused_protocol():
    seen = {}

    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            seen.update(grad_scale=self.grad_scale, found_inf=self.found_inf)
            return "result"

    loop = Loop(Fused)
    assert loop.run() == "result"
    assert (seen["grad_scale"].item(), seen["found_inf"].item()) == (8.0, 0.0)
    assert not hasattr(loop.optimizer, "grad_scale")
    assert not hasattr(loop.optimizer, "found_inf")
    loop.optimizer.grad_scale = torch.tensor(2.0)
    loop.run()
    assert (seen["grad_scale"].item(), seen["found_inf"].item()) == (16.0, 0.0)
    seen.clear()
    assert loop.run(poison=torch.inf) is None
    assert (seen, loop.scaler.last_step.reason) == ({}, "gradients held inf")
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    assert seen["grad_scale"] is None


@pytest.mark.parametrize("unscale", [False, True])
def test_a_skipped_first_step_of_a_fused_optimizer_leaves_no_state(unscale):
    loop = Loop(lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.5, fused=True))
    loop.backward(poison=torch.inf)
    if unscale:
        loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.optimizer.state_dict()["state"] == {}
    loop.run()
    assert loop.parameter.tolist() == [0.75, 0.75]


def test_which_fused_optimizers_lack_state():
    loop = Loop(lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.5, fused=True))
    assert not lacks_state(loop.optimizer)
    loop.backward()
    assert lacks_state(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    assert not lacks_state(loop.optimizer)
    plain = torch.optim.SGD([loop.parameter], fused=True)
    assert not lacks_state(plain)


def test_the_older_fused_protocol():
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            grad_scaler.unscale_(self)
            return "result"

    loop = Loop(Older)
    with pytest.warns(FutureWarning, match="grad_scaler, which PyTorch is going to stop passing"):
        assert loop.run() == "result"
    with pytest.warns(FutureWarning):
        loop.run(poison=torch.inf)
    assert loop.scaler.last_step.skipped


def test_a_fused_optimizer_at_a_scale_below_one():
    loop = Loop(lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True), init_scale=2.0**-10)
    loop.backward()
    loop.parameter.grad[0] = 1e37
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.skipped
    assert loop.parameter.isfinite().all()


class Wrapper:
    """An optimizer that can neither be referenced weakly nor hashed."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __eq__(self, other):
        return isinstance(other, Wrapper)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, *args):
        return self.inner.step(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_optimizer_that_cannot_be_referenced_or_hashed(dtype):
    loops = [Loop()]
    scaler = loops[0].scaler
    loops.append(Loop(scaler=scaler))
    wrappers = [Wrapper(loop.optimizer) for loop in loops]
    loops[1].parameter.data = loops[1].parameter.data.to(dtype)
    for poison in (torch.inf, None):
        for loop, wrapper in zip(loops, wrappers, strict=True):
            loop.optimizer.zero_grad()
            loop.backward(poison=poison)
            scaler.step(wrapper)
        scaler.update()
        assert scaler.history.consecutive_skips == (poison is not None)
    assert not scaler.last_step_of(wrappers[0]).skipped
    assert scaler.last_step_of(wrappers[0]) is not scaler.last_step_of(wrappers[1])
    assert [loop.parameter.tolist() for loop in loops] == [[0.75, 0.75]] * 2


def test_many_scalers_leave_nothing_with_an_optimizer():
    loop = Loop()
    gc.collect()
    before = len(weakref.finalize._registry)
    for _ in range(5):
        loop.scaler = GradScaler("cpu", init_scale=8.0)
        loop.run()
    gc.collect()
    assert len(weakref.finalize._registry) == before


def test_nothing_is_kept_alive():
    loop = Loop()
    loop.run()
    loop.run(poison=torch.inf)
    kept = [weakref.ref(loop.parameter), weakref.ref(loop.optimizer), weakref.ref(loop.scaler)]
    scaler = loop.scaler
    loop.optimizer.zero_grad()
    del loop
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, False]
    assert scaler.history.skipped == 1
