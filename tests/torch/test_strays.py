import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import prepare
from halfstep.torch._regions._strays import Leaves, refuse_half, refuse_strays, strays


def leaf(*shape):
    return torch.ones(*shape, requires_grad=True)


def test_what_came_in_is_no_stray():
    outside = leaf(2) * 3
    inside = outside * 1
    assert strays([inside.exp() + inside], [inside]) == []
    assert strays([torch.ones(1)], []) == []


def test_a_leaf_is_one():
    stray, inside = leaf(3), leaf(1) * 1
    assert strays([inside * stray], [inside]) == [stray]
    assert strays([stray], [inside])[0] is stray


def test_the_result_of_an_older_graph_is_one():
    older = leaf(1).exp()
    inside = leaf(1) * 1
    (found,) = strays([inside * older], [inside])
    assert found is older.grad_fn


def test_a_long_graph_is_followed_without_recursion():
    inside = leaf(1) * 1
    out = inside
    for _ in range(3000):
        out = out + 1
    assert strays([out], [inside]) == []


def test_the_error_names_what_it_is():
    older = leaf(1).exp()
    inside = leaf(1) * 1
    with pytest.raises(UsageError) as error:
        refuse_strays(strays([inside * leaf(3)], [inside]))
    assert str(error.value) == (
        "A region needs every tensor with a gradient that its forward reads to be a parameter or "
        "attribute of the model, or an argument, got a tensor of shape (3,) that is neither. Its "
        "gradient would be scaled. Register it with register_parameter(), or pass it as an "
        "argument."
    )
    with pytest.raises(UsageError, match="got the result of ExpBackward0 from outside"):
        refuse_strays(strays([inside + older], [inside]))
    refuse_strays([])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_refused_if_they_are_trained(dtype):
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).to(dtype))
    text = rf"needs trained parameters in float32, got {str(dtype)[6:]} for 1\.weight"
    with pytest.raises(UsageError, match=text):
        refuse_half(module)
    module[1].requires_grad_(False)
    refuse_half(module)


class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.read = read

    def forward(self, values):
        return self.inner(values) + self.read()


def test_a_leaf_that_comes_again_is_somebody_elses():
    leaves, stray = Leaves(), leaf(1)
    assert leaves.again([stray]) == []
    assert leaves.again([]) == []
    assert leaves.again([leaf(1), stray]) == [stray]


def test_leaves_that_are_new_each_time_are_own():
    leaves = Leaves()
    for calls in range(1, 4):
        assert leaves.again([leaf(1), leaf(1)]) == []
        assert leaves.are_own is (calls == 3)


def test_what_is_no_leaf_is_let_pass_never():
    node = leaf(1).exp().grad_fn
    assert Leaves().again([node, leaf(1)]) == [node]


SCALED = ["mixed_float16", "compute_dtype=float32"]


@pytest.mark.parametrize("policy", SCALED)
def test_a_model_that_reads_a_global_is_refused_the_second_time(policy):
    stray = nn.Parameter(torch.ones(2))
    model = Net(lambda: stray * 2)
    prepare(model, policy=policy)
    model(torch.ones(1, 2)).sum().backward()
    assert stray.grad.tolist() == [2.0, 2.0]
    with pytest.raises(UsageError, match=r"got a tensor of shape \(2,\)"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("policy", SCALED)
def test_a_model_that_reads_a_result_from_outside_is_refused_at_once(policy):
    stray = nn.Parameter(torch.ones(2)).exp()
    model = Net(lambda: stray)
    prepare(model, policy=policy)
    with pytest.raises(UsageError, match="got the result of ExpBackward0"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("first", [3, 5])
def test_a_stray_that_comes_later_is_refused_at_the_call_after(first):
    stray = nn.Parameter(torch.ones(2))
    calls = []
    model = Net(lambda: stray if len(calls) >= first else 0.0)
    prepare(model, policy="mixed_float16")
    with pytest.raises(UsageError, match="got a tensor"):  # noqa: PT012
        for _ in range(16):
            calls.append(1)
            model(torch.ones(1, 2))
    assert len(calls) == first + 1


def test_leaves_that_the_forward_makes_are_accepted_and_then_scaled():
    made, factors = [], []

    def read():
        made.append(torch.ones(2, requires_grad=True))
        return made[-1] * 2

    model = Net(read)
    region = prepare(model, policy="compute_dtype=float32,scale=static(1024.0)")
    for _ in range(5):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.inner.bias.grad.tolist() == [1.0, 1.0]
        factors.append((made[-1].grad / 2).tolist())
    assert factors[:2] == [[1.0, 1.0]] * 2
    # Two gradients of 1.0 enter, whose sum is brought below 1024.
    assert factors[2:] == [[256.0, 256.0]] * 3
    assert region.scale == 1024.0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_without_a_scale_a_stray_does_no_harm(policy):
    stray = nn.Parameter(torch.ones(2))
    model = Net(lambda: stray * 2)
    prepare(model, policy=policy)
    model(torch.ones(1, 2)).sum().backward()
    assert stray.grad.tolist() == [2.0, 2.0]


def test_without_gradients_nothing_is_looked_for():
    stray = nn.Parameter(torch.ones(2))
    model = Net(lambda: stray * 2)
    prepare(model)
    with torch.no_grad():
        assert model(torch.ones(1, 2)).dtype is torch.float32
