import torch
from torch import nn
from torch.utils._pytree import tree_map

from halfstep.torch._storages import GradientPeak, StorageCounter, plain_tensors


class Pair(torch.Tensor):
    """A tensor of codes and a scale, as an optimizer's state in 8 bits is."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        full = tree_map(lambda x: x.codes.float() if isinstance(x, Pair) else x, (args, kwargs))
        return func(*full[0], **(full[1] or {}))


def test_views_share_a_storage():
    flat = torch.zeros(100)
    assert StorageCounter().count([flat[:10], flat[50:], flat.view(10, 10)]) == 400


def test_what_was_counted_is_not_counted_again():
    counter, one = StorageCounter(), torch.zeros(4)
    assert [counter.count(one), counter.count(one), counter.count(one.clone())] == [16, 0, 16]


def test_a_storage_that_is_gone_lends_its_address_to_none():
    counter = StorageCounter()
    assert sum(counter.count(torch.zeros(1024)) for _ in range(8)) == 8 * 4096


def test_a_subclass_is_what_is_inside():
    state = Pair(torch.zeros(512, dtype=torch.uint8), torch.zeros(2))
    assert StorageCounter().count({"exp_avg": state}) == 512 + 8


def test_nested_values():
    values = [{"a": (torch.zeros(1), None), "b": 3}, "text", [[torch.zeros(2)]]]
    assert [each.numel() for each in plain_tensors(values)] == [1, 2]


def test_a_sparse_gradient():
    embedding = nn.Embedding(100, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert StorageCounter().count(embedding.weight.grad) == 2 * 8 + 2 * 4 * 4


def test_the_peak_of_gradients_that_are_freed_at_once():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    peak = GradientPeak(model.parameters())
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with peak:
        model(torch.ones(1, 8)).sum().backward()
    assert peak.bytes == 8 * 8 * 4
    model(torch.ones(1, 8)).sum().backward()
    assert peak.bytes == 8 * 8 * 4
