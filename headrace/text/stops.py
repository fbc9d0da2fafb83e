"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a stream of text; one for each request. Pure.

    The match that begins first wins, and of those that begin at one place the longest. However the text is cut into pieces, all released
    text joined equals the whole text up to that match (``include_stop``: and including it). What could still become a match is held back:
    at most the longest stop string less one character. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        # In an alternation the first branch that matches wins: the longest goes first.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._include_stop = include_stop
        self._search = re.compile("|".join(map(re.escape, self._stops))).search if self._stops else None
        self._begin = re.compile("|".join(re.escape(first) for first in sorted({stop[0] for stop in self._stops}))).search
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._found

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text: (what may now be shown, the stop string that ended the text or None). After a stop nothing more is released."""
        if self._search is None:
            return text, None
        if self._found is not None:
            return "", self._found
        if not self._held and self._begin(text) is None:
            return text, None
        text = self._held + text
        match = self._search(text)
        end = self._first_partial(text, len(text) if match is None else match.start() + 1)
        if match is not None and end > match.start():
            return self._stop(text, match), self._found
        # Either no stop string is there, or one that begins no later may still grow into a longer or an earlier one: wait for it.
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> tuple[str, str | None]:
        """The text is over: the rest of it, as from :meth:`feed`. A match that was waiting for a longer one is taken now."""
        text, self._held = self._held, ""
        if self._search is None or self._found is not None:
            return "", self._found
        match = self._search(text)
        return (text, None) if match is None else (self._stop(text, match), self._found)

    def _stop(self, text: str, match: re.Match[str]) -> str:
        self._found = match.group()
        self._held = ""
        return text[: match.end() if self._include_stop else match.start()]

    def _first_partial(self, text: str, limit: int) -> int:
        """The first place before ``limit`` from which all the rest is the beginning of a longer stop string; else ``len(text)``."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), limit)
            while 0 <= start < first:
                if stop.startswith(text[start:]):
                    first = start
                    break
                start = text.find(stop[0], start + 1, limit)
        return first
