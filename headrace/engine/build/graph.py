"""An ONNX graph while it is written: nodes, and weights that are read when they are needed and not before.

A model larger than memory can be written: one weight is in memory at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from headrace.engine.base import ProgressHook
from headrace.engine.build.spec import GraphSpec
from headrace.errors import ModelError

Array = npt.NDArray[Any]

OPSET = 24
#: of the first onnx with opset 24; later ones read it too
IR_VERSION = 12
#: pages: what begins at one can be mapped
ALIGNMENT = 4096

#: name -> (what ONNX calls it, what numpy calls it)
TYPES: dict[str, tuple[int, npt.DTypeLike]] = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "int64": (TensorProto.INT64, np.int64),
    "int32": (TensorProto.INT32, np.int32),
    "uint8": (TensorProto.UINT8, np.uint8),
    "int8": (TensorProto.INT8, np.int8),
    "bool": (TensorProto.BOOL, np.bool_),
}


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """A weight's name, type (a key of ``TYPES``), shape, and place in the file of weights, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * np.dtype(TYPES[self.dtype][1]).itemsize


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of a graph: its name in the folder, size in bytes, and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Weights that one call reads together, since they come from the same numbers of the checkpoint."""

    infos: tuple[WeightInfo, ...]
    read: Callable[[], Sequence[Array]]


class RankGraph:
    """A finished graph.

    Attributes:
        spec: which one it is.
        model: its nodes; weights are external: they are in the file that ``save`` writes, or come from ``arrays``.
        weights: name -> what it is, in the order in which they are read.
    """

    def __init__(self, spec: GraphSpec, model: onnx.ModelProto, groups: Sequence[_Group], progress: ProgressHook) -> None:
        self.spec = spec
        self.model = model
        self.weights = {info.name: info for group in groups for info in group.infos}
        self._groups = groups
        self._progress = progress

    @property
    def location(self) -> str:
        """Name of the file of weights that the model refers to."""
        location: str = next(
            entry.value for tensor in self.model.graph.initializer for entry in tensor.external_data if entry.key == "location"
        )
        return location

    @property
    def nbytes(self) -> int:
        """Of all weights together."""
        return sum(info.nbytes for info in self.weights.values())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Name and values of every weight, read one after the other; bfloat16 is that of ``ml_dtypes``. The checkpoint must be open.

        Raises ModelError for a weight with numbers beyond the range of its type.
        """
        done, total = 0, self.nbytes
        self._progress("export", done, total)
        for group in self._groups:
            with np.errstate(over="ignore"):
                arrays = [np.ascontiguousarray(array, TYPES[info.dtype][1]) for info, array in zip(group.infos, group.read(), strict=True)]
            for info, array in zip(group.infos, arrays, strict=True):
                if info.dtype == "float16" and _has_infinity(array):
                    raise ModelError(f"{info.name} has numbers beyond {np.finfo(np.float16).max}, the range of float16: take another dtype")
                if array.shape != info.shape:
                    raise AssertionError(f"{info.name} has the shape {array.shape}, {info.shape} was announced")
                yield info.name, array
                done += info.nbytes
                self._progress("export", done, total)

    def save(self, folder: str | Path, stem: str) -> list[WrittenFile]:
        """Write ``STEM.onnx`` and ``STEM.onnx.data`` into the folder, which exists. Raises OSError. The model refers to them then."""
        folder, data = Path(folder), f"{stem}.onnx.data"
        for tensor in self.model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = data
        return [self._save_weights(folder / data), _save_bytes(folder / f"{stem}.onnx", self.model.SerializeToString(deterministic=True))]

    def _save_weights(self, path: Path) -> WrittenFile:
        digest, size = hashlib.sha256(), 0
        with path.open("wb") as file:
            for name, array in self.arrays():
                padding = bytes(self.weights[name].offset - size)
                # Bytes, since no buffer can be had of bfloat16.
                for piece in (padding, array.reshape(-1).view(np.uint8).data):
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
        return WrittenFile(path.name, size, digest.hexdigest())


def _has_infinity(array: Array) -> bool:
    """Of float16; by its bits, which takes a tenth of the time that its numbers take."""
    return bool(((array.view(np.uint16) & 0x7FFF) == 0x7C00).any())


def _save_bytes(path: Path, content: bytes) -> WrittenFile:
    path.write_bytes(content)
    return WrittenFile(path.name, len(content), hashlib.sha256(content).hexdigest())


class Graph:
    """Nodes in their order. A value is known by its name; its first node has the same name."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._groups: list[_Group] = []
        self._dtypes: dict[str, str] = {}
        self._weights: set[str] = set()
        self._domains: dict[str, int] = {}
        self._size = 0

    def dtype(self, value: str) -> str:
        """Type of a value, a key of ``TYPES``."""
        return self._dtypes[value]

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """An input; names in a shape are sizes that differ from run to run."""
        self._declare(name, dtype)
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype][0], shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int | str]) -> None:
        """Make the value of this name an output."""
        if self._dtypes.get(name) != dtype:
            raise AssertionError(f"{name} is {self._dtypes.get(name)}, not {dtype}")
        self._outputs.append(helper.make_tensor_value_info(name, TYPES[dtype][0], shape))

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        name: str,
        *,
        dtype: str | None = None,
        outputs: Sequence[str] = (),
        domain: str = "",
        shape: Sequence[int | str] | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node and return its first output.

        Args:
            op_type: the operator.
            inputs: values; "" for an optional one that is left out.
            name: of the node, and of its output if it has one.
            dtype: of all outputs; None: that of the first input.
            outputs: names, if not one output that is called like the node.
            domain: of an operator that is not ONNX's.
            shape: of the first output, where nobody can infer it.
            **attributes: of the node; None: left out.
        """
        outputs = list(outputs) or [name]
        dtype = dtype or self._dtypes[inputs[0]]
        for output in outputs:
            if output:
                self._declare(output, dtype)
        if domain:
            self._domains.setdefault(domain, 1)
        given = {key: value for key, value in attributes.items() if value is not None}
        self._nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, domain=domain, **given))
        if shape is not None:
            self._values.append(helper.make_tensor_value_info(outputs[0], TYPES[dtype][0], shape))
        return outputs[0]

    def cast(self, value: str, dtype: str, name: str) -> str:
        """The value as another type; itself if it has it already."""
        if self._dtypes[value] == dtype:
            return value
        return self.node("Cast", [value], name, dtype=dtype, to=TYPES[dtype][0])

    def constant(self, name: str, array: Array) -> str:
        """A small constant that is stored with the nodes; one of the same name is the same one."""
        tensor = helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tobytes(), raw=True)
        if name not in self._constants:
            self._declare(name, next(key for key, (kind, _) in TYPES.items() if kind == tensor.data_type))
            self._constants[name] = tensor
        elif self._constants[name] != tensor:
            raise AssertionError(f"constant {name} has two values")
        return name

    def integers(self, *values: int) -> str:
        """A constant int64 vector, as shapes and axes are."""
        return self.constant("constant/" + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, number: float, dtype: str) -> str:
        """A constant number."""
        return self.constant(f"constant/{dtype}/{number!r}", np.array(number, TYPES[dtype][1]))

    def weight(self, name: str, dtype: str, shape: Sequence[int], read: Callable[[], Array]) -> str:
        """A weight, which ``read`` gives, in any type that can be cast; one that is known by this name is the same one."""
        return self.weights([(name, dtype, shape)], lambda: [read()])[0]

    def weights(self, specs: Sequence[tuple[str, str, Sequence[int]]], read: Callable[[], Sequence[Array]]) -> list[str]:
        """Weights that one call of ``read`` gives together: (name, type, shape) of each."""
        names = [name for name, _, _ in specs]
        known = [name in self._weights for name in names]
        if all(known):
            return names
        if any(known):
            raise AssertionError(f"some of {names} are known and some are not")
        infos = []
        for name, dtype, shape in specs:
            self._declare(name, dtype)
            self._weights.add(name)
            offset = -(-self._size // ALIGNMENT) * ALIGNMENT
            infos.append(WeightInfo(name, dtype, tuple(shape), offset))
            self._size = offset + infos[-1].nbytes
        self._groups.append(_Group(tuple(infos), read))
        return names

    def finish(self, spec: GraphSpec, name: str, progress: ProgressHook) -> RankGraph:
        """The model; nothing may be added any more."""
        initializers = [*self._constants.values(), *(_external(info) for group in self._groups for info in group.infos)]
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, initializers, value_info=self._values)
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, version) for domain, version in self._domains.items())]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="headrace")
        return RankGraph(spec, model, self._groups, progress)

    def _declare(self, name: str, dtype: str) -> None:
        if name in self._dtypes:
            raise AssertionError(f"two values are called {name}")
        self._dtypes[name] = dtype


def _external(info: WeightInfo) -> onnx.TensorProto:
    tensor = TensorProto(name=info.name, data_type=TYPES[info.dtype][0], dims=info.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights"), ("offset", info.offset), ("length", info.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
