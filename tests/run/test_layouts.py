import pytest

from halfstep.run._layouts import LAYOUTS, Trained, predicted, unpredictable

ADAM = Trained("AdamW", sizes=(2**20, 100), per_value=8.0, per_tensor=4.0)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def per_parameter(name, trained=ADAM):
    return sum(predicted(BY_NAME[name], [trained]).values()) / trained.parameters


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("float32", 16),
        ("cast masters", 16),
        ("split masters", 14),
        ("split +8-bit", 8.03),
        ("split +release", 12),
        ("split +8-bit +release", 6.03),
    ],
)
def test_the_total_with_adam(name, total):
    assert per_parameter(name) == pytest.approx(total, abs=0.01)


def test_states_in_eight_bits_stay_wide_where_they_are_small_or_uneven():
    layout = BY_NAME["split +8-bit"]
    for size in (4095, 4096 + 1):
        small = Trained("AdamW", sizes=(size,), per_value=8.0)
        assert predicted(layout, [small])["state"] == 8 * size
    # Two values of a byte each, a scale of 4 bytes for each 256, a table of 256 values.
    large = Trained("AdamW", sizes=(4096,), per_value=8.0)
    assert predicted(layout, [large])["state"] == 2 * (4096 + 16 * 4 + 1024)


def test_several_optimizers_are_added():
    both = predicted(BY_NAME["float32"], [ADAM, Trained("SGD", sizes=(10,))])
    alone = predicted(BY_NAME["float32"], [ADAM])
    assert both["state"] == alone["state"]
    assert both["weights"] == alone["weights"] + 40


def test_what_cannot_be_split_stays_in_float32():
    mixed = Trained("SGD", sizes=(100, 8), unsplit=8)
    parts = predicted(BY_NAME["split masters"], [mixed])
    assert parts == {"weights": 232, "remainder": 200, "gradients": 232, "state": 0.0}
    assert predicted(BY_NAME["split +release"], [mixed])["gradients"] == 0
    assert predicted(BY_NAME["cast masters"], [mixed])["weights"] == 432


@pytest.mark.parametrize(
    ("name", "trained", "reason"),
    [
        ("float32", ADAM, ""),
        ("split +8-bit", ADAM, ""),
        ("split +8-bit", Trained("SGD", (8,)), "torchao.optim has no SGD with 8-bit states"),
        ("float32", Trained("AdamW8bit", (8,)), "the state of AdamW8bit is in 8 bits already"),
        ("float32", Trained("SGD", (8,), ("bfloat16",)), "parameters are trained in bfloat16"),
        ("float32", Trained("Odd", (8,), per_value=None, reason="it failed"), "it failed"),
    ],
)
def test_why_nothing_is_predicted(name, trained, reason):
    assert unpredictable(BY_NAME[name], [trained]) == reason
