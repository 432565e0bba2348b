import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import prepare
from halfstep.torch._regions._strays import refuse_half, refuse_strays, strays


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
        refuse_strays([inside * leaf(3)], [inside])
    assert str(error.value) == (
        "A region needs every tensor with a gradient that its forward reads to be a parameter or "
        "attribute of the model, or an argument, got a tensor of shape (3,) that is neither. Its "
        "gradient would be scaled. Register it with register_parameter(), or pass it as an "
        "argument."
    )
    with pytest.raises(UsageError, match="got the result of ExpBackward0 from outside"):
        refuse_strays([inside + older], [inside])


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


@pytest.mark.parametrize("policy", ["mixed_float16", "compute_dtype=float32"])
def test_a_model_that_reads_a_global_is_refused(policy):
    stray = nn.Parameter(torch.ones(2))
    model = Net(lambda: stray * 2)
    prepare(model, policy=policy)
    with pytest.raises(UsageError, match=r"got a tensor of shape \(2,\)"):
        model(torch.ones(1, 2))


def test_a_stray_that_comes_later_is_found_before_long():
    stray = nn.Parameter(torch.ones(2))
    calls = []
    model = Net(lambda: stray if len(calls) > 4 else 0.0)
    prepare(model, policy="mixed_float16")
    with pytest.raises(UsageError, match="got a tensor"):  # noqa: PT012
        for _ in range(16):
            calls.append(1)
            model(torch.ones(1, 2))
    assert len(calls) == 8


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
