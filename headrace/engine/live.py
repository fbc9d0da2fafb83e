"""``LiveRequests``: the requests that the scheduler has, and what becomes of a step's logits: tokens, endings, and what comes beside."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.base import EngineRequest, Float32, StepOutputs
from headrace.engine.beams import Beams
from headrace.engine.candidates import Candidates, StepLogits
from headrace.engine.guided import TokenConstraint
from headrace.engine.logit_rules import LogitRules
from headrace.engine.readout import Readout
from headrace.engine.sampler import NO_TOKEN, RowSampling, sample
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Chunk
from headrace.engine.sequence import Sequence as LiveSequence
from headrace.errors import RequestError, described
from headrace.outputs import FinishReason

log = logging.getLogger("headrace.engine")


@dataclass(frozen=True, slots=True)
class Live:
    """A request that the scheduler has. ``rules``, ``readout``, ``beams``, ``constraint``: None for one that has no need of them."""

    request: EngineRequest
    sequence: LiveSequence
    sampling: RowSampling
    eos: frozenset[int]
    rules: LogitRules | None
    readout: Readout | None
    beams: Beams | None
    constraint: TokenConstraint | None


class LiveRequests:
    """Found by the ids of their sequences. Those of a beam search have ids of their own, which are negative, and all stand for the one
    request, which keeps its id to its end, whichever of them live.

    A fault in choosing the token of one request ends that one. ``num_tokens``: tokens generated so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._live: dict[int, Live] = {}
        self._last_id = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Ids that are taken."""
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def __getitem__(self, sequence_id: int) -> Live:
        return self._live[sequence_id]

    def __iter__(self) -> Iterator[Live]:
        """Each once."""
        return iter([live for sequence_id, live in self._live.items() if sequence_id == live.request.request_id])

    def add(self, live: Live) -> None:
        """The scheduler has it now."""
        self._live[live.request.request_id] = live

    def end(self, live: Live) -> None:
        """Take it from the scheduler, with all of its sequences."""
        for sequence in (live.sequence,) if live.beams is None else live.beams.sequences:
            self._scheduler.end(sequence.request_id)
            self._live.pop(sequence.request_id, None)
        # A beam search may have gone on without the sequence that it began with.
        self._live.pop(live.request.request_id, None)

    def fail(self, live: Live, error: str, outputs: StepOutputs) -> None:
        """End it with ERROR."""
        self.end(live)
        outputs.add(live.request.request_id, (), FinishReason.ERROR, error=error)

    def update(self, chunks: Sequence[Chunk], logits: Float32 | StepLogits | None, outputs: StepOutputs) -> None:
        """What the logits of a step's rows bring. Raises RuntimeError if they are not what its plan asked for."""
        if isinstance(logits, StepLogits):
            chosen = [self._live[chunk.sequence.request_id] for chunk in chunks if chunk.sequence.candidates and chunk.samples]
            if len(logits.candidates) != len(chosen):
                raise RuntimeError(f"the runner gave candidates for {len(logits.candidates)} rows instead of {len(chosen)}")
            self._sample(chosen, logits.candidates, outputs)
            chunks = [chunk for chunk in chunks if not chunk.sequence.candidates]
            logits = logits.logits
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = [self._live[sequence.request_id] for sequence in sampling]
        wanting = any(chunk.sequence.wanted for chunk in chunks)
        num_rows = sum(len(chunk.wanted) + chunk.own_row for chunk in chunks) if wanting else len(sampled)
        if logits is None or len(logits) != num_rows:
            raise RuntimeError(f"the runner gave no logits for {num_rows} rows")
        if wanting:
            logits = self._read_prompts(chunks, logits, outputs)
        if any(live.beams is not None for live in sampled):
            sampled, logits = self._advance_beams(sampling, sampled, logits, outputs)
        if any(live.rules is not None or live.readout is not None or live.constraint is not None for live in sampled):
            sampled, logits = self._apply_rules(sampled, logits, outputs)
        self._sample(sampled, logits, outputs)

    def _sample(self, sampled: list[Live], logits: Float32 | Candidates, outputs: StepOutputs) -> None:
        """Choose the tokens of these rows."""
        try:
            tokens = sample(logits, [live.sampling for live in sampled], [len(live.sequence.tokens) for live in sampled])
        except Exception:
            # Rows share nothing, so one after the other they give the same tokens, and it shows whose the fault is.
            for row, live in enumerate(sampled):
                self._sample_alone(live, logits[row : row + 1], outputs)
            return
        for live, token in zip(sampled, tokens, strict=True):
            self._accept(live, token, outputs)

    def _read_prompts(self, chunks: Sequence[Chunk], logits: Float32, outputs: StepOutputs) -> Float32:
        """Hand out what the rows of prompts tell; a copy of the rows that tokens are chosen from."""
        rows: list[int] = []
        start = 0
        for chunk in chunks:
            sequence, wanted, samples = chunk.sequence, chunk.wanted, chunk.samples
            stop = start + len(wanted)
            end = stop + chunk.own_row
            if samples:
                rows.append(end - 1)
            readout = self._live[sequence.request_id].readout
            if wanted and readout is not None:
                readout.read_prompt(chunk, logits[start:stop], outputs)
                sequence.wanted = range(wanted.stop, sequence.wanted.stop)
                if not samples:
                    outputs.add(sequence.request_id, ())
            start = end
        return logits[rows]

    def _advance_beams(
        self, sequences: list[LiveSequence], sampled: list[Live], logits: Float32, outputs: StepOutputs
    ) -> tuple[list[Live], Float32]:
        """Let every beam search go on, whose sequences all sample in the same step; gives back what is not of one, with its logits."""
        rest: list[int] = []
        searches: dict[int, tuple[Live, dict[int, Float32]]] = {}
        for row, (sequence, live) in enumerate(zip(sequences, sampled, strict=True)):
            if live.beams is None:
                rest.append(row)
            else:
                _, rows = searches.setdefault(live.request.request_id, (live, {}))
                rows[sequence.request_id] = logits[row]
        for request_id, (live, rows) in searches.items():
            assert live.beams is not None
            try:
                results = live.beams.advance(rows, self._scheduler, self._new_id)
            except (RequestError, ValueError) as error:
                # See ``_accept``; to be computed again is for a beam search of one only.
                if not any([self._scheduler.distrust(sequence) for sequence in live.beams.sequences]):
                    self._fail_sampling(live, error, outputs)
                continue
            self.num_tokens += 1
            if results:
                self.end(live)
                outputs.add(request_id, (), results[0].finish, stop_reason=results[0].stop_reason)
                outputs.beams[request_id] = results
                continue
            for old in rows.keys() - {request_id}:
                del self._live[old]
            for sequence in live.beams.sequences:
                self._live[sequence.request_id] = live
        return [sampled[row] for row in rest], logits[rest]

    def _new_id(self) -> int:
        """Of a sequence that is no request."""
        self._last_id -= 1
        return self._last_id

    def _apply_rules(self, sampled: list[Live], logits: Float32, outputs: StepOutputs) -> tuple[list[Live], Float32]:
        """Keep the rows of those that asked, then apply rules and constraints, in place. One that raises ends its request alone."""
        if not logits.flags.writeable:
            logits = logits.copy()
        kept: list[int] = []
        for row, live in enumerate(sampled):
            if live.readout is not None:
                live.readout.before_rules(logits[row], changes=live.rules is not None or live.constraint is not None)
            try:
                if live.rules is not None:
                    live.rules.apply(logits[row], live.sequence.tokens)
                if live.constraint is not None:
                    live.constraint.mask(logits[row])
            except Exception as error:
                self._fail_sampling(live, error, outputs)
                continue
            kept.append(row)
        if len(kept) == len(sampled):
            return sampled, logits
        return [sampled[row] for row in kept], logits[kept]

    def _sample_alone(self, live: Live, logits: Float32 | Candidates, outputs: StepOutputs) -> None:
        """Sample one row; an exception ends its request."""
        try:
            (token,) = sample(logits, [live.sampling], [len(live.sequence.tokens)])
        except Exception as error:
            self._fail_sampling(live, error, outputs)
            return
        self._accept(live, token, outputs)

    def _fail_sampling(self, live: Live, error: Exception, outputs: StepOutputs) -> None:
        log.error("request %d could not be sampled", live.request.request_id, exc_info=error)
        text = str(error) if isinstance(error, RequestError) else described(error)
        self.fail(live, f"the next token could not be sampled: {text}", outputs)

    def _accept(self, live: Live, token: int, outputs: StepOutputs) -> None:
        request, sequence = live.request, live.sequence
        finish, stop_reason = None, None
        if token == NO_TOKEN:
            # A sequence with a number that is not finite has it in the KV of its earlier tokens too, for attention takes 0 times NaN along;
            # what has been taken over from such a one is computed again before the blame is laid here.
            if self._scheduler.distrust(sequence):
                return
            why = "the model gave logits that are not finite"
            if live.rules is not None or live.constraint is not None:
                why = "no token is allowed, or " + why
            self.fail(live, f"{why} after {len(sequence.tokens)} tokens", outputs)
            return
        ends = token in live.eos or token in request.params.stop_token_ids
        if live.constraint is not None and not ends:
            try:
                live.constraint.accept(token)
            except RequestError as error:
                self.fail(live, str(error), outputs)
                return
        self._scheduler.append(sequence, token)
        self.num_tokens += 1
        if token in live.eos:
            finish = FinishReason.STOP
        elif ends:
            finish, stop_reason = FinishReason.STOP, token
        elif live.constraint is not None and live.constraint.finished:
            finish = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.end(live)
        outputs.add(request.request_id, (token,), finish, stop_reason=stop_reason)
        if live.readout is not None:
            live.readout.read_token(request.request_id, token, outputs)
