"""The format of recordings: what is written is read again, what is left out is gone, and a file that is no recording harms nothing."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import HeadraceError
from headrace.ipc import recorder as recorder_module
from headrace.ipc import recording as recording_module
from headrace.ipc.messages import Buffer, Cancel, Deltas, Ready, RequestHead, Shutdown, ShutdownDone, Submit
from headrace.ipc.recorder import Recorder
from headrace.ipc.recording import Dropped, End, Received, RecordingError, Sent, Truncated, read_recording
from headrace.params import SamplingParams

FACTS = EngineFacts(model="echo", runner="echo", dtype="none", vocab_size=1000, max_seq_len=99, max_batch_size=4)
CONFIG = EngineConfig(model="/home/somebody/secret-folder/model.gguf")

SUBMIT = Submit(
    requests=(RequestHead(0, 2, 0, 5, 11, priority=0.25), RequestHead(1, 1, 0, 6, 12, timeout=3.0)),
    params=(SamplingParams(max_tokens=None, temperature=0.5, stop=["secret", "words"], stop_token_ids=[77], end_id=78, ignore_eos=True),),
    token_ids=Buffer.int32([71, 72, 73]),
)
DELTAS = Deltas(
    step=3,
    request_ids=Buffer.int64([0, 1]),
    counts=Buffer.int32([2, 0]),
    token_ids=Buffer.int32([74, 77]),
    finish=bytes([1, 4]),
    stop_reasons={0: 77},
    errors={1: "the secret failed"},
)
MESSAGES = [("received", Ready(FACTS)), ("sent", SUBMIT), ("sent", Cancel((1,))), ("received", DELTAS)]
MESSAGES += [("sent", Shutdown(drain=True)), ("received", ShutdownDone())]


def write(path, messages=MESSAGES, *, with_prompts=True):
    recorder = Recorder(path, CONFIG, with_prompts=with_prompts)
    for direction, message in messages:
        getattr(recorder, direction)(message)
    recorder.close()
    return recorder


@pytest.fixture
def file(tmp_path):
    return tmp_path / "session.headrace"


@pytest.fixture
def whole(file):
    """The bytes of a recording."""
    write(file)
    return file.read_bytes()


def test_what_is_recorded_is_read_in_order_and_with_times(file):
    write(file)
    recording = read_recording(file)
    assert recording.header.config == msgspec.structs.replace(CONFIG, model="model.gguf")
    assert recording.header.with_prompts
    *records, last = recording
    assert isinstance(last, End)
    kinds = {"sent": Sent, "received": Received}
    assert [(type(record), record.message) for record in records] == [(kinds[way], message) for way, message in MESSAGES]
    times = [record.seconds for record in [*records, last]]
    assert times == sorted(times)
    assert times[0] >= 0 and times[-1] < 60
    assert list(recording) == [*records, last]  # a second time


def test_a_recording_is_for_its_owner_alone_and_replaces_one_that_is_there(file):
    file.write_bytes(b"x" * 100_000)
    file.chmod(0o600)
    write(file, [])
    assert [type(record) for record in read_recording(file)] == [End]
    file.unlink()
    write(file)
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_prompts_neither_token_ids_nor_texts_are_in_the_file(file):
    write(file, with_prompts=False)
    recording = read_recording(file)
    assert not recording.header.with_prompts
    _, submit, cancel, deltas, *_ = recording
    (params,) = submit.message.params
    assert submit.message.requests == SUBMIT.requests
    assert submit.message.token_ids == Buffer.int32([0, 0, 0])
    assert (params.stop, params.stop_token_ids, params.end_id) == (("??????", "?????"), (0,), 0)
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (None, 0.5, True)
    assert cancel.message == Cancel((1,))
    assert (deltas.message.request_ids, deltas.message.counts, deltas.message.finish) == (DELTAS.request_ids, DELTAS.counts, DELTAS.finish)
    assert deltas.message.token_ids == Buffer.int32([0, 0])
    assert (deltas.message.stop_reasons, deltas.message.errors) == ({0: 0}, {1: "(left out)"})
    for secret in (b"secret", b"words", b"somebody"):
        assert secret not in file.read_bytes()


def test_fields_that_are_not_known_to_be_harmless_are_left_out():
    class Newer(msgspec.Struct, frozen=True):
        number: int
        flag: bool = False
        text: str = "default"
        texts: tuple[str, ...] = ()

    assert recording_module._numbers(Newer(5, True, "secret", ("secret",))) == Newer(5, True)


@pytest.mark.parametrize("cut", ["inside the length", "inside the record", "between two"])
def test_a_file_that_was_cut_off_gives_everything_before_the_cut(cut, file, whole):
    first = recording_module.START.size
    ends = [first]
    while ends[-1] < len(whole):
        (length,) = recording_module.LENGTH.unpack_from(whole, ends[-1])
        ends.append(ends[-1] + recording_module.LENGTH.size + length)
    # The header and three records are whole.
    place = ends[4] + {"inside the length": 2, "inside the record": 9, "between two": 0}[cut]
    file.write_bytes(whole[:place])
    *records, last = read_recording(file)
    assert [record.message for record in records] == [message for _, message in MESSAGES[:3]]
    assert last == Truncated(ends[4], place - ends[4])


def test_every_prefix_of_a_recording_is_read_as_far_as_it_goes_or_refused(file, whole):
    file.write_bytes(whole)
    for size in reversed(range(len(whole))):
        os.truncate(file, size)
        try:
            recording = read_recording(file)
        except RecordingError:
            continue
        *records, last = recording
        assert isinstance(last, Truncated)
        assert [record.message for record in records] == [message for _, message in MESSAGES[: len(records)]]


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"", "is no recording of headrace"),
        (b"GGUF" + b"\0" * 100, "is no recording of headrace"),
        (recording_module.START.pack(recording_module.MAGIC, 2), "of version 2; this headrace reads version 1"),
        (recording_module.START.pack(recording_module.MAGIC, 1), "ends before its header does"),
        (recording_module.START.pack(recording_module.MAGIC, 1) + b"\xff\xff\xff\xff", "claims 4294967295 bytes"),
        (recording_module.START.pack(recording_module.MAGIC, 1) + b"\x00\x00\x00\x30", "ends before its header does"),
        (recording_module.START.pack(recording_module.MAGIC, 1) + b"\x01\0\0\0\x80", "the header cannot be read: Object missing"),
    ],
)
def test_what_is_no_recording_is_refused_in_words(start, text, file):
    file.write_bytes(start)
    with pytest.raises(RecordingError, match=text):
        read_recording(file)


def test_settings_of_a_newer_version_are_refused_with_their_name(file):
    header = {"headrace": "9.0", "started": 0.0, "with_prompts": True, "config": {"model": "m", "brand_new": 1}}
    data = msgspec.msgpack.encode(header)
    file.write_bytes(recording_module.START.pack(recording_module.MAGIC, 1) + recording_module.LENGTH.pack(len(data)) + data)
    with pytest.raises(RecordingError, match="brand_new"):
        read_recording(file)


def test_a_damaged_record_is_named_by_its_place(file, whole):
    file.write_bytes(whole.replace(b"shutdown_done", b"shutdown_dome"))
    with pytest.raises(RecordingError, match=r"the record at byte \d+ is damaged"):
        list(read_recording(file))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_files_raise_nothing_else(data, file, whole):
    changed = bytearray(whole)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=8)):
        changed[place] = value
    changed += data.draw(st.binary(max_size=40))
    file.unlink(missing_ok=True)  # to overwrite a file may take ten times as long
    file.write_bytes(changed)
    try:
        records = list(read_recording(file))
    except RecordingError:
        return
    assert isinstance(records[-1], End | Truncated)


# --- the recorder


def test_a_stalled_disk_costs_bounded_memory_and_the_file_says_what_is_missing(file, monkeypatch):
    """A7: nothing blocks; what does not fit is dropped and counted."""
    stalled, resume = threading.Event(), threading.Event()
    real = recorder_module.encode

    def slow(record, with_prompts):
        stalled.set()
        assert resume.wait(30)
        return real(record, with_prompts)

    monkeypatch.setattr(recorder_module, "encode", slow)
    monkeypatch.setattr(recorder_module, "QUEUE_BYTES", 10 * recorder_module.MESSAGE_BYTES)
    recorder = Recorder(file, CONFIG, with_prompts=True)
    recorder.sent(Cancel((0,)))
    assert stalled.wait(30)
    for number in range(1, 30):
        recorder.sent(Cancel((number,)))
    assert recorder.dropped == 20
    resume.set()
    recorder.close()
    *records, missing, end = read_recording(file)
    assert [record.message for record in records] == [Cancel((number,)) for number in range(10)]
    assert isinstance(missing, Dropped) and missing.count == 20
    assert isinstance(end, End)


def test_what_is_missing_is_said_before_what_comes_after_it(file, monkeypatch):
    stalled, resume = threading.Event(), threading.Event()
    real = recorder_module.encode

    def slow(record, with_prompts):
        stalled.set()
        assert resume.wait(30)
        return real(record, with_prompts)

    monkeypatch.setattr(recorder_module, "encode", slow)
    monkeypatch.setattr(recorder_module, "QUEUE_BYTES", 1)
    recorder = Recorder(file, CONFIG, with_prompts=True)
    recorder.sent(Cancel((0,)))
    assert stalled.wait(30)
    recorder.sent(Cancel((1,)))
    assert recorder.dropped == 1
    resume.set()
    while recorder._queue_bytes:  # until the writer has given back what the first message took
        threading.Event().wait(0.001)
    recorder.sent(Cancel((2,)))
    recorder.close()
    first, missing, third, end = read_recording(file)
    assert (first.message, missing.count, third.message) == (Cancel((0,)), 1, Cancel((2,)))
    assert isinstance(end, End)


def test_a_message_that_cannot_be_written_is_counted_and_the_next_is_written(file):
    bad = Submit(requests=(), params=(), token_ids=object())
    recorder = write(file, [("sent", Cancel((0,))), ("sent", bad), ("sent", Cancel((1,)))])
    first, missing, third, _ = read_recording(file)
    assert (first.message, missing.count, third.message) == (Cancel((0,)), 1, Cancel((1,)))
    assert recorder.dropped == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_and_nothing_else(file, monkeypatch, caplog):
    recorder = Recorder(file, CONFIG, with_prompts=True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file.fileno())
    os.close(full)
    recorder.sent(Cancel((0,)))
    recorder._thread.join(30)
    assert not recorder._thread.is_alive()
    recorder.sent(Cancel((1,)))
    recorder.close()
    assert "No space left on device" in caplog.text
    assert [type(record) for record in read_recording(file)] == [Truncated]


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path):
    with pytest.raises(OSError, match="none"):
        Recorder(tmp_path / "none" / "file", CONFIG, with_prompts=True)


def test_the_lock_held_by_an_interrupted_caller_delays_others_once(file, monkeypatch):
    monkeypatch.setattr(recorder_module, "LOCK_WAIT", 0.01)
    recorder = Recorder(file, CONFIG, with_prompts=True)
    recorder._lock_wait = 0.01
    with recorder._lock:
        recorder.sent(Cancel((0,)))
        assert recorder._lock_wait == 0.0
        recorder.sent(Cancel((1,)))
    recorder.sent(Cancel((2,)))
    assert recorder._lock_wait == 0.01
    recorder.close()
    recorder.close()
    only, missing, _ = read_recording(file)
    assert (only.message, missing.count, recorder.dropped) == (Cancel((2,)), 2, 2)


def test_many_threads_record_everything(file):
    recorder = Recorder(file, CONFIG, with_prompts=True)
    threads = [
        threading.Thread(target=lambda first=first: [recorder.sent(Cancel((first + place,))) for place in range(200)])
        for first in range(0, 1600, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    *records, _ = read_recording(file)
    numbers = [record.message.request_ids[0] for record in records]
    assert sorted(numbers) == list(range(1600))
    assert [number for number in numbers if number < 200] == list(range(200))


def test_the_error_is_one_of_the_package():
    assert issubclass(RecordingError, HeadraceError)
