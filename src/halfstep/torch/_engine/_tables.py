"""What the rules mean on one device: for each operation, what runs instead of PyTorch's kernel."""

import dataclasses
import functools
from dataclasses import dataclass

from halfstep.core import Rule, Rules
from halfstep.torch import _private
from halfstep.torch._engine._actions import Runner, runner
from halfstep.torch._engine._kernels import takes_numbers
from halfstep.torch._engine._ops import Operation, dispatch_name, operations

_TAKE_WEIGHTS = ("matmul", "convolution", "recurrent")
# They promote without autocast; PyTorch's autocast kernels for them refuse a third float dtype.
_PROMOTES_BY_ITSELF = ("aten::cat", "aten::stack", "aten::atan2", "aten::hypot", "aten::nextafter")


@dataclass(frozen=True)
class Scope:
    """What a table is made for.

    Args:
        rules: The rules.
        device_type: Such as `cpu`.
        dtype: The name of the compute dtype.
        cached: Whether products and convolutions run through us, which remember casts of weights.
        observed: Whether every operation with a rule runs through us, so that it can be recorded.
    """

    rules: Rules
    device_type: str
    dtype: str
    cached: bool
    observed: bool = False


class Table:
    """The operations of a scope, and which of them PyTorch's autocast does not do as the rules say.

    Every operation with a rule has a runner. Those that need a kernel of ours are `handled`: also
    operations without a rule, if PyTorch has one of its own that must not apply. Those of them that
    `takes_numbers` are `passing`: their kernels are there as long as a region needs them.

    Args:
        scope: What the table is made for.

    Example:
        >>> scope = Scope(Rules.named("torch-2.13-cpu"), "cpu", "bfloat16", cached=False)
        >>> len(Table(scope).handled)
        0
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.text = _without_reasons(scope)
        self.rules_text = str(scope.rules)
        self._is_pytorchs = scope.rules.base.startswith("torch-")
        self.operations = tuple(operations(scope.rules))
        where = [rule.where for rule in scope.rules.rows if rule.where]
        self.patterns = tuple(dict.fromkeys(where))
        self._by_path: dict[tuple[str, str], Runner | None] = {}
        self._limited = self._find_limited()
        self.handled = tuple(
            operation
            for operation in self.operations
            if operation.name in self._limited or self._differs(operation)
        )
        passing = (each for each in self.edited() if takes_numbers(each))
        self.passing = tuple(each for each in passing if each in self.handled)
        self.runners = {operation.name: self._runner(operation) for operation in self.handled}

    def rule(self, operation: Operation, path: str = "") -> Rule | None:
        """Returns the row that decides about an operation in a module."""
        scope = self.scope
        return scope.rules.find(
            operation.name, operation.family, path=path, device=scope.device_type, dtype=scope.dtype
        )

    def _find_limited(self) -> frozenset[str]:
        """Returns the operations that some row treats differently in some modules."""
        targets = {rule.target for rule in self.scope.rules.rows if rule.where}
        return frozenset(
            operation.name
            for operation in self.operations
            if targets & {operation.name, operation.base, operation.family}
        )

    def remembers_weights(self, operation: Operation) -> bool:
        """Whether an operation runs through us for the sake of the cache of weights."""
        return self.scope.cached and operation.family in _TAKE_WEIGHTS

    def action(self, operation: Operation, path: str) -> str:
        """Returns what the rules say about an operation in a module, or an empty text."""
        rule = self.rule(operation, path)
        return "" if rule is None else rule.action

    def _differs(self, operation: Operation) -> bool:
        """Whether PyTorch's own autocast does not do what the rules say."""
        rule, device_type = self.rule(operation), self.scope.device_type
        native = native_action(operation, device_type)
        if self.scope.observed:
            return rule is not None or native is not None
        if rule is None or rule.action == "keep":
            acts = rule is not None and operation.technique in ("fill", "follow", "mixes")
            return native is not None or acts
        if rule.action == "widest" and operation.base in _PROMOTES_BY_ITSELF:
            return native not in (None, "widest") or (native is not None and not self._is_pytorchs)
        if rule.action == "lower" and self.remembers_weights(operation):
            return True
        return rule.action != native

    def edited(self) -> list[Operation]:
        """Returns the operations that only an edit of the rules speaks about."""
        known = {operation.name for operation in operations(Rules.named("none"))}
        return [operation for operation in self.operations if operation.name not in known]

    def runner(self, operation: Operation, path: str) -> Runner | None:
        """Returns what runs for a handled operation in a module; None where no rule speaks."""
        if operation.name not in self._limited:
            return self.runners[operation.name]
        key = (operation.name, path)
        if key not in self._by_path:
            self._by_path[key] = self._runner(operation, path)
        return self._by_path[key]

    def _runner(self, operation: Operation, path: str = "") -> Runner | None:
        rule = self.rule(operation, path)
        return None if rule is None else runner(rule, operation)


def _without_reasons(scope: Scope) -> str:
    """Returns a text that differs exactly where two scopes act differently."""
    edits = tuple(dataclasses.replace(edit, reason="-") for edit in scope.rules.edits)
    return str(dataclasses.replace(scope, rules=dataclasses.replace(scope.rules, edits=edits)))


def native_rules(device_type: str) -> str:
    """Returns the name of the rule set that lists what PyTorch's own autocast does.

    Example:
        >>> native_rules("cpu"), native_rules("cuda")
        ('torch-2.13-cpu', 'torch-2.13')
    """
    return "torch-2.13-cpu" if device_type == "cpu" else "torch-2.13"


@functools.cache
def native_action(operation: Operation, device_type: str) -> str | None:
    """Returns what PyTorch's own autocast does: an action, None, or `unknown`.

    Whether there is a kernel is asked of this PyTorch; what it does is read from the rule set that
    lists PyTorch 2.13, so that an operation which moved in another release is never trusted.
    """
    if not _private.has_native_kernel(dispatch_name(operation.overload), device_type):
        return None
    listed = Rules.named(native_rules(device_type))
    rule = listed.find(dispatch_name(operation.overload)) or listed.find(operation.name)
    return "unknown" if rule is None else rule.action


@functools.lru_cache(maxsize=256)
def table(scope: Scope) -> Table:
    """Returns the table of a scope, made once."""
    return Table(scope)
