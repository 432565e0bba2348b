import gc
import weakref

import pytest
import torch
from torch import nn

from halfstep.torch import float32_state_dict, keep_masters, prepare
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._gradients import (
    ParameterNames,
    by_kind,
    check,
    culprits,
    fingerprint,
    gradients_of,
    multiply_and_check_by_parts,
    unscale,
)

CPU = torch.device("cpu")


def unscaled(gradients, inverse=0.5, again=False):
    kinds = by_kind(gradients)
    found = unscale(kinds, torch.tensor(inverse), torch.zeros(()), again=again)
    return found[CPU].item()


def trained(parameter, loss, scale=8.0):
    optimizer = torch.optim.SGD([("weight", parameter)], lr=1.0)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(loss(parameter)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_dtypes(dtype):
    good, bad = torch.full((3,), 4.0, dtype=dtype), torch.ones(3, dtype=dtype)
    assert unscaled([good]) == 0.0
    assert torch.equal(good, torch.full((3,), 2.0, dtype=dtype))
    for value in (torch.inf, torch.nan):
        bad[1] = value
        assert unscaled([good, bad]) == 1.0


def test_the_imaginary_part_is_checked():
    bad = torch.ones(2, dtype=torch.complex64)
    bad[0] = complex(1.0, torch.inf)
    assert unscaled([bad]) == 1.0


def test_conjugate_views_are_unscaled_in_place():
    gradient = torch.tensor([4 + 4j]).conj()
    assert gradient.is_conj()
    assert unscaled([gradient]) == 0.0
    assert gradient.tolist() == [2 - 2j]


def test_a_complex_parameter_trains():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    record = trained(parameter, lambda p: (p * p.conj()).real.sum() / 4)
    assert not record.skipped
    assert parameter.tolist() == [0.5 + 0j, 0.5 + 0j]


def test_kinds_are_kept_apart_and_empty_gradients_are_fine():
    gradients = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(0), torch.ones(())]
    assert unscaled(gradients) == 0.0
    assert [gradient.sum().item() for gradient in gradients] == [1.0, 1.0, 0.0, 0.5]


def test_a_product_that_overflows_is_found():
    for dtype in (torch.float32, torch.bfloat16):
        assert unscaled([torch.tensor([1e38], dtype=dtype)], inverse=16.0, again=True) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [4.0, torch.inf, -torch.inf, torch.nan])
def test_the_fallback_agrees_with_the_kernel(dtype, value):
    results = []
    for function in (
        multiply_and_check_by_parts,
        torch._amp_foreach_non_finite_check_and_unscale_,
    ):
        gradients = [torch.tensor([1.0, value], dtype=dtype), torch.ones(0, dtype=dtype)]
        found = torch.zeros(())
        function(gradients, found, torch.tensor(0.3))
        results.append((found.item(), str(gradients)))
    assert results[0] == results[1]


def test_nothing_needs_float64(monkeypatch):
    def refuse(*args, **kwargs):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    assert not trained(nn.Parameter(torch.ones(2)), torch.sum).skipped


def embedding(dtype=torch.float32):
    layer = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    nn.init.ones_(layer.weight)
    return layer


def sparse_step(layer, indices, factor, scale):
    optimizer = torch.optim.SGD([("weight", layer.weight)], lr=1.0)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale((layer(torch.tensor(indices)).float() * factor).sum()).backward()
    scaler.step(optimizer)
    return scaler.last_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_duplicate_rows_of_a_sparse_gradient_are_added_up(dtype):
    layer = embedding(dtype)
    # Each scaled half gradient is 32768; two of them added up in half precision would be inf.
    record = sparse_step(layer, [1, 1, 2], factor=0.5, scale=65536.0)
    assert not record.skipped
    assert layer.weight[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0]


def test_a_sum_of_duplicate_rows_that_overflows_is_found():
    layer = embedding()
    record = sparse_step(layer, [1, 1], factor=2e38, scale=1.0)
    assert record.nonfinite == (("weight", "inf"),)
    assert layer.weight.sum().item() == 8.0


def test_checking_changes_nothing():
    gradient = torch.tensor([2.0, torch.inf])
    assert check([gradient], CPU)[CPU].item() == 1.0
    assert gradient.tolist() == [2.0, torch.inf]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_can_be_unscaled():
    parameter = nn.Parameter(torch.ones(1))
    (parameter**3 * 8).sum().backward(create_graph=True)
    assert unscaled([parameter.grad]) == 0.0
    parameter.grad = None


def test_a_fingerprint_notices_writes_and_replacements():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    parameter.grad = torch.ones(1)
    before = fingerprint(gradients_of(optimizer))
    assert fingerprint(gradients_of(optimizer)) == before
    parameter.grad.mul_(1.0)
    assert fingerprint(gradients_of(optimizer)) != before
    kept, parameter.grad = parameter.grad, torch.ones(1)
    assert fingerprint(gradients_of(optimizer)) != before
    assert kept is not parameter.grad


def test_names_come_from_the_optimizer_the_caller_or_the_place():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 3, bias=False))
    named = torch.optim.SGD(model.named_parameters())
    unnamed = torch.optim.SGD([{"params": model[0].parameters()}, {"params": [model[1].weight]}])
    nowhere = [
        "param_groups[0]['params'][0] of shape (1, 2)",
        "param_groups[0]['params'][1] of shape (1,)",
        "param_groups[1]['params'][0] of shape (3, 2)",
    ]
    paths = ["0.weight", "0.bias", "1.weight"]

    def names(source, optimizer):
        return [name for name, _ in ParameterNames(source).of(optimizer)]

    assert names(None, named) == paths
    assert names(None, unnamed) == nowhere
    assert names(model, unnamed) == paths
    assert names(model.named_parameters(), unnamed) == paths
    assert names([("mine", model[0].bias)], unnamed) == [nowhere[0], "mine", nowhere[2]]


def test_names_keep_nothing_alive():
    model = nn.Linear(2, 2)
    names = [ParameterNames(model), ParameterNames(model.named_parameters())]
    gone = weakref.ref(model), weakref.ref(model.weight)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for each in names:
        assert next(each.of(other))[0].startswith("param_groups")


def test_culprits_tell_inf_from_nan():
    values = {
        "fine": [1.0, 2.0],
        "up": [1.0, torch.inf],
        "down": [1.0, -torch.inf],
        "nan": [torch.nan, 1.0],
        "both": [torch.nan, torch.inf],
    }
    parameters = {name: nn.Parameter(torch.ones(2)) for name in [*values, "idle"]}
    for name, value in values.items():
        parameters[name].grad = torch.tensor(value)
    optimizer = torch.optim.SGD(parameters.items())
    assert culprits(optimizer, ParameterNames(None)) == (
        ("up", "inf"),
        ("down", "inf"),
        ("nan", "nan"),
        ("both", "inf and nan"),
    )


def expanded(value=1.0, dtype=torch.float32):
    return torch.tensor([[value], [2.0]], dtype=dtype).expand(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_expanded_gradients_are_checked(dtype):
    plain = torch.ones(2)
    assert check([plain, expanded(dtype=dtype)], CPU)[CPU].item() == 0.0
    for value in (torch.inf, torch.nan):
        assert check([plain, expanded(value, dtype)], CPU)[CPU].item() == 1.0
    plain[0] = torch.inf
    assert check([plain, expanded(dtype=dtype)], CPU)[CPU].item() == 1.0


@pytest.mark.parametrize(("value", "found"), [(1.0, 0.0), (2e38, 1.0)])
def test_expanded_values_of_sparse_gradients_are_checked(value, found):
    places = torch.tensor([[1, 1]])
    gradient = torch.sparse_coo_tensor(
        places, torch.tensor(value).expand(2), (3,), check_invariants=True
    )
    assert check([gradient], CPU)[CPU].item() == found


def test_what_a_check_cannot_is_an_error():
    with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
        check([expanded(), torch.ones(2, dtype=torch.int32)], CPU)


def test_only_gradients_that_are_multiplied_must_not_overlap():
    with pytest.raises(RuntimeError, match="single memory location"):
        unscaled([expanded()])


KEPT = {
    "cast": lambda model, optimizer: prepare(model, optimizer, "mixed_bfloat16"),
    "scaled": lambda model, optimizer: prepare(model, optimizer, "mixed_float16"),
    "split": lambda model, optimizer: prepare(model, optimizer, "mixed_bfloat16", masters="split"),
    "alone": lambda _, optimizer: keep_masters(optimizer, param_dtype="bfloat16"),
}


@pytest.mark.filterwarnings("ignore::halfstep.torch.UnusedRegionWarning")
@pytest.mark.parametrize("case", KEPT)
def test_an_expanded_gradient_set_by_hand_is_a_step(case):
    model, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    other.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    KEPT[case](model, optimizer)
    for value in (1.0, torch.inf, 3.0):
        model.weight.grad = expanded(value, model.weight.dtype)
        optimizer.step()
        if value != torch.inf:
            other.weight.grad = expanded(value)
            plain.step()
    assert torch.equal(float32_state_dict(model)["weight"], other.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_number_is_found_among_many(dtype, bad):
    gradients = [torch.ones(1 << 16, dtype=dtype), torch.ones(3)]
    assert check(gradients, CPU)[CPU].item() == 0.0
    for place in (0, 40_000, -1):
        gradients[0].fill_(1.0)[place] = bad
        assert check(gradients, CPU)[CPU].item() == check(gradients[:1], CPU)[CPU].item() == 1.0


def test_finite_numbers_whose_sum_is_beyond_the_format_are_finite():
    largest = torch.finfo(torch.float32).max
    assert check([torch.full((1 << 16,), largest)], CPU)[CPU].item() == 0.0
