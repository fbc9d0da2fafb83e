"""A1, A3, A6: the codec by itself, and the document that is written from it."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from headrace.errors import FrameError
from headrace.ipc.channel import new_key
from headrace.ipc.codec import HEADER_BYTES, MAX_EXTRA_PARTS, OUT_OF_BAND_BYTES, Codec, Incoming, Kind, Link, notice, read_notice
from headrace.ipc.messages import CHANNELS, AnyMessage, Buffer, Cancel, Deltas, Hello, Message, Ping, Plan, PlanEnd, Pong, Submit
from headrace.params import SamplingParams

ROOT = Path(__file__).parents[2]
KEY = bytes(range(32))


class Wire:
    """Both ends of one direction of a channel."""

    def __init__(self, channel: str = "plan", sender: Any = "binder", peer: str = "", served: bool = False) -> None:
        self.sender = Codec(KEY, channel, sender, served)
        self.receiver = Codec(KEY, channel, "connector" if sender == "binder" else "binder", served)
        self.out: Link = self.sender.link(peer)
        self.back: Link = self.receiver.link(peer)

    def encode(self, message: AnyMessage, kind: Kind = Kind.SEND, number: int = 0) -> list[bytes]:
        parts = [bytes(part) for part in self.sender.encode(self.out, message, kind, number)]
        self.out.sent += 1
        return parts

    def decode(self, parts: Any) -> Incoming:
        return self.receiver.decode(self.back, parts)

    def refusal(self, parts: Any) -> str:
        """The reason for which this is refused; the link must not change."""
        before = self.back.received
        with pytest.raises(FrameError) as refused:
            self.decode(parts)
        assert self.back.received == before
        return refused.value.reason


def strategy(type_: Any) -> st.SearchStrategy[Any]:
    """Values of a field, from its msgspec type."""
    match type_:
        case mi.StructType(cls=cls) if cls is SamplingParams:
            return SAMPLING
        case mi.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: strategy(field.type) for field in fields})
        case mi.CustomType(cls=cls) if cls is Buffer:
            return BUFFERS
        case mi.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.BoolType():
            return st.booleans()
        case mi.StrType():
            return st.text()
        case mi.BytesType():
            return st.binary()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType(values=values):
            return st.sampled_from(values)
        case mi.UnionType(types=types):
            return st.one_of(*map(strategy, types))
        case mi.ListType(item_type=item):
            return st.lists(strategy(item), max_size=4)
        case mi.VarTupleType(item_type=item):
            return st.lists(strategy(item), max_size=4).map(tuple)
        case mi.TupleType(item_types=items):
            return st.tuples(*map(strategy, items))
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy(key), strategy(value), max_size=4)
    raise AssertionError(f"no strategy for {type_}: add one")


BUFFERS = st.one_of(
    st.binary(max_size=64).map(Buffer),
    st.integers(0, 255).map(lambda byte: Buffer(bytes([byte]) * OUT_OF_BAND_BYTES)),
    st.lists(st.integers(-(2**31), 2**31 - 1)).map(Buffer.int32),
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(Buffer.int64),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31),
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(0, 1000),
    top_p=st.none() | st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=10), max_size=3) | st.text(min_size=1, max_size=10),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3),
    ignore_eos=st.booleans(),
    end_id=st.none() | st.integers(0, 2**31),
    skip_special_tokens=st.booleans(),
)
ROUTES = [(channel, role, kind) for channel, sides in CHANNELS.items() for role, kinds in sides.items() for kind in kinds]


@pytest.mark.parametrize(("channel", "sender", "message_type"), ROUTES, ids=lambda value: getattr(value, "__name__", value))
def test_every_message_round_trips(channel: str, sender: str, message_type: type[Message]) -> None:
    """A1: on every channel that carries it, with any field values and buffers of any size."""
    wire = Wire(channel, sender)

    @settings(max_examples=20, deadline=None)
    @given(strategy(mi.type_info(message_type)))
    def round_trip(message: AnyMessage) -> None:
        incoming = wire.decode(wire.encode(message))
        assert incoming.message == message
        assert type(incoming.message) is type(message)
        assert not incoming.gap

    round_trip()


def test_every_message_has_a_channel() -> None:
    assert {kind for _, _, kind in ROUTES} == set(get_args(AnyMessage))
    tags = [kind.__struct_config__.tag for kind in get_args(AnyMessage)]
    assert len(tags) == len(set(tags))


def test_bytes_on_the_wire() -> None:
    """The layout, spelt out without the codec: whatever changes it needs a new protocol version."""
    wire = Wire("plan", "binder", "rank1")
    wire.out.sent = 6
    big = bytes(range(256)) * (OUT_OF_BAND_BYTES // 256)
    parts = wire.encode(Plan(3, (Buffer(b"ab"), Buffer(big))), Kind.SEND, 0)
    payload = b"\x93\xa4plan\x03\x92\xc4\x02ab\x00"
    header = b"HR\x01\x00" + struct.pack("<IQQQ", 1, 48 + len(payload) + len(big), 7, 0)
    key = hashlib.blake2b(b"\x93\xa4plan\xa6binder\xa5rank1", key=KEY, digest_size=32, person=b"headrace-keys").digest()
    sealed = header + struct.pack("<Q", len(big)) + payload + big
    mac = hashlib.blake2b(sealed, key=key, digest_size=16, person=b"headrace-frame").digest()
    assert parts == [header + mac + payload, big]


def test_kind_and_number_cross() -> None:
    wire = Wire("control", "connector", "p", served=True)
    assert wire.decode(wire.encode(Ping(), Kind.CALL, 77))[:3] == (Kind.CALL, 77, Ping())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_array_is_a_buffer_of_no_bytes(shape: tuple[int, ...]) -> None:
    assert Buffer(np.zeros(shape, np.int32)) == Buffer()


def test_large_buffers_are_not_copied() -> None:
    """A6: neither when a frame is made nor when it is read."""
    wire = Wire()
    array = np.arange(OUT_OF_BAND_BYTES, dtype=np.int32)
    parts = wire.sender.encode(wire.out, Plan(1, (Buffer(array),)))
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), array)
    received = [bytes(part) for part in parts]
    message = wire.decode(received).message
    assert isinstance(message, Plan)
    view = message.arrays[0].as_int32()
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(received[1], np.uint8))
    assert np.array_equal(np.asarray(view), array)


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (OUT_OF_BAND_BYTES - 1, 1), (OUT_OF_BAND_BYTES, 2)])
def test_which_buffers_get_a_part(size: int, parts: int) -> None:
    wire = Wire()
    frame = wire.encode(Plan(1, (Buffer(bytes(size)),)))
    assert len(frame) == parts
    assert wire.decode(frame).message == Plan(1, (Buffer(bytes(size)),))


def test_number_of_parts_is_bounded() -> None:
    wire = Wire()
    plan = Plan(1, tuple(Buffer(bytes([n]) * OUT_OF_BAND_BYTES) for n in range(MAX_EXTRA_PARTS + 3)))
    frame = wire.encode(plan)
    assert len(frame) == 1 + MAX_EXTRA_PARTS
    assert wire.decode(frame).message == plan


def test_encoder_keeps_no_reference() -> None:
    """A sent array is not held until the next message."""
    wire = Wire()
    wire.encode(Plan(1, (Buffer(bytes(OUT_OF_BAND_BYTES)),)))
    assert wire.sender._outgoing == []
    wire.decode(wire.encode(Plan(1, (Buffer(bytes(OUT_OF_BAND_BYTES)),))))
    assert wire.receiver._extra == ()


def test_empty_and_cut_and_flipped() -> None:
    """A3: every byte and every length; the exact reasons."""
    wire = Wire()
    frame = wire.encode(Plan(1, (Buffer(bytes(OUT_OF_BAND_BYTES)),)))
    head, part = frame
    assert wire.refusal([]) == "truncated"
    for length in range(len(head)):
        assert wire.refusal([head[:length], part]) == "truncated"
    for index in range(len(head)):
        for bit in range(8):
            changed = bytearray(head)
            changed[index] ^= 1 << bit
            reason = "version" if index == 2 else "truncated" if index < 2 or 4 <= index < 16 else "mac"
            assert wire.refusal([bytes(changed), part]) == reason
    assert wire.refusal([head]) == "truncated"
    assert wire.refusal([head, part, b""]) == "truncated"
    assert wire.refusal([head, part[:-1]]) == "truncated"
    assert wire.refusal([head, part[:-1] + b"\x01"]) == "mac"
    assert wire.decode(frame).message == Plan(1, (Buffer(part),))


@given(st.lists(st.binary(max_size=80) | st.binary(max_size=80).map(lambda tail: b"HR\x01" + tail), max_size=4))
@settings(deadline=None)
def test_garbage(parts: list[bytes]) -> None:
    """A3: whatever arrives is refused by FrameError and nothing else."""
    assert Wire().refusal(parts) in ("truncated", "version", "mac")


@given(st.permutations(range(1, 8)))
@settings(deadline=None)
def test_sequence(order: list[int]) -> None:
    """A3: frames that arrive in any order: each at most once, none after a later one; what is missing is noticed."""
    wire = Wire()
    frames = {number: wire.encode(Plan(number, ())) for number in range(1, 8)}
    last = 0
    for number in order:
        if number <= last:
            assert wire.refusal(frames[number]) == "replay"
            continue
        incoming = wire.decode(frames[number])
        assert incoming.message == Plan(number, ())
        assert incoming.gap == (number != last + 1)
        last = number
        assert wire.refusal(frames[number]) == "replay"


def test_order_of_checks() -> None:
    """A3: what is wrong in several ways is refused for the first: version, MAC, sequence number, kind, message."""
    wire = Wire()
    first, second = wire.encode(PlanEnd()), wire.encode(PlanEnd())
    wire.decode(second)
    assert wire.refusal([first[0][:2] + b"\x02" + first[0][3:]]) == "version"
    assert wire.refusal([first[0][:-1] + b"\x00"]) == "mac"
    assert wire.refusal(first) == "replay"
    wire.out.sent = 0
    assert wire.refusal(wire.encode(PlanEnd(), Kind.CALL)) == "replay"
    wire.out.sent = 2
    assert wire.refusal(wire.encode(PlanEnd(), Kind.CALL)) == "direction"


def test_kinds_by_pattern() -> None:
    """A3: a pair takes sends; a served binder takes sends, notifies and calls; its connectors replies."""
    for channel, sender, served, message, accepted in (
        ("plan", "binder", False, PlanEnd(), {Kind.SEND}),
        ("result", "connector", False, Deltas(1, Buffer(), Buffer(), Buffer(), b""), {Kind.SEND}),
        ("control", "connector", True, Ping(), {Kind.SEND, Kind.NOTIFY, Kind.CALL}),
        ("control", "binder", True, Pong(1, 0.0), {Kind.REPLY}),
    ):
        wire = Wire(channel, sender, "p", served)
        for kind in Kind:
            frame = wire.encode(message, kind)
            if kind in accepted:
                assert wire.decode(frame).kind == kind
            else:
                assert wire.refusal(frame) == "direction"


def test_keys_differ() -> None:
    """A3: by session, channel, direction and peer; a frame is good in one place only."""
    wire = Wire("plan", "binder", "1")
    frame = wire.encode(PlanEnd())
    for codec, peer in (
        (Codec(new_key(), "plan", "connector"), "1"),
        (Codec(KEY, "request", "connector"), "1"),
        (Codec(KEY, "plan", "binder"), "1"),
        (Codec(KEY, "plan", "connector"), "2"),
        (Codec(KEY, "plan", "connector"), ""),
    ):
        with pytest.raises(FrameError) as refused:
            codec.decode(codec.link(peer), frame)
        assert refused.value.reason == "mac"
    assert wire.decode(frame).message == PlanEnd()


def test_wrong_message_to_send() -> None:
    wire = Wire()
    for message in (Ping(), Hello(0, 1, 2, "h"), Cancel((1,))):
        with pytest.raises(FrameError, match=f"a binder of channel 'plan' does not send {type(message).__name__}") as refused:
            wire.encode(message)
        assert refused.value.reason == "direction"
    assert wire.out.sent == 0


def test_failed_encode_leaves_the_codec_usable() -> None:
    """A message that cannot be encoded, after a large buffer of it was met, leaves nothing behind for the next."""
    wire = Wire("request", "binder")
    bad: Any = Submit((), (object(),), Buffer(bytes(OUT_OF_BAND_BYTES)))  # type: ignore[arg-type]
    worse: Any = Submit((Buffer(bytes(OUT_OF_BAND_BYTES)), 2**70), (), Buffer())  # type: ignore[arg-type]
    for message in (bad, worse):
        with pytest.raises((TypeError, OverflowError)):
            wire.encode(message)
    frame = wire.encode(Cancel((1, 2)))
    assert len(frame) == 1
    assert wire.decode(frame).message == Cancel((1, 2))


def test_unknown_channel() -> None:
    with pytest.raises(ValueError, match=r"there is no channel 'reqest'; known are .*request"):
        Codec(KEY, "reqest", "binder")


@pytest.mark.parametrize("reason", ["mac", "version"])
def test_notice(reason: str) -> None:
    """A4: read whatever its version; nothing else is taken for one, nor it for a frame."""
    frame = notice(reason)
    assert read_notice([frame]) == reason
    assert read_notice([frame[:2] + b"\x09" + frame[3:]]) == reason
    for parts in (
        [],
        [frame, b""],
        [frame + b"x"],
        [frame[:-1]],
        [b"hr" + frame[2:]],
        [frame[:4] + b"\x02"],
        [frame[:3] + b"\x03" + frame[4:]],
    ):
        assert read_notice(parts) is None
    assert Wire().refusal([frame]) == "truncated"


def test_older_and_newer_fields() -> None:
    """A field that was appended by a later release is ignored; one that an earlier release lacks gets its default."""
    wire = Wire("result", "connector")
    optional = len(Deltas.__struct_fields__) - 5
    newer = msgspec.msgpack.encode(["deltas", 1, b"", b"", b"", b"", *[{}] * optional, "new"])
    older = msgspec.msgpack.encode(["deltas", 2, b"", b"", b"", b""])
    for payload, step in ((newer, 1), (older, 2)):
        assert wire.receiver._decode_payload(memoryview(payload)) == Deltas(step, Buffer(), Buffer(), Buffer(), b"")


def test_header_size() -> None:
    assert HEADER_BYTES == 48


def protocol_script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("protocol_script", str(ROOT / "scripts" / "protocol"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_document_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/protocol.md is what scripts/protocol would write."""
    assert protocol_script().main(["--check"]) == 0, capsys.readouterr().out


def test_stale_document_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = protocol_script()
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TARGET", tmp_path / "docs" / "protocol.md")
    assert script.main(["--check"]) == 1
    assert "+# The protocol between processes" in capsys.readouterr().out
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="usage"):
        script.main(["--frobnicate"])
