"""What halfstep tells `torch.compile`, and what it asks of it."""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx import traceback as fx_traceback

_ACCESS = re.compile(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]")
_NOISE = {"_modules", "_orig_mod", "_parameters", "_buffers"}


def in_graph(function: Any) -> Any:
    """Marks a function that a compiled graph calls as it is and must not drop.

    It runs while the graph is traced, so what it switches on is on for the operations that follow.
    """
    torch.compiler.allow_in_graph(function)
    return torch.fx.node.has_side_effect(function)


def module_path() -> str:
    """Returns the path of the module being traced, relative to what is compiled, or an empty text.

    While a graph is captured the translator knows the module; while it is lowered the node does.
    """
    if not torch.compiler.is_compiling():
        return ""
    translator = _translator()
    stack = translator.nn_module_stack if translator else None
    stack = stack or fx_traceback.get_current_meta().get("nn_module_stack") or {}
    sources = [source for source, *_ in stack.values()]
    return parse_source(sources[-1]) if sources else ""


def when_abandoned(callback: Callable[[], None]) -> None:
    """Calls back when the capture of a graph ends, if one is going on.

    A capture that is given up half-way leaves behind what functions in the graph switched on.
    """
    translator = _translator()
    if translator is not None:
        translator.output.add_cleanup_hook(callback)


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
