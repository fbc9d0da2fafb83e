"""The requests of one postprocess worker, as the user process keeps them. Pure: events in, feeds and pieces out.

The user process has every token of a live request, and knows how many of them the worker has answered; what the worker keeps follows from
that. When it dies, whatever has further tokens is fed to the next one from its beginning, with the number of tokens whose text is known
already. So no character is lost or doubled, whenever the worker dies: the answer to a feed either has come, whole, or is made again.

At most ``WINDOW`` feeds are unanswered. What arrives meanwhile waits as tokens of its request, so a slow worker gets fewer, larger feeds.

*Isolation.* A death counts against every request of an unanswered feed, until more of it is answered than was under way then. From
SUSPECT_DEATHS on a request is fed alone; if the worker dies of it again, and by then it has MAX_DEATHS, it is convicted. So a request that
kills its worker each time is found and failed, and the others are not.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.executor.mailbox import Ending
from headrace.executor.request import EventForm, TextStage
from headrace.ipc.messages import Buffer, TextEnd, TextFeed, TextJob, TextPieces
from headrace.outputs import FinishReason

#: Unanswered feeds: one is worked on, one waits, so that the worker never does. More only make latency.
WINDOW = 2
#: tokens in one feed; a longer request crosses in several
MAX_FEED_TOKENS = 16384
#: deaths from which a request is fed alone
SUSPECT_DEATHS = 2
#: deaths at which one that was fed alone is convicted
MAX_DEATHS = 3

#: of a request that failed the rest that is held back is not shown
_END_OF_FINISH = {
    FinishReason.STOP: TextEnd.FLUSH,
    FinishReason.LENGTH: TextEnd.FLUSH,
    FinishReason.ABORT: TextEnd.CUT,
    FinishReason.TIMEOUT: TextEnd.CUT,
    FinishReason.ERROR: TextEnd.FORGET,
}

R = TypeVar("R")


class Text(Generic[R]):
    """The text of one live request. ``reader``: whom it is for. ``stage``: makes it here, if no worker can; and ``form`` its events, where
    those are wanted.
    """

    __slots__ = (
        "answered",
        "blamed",
        "closed",
        "deaths",
        "ending",
        "form",
        "here",
        "job",
        "known",
        "let_out",
        "queued",
        "reader",
        "sent",
        "shard",
        "stage",
        "tokens",
    )

    def __init__(self, shard: Shard[R], job: TextJob, reader: R, stage: TextStage, form: EventForm | None = None) -> None:
        self.shard = shard
        self.job = job
        self.reader = reader
        self.stage = stage
        self.form = form
        self.tokens = array("i")
        # How many of them the worker that there is was sent, and any worker has answered; and how many `stage` was fed.
        self.sent = 0
        self.answered = 0
        self.here = 0
        # How many of those answered were let out; the others are held back, for their text may become part of a stop string.
        self.let_out = 0
        self.ending: Ending | None = None
        # Nothing more is wanted: it has ended, stopped or failed. Never changed back.
        self.closed = False
        # Whether the worker that there is has state for it; whether it waits in the shard to be fed.
        self.known = False
        self.queued = False
        # Deaths of workers that were fed it, and the number of tokens that must be answered until they are forgiven.
        self.deaths = 0
        self.blamed = 0

    def __repr__(self) -> str:
        return f"<Text {self.job.request_id} tokens={len(self.tokens)} answered={self.answered} deaths={self.deaths}>"

    def arrive(self, tokens: Sequence[int], ending: Ending | None) -> None:
        """Further tokens, and how it ended, if it has."""
        if self.closed:
            return
        self.tokens.extend(tokens)
        if ending is not None:
            self.ending = ending
            self.shard.ending.add(self)
        self.shard.queue(self)

    def close(self) -> None:
        """Nobody wants more of it."""
        self.shard.close(self)

    @property
    def end(self) -> TextEnd:
        """What follows the tokens that there are."""
        if self.closed:
            return TextEnd.FORGET
        if self.ending is None:
            return TextEnd.MORE
        return _END_OF_FINISH[self.ending.finish]


class Made(NamedTuple):
    """Text that was made: ``tokens`` further ones are let out, with ``piece``. ``last``: it ends as ``of.ending`` says."""

    of: Text[Any]
    tokens: int
    piece: str
    stop: str | None = None
    error: str | None = None
    last: bool = False
    events: Sequence[bytes] = ()


class Shard(Generic[R]):
    """What one worker makes the text of, over all its lives."""

    def __init__(self) -> None:
        self._waiting: deque[Text[R]] = deque()
        self._suspects: deque[Text[R]] = deque()
        # Of which the worker that there is has state.
        self._known: set[Text[R]] = set()
        # Number and entries of each feed: the text, how many of its tokens were sent with it and before, whether its ending was.
        self._unanswered: deque[tuple[int, list[tuple[Text[Any], int, bool]]]] = deque()
        # Whether the one unanswered feed is that of a suspect alone.
        self._alone = False
        self._number = 0
        #: those that the engine has ended, and whose text is not complete
        self.ending: set[Text[R]] = set()

    def __repr__(self) -> str:
        return f"<Shard waiting={len(self._waiting)} suspects={len(self._suspects)} known={len(self._known)} feeds={len(self._unanswered)}>"

    @property
    def unanswered(self) -> int:
        """Feeds that are under way."""
        return len(self._unanswered)

    @property
    def wants(self) -> bool:
        """Whether ``feed`` has something to send."""
        if self._suspects:
            return not self._unanswered
        return bool(self._waiting) and not self._alone and len(self._unanswered) < WINDOW

    def queue(self, text: Text[R]) -> None:
        """It has something to be fed."""
        if not text.queued:
            text.queued = True
            (self._suspects if text.deaths >= SUSPECT_DEATHS else self._waiting).append(text)

    def close(self, text: Text[R]) -> None:
        """Nothing more of it is wanted; the worker is told, if it has it."""
        if not text.closed:
            text.closed = True
            self.ending.discard(text)
            if text.known:
                self.queue(text)

    def feed(self) -> TextFeed | None:
        """The next one to send, which counts as sent; None when there is nothing to send, or enough is under way."""
        while self.wants:
            self._alone = bool(self._suspects)
            feed = self._feed(deque([self._suspects.popleft()]) if self._alone else self._waiting)
            if feed is not None:
                return feed
            self._alone = False
        return None

    def _feed(self, source: deque[Text[R]]) -> TextFeed | None:
        """Of the texts in ``source``, as many as fit. None when nothing of them is wanted any more."""
        jobs: list[TextJob] = []
        ids, counts, tokens, ends = array("q"), array("i"), array("i"), bytearray()
        answered: dict[int, int] = {}
        endings: dict[int, tuple[str, int | None]] = {}
        entries: list[tuple[Text[Any], int, bool]] = []
        again: Text[R] | None = None
        room = MAX_FEED_TOKENS
        # This runs once for each token of a busy stream, mostly with one new token and nothing else: that way is kept short.
        while source and again is None:
            text = source.popleft()
            text.queued = False
            start = text.sent
            if text.known and not text.closed and text.ending is None and start + 1 == len(text.tokens) and text.answered <= start and room:
                text.sent = start + 1
                room -= 1
                tokens.append(text.tokens[start])
                ids.append(text.job.request_id)
                counts.append(1)
                ends.append(0)
                entries.append((text, start + 1, False))
                continue
            if not text.known:
                if text.closed:
                    continue
                if text.deaths >= SUSPECT_DEATHS and not self._alone:
                    self.queue(text)
                    continue
                text.known = True
                self._known.add(text)
                jobs.append(text.job)
            if not text.closed:
                text.sent = min(len(text.tokens), start + room)
                room -= text.sent - start
                tokens.extend(text.tokens[start : text.sent])
            if text.sent < len(text.tokens) and not text.closed:
                again, end = text, TextEnd.MORE
            else:
                end = text.end
            if text.answered > start:
                answered[text.job.request_id] = min(text.answered, text.sent) - start
            ids.append(text.job.request_id)
            counts.append(text.sent - start)
            ends.append(end)
            entries.append((text, text.sent, end is not TextEnd.MORE))
            if end is not TextEnd.MORE:
                text.known = False
                self._known.discard(text)
                if text.form is not None and text.ending is not None and end is not TextEnd.FORGET:
                    endings[text.job.request_id] = text.ending.told
        if again is not None:
            self.queue(again)
        if not entries:
            return None
        self._number += 1
        self._unanswered.append((self._number, entries))
        return TextFeed(self._number, tuple(jobs), Buffer(ids), Buffer(counts), Buffer(tokens), bytes(ends), answered, endings)

    def answer(self, pieces: TextPieces) -> list[Made]:
        """What the oldest feed under way has brought. Raises ValueError or TypeError for an answer that makes no sense, and then nothing
        has changed: the worker that gave it is of no use.
        """
        if not self._unanswered:
            raise ValueError(f"feed {pieces.number} is answered, and none is under way")
        number, entries = self._unanswered[0]
        counts, lengths = pieces.counts.as_int32().tolist(), pieces.lengths.as_int32().tolist()
        whole = pieces.text
        if pieces.number != number or not len(counts) == len(lengths) == len(entries):
            raise ValueError(f"feed {number} with {len(entries)} entries is answered as {pieces.number} with {len(counts)}, {len(lengths)}")
        if min(counts, default=0) < 0 or min(lengths, default=0) < 0 or sum(lengths) != len(whole):
            raise ValueError(f"feed {number} is answered with counts that do not fit")
        self._unanswered.popleft()
        self._alone = False
        made: list[Made] = []
        stops, errors, events = pieces.stops, pieces.errors, pieces.events
        place = 0
        for index, ((text, upto, last), count, length) in enumerate(zip(entries, counts, lengths, strict=True)):
            piece = whole[place : place + length]
            place += length
            if text.closed:
                continue
            text.answered = upto
            text.let_out += count
            if text.deaths and upto >= text.blamed:
                text.deaths = 0
            if not last and index not in stops and index not in errors:
                if count or length or index in events:
                    made.append(Made(text, count, piece, events=events.get(index, ())))
                continue
            made.append(Made(text, count, piece, stops.get(index), errors.get(index), last, events.get(index, ())))
            self._over(text)
        return made

    def _over(self, text: Text[R]) -> None:
        """The worker has forgotten it."""
        text.known = False
        self._known.discard(text)
        self.close(text)

    def lost(self) -> list[Text[R]]:
        """The worker died: its requests are for the next one. Whom it has convicted, who are closed."""
        blamed = {text: (upto, last) for _, entries in self._unanswered for text, upto, last in entries if not text.closed}
        alone, self._alone = self._alone, False
        self._unanswered.clear()
        for text in (*self._known, *blamed):
            text.known, text.sent = False, 0
        self._known.clear()
        convicted = []
        for text, (upto, last) in blamed.items():
            text.deaths += 1
            # An ending that kills is past the last token.
            text.blamed = max(text.blamed, upto + last)
            if alone and text.deaths >= MAX_DEATHS:
                convicted.append(text)
                self.close(text)
            else:
                self.queue(text)
        return convicted

    def make_here(self) -> list[Made]:
        """All that waits is made in this process, with no worker. Not while there is one."""
        waiting = [text for source in (self._suspects, self._waiting) for text in source]
        self._suspects.clear()
        self._waiting.clear()
        made = []
        for text in waiting:
            text.queued = False
            if not text.closed:
                made.append(_made_here(text))
                if made[-1].last or made[-1].stop is not None or made[-1].error is not None:
                    self.close(text)
        return made


def _made_here(text: Text[R]) -> Made:
    stage, ending, form = text.stage, text.ending, text.form
    count, piece, stop = 0, "", None
    events: Sequence[bytes] = ()
    try:
        if text.here < text.answered:
            # What a worker has made of it is known.
            known = stage.feed(text.tokens[text.here : text.answered].tolist())
            if form is not None:
                form.skip(text.tokens[text.let_out - known.num_tokens : text.let_out].tolist(), known.text)
        count, piece, stop = stage.feed(text.tokens[text.answered :].tolist())
        text.here = text.answered = len(text.tokens)
        if stop is None and ending is not None and ending.finish is not FinishReason.ERROR:
            more, rest, stop = stage.flush()
            count, piece = count + more, piece + rest
            if ending.finish in (FinishReason.ABORT, FinishReason.TIMEOUT):
                stop = None
        if form is not None:
            reason: tuple[str | None, int | str | None] = (None, None)
            if stop is not None:
                reason = (str(FinishReason.STOP), stop)
            elif ending is not None and ending.finish is not FinishReason.ERROR:
                reason = ending.told
            events, piece = form.feed(text.tokens[text.let_out : text.let_out + count].tolist(), piece, *reason), ""
        text.let_out += count
    except Exception as error:
        # Whatever the tokenizer raises ends this request only.
        return Made(text, count, piece, None, f"{type(error).__name__}: {error}")
    return Made(text, count, piece, stop, None, ending is not None, events)
