"""The scheduler against a slow model of it: any order of arrivals, steps and cancels; nothing leaks, nothing is served twice, all end."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.kv_cache import KVCache
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence, State
from headrace.engine.slot_cache import SlotCache


class SchedulerMachine(RuleBasedStateMachine):
    """The model knows, for each live request in the order of arrival, its priority, its tokens, and how many of them have been computed
    since it began.
    """

    @initialize(
        blocks=st.integers(2, 12),
        block=st.integers(1, 4),
        batch=st.integers(1, 4),
        tokens=st.integers(1, 9),
        slack=st.integers(0, 3),
        rows=st.integers(1, 5),
    )
    def start(self, blocks: int, block: int, batch: int, tokens: int, slack: int, rows: int) -> None:
        self.context = max(2, blocks * block - slack)
        self.batch, self.budget, self.block, self.rows = batch, tokens, block, rows
        self.scheduler = Scheduler(
            self.make_cache(blocks, block, batch),
            max_batch_size=batch,
            max_num_tokens=tokens,
            max_seq_len=self.context,
            max_logit_rows=rows,
        )
        self.known: dict[int, list[int]] = {}
        self.priorities: dict[int, float] = {}
        self.computed: dict[int, int] = {}
        self.sequences: dict[int, Sequence] = {}
        self.next_id = 0
        self.preemptions = 0

    def make_cache(self, blocks: int, block: int, batch: int) -> KVCache | SlotCache:
        return KVCache(blocks, block)

    def slots(self, request_id: int, first: int, last: int) -> set[tuple[int, int]]:
        """Where these of its tokens are."""
        table = self.scheduler.cache.table(request_id)
        return {(table[place // self.block], place % self.block) for place in range(first, last)}

    @rule(share=st.floats(0.0, 1.0), priority=st.sampled_from([0.5, 0.5, 0.1, 0.9]), wants=st.sampled_from([0, 0, 1, 2]))
    def submit(self, share: float, priority: float, wants: int) -> None:
        length = 1 + int(share * (self.context - 2))
        prompt = [self.next_id * 1000 + place for place in range(length)]
        self.sequences[self.next_id] = self.scheduler.submit(self.next_id, array("i", prompt), priority, wanted=range(length * wants // 2))
        self.priorities[self.next_id] = priority
        self.known[self.next_id] = prompt
        self.computed[self.next_id] = 0
        self.next_id += 1

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        request_id = list(self.known)[which % len(self.known)]
        assert self.scheduler.end(request_id)
        self._forget(request_id)

    @rule(stop=st.integers(0, 6))
    def step(self, stop: int) -> None:
        ran = self._ids(State.PREFILL, State.DECODE)
        waited = self._ids(State.WAITING, State.PREEMPTED)
        chunks = self.scheduler.schedule()
        assert bool(chunks) == bool(self.known), "work that is there makes progress"
        assert len(chunks) <= self.batch and sum(chunk.length for chunk in chunks) <= self.budget
        served = [chunk.sequence.request_id for chunk in chunks]
        old, admitted = [i for i in served if i in ran], [i for i in served if i in waited]
        assert served == old + admitted, "what runs comes before what waited"
        assert old == ran[: len(old)], "by priority, then oldest first, each once, and nobody is passed over"
        if not ran:
            assert admitted[:1] == waited[:1], "with an empty pool the first that waits is admitted"
        preempted = self._ids(State.PREEMPTED)
        for request_id in ran:
            if request_id in preempted:
                assert all(i in preempted for i in ran[ran.index(request_id) :]), "the lowest priority goes first, then the youngest"
        queue = sorted({*waited, *(i for i in ran if i in preempted)}, key=self._rank)
        assert admitted == queue[: len(admitted)], "nobody who waits is passed over, not by one who was preempted either"
        self._notice_preemptions()
        written: set[tuple[int, int]] = set()
        for request_id, start, length in ((chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks):
            assert start == self.computed[request_id], "no token is skipped, none is computed twice without preemption"
            slots = self.slots(request_id, start, start + length)
            assert len(slots) == length and not slots & written, "no slot is written twice"
            written |= slots
            self.computed[request_id] += length
        assert sum(len(chunk.wanted) for chunk in chunks) <= self.rows
        for sequence, start, length in chunks:
            assert sequence.wanted.start >= start or not sequence.wanted, "no wanted position is passed over"
            sequence.wanted = range(min(max(sequence.wanted.start, start + length), sequence.wanted.stop), sequence.wanted.stop)
        for chunk in chunks:
            request_id = chunk.sequence.request_id
            known = self.known[request_id]
            assert chunk.samples == (self.computed[request_id] == len(known))
            if not chunk.samples:
                continue
            assert list(chunk.sequence.tokens) == known
            if len(known) + 1 >= self.context or (stop and len(known) % stop == 0):
                assert self.scheduler.end(request_id)
                self._forget(request_id)
            else:
                known.append(len(known))
                self.scheduler.append(chunk.sequence, known[-1])

    def _rank(self, request_id: int) -> tuple[float, int]:
        return -self.priorities[request_id], request_id

    def _ids(self, *states: State) -> list[int]:
        """Of all that are in one of these states, first served first."""
        return sorted((i for i, sequence in self.sequences.items() if sequence.state in states), key=self._rank)

    def _notice_preemptions(self) -> None:
        """A preempted request begins again; one that was admitted in the same step would start where the model does not expect it."""
        for request_id, sequence in self.sequences.items():
            if sequence.state is State.PREEMPTED and self.computed[request_id]:
                self.computed[request_id] = 0
                self.preemptions += 1
        assert self.scheduler.num_preemptions == self.preemptions

    def _forget(self, request_id: int) -> None:
        del self.known[request_id], self.priorities[request_id], self.computed[request_id], self.sequences[request_id]

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.live() == self._ids(State.PREFILL, State.DECODE) + self._ids(State.WAITING, State.PREEMPTED)
            assert sum(self.scheduler.counts.values()) == len(self.known)
            assert not self.known or self.scheduler.has_work

    def teardown(self) -> None:
        """Everything ends, whatever came before, within a bound: every step gives the first that runs at least one token."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(2 * self.context for _ in self.known) + 1
        for _ in range(bound):
            if not self.known:
                break
            self.step(stop=0)
        assert not self.known and not self.scheduler.has_work
        assert self.scheduler.cache.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
