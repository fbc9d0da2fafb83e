"""A live request as the ledger keeps it: where its deltas go, and what it takes to run it again in another world."""

from __future__ import annotations

from array import array

import msgspec

from headrace.executor.mailbox import Mailbox
from headrace.executor.request import CheckedRequest


class LiveRequest:
    """``history``: every token that its worlds have delivered, int32; None where no world can follow, and it would only cost memory.
    ``waiting``: prompt tokens that count as waiting for admission; 0 from the first token on.
    """

    __slots__ = ("_checked", "history", "mailbox", "waiting")

    def __init__(self, mailbox: Mailbox, checked: CheckedRequest, replayable: bool) -> None:
        self.mailbox = mailbox
        self._checked = checked
        self.waiting = len(checked.token_ids)
        self.history: array[int] | None = array("i") if replayable else None

    def __repr__(self) -> str:
        return f"<LiveRequest {self.mailbox!r}>"

    @property
    def deadline(self) -> float | None:
        """By time.monotonic; None: none."""
        return self._checked.deadline

    def rest(self) -> CheckedRequest:
        """What is still to be done: the prompt with what was delivered behind it. Tokens are sampled by seed and position, so they go on
        as if nothing had happened.
        """
        checked, history, extras = self._checked, self.history, self.mailbox.extras
        if extras is not None and extras.rewind():
            params = msgspec.structs.replace(checked.params, prompt_logprobs=None, return_context_logits=False)
            checked = checked._replace(params=params)
        if not history:
            return checked
        return checked._replace(
            token_ids=checked.token_ids + history, max_tokens=checked.max_tokens - len(history), num_generated=len(history)
        )
