"""Sessions of onnxruntime on CPU: how they are made, and how a graph is run over some rows of the KV buffers, which it updates in place.

Import this module late: importing it imports onnxruntime.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from headrace.checkpoint import ModelConfig
from headrace.engine.build.graph import RankGraph
from headrace.engine.build.spec import HIDDEN_OUT, LOGITS, POSITION_IDS, GraphSpec, past, present
from headrace.engine.runners.kv_rows import KVRows
from headrace.engine.runners.onnx_collective import library
from headrace.errors import ModelError

Array = npt.NDArray[Any]

#: the first whose attention takes several sequences with a past and several new tokens each
OLDEST = (1, 32)

#: microseconds that a thread looks for the next piece of a step before it sleeps
SPIN = 50

#: most bindings that are kept: one for each place and number of rows that a step has run over
MAX_BINDINGS = 64


def open_graph(graph: RankGraph, num_threads: int) -> ort.InferenceSession:
    """A session over a graph that is in memory, whose weights are read now. Raises ModelError if onnxruntime refuses it."""
    options = _options(graph.spec, num_threads)
    # As the file of weights that it could be: of such a one onnxruntime keeps what it has made of the weights for its products, and these
    # alone, where single values would stay beside that as long as the session.
    file = np.empty(max(info.offset + info.nbytes for info in graph.weights.values()), np.uint8)
    for name, array in graph.arrays():
        info = graph.weights[name]
        file[info.offset : info.offset + info.nbytes] = array.reshape(-1).view(np.uint8)
    options.add_external_initializers_from_files_in_memory([graph.location], [file], [file.nbytes])
    return _open(graph.model.SerializeToString(), options, "the graph of this model")


def open_file(path: Path, spec: GraphSpec, num_threads: int) -> ort.InferenceSession:
    """A session over the graph in a file. Raises ModelError if onnxruntime refuses it."""
    return _open(str(path), _options(spec, num_threads), str(path))


def check_version(version: str = ort.__version__) -> None:
    """Raise ModelError for a version that lacks operators of the graphs."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ModelError(
            f"onnxruntime {version} is too old: graphs need {OLDEST[0]}.{OLDEST[1]} or later: pip install --upgrade onnxruntime"
        )


def _options(spec: GraphSpec, num_threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Between two pieces of a step a thread looks for the next one a moment before it sleeps: to be woken takes longer than many a piece.
    # Between steps it sleeps at once, so an idle world is idle; and it never looks for long, or it would have the core of the one that it
    # waits for where others need the cores too. docs/performance.md has what that costs and brings.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Warnings tell of nodes that were merged and weights that were not needed.
    options.log_severity_level = 3
    if spec.tensor_parallel_size > 1:
        options.register_custom_ops_library(library())
    return options


def _open(model: bytes | str, options: ort.SessionOptions, what: str) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # Its errors have no common class but that.
        raise ModelError(f"onnxruntime {ort.__version__} cannot run {what}: {error}") from error


class _Bound:
    """Inputs and outputs of runs over the same rows; buffers of the same shape stay."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._inputs: dict[str, Array] = {}

    def bind_rows(self, name: str, rows: Array, output: bool) -> None:
        bind = self._binding.bind_output if output else self._binding.bind_input
        bind(name, "cpu", 0, rows.dtype.type, rows.shape, rows.ctypes.data)

    def run(self, inputs: Mapping[str, Array], name: str, output: Array) -> None:
        for key, array in inputs.items():
            kept = self._inputs.get(key)
            if kept is not None and kept.shape == array.shape:
                kept[...] = array
            else:
                self._inputs[key] = kept = np.array(array, order="C")
                self._binding.bind_input(key, "cpu", 0, kept.dtype.type, kept.shape, kept.ctypes.data)
        self._binding.bind_output(name, "cpu", 0, output.dtype.type, output.shape, output.ctypes.data)
        self._session.run_with_iobinding(self._binding)


def _check(session: ort.InferenceSession, spec: GraphSpec, config: ModelConfig, cache: KVRows) -> None:
    values = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
    wanted = {*spec.inputs(config), *spec.outputs(config)}
    if values.keys() != wanted:
        odd = [*(f"{name} is missing" for name in wanted - values.keys()), *(f"{name} is strange" for name in values.keys() - wanted)]
        raise ModelError(f"the graph has other inputs and outputs than this rank's: {', '.join(sorted(odd))}; build the engine again")
    row = list(cache.buffers.shape[2:])
    for name in (name for layer in spec.layers(config) for name in (*past(layer), *present(layer))):
        if values[name].shape[1:] != row:
            raise ModelError(
                f"{name} has rows of shape {values[name].shape[1:]} in the graph, and this rank's have {row}; build the engine again"
            )


class RankSession:
    """A graph of one rank over its rows."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, config: ModelConfig, cache: KVRows) -> None:
        """Raises ModelError if the graph is not the one that ``spec`` describes: in a step that would be the end of the world."""
        _check(session, spec, config, cache)
        self._session = session
        self._cache = cache
        self._layers = spec.layers(config)
        self._output = LOGITS if spec.is_last else HIDDEN_OUT
        # By first row and number of rows, the latest used last.
        self._bound: OrderedDict[tuple[int, int], _Bound] = OrderedDict()

    def run(self, first: int, inputs: Mapping[str, Array], output: Array) -> None:
        """Run over rows ``first`` and following, as many as the batch of ``inputs``. ``output``: float32, written to."""
        key = first, len(inputs[POSITION_IDS])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(*key)
            if len(self._bound) > MAX_BINDINGS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        bound.run(inputs, self._output, output)

    def _bind(self, first: int, count: int) -> _Bound:
        """The same buffers as what the graph reads and what it writes: so it writes in place, and copies nothing."""
        bound = _Bound(self._session)
        for place, layer in enumerate(self._layers):
            for half, names in enumerate(zip(past(layer), present(layer), strict=True)):
                rows = self._cache.buffers[2 * place + half, first : first + count]
                bound.bind_rows(names[0], rows, output=False)
                bound.bind_rows(names[1], rows, output=True)
        return bound
