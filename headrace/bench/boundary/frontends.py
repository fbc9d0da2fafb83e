"""Several user processes that share one world: the same streams, spread over more and more of them.

``python -m headrace.bench.boundary.frontends`` is one of these processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from headrace.bench.boundary.children import Child, serve
from headrace.bench.boundary.rows import Row, alternate
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import Headrace, streams
from headrace.llm import LLM

#: of all frontends together
STREAMS = 256


class Attached:
    """The handlers of a child."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._headrace: Headrace

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def attach(self, handle: str, world_pid: int) -> None:
        """First of all."""
        self._headrace = Headrace(self._stack.enter_context(LLM.attach(handle)), world_pid)

    def stream(self, batch: int, tokens: int) -> list[float]:
        """Read streams of ids; tokens, and seconds of CPU time of this process."""
        work = streams(self._headrace, batch, tokens, False)
        return [work.tokens, work.user_cpu]


def measure(settings: Settings, tell: Callable[[Row], None]) -> None:
    """From one frontend to ``settings.frontends``; the owner of the world only looks on."""
    counts = range(1, settings.frontends + 1)
    tokens = max(1, settings.tokens // STREAMS)
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(LLM("echo", tensor_parallel_size=1, launcher="spawn"))
        children = [stack.enter_context(Child("headrace.bench.boundary.frontends")) for _ in counts]
        for child in children:
            child.tell("attach", handle=str(owner.attach_handle), world_pid=owner.executor.processes()["rank0"])
        for child in children:
            child.answer()

        def together(count: int) -> tuple[float, float]:
            """Tokens a second, as seen and by CPU time, of ``count`` frontends together."""
            began = time.perf_counter()
            for child in children[:count]:
                child.tell("stream", batch=STREAMS // count, tokens=tokens)
            works = [child.answer() for child in children[:count]]
            seconds = time.perf_counter() - began
            return sum(done for done, _ in works) / seconds, sum(done / cpu for done, cpu in works)

        runs = alternate(settings.repeats, {str(count): partial(together, count) for count in counts})
    for count, rates in runs.items():
        what = f"{count} frontend{'s' if count != '1' else ''}, {STREAMS} streams of token ids in all"
        tell(Row(f"capacity of {what}", "tokens/s", tuple(by_cpu for _, by_cpu in rates)))
        tell(Row(f"rate seen of {what}", "tokens/s", tuple(seen for seen, _ in rates)))


if __name__ == "__main__":
    with Attached() as attached:
        serve({"attach": attached.attach, "stream": attached.stream})
