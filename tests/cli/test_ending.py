import io

import pytest
from rich.console import Console

from halfstep.cli._ending import show_ending
from halfstep.launch import RunResult, Skip, why_untrained

VERSIONS = (("python", "3.11"), ("torch", "2.13"))
RUN = {
    "policy": "mixed_float16",
    "steps": 20,
    "optimizer_steps": 20,
    "scalers": 1,
    "losses": tuple(2.0 - 0.1 * i for i in range(20)),
    "step_seconds": (0.5,) * 19,
    "scale": 65536.0,
    "saved_bytes": 2048,
    "peak_memory": 3 * 2**20,
    "peak_memory_kind": "allocated on CUDA",
    "device": "H200",
    "versions": VERSIONS,
}


ATTENTION = "mixed_bfloat16, rules=halfstep-1 + attention=full"


def shown(chosen=False, **values):
    console = Console(file=io.StringIO(), width=80)
    show_ending(console, "train.py", RunResult(**RUN | values), chosen=chosen)
    return console.file.getvalue()


def test_a_run():
    lines = shown().splitlines()
    assert [line.rstrip() for line in lines[:4]] == [
        "halfstep: train.py",
        "  policy              mixed_float16",
        "  steps               20",
        "  skipped             0 of 20",
    ]
    assert lines[4].startswith("  loss                2 to 0.15 (mean of the last tenth)  █")
    assert [line.rstrip() for line in lines[5:]] == [
        "  steps/s             2",
        "  peak memory         3 MiB (allocated on CUDA)",
        "  saved for backward  2 KiB in one step",
        "  last scale          65536",
        "  H200; python 3.11, torch 2.13",
    ]


def test_the_choice_is_told():
    assert "mixed_float16 (chosen for this device; --policy sets it)" in shown(chosen=True)
    text = "auto: mixed_bfloat16 with attention in float32"
    values = {"policy": "auto", "auto": (ATTENTION,), "why": ("auto chose it.",)}
    assert row("policy", **values) == text
    assert (
        row("policy", chosen=True, **values) == f"{text} (chosen for this device; --policy sets it)"
    )
    assert row("why", **values) == "auto chose it."


def row(name, **values):
    lines = [line.strip() for line in shown(**values).splitlines()]
    return next(line[len(name) :].strip() for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (("mixed_float16",), "mixed_float16 (chosen for this device; --policy sets it)"),
        (("mixed_bfloat16",), "mixed_bfloat16 (the script's own)"),
        (("float32", "mixed_float16"), "mixed_float16; float32 (the script's own)"),
        (("float32", "mixed_bfloat16"), "float32, mixed_bfloat16 (the script's own)"),
    ],
)
def test_policies_of_the_script_itself_are_named(own, text):
    assert row("policy", chosen=True, regions=9, region_policies=own, lowered=True) == text


def test_regions_that_auto_chose_for_are_not_the_scripts_own():
    values = {"policy": "auto", "auto": ("mixed_bfloat16", "float32"), "lowered": True}
    row_of = {"regions": 9, "region_policies": ("mixed_bfloat16", "float32")}
    assert row("policy", **values, **row_of) == "auto: mixed_bfloat16; float32"
    row_of["region_policies"] += ("mixed_float16",)
    text = "auto: mixed_bfloat16; float32; mixed_float16 (the script's own)"
    assert row("policy", **values, **row_of) == text


def test_auto_that_nothing_asked_for():
    assert row("policy", policy="auto", lowered=False) == "float32 (auto did not take effect)"
    kept = {"policy": "auto", "auto": ("float32",), "lowered": False}
    assert row("policy", **kept) == "auto: float32"


def test_a_policy_that_did_not_take_effect():
    values = {"chosen": True, "lowered": False}
    assert row("policy", **values) == "float32 (mixed_float16 did not take effect)"
    text = " ".join(shown(**values).split())
    assert (
        "halfstep: mixed_float16 did not take effect, because no model became a region: every"
        in text
    )
    assert "in the script's own formats, as under plain Python. Only modules that are" in text
    amp = " ".join(shown(torch_amp=True, **values).split())
    assert "the script's own torch.amp (mixed_float16 did not take effect)" in amp
    assert "everything ran with the script's own torch.amp, as" in amp
    own = " ".join(shown(regions=1, region_policies=("float32",), **values).split())
    assert "policy float32 (the script's own)" in own
    assert "the script prepares its models with the policy float32" in own
    assert "effect" not in shown(policy="float32", lowered=False)


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({}, True),
        ({"scale": 2.0}, False),
        ({"skipped": (Skip(1, "inf"),)}, False),  # a scale that has come down to 1
        ({"policy": "mixed_bfloat16"}, False),
        ({"policy": "compute_dtype=float16,scale=none"}, False),
        ({"lowered": False}, False),
        ({"versions": VERSIONS}, False),
    ],
)
def test_a_loop_of_keras_without_a_loss_scale(values, warned):
    values = {"scale": 1.0, "lowered": None, "versions": (("keras", "3.15.1"),)} | values
    assert ("halfstep: the losses were not scaled" in shown(**values)) == warned


def test_an_error_before_anything_was_trained_speaks_for_itself():
    assert shown(steps=0, error="ValueError", exit_code=1) == ""
    assert "nothing was trained" in shown(steps=0, exit_code=1)


def test_what_is_unknown_is_left_out():
    text = shown(losses=(), step_seconds=(), saved_bytes=None, peak_memory=None, scale=None)
    for label in ("loss", "steps/s", "peak", "saved", "scale"):
        assert label not in text


def test_skipped_steps_come_with_the_most_frequent_reasons():
    reasons = ["inf in a", "inf in b", "inf in b", "inf in c", "inf in d", "inf in e"]
    text = shown(skipped=tuple(Skip(i, reason) for i, reason in enumerate(reasons)))
    assert "6 of 20: inf in b (2x); inf in a (1x); inf in c (1x); and 2 more reasons" in text


def test_several_optimizers():
    text = shown(scalers=2, optimizer_steps=40)
    assert "20 of the first of 2 optimizers, 40 of all" in text


def test_steps_that_no_optimizer_made():
    text = shown(scalers=0, optimizer_steps=0)
    assert "20 (backward passes; no optimizer was seen, so nothing could be skipped)" in text
    assert "skipped  " not in text


def test_a_run_of_one_step_and_losses_that_are_not_finite():
    text = shown(steps=1, losses=(float("nan"),))
    assert "nan to nan" in text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"optimizer_steps": 2, "losses": (1.0,)}, "scaler.update() never was"),
        ({"losses": (1.0,)}, "losses were scaled, but neither backward() nor"),
        ({}, "neither PyTorch nor Keras was imported"),
        ({"versions": VERSIONS}, "neither a call of backward() nor an optimizer step was seen"),
    ],
)
def test_why_nothing_was_trained(values, reason):
    run = RunResult(policy="float32", **values)
    assert reason in why_untrained(run)
    console = Console(file=io.StringIO(), width=500)
    show_ending(console, "train.py", run, chosen=True)
    text = console.file.getvalue()
    assert text == f"halfstep: nothing was trained in train.py: {why_untrained(run)}.\n"
