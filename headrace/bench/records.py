"""What became of each request of a run, and the times that users of vLLM and trtllm-bench know.

Definitions are those of vLLM (``vllm/benchmarks/serve.py``, ``calculate_metrics``). All times are seconds of one monotonic clock since the
run began.
"""

from __future__ import annotations

import itertools

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        task_id: of its sample.
        scheduled_s: when it was to be sent, by its arrival time; a limit on concurrency can hold it up longer.
        sent_s: when it was sent; TTFT and E2E count from here, as in vLLM.
        events: (time, tokens) of each chunk that brought tokens; where a server does not say how many, 1.
        finished_s: when its end was known.
        prompt_tokens: of the prompt.
        output_tokens: generated; by the server's own count where there is one.
        finish_reason: as the target gave it.
        error: why it failed; None: it did not.
    """

    task_id: int
    scheduled_s: float
    sent_s: float
    events: list[tuple[float, int]]
    finished_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first chunk with a token, in seconds; None if none came."""
        return self.events[0][0] - self.sent_s if self.events else None

    @property
    def send_delay(self) -> float:
        """How long after its time it was sent, in seconds: held up by a limit on concurrency, or by a client that does not keep up."""
        return self.sent_s - self.scheduled_s

    @property
    def e2e(self) -> float:
        """End-to-end latency, vLLM's E2EL: from sending to the end, in seconds."""
        return self.finished_s - self.sent_s

    @property
    def tpot(self) -> float | None:
        """Time per output token without the first, ``(e2e - ttft) / (output_tokens - 1)``; None with fewer than two tokens."""
        ttft = self.ttft
        if ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies by vLLM's definition: the gaps between chunks, in seconds, whatever number of tokens a chunk brings."""
        return [later[0] - earlier[0] for earlier, later in itertools.pairwise(self.events)]

    @property
    def itl_per_token(self) -> list[float]:
        """The same spread per token: a gap before a chunk of k tokens counts as k gaps of a k-th; what merged chunks do not change."""
        gaps: list[float] = []
        for (before, _), (now, tokens) in itertools.pairwise(self.events):
            gaps += [(now - before) / tokens] * tokens
        return gaps

    @property
    def ok(self) -> bool:
        """Whether it did not fail."""
        return self.error is None
