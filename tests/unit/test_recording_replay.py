"""What a recording says of each request, when a stand-in answers what, and what counts as a difference: all without a process."""

from __future__ import annotations

import math

import msgspec
import pytest

from headrace.config import EngineConfig, EngineFacts
from headrace.executor.recorded import RecordedSession
from headrace.executor.replay import Outcome, _request
from headrace.executor.stand_in import UNFINISHED, UNKNOWN, Answers
from headrace.ipc.messages import Beam, Buffer, Cancel, Deltas, Ready, RequestHead, Submit
from headrace.ipc.recording import LENGTH, Received, RecordingError, Sent, encode, read_recording, start_of_file
from headrace.ipc.recording import Header as FileHeader
from headrace.outputs import FinishReason
from headrace.params import SamplingParams

FACTS = EngineFacts(model="echo", runner="echo", dtype="none", vocab_size=1000, max_seq_len=99, max_batch_size=4)
STOP, LENGTH_, ABORT, ERROR = (int(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR))


def submit(*requests, **params) -> Submit:
    """Each: (id, prompt, max_tokens, seed)."""
    heads = tuple(RequestHead(number, len(prompt), 0, max_tokens, seed) for number, prompt, max_tokens, seed in requests)
    tokens = Buffer.int32(token for _, prompt, _, _ in requests for token in prompt)
    return Submit(requests=heads, params=(SamplingParams(**params),), token_ids=tokens)


def deltas(*entries, errors=None, stop_reasons=None) -> Deltas:
    """Each: (id, tokens, finish)."""
    return Deltas(
        step=0,
        request_ids=Buffer.int64(entry[0] for entry in entries),
        counts=Buffer.int32(len(entry[1]) for entry in entries),
        token_ids=Buffer.int32(token for entry in entries for token in entry[1]),
        finish=bytes(entry[2] for entry in entries),
        errors=errors or {},
        stop_reasons=stop_reasons or {},
    )


@pytest.fixture
def session(tmp_path):
    """Makes a session of records; ``ready`` comes before them by itself."""

    def make(*records, with_prompts=True, ready=True, end=b"") -> RecordedSession:
        header = FileHeader(headrace="0", started=0.0, with_prompts=with_prompts, config=EngineConfig(model="echo", runner="echo"))
        data = start_of_file(header)
        for record in ([Received(0.0, Ready(FACTS))] if ready else []) + list(records):
            data += encode(record, with_prompts)
        path = tmp_path / "recording"
        path.write_bytes(data + end)
        return RecordedSession(read_recording(path))

    return make


def read(message: Deltas | None) -> list[tuple[int, list[int], int]]:
    """The entries of a frame."""
    assert message is not None
    tokens, entries = message.token_ids.as_int32().tolist(), []
    for number, count, finish in zip(message.request_ids.as_int64(), message.counts.as_int32(), message.finish, strict=True):
        entries.append((number, tokens[:count], finish))
        del tokens[:count]
    assert tokens == []
    return entries


# --- what a recording says


def test_bursts_deltas_and_cancels_are_put_together(session):
    found = session(
        Sent(1.0, submit((0, [1, 2], 5, 70), (1, [3], 6, 71), temperature=0.5)),
        Received(2.0, deltas((0, [8], 0), (1, [9], 0))),
        Sent(2.5, Cancel((1, 99))),
        Received(3.0, deltas((0, [7], LENGTH_), (1, [6], ABORT), (99, [5], 0))),
        Sent(4.0, submit((2, [4], 7, 72))),
    )
    first, second, third = found.requests
    assert [len(burst) for burst in found.bursts] == [2, 1]
    assert (first.prompt.tolist(), first.max_tokens, first.seed, first.params.temperature) == ([1, 2], 5, 70, 0.5)
    assert (first.token_ids, first.finish, first.cancelled) == ([8, 7], FinishReason.LENGTH, None)
    assert (second.token_ids, second.finish, second.cancelled, second.cancelled_after) == ([9, 6], FinishReason.ABORT, 2.5, 1)
    assert (third.submitted, third.token_ids, third.finish) == (4.0, [], None)
    assert found.truncated


def test_an_answer_that_was_recorded_before_its_request_counts(session):
    found = session(Received(1.0, deltas((0, [8], LENGTH_))), Sent(1.1, submit((0, [1], 1, 0))))
    assert found.requests[0].token_ids == [8]


def test_a_request_that_another_world_continued_is_one_request(session):
    found = session(
        Sent(1.0, submit((0, [1, 2], 5, 70))),
        Received(2.0, deltas((0, [8], 0))),
        Received(3.0, Ready(FACTS)),
        Sent(3.1, submit((0, [1, 2, 8], 4, 70))),
        Received(4.0, deltas((0, [9], LENGTH_))),
    )
    (only,) = found.requests
    assert (only.prompt.tolist(), only.token_ids, only.finish) == ([1, 2], [8, 9], FinishReason.LENGTH)


def test_frames_that_contradict_themselves_or_come_late_change_nothing(session):
    good = deltas((0, [8], LENGTH_))
    found = session(
        Sent(1.0, submit((0, [1], 5, 70))),
        Received(2.0, msgspec.structs.replace(good, counts=Buffer.int32([2]))),
        Received(2.0, msgspec.structs.replace(good, counts=Buffer(b"123"))),
        Received(2.0, msgspec.structs.replace(good, finish=b"\x63")),
        Received(2.0, good),
        Received(3.0, deltas((0, [7], STOP))),
    )
    assert (found.requests[0].token_ids, found.requests[0].finish) == ([8], FinishReason.LENGTH)


@pytest.mark.parametrize("change", [{"token_ids": Buffer.int32([1])}, {"params": ()}, {"token_ids": Buffer(b"123")}])
def test_a_submit_that_contradicts_itself_is_refused(change, session):
    with pytest.raises(RecordingError, match=r"a submit at 1\.000 s contradicts itself"):
        session(Sent(1.0, msgspec.structs.replace(submit((0, [1, 2], 5, 70)), **change)))


def test_without_a_world_that_became_ready_there_is_nothing_to_replay(session):
    with pytest.raises(RecordingError, match="no world became ready"):
        session(ready=False)


# --- the stand-in


def test_answers_come_as_long_after_their_submit_as_they_did(session):
    found = session(
        Sent(10.0, submit((0, [1], 5, 0), (1, [2], 5, 0))),
        Received(12.0, deltas((0, [8], 0), (1, [9], 0))),
        Received(16.0, deltas((0, [7], STOP), (1, [6], ERROR), errors={1: "why"}, stop_reasons={0: 7})),
    )
    answers = Answers(found, speed=2.0)
    answers.submit(submit((30, [2], 5, 1)), 100.0)
    answers.submit(submit((31, [1], 5, 1)), 100.5)
    assert (len(answers), answers.next_due, answers.frame(100.9)) == (2, 101.0, None)
    assert read(answers.frame(101.0)) == [(30, [9], 0)]
    assert read(answers.frame(101.5)) == [(31, [8], 0)]
    assert answers.next_due == 103.0
    last = answers.frame(200.0)
    assert read(last) == [(30, [6], ERROR), (31, [7], STOP)]
    assert (last.errors, last.stop_reasons) == ({30: "why"}, {31: 7})
    assert (len(answers), answers.next_due, answers.frame(1e9)) == (0, None, None)


def test_without_waiting_a_frame_still_has_at_most_one_delta_of_a_request(session):
    found = session(
        Sent(1.0, submit((0, [1], 5, 0), (1, [2], 5, 0))),
        Received(2.0, deltas((0, [8], 0))),
        Received(3.0, deltas((0, [7], 0), (1, [9], LENGTH_))),
        Received(4.0, deltas((0, [6], LENGTH_))),
    )
    answers = Answers(found, math.inf)
    answers.submit(submit((0, [1], 5, 0), (1, [2], 5, 0)), 50.0)
    frames = [read(answers.frame(50.0)) for _ in range(3)]
    assert frames == [[(0, [8], 0), (1, [9], LENGTH_)], [(0, [7], 0)], [(0, [6], LENGTH_)]]
    assert not len(answers)


def test_of_equal_requests_the_one_with_the_seed_answers_else_the_next(session):
    found = session(
        Sent(1.0, submit((0, [1], 5, 70), (1, [1], 5, 71), (2, [1], 5, 72))),
        Received(2.0, deltas((0, [10], LENGTH_), (1, [11], LENGTH_), (2, [12], LENGTH_))),
    )
    answers = Answers(found, math.inf)
    answers.submit(submit((5, [1], 5, 71), (6, [1], 5, 999), (7, [1], 5, 999), (8, [1], 5, 999), (9, [1], 6, 70)), 0.0)
    frame = answers.frame(0.0)
    assert read(frame) == [(5, [11], LENGTH_), (6, [10], LENGTH_), (7, [12], LENGTH_), (8, [], ERROR), (9, [], ERROR)]
    assert frame.errors == {8: UNKNOWN, 9: UNKNOWN}


def test_a_cancel_brings_what_came_before_the_recorded_end_or_ends_at_once(session):
    found = session(
        Sent(1.0, submit((0, [1], 50, 0), (1, [2], 50, 0))),
        Received(2.0, deltas((0, [8], 0), (1, [9], 0))),
        Sent(2.1, Cancel((0,))),
        Received(3.0, deltas((0, [7], 0), (1, [6], 0))),
        Received(4.0, deltas((0, [5], ABORT), (1, [4], LENGTH_))),
    )
    answers = Answers(found, 1.0)
    answers.submit(submit((0, [1], 50, 0), (1, [2], 50, 0)), 0.0)
    assert read(answers.frame(1.0)) == [(0, [8], 0), (1, [9], 0)]
    for number in (0, 1, 1, 77):
        answers.cancel(number, 1.5)
    assert read(answers.frame(1.5)) == [(0, [7, 5], ABORT), (1, [], ABORT)]
    answers.cancel(0, 1.6)
    assert (len(answers), answers.frame(9.0), answers.next_due) == (0, None, None)


def test_a_request_that_the_recording_does_not_end_fails(session):
    found = session(Sent(1.0, submit((0, [1], 5, 0), (1, [2], 5, 0))), Received(2.0, deltas((0, [8], 0))))
    answers = Answers(found, 1.0)
    answers.submit(submit((0, [1], 5, 0), (1, [2], 5, 0)), 0.0)
    frames = [answers.frame(now) for now in (0.0, 1.0, 1.0)]
    assert [read(frame) for frame in frames] == [[(1, [], ERROR)], [(0, [8], 0)], [(0, [], ERROR)]]
    assert (frames[0].errors, frames[2].errors) == ({1: UNFINISHED}, {0: UNFINISHED})


def test_without_prompts_lengths_tell_requests_apart(session):
    found = session(
        Sent(1.0, submit((0, [1, 2], 5, 0), (1, [3], 5, 0))),
        Received(2.0, deltas((0, [8], LENGTH_), (1, [9, 9], LENGTH_))),
        with_prompts=False,
    )
    answers = Answers(found, math.inf)
    answers.submit(submit((0, [77], 5, 0), (1, [78, 79], 5, 0)), 0.0)
    assert read(answers.frame(0.0)) == [(0, [0, 0], LENGTH_), (1, [0], LENGTH_)]


def test_cancel_all_ends_everything(session):
    found = session(Sent(1.0, submit((0, [1], 5, 0))), Received(9.0, deltas((0, [8], LENGTH_))))
    answers = Answers(found, 1.0)
    answers.submit(submit((0, [1], 5, 0)), 0.0)
    answers.cancel_all(0.5)
    assert read(answers.frame(0.5)) == [(0, [], ABORT)]


# --- differences


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        (([8, 9], LENGTH_), ([8, 9], "length"), None),
        (([8, 9], LENGTH_), ([8, 7], "length"), "token 1 is 7 instead of 9"),
        (([8, 9], LENGTH_), ([8], "length"), "1 tokens instead of 2"),
        (([8, 9], LENGTH_), ([8, 9, 7], "length"), "3 tokens instead of 2"),
        (([8, 9], LENGTH_), ([8, 9], "stop"), "ended with stop instead of length"),
        (([8, 9], STOP), ([8], "abort"), "ended with abort instead of stop"),
        (([8, 9], ABORT), ([8], "abort"), None),
        (([8, 9], ABORT), ([8, 9, 7], "abort"), None),
        (([8, 9], ABORT), ([7], "abort"), "token 0 is 7 instead of 8"),
        (([8, 9], ABORT), ([8, 9, 7], "length"), None),
        (([8, 9], ABORT), ([8], "length"), "1 tokens instead of 2"),
        (([8, 9], 0), ([8, 9, 7], "length"), None),
        (([], ERROR), ([8], "length"), "ended with length; in the recording it failed"),
        (([], ERROR), "again", None),
        (([8], LENGTH_), "why", "failed: why"),
    ],
)
def test_differences(then, now, difference, session):
    found = session(Sent(1.0, submit((0, [1], 5, 0))), Received(2.0, deltas((0, *then))))
    outcome = Outcome(found.requests[0])
    if isinstance(now, str):
        outcome.error = now
    else:
        outcome.token_ids, outcome.finish = now
    assert outcome.difference(only_lengths=False) == difference


def test_a_cancel_that_came_too_late_then_may_come_in_time_now(session):
    found = session(Sent(1.0, submit((0, [1], 5, 0))), Sent(1.5, Cancel((0,))), Received(2.0, deltas((0, [8, 9], LENGTH_))))
    assert Outcome(found.requests[0], [8], "abort").difference(only_lengths=False) is None


@pytest.mark.parametrize(("now", "difference"), [([0, 0], None), ([0], "1 tokens instead of 2"), ([5, 5], None)])
def test_lengths_alone(now, difference, session):
    found = session(Sent(1.0, submit((0, [1], 5, 0))), Received(2.0, deltas((0, [8, 9], STOP))), with_prompts=False)
    assert Outcome(found.requests[0], now, "length").difference(only_lengths=True) == difference


def test_a_request_is_submitted_as_it_was_with_the_seed_that_was_drawn(session):
    found = session(
        Sent(1.0, submit((0, [1], 5, 70), max_tokens=None, stop="x", stop_token_ids=[3], temperature=0.5)),
        Received(2.0, deltas((0, [8, 3], STOP))),
    )
    request = _request(found.requests[0], same_lengths=False)
    params = SamplingParams(max_tokens=5, seed=70, stop_token_ids=[3], temperature=0.5, detokenize=False)
    assert (list(request.prompt_token_ids), request.params) == ([1], params)
    request = _request(found.requests[0], same_lengths=True)
    assert request.params == SamplingParams(max_tokens=2, seed=70, temperature=0.5, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("with_prompts", [True, False])
def test_a_beam_search_brings_its_results_again(with_prompts, session):
    """Without prompts of the same lengths."""
    beams = (Beam(Buffer.int32([7, 8, 9]), STOP, None, -1.0, -0.5), Beam(Buffer.int32([7]), LENGTH_, None, -2.0, -2.0))
    end = msgspec.structs.replace(deltas((0, [], STOP)), beams={0: beams})
    search = submit((0, [1, 2], 5, 0), use_beam_search=True, n=2)
    found = session(Sent(1.0, search), Received(2.0, end), with_prompts=with_prompts)
    (recorded,) = found.requests
    assert recorded.token_ids == ([7, 8, 9] if with_prompts else [0, 0, 0])
    assert Outcome(recorded, recorded.token_ids, "stop").difference(only_lengths=False) is None
    request = _request(recorded, same_lengths=False)
    assert request.params.use_beam_search and request.params.n == 2 and not request.streaming
    answers = Answers(found, math.inf)
    answers.submit(search if with_prompts else submit((0, [0, 0], 5, 0)), 0.0)
    frame = answers.frame(10.0)
    assert read(frame) == [(0, [], STOP)]
    assert [len(beam.token_ids.as_int32()) for beam in frame.beams[0]] == [3, 1] and len(answers) == 0


def test_a_cut_off_recording_is_replayed_as_far_as_it_goes(session):
    found = session(Sent(1.0, submit((0, [1], 5, 0))), end=LENGTH.pack(100) + b"half")
    assert found.truncated and len(found.requests) == 1
