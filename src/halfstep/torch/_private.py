"""Every private name of PyTorch that halfstep uses, checked once at import.

The rules run as kernels on a dispatch key of their own, `AutocastPrivateUse1`, the highest of the
Autocast keys and the only one without a device of its own. A thread sees that key only while it is
inside a halfstep region, so the kernels are invisible to everybody else, `torch.autocast` included.
"""

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from halfstep.errors import UnsupportedVersionError

_NEEDED = (
    "DispatchKey",
    "DispatchKeySet",
    "_ExcludeDispatchKeyGuard",
    "_current_graph_task_id",
    "_autocast_supported_devices",
    "_current_autograd_node",
    "_dispatch_has_kernel",
    "_dispatch_has_kernel_for_dispatch_key",
    "_dispatch_keyset_full_after",
    "_dispatch_tls_is_dispatch_key_excluded",
    "_dispatch_tls_set_dispatch_key_excluded",
    "_dispatch_tls_set_dispatch_key_included",
    "_get_privateuse1_backend_name",
    "_autograd._get_sequence_nr",
    "TensorBase._is_zerotensor",
)
SUPPORTED = "2.11 or later"


def _has(name: str) -> bool:
    """Returns whether torch._C has something by a dotted name."""
    try:
        operator.attrgetter(name)(torch._C)
    except AttributeError:
        return False
    return True


_missing = [name for name in _NEEDED if not _has(name)]
if _missing:
    raise UnsupportedVersionError(
        f"halfstep.torch needs PyTorch {SUPPORTED}, got {torch.__version__}, which lacks "
        f"torch._C.{_missing[0]}. Install a supported PyTorch, or a newer halfstep."
    )

# Whether a tracer can go through the attributes of a module, as a region must.
SEES_ATTRIBUTES = torch.__version__ >= "2.13"  # a TorchVersion, which compares numbers

KEY = "AutocastPrivateUse1"
# By its name, what is said of it hundreds of times a second would take ten times as long.
_KEY = getattr(torch._C.DispatchKey, KEY)
_DEVICE_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
    "hpu": "AutocastHPU",
    "ipu": "AutocastIPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "xla": "AutocastXLA",
}


def _all_autocast_keys() -> Any:
    keyset = torch._C.DispatchKeySet(_KEY)
    for name in _DEVICE_KEYS.values():
        if hasattr(torch._C.DispatchKey, name):
            keyset = keyset.add(getattr(torch._C.DispatchKey, name))
    return keyset


_ALL = _all_autocast_keys()
_OURS = torch._C.DispatchKeySet(_KEY)
_below = torch._C._dispatch_keyset_full_after
# The lowest of the Autocast keys, and the highest, which is ours.
BELOW_ALL_AUTOCAST = _below(torch._C.DispatchKey.AutocastCPU)
BELOW_OURS = _below(_KEY)
_Guard = torch._C._ExcludeDispatchKeyGuard


def autocast_devices() -> list[str]:
    """Returns the types of device that PyTorch can autocast."""
    return torch._C._autocast_supported_devices()


def without_autocast() -> Any:
    """Returns a guard in which no autocast kernel runs, neither PyTorch's nor ours."""
    return _Guard(_ALL)


def without_ours() -> Any:
    """Returns a guard in which no kernel of ours runs."""
    return _Guard(_OURS)


def show_region(visible: bool) -> None:
    """Lets this thread's operations reach the kernels of the rules, or hides them again."""
    if visible:
        _open_key()
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, visible)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not visible)


def is_dispatched(operation: str) -> bool:
    """Returns whether the dispatcher knows `aten::name.overload`; TorchScript knows more."""
    return torch._C._dispatch_has_kernel(operation)


def has_native_kernel(operation: str, device_type: str) -> bool:
    """Returns whether PyTorch's own autocast has a kernel for `aten::name.overload` there."""
    key = _DEVICE_KEYS.get(device_type)
    if key is None or not hasattr(torch._C.DispatchKey, key):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation, key)


def region_is_covered() -> bool:
    """Returns whether the kernels of the rules are hidden for a while."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)


def cover_region(covered: bool) -> None:
    """Hides the kernels of the rules for a while, or uncovers what PyTorch has hidden."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, covered)


def never_compile(function: Any, *, callees: bool = False) -> None:
    """Keeps `torch.compile` from compiling a function, and what it calls, as frames of their own.

    A function that a compiled one calls directly is still traced.

    Args:
        function: The function.
        callees: Whether what it calls may be compiled.
    """
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, default if callees else skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


def break_graphs(function: Any, *, callees: bool = False, reason: str | None = None) -> None:
    """Makes `torch.compile` break its graph where a function is called, and not compile it.

    Args:
        function: The function.
        callees: Whether what it calls may be compiled.
        reason: What somebody who asked for a graph without breaks is told.
    """
    never_compile(function, callees=callees)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


# Lets a tensor be written to without those who have saved it taking notice.
preserved_version = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


def with_own_code(function: Any) -> Any:
    """Returns the same function with code of its own, by which compiled graphs are kept."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__)


# Sets what compiles the frames that this thread is going to run, None for nothing, and returns what
# did so. Not a context manager, whose own frames would be among them.
set_frame_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def install(operation: str, kernel: Callable[..., Any]) -> torch.library.Library:
    """Installs a kernel, called as `kernel(keyset, *args, **kwargs)`, for one overload.

    Returns:
        What keeps it installed, for `uninstall`.
    """
    _open_key()
    namespace, _, name = operation.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(name.removesuffix(".default"), kernel, KEY, with_keyset=True)
    return library


def uninstall(library: torch.library.Library) -> None:
    """Removes a kernel."""
    library._destroy()


@functools.cache
def _open_key() -> torch.library.Library:
    """Makes operations without a kernel of ours fall through the key, once per process."""
    backend = torch._C._get_privateuse1_backend_name()
    if backend != "privateuseone":
        raise UnsupportedVersionError(
            f"halfstep.torch needs the dispatch key {KEY} for itself, but the backend {backend!r} "
            "has taken it. Use torch.autocast on that backend."
        )
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, KEY)
    return library


def backward_pass() -> int:
    """Returns the number of the backward pass that this thread works on, -1 for none."""
    return torch._C._current_graph_task_id()


def unwatched() -> Any:
    """Returns a context in which no dispatch mode sees what runs."""
    return torch._C._DisableTorchDispatch()


def in_backward() -> bool:
    """Returns whether this thread works on a backward pass."""
    return backward_pass() != -1


def running_node() -> Any:
    """Returns the node whose gradients this thread computes, None for none."""
    return torch._C._current_autograd_node()


def newest_node() -> int:
    """Returns the number of the node that this thread made last, which is that of its operation."""
    return torch._C._autograd._get_sequence_nr() - 1


def number_of(node: Any) -> int:
    """Returns the number of a node, which counts those that its thread made."""
    return int(node._sequence_nr())


def accumulates(leaf: Any) -> bool:
    """Returns whether the present backward pass adds to the gradient of the leaf with this node."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it does not answer this in autograd.grad, which adds to none
        return False


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Calls back when the backward pass of this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers below the wrappers of torch.func, of a whole batch at once."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_old_batch(tensor: torch.Tensor) -> bool:
    """Returns whether it is a batch of `torch.autograd`, most operations on which are missing."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def is_unallocated(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor stands for zeros that nobody has stored, as tangents may."""
    return tensor._is_zerotensor()


def in_transform() -> bool:
    """Returns whether a transform of torch.func is going on in this thread."""
    return torch._C._functorch.maybe_current_level() is not None


def averages_lists(example: torch.Tensor) -> bool:
    """Returns whether PyTorch averages a list of such tensors, not one after the other."""
    # It would do so for integers too, and fail.
    of_numbers = example.is_floating_point() or example.is_complex()
    return of_numbers and example.device.type in _get_foreach_kernels_supported_devices()


# Replaces each parameter, gradient and buffer by what a function makes of it, as `module.to` does.
def convert(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Applies a function to each parameter and buffer of a module, whatever its class overrides."""
    torch.nn.Module._apply(module, function)
