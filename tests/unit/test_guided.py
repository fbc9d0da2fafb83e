"""Guided decoding in rank 0: constraints over tiny vocabularies, and compiling beside the loop (A17, A19, A40)."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from headrace.engine import guided
from headrace.engine.guided import Grammar, GrammarCompiler, TokenConstraint
from headrace.errors import ModelError, RequestError
from headrace.params import MAX_GUIDED_CHOICES, GuidedDecodingParams
from headrace.text.grammar import compile_grammar
from headrace.text.vocabulary import Vocabulary
from tests.guided_rig import END, SCHEMA, TOKENS, TOOL, VOCAB, VOCABULARY, allowed, grammar, request, text_of, wait_until


def walk(constraint: TokenConstraint, seed: int, limit: int = 4000) -> list[int]:
    """Any allowed token, until nothing can follow or the end was drawn."""
    rng, tokens = np.random.default_rng(seed), []
    while not constraint.finished and len(tokens) < limit:
        # One in eight is the end where it is allowed, else a walk through an endless grammar would be endless.
        choices = allowed(constraint)
        assert choices, "something is allowed, or it is finished"
        token = END if END in choices and rng.random() < 0.125 else int(rng.choice(choices))
        tokens.append(token)
        if token == END:
            break
        constraint.accept(token)
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_any_walk_gives_json_under_the_schema(seed: int) -> None:
    value = json.loads(text_of(walk(TokenConstraint(grammar(json=SCHEMA), VOCAB, [END]), seed)))
    assert isinstance(value["name"], str) and len(value["name"]) <= 6 and type(value["n"]) is int
    assert value.keys() <= {"name", "n", "ok"} and isinstance(value.get("ok", True), bool)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pattern", [r"[A-Z][a-z]{2,5}-\d{2,4}", r"(yes|no)( (yes|no)){0,3}", r"日+é?"])
def test_any_walk_matches_the_regex(pattern: str, seed: int) -> None:
    text = text_of(walk(TokenConstraint(grammar(regex=pattern), VOCAB, [END]), seed))
    assert re.fullmatch(pattern, text)


def test_choices_and_grammars() -> None:
    choices = ["yes", "yes please", 'a"b\\', "日本"]
    texts = {text_of(walk(TokenConstraint(grammar(choice=choices), VOCAB, [END]), seed)) for seed in range(60)}
    assert texts == set(choices)
    nested = grammar(grammar='start: expr\nexpr: "(" expr ")" | "ab"')
    for seed in range(5):
        assert re.fullmatch(r"(\(*)ab(\)*)", text := text_of(walk(TokenConstraint(nested, VOCAB, [END]), seed)))
        assert text.count("(") == text.count(")")


def test_the_most_choices_that_may_be_given_work_to_their_end() -> None:
    """Invariant 7: what the check lets pass does not fail when half of it is generated."""
    choices = [f"item {number} of many" for number in range(MAX_GUIDED_CHOICES)]
    compiled = grammar(choice=choices)
    for seed in range(3):
        assert text_of(walk(TokenConstraint(compiled, VOCAB, [END]), seed)) in choices


@pytest.mark.parametrize(("cost", "fails_at"), [(0.005, None), (0.3, 2)])
def test_a_grammar_that_takes_too_long_fails_and_a_quick_one_never_does(
    cost: float, fails_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 6 and 8: what one request costs beside the model is bounded, for all others wait."""
    times = itertools.count()
    monkeypatch.setattr(guided.time, "thread_time", lambda: cost * next(times))
    constraint = TokenConstraint(grammar(regex="(ab){1000}"), VOCAB, [END])
    for count in range(500):
        try:
            allowed(constraint)
        except RequestError as error:
            assert count == fails_at and re.search(r"too ambiguous: it took 1\.50 s of computing, of 1\.02 s", str(error))
            return
        constraint.accept(TOKENS.index(b"ab"))
    assert fails_at is None


def test_the_end_is_allowed_exactly_where_the_text_is_complete() -> None:
    """A40"""
    constraint = TokenConstraint(grammar(regex="ab?c?"), VOCAB, [END, 7])
    assert allowed(constraint) == [ord("a"), TOKENS.index(b"ab")]
    constraint.accept(ord("a"))
    assert allowed(constraint) == [7, ord("b"), ord("c"), END] and not constraint.finished
    constraint.accept(ord("b"))
    assert allowed(constraint) == [7, ord("c"), END] and not constraint.finished
    constraint.accept(ord("c"))
    assert constraint.finished


@pytest.mark.parametrize("pattern", ["ab", "a(b|)", "ab{0,1}"])
def test_where_nothing_can_follow_it_is_finished(pattern: str) -> None:
    """Also if no token ends the request: then there is nothing left to draw."""
    constraint = TokenConstraint(grammar(regex=pattern), VOCAB, [])
    constraint.accept(TOKENS.index(b"ab"))
    assert constraint.finished


def test_special_tokens_and_what_is_no_token_are_forbidden_unless_named() -> None:
    everything = allowed(TokenConstraint(grammar(regex="(?s).*"), VOCAB, []))
    assert everything and max(everything) < END
    named = TokenConstraint(grammar(grammar='start: <|tool|> "ab"'), VOCAB, [END])
    assert allowed(named) == [TOOL]
    named.accept(TOOL)
    assert ord("a") in allowed(named) and TOOL not in allowed(named)


def test_an_ending_that_is_text_ends_nothing_before_it_is_complete() -> None:
    """A stop token, or the end of sequence of a tokenizer that does not call it special."""
    constraint = TokenConstraint(grammar(regex="[a-c]{2,3}"), VOCAB, [ord("c"), END])
    assert ord("c") not in allowed(constraint)
    constraint.accept(ord("a"))
    assert ord("c") not in allowed(constraint)
    constraint.accept(ord("b"))
    assert {ord("c"), END} <= set(allowed(constraint))


def test_a_token_that_does_not_match_is_an_error() -> None:
    constraint = TokenConstraint(grammar(regex="ab"), VOCAB, [END])
    with pytest.raises(RequestError, match=r"guided decoding: .*doesn't satisfy the grammar"):
        constraint.accept(ord("x"))
    with pytest.raises(RequestError, match="guided decoding"):
        constraint.mask(np.zeros(VOCAB, np.float32))


def test_from_the_tokens_so_far_the_state_is_the_same() -> None:
    """Replay: at every point of a walk."""
    compiled = grammar(json=SCHEMA)
    tokens = walk(TokenConstraint(compiled, VOCAB, [END]), 3)
    straight = TokenConstraint(compiled, VOCAB, [END])
    for done, token in enumerate(tokens):
        again = TokenConstraint(compiled, VOCAB, [END], tokens[:done])
        assert allowed(again) == allowed(straight)
        straight.accept(token)
    assert straight.finished and TokenConstraint(compiled, VOCAB, [END], tokens).finished
    with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
        TokenConstraint(compiled, VOCAB, [END], [*tokens, ord("x")])


# --- compiling ----------------------------------------------------------------------------------------------------------------------


def answers(compiler: GrammarCompiler, count: int) -> list[tuple[int, Grammar | RequestError]]:
    """Of so many requests, in the order in which they come."""
    found: list[tuple[int, Grammar | RequestError]] = []

    def enough() -> bool:
        found.extend((asked.request_id, result) for asked, result in compiler.take())
        return len(found) >= count

    wait_until(enough)
    return found


def ask(compiler: GrammarCompiler, request_id: int, **guide: Any) -> None:
    compiler.ask(request(request_id, guide=guide), GuidedDecodingParams(**guide))


def test_each_grammar_is_compiled_once_and_the_least_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_it(tokens: Any, source: str) -> Any:
        compiled.append(source)
        return compile_grammar(tokens, source)

    monkeypatch.setattr(guided, "compile_grammar", compile_it)
    monkeypatch.setattr(guided, "MAX_COMPILED", 2)
    loads: list[int] = []
    compiler = GrammarCompiler(lambda: loads.append(1) or VOCABULARY)  # type: ignore[func-returns-value]
    for request_id in range(4):
        ask(compiler, request_id, regex="a")
    assert [request_id for request_id, _ in answers(compiler, 4)] == [0, 1, 2, 3]
    assert len(compiled) == 1 and loads == [1]
    ask(compiler, 4, regex="a")
    assert compiler.has_answers, "what is known needs no thread"
    ask(compiler, 5, regex="b")
    answers(compiler, 2)
    ask(compiler, 6, regex="a")
    ask(compiler, 7, regex="c")
    answers(compiler, 2)
    assert len(compiled) == 3
    ask(compiler, 8, regex="a")
    ask(compiler, 9, regex="b")
    assert {request_id for request_id, _ in answers(compiler, 2)} == {8, 9}
    assert len(compiled) == 4 and loads == [1], "b was dropped, a was not"
    compiler.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [(ModelError("there is no tokenizer"), "there is no tokenizer"), (KeyError("x"), "the grammar cannot be compiled: KeyError: 'x'")],
)
def test_a_tokenizer_that_cannot_be_read_is_the_answer(fault: Exception, message: str) -> None:
    def load() -> Vocabulary:
        raise fault

    compiler = GrammarCompiler(load)
    ask(compiler, 1, regex="a")
    ((_, error),) = answers(compiler, 1)
    assert isinstance(error, RequestError) and str(error) == message
    compiler.close()
