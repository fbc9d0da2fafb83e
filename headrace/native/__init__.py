"""The native library: C++ for CPUs, loaded with ctypes. Where it is not there, who asks is told why."""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from pathlib import Path

#: in a checkout: what the library is made from
SOURCES = Path(__file__).parents[2] / "cpp" / "src"

#: another library than the one beside this file, as one with sanitizers
LIBRARY_VARIABLE = "HEADRACE_NATIVE_LIBRARY"


class NativeLibraryError(Exception):
    """The library is not there, or cannot be loaded here; the text says why, as one clause."""


@functools.cache
def library() -> ctypes.CDLL:
    """The library. Raises NativeLibraryError."""
    other = os.environ.get(LIBRARY_VARIABLE)
    path = Path(other or Path(__file__).with_name("libheadrace.so"))
    if not path.exists():
        raise NativeLibraryError(f"{LIBRARY_VARIABLE}={other} names no file" if other else f"{path.name} was not built: {_why_unbuilt()}")
    try:
        loaded = ctypes.CDLL(str(path))
        interface = loaded.headrace_interface
        interface.restype = ctypes.c_uint32
        loaded.headrace_instruction_sets.restype = ctypes.c_char_p
        loaded.headrace_instruction_set.restype = ctypes.c_char_p
        loaded.headrace_error.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{path.name} cannot be loaded: {error}") from None
    if not other and SOURCES.is_dir() and interface() != _interface():
        raise NativeLibraryError(f"{path.name} was made from other headers than those in {SOURCES}: python cpp/build.py makes it anew")
    return loaded


def _interface() -> int:
    """Of the headers, whose structures this package has too; ``cpp/build.py`` gives it to the library."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h"))))


def _why_unbuilt() -> str:
    """What ``setup.py`` has written in the place of the library."""
    try:
        return Path(__file__).with_name("unbuilt.txt").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return "in a checkout, python cpp/build.py does that"


def instruction_sets() -> list[str]:
    """Those that this machine can run the kernels of, best first. Raises NativeLibraryError."""
    names: bytes = library().headrace_instruction_sets()
    return names.decode().split(",")


def instruction_set() -> str:
    """The one in use: the best, or the one that the environment variable ``HEADRACE_INSTRUCTION_SET`` names.

    Raises NativeLibraryError, also where that variable names one that this machine has not.
    """
    name: bytes | None = library().headrace_instruction_set()
    if name is None:
        raise NativeLibraryError(library().headrace_error().decode())
    return name.decode()
