"""An ``LLM`` of this process as a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.bench.dataset import Sample
from headrace.bench.target import Answer, RequestFailedError
from headrace.errors import QueueFullError, RequestError
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.requests import Prompt


class LLMTarget:
    """Each sample is one ``generate_async``, by its ids where it has some, read in the event loop that asks."""

    def __init__(self, llm: LLM, params: SamplingParams, streaming: bool) -> None:
        """``params``: for all; ``max_tokens`` is each sample's. ``streaming``: tokens are read as they come, and not all at the end."""
        self._llm = llm
        self._params = params
        self._streaming = streaming
        # By max_tokens: making them checks all of their fields.
        self._by_length: dict[int, SamplingParams] = {}

    async def generate(self, sample: Sample, arrived: Callable[[int], None]) -> Answer:
        """See ``Target``."""
        wanted = sample.output_tokens
        params = self._by_length.get(wanted)
        if params is None:
            params = self._by_length[wanted] = msgspec.structs.replace(self._params, max_tokens=wanted)
        prompt: Prompt = sample.prompt or "" if sample.input_ids is None else sample.input_ids
        generated = 0
        try:
            handle = self._llm.generate_async(prompt, params, self._streaming)
            async for output in handle:
                (completion,) = output.outputs
                if new := len(completion.token_ids) - generated:
                    arrived(new)
                    generated += new
        except (RequestError, QueueFullError) as error:
            raise RequestFailedError(str(error)) from error
        return Answer(
            prompt_tokens=len(output.prompt_token_ids), output_tokens=len(completion.token_ids), finish_reason=completion.finish_reason
        )
