from halfstep.report import UNKNOWN
from halfstep.run import (
    Activations,
    Footprint,
    Kept,
    Trained,
    activation_rows,
    footprint_notes,
    layout_rows,
)

PREDICTED = {"weights": 16.0, "remainder": 16.0, "gradients": 16.0, "state": 64.4}
MEASURED = {"parameters": 8, "weights": 32, "remainder": 0, "gradients": 32, "state": 64}
MEASURED |= {"others": 2048, "gradient_peak": 32}
FOOTPRINT = Footprint(
    "model.py:build",
    trained=(Trained("AdamW", (8,), per_value=8.0),),
    layouts=(
        Kept("float32", predicted=None, measured=MEASURED, unpredicted="nobody knows."),
        Kept("split masters", predicted=PREDICTED, unmeasured="not there"),
        Kept("split +8-bit", unmeasured="cannot be", unpredicted="cannot be"),
        Kept("split +release", predicted=PREDICTED, unmeasured="not there"),
    ),
    activations=(
        Activations("float32", 4096, per_sample=1024.0, fixed=0.0),
        Activations("mixed_bfloat16", 3072, per_sample=640.0, fixed=512.0),
        Activations("mixed_float16", reason="an error"),
    ),
)


def test_predicted_and_measured_are_side_by_side():
    rows = {row.name: row.cells for row in layout_rows(FOOTPRINT, ascii_only=True)}
    assert rows["float32"]["total"] == "- / 16"
    assert rows["split masters"]["state"] == "8.05 / -"
    assert rows["split masters"]["total"] == "14.05 / -"
    assert set(rows["split +8-bit"].values()) == {"- / -"}


def test_a_terminal_with_unicode():
    assert layout_rows(FOOTPRINT)[0].cells["total"] == f"{UNKNOWN} / 16"
    assert activation_rows(FOOTPRINT)[0].cells["per sample"] == f"{UNKNOWN} / 1 KiB"


def test_what_was_measured_is_divided_by_what_was_trained_there():
    half = MEASURED | {"parameters": 4}
    footprint = Footprint("a:b", FOOTPRINT.trained, (Kept("float32", measured=half),))
    assert layout_rows(footprint, ascii_only=True)[0].cells["weights"] == "- / 8"


def test_activations_by_sample_and_by_value():
    full, low, failed = (row.cells for row in activation_rows(FOOTPRINT, ascii_only=True))
    assert full["per activation"] == "- / 4 B"
    assert low == {
        "kept for backward": "- / 3 KiB",
        "whatever the batch": "- / 512 B",
        "per sample": "- / 640 B",
        "per activation": "- / 2.5 B",
    }
    assert failed == {}


def test_each_reason_is_given_once():
    assert list(footprint_notes(FOOTPRINT)) == [
        "split +8-bit: not measured: cannot be.",
        "split masters, split +release: not measured: not there.",
        "float32: not predicted: nobody knows.",
        "mixed_float16: activations not measured: an error.",
        "gradients alive at once in the backward pass: float32 4 B per parameter",
        "besides: 2 KiB of buffers and of parameters that are not trained",
    ]
