"""The model engine over a runner that needs no weights: endings, errors, cancelling, and the plans that it gives to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest, Float32, Int32, SingleRank, StepOutputs
from headrace.engine.kv_cache import cache_limits
from headrace.engine.model_engine import ModelEngine, load_runner, make_engine
from headrace.engine.plan import StepPlan
from headrace.engine.sampler import RowSampling, sample
from headrace.errors import ModelError
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from tests.tiny_runner import tiny_config

VOCAB = 50
NAN_TOKEN = 49


class CountingRunner:
    """The token after t at position p is (t + 1) % 40; after ``NAN_TOKEN`` the logits are NaN. Keeps the plans that it was given."""

    model_name = "counting"
    model_config = tiny_config(VOCAB, eos_token_ids=(30, 31))
    dtype = "float32"
    quantization = "none"
    max_candidates = 0

    def __init__(self, config: EngineConfig) -> None:
        self.limits = cache_limits(config, self.model_config.max_seq_len)
        self.max_loras = config.max_loras
        self.versions = {"counting": "1"}
        self.plans: list[StepPlan] = []
        self.closed = False

    def execute(self, arrays: Sequence[Int32]) -> Float32:
        plan = StepPlan.from_arrays(arrays)
        self.plans.append(plan)
        logits = np.zeros((len(plan.samples), VOCAB), np.float32)
        for out, token in zip(logits, plan.tokens[plan.samples].tolist(), strict=True):
            if token == NAN_TOKEN:
                out[:] = np.nan
            else:
                out[(token + 1) % 40] = 1
        return logits

    def close(self) -> None:
        self.closed = True


class Driver:
    """An engine and everything that it has said of each request."""

    def __init__(self, **config: Any) -> None:
        settings = EngineConfig(**{"model": "counting", "kv_cache_tokens": 256, "tokens_per_block": 4, **config})
        self.runner = CountingRunner(settings)
        self.broadcast: list[tuple[Int32, ...]] = []
        self.engine = ModelEngine(settings, self.runner, lambda arrays: self.broadcast.append(tuple(arrays)))
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.stop_reasons: dict[int, int] = {}
        self.errors: dict[int, str] = {}

    def submit(self, request_id: int, prompt: list[int], max_tokens: int = 5, priority: float = 0.5, **params: Any) -> None:
        head = {name: params.pop(name) for name in ("num_generated", "processor") if name in params}
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        tokens = np.array(prompt, np.int32)
        self.engine.submit(EngineRequest(request_id, tokens, sampling, max_tokens, seed=request_id, priority=priority, **head))

    def step(self) -> StepOutputs:
        outputs = self.engine.step()
        place = 0
        assert len(set(outputs.request_ids)) == len(outputs.request_ids), "a request appears once in a step"
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            assert request_id not in self.ends, "nothing follows an ending"
            self.tokens.setdefault(request_id, []).extend(outputs.token_ids[place : place + count])
            place += count
            if finish:
                self.ends[request_id] = FinishReason(finish)
        assert place == len(outputs.token_ids)
        self.stop_reasons |= outputs.stop_reasons
        self.errors |= outputs.errors
        return outputs

    def run(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail("the engine does not end")


def test_max_tokens_ends_with_length() -> None:
    driver = Driver()
    driver.submit(1, [1, 2, 3], max_tokens=4)
    driver.run()
    assert driver.tokens == {1: [4, 5, 6, 7]}
    assert driver.ends == {1: FinishReason.LENGTH}
    assert driver.engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop_reason"),
    [
        ({}, [29, 30], FinishReason.STOP, None),
        ({"ignore_eos": True}, [29, 30, 31, 32], FinishReason.LENGTH, None),
        ({"end_id": 29}, [29], FinishReason.STOP, None),
        ({"end_id": 31}, [29, 30, 31], FinishReason.STOP, None),
        ({"end_id": 29, "ignore_eos": True}, [29, 30, 31, 32], FinishReason.LENGTH, None),
        ({"stop_token_ids": [29]}, [29], FinishReason.STOP, 29),
        ({"stop_token_ids": [30]}, [29, 30], FinishReason.STOP, None),
        ({"stop_token_ids": [31], "ignore_eos": True}, [29, 30, 31], FinishReason.STOP, 31),
        ({"stop_token_ids": [32], "ignore_eos": True}, [29, 30, 31, 32], FinishReason.STOP, 32),
    ],
)
def test_what_ends_a_text(params: dict[str, Any], tokens: list[int], finish: FinishReason, stop_reason: int | None) -> None:
    """A40 for token ids: the token that ends it is part of it; the model's own end has no stop reason."""
    driver = Driver()
    driver.submit(1, [28], max_tokens=4, **params)
    driver.run()
    assert (driver.tokens[1], driver.ends[1], driver.stop_reasons.get(1)) == (tokens, finish, stop_reason)


def test_the_end_of_the_context_ends_with_length() -> None:
    """A35."""
    driver = Driver(max_seq_len=8)
    assert driver.engine.facts.max_seq_len == 8
    driver.submit(1, [1, 2, 3, 4, 5], max_tokens=100)
    driver.run()
    assert (driver.tokens[1], driver.ends[1]) == ([6, 7, 8], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt has 0 tokens; 1 to 7 fit"),
        (list(range(8)), "the prompt has 8 tokens; 1 to 7 fit"),
        ([1, 50], "token id 50 is out of range: the vocabulary has 50 tokens"),
        ([-1, 1], "token id -1 is out of range"),
    ],
)
def test_a_request_that_cannot_run_ends_with_error_and_disturbs_nobody(prompt: list[int], words: str) -> None:
    """A34: the engine's own guard, whatever reaches it."""
    driver = Driver(max_seq_len=8)
    driver.submit(1, [1])
    driver.submit(2, prompt)
    assert driver.engine.has_work
    assert not driver.engine.cancel(2), "it has ended already"
    driver.run()
    assert driver.ends == {1: FinishReason.LENGTH, 2: FinishReason.ERROR}
    assert words in driver.errors[2] and driver.tokens[2] == []
    assert driver.tokens[1] == [2, 3, 4, 5, 6]


def test_an_error_record_needs_no_forward() -> None:
    driver = Driver()
    driver.submit(1, [99])
    assert driver.step().finish == [FinishReason.ERROR]
    assert not driver.engine.has_work and not driver.runner.plans and not driver.broadcast


def test_logits_that_are_not_finite_end_one_request() -> None:
    driver = Driver()
    driver.submit(1, [1])
    driver.submit(2, [5, NAN_TOKEN])
    driver.submit(3, [2], temperature=1.0, ignore_eos=True, bad_token_ids=[NAN_TOKEN])
    driver.run()
    assert driver.ends == {1: FinishReason.LENGTH, 2: FinishReason.ERROR, 3: FinishReason.LENGTH}
    assert driver.errors == {2: "the model gave logits that are not finite after 2 tokens"}
    assert driver.engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("culprits", [{2}, {1, 3}, {1, 2, 3}])
def test_a_request_that_cannot_be_sampled_ends_alone(
    culprits: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 6: its neighbours in the step get the tokens that they would have got, and the next request works."""

    def faulty(logits: Float32, rows: Sequence[RowSampling], positions: Sequence[int]) -> list[int]:
        if any(row.seed in culprits and position == 3 for row, position in zip(rows, positions, strict=True)):
            raise FloatingPointError("no such number")
        return sample(logits, rows, positions)

    def submit(driver: Driver) -> None:
        for request_id in (1, 2, 3):
            driver.submit(request_id, [request_id, request_id + 10], temperature=1.0, ignore_eos=True, bad_token_ids=[NAN_TOKEN])
        driver.submit(4, [4])

    undisturbed, driver = Driver(), Driver()
    submit(undisturbed)
    undisturbed.run()
    monkeypatch.setattr("headrace.engine.live.sample", faulty)
    submit(driver)
    driver.run()
    for request_id in (1, 2, 3, 4):
        count = 1 if request_id in culprits else 5
        assert driver.tokens[request_id] == undisturbed.tokens[request_id][:count]
        assert driver.ends[request_id] is (FinishReason.ERROR if request_id in culprits else undisturbed.ends[request_id])
    assert driver.errors == dict.fromkeys(culprits, "the next token could not be sampled: FloatingPointError: no such number")
    assert driver.engine.stats()["kv_blocks_used"] == 0 and "could not be sampled" in caplog.text
    driver.submit(5, [5])
    driver.run()
    assert driver.tokens[5] == [6, 7, 8, 9, 10]


def test_a_request_whose_parameters_cannot_be_used_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the scheduler has it: a request that only one of the two knows would end the world in the next step."""

    def unusable(*args: object) -> RowSampling:
        raise OverflowError("too large")

    driver = Driver()
    with monkeypatch.context() as patch:
        patch.setattr(RowSampling, "of", unusable)
        with pytest.raises(OverflowError):
            driver.submit(1, [1])
    assert not driver.engine.has_work
    driver.submit(1, [1], max_tokens=2)
    driver.run()
    assert driver.tokens == {1: [2, 3]}


def test_a_request_cancelled_while_it_waits_never_runs() -> None:
    """A19: its tokens are in no plan, and it ends once."""
    driver = Driver()
    driver.submit(1, [11, 12])
    assert driver.engine.cancel(1)
    assert not driver.engine.cancel(1)
    assert driver.step().finish == [FinishReason.ABORT]
    assert driver.runner.plans == [] and not driver.engine.has_work
    del driver.ends[1]
    driver.submit(1, [21], max_tokens=1)
    driver.run()
    assert [plan.tokens.tolist() for plan in driver.runner.plans] == [[21]], "its id is free again (A17)"


def test_a_request_ends_as_it_is_told() -> None:
    """A36: the engine's half."""
    driver = Driver(max_batch_size=1)
    driver.submit(1, [1])
    driver.submit(2, [11])
    driver.step()
    assert driver.engine.cancel(1, FinishReason.TIMEOUT) and driver.engine.cancel(2, FinishReason.TIMEOUT)
    driver.run()
    assert driver.ends == dict.fromkeys((1, 2), FinishReason.TIMEOUT)
    assert driver.tokens == {1: [2], 2: []} and len(driver.runner.plans) == 1


def test_higher_priority_is_first_in_the_plan() -> None:
    """A38."""
    driver = Driver(max_batch_size=1)
    for request_id, priority in enumerate([0.5, 0.1, 0.9, 0.5, 0.9]):
        driver.submit(request_id, [request_id], max_tokens=1, priority=priority)
    driver.run()
    assert [plan.tokens.tolist() for plan in driver.runner.plans] == [[2], [4], [0], [3], [1]]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cancel_while_it_prefills_and_while_it_decodes(steps: int) -> None:
    """A16: the neighbour gets exactly its tokens; the blocks come back."""
    driver = Driver(max_num_tokens=4)
    driver.submit(1, [1])
    driver.submit(2, [5, 6, 7, 8, 9])
    for _ in range(steps):
        driver.step()
    before = driver.tokens.get(2, [])
    assert driver.engine.cancel(2)
    driver.run()
    assert driver.ends == {1: FinishReason.LENGTH, 2: FinishReason.ABORT}
    assert driver.tokens[1] == [2, 3, 4, 5, 6] and driver.tokens[2] == before
    assert driver.engine.stats()["kv_blocks_used"] == 0


def test_cancel_of_unknown_and_ended_requests_does_nothing() -> None:
    """A17."""
    driver = Driver()
    assert not driver.engine.cancel(77)
    driver.submit(1, [1], max_tokens=1)
    driver.run()
    assert not driver.engine.cancel(1)
    assert not driver.engine.has_work


def test_cancel_all_ends_each_once() -> None:
    driver = Driver(max_batch_size=2)
    for request_id in range(4):
        driver.submit(request_id, [request_id])
    driver.step()
    driver.engine.cancel_all()
    driver.engine.cancel_all()
    driver.run()
    assert driver.ends == dict.fromkeys(range(4), FinishReason.ABORT)
    assert driver.engine.stats()["kv_blocks_free"] == 64


def test_preemption_changes_no_token() -> None:
    """A45: a pool for one and a half requests."""
    driver = Driver(kv_cache_tokens=32, max_seq_len=24)
    for request_id in range(4):
        driver.submit(request_id, [request_id, 10 + request_id], max_tokens=15)
    driver.run()
    assert driver.engine.stats()["preemptions"] > 0
    assert driver.tokens == {request_id: list(range(11 + request_id, 26 + request_id)) for request_id in range(4)}


def test_stats_are_by_state() -> None:
    driver = Driver(max_batch_size=1)
    driver.submit(1, [1, 2, 3, 4, 5], max_tokens=3)
    driver.submit(2, [1])
    assert driver.engine.stats() == {
        "requests_waiting": 2,
        "requests_running": 0,
        "requests_preempted": 0,
        "kv_blocks_used": 0,
        "kv_blocks_free": 64,
        "kv_blocks_cached": 0,
        "steps": 0,
        "tokens": 0,
        "computed_tokens": 0,
        "preemptions": 0,
        "kv_blocks_allocated": 0,
        "kv_blocks_reused": 0,
        "kv_blocks_missed": 0,
        "loras_loaded": 0,
        "lora_loads": 0,
    }
    driver.step()
    driver.step()
    stats = driver.engine.stats()
    assert (stats["requests_waiting"], stats["requests_running"], stats["kv_blocks_used"]) == (1, 1, 2)
    assert (stats["steps"], stats["tokens"], stats["computed_tokens"]) == (2, 2, 6)


def test_every_rank_gets_the_plan_before_it_runs() -> None:
    driver = Driver(max_num_tokens=6)
    driver.submit(1, [1, 2, 3])
    driver.step()
    driver.submit(2, [21, 22, 23, 24, 25, 26, 27])
    driver.step()
    driver.step()
    assert len(driver.broadcast) == len(driver.runner.plans) == 3
    first, second, third = (StepPlan.from_arrays(arrays) for arrays in driver.broadcast)
    assert all(array.dtype == np.int32 for arrays in driver.broadcast for array in arrays)
    assert [part.tolist() for part in first.arrays()] == [[1, 2, 3], [0], [3], [0], [2], [], [], [], []]
    assert [part.tolist() for part in second.arrays()] == [[4, 21, 22, 23, 24, 25], [3, 0], [1, 5], [0, 1, 2], [0], [], [], [], []]
    assert [part.tolist() for part in third.arrays()] == [[5, 26, 27], [4, 5], [1, 2], [0, 3, 1, 2], [0, 2], [], [], [], []]


def test_a_live_id_is_refused_before_anything_changes() -> None:
    driver = Driver()
    driver.submit(1, [1], max_tokens=2)
    with pytest.raises(ValueError, match="request 1 is live already"):
        driver.submit(1, [5])
    driver.run()
    assert driver.tokens == {1: [2, 3]}


def test_a_runner_that_gives_no_logits_is_a_fault_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(driver.runner, "execute", lambda arrays: None)
    driver.submit(1, [1])
    with pytest.raises(RuntimeError, match="gave no logits for 1 rows"):
        driver.step()


def test_facts_and_close() -> None:
    driver = Driver()
    facts = driver.engine.facts
    assert (facts.model, facts.vocab_size, facts.max_seq_len, facts.num_kv_blocks) == ("counting", VOCAB, 64, 64)
    assert (facts.eos_token_ids, facts.tokens_per_block, facts.versions) == ((30, 31), 4, {"counting": "1"})
    driver.engine.close()
    assert driver.runner.closed


def test_make_engine_and_a_runner_that_runs_no_model() -> None:
    config = EngineConfig(model="counting")
    assert make_engine(config, CountingRunner(config)).facts.model == "counting"
    with pytest.raises(ModelError, match="runner 'echo' runs no model"):
        load_runner(EngineConfig(model="echo", runner="echo"), SingleRank(), lambda stage, done, total: None)


def test_endings_are_taken_without_a_step_and_come_once() -> None:
    """A58: a world that stands still tells them; what was left where it was goes on as if nothing had been."""
    driver = Driver()
    for request_id in range(3):
        driver.submit(request_id, [request_id + 1], max_tokens=4)
    driver.step()
    driver.engine.cancel(1)
    driver.submit(3, [VOCAB])
    plans = len(driver.runner.plans)
    endings = driver.engine.take_endings()
    assert dict(zip(endings.request_ids, endings.finish, strict=True)) == {1: FinishReason.ABORT, 3: FinishReason.ERROR}
    assert endings.token_ids == [] and set(endings.errors) == {3} and len(driver.runner.plans) == plans
    assert driver.engine.take_endings().request_ids == [] and driver.engine.has_work
    while driver.engine.has_work:
        driver.step()
    assert driver.tokens == {0: [2, 3, 4, 5], 1: [3], 2: [4, 5, 6, 7]} and set(driver.ends) == {0, 2}
