"""``FakeGpu``: NCCL and the CUDA driver in one small library (``fake_gpu.c``), compiled when first asked for."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class Call(NamedTuple):
    name: str
    arguments: tuple[int, ...]


class _Call(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 24), ("arguments", ctypes.c_uint64 * 7))


class FakeGpu:
    """The library, as it is at first. ``path``: what to load in place of libnccl.so.2 and of libcuda.so.1."""

    def __init__(self) -> None:
        self.path = _compiled()
        self._library = ctypes.CDLL(self.path)
        self._library.fake_reset()

    def set(self, name: str, value: int) -> None:
        """One of the integers that begin with fake_."""
        ctypes.c_int.in_dll(self._library, f"fake_{name}").value = value

    def fail(self, name: str, code: int = 3) -> None:
        """From now on this call of NCCL fails."""
        (ctypes.c_char * 24).in_dll(self._library, "fake_failing").value = name.encode()
        self.set("code", code)

    def say(self, text: str) -> None:
        """What ncclGetLastError gives."""
        self._said = ctypes.create_string_buffer(text.encode())
        ctypes.c_void_p.in_dll(self._library, "fake_last_error").value = ctypes.addressof(self._said)

    def current(self) -> int:
        """Index of the calling thread's device."""
        current: int = self._library.fake_current()
        return current

    def calls(self, name: str = "") -> list[Call]:
        """Those of NCCL so far, or those of one function."""
        count = ctypes.c_int.in_dll(self._library, "num_calls").value
        calls: Any = (_Call * 4096).in_dll(self._library, "calls")
        made = [Call(call.name.decode(), tuple(call.arguments)) for call in calls[:count]]
        return [call for call in made if not name or call.name == name]


@functools.cache
def _compiled() -> str:
    """Path of the library; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc, clang) to make the stand-in for NCCL and the CUDA driver with")
    # In the temporary folder of the run, which goes with it.
    path = Path(tempfile.mkdtemp(prefix="gpu"), "fake_gpu.so")
    subprocess.run(
        [compiler, "-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lpthread"],
        check=True,
        timeout=50,
    )
    return str(path)
