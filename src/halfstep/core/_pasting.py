"""Text that can be pasted into a script: values as they are written, and what is to be imported."""

import json
import re
from collections.abc import Sequence

from halfstep.core._policy import Policy
from halfstep.core._rule import Rule
from halfstep.core._rules import Rules

_FROM = {
    "halfstep": ("Policy", "Rules"),
    "halfstep.torch": ("GradScaler", "autocast", "keep_masters", "prepare", "set_global_policy"),
}
_WHOLE = re.compile(r"(?<![\w.])(torch|halfstep\.(?:keras|jax))(?=\.)")
# A name that is neither an attribute nor within a name, and is used as what it is imported for.
_USED = re.compile(r"(?<![\w.])(\w+)(?=[(.])")


def complete(text: str) -> str:
    """Returns a text below the imports that it needs; an empty one stays empty.

    Example:
        >>> print(complete("scaler = GradScaler(init_scale=8.0)"))
        from halfstep.torch import GradScaler
        scaler = GradScaler(init_scale=8.0)
        >>> print(complete("halfstep.keras.set_global_policy('mixed_bfloat16')"))
        import halfstep.keras
        halfstep.keras.set_global_policy('mixed_bfloat16')
    """
    code = "\n".join(line.partition("  #")[0] for line in text.splitlines())
    used, whole = set(_USED.findall(code)), dict.fromkeys(_WHOLE.findall(code))
    lines = [f"import {name}" for name in whole]
    for module, names in _FROM.items():
        found = ", ".join(name for name in names if name in used)
        lines += [f"from {module} import {found}"] if found else []
    return "\n".join([*lines, text])


def quoted(text: str) -> str:
    r"""Returns a text as it is written in Python, in double quotes.

    Example:
        >>> print(quoted('a "name"'))
        "a \"name\""
    """
    return json.dumps(text, ensure_ascii=False)


def rules_text(rules: Rules, edits: Sequence[Rule]) -> str:
    """Returns lines that put rows on top of rules.

    Example:
        >>> print(rules_text(Rules(), [Rule("softmax", "full", "It sums.", where="head")]))
        rules = Rules().with_rule("softmax", "full", reason="It sums.", where="head")
    """
    begun = "Rules()" if rules == Rules() else f"Rules.parse({quoted(str(rules))})"
    lines = []
    for each in edits:
        where = f", where={quoted(each.where)}" if each.where else ""
        row = f"{quoted(each.target)}, {quoted(each.action)}, reason={quoted(each.reason)}{where}"
        lines.append(f"rules = {begun}.with_rule({row})")
        begun = "rules"
    return "\n".join(lines)


def policy_text(policy: Policy) -> str:
    """Returns a policy as a named one and what differs.

    Example:
        >>> print(policy_text(Policy.named("mixed_float16").with_(scale="static(8.0)")))
        Policy.parse("mixed_float16, scale=static(8.0)")
    """
    text = policy_words(policy)
    return f"Policy.{'parse' if ',' in text else 'named'}({quoted(text)})"


def policy_words(policy: Policy) -> str:
    """Returns the text of a policy, as a name and what differs.

    Example:
        >>> policy_words(Policy.named("mixed_float16").with_(scale="static(8.0)"))
        'mixed_float16, scale=static(8.0)'
    """
    return min((_difference(name, policy) for name in Policy.names()), key=len)


def _difference(name: str, policy: Policy) -> str:
    fields, own = policy.to_dict(), Policy.named(name).to_dict()
    changed = [field for field in fields if fields[field] != own[field]]
    return ", ".join([name, *(f"{field}={getattr(policy, field)}" for field in changed)])
