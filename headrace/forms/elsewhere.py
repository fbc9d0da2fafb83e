"""Events that are made where the text is: in a postprocess worker, or in the dispatch thread while there is none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.forms.events_of import events_of
from headrace.forms.spec import ChatSpec, Delta, FormSpec
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import Tally

_NO_NAMES = TokenNames(None)


class EventMaker:
    """What the executor and its workers know of a form: text in, events out. Of specs that ``goes_elsewhere`` lets go.

    Attributes:
        spec: what another process makes the same from, see ``from_bytes``.
    """

    def __init__(self, spec: FormSpec) -> None:
        self.spec = msgspec.msgpack.encode(spec)
        self._events = events_of(spec, _NO_NAMES, Tally())

    @classmethod
    def from_bytes(cls, data: bytes) -> EventMaker:
        """In the other process. Raises msgspec.MsgspecError for what is no spec."""
        return cls(msgspec.msgpack.decode(data, type=FormSpec))

    def feed(self, token_ids: Sequence[int], text: str, finish_reason: str | None, stop_reason: int | str | None) -> list[bytes]:
        """What is new, as events; perhaps nothing."""
        return self._events.feed(Delta(token_ids, text, None, finish_reason, stop_reason))

    def skip(self, token_ids: Sequence[int], text: str) -> None:
        """The events of these are known: go on behind them."""
        self._events.skip(token_ids, text)


def goes_elsewhere(spec: FormSpec, alone: bool) -> bool:
    """Whether all that its events need is a choice's own text. Logprobs come beside that, and usage so far is that of all choices, so that
    only one that is ``alone`` knows it.
    """
    silent = not isinstance(spec, ChatSpec) and spec.silent
    return spec.top is None and not silent and (alone or not spec.usage_each)
