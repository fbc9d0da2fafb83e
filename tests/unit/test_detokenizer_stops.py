"""Stop strings in a stream of text (the text half of A40)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text import StopMatcher

#: few letters, so that stop strings overlap, repeat and contain each other
TEXT = st.text("ab.é", max_size=30)
STOPS = st.lists(st.text("ab.é", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the earliest beginning, there the longest."""
    for start in range(len(text)):
        found = [stop for stop in stops if text.startswith(stop, start)]
        if found:
            return start, max(found, key=len)
    return None


@settings(max_examples=200, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=10), st.booleans())
def test_the_released_text_is_the_whole_cut_at_the_first_match(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """A40: whatever the pieces; nothing more than the longest stop less one character is held back; nothing is released after a stop."""
    matcher = StopMatcher(stops, include)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    released = ""
    found = None
    for start, stop in pairwise(places):
        piece, now = matcher.feed(text[start:stop])
        assert found is None or (piece, now) == ("", found)
        released, found = released + piece, now
        assert found is not None or stop - len(released) < max(map(len, stops))
    rest, now = matcher.flush()
    assert found is None or (rest, now) == ("", found)
    assert matcher.found == now
    match = first_match(text, stops)
    assert now == (match[1] if match else None)
    if match is None:
        assert released + rest == text
    else:
        assert released + rest == text[: match[0]] + (match[1] if include else "")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["<|im_end|>"], ["Paris", ".", "<|im", "_end|>", " more"], [("Paris", None), (".", None), ("", None), ("", "<|im_end|>")]),
        (["\n\n", "\n"], ["a\n", "b"], [("a", None), ("", "\n")]),
        (["\n\n", "\n"], ["a\n", "\n"], [("a", None), ("", "\n\n")]),
        (["xabc", "a"], ["xa", "d"], [("", None), ("x", "a")]),
        (["xabc", "a"], ["xa", "bc"], [("", None), ("", "xabc")]),
        (["aab"], ["aaaa", "b"], [("aa", None), ("", "aab")]),
        (["a.c"], ["abc", "a.c"], [("abc", None), ("", "a.c")]),
        ([], ["anything"], [("anything", None)]),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: list[tuple[str, str | None]]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces][: len(expected)] == expected


def test_a_match_that_waits_for_a_longer_one_is_taken_at_the_end() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert matcher.feed("xabc") == ("x", None)
    assert matcher.flush() == ("", "ab")
    assert matcher.flush() == ("", "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])
