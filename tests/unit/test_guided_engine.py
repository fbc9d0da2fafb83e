"""Guided decoding in the engine and in the loop (A40, A43, A45 and A26: the same text in any batch, after preemption, after replay; A17,
A19: cancelled while it waits).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine import guided, model_engine
from headrace.engine.base import EngineRequest, Float32, Int32, StepOutputs
from headrace.engine.guided import TokenConstraint
from headrace.engine.kv_cache import cache_limits
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.errors import RequestError
from headrace.ipc.messages import Shutdown
from headrace.outputs import FinishReason
from headrace.text.grammar import compile_grammar
from headrace.worker.loop import ASK_AGAIN, RETRY_FULL
from tests.guided_rig import END, SCHEMA, TOKENS, TOOL, VOCAB, VOCABULARY, allowed, encode, grammar, request, text_of, wait_until
from tests.leader_rig import Rig
from tests.tiny_runner import tiny_config


class NoiseRunner:
    """Logits are noise that depends on a row's token and position, so a request's text shows whether anything else had a hand in it."""

    model_name = "noise"
    model_config = tiny_config(VOCAB, max_seq_len=512, eos_token_ids=(END,))
    dtype = "float32"
    quantization = "none"
    versions: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, config: EngineConfig) -> None:
        self.limits = cache_limits(config, self.model_config.max_seq_len)
        self.max_loras = config.max_loras
        self.max_candidates = 0

    def execute(self, arrays: Sequence[Int32]) -> Float32:
        plan = StepPlan.from_arrays(arrays)
        rows = [np.random.default_rng(int(token)).standard_normal(VOCAB, np.float32) for token in plan.tokens[plan.samples]]
        return np.stack(rows) if rows else np.zeros((0, VOCAB), np.float32)

    def close(self) -> None:
        """Nothing to give back."""


class Run:
    """An engine and everything that it has said of each request."""

    def __init__(self, **config: Any) -> None:
        settings = EngineConfig(**{"model": "noise", "kv_cache_tokens": 8192, "tokens_per_block": 4, **config})
        self.engine = ModelEngine(settings, NoiseRunner(settings))
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


def test_a_grammar_may_name_the_token_that_ends_it(start: Callable[..., Run]) -> None:
    """Before that the text is not complete, and nothing but that token can follow."""
    constraint = TokenConstraint(grammar(grammar='start: "ab" <|end|>'), VOCAB, [END])
    constraint.accept(TOKENS.index(b"ab"))
    assert allowed(constraint) == [END] and not constraint.finished
    run = start().all(request(1, guide={"grammar": 'start: "ab" <|end|>'}))
    assert text_of(run.tokens[1]) == "ab" and run.tokens[1][-1] == END and run.ends[1] is FinishReason.STOP


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
