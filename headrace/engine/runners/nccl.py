"""Sums over GPUs: a thin binding of NCCL by ctypes, for every runner that has its tensors on CUDA devices.

Only what is used is bound, from the library that pip's nvidia-nccl packages bring or that the system has. It needs no torch, and it can be
called while a CUDA graph is captured. Names and numbers are those of nccl.h, which are stable within NCCL 2.

``python -m headrace.engine.runners.nccl`` prints as JSON what there is of devices, driver and NCCL.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.engine.base import Collectives
from headrace.engine.runners.cuda_driver import CudaDriver, CudaError
from headrace.errors import HeadraceError

log = logging.getLogger("headrace.engine")

LIBRARY = "libnccl.so.2"

#: seconds that ranks wait for one another when the communicator is made; hosts that cannot reach one another are found by it
INIT_TIMEOUT = 300.0
#: Seconds that one wait for the device may take. A dead rank ends the whole MPI job long before; this ends a step whose peer lives and
#: takes no part in it. It is longer than anything that a step does.
STEP_TIMEOUT = 600.0
#: While it waits for the device a rank looks at once, then every POLL seconds, and at the communicator's own errors every ERROR_POLL.
POLL, ERROR_POLL = 20e-6, 0.1

#: name of the capsules that TensorRT takes communicators in; static, since a capsule keeps the pointer to it
_CAPSULE_NAME = b"ncclComm_t"

_SUM = 0  # ncclRedOp_t
_DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}  # ncclDataType_t


class NcclError(HeadraceError):
    """NCCL cannot be found, refused a call, lost a rank, or waited too long for one."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def find_library() -> str:
    """Path of pip's NCCL, else the name by which the system's is found. Nothing is imported for it, torch least of all.

    pip's comes first: torch links that one, and two of them in one process do not share communicators.
    """
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages is not None else ():
        # "nccl" in the wheels of CUDA 12; those of CUDA 13 have begun to share a folder.
        for path in sorted(Path(folder).glob(f"*/lib/{LIBRARY}")):
            return str(path)
    return LIBRARY


class Nccl:
    """The library. Raises NcclError where there is none. Every call gives the GIL back while it runs."""

    def __init__(self, library: str | None = None) -> None:
        path = library or find_library()
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError(
                f"there is no NCCL, which several ranks on CUDA devices need: {error}; pip install nvidia-nccl-cu13 (or -cu12, as the "
                "driver allows)"
            ) from None
        try:
            for name, arguments in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = arguments
        except AttributeError as error:
            raise NcclError(f"{path} is not NCCL 2.13 or later: {error}") from None
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self._library, name).restype = ctypes.c_char_p

    @property
    def version(self) -> str:
        """As "2.27.3"."""
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        # From 2.9 on MAJOR * 10000 + MINOR * 100 + PATCH.
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def call(self, name: str, *arguments: object) -> None:
        """One function of nccl.h. Raises NcclError with NCCL's words."""
        code: int = getattr(self._library, name)(*arguments)
        if code:
            raise NcclError(f"{name}: {self.text(code)}")

    def text(self, code: int) -> str:
        """What a ncclResult_t means, with what NCCL last said of an error."""
        meaning = (self._library.ncclGetErrorString(code) or b"unknown error").decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return f"{meaning} ({code})" + (f": {last}" if last else "")


_OUT, _COMM = ctypes.c_void_p, ctypes.c_void_p
#: argument types; each but the two that give text gives back a ncclResult_t
_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [_OUT],
    "ncclGetUniqueId": [_OUT],
    "ncclCommInitRank": [_OUT, ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclAllReduce": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMM, ctypes.c_void_p],
    "ncclCommGetAsyncError": [_COMM, _OUT],
    "ncclCommDestroy": [_COMM],
    "ncclCommAbort": [_COMM],
    "ncclGetErrorString": [ctypes.c_int],
    "ncclGetLastError": [_COMM],
}


class NcclCommunicator:
    """All ranks of ``collectives``, each with a CUDA device of its own. One thread calls it.

    It outlives whatever has its handle (CUDA graphs, TensorRT's contexts): end those first, then call ``close``.

    Attributes:
        version: of NCCL.
    """

    def __init__(self, collectives: Collectives, device: int, *, nccl: Nccl | None = None, driver: CudaDriver | None = None) -> None:
        """Every rank calls it at the same time. ``device``: index of this rank's, which the calling thread has made current.

        Raises NcclError or CudaError, where a rank does not come within INIT_TIMEOUT, too.
        """
        self._nccl = nccl or Nccl()
        self._comm: ctypes.c_void_p | None = None
        self._where = f"rank {collectives.rank} of {collectives.size}"
        self.version = self._nccl.version
        unique = _UniqueId()
        if collectives.rank == 0:
            self._nccl.call("ncclGetUniqueId", ctypes.byref(unique))
        # As a whole: ``internal`` as an attribute ends at its first zero.
        unique = _UniqueId.from_buffer_copy(collectives.broadcast_bytes(bytes(unique)))
        self._comm = self._init(unique, collectives, device, driver or CudaDriver())

    def _init(self, unique: _UniqueId, collectives: Collectives, device: int, driver: CudaDriver) -> ctypes.c_void_p:
        """ncclCommInitRank waits for the other ranks without a limit, so it has a thread of its own, which a failure leaves behind: what
        follows a failure to start is the end of the process. TensorRT needs a communicator whose calls wait, so NCCL's own way of
        beginning without waiting is not to be had.
        """
        comm = ctypes.c_void_p()
        failures: list[BaseException] = []

        def init() -> None:
            try:
                driver.make_current(device)  # a setting of the thread
                self._nccl.call("ncclCommInitRank", ctypes.byref(comm), collectives.size, unique, collectives.rank)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=init, name="nccl-init", daemon=True)
        thread.start()
        thread.join(INIT_TIMEOUT)
        if thread.is_alive():
            raise NcclError(f"{self._where}: the ranks have not met in NCCL within {INIT_TIMEOUT:g} s; NCCL_DEBUG=INFO shows what it tries")
        if failures:
            raise failures[0]
        return comm

    @property
    def handle(self) -> int:
        """The ncclComm_t. Raises NcclError after ``close``."""
        return self._open().value or 0

    def capsule(self) -> Any:
        """The ncclComm_t as a PyCapsule of that name. It owns nothing."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self._open(), _CAPSULE_NAME, None)

    def all_reduce(self, pointer: int, count: int, dtype: str, stream: int) -> None:
        """Put on ``stream`` (a cudaStream_t; 0: the default one) the sum over ranks of ``count`` numbers at ``pointer``, in place.

        It returns at once; ``wait`` says how it ended. ``dtype``: numpy's and torch's name of the type. Raises NcclError.
        """
        if dtype not in _DTYPES:
            raise NcclError(f"NCCL does not sum numbers of type {dtype!r}; it takes {', '.join(_DTYPES)}")
        self._nccl.call("ncclAllReduce", pointer, pointer, count, _DTYPES[dtype], _SUM, self._open(), stream)

    def wait(self, done: Callable[[], bool]) -> None:
        """Return when ``done``, which asks the device whether what was put on the stream has run.

        Raises NcclError, and the communicator is at its end, when NCCL tells of an error meanwhile or STEP_TIMEOUT seconds have passed: a
        sum whose peer is gone would keep the device busy for ever, and whoever asks the device to wait for it would never return.
        """
        began = time.monotonic()
        looked = began
        while not done():
            now = time.monotonic()
            if now - looked >= ERROR_POLL:
                looked = now
                self._check()
                if now - began >= STEP_TIMEOUT:
                    self._abort()
                    raise NcclError(
                        f"{self._where}: the device has not ended a step within {STEP_TIMEOUT:g} s; another rank takes no part in it"
                    )
            time.sleep(POLL)

    def close(self) -> None:
        """Give its memory back. May be called again, and after an error."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._nccl.call("ncclCommDestroy", comm)

    def _check(self) -> None:
        state = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._open(), ctypes.byref(state))
        if state.value:
            text = self._nccl.text(state.value)
            self._abort()
            raise NcclError(f"{self._where}: a sum over ranks failed: {text}")

    def _abort(self) -> None:
        """End what runs on the device for it. What goes wrong here is not the fault that is told of."""
        comm, self._comm = self._comm, None
        try:
            self._nccl.call("ncclCommAbort", comm)
        except NcclError as error:
            log.error("%s: %s", self._where, error)

    def _open(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise NcclError(f"{self._where}: the communicator is closed")
        return self._comm


def look() -> dict[str, Any]:
    """What this machine has. ``devices``: [name, bytes, capability] of each. What is missing is None, and ``trouble`` says why."""
    found: dict[str, Any] = {"driver": None, "devices": [], "nccl": None, "trouble": []}
    try:
        driver = CudaDriver()
        found["driver"] = driver.version
        found["devices"] = [(device.name, device.memory, "{}.{}".format(*device.capability)) for device in driver.devices()]
    except CudaError as error:
        found["trouble"].append(str(error))
    try:
        found["nccl"] = Nccl().version
    except NcclError as error:
        found["trouble"].append(str(error))
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
