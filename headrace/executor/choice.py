"""The reader's side of one choice: it takes what lies in the mailbox and makes text of it. One thread at a time uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.executor.extras import BeamResult, Columns, Extras, Taken, logprob_dicts
from headrace.executor.mailbox import Mailbox
from headrace.executor.request import TextStage
from headrace.outputs import CompletionOutput, TokenLogprobs


class Fresh(NamedTuple):
    """What a mailbox held, as it came. ``texts``: that of the tokens, as far as somebody else makes it; see ``Choice.text_of``. ``ended``:
    it is the last, and how it ended is told by the mailbox. ``events``: what somebody else has made in the place of texts, if anybody does.
    """

    token_ids: list[int]
    texts: list[str]
    rows: Columns | None
    ended: bool
    events: list[bytes] | None = None


class Choice:
    """``stage``: makes text here, when nobody else does."""

    __slots__ = ("_ending_given", "_given_text", "_given_tokens", "_stage", "ended", "extras", "mailbox", "text", "token_ids")

    def __init__(self, mailbox: Mailbox, stage: TextStage | None) -> None:
        self.mailbox = mailbox
        self._stage = stage
        self.token_ids: list[int] = []
        self.text = ""
        # Whether the ending has been taken from the mailbox, and with it the last tokens.
        self.ended = False
        extras: Extras | None = mailbox.extras
        self.extras = None if extras is None else Taken(extras.wanted)
        # How much of text and tokens has been given out by iterating or as the final output.
        self._given_text = 0
        self._given_tokens = 0
        self._ending_given = False

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.ended and self.mailbox.error is not None

    @property
    def arrived(self) -> bool:
        """Whether the mailbox has something to take. Holds its lock."""
        box = self.mailbox
        return bool(box.unread_tokens or box.unread_events) or (box.ended and not self.ended)

    @property
    def new(self) -> bool:
        """Whether something was taken that has not been given out."""
        if len(self.token_ids) > self._given_tokens or len(self.text) > self._given_text:
            return True
        return self.ended and not self._ending_given and not self.failed

    def empty(self) -> Fresh:
        """What the mailbox holds, which is then empty. Holds its lock."""
        box = self.mailbox
        tokens, box.unread_tokens = box.unread_tokens, []
        texts: list[str] = []
        if box.unread_text:
            texts, box.unread_text = box.unread_text, texts
        rows = None
        if box.extras is not None and self.extras is not None:
            rows = box.extras.take()
            self.extras.add_whole(box.extras)
        events = box.unread_events
        if events:
            box.unread_events = []
        self.ended = box.ended
        return Fresh(tokens, texts, rows, self.ended, events)

    def text_of(self, fresh: Fresh) -> str:
        """The text of what ``empty`` gave, each of which comes here once and in order."""
        stage = self._stage
        if stage is None:
            return "".join(fresh.texts)
        text = stage.feed(fresh.token_ids).text
        return text + stage.flush().text if fresh.ended else text

    @property
    def logprob_width(self) -> int:
        """Logprobs that come with each token."""
        return 0 if self.extras is None else self.extras.wanted.width

    def logprobs_of(self, fresh: Fresh) -> TokenLogprobs | None:
        """Those of what ``empty`` gave; None unless asked for."""
        width = self.logprob_width
        return logprob_dicts(fresh.rows, width) if width and fresh.rows is not None else None

    def take(self) -> None:
        """Empty the mailbox."""
        if self.ended:
            return
        with self.mailbox.lock:
            fresh = self.empty()
        self.text += self.text_of(fresh)
        if fresh.rows is not None and self.extras is not None:
            self.extras.add(fresh.rows)
        self.token_ids += fresh.token_ids

    def snapshot(self, index: int) -> CompletionOutput:
        """All so far, with what is new since the last one.

        Its ending is that which was there when the mailbox was emptied: looked for again now, one could be found whose tokens still lie
        there.
        """
        box = self.mailbox
        finish = box.finish if self.ended else None
        new = self._given_tokens
        completion = CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            text_diff=self.text[self._given_text :],
            token_ids_diff=self.token_ids[new:],
            finish_reason=None if finish is None else str(finish),
            stop_reason=box.stop_reason if finish is not None else None,
        )
        if self.extras is not None:
            completion = msgspec.structs.replace(completion, **self._extras(self.extras, new))
        self._given_text, self._given_tokens = len(self.text), len(self.token_ids)
        self._ending_given = self.ended
        return completion

    def _extras(self, extras: Taken, new: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if extras.wanted.width:
            fields |= {"logprobs": extras.logprobs.copy(), "logprobs_diff": extras.logprobs[new:], "cumulative_logprob": extras.cumulative}
        if self.ended:
            fields["generation_logits"] = extras.generation_logits()
        return fields


def beam_completions(beams: Sequence[BeamResult], new_stage: Callable[[], TextStage] | None) -> list[CompletionOutput]:
    """The choices of a beam search, best first. All of it is new, for nothing of it was known before its end."""
    completions = []
    for index, beam in enumerate(beams):
        text = ""
        if new_stage is not None:
            stage = new_stage()
            text = stage.feed(beam.token_ids).text + stage.flush().text
        completions.append(
            CompletionOutput(
                index=index,
                text=text,
                token_ids=beam.token_ids,
                text_diff=text,
                token_ids_diff=beam.token_ids.copy(),
                finish_reason=str(beam.finish),
                stop_reason=beam.stop_reason,
                cumulative_logprob=beam.cumulative_logprob,
            )
        )
    return completions
