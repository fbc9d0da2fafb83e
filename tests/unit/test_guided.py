"""Guided decoding in rank 0: constraints over tiny vocabularies, compiling beside the loop, and the engine that uses both.

Covers A40 (endings), A43, A45 and A26 (the same text in any batch, after preemption, after replay), A17 and A19 (cancelled while it waits).
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine import guided, model_engine
from headrace.engine.base import EngineRequest, Float32, Int32, StepOutputs
from headrace.engine.guided import Grammar, GrammarCompiler, TokenConstraint
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.errors import ModelError, RequestError
from headrace.ipc.messages import Shutdown
from headrace.outputs import FinishReason
from headrace.params import MAX_GUIDED_CHOICES, GuidedDecodingParams, SamplingParams
from headrace.text.grammar import compile_grammar, grammar_of, grammar_tokens
from headrace.text.vocabulary import Vocabulary
from headrace.worker.lanes import RETRY_FULL
from headrace.worker.loop import ASK_AGAIN
from tests.leader_rig import Rig

WORDS = [b"true", b'": ', b'{"', b'"}', b"yes", b" no", "日".encode()[:2], b"12", b"ab", b"  "]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b"<|end|>", b"<|tool|>"]
END, TOOL = len(TOKENS) - 2, len(TOKENS) - 1
#: the model has more logits than the tokenizer tokens
VOCAB = len(TOKENS) + 30


def encode(text: str) -> list[int]:
    return list(text.encode())


VOCABULARY = Vocabulary(TOKENS, frozenset({END, TOOL}), encode)
LL_TOKENS = grammar_tokens(VOCABULARY)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}


def grammar(**params: Any) -> Grammar:
    return Grammar(compile_grammar(LL_TOKENS, grammar_of(GuidedDecodingParams(**params))), len(TOKENS), VOCABULARY.special)


def allowed(constraint: TokenConstraint) -> list[int]:
    row = np.zeros(VOCAB, np.float32)
    constraint.mask(row)
    assert set(np.unique(row).tolist()) <= {0.0, -np.inf}
    return np.flatnonzero(row == 0).tolist()


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


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


def test_a_grammar_may_name_the_token_that_ends_it(start: Callable[..., Run]) -> None:
    """Before that the text is not complete, and nothing but that token can follow."""
    constraint = TokenConstraint(grammar(grammar='start: "ab" <|end|>'), VOCAB, [END])
    constraint.accept(TOKENS.index(b"ab"))
    assert allowed(constraint) == [END] and not constraint.finished
    run = start().all(request(1, guide={"grammar": 'start: "ab" <|end|>'}))
    assert text_of(run.tokens[1]) == "ab" and run.tokens[1][-1] == END and run.ends[1] is FinishReason.STOP


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


def request(request_id: int, **params: Any) -> EngineRequest:
    """``guide``: arguments of its GuidedDecodingParams."""
    guide = params.pop("guide", None)
    head = {name: params.pop(name) for name in ("num_generated", "priority") if name in params}
    prompt = np.array(params.pop("prompt", encode("text:")), np.int32)
    sampling = SamplingParams(guided_decoding=None if guide is None else GuidedDecodingParams(**guide), **params)
    return EngineRequest(request_id, prompt, sampling, sampling.max_tokens or 32, seed=request_id, **head)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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


# --- the engine ---------------------------------------------------------------------------------------------------------------------


class NoiseRunner:
    """Logits are noise that depends on a row's token and position, so a request's text shows whether anything else had a hand in it."""

    model_name = "noise"
    model_config = ModelConfig(
        family="llama",
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        max_seq_len=512,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(END,),
    )
    dtype = "float32"
    versions: dict[str, str] = {}  # noqa: RUF012

    def execute(self, arrays: Sequence[Int32]) -> Float32:
        plan = StepPlan.from_arrays(arrays)
        rows = [np.random.default_rng(int(token)).standard_normal(VOCAB, np.float32) for token in plan.tokens[plan.samples]]
        return np.stack(rows) if rows else np.zeros((0, VOCAB), np.float32)

    def close(self) -> None:
        """Nothing to give back."""


class Run:
    """An engine and everything that it has said of each request."""

    def __init__(self, **config: Any) -> None:
        settings = {"model": "noise", "kv_cache_tokens": 8192, "tokens_per_block": 4, **config}
        self.engine = ModelEngine(EngineConfig(**settings), NoiseRunner())
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}

    def step(self) -> StepOutputs:
        outputs = self.engine.step()
        place = 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            assert request_id not in self.ends, "nothing follows an ending"
            self.tokens.setdefault(request_id, []).extend(outputs.token_ids[place : place + count])
            place += count
            if finish:
                self.ends[request_id] = FinishReason(finish)
        self.errors |= outputs.errors
        return outputs

    def all(self, *requests: EngineRequest) -> Run:
        for one in requests:
            self.engine.submit(one)
        while self.engine.has_work or self.engine.has_waiting:
            wait_until(lambda: self.engine.has_work)
            self.step()
        assert self.engine.stats()["kv_blocks_used"] == 0
        return self


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setattr(model_engine, "load_vocabulary", lambda config: VOCABULARY)
    runs: list[Run] = []

    def make(**config: Any) -> Run:
        runs.append(Run(**config))
        return runs[-1]

    yield make
    for run in runs:
        run.engine.close()


GUIDES = [{"json": SCHEMA}, {"regex": r"[a-z]{3,9}\d"}, {"choice": ["yes", "no no no", "日本"]}]


def mixed() -> list[EngineRequest]:
    """Guided and free requests in turn."""
    guides = [GUIDES[index // 2 % 3] if index % 2 else None for index in range(12)]
    return [
        request(index, guide=guide, max_tokens=400 if guide else 60, temperature=1.0, prompt=encode(f"{index}:"), ignore_eos=index % 4 == 0)
        for index, guide in enumerate(guides)
    ]


def test_guided_and_free_requests_in_one_batch_give_what_they_give_alone(start: Callable[..., Run]) -> None:
    """A43; and guided ones match what guides them."""
    alone = {index: start().all(one) for index, one in enumerate(mixed())}
    together = start().all(*mixed())
    for index, run in alone.items():
        assert together.tokens[index] == run.tokens[index] and together.ends[index] == run.ends[index]
    for index in range(1, 12, 2):
        assert together.ends[index] is FinishReason.STOP
        text = text_of(together.tokens[index])
        match GUIDES[index // 2 % 3]:
            case {"json": _}:
                assert json.loads(text).keys() >= {"name", "n"}
            case {"regex": pattern}:
                assert re.fullmatch(str(pattern), text)
            case {"choice": choices}:
                assert text in choices


def test_preemption_changes_no_guided_text(start: Callable[..., Run]) -> None:
    """A45"""
    roomy, tight = start().all(*mixed()), start(kv_cache_tokens=256).all(*mixed())
    assert tight.engine.stats()["preemptions"] > 0
    assert tight.tokens == roomy.tokens and tight.ends == roomy.ends


def test_replay_continues_where_the_dead_world_was(start: Callable[..., Run]) -> None:
    """A26, for guided requests: prompt and tokens so far, cut at every place."""
    whole = start().all(request(1, guide={"json": SCHEMA}, max_tokens=400, temperature=1.0)).tokens[1]
    assert len(whole) > 5
    for done in (1, 2, 5, len(whole) // 2, len(whole) - 1, len(whole)):
        prompt = encode("text:") + whole[:done]
        again = start().all(request(1, guide={"json": SCHEMA}, max_tokens=400, temperature=1.0, prompt=prompt, num_generated=done))
        # Where the grammar is finished with the last token, its word that it was the last is all that is missing.
        assert (again.tokens[1], again.ends) == (whole[done:], {1: FinishReason.STOP})


def test_the_text_ends_where_nothing_can_follow(start: Callable[..., Run]) -> None:
    """A40: whether or not there is a token that ends it; and at max_tokens, unfinished."""
    run = start().all(
        request(1, guide={"choice": ["ab"]}, ignore_eos=True),
        request(2, guide={"choice": ["ab"]}, max_tokens=1, bad_token_ids=[TOKENS.index(b"ab")]),
        request(3, guide={"choice": ["yes"]}, stop_token_ids=[TOOL]),
    )
    assert run.ends[1] is FinishReason.STOP and text_of(run.tokens[1]) == "ab"
    assert run.ends[3] is FinishReason.STOP and text_of(run.tokens[3]) == "yes"
    assert run.ends[2] in (FinishReason.LENGTH, FinishReason.STOP) and "ab".startswith(text_of(run.tokens[2]))


def test_other_rules_work_inside_what_the_grammar_allows(start: Callable[..., Run]) -> None:
    """min_tokens keeps the end away while anything else may follow; where nothing may, the text is over. Bias moves what is allowed."""
    run = start().all(
        request(1, guide={"regex": "[a-z]*"}, min_tokens=12, max_tokens=40, logit_bias={END: 100.0}),
        request(2, guide={"regex": "x{3}"}, min_tokens=12, max_tokens=40),
        request(3, guide={"choice": ["yes", "12"]}, logit_bias={TOKENS.index(b"12"): 100.0}),
        request(4, guide={"choice": ["y"]}, bad_token_ids=[ord("y")]),
    )
    assert len(run.tokens[1]) == 13 and run.tokens[1][-1] == END and re.fullmatch("[a-z]*", text_of(run.tokens[1]))
    assert text_of(run.tokens[2]) == "xxx" and run.ends[2] is FinishReason.STOP
    assert text_of(run.tokens[3]) == "12"
    assert run.ends[4] is FinishReason.ERROR and "no token is allowed" in run.errors[4]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are compiled once it is set."""
    event = threading.Event()

    def compile_it(tokens: Any, source: str) -> Any:
        assert event.wait(30)
        return compile_grammar(tokens, source)

    monkeypatch.setattr(guided, "compile_grammar", compile_it)
    yield event
    event.set()


def test_others_run_while_a_grammar_is_compiled(start: Callable[..., Run], gate: threading.Event) -> None:
    run = start()
    run.engine.submit(request(1, guide={"choice": ["yes"]}))
    assert not run.engine.has_work and run.engine.has_waiting and run.engine.stats()["requests_waiting"] == 1
    run.engine.submit(request(2, max_tokens=3, ignore_eos=True))
    with pytest.raises(ValueError, match="request 1 is live already"):
        run.engine.submit(request(1))
    while run.engine.has_work:
        run.step()
    assert len(run.tokens[2]) == 3 and 1 not in run.tokens and run.engine.has_waiting
    gate.set()
    run.all()
    assert text_of(run.tokens[1]) == "yes"


def test_cancelled_while_its_grammar_is_compiled(start: Callable[..., Run], gate: threading.Event) -> None:
    """A17, A19: it never runs, its ending comes at once, and its id may be used again, even before that grammar is ready."""
    run = start()
    for request_id in (1, 2, 3):
        run.engine.submit(request(request_id, guide={"regex": "x{1,3}"}))
    assert run.engine.cancel(1) and run.engine.cancel(2, FinishReason.TIMEOUT) and not run.engine.cancel(1)
    assert run.engine.has_work
    run.step()
    assert run.ends == {1: FinishReason.ABORT, 2: FinishReason.TIMEOUT} and run.tokens == {1: [], 2: []}
    del run.ends[1]
    run.engine.submit(request(1, guide={"choice": ["yes"]}))
    run.engine.cancel(3)
    gate.set()
    run.all()
    assert text_of(run.tokens[1]) == "yes" and run.ends[3] is FinishReason.ABORT and run.tokens[3] == []
    run.engine.submit(request(4, guide={"regex": "another"}))
    run.engine.cancel_all()
    run.all()
    assert run.ends[4] is FinishReason.ABORT and not run.engine.has_waiting


def test_a_grammar_that_fails_ends_its_request_alone(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue of one request (invariant 6): when it is compiled, when a mask is made, and when a token is taken."""
    free = start().all(request(0, max_tokens=8, ignore_eos=True)).tokens[0]
    real_mask, real_accept = TokenConstraint.mask, TokenConstraint.accept

    def failing(real: Callable[..., None], after: int) -> Callable[..., None]:
        calls: dict[int, int] = {}

        def call(constraint: TokenConstraint, argument: Any) -> None:
            calls[id(constraint)] = calls.get(id(constraint), 0) + 1
            if calls[id(constraint)] > after:
                raise RequestError("guided decoding: the matcher gave up")
            real(constraint, argument)

        return call

    for name, real in (("mask", real_mask), ("accept", real_accept)):
        monkeypatch.setattr(TokenConstraint, name, failing(real, 2))
        run = start().all(
            request(0, max_tokens=8, ignore_eos=True),
            request(1, guide={"regex": "[a-z]{20}"}),
            request(2, guide={"choice": ["ab"]}),
            request(3, guide={"grammar": "start: nobody"}),
        )
        assert run.tokens[0] == free and run.ends[0] is FinishReason.LENGTH
        assert run.ends[1] is run.ends[3] is FinishReason.ERROR and run.ends[2] is FinishReason.STOP
        assert "the matcher gave up" in run.errors[1] and "unknown name" in run.errors[3]
        monkeypatch.undo()
        monkeypatch.setattr(model_engine, "load_vocabulary", lambda config: VOCABULARY)


# --- the loop -----------------------------------------------------------------------------------------------------------------------


def test_the_loop_neither_spins_nor_sleeps_nor_ends_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants 3 and 9."""
    rig = Rig()
    try:
        assert rig.leader._patience(None) is None
        monkeypatch.setattr(type(rig.engine), "has_waiting", True)
        assert rig.leader._patience(None) == ASK_AGAIN
        assert rig.leader._patience(0.0) == 0.0
        rig.requests.send(Shutdown(drain=True))
        assert rig.iterate(5), "a request is still to come"
        assert rig.leader._patience(None) == min(ASK_AGAIN, RETRY_FULL)
        monkeypatch.setattr(type(rig.engine), "has_waiting", False)
        assert not rig.iterate()
        assert rig.read().done
    finally:
        rig.close()
