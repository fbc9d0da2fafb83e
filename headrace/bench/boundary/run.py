"""One run of ``headrace bench boundary``: its parts, in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from headrace.bench.boundary import capacity, decode, frontends, latency, postprocess, recovery, submit, world
from headrace.bench.boundary.baseline.frontend import BaselineFrontend
from headrace.bench.boundary.children import Child
from headrace.bench.boundary.rows import Row
from headrace.bench.boundary.settings import Settings
from headrace.bench.boundary.systems import Baseline, Headrace
from headrace.bench.report import Report, this_machine
from headrace.checkpoint import resolve_model
from headrace.config import EchoConfig
from headrace.errors import ModelError
from headrace.llm import LLM

Tell = Callable[[Row], None]

#: in the order in which they are measured
PARTS = ("world", "latency", "submit", "capacity", "frontends", "decode", "recovery", "postprocess")

#: those that are about cases of their own; the others are measured if none is asked for
ON_REQUEST = ("recovery", "postprocess")


class Rig(NamedTuple):
    """The echo engine three times: behind the boundary, behind the common design, and in the process that asks for tokens."""

    headrace: Headrace
    baseline: Baseline
    direct: Child


def has_texts(model: str) -> bool:
    """Whether there is a tokenizer to make texts with."""
    if model == "echo":
        return False
    try:
        resolve_model(model)
    except ModelError:
        return False
    return True


@contextlib.contextmanager
def rig(tokenizer: str | None, step_time: float = 0.0) -> Iterator[Rig]:
    """All three, started; closed at the end. ``tokenizer``: a model that makes their texts; None: there are only ids."""
    echo = EchoConfig(step_time=step_time) if tokenizer is None else None
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(LLM(tokenizer or "echo", runner="echo", tensor_parallel_size=1, launcher="spawn", echo=echo))
        config = llm.executor.config
        frontend = stack.enter_context(BaselineFrontend(config, None if tokenizer is None else llm.tokenizer))
        direct = stack.enter_context(Child("headrace.bench.boundary.in_process"))
        direct.ask("load", config=msgspec.to_builtins(config), tokenizer=None)
        yield Rig(Headrace(llm), Baseline(frontend), direct)


def measure(settings: Settings, parts: Collection[str], tell: Tell) -> None:
    """Measure ``parts`` of ``PARTS``; ``tell`` gets each row as soon as there is one."""
    text = has_texts(settings.model)
    if "world" in parts:
        world.measure(settings, tell)
    if not {"latency", "submit", "capacity"}.isdisjoint(parts):
        with rig(settings.model if text else None) as fast:
            if "latency" in parts:
                latency.measure_first(fast.headrace, fast.baseline, fast.direct, settings, tell)
            if "submit" in parts:
                submit.measure(fast.headrace, fast.baseline, settings, tell)
            if "capacity" in parts:
                capacity.measure(fast.headrace, fast.baseline, settings, text, tell)
    if "latency" in parts:
        with rig(None, latency.STEP_TIME) as paced:
            latency.measure_gaps(paced.headrace, paced.baseline, paced.direct, settings, tell)
    if "frontends" in parts:
        frontends.measure(settings, tell)
    if "decode" in parts:
        decode.measure(settings, text, tell)
    if "recovery" in parts:
        recovery.measure(settings, tell)
    if "postprocess" in parts:
        postprocess.measure(settings, tell)


def report(settings: Settings, parts: Collection[str], command: list[str], tell: Tell) -> Report:
    """``measure``, and what becomes of it as a report."""
    began, rows = datetime.now(UTC), list[Row]()

    def keep(row: Row) -> None:
        rows.append(row)
        tell(row)

    measure(settings, parts, keep)
    return Report(
        kind="boundary",
        date=began.isoformat(timespec="seconds"),
        machine=this_machine(),
        command=command,
        settings={**msgspec.to_builtins(settings), "parts": [part for part in PARTS if part in parts]},
        rows=rows,
        runs=[],
    )
