"""One rank's share of a decoder in the native library, and its steps (``cpp/src/decoder.h``, whose structs these mirror)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.native import NativeLibraryError, library
from headrace.native.attention import KVLayer
from headrace.native.linear import Matrix, MatrixStructure
from headrace.native.pool import Pool

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

#: of enums of C++
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
#: of a row, for the greatest are kept in order one by one (``kMostCandidates``)
MAX_CANDIDATES = 128
#: parts of a step, by their number
PHASES = ("copy", "embed", "norm", "qkv", "store", "attend", "output", "gate_up", "down", "head")


class Linear(Structure):
    """One to three matrices that read the same rows and write side by side; ``bias``: [rows of all], or null."""

    _fields_ = (("count", c_int64), ("parts", MatrixStructure * 3), ("bias", c_void_p))


class Layer(Structure):
    """One layer; addresses that it lacks are null."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", Linear),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", Linear),
        ("post_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", Linear),
        ("down", Linear),
        ("post_mlp_norm", c_void_p),
        ("cache", KVLayer),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("rotation", c_int64),
    )


class Rotation(Structure):
    """Cosine and sine of each position and pair: [max_seq_len, pairs]."""

    _fields_ = (("cosine", c_void_p), ("sine", c_void_p))


class DecoderSpec(Structure):
    """All that a decoder is made of."""

    _fields_ = (
        ("hidden", c_int64),
        ("head_dim", c_int64),
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("group", c_int64),
        ("first_slot", c_int64),
        ("vocabulary", c_int64),
        ("first_token", c_int64),
        ("pairs", c_int64),
        ("max_seq_len", c_int64),
        ("eps", c_float),
        ("embedding_scale", c_float),
        ("final_softcap", c_float),
        ("activation", c_int32),
        ("rotations", Rotation * 2),
        ("embedding", MatrixStructure),
        ("final_norm", c_void_p),
        ("head", MatrixStructure),
        ("num_layers", c_int64),
        ("layers", POINTER(Layer)),
        ("sum", c_void_p),
        ("sum_context", c_void_p),
    )


class _Plan(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("num_tokens", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("num_sequences", c_int64),
        ("tables", c_void_p),
        ("num_table_entries", c_int64),
        ("samples", c_void_p),
        ("num_samples", c_int64),
        ("copies", c_void_p),
        ("num_copies", c_int64),
        ("candidates", c_void_p),
    )


class _Moment(Structure):
    _fields_ = (("begin", c_int64), ("end", c_int64), ("layer", c_int32), ("phase", c_int32))


class Moment(NamedTuple):
    """When a part of a step ran, in nanoseconds by time.time_ns(). ``layer``: in this stage; -1: none."""

    phase: str
    layer: int
    begin: int
    end: int


class Decoder:
    """Over memory that others hold, the pool's threads included: they must outlive it."""

    def __init__(self, spec: DecoderSpec, pool: Pool, instruction_set: str | None = None) -> None:
        """``instruction_set``: None: the one in use. Raises NativeLibraryError for a specification that contradicts itself."""
        self._functions = _functions()
        name = None if instruction_set is None else instruction_set.encode()
        self._handle: int | None = self._functions.headrace_decoder_create(byref(spec), ctypes.sizeof(spec), pool.handle, name)
        if not self._handle:
            raise NativeLibraryError(self._functions.headrace_error().decode())
        self._moments: Any = None

    def step(
        self,
        tokens: Int32,
        starts: Int32,
        lengths: Int32,
        tables: Int32,
        samples: Int32,
        copies: Int32,
        candidates: Int32,
        x: Float32 | None,
        out: Float32,
        best: Float32 | None,
    ) -> None:
        """Run a step; the arrays are those of a ``StepPlan``, C-contiguous.

        Args:
            tokens, starts, lengths, tables, samples, copies, candidates: see ``StepPlan``.
            x: [T, hidden], the residual stream behind the stage before; None in the first.
            out: in the last stage logits [samples that want no candidates, rows of the head], else [T, hidden].
            best: in the last stage, if any do, [samples that do, the most that one of them wants, 2]: logits, and as int32 token ids.

        Raises RuntimeError for a plan that is not possible, before anything is computed, and where ranks could not sum.
        """
        plan = _Plan(
            _address(tokens, np.int32),
            tokens.size,
            _address(starts, np.int32),
            _address(lengths, np.int32),
            min(starts.size, lengths.size),
            _address(tables, np.int32),
            tables.size,
            _address(samples, np.int32),
            samples.size,
            _address(copies, np.int32),
            copies.size // 3,
            _address(candidates, np.int32) if candidates.size else None,
        )
        if candidates.size not in (0, samples.size):
            raise ValueError(f"candidates of {candidates.size} rows for {samples.size} samples")
        found = None if best is None else _address(best, np.float32)
        rows = None if x is None else _address(x, np.float32)
        if not self._functions.headrace_decoder_step(self._handle, byref(plan), rows, _address(out, np.float32), found):
            raise RuntimeError(self._functions.headrace_error().decode())

    def record(self, capacity: int) -> None:
        """From now on each step leaves up to so many moments; 0: it leaves none."""
        self._moments = (_Moment * capacity)() if capacity else None
        self._functions.headrace_decoder_record(self._handle, self._moments, capacity)

    def recorded(self) -> list[Moment]:
        """Of the last step, in their order."""
        if self._moments is None:
            return []
        count = self._functions.headrace_decoder_recorded(self._handle)
        return [Moment(PHASES[each.phase], each.layer, each.begin, each.end) for each in self._moments[:count]]

    def close(self) -> None:
        """Give its scratch memory back. May be called again."""
        handle, self._handle = self._handle, None
        self._functions.headrace_decoder_destroy(handle)


def address(array: npt.NDArray[Any]) -> int:
    """Of an array's first number, for a field of a structure; the array must outlive it."""
    if not array.flags.c_contiguous:
        raise ValueError("the library reads C-contiguous arrays only")
    return array.ctypes.data


def linear(parts: Sequence[Matrix], bias: Float32 | None = None) -> Linear:
    """``parts`` side by side; they and ``bias``, [rows of all], must outlive it."""
    return Linear(len(parts), (MatrixStructure * 3)(*(part.structure() for part in parts)), None if bias is None else address(bias))


def _address(array: npt.NDArray[Any], dtype: type[np.generic]) -> int:
    if array.dtype != dtype:
        raise ValueError(f"the library reads {np.dtype(dtype)} here, not {array.dtype}")
    return address(array)


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    functions.headrace_decoder_create.argtypes = [POINTER(DecoderSpec), c_int64, c_void_p, ctypes.c_char_p]
    functions.headrace_decoder_create.restype = c_void_p
    functions.headrace_decoder_destroy.argtypes = [c_void_p]
    functions.headrace_decoder_destroy.restype = None
    functions.headrace_decoder_step.argtypes = [c_void_p, POINTER(_Plan), c_void_p, c_void_p, c_void_p]
    functions.headrace_decoder_record.argtypes = [c_void_p, c_void_p, c_int64]
    functions.headrace_decoder_record.restype = None
    functions.headrace_decoder_recorded.argtypes = [c_void_p]
    functions.headrace_decoder_recorded.restype = c_int64
    return functions
