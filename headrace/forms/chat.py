"""The events of one choice of a chat. Pure: one ``ChatEvents`` for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from headrace.forms.answers import CalledFunction, ChatChunk, ChatChunkChoice, ChatDelta, ToolCall
from headrace.forms.calls import Call, CallFinder, Pieces
from headrace.forms.events import TextEvent, encoded
from headrace.forms.spec import ChatSpec, Delta
from headrace.forms.token_names import TokenNames
from headrace.forms.usage import Tally, usage_so_far
from headrace.outputs import Logprob


class ChatEvents:
    """``tally``: of all choices of the chat."""

    def __init__(self, spec: ChatSpec, names: TokenNames, tally: Tally) -> None:
        self._spec = spec
        self._heading = spec.heading._asdict()
        self._names = names
        self._tally = tally
        self._finder = CallFinder(spec.mode, spec.known, spec.name)
        self._calls = 0
        self._begun = False
        self._ended = False
        # Most events of most chats: a text, and nothing else that is new.
        self._text: TextEvent | None = None
        if spec.top is None and not spec.with_ids and not spec.usage_each:
            self._text = TextEvent(self._chunk(self._choice(ChatDelta(content=TextEvent.HOLE))), "content")

    @property
    def wants_prompt_rows(self) -> bool:
        """Never."""
        return False

    @property
    def held(self) -> int:
        """Characters that wait until it is known what they are."""
        return self._finder.held

    def feed(self, delta: Delta, prompt_rows: Sequence[Mapping[int, Logprob] | None] | None = None) -> list[bytes]:
        """What is new, as events; perhaps nothing."""
        if self._ended or not (delta.token_ids or delta.text or delta.finish_reason):
            return []
        self._tally.tokens += len(delta.token_ids)
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            chunk = self._chunk(self._choice(ChatDelta(role="assistant", content="")))
            if self._spec.with_ids and self._spec.index == 0:
                chunk.prompt_token_ids = list(self._spec.prompt_token_ids)
            events.append(encoded(chunk))
        pieces = self._finder.feed(delta.text)
        if delta.finish_reason is not None:
            last = self._finder.flush()
            pieces = Pieces(pieces.text + last.text, pieces.calls + last.calls)
        if self._text is not None and not pieces.calls:
            if pieces.text:
                events.append(self._text(pieces.text))
        else:
            self._news(delta, pieces, events)
        if delta.finish_reason is not None:
            self._ended = True
            ending = self._choice(ChatDelta())
            ending.finish_reason = finish_reason(delta.finish_reason, self._calls > 0, self._spec.mode)
            ending.stop_reason = delta.stop_reason
            events.append(encoded(self._chunk(ending)))
        return events

    def _news(self, delta: Delta, pieces: Pieces, events: list[bytes]) -> None:
        spec = self._spec
        logprobs = self._names.chat(delta.token_ids, delta.rows, spec.top) if spec.top is not None and delta.rows else None
        if not (pieces.text or pieces.calls or logprobs is not None or (spec.with_ids and delta.token_ids)):
            return
        new = ChatDelta(content=pieces.text) if pieces.text or not pieces.calls else ChatDelta()
        if pieces.calls:
            new.tool_calls = tool_calls(pieces.calls, spec, self._calls)
            self._calls += len(pieces.calls)
        choice = self._choice(new)
        choice.logprobs = logprobs
        if spec.with_ids:
            choice.token_ids = list(delta.token_ids)
        events.append(encoded(self._chunk(choice)))

    def skip(self, token_ids: Sequence[int], text: str) -> None:
        """The events of these are known: go on behind them."""
        if token_ids or text:
            self._begun = True
        self._tally.tokens += len(token_ids)
        self._calls += len(self._finder.feed(text).calls)

    def _choice(self, new: ChatDelta) -> ChatChunkChoice:
        return ChatChunkChoice(index=self._spec.index, delta=new)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[choice], usage=usage_so_far(self._spec, self._tally))


def finish_reason(reason: str | None, called: bool, mode: str) -> str | None:
    """As OpenAI: of a function that the client chose itself it is "stop"."""
    return "tool_calls" if reason == "stop" and called and mode != "named" else reason


def tool_calls(calls: Sequence[Call], spec: ChatSpec, first: int, with_index: bool = True) -> list[ToolCall]:
    """``first``: calls of this choice before. An id says which call of which request it is, so whoever makes it, it is the same."""
    return [
        ToolCall(
            index=number if with_index else UNSET,
            id=f"call_{spec.call_prefix}{spec.index:04x}{number:04x}",
            type="function",
            function=CalledFunction(name=call.name, arguments=call.arguments),
        )
        for number, call in enumerate(calls, first)
    ]
