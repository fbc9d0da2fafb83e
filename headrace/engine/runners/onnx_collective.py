"""``DistCollective`` on CPU: the sum over ranks as an operator of onnxruntime, made in Python by the collectives of the world.

onnxruntime-extensions keeps one registry for the whole process, so the operator is declared once and asks the thread that runs it whose
collectives those are: a session runs its operators in the thread that calls it, and ranks that are threads of one process do not mix.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from typing import Any

import numpy as np

from headrace.engine.base import Collectives, Float32
from headrace.engine.build.spec import COLLECTIVE
from headrace.errors import ModelError


class _Step(threading.local):
    """What this thread runs a graph with, and what went wrong in it."""

    collectives: Collectives | None = None
    error: BaseException | None = None


_step = _Step()


@contextlib.contextmanager
def collectives_of(collectives: Collectives) -> Iterator[None]:
    """Graphs that this thread runs inside sum over these ranks. Raises at the end what a sum has raised.

    onnxruntime would make a text of an exception that passes through it, or end the process. After the first one no further sum is tried:
    the others may never come to it.
    """
    _step.collectives, _step.error = collectives, None
    try:
        yield
    finally:
        error = _step.error
        _step.collectives = _step.error = None
        if error is not None:
            raise error


def all_reduce(partial: Float32) -> Float32:
    """The operator: the sum over the ranks of ``collectives_of``; NaN outside of it. ``partial``, nobody else's, may be used for it."""
    total: Float32 = np.require(partial, np.float32, ["C", "W"])
    collectives = _step.collectives
    if collectives is None:
        # An exception here would end the process, and what is not summed must not pass for a result.
        total.fill(np.nan)
    elif _step.error is None:
        try:
            collectives.all_reduce(total)
        except BaseException as error:
            _step.error = error
    return total


_lock = threading.Lock()


def library() -> str:
    """Path of the library that a session must be given for the operator. Raises ModelError if onnxruntime-extensions is not installed."""
    # An operator that two threads declare is there twice.
    with _lock:
        native = _native()
        op_id = _declare()
        # Each time, for the package puts its own way back in the place of this one when somebody imports it.
        native.PyCustomOpDef.install_hooker(functools.partial(_invoke, op_id))
        path: str = native.__file__
        return path


@functools.cache
def _native() -> Any:
    """The package's own library, alone: the package imports transformers and PyTorch where these are installed, which takes seconds."""
    package = importlib.util.find_spec("onnxruntime_extensions")
    name = "onnxruntime_extensions._extensions_pydll"
    if name in sys.modules:
        return sys.modules[name]
    spec = None if package is None else PathFinder.find_spec(name, package.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise ModelError(
            'tensor parallelism with onnxruntime needs onnxruntime-extensions, which is not installed: pip install "headrace[onnx]"'
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Who imports the package later gets the same one.
    sys.modules[name] = module
    return module


@functools.cache
def _declare() -> int:
    """Declare the operator, once, and say by which number it is called."""
    native = _native()
    integer, text = native.PyCustomOpDef.dt_int64, native.PyCustomOpDef.dt_string
    definition = native.PyCustomOpDef()
    definition.op_type = COLLECTIVE
    definition.obj_id = op_id = id(definition)
    definition.input_types = definition.output_types = [native.PyCustomOpDef.dt_float]
    definition.attrs = {"collective_operation": text, "reduce_op": text, "root": integer, "nb_rank": integer, "group_size": integer}
    native.add_custom_op(definition)
    # The library keeps a pointer to it.
    _declared.append(definition)
    return op_id


_declared: list[Any] = []


def _invoke(own: int, op_id: int, feed: Sequence[Any], attributes: Any) -> Any:
    """What the library calls for every operator in Python: ``own`` is that of this module, others are the package's.

    The package itself would make a list of numbers of every result: 7 ms for 32 rows of 576, where an array takes 10 us.
    """
    if op_id == own:
        total = all_reduce(feed[0])
        return op_id, total.shape, total.reshape(-1)
    return sys.modules["onnxruntime_extensions._ocos"]._on_pyop_invocation(op_id, feed, attributes)
