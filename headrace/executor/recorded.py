"""What a recording tells of each request: how it was submitted, when it was cancelled, and what came back for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.config import EngineConfig, EngineFacts
from headrace.ipc.messages import Beam, Cancel, Deltas, Ready, Submit
from headrace.ipc.recording import Dropped, End, Recording, RecordingError, Truncated
from headrace.outputs import FinishReason
from headrace.params import SamplingParams

FINISH_CODES = frozenset({0, *FinishReason})


@dataclass(slots=True)
class RecordedDelta:
    """What one frame brought for one request, ``seconds`` after the recording began. ``finish``: 0 while it goes on. ``beams``: results of
    a beam search; ``token_ids`` are then those of the best.
    """

    seconds: float
    token_ids: Sequence[int]
    finish: int
    stop_reason: int | None
    error: str | None
    beams: tuple[Beam, ...] = ()


@dataclass(slots=True)
class RecordedRequest:
    """One request. Times are seconds since the recording began.

    Attributes:
        prompt: int32; zeros in a recording without prompts.
        cancelled: when the cancel was sent; None: it was not.
        cancelled_after: so many tokens had come by then.
    """

    request_id: int
    submitted: float
    prompt: array[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    deltas: list[RecordedDelta] = field(default_factory=list)
    priority: float = 0.5
    timeout: float | None = None
    cancelled: float | None = None
    cancelled_after: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens that came."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def num_tokens(self) -> int:
        """How many that are."""
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def finish(self) -> FinishReason | None:
        """How it ended; None when the recording ended, or its world died, before it did."""
        return FinishReason(self.deltas[-1].finish) if self.deltas and self.deltas[-1].finish else None


class RecordedSession:
    """All of a recording, in memory.

    Attributes:
        facts: of the first world that became ready.
        bursts: the requests as they were submitted, those of one message together.
        missing: messages that the recorder had to drop.
        truncated: whether the recording was cut off.

    Raises:
        RecordingError: the recording is damaged, or no world became ready in it.
    """

    def __init__(self, recording: Recording) -> None:
        self.with_prompts = recording.header.with_prompts
        self.config: EngineConfig = recording.header.config
        self.bursts: list[list[RecordedRequest]] = []
        self.missing = 0
        self.truncated = False
        self._by_id: dict[int, RecordedRequest] = {}
        facts: EngineFacts | None = None
        # After all submits: a quick answer can be recorded before the thread that sent the request got to record that.
        later: list[tuple[float, Deltas | Cancel]] = []
        for record in recording:
            if isinstance(record, Dropped):
                self.missing += record.count
            elif isinstance(record, End | Truncated):
                self.truncated = isinstance(record, Truncated)
            elif isinstance(record.message, Ready):
                facts = facts or record.message.facts
            elif isinstance(record.message, Submit):
                self._submit(record.seconds, record.message, recording)
            elif isinstance(record.message, Deltas | Cancel):
                later.append((record.seconds, record.message))
        for seconds, message in later:
            if isinstance(message, Deltas):
                self._deltas(seconds, message)
            else:
                self._cancel(seconds, message)
        if facts is None:
            raise RecordingError(f"{recording.path}: no world became ready in this recording, so there is nothing to replay")
        self.facts = facts

    @property
    def requests(self) -> list[RecordedRequest]:
        """All of them, in the order in which they were submitted."""
        return [request for burst in self.bursts for request in burst]

    def _submit(self, seconds: float, message: Submit, recording: Recording) -> None:
        tokens = message.token_ids.view.tobytes()
        lengths = [head.num_prompt_tokens for head in message.requests]
        if (
            len(tokens) != 4 * sum(lengths)
            or min(lengths, default=1) < 1
            or any(not 0 <= head.params < len(message.params) for head in message.requests)
        ):
            raise RecordingError(f"{recording.path}: a submit at {seconds:.3f} s contradicts itself")
        burst = []
        end = 0
        for head in message.requests:
            start, end = end, end + 4 * head.num_prompt_tokens
            # Sent to another world after the death of one: its prompt then holds output, and what comes back goes on where it stopped.
            if head.request_id in self._by_id:
                continue
            prompt = array("i", tokens[start:end])
            request = RecordedRequest(
                head.request_id,
                seconds,
                prompt,
                message.params[head.params],
                head.max_tokens,
                head.seed,
                priority=head.priority,
                timeout=head.timeout,
            )
            self._by_id[head.request_id] = request
            burst.append(request)
        if burst:
            self.bursts.append(burst)

    def _cancel(self, seconds: float, message: Cancel) -> None:
        for request_id in message.request_ids:
            request = self._by_id.get(request_id)
            if request is not None and request.cancelled is None:
                request.cancelled, request.cancelled_after = seconds, request.num_tokens

    def _deltas(self, seconds: float, message: Deltas) -> None:
        """A frame that contradicts itself was dropped by its receiver, and so it is here."""
        try:
            ids, counts = message.request_ids.as_int64().tolist(), message.counts.as_int32().tolist()
            tokens = message.token_ids.as_int32().tolist()
        except TypeError:
            return
        if not len(ids) == len(counts) == len(message.finish) or sum(counts) != len(tokens) or min(counts, default=0) < 0:
            return
        if not FINISH_CODES.issuperset(message.finish):
            return
        end = 0
        for request_id, count, finish in zip(ids, counts, message.finish, strict=True):
            start, end = end, end + count
            request = self._by_id.get(request_id)
            # One that the recorder missed is unknown; one that has ended is late.
            if request is not None and request.finish is None:
                new = tokens[start:end]
                if beams := message.beams.get(request_id, ()):
                    new = list(beams[0].token_ids.as_int32())
                stop_reason, error = message.stop_reasons.get(request_id), message.errors.get(request_id)
                request.deltas.append(RecordedDelta(seconds, new, finish, stop_reason, error, beams))
