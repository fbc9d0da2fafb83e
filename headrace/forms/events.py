"""Server-sent events: bytes as they are sent. Pure."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

#: in the place of a text, and in no text that JSON has between quotes as it is
_HOLE = "\0"
_encoder = msgspec.json.Encoder()


def event(data: bytes) -> bytes:
    """``data``: JSON, which has no line ends of its own."""
    return b"data: %b\n\n" % data


def encoded(chunk: msgspec.Struct) -> bytes:
    """As an event."""
    return event(_encoder.encode(chunk))


class TextEvent:
    """Events that are alike but for one text: to the byte those of ``encoded``, without a struct for each."""

    __slots__ = ("_after", "_before")

    #: what ``chunk`` has in the place of the text
    HOLE = _HOLE

    def __init__(self, chunk: msgspec.Struct, field: str) -> None:
        """``field``: its name in ``chunk``, where it is ``HOLE``."""
        # Quotes inside of a string are escaped, so this is the field and nothing that a client has named so.
        name = b'"%b":' % field.encode()
        before, found, after = encoded(chunk).partition(name + _encoder.encode(_HOLE))
        assert found and name + _encoder.encode(_HOLE) not in after
        self._before = before + name
        self._after = after

    def __call__(self, text: str) -> bytes:
        """With this text."""
        return b"%b%b%b" % (self._before, _encoder.encode(text), self._after)
