"""Text stages: tokens in, released tokens and text out. The executor runs them; it knows only their shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.outputs import Released
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher


class PlainText:
    """No stop strings: every token is released at once, and text as soon as its characters are whole."""

    finds_stops = False

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def feed(self, token_ids: Sequence[int]) -> Released:
        """All of them, and the text that is certain."""
        return Released(len(token_ids), self._detokenizer.feed(token_ids))

    def flush(self) -> Released:
        """The rest of the text."""
        return Released(0, self._detokenizer.flush())


class StoppingText:
    """Looks for stop strings. A token is released when all of its text is; when a stop string is found, the tokens that gave the text
    before it are kept and the rest is dropped, so that ids and text are cut at the same place. A token that holds both the end of the
    text and the beginning of the stop string is kept. Nothing is looked for in the text of the first ``min_tokens`` tokens.
    """

    finds_stops = True

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        # Tokens that still pass without being looked at.
        self._pass = min_tokens
        self._matcher = matcher
        # For each token that is held back, where in the whole text its own begins and ends, in characters.
        self._held: deque[tuple[int, int]] = deque()
        self._made = 0
        self._shown = 0

    def feed(self, token_ids: Sequence[int]) -> Released:
        """Token by token, since it is the token that a stop string ends in that decides."""
        count, texts = 0, []
        for token in token_ids:
            piece = self._detokenizer.feed((token,))
            self._held.append((self._made, self._made + len(piece)))
            self._made += len(piece)
            if self._pass:
                self._pass -= 1
                self._shown += len(piece)
                texts.append(piece)
            elif piece:
                text, stop = self._matcher.feed(piece)
                self._shown += len(text)
                texts.append(text)
                if stop is not None:
                    return Released(count + self._cut(), "".join(texts), stop)
            count += self._release()
        return Released(count, "".join(texts))

    def flush(self) -> Released:
        """Nothing follows, so what could have become a stop string is text, unless it is one already."""
        piece = self._detokenizer.flush()
        text, stop = self._matcher.feed(piece)
        if stop is None:
            rest, stop = self._matcher.flush()
            text += rest
        self._shown += len(text)
        if stop is not None:
            return Released(self._cut(), text, stop)
        count = len(self._held)
        self._held.clear()
        return Released(count, text)

    def _release(self) -> int:
        # One that has no text yet is the first part of a character: it goes where that goes, which is known when text after it is shown.
        count = 0
        while self._held and self._held[0][0] < self._shown and self._held[0][1] <= self._shown:
            self._held.popleft()
            count += 1
        return count

    def _cut(self) -> int:
        return sum(start < self._shown for start, _ in self._held)


def text_stage(detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool, min_tokens: int) -> PlainText | StoppingText:
    """The stage of one request."""
    return StoppingText(detokenizer, StopMatcher(stops, include_stop), min_tokens) if stops else PlainText(detokenizer)
