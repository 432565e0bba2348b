import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from halfstep import Policy, Rules
from halfstep.core import override_policy
from halfstep.errors import PolicyError, RuleError, UsageError
from halfstep.torch import _devices, autocast

LOW = [torch.float16, torch.bfloat16]


def state():
    """Everything that a region changes in its thread."""
    devices = torch._C._autocast_supported_devices()
    return (
        [torch.is_autocast_enabled(device) for device in devices],
        [torch.get_autocast_dtype(device) for device in devices],
        torch.is_autocast_cache_enabled(),
        torch._functorch.config.backward_pass_autocast,
        torch._C._dispatch_tls_is_dispatch_key_included("AutocastPrivateUse1"),
    )


def product():
    return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("dtype", LOW)
def test_a_product_runs_low_and_its_gradient_is_full(dtype):
    layer = nn.Linear(4, 2)
    with autocast("cpu", dtype=dtype):
        outputs = layer(torch.ones(3, 4))
    assert outputs.dtype is dtype
    outputs.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("region", "device", "dtype", "enabled"),
    [
        (lambda: autocast(), "cpu", torch.bfloat16, True),
        (lambda: autocast("cpu"), "cpu", torch.bfloat16, True),
        (lambda: autocast(device_type="cpu", dtype=torch.float16), "cpu", torch.float16, True),
        (lambda: autocast("cpu", torch.float16, False), "cpu", torch.float16, False),
        (lambda: autocast(enabled=False), "cpu", torch.bfloat16, False),
        (lambda: autocast(True), "cpu", torch.bfloat16, True),
        (lambda: autocast(False, torch.float16), "cpu", torch.float16, False),
        (lambda: autocast(True, torch.float16, True), "cpu", torch.float16, True),
        (lambda: autocast("cpu", policy="mixed_float16"), "cpu", torch.float16, True),
        (lambda: autocast("cpu", policy="float32"), "cpu", torch.float32, False),
        (lambda: autocast("cpu", torch.float32), "cpu", torch.float32, False),
    ],
)
def test_every_call_form(region, device, dtype, enabled):
    made = region()
    assert (made.device, made.fast_dtype, made.enabled) == (device, dtype, enabled)
    with made as entered:
        assert entered is made
        assert torch.is_autocast_enabled("cpu") is enabled
        assert product().dtype is (dtype if enabled else torch.float32)


def test_what_it_says_of_itself():
    text = repr(autocast("cpu", dtype=torch.float16, rules="halfstep-1 + softmax=full"))
    assert text == (
        "autocast('cpu', dtype=torch.float16, enabled=True, rules='halfstep-1 + softmax=full')"
    )


def test_a_decorator_keeps_the_name_and_restores():
    @autocast("cpu")
    def forward():
        """Multiplies."""
        return product()

    assert (forward.__name__, forward.__doc__) == ("forward", "Multiplies.")
    assert forward().dtype is torch.bfloat16
    assert product().dtype is torch.float32


def test_a_recursive_decorated_function_leaves_autocast_off():
    @autocast("cpu")
    def deep(levels):
        return deep(levels - 1) if levels else product()

    assert deep(3).dtype is torch.bfloat16
    assert product().dtype is torch.float32


def test_an_instance_can_be_entered_while_it_is_entered():
    region = autocast("cpu")
    with region:
        with region:
            assert product().dtype is torch.bfloat16
        assert product().dtype is torch.bfloat16
    assert product().dtype is torch.float32


def test_regions_nest_with_islands_between():
    with autocast("cpu", dtype=torch.float16):
        with autocast("cpu", enabled=False):
            assert product().dtype is torch.float32
            with autocast("cpu", dtype=torch.bfloat16):
                assert product().dtype is torch.bfloat16
        assert product().dtype is torch.float16


def test_a_region_without_rules_of_its_own_follows_the_one_around():
    half = torch.ones(2).half()
    with autocast("cpu", dtype=torch.float16, rules="halfstep-1 + softmax=full"):
        with autocast("cpu", dtype=torch.bfloat16):
            assert half.softmax(0).dtype is torch.float32
        with autocast("cpu", enabled=False), autocast("cpu", dtype=torch.float16):
            assert half.softmax(0).dtype is torch.float32
        with autocast("cpu", rules="halfstep-1"):
            assert half.softmax(0).dtype is torch.float16
    with autocast("cpu"):
        assert half.softmax(0).dtype is torch.float16


def test_rules_can_be_set_for_regions_to_come():
    half = torch.ones(2).half()
    with autocast("cpu", enabled=False, rules="halfstep-1 + softmax=full"):
        assert half.softmax(0).dtype is torch.float16
        with autocast("cpu"):
            assert half.softmax(0).dtype is torch.float32


def test_an_error_inside_restores_everything():
    with pytest.raises(KeyError), autocast("cpu"):
        raise KeyError


@pytest.fixture
def every_device(monkeypatch):
    """Lets regions be made for devices that this machine does not have."""
    monkeypatch.setattr(_devices, "is_there", lambda device_type: True)


@pytest.mark.usefixtures("every_device")
def test_a_region_for_another_device_leaves_these_tensors_alone():
    with autocast("mps"):
        assert product().dtype is torch.float32
        assert torch.ones(2).half().softmax(0).dtype is torch.float16


@pytest.mark.usefixtures("every_device")
def test_two_devices_at_once():
    with autocast("mps", dtype=torch.float16), autocast("cpu", dtype=torch.bfloat16):
        assert product().dtype is torch.bfloat16
    with autocast("cpu", dtype=torch.bfloat16), autocast("mps", dtype=torch.float16):
        assert product().dtype is torch.bfloat16
        assert torch.ones(2).half().exp().dtype is torch.float32


def test_pytorchs_own_autocast_inside_changes_dtype_and_switches_off():
    with autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.float16):
            assert product().dtype is torch.float16
            assert torch.ones(2).half().exp().dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert product().dtype is torch.float32
            assert torch.ones(2).half().exp().dtype is torch.float16


def test_pytorchs_own_autocast_elsewhere_never_notices():
    half = torch.ones(2).half()

    def native():
        with torch.autocast("cpu", dtype=torch.float16):
            return half.exp().dtype, half.softmax(0).dtype, product().dtype

    expected = (torch.float16, torch.float16, torch.float16)
    assert native() == expected
    with autocast("cpu", rules="torch-2.13"):
        assert half.exp().dtype is torch.float32
    assert native() == expected
    with torch.autocast("cpu", dtype=torch.float16):
        with autocast("cpu", rules="torch-2.13"):
            pass
        assert half.exp().dtype is torch.float16


def test_another_thread_never_notices():
    half, inside, seen = torch.ones(2).half(), threading.Event(), []

    def other():
        inside.wait()
        seen.append(half.exp().dtype)
        seen.append(product().dtype)
        with torch.autocast("cpu", dtype=torch.float16):
            seen.append(half.exp().dtype)
        with autocast("cpu", dtype=torch.float16, rules="halfstep-1 + exponential=keep"):
            seen.append(half.exp().dtype)

    thread = threading.Thread(target=other)
    thread.start()
    with autocast("cpu", dtype=torch.bfloat16):
        inside.set()
        thread.join()
        assert half.exp().dtype is torch.float32
    assert seen == [torch.float16, torch.float32, torch.float16, torch.float16]


def test_the_policy_of_a_comparison_wins():
    with override_policy("float32"), autocast("cpu", dtype=torch.float16):
        assert product().dtype is torch.float32
    with override_policy("mixed_float16"), autocast("cpu", dtype=torch.bfloat16):
        assert product().dtype is torch.float16
        with autocast("cpu", enabled=False):
            assert product().dtype is torch.float32


def test_rules_may_be_text_or_values():
    assert autocast("cpu", rules=Rules("torch-2.13")).rules == Rules("torch-2.13")
    assert autocast("cpu", policy=Policy(rules=Rules("none"))).rules == Rules("none")


def test_a_region_can_be_copied_and_pickled():
    region = autocast("cpu", dtype=torch.float16)
    for twin in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with twin:
            assert product().dtype is torch.float16


TWICE = "either policy= or dtype= and rules="
BAD = [
    ((torch.device("cpu"),), {}, UsageError, "a device type such as 'cuda' or 'cpu', got device"),
    (("gpu",), {}, UsageError, "can autocast, got 'gpu'. Write one of cpu, cuda"),
    (("cuda",), {}, UsageError, r"autocast\(.cuda.\) needs such a device"),
    (("cpu", torch.float64), {}, PolicyError, "torch.bfloat16, torch.float16, got torch.float64"),
    (("cpu", "float16"), {}, PolicyError, "got 'float16'. Write torch.float16"),
    (("mps",), {}, UsageError, "Write autocast"),
    (("cpu",), {"rules": "none + matmul[device=gpu]=full"}, RuleError, "got 'gpu'"),
    (("cpu",), {"rules": "halfstep-2"}, RuleError, "halfstep-1"),
    (("cpu",), {"rules": 3}, RuleError, "3"),
    (("cpu",), {"rules": "none + aten::sofmax=full"}, RuleError, "Did you mean aten::softmax"),
    (("cpu",), {"rules": "none + aten::exp.str=full"}, RuleError, "an overload that PyTorch"),
    (("cpu",), {"policy": "half"}, PolicyError, "mixed_float16"),
    (("cpu",), {"policy": "compute_dtype=float64"}, PolicyError, "float64"),
    (("cpu",), {"policy": "mixed_float16", "dtype": torch.float16}, UsageError, TWICE),
    (("cpu",), {"policy": "mixed_float16", "rules": "none"}, UsageError, TWICE),
]


@pytest.mark.parametrize(("arguments", "keywords", "error", "text"), BAD)
def test_a_bad_argument_is_refused_at_once(arguments, keywords, error, text):
    if arguments == ("cuda",) and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(error, match=text):
        autocast(*arguments, **keywords)


def test_decorating_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="around the part that computes"):
        autocast("cpu")(3)


def test_decorating_what_runs_later_is_refused():
    def generator():
        yield product()

    async def coroutine():
        return product()

    for function in (generator, coroutine):
        with pytest.raises(UsageError, match="a function that runs in one go"):
            autocast("cpu")(function)


def test_leaving_what_was_not_entered_is_refused():
    with pytest.raises(UsageError, match="left more often than it was entered"):
        autocast("cpu").__exit__(None, None, None)


def test_rules_limited_to_a_dtype_follow_pytorchs_autocast_inside():
    half = torch.ones(2).half()
    rules = "halfstep-1 + softmax[dtype=float16]=full"
    with autocast("cpu", dtype=torch.bfloat16, rules=rules):
        assert half.softmax(0).dtype is torch.float16
        with torch.autocast("cpu", dtype=torch.float16):
            assert half.softmax(0).dtype is torch.float32


def test_a_decorator_without_parentheses_says_so():
    with pytest.raises(UsageError, match=r"Write @autocast\(\)"):

        @autocast
        def function():
            pass
