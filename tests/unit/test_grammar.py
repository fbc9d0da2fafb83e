"""Grammars are refused in the user process, by name and in bounded time (A34; invariant 7)."""

from __future__ import annotations

import json
import threading
import time

import pytest

from headrace.errors import QueueFullError, RequestError
from headrace.params import MAX_GRAMMAR_CHARS, GuidedDecodingParams
from headrace.text import grammar
from headrace.text.grammar import GrammarChecker


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker(["<|im_end|>", "<tool>"])


@pytest.mark.parametrize(
    "good",
    [
        {"json_object": True},
        {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}},
        {"json": True},
        {"json": "true"},
        {"json": {}},
        {"regex": r"[a-z]{2,5}|\d+"},
        {"regex": "a*"},
        {"grammar": 'start: "a" WORD\nWORD: /[a-z]+/'},
        {"grammar": 'root ::= "a" rest\nrest ::= [a-z]+'},
        {"grammar": 'start: <tool> "x" <|im_end|>'},
        {"choice": ["yes", "no", 'say "hi"\\\n', "é😀", "yes please"]},
    ],
    ids=str,
)
def test_good_grammars_pass(checker: GrammarChecker, good: dict[str, object]) -> None:
    checker.check(GuidedDecodingParams(**good))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "json must be a schema"),
        ({"json": "false"}, "json must be a schema, which is an object or true, not false"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"type": "string", "not": {"const": "a"}}}, 'Unimplemented keys: ."not".'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum .3."),
        ({"json": {"$ref": "http://example.com/schema"}}, "does not fetch|not present"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(" * 3000}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"[^\s\S]"}, "no text can match"),
        ({"regex": "a{0}"}, "only the empty text can match"),
        ({"grammar": "start: foo"}, "unknown name: .foo."),
        ({"grammar": "start: start"}, "no text can match"),
        ({"grammar": "start: <nobody>"}, "unknown special token"),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": "no grammar at all"}, "guided decoding: "),
        ({"choice": ["x" * (MAX_GRAMMAR_CHARS // 2), "y" * (MAX_GRAMMAR_CHARS // 2)]}, "the choices have .* at most 131072 are allowed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_grammars_are_refused_by_name(checker: GrammarChecker, bad: dict[str, object], message: str) -> None:
    """A34: twice, for the verdict is kept, and the next one is judged by itself."""
    for _ in range(2):
        with pytest.raises(RequestError, match=message) as refused:
            checker.check(GuidedDecodingParams(**bad))
        assert len(str(refused.value)) < 500
    checker.check(GuidedDecodingParams(json_object=True))


@pytest.mark.parametrize("rule", ['r{}: "a" r{}', "r{}: r{}", 'R{}: "a" R{}'], ids=["rules", "empty", "terminals"])
def test_long_chains_of_rules_do_not_end_the_process(checker: GrammarChecker, rule: str) -> None:
    """llguidance recurses: on an ordinary stack a few thousand rules in a row are a segmentation fault."""
    number = MAX_GRAMMAR_CHARS // (len(rule) + 7)
    name = rule[0]
    lines = [f"start: {name}0", *(rule.format(i, i + 1) for i in range(number)), f'{name}{number}: "z"']
    checker.check(GuidedDecodingParams(grammar="\n".join(lines)))


def test_deep_schemas_are_refused_or_work(checker: GrammarChecker) -> None:
    for depth in (30, 1000):
        schema = '{"items":' * depth + "{}" + "}" * depth
        if depth == 30:
            checker.check(GuidedDecodingParams(json=schema))
        else:
            with pytest.raises(RequestError, match=r"guided decoding|recursion|JSON"):
                checker.check(GuidedDecodingParams(json=schema))


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(grammar, "compile_grammar", lambda tokens, source: compiled.append(source))
    monkeypatch.setattr(grammar, "MAX_VERDICTS", 2)
    checker = GrammarChecker([])
    for pattern in ("a", "a", "b", "a", "c", "a", "b"):
        checker.check(GuidedDecodingParams(regex=pattern))
    # "b" was the least recently used when "c" came.
    assert [json.loads(source)["grammars"][0]["lark_grammar"] for source in compiled] == [f"start: /{c}/" for c in "abcb"]


def test_a_check_that_takes_too_long_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused after the limit; others go on being checked, until too many are left behind; when those end, all is well again."""
    release = threading.Event()
    real = grammar.compile_grammar

    def compile_grammar(tokens: object, source: str) -> object:
        if "slow" in source:
            assert release.wait(30)
        return real(tokens, source)

    monkeypatch.setattr(grammar, "compile_grammar", compile_grammar)
    monkeypatch.setattr(grammar, "CHECK_SECONDS", 0.05)
    checker = GrammarChecker([])
    for name in ("slow1", "slow2"):
        began = time.monotonic()
        with pytest.raises(RequestError, match=r"took more than 0\.05 s"):
            checker.check(GuidedDecodingParams(regex=name))
        assert time.monotonic() - began < 5
        if name == "slow1":
            monkeypatch.setattr(grammar, "CHECK_SECONDS", 30.0)
            checker.check(GuidedDecodingParams(regex="quick"))
            monkeypatch.setattr(grammar, "CHECK_SECONDS", 0.05)
    with pytest.raises(QueueFullError):
        checker.check(GuidedDecodingParams(regex="other"))
    checker.check(GuidedDecodingParams(regex="quick"))  # its verdict is known
    release.set()
    for thread in threading.enumerate():
        if thread.name == "headrace-grammar":
            thread.join(30)
    monkeypatch.setattr(grammar, "CHECK_SECONDS", 30.0)
    checker.check(GuidedDecodingParams(regex="other"))
    with pytest.raises(RequestError, match="took more than"):
        checker.check(GuidedDecodingParams(regex="slow1"))


def test_whatever_the_library_raises_concerns_one_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_grammar(tokens: object, source: str) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(grammar, "compile_grammar", compile_grammar)
    with pytest.raises(RequestError, match="cannot be compiled: MemoryError: no room"):
        GrammarChecker([]).check(GuidedDecodingParams(regex="a"))
