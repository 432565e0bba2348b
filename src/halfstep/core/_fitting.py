"""What to change so that the values of a training step fit the format that it computes in."""

import glob
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep.core._changes import Change
from halfstep.core._policy import Policy
from halfstep.core._rule import Rule

if TYPE_CHECKING:
    from halfstep.core._ranges import Ranges

_MOST_MODULES = 8
_NAMED = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
_WIDER = "mixed_bfloat16"
_PREPARED = "region = prepare(model, optimizer, policy=policy)"
_AUTOCAST = "lower = autocast(dtype=torch.{form}, rules=rules)"
_IN_BFLOAT16 = "lower = autocast(dtype=torch.bfloat16)"
_SCALER = "scaler = GradScaler(init_scale=2.0**{power})"


def needs_wider(ranges: "Ranges", modules: Sequence[str]) -> bool:
    """Returns whether so many modules do not fit a format that a wider one is what helps.

    Args:
        ranges: The values of a step.
        modules: The modules that do not fit.

    Example:
        >>> from halfstep.core import Ranges
        >>> needs_wider(Ranges(), ["head"]), needs_wider(Ranges(), ["a", "b", "c"])
        (False, True)
    """
    most = len(modules) > 2 and 2 * len(modules) > len(ranges.modules)
    return most or len(modules) > _MOST_MODULES


def rules_for(ranges: "Ranges", modules: Sequence[str]) -> tuple[Rule, ...]:
    """Returns rules by which modules run in float32, none where nothing reaches one of them.

    Args:
        ranges: The values of a step.
        modules: The modules.

    Example:
        >>> from halfstep.core import Exponents, Range, Ranges
        >>> row = Range("head", "output", Exponents(), Exponents(), families=("matmul",))
        >>> [(each.target, each.action, each.where) for each in rules_for(Ranges((row,)), ["head"])]
        [('matmul', 'full', 'head')]
    """
    rows = {name: ranges.of(name)[0] for name in modules}
    reason = f"Its values do not fit {ranges.form}."
    if not all(rows[name].families for name in modules):
        return ()
    return tuple(
        Rule(family, "full", reason, glob.escape(rows[name].where))
        for name in modules
        for family in rows[name].families
    )


def fitting(ranges: "Ranges") -> tuple[Change, ...]:
    """Returns what to change so that all values fit, nothing where they do without a scale.

    Args:
        ranges: The values of a step.

    Example:
        >>> from halfstep.core import Exponents, Range, Ranges
        >>> gradient = Exponents({-30: 9, -20: 1}, largest=1e-6)
        >>> found = Ranges((Range("head", "grad_weight", gradient, gradient),))
        >>> [each.use for each in fitting(found)]
        ['scaler = GradScaler(init_scale=2.0**20)']
    """
    rules = rules_for(ranges, ranges.outside)
    if needs_wider(ranges, ranges.outside) or (ranges.outside and not rules):
        return (_wider(ranges),)
    return _in_region(ranges, rules) if ranges.policy else _around(ranges, rules)


def _wider(ranges: "Ranges") -> Change:
    if not ranges.policy:
        return Change(_IN_BFLOAT16, "autocast*", instead=_WIDER)
    return Change(_PREPARED, "policy", ranges.policy, instead=_WIDER)


def _in_region(ranges: "Ranges", rules: tuple[Rule, ...]) -> tuple[Change, ...]:
    scale = ranges.region_scale if ranges.power else None
    text = "" if scale is None else f"dynamic(init_scale={scale!r})"
    change = Change(_PREPARED, "policy", _lower(ranges), scale=text, rules=rules)
    return (change,) if text or rules else ()


def _lower(ranges: "Ranges") -> str:
    """Returns the policy in force, or the one whose format is asked about."""
    in_float32 = Policy.parse(ranges.policy).compute_dtype == "float32"
    return _NAMED.get(ranges.form, _NAMED["float16"]) if in_float32 else ranges.policy


def _around(ranges: "Ranges", rules: tuple[Rule, ...]) -> tuple[Change, ...]:
    base = _NAMED.get(ranges.form, _NAMED["float16"])
    lower = Change(_AUTOCAST.format(form=ranges.form), "autocast*", base, rules=rules)
    scaler = _SCALER.format(power=ranges.power)
    scaled = Change(scaler, "scaler", scale=repr(ranges.scale))
    return (*([lower] if rules else []), *([scaled] if ranges.power else []))
