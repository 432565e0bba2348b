"""What halfstep tells `torch.compile`, and what it asks of it."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.fx
from torch.fx import traceback as fx_traceback

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ACCESS = re.compile(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]")
_NOISE = {"_modules", "_orig_mod", "_parameters", "_buffers"}


# What the code of a graph says its file is.
_GENERATED = "<eval_with_key>"
_LINES: WeakKeyDictionary[torch.fx.GraphModule, dict[int, list[str]]] = WeakKeyDictionary()
_in_graph: list[Callable[..., None]] = []


def in_graph(function: _Function) -> _Function:
    """Marks a function that a compiled graph calls as it is and must not drop.

    It runs while the graph is traced, so what it switches on is on for the operations that follow.
    """
    _in_graph.append(function)
    torch.fx.node.has_side_effect(function)
    return function


def constant(function: _Function) -> _Function:
    """Marks a function that a tracer runs, and whose result it takes for a constant."""
    # What torch.compiler.assume_constant_result sets, which would load the whole compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def ready() -> None:
    """Tells the compiler, if there is one by now, of the functions that belong into a graph.

    To be called before any of them: loading the compiler takes as long as loading PyTorch.
    """
    if _in_graph and "torch._dynamo" in sys.modules:
        while _in_graph:
            torch.compiler.allow_in_graph(_in_graph.pop())


def is_tracing() -> bool:
    """Returns whether a graph is being captured or lowered in this thread."""
    return _translator() is not None or torch.compiler.is_compiling()


def traced_modules() -> list[str]:
    """Returns the paths of the modules being traced, the outermost first, as the graph sees them.

    While a graph is captured the translator knows them; while it is lowered the node does, and so
    it does where a backend runs the graph as it is.
    """
    translator = _translator()
    stack = translator.nn_module_stack if translator else None
    stack = stack or fx_traceback.get_current_meta().get("nn_module_stack")
    return _parsed(stack) if stack else _running_modules()


def _parsed(stack: Mapping[str, Any] | None) -> list[str]:
    return [parse_source(source) for source, *_ in (stack or {}).values()]


def _running_modules() -> list[str]:
    """Returns the modules of the line of a graph that has called what runs, none without a graph.

    Of what a graph calls, nothing runs modules: it is the innermost frame that is not ours.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("halfstep."):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_GENERATED):
        return []
    graph = frame.f_locals.get("self")
    if not isinstance(graph, torch.fx.GraphModule):
        return []
    if graph not in _LINES:
        _LINES[graph] = dict(_modules_by_line(graph))
    return _LINES[graph].get(frame.f_lineno, [])


def _modules_by_line(graph: torch.fx.GraphModule) -> Iterator[tuple[int, list[str]]]:
    nodes: list[Any] = list(graph.graph.nodes)
    for line, place in (getattr(graph, "_lineno_map", None) or {}).items():
        if place is not None:
            modules = _parsed(nodes[place].meta.get("nn_module_stack"))
            yield line + getattr(graph, "_prologue_start", 0), modules


def when_abandoned(callback: Callable[[], None]) -> None:
    """Calls back when the capture of a graph ends, if one is going on.

    A capture that is given up half-way leaves behind what functions in the graph switched on.
    """
    translator = _translator()
    if translator is not None:
        translator.output.add_cleanup_hook(callback)


def forget_attempts() -> Callable[[], None]:
    """Returns what lets a capture that is begun anew take another way than before."""
    translator = _translator()
    log = getattr(translator, "speculation_log", None)
    return (lambda: None) if log is None else log.clear


def _translator() -> Any:
    symbolic_convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if symbolic_convert is None:
        return None
    try:
        return symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:
        return None


def parse_source(source: str) -> str:
    """Returns the dotted path in the text by which a graph names a module.

    Example:
        >>> parse_source("L['self']._modules['blocks']._modules['0'].attn")
        'blocks.0.attn'
    """
    _, _, rest = source.partition("]")
    parts = ["".join(match) for match in _ACCESS.findall(rest)]
    return ".".join(part for part in parts if part not in _NOISE)
