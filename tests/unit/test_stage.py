"""Text stages (A21, A40, A42, invariant 11): however tokens are cut into chunks, text and ids are those of the whole, cut at one place."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import ByteLevelDetokenizer
from headrace.text.stage import PlainText, StoppingText
from headrace.text.stops import StopMatcher

#: id -> bytes: letters, overlapping pieces, a character of two bytes and one of four in parts, a broken byte, and a token without text
TABLE = dict(enumerate([b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"c\xc3", b"\xa9a", b""]))
A, B, AB, BA, _, E1, E2, S1, S2, S3, C_E1, E2_A, NONE = range(len(TABLE))

tokens = st.lists(st.sampled_from(sorted(TABLE)), max_size=12)
stops = st.lists(
    st.sampled_from(["a", "ab", "aab", "ba", "abb", "bab", "é", "éa", "cé", "\U0001f600", "b\U0001f600", "\ufffd", "aa"]),
    min_size=1,
    max_size=3,
)


def detokenizer() -> ByteLevelDetokenizer:
    return ByteLevelDetokenizer(TABLE.get)


def chunks_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(stage, chunks: list[list[int]]) -> tuple[str, list[int], str | None]:
    """Text, ids and stop that a reader gets, as the mailbox drives a stage."""
    fed: list[int] = []
    text, count = "", 0
    for chunk in chunks:
        fed += chunk
        released = stage.feed(chunk)
        text, count = text + released.text, count + released.num_tokens
        assert count <= len(fed)
        if released.stop is not None:
            return text, fed[:count], released.stop
    released = stage.flush()
    return text + released.text, fed[: count + released.num_tokens], released.stop


def expected(ids: list[int], wanted: list[str], include: bool, min_tokens: int = 0) -> tuple[str, list[int], str | None]:
    """The same, from the whole text at once."""
    whole = b"".join(TABLE[token] for token in ids).decode("utf-8", "replace")
    passed = len(detokenizer().feed(ids[:min_tokens]))
    matches = [(place, -len(stop), stop) for stop in wanted if (place := whole.find(stop, passed)) >= 0]
    if not matches:
        return whole, ids, None
    place, _, stop = min(matches)
    cut = place + len(stop) if include else place
    pieces, start, kept = detokenizer(), 0, 0
    for token in ids:
        kept += start < cut
        start += len(pieces.feed((token,)))
    return whole[:cut], ids[:kept], stop


@settings(database=None, deadline=None, max_examples=150)
@given(ids=tokens, data=st.data())
def test_plain_text_joined_is_the_whole_text_and_every_token_is_let_out(ids, data):
    text, kept, stop = run(PlainText(detokenizer()), chunks_of(data, ids))
    assert (text, kept, stop) == (b"".join(TABLE[token] for token in ids).decode("utf-8", "replace"), ids, None)


@settings(database=None, deadline=None, max_examples=400)
@given(ids=tokens, wanted=stops, include=st.booleans(), data=st.data())
def test_text_and_ids_are_cut_at_the_first_stop_string(ids, wanted, include, data):
    stage = StoppingText(detokenizer(), StopMatcher(wanted, include))
    assert run(stage, chunks_of(data, ids)) == expected(ids, wanted, include)


@settings(database=None, deadline=None, max_examples=100)
@given(ids=tokens, wanted=stops, include=st.booleans(), min_tokens=st.integers(1, 8), data=st.data())
def test_nothing_stops_the_text_of_the_first_tokens(ids, wanted, include, min_tokens, data):
    """A40: min_tokens."""
    stage = StoppingText(detokenizer(), StopMatcher(wanted, include), min_tokens)
    assert run(stage, chunks_of(data, ids)) == expected(ids, wanted, include, min_tokens)


@settings(database=None, deadline=None, max_examples=60)
@given(ids=tokens, wanted=stops, include=st.booleans())
@example(ids=[AB, S1, S2, S3], wanted=["\U0001f600"], include=False)
@example(ids=[A, E1, E2, B], wanted=["é"], include=False)
@example(ids=[A, B, A, B], wanted=["abb", "b"], include=False)
@example(ids=[A, AB], wanted=["ab", "abb"], include=True)
def test_token_by_token_equals_all_at_once(ids, wanted, include):
    one = run(StoppingText(detokenizer(), StopMatcher(wanted, include)), [[token] for token in ids])
    assert one == run(StoppingText(detokenizer(), StopMatcher(wanted, include)), [ids]) == expected(ids, wanted, include)


def test_ids_of_a_character_that_is_cut_off_are_cut_off_too():
    """The first part of a character gives no text yet: were it let out at once, the ids would end in half a character."""
    stage = StoppingText(detokenizer(), StopMatcher(["é"]))
    assert stage.feed([AB]) == (1, "ab", None)
    assert stage.feed([E1]) == (0, "", None)
    assert stage.feed([E2]) == (0, "", "é")


def test_a_token_with_the_end_of_the_text_and_the_beginning_of_the_stop_is_kept():
    stage = StoppingText(detokenizer(), StopMatcher(["bb"]))
    assert stage.feed([AB]) == (0, "a", None)
    assert stage.feed([B]) == (1, "", "bb")


def test_what_is_held_back_is_let_out_at_the_end():
    stage = StoppingText(detokenizer(), StopMatcher(["abb"]))
    assert stage.feed([A, B, NONE]) == (0, "", None)
    assert stage.flush() == (3, "ab", None)
