"""The CUDA driver by ctypes: which devices there are, and which of them each rank takes. Needs neither torch nor the CUDA toolkit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.base import Collectives
from headrace.errors import HeadraceError

#: the driver's library; it comes with the driver and never with a package
LIBRARY = "libcuda.so.1"

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NAME_BYTES = 256


class CudaError(HeadraceError):
    """There is no CUDA driver, no device for this rank, or the driver refused a call."""


class CudaDevice(NamedTuple):
    """One device that this process sees. ``ordinal``: as CUDA counts them; ``uuid``: 32 hexadecimal digits, the same in every process."""

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory: int


class CudaDriver:
    """The driver's library, initialised. Raises CudaError where there is none, or none that works."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"there is no CUDA driver: {error}") from None
        try:
            for name, arguments in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = arguments
        except AttributeError as error:
            raise CudaError(f"the CUDA driver is too old: {error}") from None
        self._has_devices = self._call("cuInit", 0, allowed=_NO_DEVICE) != _NO_DEVICE

    @property
    def version(self) -> str:
        """The newest CUDA that it runs, as "12.4"."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> list[CudaDevice]:
        """Those that CUDA_VISIBLE_DEVICES leaves, in CUDA's order."""
        if not self._has_devices:
            return []
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def make_current(self, ordinal: int) -> None:
        """The device that the calling thread's CUDA calls, those of any library, are about from now on."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(ordinal))
        self._call("cuCtxSetCurrent", context)

    def _handle(self, ordinal: int) -> int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        return handle.value

    def _device(self, ordinal: int) -> CudaDevice:
        handle = self._handle(ordinal)
        uuid, name, memory = ctypes.create_string_buffer(16), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
        self._call("cuDeviceGetUuid_v2", uuid, handle)
        self._call("cuDeviceGetName", name, _NAME_BYTES, handle)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        capability = (self._attribute(_CAPABILITY_MAJOR, handle), self._attribute(_CAPABILITY_MINOR, handle))
        return CudaDevice(ordinal, uuid.raw.hex(), name.value.decode(errors="replace"), capability, memory.value)

    def _attribute(self, attribute: int, handle: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    def _call(self, name: str, *arguments: object, allowed: int = 0) -> int:
        code: int = getattr(self._library, name)(*arguments)
        if code not in (0, allowed):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name} of the CUDA driver: {(text.value or b'unknown error').decode(errors='replace')} ({code})")
        return code


_INT, _OUT = ctypes.c_int, ctypes.c_void_p
#: argument types; each gives back a CUresult
_FUNCTIONS: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDriverGetVersion": [_OUT],
    "cuDeviceGetCount": [_OUT],
    "cuDeviceGet": [_OUT, _INT],
    "cuDeviceGetUuid_v2": [_OUT, _INT],
    "cuDeviceGetName": [_OUT, _INT, _INT],
    "cuDeviceTotalMem_v2": [_OUT, _INT],
    "cuDeviceGetAttribute": [_OUT, _INT, _INT],
    "cuDevicePrimaryCtxRetain": [_OUT, _INT],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuGetErrorString": [_INT, _OUT],
}


def choose_device(collectives: Collectives, devices: Sequence[CudaDevice]) -> CudaDevice:
    """The device of this rank, among those it sees. Every rank of the world calls it. Raises CudaError on every rank or on none.

    A device is for one rank. Ranks take, in their order, the first that they see and that none before them has: that gives the n-th device
    of a host to its n-th rank where all see all, and to each its own where the launcher has set CUDA_VISIBLE_DEVICES rank by rank.
    """
    seen = collectives.gather_bytes(" ".join(device.uuid for device in devices).encode())
    return devices[_assign([uuids.decode().split() for uuids in seen])[collectives.rank]]


def _assign(visible: Sequence[Sequence[str]]) -> list[int]:
    """Of each rank the index of its device among those it sees."""
    taken: set[str] = set()
    chosen = []
    for rank, uuids in enumerate(visible):
        free = [index for index, uuid in enumerate(uuids) if uuid not in taken]
        if not free:
            known = len({uuid for each in visible for uuid in each})
            raise CudaError(
                f"{len(visible)} ranks need a CUDA device each, and there are {known}: rank {rank} sees {len(uuids)}, "
                f"of which none is left after the ranks before it"
            )
        chosen.append(free[0])
        taken.add(uuids[free[0]])
    return chosen
