import pytest

from halfstep.errors import UsageError
from halfstep.launch import RunResult
from halfstep.run._findings import ModelFindings, ScriptFindings

TRAINED = {
    "optimizer": "SGD",
    "sizes": [8],
    "dtypes": ["float32"],
    "per_value": 4.0,
    "per_tensor": 0.0,
    "reason": "",
}
KEPT = {"parameters": 8, "weights": 32, "remainder": 0, "gradients": 32, "state": 32, "others": 0}
LAST = {"steps": 3, "last": True, "kept": KEPT | {"gradient_peak": None}, "trained": [TRAINED]}
RUN = RunResult(policy="float32", saved_bytes=64, device="a device")


def by_name(footprint):
    return {each.name: each for each in footprint.layouts}


def test_a_script_shows_two_layouts_and_predicts_the_others():
    found = ScriptFindings()
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        found.add(policy, RUN, LAST)
    footprint = found.footprint("train.py", RUN)
    layouts = by_name(footprint)
    assert layouts["float32"].measured == layouts["cast masters"].measured == LAST["kept"]
    assert layouts["split masters"].measured is None
    assert layouts["split masters"].unmeasured.startswith("a script is run as it is")
    assert layouts["split masters"].predicted["weights"] == 16
    assert layouts["split +8-bit"].predicted is None
    assert [each.bytes for each in footprint.activations] == [64, 64, 64]
    assert (footprint.error, footprint.steps, footprint.device) == ("", 3, "a device")


def test_a_script_that_splits_its_masters_shows_that():
    found = ScriptFindings()
    split = LAST | {"kept": LAST["kept"] | {"remainder": 16}}
    found.add("float32", RUN, LAST)
    found.add("mixed_bfloat16", RUN, split)
    layouts = by_name(found.footprint("train.py", RUN))
    assert layouts["split masters"].measured == split["kept"]
    assert layouts["cast masters"].measured is None
    assert layouts["cast masters"].unmeasured == "the script keeps its masters in another way"
    found.add("mixed_bfloat16", RUN, LAST | {"kept": split["kept"] | {"gradients": 0}})
    assert by_name(found.footprint("train.py", RUN))["split +release"].measured["gradients"] == 0


def test_a_script_that_trains_nothing():
    found = ScriptFindings()
    found.add("float32", RunResult(policy="float32"), {})
    footprint = found.footprint("train.py", RUN)
    assert footprint.layouts == ()
    assert footprint.error == (
        "no optimizer took a step: neither PyTorch nor Keras was imported. Name a script that "
        "trains, or what builds the model: halfstep memory FILE.py:CALLABLE"
    )


def test_a_later_run_that_fails_is_a_reason():
    found = ScriptFindings()
    found.add("float32", RUN, LAST)
    failed = RunResult(policy="mixed_bfloat16", exit_code=1, error="Traceback\nValueError: no")
    found.add("mixed_bfloat16", failed, {})
    footprint = found.footprint("train.py", RUN)
    assert footprint.error == ""
    assert by_name(footprint)["cast masters"].unmeasured == "ValueError: no"
    assert footprint.activations[1].reason == "ValueError: no"


def test_a_model_is_told_of_piece_by_piece():
    shown = []
    found = ModelFindings(shown.append)
    found.readers["model"](trained=[TRAINED], batch=4, steps=3, has_inputs=True)
    found.readers["begin"](name="float32")
    found.readers["layout"](name="float32", kept=LAST["kept"])
    found.readers["layout"](name="cast masters", reason="it cannot be")
    found.readers["activations"](policy="float32", bytes=64, per_sample=16.0, fixed=0)
    found.end(RunResult(policy="float32", exit_code=-9, error="killed"))
    footprint = found.footprint("a:b", RUN)
    layouts = by_name(footprint)
    assert shown == ["float32"]
    assert footprint.batch == 4
    assert footprint.error == "killed"
    assert layouts["float32"].unmeasured == ""
    assert layouts["cast masters"].unmeasured == "it cannot be"
    assert layouts["split masters"].unmeasured == "the process ended: killed by SIGKILL"


def test_what_the_process_refuses_is_wrong_usage():
    with pytest.raises(UsageError, match="no model"):
        ModelFindings(print).readers["refused"](error="no model")
