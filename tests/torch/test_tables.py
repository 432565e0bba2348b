import pytest
import torch

from halfstep import Rules
from halfstep.torch import _private, autocast
from halfstep.torch._engine._families import FAMILY_OF
from halfstep.torch._engine._ops import operations
from halfstep.torch._engine._tables import Scope, Table, native_action

DEVICES = ["cpu", "cuda", "mps", "xpu"]


def handled(rules, device, cached=False):
    scope = Scope(Rules.parse(rules), device, "bfloat16", cached)
    return {operation.name for operation in Table(scope).handled}


@pytest.mark.parametrize(("rules", "device"), [("torch-2.13", "cuda"), ("torch-2.13-cpu", "cpu")])
def test_pytorchs_own_kernels_carry_out_the_set_of_their_device(rules, device):
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the set is that of PyTorch 2.13")
    assert handled(rules, device) == set()


def test_an_edit_takes_over_one_operation():
    edited = handled("torch-2.13-cpu + aten::softmax=full", "cpu")
    assert "aten::softmax.int" in edited
    assert all(name.startswith("aten::softmax.") for name in edited)


def test_remembering_weights_takes_over_products_and_convolutions():
    extra = handled("torch-2.13-cpu", "cpu", cached=True)
    assert {"aten::linear.default", "aten::conv2d.default"} <= extra


def test_the_default_set_leaves_products_to_pytorch():
    assert not {"aten::linear.default", "aten::mm.default"} & handled("halfstep-1", "cpu")
    assert "aten::layer_norm.default" in handled("halfstep-1", "cuda")
    assert "aten::softmax.int" not in handled("halfstep-1", "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_whose_action_is_not_known_is_never_trusted(device):
    for operation in operations(Rules()):
        native = native_action(operation, device)
        assert native in (None, "unknown", "lower", "full", "widest", "refuse")
        if native == "unknown":
            assert operation.name in handled("halfstep-1", device) | handled("none", device)


def test_every_family_of_the_table_is_a_family_of_the_rules():
    from halfstep.core import FAMILIES

    assert set(FAMILY_OF.values()) == set(FAMILIES)


def test_a_name_stands_for_its_functional_overloads():
    names = {operation.name for operation in operations(Rules())}
    assert {"aten::sum.default", "aten::sum.dim_IntList", "aten::pow.Scalar"} <= names
    assert not any(name.endswith("out") for name in names)


def test_the_same_rules_mean_the_same_on_every_device():
    everywhere = [Table(Scope(Rules("torch-2.13"), device, "float16", False)) for device in DEVICES]
    for operation in operations(Rules()):
        assert len({table.rule(operation) for table in everywhere}) == 1


def test_a_custom_operation_can_have_a_rule():
    library = torch.library.Library("halfstep_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    half = torch.ones(2).half()
    with autocast("cpu", rules="halfstep-1 + halfstep_test::twice=full"):
        assert torch.ops.halfstep_test.twice(half).dtype is torch.float32
    assert torch.ops.halfstep_test.twice(half).dtype is torch.float16


def test_nothing_is_reached_outside_of_a_region():
    with autocast("cpu", rules="torch-2.13"):
        assert torch._C._dispatch_tls_is_dispatch_key_included(_private.KEY)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(_private.KEY)
