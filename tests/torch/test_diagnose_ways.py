"""How a remedy is written, depending on how a model computes in low precision."""

import inspect
import json
from importlib import import_module

import pytest
import torch
from torch import nn

from halfstep import Policy, Rules
from halfstep.core import _pasting
from halfstep.torch import autocast, diagnose, prepare, set_global_policy
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import inside, mean

RULE = '"matmul", "full", reason="Its numbers leave float16."'


def remedy(model, loss_fn=mean, **how):
    return diagnose(model, torch.ones(2, 8), loss_fn, **how).first.remedy.splitlines()


def pasted(*names):
    """Returns the lines that import names of halfstep, and of halfstep.torch."""
    return [f"from halfstep import {names[0]}", f"from halfstep.torch import {names[1]}"]


def test_a_part_that_is_a_region():
    model = nn.Sequential(nn.Identity(), faulty.Feed())
    prepare(model[1])
    assert remedy(model) == [
        *pasted("Policy, Rules", "prepare"),
        f'rules = Rules().with_rule({RULE}, where="sum")',
        'policy = Policy.named("mixed_float16").with_(rules=rules)',
        'region = prepare(model.get_submodule("1"), optimizer, policy=policy)',
    ]


def test_the_model_itself():
    model = faulty.Feed()
    model.forward = lambda x: nn.functional.linear(x * 0 + 100, model.sum.weight).tanh()
    assert remedy(model, policy="mixed_float16")[2] == f"rules = Rules().with_rule({RULE})"


def test_a_policy_with_rules_and_a_scale_of_its_own():
    rules = Rules.parse("torch-2.13 + aten::exp=keep")
    policy = Policy.parse("mixed_float16, scale=static(8.0)").with_(rules=rules)
    text = json.dumps(str(rules))
    assert remedy(nn.Sequential(faulty.Feed()), policy=policy) == [
        *pasted("Policy, Rules", "prepare"),
        f'rules = Rules.parse({text}).with_rule({RULE}, where="0.sum")',
        'policy = Policy.parse("mixed_float16, scale=static(8.0)").with_(rules=rules)',
        "region = prepare(model, optimizer, policy=policy)",
    ]


def test_a_global_policy():
    set_global_policy("mixed_float16")
    try:
        *_, policy, last = remedy(nn.Sequential(faulty.Feed()))
    finally:
        set_global_policy("float32")
    assert policy == 'policy = Policy.named("mixed_float16").with_(rules=rules)'
    assert last == "set_global_policy(policy)"


@pytest.mark.parametrize(
    ("context", "place"),
    [
        (autocast, "  # in place of the one in"),
        (torch.autocast, "  # of halfstep.torch, in place of torch.autocast in"),
    ],
)
def test_an_autocast(context, place):
    line = inspect.getsourcelines(inside)[1] + 4
    assert remedy(nn.Sequential(faulty.Feed()), inside(context)) == [
        "import torch",
        *pasted("Rules", "autocast"),
        f'rules = Rules().with_rule({RULE}, where="0.sum")',
        f'lower = autocast("cpu", dtype=torch.float16, rules=rules){place} faulty_models.py:{line}',
    ]


def test_a_model_that_casts_by_hand():
    class Casts(faulty.Feed):
        def forward(self, x):
            return torch.tanh(nn.functional.linear(x.half(), self.sum.weight.half() * 1e4))

    assert remedy(nn.Sequential(Casts())) == []


def by_hand(model, batch):
    return mean(model, batch.half())


def test_parameters_in_half_precision():
    model, batch = nn.Sequential(faulty.Feed()).half(), torch.ones(2, 8)
    text = diagnose(model, batch, by_hand).first.remedy
    assert text.splitlines() == [
        "import torch",
        "from halfstep.torch import autocast",
        "model.float()  # in place of model.half()",
        'lower = autocast("cpu", dtype=torch.bfloat16)  # around the model and its loss',
    ]
    names = {"model": model}
    exec(text, names)

    def mended(model, batch):
        with names["lower"]:
            return by_hand(model, batch)

    assert not diagnose(model, batch, mended)
    mended(model, batch).backward()
    assert all(each.grad.isfinite().all() for each in model.parameters())


def test_what_remedies_import_is_there():
    for module, names in _pasting._FROM.items():
        assert not [name for name in names if not hasattr(import_module(module), name)]
