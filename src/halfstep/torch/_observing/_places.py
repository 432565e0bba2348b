"""Where in a model, and on which line, an operation runs."""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as _module

from halfstep.torch import _private
from halfstep.torch._engine._paths import HOOKS_ARE_GLOBAL, _unwrapped
from halfstep.torch._observing._named import Names, below, is_own
from halfstep.torch._regions._forward import forward_of


class Place(NamedTuple):
    """A call of a module.

    Args:
        path: The dotted path of the module, or the name of the function around the model.
        call: How often the module was called before.
        is_root: Whether it is a model itself, or outside of all.
        below: The path that rules know the module by, which is that in its own model.
    """

    path: str
    call: int
    is_root: bool
    below: str = ""


class Places:
    """Follows the calls of modules.

    Args:
        model: The model, whose modules are known by their paths in it.
        outside: What the place outside of all modules is called.
        meet: Is told of other models when they are called first.
    """

    def __init__(self, model: nn.Module, outside: str, meet: Callable[[nn.Module], None]) -> None:
        self._tell = meet
        whole = _unwrapped(model)
        self._names = _names(whole)
        self._root = self._names[id(whole)] = type(whole).__name__
        self._names.update({id(each): "" for each in _wrappers(model, whole)})
        # The names of other models by their modules, and those models, so that an id stays one's.
        self._roots: dict[int, str] = {}
        self._others: list[nn.Module] = []
        self._given = Names(self._root)
        # Those that are not registered in the module that calls them, which rules take them for.
        self._inner: set[int] = set()
        self._stack = [Place(outside, 0, is_root=True)]
        # In which backward pass each was entered.
        self._passes: list[int | None] = [-1]
        self._calls: Counter[str] = Counter()

    @property
    def here(self) -> Place:
        """The innermost place."""
        return self._stack[-1]

    @property
    def depth(self) -> int:
        """How many places there are, the one outside of all modules included."""
        return len(self._stack)

    def below_call(self, depth: int) -> str:
        """Returns the path below the first module that was called since there were `depth`."""
        inside = [each.below for each in self._stack[depth:]]
        root = f"{inside[0]}." if inside and inside[0] else ""
        known = (each for each in reversed(inside) if f"{each}.".startswith(root))
        return next(known, "")[len(root) :]

    @property
    def forward(self) -> bool:
        """Whether what runs is the place itself, and not a backward pass that it called."""
        return self._passes[-1] == _private.backward_pass()

    def known(self, module: nn.Module) -> tuple[str, str]:
        """Returns the name of another model that a module is in, and its path in its model."""
        if id(module) not in self._names:
            self._meet(module)
        root, name = self._roots.get(id(module), ""), self._names[id(module)]
        return root, "" if name in (root, self._root) else name.removeprefix(f"{root}.")

    def _meet(self, module: nn.Module) -> None:
        """Takes note of another model, such as the discriminator in the loss of a generator."""
        whole, given = _unwrapped(module), self._given.of(module)
        found = {place: below(given, name) for place, name in _names(whole).items()}
        found |= {id(each): given for each in _wrappers(module, whole)}
        new = {place: name for place, name in found.items() if place not in self._names}
        self._names |= new
        self._roots |= dict.fromkeys(new, given)
        self._inner.update(new if len(self._stack) > 1 and forward_of(module) is None else ())
        self._others.append(module)
        self._tell(module)

    def leave_forward(self) -> None:
        """From now on, nothing that runs outside of all modules is a forward pass."""
        self._passes[0] = None

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follows the modules until the block ends."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=HOOKS_ARE_GLOBAL)
            hooks = [
                _module.register_module_forward_pre_hook(self._enter),
                _module.register_module_forward_hook(self._leave, always_call=True),
            ]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        _, inside = self.known(module)
        path = self._names[id(module)] or self.here.path
        known = self.here.below if id(module) in self._inner else inside
        self._stack.append(Place(path, self._calls[path], not inside, known))
        self._passes.append(_private.backward_pass())
        self._calls[path] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
            self._passes.pop()


def _names(whole: nn.Module) -> dict[int, str]:
    """Returns the paths of modules in a model, by id, as they are without compilation."""
    return {
        id(each): ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, each in whole.named_modules()
    }


def _wrappers(model: nn.Module, whole: nn.Module) -> Iterator[nn.Module]:
    """Yields the wrappers around a model."""
    while model is not whole:
        yield model
        (model,) = model.children()


def line(stop: tuple[CodeType, ...]) -> str:
    """Returns the innermost line that runs outside of PyTorch and halfstep, "" for none.

    Args:
        stop: The functions within which lines count.

    Example:
        >>> def around():
        ...     return line((around.__code__,))
        >>> around()
        ''
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in stop:
        code = frame.f_code
        if not is_own(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return ""
