"""What Keras computes on, and in which versions."""

import os
from collections.abc import Callable
from importlib import import_module

import keras

from halfstep import __version__
from halfstep.core import Machine, processor
from halfstep.keras._private import jax, tensorflow


def machine() -> Machine:
    """Returns where something is measured.

    Example:
        >>> machine().device
        'keras'
    """
    backend = keras.config.backend()
    found = tuple(f"{name} {version}" for name, version in versions().items())
    named = {**_DEVICES, "torch": _torch_device}[backend]()
    threads = 0 if named else _THREADS.get(backend, _cores)()
    return Machine("keras", named or processor(), threads, (f"halfstep {__version__}", *found))


def device() -> str:
    """Returns the name of the accelerator that the backend tells of, "" where it does not.

    Example:
        >>> isinstance(device(), str)
        True
    """
    return _DEVICES.get(keras.config.backend(), lambda: "")()


def versions() -> dict[str, str]:
    """Returns the versions of Keras and its backend.

    Example:
        >>> versions()["keras"] == keras.__version__
        True
    """
    backend = keras.config.backend()
    return {"keras": keras.__version__, backend: str(import_module(backend).__version__)}


def _cores() -> int:
    return os.cpu_count() or 1


def _torch_threads() -> int:
    return int(import_module("torch").get_num_threads())


def _torch_device() -> str:
    cuda = import_module("torch").cuda
    return str(cuda.get_device_name()) if cuda.is_available() else ""


def _jax_device() -> str:
    first = jax.local_devices()[0]
    return "" if first.platform == "cpu" else str(first.device_kind)


def _tensorflow_device() -> str:
    gpus = tensorflow.config.list_physical_devices("GPU")
    details = [tensorflow.config.experimental.get_device_details(each) for each in gpus[:1]]
    return "".join(str(each.get("device_name", "GPU")) for each in details)


_DEVICES: dict[str, Callable[[], str]] = {"jax": _jax_device, "tensorflow": _tensorflow_device}
_THREADS: dict[str, Callable[[], int]] = {"torch": _torch_threads}
