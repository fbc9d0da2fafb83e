"""``python -m headrace.bench.boundary.memory``: a user process of its own and its world, to see both grow."""

from __future__ import annotations

import gc
import os

from headrace.bench.boundary.children import serve
from headrace.bench.boundary.clocks import resident_bytes
from headrace.config import EchoConfig
from headrace.llm import LLM
from headrace.params import SamplingParams

PROMPT_TOKENS = 512

#: of the requests, of which each step makes one: they outlive the measurement
MAX_TOKENS = 4000

#: seconds of a step: so long that tokens are few
STEP_TIME = 0.1


def grow(live: int) -> dict[str, int]:
    """Bytes that this process and rank 0 have grown by when ``live`` requests have their first token."""
    prompts = [[100 + (index + place) % 900 for place in range(PROMPT_TOKENS)] for index in range(live)]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    echo = EchoConfig(step_time=STEP_TIME, max_batch_size=live)
    with LLM("echo", tensor_parallel_size=1, launcher="spawn", echo=echo) as llm:
        pids = {"user": os.getpid(), "rank0": llm.executor.processes()["rank0"]}
        # What the first request brings is there once, however many follow.
        llm.generate(prompts[0], SamplingParams(max_tokens=1))
        gc.collect()
        before = {side: resident_bytes(pid) for side, pid in pids.items()}
        handles = llm.executor.submit([llm.requests.one(prompt, params, True) for prompt in prompts])
        for handle in handles:
            next(handle)
        return {side: resident_bytes(pid) - before[side] for side, pid in pids.items()}


if __name__ == "__main__":
    serve({"grow": grow})
