"""A session of a real echo world (A16) is recorded, and replayed to a user process without an engine and to an engine without that user."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest

from headrace.cli import main
from headrace.config import EchoConfig, EngineConfig
from headrace.errors import EngineDeadError, RequestError, StartupError
from headrace.executor.launchers.mpi import MpiLauncher, find_mpi
from headrace.executor.launchers.replay import ReplayLauncher
from headrace.executor.lifecycle import FAIL, RestartPolicy
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.recorded import RecordedSession
from headrace.executor.replay import replay
from headrace.executor.request import GenerationRequest
from headrace.ipc.messages import Buffer, Deltas, ShutdownDone
from headrace.ipc.recorder import Recorder
from headrace.ipc.recording import End, Received, Sent, read_recording
from headrace.llm import LLM
from headrace.outputs import FinishReason
from headrace.params import SamplingParams
from headrace.text.stage import StoppingText
from headrace.text.stops import StopMatcher

from .worlds import LONG, answer, pids, world

FAIL_TOKEN = 66
ECHO = {"step_time": 0.002, "fail_token": FAIL_TOKEN}


class Numbers:
    """A detokenizer: 5, 6 is "<5><6>"."""

    def feed(self, token_ids):
        return "".join(f"<{token}>" for token in token_ids)

    def flush(self):
        return ""


class Ending(NamedTuple):
    text: str
    token_ids: list[int]
    finish: str | None
    stop_reason: str | int | None


def ask(prompt, max_tokens, **params) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **params)

    def stage() -> StoppingText:
        return StoppingText(Numbers(), StopMatcher(params.stop, params.include_stop_str_in_output))

    return GenerationRequest(prompt, params, streaming=True, new_stage=stage)


async def read(handle, cancel_after: int | None = None) -> Ending:
    completion = None
    try:
        async for output in handle:
            (completion,) = output.outputs
            if cancel_after is not None and len(completion.token_ids) >= cancel_after:
                handle.abort()
    except RequestError as error:
        return Ending(str(error), [], "error", None)
    return Ending(completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason)


def perform(executor: GenerationExecutorProxy) -> list[Ending]:
    """What the user of the recorded session does: a burst, streams that are cancelled, stop strings and tokens, a request that fails."""

    async def run() -> list[Ending]:
        burst = executor.submit([ask([10 + place, 20 + place], 3 + 2 * place) for place in range(8)])
        stops = executor.submit([ask([30, 31, 32, 33], 40, stop=["32><33"], ignore_eos=True), ask([40, 41, 42], 40, stop_token_ids=[42])])
        cancelled = executor.submit([ask([50, 51], 5000), ask([52], 6000)])
        failing = executor.submit([ask([FAIL_TOKEN], 4)])
        readers = [read(handle) for handle in (*burst, *stops, *failing)]
        return await asyncio.wait_for(asyncio.gather(*readers, read(cancelled[0], 5), read(cancelled[1], 12)), LONG)

    return asyncio.run(run())


@contextlib.contextmanager
def recorded(path, *, with_prompts: bool = True, on_engine_death=FAIL, **echo) -> Iterator[GenerationExecutorProxy]:
    """A started world of which everything is recorded."""
    config = EngineConfig(model="echo", runner="echo", echo=EchoConfig(**echo))
    executor = GenerationExecutorProxy(
        config,
        MpiLauncher(find_mpi()),
        start_timeout=LONG,
        on_engine_death=on_engine_death,
        record=path,
        record_prompts=with_prompts,
    )
    try:
        executor.start()
        yield executor
    finally:
        executor.close()


class Sample(NamedTuple):
    path: str
    blank: str
    endings: list[Ending]


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Sample:
    """One session, recorded with prompts, and one without them."""
    folder = tmp_path_factory.mktemp("recordings")
    path, blank = folder / "session", folder / "blank"
    with recorded(path, **ECHO) as executor:
        endings = perform(executor)
    with recorded(blank, with_prompts=False, **ECHO) as executor:
        perform(executor)
    return Sample(str(path), str(blank), endings)


@contextlib.contextmanager
def stand_in(path, speed=math.inf) -> Iterator[GenerationExecutorProxy]:
    """A started executor whose world is the recording."""
    executor = GenerationExecutorProxy(read_recording(path).header.config, ReplayLauncher(path, speed), start_timeout=LONG)
    try:
        executor.start()
        yield executor
    finally:
        executor.close()


def replayed(path, executor, speed=math.inf, same_lengths=False):
    session = RecordedSession(read_recording(path))
    return asyncio.run(asyncio.wait_for(replay(session, executor, speed=speed, same_lengths=same_lengths), LONG))


def test_the_recorded_session_has_what_the_others_need(sample):
    *whole, stop_text, stop_token, failed, first_cancelled, second_cancelled = sample.endings
    assert [ending.token_ids for ending in whole] == [answer([10 + place, 20 + place], 3 + 2 * place) for place in range(8)]
    assert (stop_text.text, stop_text.finish, stop_text.stop_reason) == ("<31><", "stop", "32><33")
    assert (stop_token.finish, stop_token.stop_reason) == ("stop", 42)
    assert failed.finish == "error" and str(FAIL_TOKEN) in failed.text
    for ending, at_least in ((first_cancelled, 5), (second_cancelled, 12)):
        assert ending.finish == "abort" and at_least <= len(ending.token_ids) < 5000
    session = RecordedSession(read_recording(sample.path))
    assert not session.truncated and not session.missing
    assert [len(burst) for burst in session.bursts] == [8, 2, 2, 1]
    assert sum(request.cancelled is not None for request in session.requests) == 3


@pytest.mark.parametrize("speed", [math.inf, 1.0, 3.0])
def test_a_user_process_without_an_engine_gets_the_same_texts(speed, sample):
    with stand_in(sample.path, speed) as executor:
        assert executor.facts.model == "echo"
        assert perform(executor) == sample.endings
        counters = executor.counters()
        assert counters["live"] == 0 and counters["admitted"] == 13
        assert executor.stats(LONG)["requests_running"] == 0


def test_the_replayed_world_knows_each_request_once_and_no_other(sample):
    with stand_in(sample.path) as executor:
        assert executor.submit([ask([10, 20], 3)])[0].result(LONG).outputs[0].token_ids == answer([10, 20], 3)
        for again in ([10, 20], [10, 21]):
            with pytest.raises(RequestError, match="the recording has no such request"):
                executor.submit([ask(again, 3)])[0].result(LONG)
        executor.ping(LONG)


def test_a_replayed_world_says_that_it_cannot_stand_still_and_has_nothing_to_profile(sample, tmp_path):
    """A57."""
    with stand_in(sample.path) as executor:
        with pytest.raises(RequestError, match="not in effect"):
            executor.pause("keep", LONG)
        executor.resume(LONG)
        with pytest.raises(RequestError, match="does not answer StartProfile"):
            executor.start_profile(tmp_path, LONG)
        assert executor.submit([ask([10, 20], 3)])[0].result(LONG).outputs[0].token_ids == answer([10, 20], 3)


def test_an_unhurried_cancel_ends_a_replayed_request_early(sample):
    """One that was not cancelled in the recording: it is aborted where it stands, as by an engine."""
    with stand_in(sample.path, speed=1e-3) as executor:
        (handle,) = executor.submit([ask([17, 27], 17)])
        handle.abort()
        ending = asyncio.run(asyncio.wait_for(read(handle), LONG))
        assert ending.finish == "abort" and len(ending.token_ids) < 17


def test_a_replayed_world_drains_and_aborts_on_close(sample):
    with stand_in(sample.path, speed=20.0) as executor:
        (handle,) = executor.submit([ask([17, 27], 17)])
        executor.close(drain=True, timeout=LONG)
        assert handle.result(LONG).outputs[0].token_ids == answer([17, 27], 17)
    with stand_in(sample.path, speed=1e-6) as executor:
        (handle,) = executor.submit([ask([17, 27], 17)])
        executor.close(timeout=LONG)
        assert handle.result(LONG).outputs[0].finish_reason == "abort"


@pytest.mark.kill
def test_the_death_of_a_replayed_world_is_seen(sample):
    with stand_in(sample.path, speed=1e-6) as executor:
        (handle,) = executor.submit([ask([17, 27], 17)])
        os.kill(pids(executor)["rank0"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            handle.result(LONG)


def test_a_recording_that_cannot_be_replayed_fails_the_start(tmp_path):
    path = tmp_path / "nothing"
    Recorder(path, EngineConfig(model="echo", runner="echo"), with_prompts=True).close()
    with pytest.raises(StartupError, match="no world became ready in this recording"), stand_in(path):
        pytest.fail("it started")


@pytest.mark.parametrize("speed", [math.inf, 1.0])
def test_an_engine_gives_the_recorded_tokens(speed, sample):
    with world(**ECHO) as executor:
        outcomes = replayed(sample.path, executor, speed)
        assert {outcome.recorded.request_id: outcome.difference(only_lengths=False) for outcome in outcomes} == dict.fromkeys(range(13))
        cut_off = [outcome for outcome in outcomes if outcome.recorded.cancelled is not None]
        assert [outcome.finish for outcome in cut_off] == ["abort"] * 3
        assert all(len(outcome.token_ids) >= outcome.recorded.cancelled_after > 0 for outcome in cut_off)
        assert executor.counters()["live"] == 0


def test_an_engine_that_answers_otherwise_is_found_out(sample):
    with world(**ECHO | {"vocab_size": 45}) as executor:
        differences = [outcome.difference(only_lengths=False) for outcome in replayed(sample.path, executor)]
    by_words = [difference for difference in differences if difference is not None]
    # Prompts with ids of 45 and more are refused; the others are answered by other tokens once their ids come round.
    assert any("refused: " in difference for difference in by_words)
    assert None in differences


def test_lengths_alone_are_compared_where_prompts_were_left_out(sample):
    with world(**ECHO) as executor:
        outcomes = replayed(sample.blank, executor, same_lengths=True)
    session = RecordedSession(read_recording(sample.blank))
    assert not session.with_prompts
    assert not any(token for request in session.requests for token in (*request.prompt, *request.token_ids))
    by_themselves = [outcome for outcome in outcomes if outcome.recorded.finish in (FinishReason.STOP, FinishReason.LENGTH)]
    assert len(by_themselves) == 9
    assert [len(outcome.token_ids) for outcome in by_themselves] == [outcome.recorded.num_tokens for outcome in by_themselves]
    assert [outcome.difference(only_lengths=True) for outcome in outcomes] == [None] * 13


@pytest.mark.parametrize("to", ["client", "engine"])
def test_the_command_replays_and_compares(to, sample, capsys):
    assert main(["replay", sample.path, "--to", to, "--speed", "max"]) == 0
    assert "tokens and endings as recorded: 13 of 13 requests" in capsys.readouterr().out


def test_the_command_tells_what_is_different(sample, tmp_path, capsys):
    """One token is changed in the recording: the engine, which is right, differs from it."""
    recording = read_recording(sample.path)
    changed = Recorder(tmp_path / "changed", recording.header.config, with_prompts=True)
    left = 1
    for record in recording:
        if isinstance(record, Sent):
            changed.sent(record.message)
        elif isinstance(record, Received):
            message = record.message
            if left and isinstance(message, Deltas) and list(message.counts.as_int32()[:1]) == [1]:
                tokens = message.token_ids.as_int32().tolist()
                message = msgspec.structs.replace(message, token_ids=Buffer.int32([999, *tokens[1:]]))
                left -= 1
            changed.received(message)
    changed.close()
    assert left == 0
    assert main(["replay", str(changed.path), "--speed", "max"]) == 1
    out = capsys.readouterr().out
    # The frame that was changed may be the first or, where the failed request stood at the head of that, the second.
    assert re.search(r"^request 0: token [01] is (11|21) instead of 999$", out, re.MULTILINE)
    assert "as recorded: 12 of 13 requests" in out


def test_the_command_replays_without_prompts_to_a_client(sample, capsys):
    assert main(["replay", sample.blank, "--to", "client", "--speed", "max"]) == 0
    out = capsys.readouterr().out
    assert "without prompts" in out
    assert "lengths as recorded: 13 of 13 requests" in out


def test_the_command_refuses_what_is_no_recording(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_text("hello")
    assert main(["replay", str(path)]) == 1
    assert "is no recording of headrace" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["replay", str(path), "--speed", "-1"])
    assert exit_.value.code == 2


def test_the_python_api_records_and_leaves_prompts_out_unless_told(tmp_path):
    for with_prompts in (False, True):
        with LLM("echo", record=tmp_path / "file", record_prompts=with_prompts) as llm:
            given = llm.generate([7, 8], SamplingParams(max_tokens=3)).outputs[0].token_ids
        recording = read_recording(tmp_path / "file")
        (request,) = RecordedSession(recording).requests
        assert request.prompt.tolist() == ([7, 8] if with_prompts else [0, 0])
        assert request.token_ids == (given if with_prompts else [0, 0, 0])
        *_, done, end = recording
        assert isinstance(done.message, ShutdownDone) and isinstance(end, End)


def test_an_executor_that_was_never_started_closes_its_recording(tmp_path):
    config = EngineConfig(model="echo", runner="echo")
    GenerationExecutorProxy(config, MpiLauncher(find_mpi()), record=tmp_path / "file").close()
    assert [type(record) for record in read_recording(tmp_path / "file")] == [End]
    with pytest.raises(OSError, match="nowhere"):
        GenerationExecutorProxy(config, MpiLauncher(find_mpi()), record=tmp_path / "nowhere" / "file")


@pytest.mark.kill
def test_a_request_that_went_through_two_worlds_is_replayed_as_one(tmp_path):
    """A26: what the recording holds of it is the whole answer, and both kinds of replay give it."""
    path = tmp_path / "file"

    async def interrupted(executor) -> Ending:
        (handle,) = executor.submit([ask([5, 6, 7], 60)])
        killed = False
        async for output in handle:
            (completion,) = output.outputs
            if len(completion.token_ids) >= 10 and not killed:
                killed = True
                os.kill(pids(executor)["rank0"], signal.SIGKILL)
        return Ending(completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason)

    with recorded(path, on_engine_death=RestartPolicy(attempts=1), step_time=0.002) as executor:
        ending = asyncio.run(asyncio.wait_for(interrupted(executor), LONG))
        assert executor.counters()["restarts"] == 1
    assert ending.token_ids == answer([5, 6, 7], 60)
    (request,) = RecordedSession(read_recording(path)).requests
    assert (request.token_ids, request.finish) == (ending.token_ids, FinishReason.LENGTH)
    with stand_in(path) as executor:
        (handle,) = executor.submit([ask([5, 6, 7], 60)])
        assert asyncio.run(asyncio.wait_for(read(handle), LONG)) == ending
    with world() as executor:
        assert [outcome.difference(only_lengths=False) for outcome in replayed(path, executor)] == [None]
