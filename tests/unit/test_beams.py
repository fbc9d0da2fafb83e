"""Beam search: the endings that the search knows, and its sequences in the engine. What its reader gets: ``test_extras``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headrace.engine.base import Float32
from headrace.engine.beam_search import BeamSearch, Step
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import VOCAB, TinyEngine, alone

# --- the search -------------------------------------------------------------------------------------------------------------------------


def rows(*logprobs: list[float]) -> list[Float32]:
    return [np.array(row, np.float32) for row in logprobs]


def search(width: int = 2, max_length: int = 4, penalty: float = 0.0, early: int = 1) -> BeamSearch:
    return BeamSearch(width, max_length, frozenset({0}), frozenset({1}), penalty, early)


def test_an_end_among_the_best_is_a_result_and_others_go_on() -> None:
    beams = search()
    assert beams.advance(rows([-9, -9, -1, -2, -9])) == [Step(0, 2), Step(0, 3)]
    assert beams.advance(rows([-0.5, -9, -2, -9, -9], [-9, -9, -9, -0.25, -9])) == [Step(1, 3), Step(0, 2)]
    assert beams.advance(rows([-9, -0.125, -1, -9, -9], [-9, -9, -9, -9, -3])) == []
    assert beams.done
    first, second = beams.results(2)
    assert (first.token_ids, first.finish, first.stop_reason, first.cumulative_logprob) == ((2, 0), FinishReason.STOP, None, -1.5)
    assert (second.token_ids, second.finish, second.stop_reason, second.score) == ((3, 3, 1), FinishReason.STOP, 1, -2.375)


def test_an_end_that_is_not_among_the_best_is_nothing() -> None:
    beams = search(width=1)
    assert beams.advance(rows([-2, -9, -1, -9, -9])) == [Step(0, 2)]
    assert beams.results(1) == []


def test_the_length_penalty_decides_which_is_the_best() -> None:
    for penalty, best, score in ((0.0, (0,), -1.0), (1.0, (2, 0), -1.3 / 2)):
        beams = search(width=2, penalty=penalty, early=2)
        beams.advance(rows([-1.0, -9, -1.2, -9, -9]))
        beams.advance(rows([-0.1, -9, -9, -9, -9], [-9, -9, -9, -9, -9]))
        assert beams.results(1)[0].token_ids == best and beams.results(1)[0].score == pytest.approx(score)


def test_the_greatest_length_ends_all() -> None:
    beams = search(max_length=1)
    assert beams.advance(rows([-9, -9, -1, -2, -9])) == [] and beams.done
    assert [(beam.token_ids, beam.finish) for beam in beams.results(5)] == [((2,), FinishReason.LENGTH), ((3,), FinishReason.LENGTH)]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logprobs_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        search().advance(rows([-1, wrong, -1, -1, -1]))


def test_where_everything_is_forbidden_nothing_goes_on() -> None:
    beams = search()
    assert beams.advance(rows([-np.inf] * 5)) == [] and beams.done and beams.results(2) == []


# --- in the engine ----------------------------------------------------------------------------------------------------------------------


def test_cancelling_a_beam_search_frees_all_of_its_beams() -> None:
    """A16, A39: whichever of its sequences live; the neighbour gets exactly its tokens."""
    params = SamplingParams(max_tokens=12, use_beam_search=True, best_of=4, ignore_eos=True)
    plain = SamplingParams(max_tokens=14, ignore_eos=True)
    for steps in range(7):
        for everything in (False, True):
            engine = TinyEngine()
            engine.submit(1, [1, 2, 3], params)
            engine.submit(2, [4, 5], plain)
            for _ in range(steps):
                engine.step()
            if everything:
                engine.engine.cancel_all()
            else:
                assert engine.engine.cancel(1) and not engine.engine.cancel(1) and not engine.engine.cancel(-1)
            got = engine.run()
            assert got[1].finish is FinishReason.ABORT and not got[1].beams
            assert everything or got[2].tokens == alone([4, 5], plain).tokens
            assert not engine.engine._live


def test_each_beam_has_rules_of_its_own() -> None:
    """What a beam has said is forbidden to it, and to no other."""
    params = {"max_tokens": 9, "ignore_eos": True, "logit_bias": dict.fromkeys((1, 2, 3), 9.0), "no_repeat_ngram_size": 2}
    for prompt in ([1, 2, 3], [5], [3, 3, 1]):
        beams = alone(prompt, SamplingParams(use_beam_search=True, n=4, **params)).beams
        assert len(beams) == 4
        for beam in beams:
            tokens = [*prompt, *beam.token_ids]
            pairs = list(pairwise(tokens))
            assert len(set(pairs)) == len(pairs)


def test_an_id_stays_taken_while_any_beam_lives() -> None:
    engine = TinyEngine()
    engine.submit(1, [1, 2, 3], SamplingParams(max_tokens=12, use_beam_search=True, best_of=4, ignore_eos=True))
    for _ in range(6):
        engine.step()
        with pytest.raises(ValueError, match="request 1 is live already"):
            engine.submit(1, [5], SamplingParams())
        assert [live.request.request_id for live in engine.engine._live] == [1], "one request, however many sequences"
    assert len(engine.run()[1].beams) == 1


def test_a_beam_of_one_is_greedy() -> None:
    params = {"max_tokens": 10, "repetition_penalty": 1.5}
    (beam,) = alone([1, 2, 3], SamplingParams(use_beam_search=True, **params)).beams
    # The penalty is on logprobs here and on logits there, so it is compared without one too.
    (plain,) = alone([1, 2, 3], SamplingParams(use_beam_search=True, max_tokens=10)).beams
    assert list(plain.token_ids) == alone([1, 2, 3], SamplingParams(max_tokens=10)).tokens
    assert len(beam.token_ids) <= 10


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"best_of": 100}, "a beam width of 100 exceeds the 64 sequences"),
        ({"best_of": 4, "bad_token_ids": list(range(VOCAB))}, "no token is allowed"),
        ({"best_of": 60, "max_tokens": 40}, "need up to"),
    ],
)
def test_a_beam_search_that_cannot_be_fails_alone(params: dict[str, Any], words: str) -> None:
    engine = TinyEngine()
    engine.submit(1, [1, 2, 3], SamplingParams(use_beam_search=True, **params))
    engine.submit(2, [4], SamplingParams(max_tokens=3))
    got = engine.run()
    assert got[1].finish is FinishReason.ERROR and words in str(got[1].error)
    assert got[2].tokens == alone([4], SamplingParams(max_tokens=3)).tokens
