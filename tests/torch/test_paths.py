import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from halfstep import Policy, Rules
from halfstep.torch import UnmatchedRuleWarning, autocast, prepare
from halfstep.torch._tracing import parse_source


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.feed(self.attention(inputs))


def dtypes(model, rules):
    """Runs a model in a region and returns the output dtype of each linear layer by its path."""
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    with autocast("cpu", dtype=torch.bfloat16, rules=rules):
        model(torch.ones(1, 4))
    for hook in hooks:
        hook.remove()
    return {name for name, dtype in seen.items() if dtype is torch.float32}


@pytest.mark.parametrize(
    ("where", "full"),
    [
        ("1.*", {"1.attention", "1.feed"}),
        ("*.feed", {"0.feed", "1.feed"}),
        ("0.attention", {"0.attention"}),
    ],
)
def test_a_rule_can_be_limited_to_modules(where, full):
    model = nn.Sequential(Block(), Block())
    assert dtypes(model, f"halfstep-1 + matmul[where={where}]=full") == full


def test_a_rule_for_a_module_beats_one_for_all():
    model = nn.Sequential(Block(), Block())
    rules = "halfstep-1 + matmul=full + matmul[where=1.feed]=lower"
    assert dtypes(model, rules) == {"0.attention", "0.feed", "1.attention"}


def test_two_patterns_that_disagree_are_refused_where_they_meet():
    from halfstep.errors import RuleError

    rules = "halfstep-1 + matmul[where=0.*]=full + matmul[where=*.feed]=lower"
    with pytest.raises(RuleError, match="overlap"):
        dtypes(nn.Sequential(Block(), Block()), rules)


def test_a_region_inside_of_forward_has_its_own_root():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        @autocast("cpu", rules="halfstep-1 + matmul[where=feed]=full")
        def forward(self, inputs):
            return self.block(inputs)

    assert Inside()(torch.ones(1, 4)).dtype is torch.float32


def test_an_error_in_a_module_does_not_confuse_the_path():
    class Failing(nn.Module):
        def forward(self, inputs):
            raise KeyError

    model = nn.Sequential(Failing(), nn.Linear(4, 4))
    with autocast("cpu", dtype=torch.bfloat16, rules="halfstep-1 + matmul[where=1]=full"):
        with pytest.raises(KeyError):
            model(torch.ones(1, 4))
        assert model[1](torch.ones(1, 4)).dtype is torch.bfloat16


def test_wrappers_do_not_change_paths():
    rules = "halfstep-1 + matmul[where=*feed]=full"
    model = nn.Sequential(Block())
    for wrapped in (model, nn.DataParallel(model), AveragedModel(model)):
        with autocast("cpu", dtype=torch.bfloat16, rules=rules):
            assert wrapped(torch.ones(1, 4)).dtype is torch.float32


def test_a_module_of_ones_own_may_be_called_module():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs):
            return self.other(self.module(inputs))

    assert dtypes(Own(), "halfstep-1 + matmul[where=module]=full") == {"module"}


def test_a_pattern_that_matches_nothing_is_told_once():
    model = nn.Sequential(Block())
    region = autocast("cpu", rules="halfstep-1 + matmul[where=0.atention]=full")
    with pytest.warns(UnmatchedRuleWarning, match="such as '0.attention'"), region:
        model(torch.ones(1, 4))
    with region:
        model(torch.ones(1, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_has_its_path(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

        def forward(self, inputs):
            return checkpoint(self.head, self.body(inputs), use_reentrant=reentrant)

    model, seen = Checkpointed(), []
    model.head[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    region = autocast("cpu", dtype=torch.bfloat16, rules="halfstep-1 + matmul[where=head*]=full")
    with region, set_checkpoint_early_stop(False):
        outputs = model(torch.ones(1, 4, requires_grad=True))
    outputs.sum().backward()
    assert seen == [torch.float32] * 2


def test_hooks_are_there_only_while_paths_are_asked_for():
    with autocast("cpu"):
        assert not nn_module._global_forward_pre_hooks
    with autocast("cpu", rules="halfstep-1 + matmul[where=x]=full"):
        assert nn_module._global_forward_pre_hooks
    assert not nn_module._global_forward_pre_hooks
    assert not nn_module._global_forward_hooks


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']", ""),
        ("L['self'].head", "head"),
        ("L['self']._modules['blocks']._modules['0'].feed", "blocks.0.feed"),
        ("L['fn']._orig_mod.layers[3]", "layers.3"),
    ],
)
def test_how_a_graph_names_a_module(source, path):
    assert parse_source(source) == path


@pytest.mark.parametrize(("where", "wide"), [("0.feed", [False, True, False]), ("1", [0, 0, 1])])
def test_paths_in_a_prepared_model_are_its_own(where, wide):
    model, seen = nn.Sequential(Block(), nn.Linear(4, 4)), []
    rules = Rules().with_rule("matmul", "full", reason="-", where=where)
    prepare(model, policy=Policy.named("mixed_bfloat16").with_(rules=rules))
    for layer in (model[0].attention, model[0].feed, model[1]):
        layer.bias = None
        plain = layer.forward
        layer.forward = lambda x, plain=plain: seen.append(plain(x)) or seen[-1]
    model(torch.ones(1, 4))
    assert [each.dtype is torch.float32 for each in seen] == wide
