"""Logprobs and logits for a proxy that does not read (A7, A21): merged without loss, row by row with their tokens, and bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.base import Beam, LogprobRows, StepOutputs
from headrace.outputs import FinishReason
from headrace.worker import backlog as module
from headrace.worker.backlog import Backlog
from headrace.worker.lanes import RETRY_FULL
from tests.leader_rig import Rig

WIDTH = 3
#: what belongs to one token: a row of logprobs and one of logits
TOKEN_BYTES = (8 * WIDTH + 4) + 20


def logprobs(first: int, count: int) -> LogprobRows:
    numbers = np.arange(first, first + count)
    return LogprobRows(
        np.repeat(numbers[:, None], WIDTH, 1).astype(np.int32), np.ones((count, WIDTH), np.float32), numbers.astype(np.int32)
    )


def logits(first: int, count: int) -> Any:
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], 5, 1)


def numbers(rows: Any) -> list[int]:
    """The number that each row holds."""
    if isinstance(rows, LogprobRows):
        assert rows.token_ids[:, 0].tolist() == rows.ranks.tolist()
        return rows.ranks.tolist()  # type: ignore[no-any-return]
    return [] if rows is None else rows[:, 0].astype(int).tolist()


step = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=3, unique_by=lambda one: one[0])


@settings(database=None, deadline=None, max_examples=80)
@given(size=st.integers(2, 12), room=st.integers(1, 200), steps=st.lists(step, max_size=10), taken=st.lists(st.integers(0, 3), min_size=10))
def test_rows_stay_with_their_tokens_whatever_is_sent_when(size: int, room: int, steps: list[Any], taken: list[int]) -> None:
    """Request 0 asks for all, 1 for logprobs, 2 for nothing; rows of the prompt come first, in pieces, and nothing after the ending."""
    backlog = Backlog()
    made = {request_id: [0, 0] for request_id in range(3)}
    ended: set[int] = set()
    got: dict[str, dict[int, list[int]]] = {kind: {} for kind in ("tokens", *module.PER_TOKEN, *module.PER_PROMPT)}
    finished: set[int] = set()

    def merge(one: list[Any]) -> None:
        outputs = StepOutputs()
        for request_id, count, prompt, ends in one:
            if request_id in ended:
                continue
            tokens, rows = made[request_id]
            if tokens or request_id == 2:
                prompt = 0
            outputs.add(request_id, range(tokens, tokens + count), FinishReason.LENGTH if ends else None)
            if request_id < 2 and count:
                outputs.logprobs[request_id] = logprobs(tokens, count)
            if request_id == 0 and count:
                outputs.generation_logits[0] = logits(tokens, count)
            if prompt:
                outputs.prompt_logprobs[request_id] = logprobs(rows, prompt)
            if request_id == 0 and prompt:
                outputs.context_logits[0] = logits(rows, prompt)
            made[request_id] = [tokens + count, rows + prompt]
            if ends:
                ended.add(request_id)
        backlog.merge(outputs)

    def take() -> None:
        frame = backlog.frame()
        assert frame.request_ids and len(frame.request_ids) + len(frame.token_ids) <= size
        place = 0
        for request_id, count, finish in zip(frame.request_ids, frame.counts, frame.finish, strict=True):
            assert request_id not in finished
            for kind in module.PER_TOKEN:
                rows = getattr(frame, kind).get(request_id)
                asked = request_id == 0 or (request_id == 1 and kind == "logprobs")
                assert len(numbers(rows)) == (count if asked else 0), "as many rows as tokens"
            for kind in (*module.PER_TOKEN, *module.PER_PROMPT):
                got[kind].setdefault(request_id, []).extend(numbers(getattr(frame, kind).get(request_id)))
            got["tokens"].setdefault(request_id, []).extend(frame.token_ids[place : place + count])
            place += count
            if finish:
                finished.add(request_id)
        rows = [getattr(frame, kind).values() for kind in (*module.PER_TOKEN, *module.PER_PROMPT)]
        used = sum(one.nbytes for each in rows for one in each)
        assert used <= max(room, TOKEN_BYTES)
        backlog.sent(frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FRAME_SIZE", size)
        patch.setattr(module, "FRAME_BYTES", room)
        for one, times in zip(steps, taken, strict=False):
            merge(one)
            for _ in range(times):
                if backlog:
                    take()
        for _ in range(2000):
            if not backlog:
                break
            take()
    assert not len(backlog) and backlog._bytes == 0
    assert finished == ended
    for request_id, (tokens, rows) in made.items():
        assert got["tokens"].get(request_id, []) == list(range(tokens))
        assert got["logprobs"].get(request_id, []) == (list(range(tokens)) if request_id < 2 else [])
        assert got["generation_logits"].get(request_id, []) == (list(range(tokens)) if request_id == 0 else [])
        assert got["prompt_logprobs"].get(request_id, []) == list(range(rows))
        assert got["context_logits"].get(request_id, []) == (list(range(rows)) if request_id == 0 else [])


def test_a_view_of_a_step_is_not_kept() -> None:
    backlog, outputs = Backlog(), StepOutputs()
    whole = np.zeros((100, 1000), np.float32)
    outputs.add(1, ())
    outputs.context_logits[1] = whole[3:5]
    backlog.merge(outputs)
    kept = backlog.frame().context_logits[1]
    assert kept.shape == (2, 1000) and not np.shares_memory(kept, whole)


def test_results_of_a_beam_search_come_with_the_ending() -> None:
    backlog, outputs = Backlog(), StepOutputs()
    beams = [Beam((1, 2), FinishReason.STOP, None, -1.5, -0.75)]
    outputs.add(1, (), FinishReason.STOP)
    outputs.beams[1] = beams
    backlog.merge(outputs)
    assert backlog.frame().beams == {1: beams}


class _Logits:
    """An engine of one request that gets a token and a row of logits in each step, for ever."""

    has_work = True
    has_waiting = False

    def step(self) -> StepOutputs:
        outputs = StepOutputs()
        outputs.add(1, (7,))
        outputs.generation_logits[1] = np.zeros((1, 1000), np.float32)
        return outputs


def test_the_engine_rests_while_a_reader_that_does_not_read_has_too_much_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_BYTES", 20_000)
    with contextlib.closing(Rig()) as rig:
        rig.leader._engine = _Logits()  # type: ignore[assignment]
        channel = rig.limit(3)
        rig.iterate(50)
        assert rig.leader.steps == 3 + 5, "three frames were taken, five rows of 4000 bytes make it full"
        assert rig.leader._patience(None) <= RETRY_FULL, "and it looks again soon, but does not spin"
        channel.room = 1000
        rig.iterate(20)
        assert rig.leader.steps > 20
        got = rig.read()
        assert len(got.tokens[1]) == rig.leader.steps and rig.leader._owner.backlog._bytes == 0
