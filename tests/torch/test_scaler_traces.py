"""Random programs give exactly what `torch.amp.GradScaler` gives: scale, counter, weights, errors.

What is different on purpose stays out of the random programs and is listed in IMPROVEMENTS.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch.amp.grad_scaler import OptState

from halfstep.errors import NonFiniteError
from halfstep.torch._scaler import GradScaler

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


class World:
    """A few optimizers and one scaler."""

    def __init__(self, scaler_class, kinds, **scaler_settings):
        self.scaler_class = scaler_class
        self.scaler = scaler_class("cpu", **scaler_settings)
        generator = torch.Generator().manual_seed(0)
        self.groups = [
            [torch.nn.Parameter(torch.randn(3, generator=generator)) for _ in range(2)]
            for _ in kinds
        ]
        self.optimizers = [
            OPTIMIZERS[kind](group) for kind, group in zip(kinds, self.groups, strict=True)
        ]

    def backward(self, which, factor, poison):
        loss = sum((parameter * parameter).sum() * factor for parameter in self.groups[which])
        self.scaler.scale(loss).backward()
        if poison is not None:
            self.groups[which][1].grad[1] = poison

    def state(self):
        return self.scaler.state_dict()


def outcome(action):
    try:
        return action(), None
    except (AssertionError, RuntimeError) as error:
        return None, error


class Traces(RuleBasedStateMachine):
    @initialize(
        kinds=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=3),
        scale=st.sampled_from([1.0, 8.0, 1024.0, 65536.0]),
        interval=st.integers(1, 4),
    )
    def begin(self, kinds, scale, interval):
        options = {"init_scale": scale, "growth_interval": interval}
        self.kinds = kinds
        self.theirs = World(torch.amp.GradScaler, kinds, **options)
        self.ours = World(GradScaler, kinds, **options)

    def both(self, action):
        (result, theirs), (mine, ours) = (
            outcome(lambda: action(self.theirs)),
            outcome(lambda: action(self.ours)),
        )
        assert (theirs is None) == (ours is None), (theirs, ours)
        assert theirs is None or isinstance(ours, type(theirs)), (theirs, ours)
        assert self.theirs.state() == self.ours.state()
        for expected, got in zip(self.theirs.groups, self.ours.groups, strict=True):
            for one, other in zip(expected, got, strict=True):
                assert torch.equal(one, other)
        return result, mine

    def stage(self, which):
        states = self.theirs.scaler._per_optimizer_states
        key = id(self.theirs.optimizers[which])
        return states[key]["stage"] if key in states else OptState.READY

    def has_gradients(self, which):
        return self.theirs.groups[which][0].grad is not None

    @rule(
        which=st.integers(0, 2),
        factor=st.sampled_from([1.0, -0.5, 3.0]),
        poison=st.sampled_from([None, None, None, torch.inf, -torch.inf, torch.nan]),
    )
    def backward(self, which, factor, poison):
        which %= len(self.kinds)
        if self.stage(which) is not OptState.READY:
            poison = None
        self.both(lambda world: world.backward(which, factor, poison))

    @rule(which=st.integers(0, 2))
    def unscale(self, which):
        which %= len(self.kinds)
        if self.has_gradients(which):
            self.both(lambda world: world.scaler.unscale_(world.optimizers[which]))

    @rule(which=st.integers(0, 2))
    def clip(self, which):
        which %= len(self.kinds)
        if self.stage(which) is OptState.UNSCALED and self.has_gradients(which):
            self.both(
                lambda world: (
                    torch.nn.utils.clip_grad_norm_(world.groups[which], 0.5).item() and None
                )
            )

    @rule(which=st.integers(0, 2))
    def step(self, which):
        which %= len(self.kinds)
        if self.has_gradients(which):
            self.both(lambda world: world.scaler.step(world.optimizers[which]))

    @rule()
    def step_all_and_update(self):
        for which in range(len(self.kinds)):
            self.step(which)
        self.update()

    @rule()
    def update(self):
        def act(world):
            world.scaler.update()

        self.both(act)
        for world in (self.theirs, self.ours):
            for optimizer in world.optimizers:
                optimizer.zero_grad(set_to_none=False)

    @rule(scale=st.sampled_from([2.0, 4096.0]), as_tensor=st.booleans())
    def set_scale(self, scale, as_tensor):
        self.both(lambda world: world.scaler.update(torch.tensor(scale) if as_tensor else scale))

    @rule(swap=st.booleans())
    def reload(self, swap):
        saved = [copy.deepcopy(world.state()) for world in (self.theirs, self.ours)]
        for world, state in zip((self.theirs, self.ours), reversed(saved), strict=True):
            if swap:
                world.scaler = world.scaler_class("cpu")
            world.scaler.load_state_dict(state)
        if swap:
            for world in (self.theirs, self.ours):
                world.scaler.scale(torch.ones(()))
        self.both(lambda world: None)

    @rule()
    def pickled(self):
        def act(world):
            world.scaler = pickle.loads(pickle.dumps(world.scaler))
            world.scaler.scale(torch.ones(()))

        self.both(act)


TestTraces = Traces.TestCase
TestTraces.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def one_parameter(scaler_class, **options):
    parameter = torch.nn.Parameter(torch.ones(2))
    return parameter, torch.optim.SGD([parameter], lr=0.5), scaler_class("cpu", **options)


def no_gradients(scaler_class):
    _, optimizer, scaler = one_parameter(scaler_class)
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    return "works"


def scale_after_bad_loss(scaler_class):
    parameter, optimizer, scaler = one_parameter(scaler_class)
    scaler.scale((parameter * torch.nan).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def weights_after_150_overflows(scaler_class):
    parameter, optimizer, scaler = one_parameter(scaler_class)
    for step in range(170):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        if step < 169:
            parameter.grad[0] = torch.inf
        scaler.step(optimizer)
        try:
            scaler.update()
        except NonFiniteError:
            continue
    return parameter.isfinite().all().item() and scaler.get_scale() > 0


def late_nan(scaler_class):
    parameter, optimizer, scaler = one_parameter(scaler_class)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    parameter.grad[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    return parameter.isfinite().all().item(), scaler.get_scale()


def integer_scale(scaler_class):
    _, _, scaler = one_parameter(scaler_class)
    scaler.scale(torch.ones(()))
    scaler.update(4)
    return scaler.get_scale()


def negative_scale(scaler_class):
    return scaler_class("cpu", init_scale=-1.0).get_scale()


def half_losses(scaler_class):
    return scaler_class("cpu").scale(torch.ones(2, dtype=torch.float16)).isfinite().all().item()


def half_gradients(scaler_class):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), scaler_class("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    return parameter.tolist()


def closure_by_position(scaler_class):
    parameter, optimizer, scaler = one_parameter(scaler_class)

    def closure():
        optimizer.zero_grad()
        loss = parameter.sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.step(optimizer, closure)
    return parameter.tolist()


def complex_gradients(scaler_class):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), scaler_class("cpu", init_scale=8.0)
    scaler.scale((parameter * parameter.conj()).real.sum()).backward()
    scaler.step(optimizer)
    return parameter.tolist()


# What a program does, what PyTorch makes of it (a result, or the type of its error), and we.
IMPROVEMENTS = [
    (no_gradients, AssertionError, "works"),
    (scale_after_bad_loss, 32768.0, 65536.0),
    (weights_after_150_overflows, False, True),
    (late_nan, (False, 65536.0), (True, 65536.0)),
    (integer_scale, AttributeError, 4.0),
    (negative_scale, -1.0, ValueError),
    (half_losses, False, True),
    (half_gradients, ValueError, [0.5, 0.5]),
    (closure_by_position, [-32767.0, -32767.0], [0.5, 0.5]),
    (complex_gradients, RuntimeError, [0j, 0j]),
]


@pytest.mark.parametrize("side", ["theirs", "ours"])
@pytest.mark.parametrize(
    ("program", "theirs", "ours"), IMPROVEMENTS, ids=[row[0].__name__ for row in IMPROVEMENTS]
)
@pytest.mark.filterwarnings("ignore::halfstep.core.SkippedStepsWarning")
def test_improvements(program, theirs, ours, side):
    expected = {"theirs": theirs, "ours": ours}[side]
    scaler_class = {"theirs": torch.amp.GradScaler, "ours": GradScaler}[side]
    if isinstance(expected, type):
        with pytest.raises(expected):
            program(scaler_class)
    else:
        assert program(scaler_class) == expected
