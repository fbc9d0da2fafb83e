"""The scheduler: order, priorities (A38), budget, chunks, preemption, and cancelling in every state. A45 as far as no model is needed."""

from __future__ import annotations

from array import array

import pytest

from headrace.engine.kv_cache import KVCache
from headrace.engine.ranking import Rank
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import TRANSITIONS, Chunk, Event, Sequence, State
from headrace.errors import RequestError


def make(*, blocks: int = 100, block: int = 4, batch: int = 8, tokens: int = 32, context: int | None = None) -> Scheduler:
    context = blocks * block if context is None else context
    return Scheduler(KVCache(blocks, block), max_batch_size=batch, max_num_tokens=tokens, max_seq_len=context)


def submit(scheduler: Scheduler, request_id: int, length: int, priority: float = 0.5) -> Sequence:
    return scheduler.submit(request_id, array("i", range(length)), priority)


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One step in which every sampled token is 7: (request id, start, length) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        if chunk.samples:
            scheduler.append(chunk.sequence, 7)
    scheduler.check()
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks]


def test_the_table_lets_nothing_out_of_the_end_and_everything_into_it() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is State.ENDED]
    assert {state for state, event in TRANSITIONS if event is Event.END} == set(State) - {State.ENDED}


def test_a_prompt_is_prefilled_and_then_decodes() -> None:
    scheduler = make()
    sequence = submit(scheduler, 1, 5)
    assert sequence.state is State.WAITING
    assert step(scheduler) == [(1, 0, 5)]
    assert sequence.state is State.DECODE
    assert step(scheduler) == [(1, 5, 1)]
    assert step(scheduler) == [(1, 6, 1)]
    assert (list(sequence.tokens), sequence.generated) == ([0, 1, 2, 3, 4, 7, 7, 7], 3)
    assert scheduler.end(1)
    assert not scheduler.has_work and scheduler.cache.num_used == 0


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks_and_samples_once() -> None:
    scheduler = make(tokens=4)
    sequence = submit(scheduler, 1, 10)
    assert [(chunk.length, chunk.samples) for chunk in scheduler.schedule()] == [(4, False)]
    assert sequence.state is State.PREFILL
    assert [(chunk.length, chunk.samples) for chunk in scheduler.schedule()] == [(4, False)]
    assert [(chunk.length, chunk.samples) for chunk in scheduler.schedule()] == [(2, True)]
    assert sequence.state is State.DECODE


def test_decoding_comes_before_prefill_and_the_budget_holds() -> None:
    scheduler = make(tokens=6)
    submit(scheduler, 1, 3)
    submit(scheduler, 2, 8)
    assert step(scheduler) == [(1, 0, 3), (2, 0, 3)]
    assert step(scheduler) == [(1, 3, 1), (2, 3, 5)]
    submit(scheduler, 3, 20)
    assert step(scheduler) == [(1, 4, 1), (2, 8, 1), (3, 0, 4)]
    assert step(scheduler) == [(1, 5, 1), (2, 9, 1), (3, 4, 4)]


def test_wanted_logits_make_chunks_small_and_hold_back_what_is_behind() -> None:
    scheduler = Scheduler(KVCache(100, 4), max_batch_size=8, max_num_tokens=32, max_seq_len=400, max_logit_rows=4)
    submit(scheduler, 1, 3)
    scheduler.submit(2, array("i", range(10)), 0.5, wanted=range(1, 9))
    submit(scheduler, 3, 2)
    submit(scheduler, 4, 5)
    wanted = []
    for expected in ([(1, 0, 3), (2, 0, 4)], [(1, 3, 1), (2, 4, 4)], [(1, 4, 1), (2, 8, 2), (3, 0, 2), (4, 0, 5)]):
        chunks = scheduler.schedule()
        assert [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks] == expected
        wanted += chunks[1].wanted
        for chunk in chunks:
            if chunk.samples:
                scheduler.append(chunk.sequence, 7)
        scheduler.check()
    assert wanted == list(range(1, 9))


def test_first_come_first_served_up_to_the_batch_size() -> None:
    scheduler = make(batch=2)
    for request_id in (5, 3, 9):
        submit(scheduler, request_id, 2)
    assert [chunk[0] for chunk in step(scheduler)] == [5, 3]
    assert scheduler.counts[State.WAITING] == 1
    scheduler.end(5)
    assert [chunk[0] for chunk in step(scheduler)] == [3, 9]


def test_a_later_small_request_does_not_pass_an_earlier_large_one() -> None:
    scheduler = make(blocks=6, block=4)
    submit(scheduler, 1, 12)
    submit(scheduler, 2, 16)
    submit(scheduler, 3, 1)
    assert [chunk[0] for chunk in step(scheduler)] == [1]
    assert scheduler.live() == [1, 2, 3]


def test_the_youngest_is_preempted_and_recomputed() -> None:
    """A45."""
    scheduler = make(blocks=6, block=2)
    old, young = submit(scheduler, 1, 4), submit(scheduler, 2, 2)
    assert step(scheduler) == [(1, 0, 4), (2, 0, 2)]
    assert step(scheduler) == [(1, 4, 1), (2, 2, 1)]
    assert step(scheduler) == [(1, 5, 1), (2, 3, 1)]
    assert step(scheduler) == [(1, 6, 1)], "the older one takes the last block; the youngest waits with what it holds"
    assert (young.state, young.computed) == (State.DECODE, 4)
    assert step(scheduler) == [(1, 7, 1)]
    assert scheduler.num_preemptions == 0
    assert step(scheduler) == [(1, 8, 1)], "now the older one needs a block of the youngest"
    assert (young.state, young.computed, scheduler.num_preemptions) == (State.PREEMPTED, 0, 1)
    assert "preempted 0/5 tokens, 3 generated" in repr(young)
    scheduler.end(1)
    assert step(scheduler) == [(2, 0, 5)], "everything that it had is computed again, and one token sampled"
    assert (old.state, young.state, young.generated) == (State.ENDED, State.DECODE, 4)


def test_preempted_requests_keep_their_place_before_waiting_ones() -> None:
    scheduler = make(blocks=4, block=1)
    submit(scheduler, 1, 1)
    submit(scheduler, 2, 1)
    submit(scheduler, 3, 1)
    assert [[chunk[0] for chunk in step(scheduler)] for _ in range(3)] == [[1, 2], [1, 2], [1]]
    assert (scheduler.counts[State.PREEMPTED], scheduler.counts[State.WAITING]) == (1, 1)
    assert scheduler.live() == [1, 2, 3]
    scheduler.end(1)
    assert [chunk[0] for chunk in step(scheduler)] == [2]


def test_the_oldest_gets_the_whole_pool_and_every_request_ends() -> None:
    """A45: three requests that each grow to the size of the pool."""
    scheduler = make(blocks=5, block=2, tokens=3)
    for request_id in range(3):
        submit(scheduler, request_id, 4)
    order = []
    for _ in range(200):
        if not scheduler.has_work:
            break
        chunks = scheduler.schedule()
        assert chunks, "a step without a chunk would be for ever"
        for chunk in chunks:
            if chunk.samples:
                scheduler.append(chunk.sequence, 7)
                if len(chunk.sequence.tokens) == scheduler.max_seq_len:
                    scheduler.end(chunk.sequence.request_id)
                    order.append(chunk.sequence.request_id)
        scheduler.check()
    assert order == [0, 1, 2]
    assert scheduler.cache.num_free == 5


# --- priorities


def test_higher_priority_is_admitted_first_and_equal_ones_keep_their_order() -> None:
    """A38."""
    scheduler = make(batch=1)
    submit(scheduler, 0, 1)
    step(scheduler)
    for request_id, priority in enumerate([0.5, 0.1, 0.9, 0.5, 0.9, float("inf"), -3.0], start=1):
        submit(scheduler, request_id, 1, priority)
    served = []
    for _ in range(8):
        (chunk,) = step(scheduler)
        served.append(chunk[0])
        scheduler.end(chunk[0])
    assert served == [0, 6, 3, 5, 1, 4, 2, 7], "what runs is not stopped for what waits"


def test_a_prefill_of_higher_priority_comes_before_decoding_of_lower() -> None:
    """A38: it was admitted with what budget was left, and has the whole of it from then on."""
    scheduler = make(tokens=4)
    submit(scheduler, 1, 2)
    assert step(scheduler) == [(1, 0, 2)]
    high = submit(scheduler, 2, 9, 0.9)
    submit(scheduler, 3, 1)
    assert step(scheduler) == [(1, 2, 1), (2, 0, 3)]
    assert step(scheduler) == [(2, 3, 4)]
    assert high.state is State.PREFILL
    assert step(scheduler) == [(2, 7, 2), (1, 3, 1), (3, 0, 1)]
    assert step(scheduler) == [(2, 9, 1), (1, 4, 1), (3, 1, 1)]


def test_preemption_takes_the_lowest_priority_and_of_equal_ones_the_youngest() -> None:
    """A38, A45: the order of arrival is low, high, low, high; the pool is full when all four run."""
    scheduler = make(blocks=16, block=1)
    sequences = [submit(scheduler, request_id, 1, priority) for request_id, priority in enumerate([0.1, 0.9, 0.1, 0.9])]
    victims: list[int] = []
    for _ in range(14):
        step(scheduler)
        for sequence in sequences:
            if sequence.state is State.PREEMPTED and sequence.request_id not in victims:
                victims.append(sequence.request_id)
    assert victims == [2, 0, 3]
    assert scheduler.live() == [1, 3, 0, 2], "they wait in their ranks"


def test_a_preempted_request_gives_way_to_a_higher_one_that_has_arrived_since() -> None:
    """A38: preempted or new, the rank alone says who is next; nobody is passed over."""
    scheduler = make(blocks=6, block=1)
    submit(scheduler, 1, 2)
    submit(scheduler, 2, 2)
    for _ in range(2):
        step(scheduler)
    assert step(scheduler) == [(1, 3, 1)] and scheduler.counts[State.PREEMPTED] == 1
    submit(scheduler, 3, 1, 0.9)
    assert step(scheduler) == [(1, 4, 1)], "not a block for anybody else"
    scheduler.end(1)
    assert [chunk[0] for chunk in step(scheduler)] == [3, 2]


def test_a_large_request_of_high_priority_holds_back_what_would_pass_it() -> None:
    """A38: without that a stream of small requests would keep the pool from ever having room for it."""
    scheduler = make(blocks=8, block=1)
    submit(scheduler, 1, 3, 0.1)
    step(scheduler)
    submit(scheduler, 2, 7, 0.9)
    submit(scheduler, 3, 1, 0.5)
    assert step(scheduler) == [(1, 3, 1)]
    scheduler.end(1)
    assert step(scheduler) == [(2, 0, 7)]


@pytest.mark.parametrize("state", [State.WAITING, State.PREFILL, State.DECODE, State.PREEMPTED])
def test_cancel_in_every_state_frees_the_blocks_once(state: State) -> None:
    blocks = 10 if state is State.PREFILL else 6
    scheduler = make(blocks=blocks, block=2, tokens=4)
    first = submit(scheduler, 1, 4)
    second = submit(scheduler, 2, 6 if state is State.PREFILL else 2)
    for _ in range(20):
        if second.state is state:
            break
        step(scheduler)
    assert second.state is state
    held = len(scheduler.cache.table(2)) if state in (State.PREFILL, State.DECODE) else 0
    free = scheduler.cache.num_free
    assert scheduler.end(2)
    assert scheduler.cache.num_free == free + held
    assert second.state is State.ENDED
    scheduler.check()
    assert not scheduler.end(2), "the second cancel finds nothing"
    scheduler.check()
    assert 1 in scheduler and 2 not in scheduler
    assert first.state is not State.ENDED
    submit(scheduler, 2, 1)
    assert scheduler.end(1) and scheduler.end(2)
    assert scheduler.cache.num_free == blocks


@pytest.mark.parametrize("length", [0, 16, 17])
def test_what_can_never_run_is_refused_with_the_numbers(length: int) -> None:
    """A34."""
    scheduler = make(context=16)
    with pytest.raises(RequestError, match=f"the prompt has {length} tokens; 1 to 15 fit"):
        submit(scheduler, 1, length)
    assert not scheduler.has_work
    submit(scheduler, 1, 15)
    assert step(scheduler) == [(1, 0, 15)]


def test_a_live_id_is_not_taken_twice() -> None:
    scheduler = make()
    submit(scheduler, 1, 2)
    with pytest.raises(ValueError, match="request 1 is live already"):
        submit(scheduler, 1, 3)
    assert step(scheduler) == [(1, 0, 2)]


def test_misuse_raises_and_changes_nothing() -> None:
    scheduler = make(tokens=2, context=4)
    sequence = submit(scheduler, 1, 3)
    with pytest.raises(RuntimeError, match="has not sampled"):
        scheduler.append(sequence, 1)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="has not sampled"):
        scheduler.append(sequence, 1)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="waits for append or end"):
        scheduler.schedule()
    scheduler.append(sequence, 1)
    with pytest.raises(RuntimeError, match="has not sampled"):
        scheduler.append(sequence, 1)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="had to end at 4 tokens"):
        scheduler.append(sequence, 1)
    assert len(sequence.tokens) == 4
    scheduler.check()


@pytest.mark.parametrize("limits", [{"batch": 0}, {"tokens": 0}])
def test_a_step_that_does_nothing_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does nothing"):
        make(**limits)


def test_a_pool_that_one_request_can_outgrow_is_refused() -> None:
    with pytest.raises(ValueError, match="could get stuck"):
        make(blocks=3, block=4, context=13)


def test_repr_shows_the_states() -> None:
    scheduler = make(batch=1)
    submit(scheduler, 1, 2)
    submit(scheduler, 2, 2)
    step(scheduler)
    assert repr(scheduler) == "<Scheduler 1 waiting, 1 decode, <KVCache 1 of 100 blocks used by 1 owners>>"


def test_a_chunk_samples_only_at_the_end_of_what_is_known() -> None:
    sequence = Sequence(1, array("i", range(6)), 6, Rank(-0.5, 0))
    assert not Chunk(sequence, 0, 5).samples
    assert Chunk(sequence, 5, 1).samples
