"""headrace: LLM inference behind a Python API, run by an MPI world of workers.

Importing it costs milliseconds: a public name loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headrace.version import __version__

#: public name -> module that defines it
_HOMES = {
    "LLM": "headrace.llm",
    "SamplingParams": "headrace.params",
    "LoraRequest": "headrace.lora",
    "GuidedDecodingParams": "headrace.params",
    "RequestOutput": "headrace.outputs",
    "CompletionOutput": "headrace.outputs",
    "HeadraceError": "headrace.errors",
    "RequestError": "headrace.errors",
    "QueueFullError": "headrace.errors",
    "ClosedError": "headrace.errors",
    "ModelError": "headrace.errors",
    "EngineDeadError": "headrace.errors",
    "StartupError": "headrace.errors",
    "launch": "headrace.executor.launchers.forms",
}

# Spelled out, not built from _HOMES: type checkers and editors read it.
__all__ = [
    "LLM",
    "ClosedError",
    "CompletionOutput",
    "EngineDeadError",
    "GuidedDecodingParams",
    "HeadraceError",
    "LoraRequest",
    "ModelError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StartupError",
    "__version__",
    "launch",
]

if TYPE_CHECKING:
    from headrace.errors import (
        ClosedError,
        EngineDeadError,
        HeadraceError,
        ModelError,
        QueueFullError,
        RequestError,
        StartupError,
    )
    from headrace.executor.launchers.forms import launch
    from headrace.llm import LLM
    from headrace.lora import LoraRequest
    from headrace.outputs import CompletionOutput, RequestOutput
    from headrace.params import GuidedDecodingParams, SamplingParams


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # later accesses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
