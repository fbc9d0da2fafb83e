"""``DistCollective`` on CPU: the sum over ranks as an operator of onnxruntime, made in Python by the collectives of the world.

onnxruntime-extensions keeps one registry for the whole process, so the operator is declared once and asks the thread that runs it whose
collectives those are: a session runs its operators in the thread that calls it, and ranks that are threads of one process do not mix.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
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
    """The operator: the sum over the ranks of ``collectives_of``, in an array of its own."""
    total: Float32 = np.array(partial, np.float32, order="C")
    if _step.error is None:
        try:
            if _step.collectives is None:
                raise RuntimeError("a graph with sums over ranks runs outside of collectives_of")
            _step.collectives.all_reduce(total)
        except BaseException as error:
            _step.error = error
    return total


_lock = threading.Lock()


def library() -> str:
    """Path of the library that a session must be given for the operator. Raises ModelError if onnxruntime-extensions is not installed."""
    # An operator that two threads declare is there twice.
    with _lock:
        return _declare()


@contextlib.contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Inside, packages that are not imported yet cannot be; and the environment is put back.

    onnxruntime-extensions imports them if it can, for converters that nobody here asks for: 4 s of a core in every rank, and half a minute
    until four ranks on two cores are ready. It also sets a variable that makes protobuf slow.
    """
    hidden = [name for name in packages if name not in sys.modules]
    variables = dict(os.environ)
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: to import it is an ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]


@functools.cache
def _declare() -> str:
    try:
        with _without("transformers", "torch"):
            from onnxruntime_extensions import PyCustomOpDef, _ocos, get_library_path, onnx_op
    except ImportError as error:
        raise ModelError(
            "tensor parallelism with onnxruntime needs onnxruntime-extensions, "
            f"which cannot be imported ({error}): pip install onnxruntime-extensions"
        ) from None
    integer, text = PyCustomOpDef.dt_int64, PyCustomOpDef.dt_string

    @onnx_op(  # type: ignore[untyped-decorator]
        op_type=COLLECTIVE,
        inputs=[PyCustomOpDef.dt_float],
        outputs=[PyCustomOpDef.dt_float],
        attrs={"collective_operation": text, "reduce_op": text, "root": integer, "nb_rank": integer, "group_size": integer},
    )
    def operator(partial: Float32, **attributes: object) -> Float32:
        return all_reduce(partial)

    # The package's own way back makes a list of numbers of every result: 7 ms for 32 rows of 576, where an array takes 10 us.
    plain = _ocos._on_pyop_invocation

    def invoke(op_id: int, feed: Sequence[Any], attributes: Any) -> Any:
        if op_id != operator._id:
            return plain(op_id, feed, attributes)
        total = all_reduce(feed[0])
        return op_id, total.shape, total.reshape(-1)

    PyCustomOpDef.install_hooker(invoke)
    path: str = get_library_path()
    return path
