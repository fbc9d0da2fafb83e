"""TensorRT's Python package, chosen by the name of a backend, imported late; and its messages in our log.

Two packages have the same interface: ``tensorrt``, whose plans are built on the kind of GPU that they run on, and ``tensorrt_rtx``, which
is TensorRT for RTX: it builds for consumer GPUs, on any machine.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import deque
from typing import Any, NamedTuple

from headrace.errors import ModelError

log = logging.getLogger("headrace.tensorrt")

#: compute capability, major and minor number
Capability = tuple[int, int]


class Library(NamedTuple):
    """A package with TensorRT's interface.

    Attributes:
        module: what is imported.
        oldest: of its versions that have all that is used here.
        install: what to tell who lacks it.
    """

    module: str
    oldest: tuple[int, int]
    install: str


LIBRARIES = {
    "tensorrt": Library("tensorrt", (11, 0), 'pip install "headrace[tensorrt]"'),
    # The oldest that was tried.
    "tensorrt-rtx": Library("tensorrt_rtx", (1, 7), 'pip install "headrace[tensorrt-rtx]"'),
}

#: what networks and contexts here cannot do without; missing in versions before ``Library.oldest``
NEEDED = ("IAttentionInputLayer", "IKVCacheUpdateLayer", "IDistCollectiveLayer")

#: below it there is no bfloat16, and no sum over ranks inside an engine
OLDEST_CAPABILITY = (8, 0)


def load_library(backend: str) -> Any:
    """The package of this backend, imported. Raises ModelError that says what to install, or which versions fit."""
    library = LIBRARIES.get(backend)
    if library is None:
        raise ModelError(f"backend {backend!r} is none of {', '.join(LIBRARIES)}")
    try:
        module = importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        if error.name != library.module:
            raise ModelError(f"{library.module} is installed without what it needs: {error}; {library.install}") from error
        raise ModelError(f"{backend!r} needs the package {library.module}, which is not installed: {library.install}") from None
    except (ImportError, OSError) as error:
        # Its bindings are installed and its shared libraries are not, or they do not fit this system.
        raise ModelError(f"{library.module} is installed and cannot be loaded: {error}; {library.install}") from error
    version = version_of(module)
    if version < library.oldest:
        oldest = ".".join(map(str, library.oldest))
        raise ModelError(f"{library.module} {module.__version__} is too old: {oldest} is the oldest that fits; {library.install}")
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ModelError(f"{library.module} {module.__version__} lacks {', '.join(missing)}; {library.install}")
    return module


def version_of(module: Any) -> tuple[int, int]:
    """Major and minor number. Raises ModelError if it has none that can be read."""
    try:
        major, minor = str(module.__version__).split(".")[:2]
        return int(major), int(minor)
    except (AttributeError, ValueError):
        raise ModelError(f"{module.__name__} has no version that can be read: {getattr(module, '__version__', None)!r}") from None


@functools.cache
def logger_of(trt: Any) -> Any:
    """An ``ILogger`` that writes into the log, and remembers what went wrong: ``TensorRTLogger``.

    Made here since its base class is only known when the package is; once, since TensorRT stays with the first one that it gets.
    """
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
        severity.VERBOSE: logging.DEBUG,
    }

    class TensorRTLogger(trt.ILogger):  # type: ignore[misc]  # known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._faults: deque[str] = deque(maxlen=8)

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level >= logging.ERROR:
                self._faults.append(msg.strip())
            # That int64 inputs are bound as int64 is told of every one of them.
            elif msg.rstrip().endswith("has Int64 binding."):
                level = logging.DEBUG
            log.log(level, "%s", msg)

        def take_faults(self) -> str:
            """What it has said of errors since the last call, in one text; for the exception that follows."""
            faults, said = "; ".join(self._faults), bool(self._faults)
            self._faults.clear()
            return faults if said else "it does not say why"

    return TensorRTLogger()


def parse_capability(text: str) -> Capability:
    """``"8.6"`` as numbers. Raises ModelError for what is none, and for one that is too old."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ModelError(f"{text!r} is no compute capability: it is two numbers, as 8.6")
    capability = int(major), int(minor)
    if capability < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        raise ModelError(f"compute capability {text} is too old: engines need {oldest} at least")
    return capability


def targets(trt: Any) -> dict[Capability, Any]:
    """The compute capabilities that TensorRT for RTX builds for, and what it calls them."""
    found = {}
    for name, member in trt.ComputeCapability.__members__.items():
        if name.startswith("SM"):
            capability = divmod(int(name.removeprefix("SM")), 10)
            if capability >= OLDEST_CAPABILITY:
                found[capability] = member
    return found
