"""A28 without processes: whenever a postprocess worker dies, what every request gets equals that of the undisturbed run."""

from __future__ import annotations

import json
import threading
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.errors import ModelError, RequestError
from headrace.executor.mailbox import Ending, Mailbox, Readers
from headrace.executor.texts.shard import MAX_DEATHS, MAX_FEED_TOKENS, SUSPECT_DEATHS, WINDOW, Made, Shard, Text
from headrace.forms.elsewhere import EventMaker
from headrace.forms.spec import ChatSpec, CompletionSpec, Heading
from headrace.ipc.messages import Buffer, TextEnd, TextFeed, TextJob, TextPieces
from headrace.outputs import FinishReason
from headrace.text.detokenizer import ByteLevelDetokenizer
from headrace.text.stage import PlainText, StoppingText, text_stage
from headrace.worker.postprocess import TextMaker

#: Characters in fragments, parts of stop strings, and a token without text.
TOKENS = [
    "日本".encode()[:4],
    "日本".encode()[4:],
    "😀".encode()[:1],
    "😀".encode()[1:],
    b"\xff",
    b"a",
    b"ab",
    b"STO",
    b"P",
    b"OP",
    b"",
    b" ST",
]
TABLE = dict(enumerate(TOKENS))
POISON = 99


class Poisoned(Exception):
    """What a request that kills its worker does to it here."""


def bytes_of(token: int, default: bytes) -> bytes:
    if token == POISON:
        raise Poisoned
    return TABLE.get(token, default)


def stage_of(job: TextJob) -> PlainText | StoppingText:
    return text_stage(ByteLevelDetokenizer(bytes_of), job.stops, job.include_stop, job.min_tokens)


def mailbox(stage: PlainText | StoppingText | None = None) -> Mailbox:
    return Mailbox(threading.RLock(), Readers(range(1), lambda request_id: None), stage)


class Mortal(TextMaker):
    """A worker that a poisoned token kills, as a crash would: nothing that it has done of the feed gets out."""

    def answer(self, feed: TextFeed) -> TextPieces:
        if POISON in feed.token_ids.as_int32().tolist():
            raise Poisoned
        return super().answer(feed)


class Rig:
    """A shard, a worker that answers when it is told to, and the readers."""

    def __init__(self, *jobs: TextJob) -> None:
        self.shard: Shard[Mailbox] = Shard()
        self.texts: list[Text[Mailbox]] = []
        for job in jobs:
            box = mailbox()
            form = EventMaker.from_bytes(job.form) if job.form else None
            box.make_elsewhere(text := Text(self.shard, job, box, stage_of(job), form), form is not None)
            self.texts.append(text)
        self.worker = Mortal(stage_of)
        self.under_way: deque[TextFeed] = deque()
        self.convicted: list[int] = []

    @property
    def boxes(self) -> list[Mailbox]:
        return [text.reader for text in self.texts]

    def send(self) -> None:
        while (feed := self.shard.feed()) is not None:
            self.under_way.append(feed)
            assert len(self.under_way) <= WINDOW and len(feed.token_ids.as_int32()) <= MAX_FEED_TOKENS

    def answer(self) -> None:
        """The worker gets one feed done, or dies of it."""
        if not self.under_way:
            return
        try:
            pieces = self.worker.answer(self.under_way.popleft())
        except Poisoned:
            self.die()
            return
        self.deliver(self.shard.answer(pieces))

    def die(self) -> None:
        self.under_way.clear()
        self.worker = Mortal(stage_of)
        for text in self.shard.lost():
            self.convicted.append(text.job.request_id)
            self.deliver([Made(text, 0, "", None, "convicted")])

    def deliver(self, made: list[Made]) -> None:
        for text, count, piece, stop, error, last, events in made:
            text.reader.made(count, piece, stop, error, text.ending if last else None, events)

    def settle(self) -> None:
        for _ in range(1000):
            self.send()
            if not self.under_way:
                return
            self.answer()
        pytest.fail(f"it never ends: {self.shard!r}")


def seen(box: Mailbox) -> tuple[object, ...]:
    return box.unread_tokens, "".join(box.unread_text), box.finish, box.stop_reason, None if box.error is None else str(box.error)


def joined(events: list[bytes]) -> tuple[object, ...]:
    """What a client makes of them: texts, ids, calls, and how often it was told of the role and the end, and how that was."""
    text, ids, calls, roles, ends = "", [], [], 0, []
    for event in events:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        delta = choice.get("delta", choice)
        text += delta.get("content", delta.get("text")) or ""
        ids += choice.get("token_ids", [])
        calls += delta.get("tool_calls", [])
        roles += "role" in delta
        if choice["finish_reason"] is not None:
            ends.append((choice["finish_reason"], choice["stop_reason"]))
    return text, ids, calls, roles, ends


def expected(job: TextJob, box: Mailbox) -> tuple[object, ...]:
    """The same of events that were made of all at once, in the place of a worker's."""
    finish = None if box.finish is None else str(box.finish)
    return joined(EventMaker.from_bytes(job.form).feed(box.unread_tokens, "".join(box.unread_text), finish, box.stop_reason))


HEADING = Heading("chatcmpl-1", 1, "river", "print")
FORMS = [
    ChatSpec(heading=HEADING, index=0, with_ids=True),
    ChatSpec(heading=HEADING, index=1, mode="named", name="clock", known=("clock",), call_prefix="0" * 16),
    CompletionSpec(heading=HEADING, index=0, echo="日本", with_usage=True),
]

jobs = st.builds(
    TextJob,
    request_id=st.just(0),
    skip_special_tokens=st.just(True),
    stops=st.sampled_from([(), ("STOP",), ("P", "STOPS"), ("本",)]),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 3),
    form=st.sampled_from([b"", *map(msgspec.msgpack.encode, FORMS)]),
)
chunks = st.lists(st.integers(0, len(TOKENS)), max_size=4)
endings = st.builds(Ending, st.sampled_from(list(FinishReason)), st.just(7), st.just("engine says no"))
stories = st.lists(st.tuples(jobs, st.lists(chunks, max_size=6), endings), min_size=1, max_size=4)
#: Decisions, in the order in which they are asked for: which request gets its next delta, and what happens after it.
scripts = st.lists(st.integers(0, 59), max_size=60)


@settings(max_examples=150, deadline=None, database=None)
@given(stories, scripts)
def test_deaths_at_any_moment_change_nothing(stories, script):
    """A28, invariants 1 and 11: also when the last of the workers has gone and the rest is made here."""
    rig = Rig(*(TextJob(index, *_fields(job)[1:]) for index, (job, _, _) in enumerate(stories)))
    undisturbed = [mailbox(stage_of(job)) for job, _, _ in stories]
    steps = [deque([(chunk, None) for chunk in chunks] + [([5], ending)]) for _, chunks, ending in stories]
    decisions = iter(script)
    here = False
    while going := [index for index, rest in enumerate(steps) if rest]:
        index = going[next(decisions, 0) % len(going)]
        chunk, ending = steps[index].popleft()
        for box in (undisturbed[index], rig.boxes[index]):
            # As the ledger does: after a stop string nothing is delivered.
            if not box.ended:
                box.deliver(chunk, *(ending[:3] if ending else (None, None, None)))
        for _ in range(next(decisions, 0) % 4):
            moment = next(decisions, 0)
            if here or moment == 59:
                if not here:
                    rig.die()
                here = True
                rig.deliver(rig.shard.make_here())
            else:
                (rig.send, rig.answer, rig.answer, rig.die)[moment % 4]()
    if here:
        rig.deliver(rig.shard.make_here())
    else:
        rig.settle()
        assert len(rig.worker) == 0, "the worker keeps nothing of what is over"
    for (job, _, _), box, calm in zip(stories, rig.boxes, undisturbed, strict=True):
        if job.form:
            assert joined(box.unread_events) == expected(job, calm), "events have no gap and no repeat"
            calm.unread_text = []
        assert seen(box) == seen(calm)
    assert not rig.shard.ending and all(text.closed for text in rig.texts)


def _fields(job: TextJob) -> tuple[object, ...]:
    return tuple(getattr(job, name) for name in job.__struct_fields__)


def plain(request_id: int, *stops: str) -> TextJob:
    return TextJob(request_id, True, stops, False, 0)


def test_a_fragment_of_a_character_outlives_the_worker_that_held_it():
    """A28, A42: the next one is fed from the beginning, and gives no character twice."""
    rig = Rig(plain(0))
    (box,) = rig.boxes
    box.deliver([5, 2], None, None, None)
    rig.settle()
    assert seen(box)[:2] == ([5, 2], "a")
    rig.die()
    box.deliver([3], FinishReason.LENGTH, None, None)
    rig.send()
    (feed,) = rig.under_way
    assert feed.answered == {0: 2} and feed.token_ids == Buffer.int32([5, 2, 3]) and feed.ends == bytes([TextEnd.FLUSH])
    rig.settle()
    assert seen(box) == ([5, 2, 3], "a😀", FinishReason.LENGTH, None, None)


def test_a_stop_string_is_found_across_a_death():
    """A28, A40."""
    rig = Rig(plain(0, "STOP"))
    (box,) = rig.boxes
    box.deliver([5, 7], None, None, None)
    rig.settle()
    rig.die()
    box.deliver([8, 5], None, None, None)
    rig.settle()
    assert seen(box) == ([5], "a", FinishReason.STOP, "STOP", None)


def test_what_is_under_way_at_the_death_is_made_again_and_once():
    rig = Rig(plain(0))
    (box,) = rig.boxes
    box.deliver([5], None, None, None)
    rig.send()
    box.deliver([6], None, None, None)
    rig.send()
    box.deliver([5], FinishReason.STOP, 7, None)
    rig.send()
    assert len(rig.under_way) == WINDOW and not rig.shard.wants, "the third waits, merged, until one is answered"
    rig.answer()
    rig.die()
    rig.settle()
    assert seen(box) == ([5, 6, 5], "aaba", FinishReason.STOP, 7, None)


def test_a_request_that_kills_its_worker_is_convicted_alone():
    """A28, invariant 6: it is found among those that were fed with it, and they lose nothing."""
    rig = Rig(*map(plain, range(20)))
    for box in rig.boxes:
        box.deliver([5], None, None, None)
    rig.boxes[13].deliver([POISON], None, None, None)
    rig.settle()
    for box in rig.boxes:
        if not box.ended:
            box.deliver([6], FinishReason.LENGTH, None, None)
    rig.settle()
    assert rig.convicted == [13] and rig.texts[13].deaths == MAX_DEATHS
    assert "could not be made" in str(rig.boxes[13].error)
    assert all(seen(box) == ([5, 6], "aab", FinishReason.LENGTH, None, None) for index, box in enumerate(rig.boxes) if index != 13)


def test_deaths_that_others_cause_convict_nobody_who_goes_on():
    rig = Rig(*map(plain, range(3)))
    for _ in range(3 * MAX_DEATHS):
        for box in rig.boxes:
            box.deliver([5], None, None, None)
        rig.send()
        rig.die()
        rig.settle()
        assert all(text.deaths == 0 for text in rig.texts)
    assert rig.convicted == []


def test_suspects_are_fed_one_at_a_time_and_before_the_others():
    rig = Rig(*map(plain, range(4)))
    for box in rig.boxes[:2]:
        box.deliver([5], None, None, None)
    for _ in range(SUSPECT_DEATHS):
        rig.send()
        rig.die()
    for box in rig.boxes[2:]:
        box.deliver([5], None, None, None)
    fed = []
    while True:
        rig.send()
        if not rig.under_way:
            break
        assert len(rig.under_way) == 1
        fed.append(rig.under_way[0].request_ids.as_int64().tolist())
        rig.answer()
    assert fed == [[0], [1], [2, 3]]


def test_a_long_request_crosses_in_several_feeds():
    """Also its replay, of which a part was answered."""
    rig = Rig(plain(0))
    (box,) = rig.boxes
    length = 2 * MAX_FEED_TOKENS + 100
    box.deliver([5] * (MAX_FEED_TOKENS + 50), None, None, None)
    rig.settle()
    rig.die()
    box.deliver([6] * (length - MAX_FEED_TOKENS - 50), FinishReason.LENGTH, None, None)
    feeds = []
    while True:
        rig.send()
        if not rig.under_way:
            break
        feeds.append(rig.under_way[0])
        rig.answer()
    assert [len(feed.token_ids.as_int32()) for feed in feeds] == [MAX_FEED_TOKENS, MAX_FEED_TOKENS, 100]
    assert [feed.answered.get(0) for feed in feeds] == [MAX_FEED_TOKENS, 50, None]
    assert len(box.unread_tokens) == length and "".join(box.unread_text) == "a" * (MAX_FEED_TOKENS + 50) + "ab" * (
        length - MAX_FEED_TOKENS - 50
    )


def test_what_nobody_wants_is_forgotten_by_the_worker():
    """A request that failed in this process, or with its world."""
    rig = Rig(plain(0), plain(1))
    for box in rig.boxes:
        box.deliver([5], None, None, None)
    rig.settle()
    assert len(rig.worker) == 2
    rig.texts[0].close()
    rig.texts[0].arrive([5], None)
    rig.settle()
    assert len(rig.worker) == 1 and seen(rig.boxes[0])[0] == [5]


def test_text_that_cannot_be_made_fails_its_request_alone():
    """Invariant 6: as in this process."""
    rig = Rig(plain(0), plain(1))
    rig.worker = TextMaker(stage_of)  # type: ignore[assignment]
    rig.boxes[0].deliver([5, POISON], None, None, None)
    rig.boxes[1].deliver([5], FinishReason.LENGTH, None, None)
    rig.settle()
    assert "could not be made: Poisoned" in str(rig.boxes[0].error)
    assert seen(rig.boxes[1]) == ([5], "a", FinishReason.LENGTH, None, None)


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        (TextPieces(2, Buffer.int32([1]), Buffer.int32([1]), "a"), "is answered as 2"),
        (TextPieces(1, Buffer.int32([1, 1]), Buffer.int32([1, 0]), "a"), "with 2, 2"),
        (TextPieces(1, Buffer.int32([1]), Buffer.int32([2]), "a"), "do not fit"),
        (TextPieces(1, Buffer.int32([-1]), Buffer.int32([1]), "a"), "do not fit"),
        (TextPieces(1, Buffer(b"abc"), Buffer.int32([1]), "a"), "multiple of"),
    ],
)
def test_an_answer_that_makes_no_sense_changes_nothing(pieces, complaint):
    rig = Rig(plain(0))
    rig.boxes[0].deliver([5], FinishReason.LENGTH, None, None)
    with pytest.raises(ValueError, match="none is under way"):
        rig.shard.answer(pieces)
    rig.send()
    with pytest.raises((ValueError, TypeError), match=complaint):
        rig.shard.answer(pieces)
    rig.settle()
    assert seen(rig.boxes[0]) == ([5], "a", FinishReason.LENGTH, None, None)


@pytest.mark.parametrize("workers", [-1, 65, True, 1.0, "2"])
def test_a_number_of_workers_that_cannot_be_had_is_refused_before_anything_starts(workers):
    with pytest.raises(RequestError, match="0 to 64"):
        LLM("echo", postprocess_workers=workers)


def test_workers_without_texts_are_refused_before_anything_starts():
    with pytest.raises(ModelError, match="no tokenizer"):
        LLM("echo", postprocess_workers=1)
