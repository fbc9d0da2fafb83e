"""``python -m headrace.bench.boundary.in_process``: the engine without a boundary, its loop called directly by who wants the tokens."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import numpy as np

from headrace.bench.boundary.children import serve
from headrace.config import EngineConfig
from headrace.engine.base import Engine, EngineRequest, SingleRank
from headrace.params import SamplingParams
from headrace.text import load_tokenizer
from headrace.text.tokenizer import Tokenizer


class InProcessEngine:
    """The handlers of the child."""

    def __init__(self) -> None:
        self._engine: Engine
        self._tokenizer: Tokenizer | None = None
        self._next_id = 0

    def load(self, config: dict[str, Any], tokenizer: str | None) -> None:
        """Make the engine; first of all. ``tokenizer``: where to read it, for answers with text."""
        settings = msgspec.convert(config, EngineConfig)
        if settings.runner == "echo":
            from headrace.engine.echo import EchoEngine, EchoRunner

            runner = EchoRunner(settings.echo, 0, lambda stage, done, total: None)
            self._engine = EchoEngine(settings, runner, lambda plan: None)
        else:
            from headrace.engine.model_engine import load_runner, make_engine

            self._engine = make_engine(settings, load_runner(settings, SingleRank(), lambda stage, done, total: None))
        if tokenizer is not None:
            self._tokenizer = load_tokenizer(tokenizer)

    def first_token(self, prompt: list[int], pause: float) -> float:
        """Seconds of a request of one token, ``pause`` seconds from now."""
        time.sleep(pause)
        began = time.perf_counter()
        self._run([prompt], 1, False)
        return time.perf_counter() - began

    def gaps(self, prompts: list[list[int]], tokens: int, text: bool) -> list[float]:
        """Seconds between the ends of steps that bring tokens, of requests that run side by side."""
        times = self._run(prompts, tokens, text)
        return [after - before for before, after in itertools.pairwise(times)]

    def _run(self, prompts: list[list[int]], tokens: int, text: bool) -> list[float]:
        """When each step that brought tokens was over, its texts made."""
        engine, times = self._engine, []
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        texts = {}
        if text:
            assert self._tokenizer is not None
            texts = {first + index: self._tokenizer.detokenizer() for index in range(len(prompts))}
        for request_id, prompt in enumerate(prompts, first):
            engine.submit(EngineRequest(request_id, np.array(prompt, dtype=np.int32), params, tokens, 0))
        while engine.has_work:
            outputs, start = engine.step(), 0
            for request_id, count in zip(outputs.request_ids, outputs.counts, strict=True) if texts else ():
                texts[request_id].feed(outputs.token_ids[start : start + count])
                start += count
            if outputs.token_ids:
                times.append(time.perf_counter())
        return times


if __name__ == "__main__":
    engine = InProcessEngine()
    serve({"load": engine.load, "first_token": engine.first_token, "gaps": engine.gaps})
