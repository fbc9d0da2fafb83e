"""Traces of real worlds (A59): every process is in them, a request can be followed through all, and the world loses nothing by it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EchoConfig
from headrace.errors import EngineDeadError, RequestError
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.executor.stacks import process_state
from headrace.text.stage import PlainText
from tests.integration.worlds import LONG, answer, completion, eventually, pids, shared_world, submit, world
from tests.trace_rules import read, spans

EVERYWHERE = ("user process", "rank 0", "rank 1")


class Numbers:
    """A detokenizer."""

    def feed(self, token_ids):
        return "".join(f"<{token}>" for token in token_ids)

    def flush(self):
        return ""


@pytest.fixture(scope="module")
def executor() -> Iterator[GenerationExecutorProxy]:
    with shared_world(2, step_time=0.002) as executor:
        # Connects, which belongs to no test.
        with pytest.raises(RequestError):
            executor.stop_profile(LONG)
        yield executor


def names(trace, process: str) -> Counter[str]:
    return Counter(event["name"] for event in spans(trace, process))


def test_three_requests_can_be_followed_through_all_processes(executor, tmp_path):
    """A59: and after the end nothing is noted any more."""
    path = tmp_path / "trace.json"
    executor.start_trace(path, LONG)
    with pytest.raises(RequestError, match=f"a trace is being taken already, into {path}"):
        executor.start_trace(tmp_path / "other.json", LONG)
    assert read(path)["otherData"]["missing"] == {"every process": "the trace was not finished"}
    params = SamplingParams(max_tokens=4)
    # Not streamed, so that a handle is read once, after its last frame was dispatched.
    requests = [GenerationRequest([5, number], params, False, None, lambda: PlainText(Numbers())) for number in (6, 7, 8)]
    handles = executor.submit(requests)
    for handle, request in zip(handles, requests, strict=True):
        assert completion(handle.result(LONG)).token_ids == answer(request.prompt_token_ids, 4)
    assert executor.stop_trace(LONG) == path
    submit(executor, [9])[0].result(LONG)
    trace = read(path)
    assert [process["name"] for process in trace["otherData"]["processes"]] == [*EVERYWHERE] and trace["otherData"]["missing"] == {}
    assert all(process["spans_dropped"] == 0 and process["clock_uncertainty_us"] == 0 for process in trace["otherData"]["processes"])
    user, leader, follower = (names(trace, process) for process in EVERYWHERE)
    assert user.keys() == {"submit", "encode", "send", "decode", "dispatch", "wake", "read", "detokenise"}
    assert leader.keys() >= {"receive", "wait", "decode", "take requests", "step", "schedule", "broadcast plan", "forward", "sample"}
    assert leader.keys() >= {"reply", "encode", "send"} and follower.keys() >= {"receive plan", "decode", "forward"}
    assert user["submit"] == 1 and leader["take requests"] == 1
    assert leader["step"] == leader["forward"] == leader["sample"] == leader["broadcast plan"] == follower["forward"] >= 4
    within(spans(trace, "rank 0"), "forward", "step")
    ids = [handle.request_id for handle in handles]
    flows = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    for number in ids:
        places = [bound(trace, event) for event in flows if event["cat"] == "request" and event["id"] == hex(number)]
        assert places[:3] == ["submit", "take requests", "schedule"] and places[-1] == "read"
        assert Counter(places)["schedule"] == Counter(places)["reply"] == 4
        assert 2 <= Counter(places)["dispatch"] <= 4, "frames that came meanwhile are dispatched as one, up to that of the ending"
    begun = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert Counter(begun) == {"queued": 3, "prefill": 3, "decode": 3, **{f"request {number}": 1 for number in ids}}
    lives = [event["args"] for event in trace["traceEvents"] if event["ph"] == "b" and event["name"].startswith("request")]
    assert lives == [{"request": number} for number in ids], "they began and ended in the trace"
    last = [event for event in spans(trace, "user process") if event["name"] == "dispatch" and "ended" in event["args"]]
    assert [event["args"]["ended"] for event in last] == [ids]
    plans = [event for event in flows if event["cat"] == "plan"]
    assert len(plans) == 2 * leader["step"] and all(event["ph"] == "sf"[place % 2] for place, event in enumerate(plans))


def within(events, inner: str, outer: str) -> None:
    outside = [event for event in events if event["name"] == outer]
    for event in events:
        if event["name"] == inner:
            assert any(o["ts"] <= event["ts"] and event["ts"] + event["dur"] <= o["ts"] + o["dur"] + 0.001 for o in outside), event


def bound(trace, point) -> str:
    """The span that a point of a flow is bound to: the innermost that holds it."""
    around = [
        event
        for event in spans(trace)
        if (event["pid"], event["tid"]) == (point["pid"], point["tid"]) and event["ts"] <= point["ts"] <= event["ts"] + event["dur"]
    ]
    return min(around, key=lambda event: event["dur"])["name"]


def test_what_was_watched_is_as_before(executor, tmp_path):
    """No hook stays, and handles are what they were."""
    # The fixture gives a weak reference; the objects behind it are compared.
    watched = [point.owner for point in executor._points()]
    before = [dict(vars(owner)).keys() for owner in watched]
    executor.start_trace(tmp_path / "trace.json", LONG)
    (during,) = submit(executor, [5])
    during.result(LONG)
    executor.stop_trace(LONG)
    assert [dict(vars(owner)).keys() for owner in watched] == before
    (after,) = submit(executor, [5])
    assert type(after) is GenerationResult and type(during) is not GenerationResult
    assert after.result(LONG).outputs == during.result(LONG).outputs


def test_a_trace_and_a_profile_are_taken_side_by_side(executor, tmp_path):
    executor.start_profile(tmp_path, LONG)
    executor.start_trace(tmp_path / "trace.json", LONG)
    submit(executor, [5])[0].result(LONG)
    assert len(executor.stop_profile(LONG)) == 2
    executor.stop_trace(LONG)
    with pytest.raises(RequestError, match="no trace is being taken"):
        executor.stop_trace(LONG)


def test_a_file_that_cannot_be_is_refused_and_the_start_undone(executor, tmp_path):
    """A57."""
    with pytest.raises(FileNotFoundError):
        executor.start_trace(tmp_path / "nowhere" / "trace.json", LONG)
    with pytest.raises(RequestError, match="is there and is no file"):
        executor.start_trace(tmp_path, LONG)
    executor.start_trace(tmp_path / "trace.json", LONG)
    executor.stop_trace(LONG)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.kill
def test_a_rank_that_is_silent_is_missing_and_the_others_are_there(executor, tmp_path):
    """A59: nobody waits for it."""
    executor.start_trace(tmp_path / "trace.json", LONG)
    pid = pids(executor)["rank1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: process_state(pid) == "T")
        trace = read(executor.stop_trace(1.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert trace["otherData"]["missing"] == {"rank 1": "it did not answer in time"}
    assert [process["name"] for process in trace["otherData"]["processes"]] == ["user process", "rank 0"]
    executor.start_trace(tmp_path / "trace.json", LONG)
    assert read(executor.stop_trace(LONG))["otherData"]["missing"] == {}


@pytest.mark.kill
def test_a_rank_that_is_killed_leaves_a_readable_file_and_nothing_else(tmp_path):
    """A23, invariant 5: what this process has noted is there, and why there is nothing of the ranks."""
    path = tmp_path / "trace.json"
    with world(2, step_time=0.01) as executor:
        executor.start_trace(path, LONG)
        (handle,) = submit(executor, [5], max_tokens=8000, streaming=True)
        next(handle)
        os.kill(pids(executor)["rank1"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1"):
            handle.result(LONG)
        executor.close()
    trace = read(path)
    assert "rank 1" in trace["otherData"]["missing"]["every rank"]
    assert names(trace, "user process") >= Counter(["submit", "dispatch", "read"])
    (ending,) = [event for event in trace["traceEvents"] if event["ph"] == "b" and event["name"] == f"request {handle.request_id}"]
    assert ending["args"]["ended"] == "after the trace"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.kill
def test_a_close_that_has_no_time_writes_what_there_is(tmp_path):
    """Invariant 3: one budget for everything."""
    path = tmp_path / "trace.json"
    with world(1) as executor:
        executor.start_trace(path, LONG)
        pid = pids(executor)["rank0"]
        os.kill(pid, signal.SIGSTOP)
        with contextlib.closing(executor):
            assert eventually(lambda: process_state(pid) == "T")
            executor.close(timeout=0.2)
    assert "StopTrace" in read(path)["otherData"]["missing"]["every rank"]


def test_llm_traces_from_its_start_to_its_close(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(FileNotFoundError):
        LLM("echo", trace=tmp_path / "nowhere" / "trace.json")
    with LLM("echo", trace=path, echo=EchoConfig(step_time=0.001)) as llm:
        llm.generate([[5, 6], [7]], SamplingParams(max_tokens=3))
        with pytest.raises(RequestError, match="already"):
            llm.start_trace(tmp_path / "other.json")
    trace = read(path)
    assert names(trace, "user process")["submit"] == 1 and names(trace, "rank 0")["step"] == 3
    assert sum(event["ph"] == "b" and event["name"] == "decode" for event in trace["traceEvents"]) == 2


def test_nvtx_ranges_in_every_process_change_nothing(monkeypatch, tmp_path):
    """Without a tool around them they do nothing; a trace goes above them."""
    pytest.importorskip("nvtx")
    monkeypatch.setenv("HEADRACE_NVTX", "1")
    with world(2) as executor:
        executor.start_trace(tmp_path / "trace.json", LONG)
        assert completion(submit(executor, [5])[0].result(LONG)).token_ids == answer([5], 5)
        trace = read(executor.stop_trace(LONG))
        assert names(trace, "rank 1")["forward"] == 5
        assert completion(submit(executor, [5])[0].result(LONG)).token_ids == answer([5], 5)
    monkeypatch.setenv("HEADRACE_NVTX", "2")
    with pytest.raises(EngineDeadError, match="HEADRACE_NVTX"):
        LLM("echo")
