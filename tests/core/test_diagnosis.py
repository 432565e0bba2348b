import dataclasses
import json

import pytest

from halfstep import Diagnosis, Fault

FAULT = Fault("block/ff", "matmul", "forward", "output", "inf", "float16", (2, 64), 1200.0)


def test_a_diagnosis_is_true_if_there_is_a_fault():
    other = dataclasses.replace(FAULT, module="head")
    assert Diagnosis((FAULT, other))
    assert Diagnosis((FAULT, other)).first == FAULT
    assert not Diagnosis()


def test_the_text_of_a_fault():
    remedy = 'keras.layers.Dense(64, name="ff", dtype="float32")\nsecond line'
    assert str(dataclasses.replace(FAULT, remedy=remedy)).splitlines() == [
        "block/ff: matmul made inf in the forward pass, in float16, which ends at 65504",
        "  its output of shape (2, 64) holds it; the largest number that went in was 1200",
        "  write:",
        '  keras.layers.Dense(64, name="ff", dtype="float32")',
        "  second line",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"operation": "cast", "role": "weight"}, "block/ff: its weight became inf in the forward"),
        ({"operation": "data", "role": "input"}, "block/ff: the input holds inf before the model"),
        ({"role": "grad_weight", "phase": "backward"}, "block/ff: matmul made inf in the backward"),
        ({"in_float32": True}, "float32 makes it, too"),
        ({"source": "net.py:12 (loss)"}, "\n  in net.py:12 (loss)"),
        ({"role": "grad_weight"}, "the gradient of its weight of shape (2, 64) holds it"),
        ({"dtype": "bfloat16"}, "in bfloat16, which ends at 3.38953e+38"),
        (
            {"kind": "underflow", "role": "grad_input", "phase": "backward"},
            "block/ff: most of the gradient of its input became zero in matmul, in float16, which"
            " begins at 6e-08\n  it has the shape (2, 64), and zeros where float32 has numbers",
        ),
    ],
)
def test_what_else_is_told(changes, text):
    assert text in str(dataclasses.replace(FAULT, **changes))


def test_no_number_is_told_where_nothing_finite_went_in():
    text = str(dataclasses.replace(FAULT, operation="data", role="input", largest=None))
    assert text.splitlines()[1] == "  its input of shape (2, 64) holds it"


def test_the_first_fault_is_told_in_full_and_the_others_in_a_line():
    other = dataclasses.replace(FAULT, module="head", kind="inf and nan")
    lines = str(Diagnosis((FAULT, other))).splitlines()
    assert lines[:-1] == str(FAULT).splitlines()
    assert lines[-1].startswith("after it: head: matmul made inf and nan in the forward pass")


def test_the_loss_scale_is_told():
    assert str(Diagnosis(loss_scale=256.0)) == "no inf and no NaN at loss scale 256"
    lines = str(Diagnosis((FAULT,), 65536.0)).splitlines()
    assert lines == [*str(FAULT).splitlines(), "at loss scale 65536"]
    assert Diagnosis(loss_scale=256.0).to_dict()["loss_scale"] == 256.0


def test_plain_data():
    data = Diagnosis((FAULT,)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["faults"][0]["shape"] == [2, 64]
