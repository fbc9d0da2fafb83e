"""The format of a recording: what crossed the boundary between one user process and its worlds, in both directions, with times.

A file is a magic, a version, and then blocks, each a length and so many bytes of msgpack (integers are little-endian)::

    magic "headrace-record\\n" 16 bytes | version u16 | length u32 | header | length u32 | record | length u32 | record | ...

The header is a map (:class:`Header`), a record an array that begins with its kind. Messages are those of :mod:`headrace.ipc.messages`, with
every buffer inside. Nothing in a file is run or unpickled, and no length in it is believed before the file was found to be that long.

A recording *without prompts* holds no token id and no text of anybody: token ids are zeros, as many as there were; stop strings are
question marks; messages of errors are left out. What is kept is named here, so a field that is new in a message is left out as well.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from headrace.config import EngineConfig
from headrace.errors import HeadraceError, RequestError
from headrace.ipc.messages import Buffer, Cancel, Deltas, Ready, Shutdown, ShutdownDone, Submit
from headrace.params import SamplingParams

MAGIC = b"headrace-record\n"
VERSION = 1
START = struct.Struct("<16sH")
LENGTH = struct.Struct("<I")
#: no record is longer: as much as one part of a frame, and what is around it
MAX_RECORD_BYTES = (1 << 30) + (1 << 20)

LEFT_OUT = "(left out)"

SentMessage = Submit | Cancel | Shutdown
ReceivedMessage = Ready | Deltas | ShutdownDone
S = TypeVar("S", bound=msgspec.Struct)


class RecordingError(HeadraceError, ValueError):
    """A file that is no recording, or not one that this version reads."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording says of itself.

    Attributes:
        headrace: version of the package that wrote it.
        started: when, in seconds since 1970; the times of records count from here.
        with_prompts: whether token ids and texts are in it.
        config: what the world ran; of the model's path only the last part.
    """

    headrace: str
    started: float
    with_prompts: bool
    config: EngineConfig


class Sent(msgspec.Struct, frozen=True, array_like=True, tag="sent"):
    """A message that left the user process, ``seconds`` after the start."""

    seconds: float
    message: SentMessage


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """A message that reached the user process, ``seconds`` after the start; Ready holds the facts of a world from there on."""

    seconds: float
    message: ReceivedMessage


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Here ``count`` messages are missing: the disk was slower than the boundary, or a message could not be written."""

    seconds: float
    count: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The recording was closed in order; nothing follows."""

    seconds: float


class Truncated(msgspec.Struct, frozen=True):
    """Made by the reader, in place of an End: the file stops at byte ``offset`` in the middle of a record, or between two; ``rest`` bytes
    follow that are no whole record. So does the file of a process that was killed.
    """

    offset: int
    rest: int


Record = Sent | Received | Dropped | End

# --- writing ---------------------------------------------------------------------------------------------------------------------------


def _pack_buffer(value: Any) -> memoryview:
    if type(value) is Buffer:
        return value.view
    raise TypeError(f"a recording cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_buffer)


def start_of_file(header: Header) -> bytes:
    """Everything before the first record."""
    config = msgspec.structs.replace(header.config, model=Path(header.config.model).name)
    return START.pack(MAGIC, VERSION) + _block(_encoder.encode(msgspec.structs.replace(header, config=config)))


def encode(record: Record, with_prompts: bool) -> bytes:
    """One record with its length.

    Raises:
        ValueError, TypeError: it cannot be written, by its size or by what is in it; nothing of it must be then.
    """
    if not with_prompts and isinstance(record, Sent | Received):
        record = without_prompts(record)
    return _block(_encoder.encode(record))


def _block(data: bytes) -> bytes:
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes is too long: at most {MAX_RECORD_BYTES} are allowed")
    return LENGTH.pack(len(data)) + data


def without_prompts(record: Sent | Received) -> Sent | Received:
    """The same record without token ids and texts."""
    message = record.message
    if isinstance(message, Submit):
        heads, params = tuple(map(_numbers, message.requests)), tuple(map(_blank_params, message.params))
        return Sent(record.seconds, Submit(requests=heads, params=params, token_ids=_zeros(message.token_ids)))
    if isinstance(message, Deltas):
        blank = Deltas(
            step=message.step,
            request_ids=message.request_ids,
            counts=message.counts,
            token_ids=_zeros(message.token_ids),
            finish=message.finish,
            stop_reasons=dict.fromkeys(message.stop_reasons, 0),
            errors=dict.fromkeys(message.errors, LEFT_OUT),
            beams={
                request_id: tuple(msgspec.structs.replace(beam, token_ids=_zeros(beam.token_ids), stop_reason=None) for beam in beams)
                for request_id, beams in message.beams.items()
            },
        )
        return Received(record.seconds, blank)
    return record


def _zeros(buffer: Buffer) -> Buffer:
    return Buffer(bytes(buffer.view.nbytes))


def _numbers(struct_: S) -> S:
    """Of a struct only what is a number or a flag."""
    values = {name: getattr(struct_, name) for name in struct_.__struct_fields__}
    return type(struct_)(**{name: value for name, value in values.items() if value is None or isinstance(value, bool | int | float)})


def _blank_params(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(
        _numbers(params),
        stop=tuple("?" * len(stop) for stop in params.stop),
        stop_token_ids=(0,) * len(params.stop_token_ids),
        end_id=None if params.end_id is None else 0,
    )


# --- reading ---------------------------------------------------------------------------------------------------------------------------


def _unpack_buffer(_: type, value: Any) -> Buffer:
    if type(value) is bytes:
        return Buffer(value)
    raise ValueError("a buffer is bytes")


_header_decoder = msgspec.msgpack.Decoder(Header)
_RECORD: Any = Record
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(_RECORD, dec_hook=_unpack_buffer)
#: what decoding raises for bytes that are not what they should be; RequestError: sampling parameters that are out of range
_FAULTS = (ValueError, TypeError, RecursionError, OverflowError, RequestError)


class Recording:
    """A recording on disk: ``header``, and by iterating, any number of times, its records."""

    def __init__(self, path: Path, header: Header, offset: int) -> None:
        self.path = path
        self.header = header
        self._offset = offset

    def __repr__(self) -> str:
        return f"<Recording {self.path}>"

    def __iter__(self) -> Iterator[Record | Truncated]:
        """All records in order; the last is an End, or Truncated. Raises RecordingError at a record that is damaged."""
        with contextlib.closing(self.path.open("rb")) as file:
            file.seek(self._offset)
            while True:
                offset = file.tell()
                data = _read_block(file, self.path)
                if data is None:
                    yield Truncated(offset, os.fstat(file.fileno()).st_size - offset)
                    return
                try:
                    record = _decoder.decode(data)
                except _FAULTS as error:
                    raise RecordingError(
                        f"{self.path}: the record at byte {offset} is damaged, or of another version than headrace {self.header.headrace} "
                        f"says: {error}"
                    ) from error
                yield record
                if isinstance(record, End):
                    return


def read_recording(path: str | Path) -> Recording:
    """Open a recording and read its header.

    Raises:
        RecordingError: it is none, or its version or its settings are not known here; the message says which.
        OSError: it cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(START.size)
        if start[: len(MAGIC)] != MAGIC or len(start) < START.size:
            raise RecordingError(f"{path} is no recording of headrace")
        _, version = START.unpack(start)
        if version != VERSION:
            raise RecordingError(f"{path} is a recording of version {version}; this headrace reads version {VERSION}")
        data = _read_block(file, path)
        if data is None:
            raise RecordingError(f"{path} ends before its header does")
        try:
            header = _header_decoder.decode(data)
        except _FAULTS as error:
            raise RecordingError(f"{path}: the header cannot be read: {error}") from error
        return Recording(path, header, file.tell())


def _read_block(file: BinaryIO, path: Path) -> bytes | None:
    """The bytes of one block; None when the file ends before it does."""
    length_bytes = file.read(LENGTH.size)
    if len(length_bytes) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(length_bytes)
    if length > MAX_RECORD_BYTES:
        raise RecordingError(f"{path}: a record at byte {file.tell()} claims {length} bytes; at most {MAX_RECORD_BYTES} are possible")
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    data = file.read(length)
    return data if len(data) == length else None
