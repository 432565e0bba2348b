"""The public names, frozen: whoever changes one changes the interface and its changelog."""

from importlib import import_module

import pytest

NAMES = {
    "halfstep.jax": [
        "ApplyIfFiniteState",
        "DynamicLossScale",
        "Explanation",
        "NoOpLossScale",
        "OperationRow",
        "StaticLossScale",
        "UnmatchedRuleWarning",
        "UnscaledGradientsWarning",
        "WithMastersState",
        "all_finite",
        "apply_if_finite",
        "apply_updates",
        "autocast",
        "check_skips",
        "clip_by_global_norm",
        "diagnose",
        "explain",
        "global_norm",
        "loss_scale",
        "master_params",
        "nonfinite",
        "select_tree",
        "with_masters",
    ],
    "halfstep.jax.jmp": [
        "DynamicLossScale",
        "LossScale",
        "NoOpLossScale",
        "Policy",
        "StaticLossScale",
        "all_finite",
        "cast_to_full",
        "cast_to_half",
        "get_policy",
        "half_dtype",
        "select_tree",
    ],
}


@pytest.mark.parametrize("package", NAMES)
def test_all_is_the_frozen_list(package):
    module = import_module(package)
    assert sorted(module.__all__) == NAMES[package]
    assert [name for name in NAMES[package] if not hasattr(module, name)] == []
