import json

import torch
from torch import nn

from halfstep.torch import autocast
from halfstep.torch._engine._state import KERNELS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.body(inputs)).softmax(-1)


def explained(rules="halfstep-1"):
    model, inputs = Net(), torch.ones(3, 4)
    with autocast("cpu", dtype=torch.bfloat16, rules=rules).explain() as explanation:
        model(inputs)
    return explanation


def test_every_operation_is_listed_with_its_module_rule_and_dtypes():
    rows = [
        (row.operation, row.module, row.action, row.inputs[0], row.outputs[0])
        for row in explained().rows
    ]
    assert rows == [
        ("aten::linear", "body.0", "lower", "float32", "bfloat16"),
        ("aten::relu", "body.1", "", "bfloat16", "bfloat16"),
        ("aten::linear", "head", "lower", "bfloat16", "bfloat16"),
        ("aten::softmax", "", "keep", "bfloat16", "bfloat16"),
    ]


def test_the_casts_of_the_rules_are_counted_in_bytes():
    explanation = explained()
    # Inputs, weight and bias of the first product; weight and bias of the second.
    assert (explanation.casts, explanation.cast_bytes) == (5, 2 * (12 + 16 + 4 + 8 + 2))
    assert [row.casts for row in explanation.rows] == [3, 0, 2, 0]


def test_equal_calls_share_a_row():
    layer, inputs = nn.Linear(4, 4), torch.ones(1, 4)
    with autocast("cpu").explain() as explanation:
        layer(inputs)
        layer(inputs)
    (row,) = explanation.rows
    assert (row.count, row.casts) == (2, 6)


def test_parts_of_an_operation_are_not_listed():
    logits, targets = torch.ones(2, 3), torch.tensor([0, 1])
    with autocast("cpu").explain() as explanation:
        nn.functional.cross_entropy(logits, targets)
    assert [row.operation for row in explanation.rows] == ["aten::cross_entropy_loss"]


def test_regions_inside_are_recorded_too():
    half = torch.ones(2).half()
    with (
        autocast("cpu").explain() as explanation,
        autocast("cpu", rules="halfstep-1 + softmax=full"),
    ):
        half.softmax(0)
    assert [(row.action, row.outputs) for row in explanation.rows] == [("full", ("float32",))]


def test_results_are_the_same_as_without():
    model, inputs = Net(), torch.randn(3, 4)
    region = autocast("cpu", dtype=torch.bfloat16, rules="torch-2.13")
    with region:
        plain = model(inputs)
    with region.explain():
        assert torch.equal(model(inputs), plain)


def test_looking_leaves_no_kernels_behind():
    with autocast("cpu", rules="torch-2.13-cpu"):
        before = set(KERNELS.names())
    explained("torch-2.13-cpu")
    assert set(KERNELS.names()) == before


def test_it_prints_a_table_and_plain_data():
    explanation = explained()
    lines = str(explanation).splitlines()
    assert lines[0].split() == [
        "operation",
        "module",
        "rule",
        "count",
        "in",
        "out",
        "casts",
        "bytes",
    ]
    assert lines[-1] == "5 casts inserted, 84 bytes written by them"
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["rows"][0]["module"] == "body.0"


def test_what_runs_inside_of_a_native_operation_is_as_without():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    region, inputs = (
        autocast("cpu", dtype=torch.bfloat16, rules="torch-2.13-cpu"),
        torch.rand(1, 4, 8),
    )
    with torch.no_grad():
        with region:
            plain = layer(inputs)
        with region.explain():
            assert torch.equal(layer(inputs), plain)
