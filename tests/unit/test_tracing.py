"""Spans, the ring that keeps them, the hooks that make them, clocks, and the file."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import threading
import weakref

import msgspec
import pytest

from headrace.errors import StartupError
from headrace.tracing import nvtx as ranges
from headrace.tracing.chrome import MAX_POINTS, Located, document
from headrace.tracing.clock import SAME_CLOCK, Exchange, Offset, clock_identity, estimate
from headrace.tracing.hooks import Hooks, Point
from headrace.tracing.spans import MAX_IDS, NOTHING, About, ProcessTrace, Span, SpanRing
from tests.trace_rules import broken


class Engine:
    """What is watched."""

    def __init__(self) -> None:
        self.attribute = lambda number: -number

    def double(self, number: int) -> int:
        return 2 * self.half(4 * number)

    def half(self, number: int) -> int:
        return number // 2

    def fail(self) -> None:
        raise KeyError("no")


def ring(capacity: int = 100) -> SpanRing:
    """On a clock that goes one nanosecond with each look."""
    return SpanRing("test", capacity, itertools.count(1000).__next__)


# --- the ring


def test_a_full_ring_drops_the_oldest_and_counts_them():
    """Invariant 8."""
    kept = ring(3)
    for number in range(10):
        kept.add("span", number, number + 1)
    trace = kept.close()
    assert [span.began for span in trace.spans] == [7, 8, 9] and trace.lost == 7


def test_a_closed_ring_takes_nothing():
    kept = ring()
    kept.add("before", 0, 1)
    call = kept.traced(lambda: 5, "after")
    assert [span.name for span in kept.close().spans] == ["before"]
    kept.add("after", 2, 3)
    assert call() == 5 and len(kept._records) == 0


def test_a_span_of_many_requests_is_one_again_and_takes_room_for_them():
    kept = ring(10)
    kept.add("other", 0, 1)
    ids = range(5 * MAX_IDS + 3)
    kept.add("step", 1, 2, About(ids, ids[:MAX_IDS], 7, {"fact": 1}))
    assert len(kept._records) == 7
    other, step = kept.close().spans
    assert other.name == "other" and step.requests == tuple(ids) and step.ended == tuple(ids[:MAX_IDS])
    assert step.plan == 7 and step.facts == {"fact": 1}


def test_what_is_left_of_a_span_whose_beginning_was_dropped_is_nobodys():
    kept = ring(6)
    kept.add("step", 1, 2, About(range(5 * MAX_IDS)))
    kept.add("wake", 3, 4)
    kept.add("wake", 5, 6)
    trace = kept.close()
    assert [(span.name, span.requests) for span in trace.spans] == [("wake", ())] * 2 and trace.lost == 1


def test_threads_are_told_apart_and_named():
    kept = ring()
    kept.add("here", 0, 1)
    thread = threading.Thread(target=lambda: kept.add("there", 2, 3), name="other")
    thread.start()
    thread.join()
    trace = kept.close()
    here, there = trace.spans
    assert trace.threads[here.thread] == threading.current_thread().name and trace.threads[there.thread] == "other"


def test_threads_that_add_at_once_lose_nothing():
    kept = SpanRing("test", 100_000)

    def add() -> None:
        for number in range(1000):
            kept.add("span", number, number + 1, About(range(40)))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = kept.close()
    assert len(trace.spans) == 8000 and trace.lost == 0 and all(span.requests == tuple(range(40)) for span in trace.spans)


def test_a_trace_crosses_as_bytes():
    kept = ring()
    kept.add("step", 1, 2, About([1, 2], [2], 3, {"tokens": 4, "message": "Deltas"}))
    trace = kept.close()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(trace), type=ProcessTrace) == trace
    assert trace.clock == clock_identity() != "unknown unknown"


# --- hooks


def watched(*points: str) -> tuple[Engine, SpanRing, Hooks]:
    engine, kept = Engine(), ring()
    hooks = Hooks(kept)
    hooks.add([Point(engine, method, method) for method in points])
    return engine, kept, hooks


def test_calls_become_spans_that_nest():
    engine, kept, _ = watched("double", "half", "attribute")
    assert engine.double(3) == 12 and engine.attribute(2) == -2
    half, double, attribute = kept.close().spans
    assert (half.name, double.name, attribute.name) == ("half", "double", "attribute")
    assert double.began < half.began < half.finished < double.finished < attribute.began


def test_a_call_that_raises_is_a_span_too():
    engine, kept, _ = watched("fail")
    with pytest.raises(KeyError):
        engine.fail()
    assert [span.name for span in kept.close().spans] == ["fail"]


def test_removed_hooks_leave_no_trace_of_themselves():
    engine, kept, hooks = watched("double", "attribute")
    before = vars(Engine()).keys()
    hooks.remove()
    assert vars(engine).keys() == before and engine.double(1) == 4 and engine.attribute(1) == -1
    assert kept.close().spans == [] and len(hooks) == 0
    reference = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert reference() is None, "nothing holds it, itself included"
    finally:
        gc.enable()


def test_a_point_that_is_not_there_is_refused_and_nothing_stays_replaced():
    engine = Engine()
    hooks = Hooks(ring())
    with pytest.raises(AttributeError, match="gone"):
        hooks.add([Point(engine, "double", "double"), Point(engine, "gone", "gone")])
    assert len(hooks) == 0 and "double" not in vars(engine)


def test_two_hooks_on_one_point_come_off_one_after_the_other():
    engine, below, first = watched("half")
    above = ring()
    second = Hooks(above)
    second.add([Point(engine, "half", "above")])
    engine.half(2)
    second.remove()
    engine.half(2)
    first.remove()
    engine.half(2)
    assert len(below.close().spans) == 2 and len(above.close().spans) == 1


def test_what_somebody_else_has_replaced_since_stays():
    engine, _, hooks = watched("half")
    engine.half = lambda number: 0
    hooks.remove()
    assert engine.half(8) == 0


def test_a_look_that_fails_costs_its_facts_and_nothing_else():
    """Invariant 6: what a call was about is not worth a call."""
    engine, kept = Engine(), ring()
    Hooks(kept).add([Point(engine, "half", "half", lambda arguments, result: About([1 // (arguments[0] - 2)]))])
    assert engine.half(2) == 1 and engine.half(3) == 1
    trace = kept.close()
    assert [span.requests for span in trace.spans] == [(), (1,)] and trace.faults == 1


# --- NVTX


class Recording:
    """In place of an NVTX domain: notes what is pushed and popped."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.pushed: list[str] = []

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        return ("attributes", message)

    def push_range(self, attributes=None, **named):
        kind, message = attributes
        assert kind == "attributes"
        self.open.append(message)
        self.pushed.append("/".join(self.open))

    def pop_range(self):
        self.open.pop()


def test_ranges_are_pushed_and_popped_in_balance_with_the_names_of_spans():
    engine, domain = Engine(), Recording()
    hooks = Hooks(ranges.NvtxRanges(domain))
    hooks.add([Point(engine, method, method, lambda arguments, result: NOTHING) for method in ("double", "half", "fail")])
    assert engine.double(3) == 12
    with pytest.raises(KeyError):
        engine.fail()
    assert domain.pushed == ["double", "double/half", "fail"] and domain.open == []


@pytest.mark.parametrize("name", ["push_range", "pop_range", "get_event_attributes"])
def test_the_stand_in_takes_what_nvtx_takes(name):
    nvtx = pytest.importorskip("nvtx")
    for domain in (nvtx.Domain, nvtx._lib.lib.DummyDomain):
        real, ours = inspect.signature(getattr(domain, name)).parameters, inspect.signature(getattr(Recording, name)).parameters
        named = [one for one, parameter in ours.items() if parameter.kind is not parameter.VAR_KEYWORD]
        assert named == [*real][: len(named)], domain
    # One level lower: the calls that are made are taken by the real one, which without a tool does nothing.
    domain = nvtx.get_domain("headrace-test")
    assert ranges.NvtxRanges(domain).traced(lambda: 5, "span")() == 5


def test_ranges_are_made_only_where_they_are_wanted(monkeypatch):
    pytest.importorskip("nvtx")
    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv(ranges.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(ranges.VARIABLE, value)
        assert (ranges.wanted_ranges() is not None) is wanted


def test_a_value_that_is_none_and_a_package_that_is_missing_are_named(monkeypatch):
    monkeypatch.setenv(ranges.VARIABLE, "yes")
    with pytest.raises(StartupError, match="HEADRACE_NVTX='yes': it must be 0 or 1"):
        ranges.wanted_ranges()
    monkeypatch.setenv(ranges.VARIABLE, "1")
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    with pytest.raises(StartupError, match=r'pip install "headrace\[nvtx\]"'):
        ranges.wanted_ranges()


# --- clocks


def test_the_quickest_exchange_says_how_far_a_clock_is_and_how_sure_that_is():
    """The other clock is 1,000,000 ahead; its answers are under way for as long as here, or longer one way."""
    exchanges = [Exchange(100, 1_000_300, 700), Exchange(1000, 1_001_050, 1100), Exchange(2000, 1_002_900, 3000)]
    offset = estimate(exchanges)
    assert offset == Offset(1_000_000, 50)
    assert estimate([exchanges[2]]).nanoseconds == 1_000_400
    for exchange in exchanges:
        found = estimate([exchange])
        assert abs(found.nanoseconds - 1_000_000) <= found.uncertainty


def test_distances_add_up_and_so_do_their_errors():
    assert Offset(-300, 7).beyond(Offset(1000, 5)) == Offset(700, 12)
    assert Offset(4, 2).beyond(SAME_CLOCK) == Offset(4, 2)


def test_an_answer_before_its_question_and_none_at_all_are_refused():
    with pytest.raises(ValueError, match="an answer at 1 ns to a question of 2 ns"):
        estimate([Exchange(2, 5, 1)])
    with pytest.raises(ValueError):
        estimate([])


# --- the file


def process(name: str, *spans: Span, pid: int = 1, lost: int = 0) -> ProcessTrace:
    return ProcessTrace(name, pid, "host", "clock", 0, 100_000, {1: "main", 2: "dispatch"}, list(spans), lost)


def write(*located: Located, missing=None) -> dict:
    trace = json.loads(b"".join(document(located, missing or {})))
    assert broken(trace["traceEvents"]) == []
    return trace


REQUEST = (1 << 48) + 5
USER = process(
    "user process",
    Span("encode", 1, 1200, 1500),
    Span("submit", 1, 1000, 2000, (REQUEST,)),
    Span("dispatch", 2, 21_000, 22_000, (REQUEST,)),
    Span("dispatch", 2, 31_000, 32_000, (REQUEST,), (REQUEST,)),
    Span("read", 1, 33_000, 34_000, (REQUEST,)),
)
LEADER = process(
    "rank 0",
    Span("schedule", 1, 10_100, 10_200, (REQUEST,)),
    Span("broadcast plan", 1, 10_300, 10_900, plan=0),
    Span("step", 1, 10_000, 20_000),
    Span("schedule", 1, 25_100, 25_200, (REQUEST,)),
    pid=2,
)
FOLLOWER = process("rank 1", Span("receive plan", 1, 3000, 10_700, plan=0), Span("forward", 1, 10_800, 19_000), pid=3)


def named(trace: dict, name: str, phase: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["name"] == name and event["ph"] == phase]


def test_a_request_is_followed_through_all_processes():
    trace = write(Located(USER), Located(LEADER), Located(FOLLOWER))
    flow = [event for event in trace["traceEvents"] if event["ph"] in "stf" and event["cat"] == "request"]
    assert [(event["ph"], event["pid"], event["ts"]) for event in flow] == [
        ("s", 1, 1.0),
        ("t", 2, 10.1),
        ("t", 1, 21.0),
        ("t", 2, 25.1),
        ("t", 1, 31.0),
        ("f", 1, 33.0),
    ]
    assert {event["id"] for event in flow} == {hex(REQUEST)}
    plan = [event for event in trace["traceEvents"] if event["ph"] in "stf" and event["cat"] == "plan"]
    assert [(event["ph"], event["pid"], event["ts"]) for event in plan] == [("s", 2, 10.3), ("f", 3, 10.699)]


def test_the_phases_of_a_request_follow_each_other_without_a_gap():
    trace = write(Located(USER), Located(LEADER), Located(FOLLOWER))
    times = {name: (named(trace, name, "b")[0]["ts"], named(trace, name, "e")[0]["ts"]) for name in ("queued", "prefill", "decode")}
    assert times == {"queued": (1.0, 10.1), "prefill": (10.1, 22.0), "decode": (22.0, 32.0)}
    (begin,), (end,) = named(trace, f"request {REQUEST}", "b"), named(trace, f"request {REQUEST}", "e")
    assert (begin["ts"], end["ts"]) == (1.0, 32.0)


def test_a_request_of_which_parts_are_missing_has_no_phases_that_cannot_be_told():
    cut = process("user process", Span("dispatch", 2, 21_000, 22_000, (7,)), Span("dispatch", 2, 31_000, 32_000, (7,)))
    trace = write(Located(cut), missing={"every rank": "dead"})
    assert not named(trace, "queued", "b") and not named(trace, "prefill", "b")
    (begin,) = named(trace, "request 7", "b")
    assert begin["args"] == {"request": 7, "begun": "before the trace", "ended": "after the trace"} and begin["ts"] == 21.0
    assert named(trace, "request 7", "e")[0]["ts"] == 100.0
    assert trace["otherData"]["missing"] == {"every rank": "dead"}


def test_a_request_that_ends_without_a_token_was_never_decoded():
    user = process("user process", Span("submit", 1, 1000, 2000, (7,)), Span("dispatch", 2, 21_000, 22_000, (), (7,)))
    trace = write(Located(user), Located(LEADER))
    assert not named(trace, "decode", "b") and named(trace, "request 7", "e")[0]["ts"] == 22.0


def test_requests_of_other_processes_show_in_the_ranks_alone():
    trace = write(Located(process("user process")), Located(LEADER))
    assert not any(event["ph"] in "be" for event in trace["traceEvents"])


def test_a_process_with_another_clock_is_moved_to_ours_and_it_says_how_sure_that_is():
    trace = write(Located(USER), Located(LEADER, Offset(-5000, 70)))
    assert [event["ts"] for event in named(trace, "step", "X")] == [15.0]
    told = trace["otherData"]["processes"][1]
    assert (told["clock_offset_us"], told["clock_uncertainty_us"]) == (-5.0, 0.07)


def test_processes_of_one_number_on_two_machines_are_two():
    trace = write(Located(USER), Located(process("rank 0", Span("step", 1, 1, 2), pid=1)))
    assert len({event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}) == 2


def test_spans_of_one_thread_come_in_the_order_of_their_times_the_outer_ones_first():
    trace = write(Located(LEADER))
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["step", "schedule", "broadcast plan", "schedule"]


def test_a_long_request_has_the_beginning_and_the_end_of_its_flow():
    """The file of a large batch would be too large to be looked at otherwise."""
    steps = [Span("schedule", 1, 1000 * step, 1000 * step + 10, tuple(range(40))) for step in range(200)]
    trace = write(Located(process("rank 0", *steps)))
    flow = [event["ts"] for event in trace["traceEvents"] if event["ph"] in "stf" and event["id"] == hex(7)]
    assert flow == [float(step) for step in (*range(MAX_POINTS // 2), *range(200 - MAX_POINTS // 2, 200))]
    args = named(trace, "schedule", "X")[0]["args"]
    assert args == {"requests": list(range(32)), "further requests": 8}


def test_what_was_dropped_is_told():
    assert write(Located(process("user process", lost=9)))["otherData"]["processes"][0]["spans_dropped"] == 9


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ({"ph": "X", "name": "a", "cat": "c", "ts": 1.0, "dur": -1.0, "pid": 1, "tid": 1}, "negative time"),
        ({"ph": "X", "name": "a", "cat": "c", "ts": 1.0, "dur": 1.0, "pid": 9, "tid": 1}, "has no name"),
        ({"ph": "b", "name": "a", "cat": "c", "id": "1", "ts": 1.0, "pid": 1, "tid": 1}, "has no end"),
        ({"ph": "e", "name": "a", "cat": "c", "id": "1", "ts": 1.0, "pid": 1, "tid": 1}, "has not begun"),
        ({"ph": "s", "bp": "e", "name": "a", "cat": "c", "id": "1", "ts": 1.0, "pid": 1, "tid": 1}, "is bound to no span"),
        ({"ph": "B", "name": "a", "cat": "c", "ts": 1.0, "pid": 1, "tid": 1}, "unknown phase"),
        ({"ph": "X", "name": "a", "cat": "c", "ts": 1.5, "dur": 9.0, "pid": 1, "tid": 1}, "ends after what it began in"),
    ],
)
def test_the_rules_find_what_breaks_them(event, complaint):
    good = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {}},
        {"ph": "X", "name": "outer", "cat": "c", "ts": 1.2, "dur": 2.0, "pid": 1, "tid": 1},
    ]
    assert broken(good) == [] and any(complaint in line for line in broken([*good, event]))
