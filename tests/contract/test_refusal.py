"""A3: frames that are tampered with, cut, repeated, of another version or plain garbage are refused, counted and survived, by every end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.ipc.channel import REFUSALS, End
from headrace.ipc.codec import MAX_EXTRA_PARTS, OUT_OF_BAND_BYTES, Codec, Kind, notice
from headrace.ipc.messages import Ack, AnyMessage, Buffer, GetStats, Ping, Plan, PlanEnd, ShutdownDone, Stats
from tests.contract.conftest import LONG, Ends
from tests.faults import Parts, alter, forge, inject

PLAN = Plan(1, (Buffer(bytes(range(200))),))


class Target:
    """One kind of end under fire: frames go to ``end``; ``valid(n)`` is the n-th frame that it must accept."""

    def __init__(self, ends: Ends, kind: str) -> None:
        self.kind = kind
        self.key = ends.key
        self.peer = ""
        self.sequence = 0
        if kind.startswith("pair"):
            binder, connector = ends.pair()
            self.end: Any = binder if kind == "pair-binder" else connector
            self.source: End = connector if kind == "pair-binder" else binder
            self.sequence = 1 if kind == "pair-binder" else 0  # the one that ``pair`` has exchanged
            return
        served = ends.bind_served("control")
        caller = ends.connect_served(served, "p")
        caller.send(Ping(), LONG)
        assert served.recv(LONG) is not None
        self.end, self.source = (served, caller) if kind == "served-binder" else (caller, served)
        self.sequence = 1 if kind == "served-binder" else 0
        self.peer = "p" if kind == "served-connector" else ""

    def inject(self, parts: Parts) -> None:
        inject(self.source, parts, self.peer)

    def frame(self, sequence: int) -> Parts:
        """The frame that this end accepts under this sequence number."""
        if self.kind.startswith("pair"):
            role = "connector" if self.kind == "pair-binder" else "binder"
            return forge(self.key, "duplex", role, PLAN, sequence=sequence)  # type: ignore[arg-type]
        if self.kind == "served-binder":
            return forge(self.key, "control", "connector", GetStats(), sequence=sequence, kind=Kind.CALL, number=sequence, peer="p")
        reply = Stats({"a": 1.0, "b": 2.0})
        return forge(self.key, "control", "binder", reply, sequence=sequence, kind=Kind.REPLY, number=sequence, peer="p")

    def accepts(self) -> None:
        """The next valid frame arrives, whatever came before."""
        before = self.end.stats.received
        self.sequence += 1
        self.inject(self.frame(self.sequence))
        if self.kind == "served-connector":
            # A connector takes replies only, and this one comes unasked: accepted, then dropped.
            while self.end.stats.received == before:
                assert self.end.poll(LONG), "the valid frame did not arrive"
                assert self.end.recv() is None
        else:
            received = self.end.recv(LONG)
            assert received in (PLAN, ("p", GetStats()))
        assert self.end.stats.received == before + 1


KINDS = ["pair-binder", "pair-connector", "served-binder", "served-connector"]


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, ends: Ends) -> Target:
    return Target(ends, request.param)


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every payload that a decoder gets to see."""
    seen: list[bytes] = []
    decode = Codec._decode_payload

    def spy(self: Codec, payload: memoryview) -> AnyMessage:
        seen.append(bytes(payload))
        return decode(self, payload)

    monkeypatch.setattr(Codec, "_decode_payload", spy)
    return seen


def test_every_byte_flipped(target: Target, payloads: list[bytes]) -> None:
    """A3: and no such payload is decoded."""
    frame = target.frame(target.sequence + 1)
    for index in range(len(frame[0])):
        head = bytearray(frame[0])
        head[index] ^= 0x40
        target.inject([bytes(head), *frame[1:]])
    target.accepts()
    assert sum(target.end.stats.refused.values()) == len(frame[0])
    # magic; version; extra parts and total length; kind, sequence, number, MAC and payload
    assert target.end.stats.refused == {"truncated": 2 + 4 + 8, "version": 1, "mac": len(frame[0]) - 15}
    assert len(payloads) == 1
    assert target.end.stats.gaps == 0


def test_cut_at_every_length(target: Target, payloads: list[bytes]) -> None:
    """A3."""
    (head,) = target.frame(target.sequence + 1)
    for length in range(len(head)):
        target.inject([head[:length]])
    target.accepts()
    assert target.end.stats.refused == {"truncated": len(head)}
    assert len(payloads) == 1


def test_wrong_parts(target: Target, payloads: list[bytes]) -> None:
    """A3: parts added, split, or far too many."""
    (head,) = target.frame(target.sequence + 1)
    wrong = [[head, b""], [head, b"x"], [b"", head], [head[:20], head[20:]], [head] * 2, [head, *[b"x"] * (3 * MAX_EXTRA_PARTS)]]
    for parts in wrong:
        target.inject(parts)
    target.accepts()
    assert target.end.stats.refused == {"truncated": len(wrong)}
    assert len(payloads) == 1


def test_replayed(target: Target, payloads: list[bytes]) -> None:
    """A3: the last frame again, all earlier ones, and one that was passed over."""
    target.accepts()
    first = target.sequence
    target.sequence += 2
    target.accepts()
    assert target.end.stats.gaps == 1
    payloads.clear()
    for sequence in range(1, target.sequence + 1):
        target.inject(target.frame(sequence))
    target.accepts()
    assert target.end.stats.refused == {"replay": first + 3}
    assert len(payloads) == 1


def test_other_versions(target: Target, payloads: list[bytes]) -> None:
    """A3: newer or older, with a header of any length."""
    (head,) = target.frame(target.sequence + 1)
    for version in (0, 2, 255):
        target.inject([head[:2] + bytes([version]) + head[3:]])
        target.inject([head[:2] + bytes([version])])
        target.inject([head[:2] + bytes([version]), b"a part"])
    target.accepts()
    assert target.end.stats.refused == {"version": 9}
    assert len(payloads) == 1


def test_reflected(target: Target) -> None:
    """A3: what an end sent itself has the key of the other direction."""
    if target.kind == "served-binder":
        frame = forge(target.key, "control", "binder", Ack(), sequence=9, kind=Kind.REPLY, peer="p")
    elif target.kind == "served-connector":
        frame = forge(target.key, "control", "connector", Ping(), sequence=9, kind=Kind.CALL, peer="p")
    else:
        frame = forge(target.key, "duplex", "binder" if target.kind == "pair-binder" else "connector", PlanEnd(), sequence=9)
    target.inject(frame)
    target.accepts()
    assert target.end.stats.refused == {"mac": 1}


def test_moved_part_border(ends: Ends) -> None:
    """A3: the MAC covers where each part ends, not only their bytes."""
    binder, connector = ends.pair()
    size = OUT_OF_BAND_BYTES
    head, first, second = forge(ends.key, "duplex", "connector", Plan(1, (Buffer(bytes(size)), Buffer(bytes(size)))), sequence=2)
    inject(connector, [head, first + second[:1], second[1:]])
    inject(connector, [head, second[:-1], second[-1:] + first])
    inject(connector, [head, first, second])
    assert binder.recv(LONG) == Plan(1, (Buffer(bytes(size)), Buffer(bytes(size))))
    assert binder.stats.refused == {"mac": 2}


def test_flipped_in_a_large_part(ends: Ends) -> None:
    """A3."""
    binder, connector = ends.pair()
    head, part = forge(ends.key, "duplex", "connector", Plan(1, (Buffer(bytes(OUT_OF_BAND_BYTES)),)), sequence=2)
    for index in (0, 1000, len(part) - 1):
        changed = bytearray(part)
        changed[index] ^= 1
        inject(connector, [head, bytes(changed)])
    inject(connector, [head])
    inject(connector, [head, part[:-1]])
    inject(connector, [head, part])
    assert isinstance(binder.recv(LONG), Plan)
    assert binder.stats.refused == {"mac": 3, "truncated": 2}


class Literal:
    """Stands in for the msgpack encoder of a codec: every message becomes this payload."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def encode_into(self, _: AnyMessage, head: bytearray, at: int) -> None:
        head[at:] = self.payload


def test_holder_of_the_key_sends_the_wrong_thing(ends: Ends) -> None:
    """A3: an authentic frame whose message does not belong here, or is none."""
    binder = ends.bind_pair(ends.address("plan"))
    connector = ends.connect_pair(binder.address)
    binder.send(PlanEnd(), LONG)
    assert connector.recv(LONG) == PlanEnd()

    def seal(payload: bytes) -> Parts:
        codec: Any = Codec(ends.key, "plan", "binder")
        codec._encoder = Literal(payload)
        link = codec.link()
        link.sent = 1
        return [bytes(part) for part in codec.encode(link, PlanEnd())]

    payloads = {
        "a message of another channel": b"\x91\xa4ping",
        "no array": b"\xc0",
        "an unknown tag": b"\x91\xa3new",
        "a field of another type": b"\x93\xa4plan\xa1x\x90",
        "cut": b"\x92\xa4pl",
        "trailing bytes": b"\x91\xa8plan_end\x00",
        "nothing": b"",
        "a part that is not there": b"\x93\xa4plan\x01\x91\x00",
        "no index of a part": b"\x93\xa4plan\x01\x91\xc3",
        "a number beyond 64 bits of float": b"\x93\xa4plan\xcb\x7f\xef\xff\xff\xff\xff\xff\xff\x90",
        "no UTF-8": b"\x92\xa4\xff\xff\xff\xff",
        "nested too deep": b"\x91" * 20_000,
    }
    for payload in payloads.values():
        inject(binder, seal(payload))
    inject(binder, forge(ends.key, "plan", "binder", PlanEnd(), sequence=2, kind=Kind.CALL))
    inject(binder, forge(ends.key, "plan", "binder", PlanEnd(), sequence=2))
    assert connector.recv(LONG) == PlanEnd()
    assert connector.stats.refused == {"direction": 2, "schema": len(payloads) - 1}
    assert connector.stats.gaps == 0


def test_nothing_is_sent_this_way(ends: Ends) -> None:
    """A3: on a channel with one direction the other accepts nothing, from holders of the key neither."""
    binder = ends.bind_pair(ends.address("result"))
    connector = ends.connect_pair(binder.address)
    connector.send(ShutdownDone(), LONG)
    assert binder.recv(LONG) == ShutdownDone()
    codec = Codec(ends.key, "result", "binder")
    codec._sendable = frozenset({Ping})
    inject(binder, [bytes(part) for part in codec.encode(codec.link(), Ping())])
    assert connector.poll(LONG)
    assert connector.recv() is None
    assert connector.stats.refused == {"direction": 1}


def test_gaps_are_counted(target: Target) -> None:
    """A frame that was lost is known from the numbers."""
    target.accepts()
    assert target.end.stats.gaps == 0
    target.sequence += 5
    target.accepts()
    target.accepts()
    assert target.end.stats.gaps == 1


def test_refused_frames_do_not_hold_a_caller(ends: Ends) -> None:
    """A3: a call that does not wait returns, however many frames are refused; the next goes on from there."""
    binder, connector = ends.pair()
    for _ in range(2000):
        while True:
            try:
                inject(connector, [b"garbage"])
                break
            except AssertionError:  # full: make room
                assert binder.recv() is None
    connector.send(Ping(), LONG)
    assert binder.recv(LONG) == Ping()
    assert binder.stats.refused == {"truncated": 2000}


def test_refused_in_a_loop(ends: Ends) -> None:
    """A3: arecv passes over what is refused as recv does."""
    binder, connector = ends.pair()

    async def run() -> None:
        reading = asyncio.create_task(binder.arecv(LONG))
        await asyncio.sleep(0)
        inject(connector, [b"garbage"])
        inject(connector, [b"HR\x01" + bytes(100)])
        await connector.asend(Ping(), LONG)
        assert await reading == Ping()

    asyncio.run(run())
    assert binder.stats.refused["truncated"] == 2


def test_altered_in_flight(ends: Ends) -> None:
    """A3: of the frames that a sender really sends, those that were changed, doubled or swapped are refused, the others arrive."""
    binder, connector = ends.pair()
    held: list[Parts] = []

    def change(parts: Parts) -> list[Parts]:
        number = connector.stats.sent
        if number % 5 == 0:
            return [[parts[0][:-1] + bytes([parts[0][-1] ^ 1])]]
        if number % 5 == 1:
            return [parts, parts]
        if number % 5 == 2:
            held.append(parts)
            return []
        return [parts, held.pop()] if held else [parts]

    alter(connector, change)
    for step in range(50):
        connector.send(Plan(step, ()), LONG)
    received = []
    while (message := binder.recv(0.2)) is not None:
        assert isinstance(message, Plan)
        received.append(message.step)
    assert received == sorted(set(received)) and len(received) == 30
    assert binder.stats.refused == {"mac": 10, "replay": 20}


def test_notices_are_understood_by_connectors_only(target: Target) -> None:
    """A4: five bytes without a MAC change a counter, and nothing else."""
    target.inject([notice("mac")])
    target.inject([notice("version")])
    newer = bytearray(notice("mac"))
    newer[2] = 9
    target.inject([bytes(newer)])
    target.inject([notice("mac") + b"x"])
    target.inject([notice("mac")[:4] + b"\x09"])
    target.accepts()
    understands = target.kind == "served-connector"
    assert target.end.stats.refused_by_peer == (3 if understands else 0)
    assert sum(target.end.stats.refused.values()) == (2 if understands else 5)


PARTS = st.lists(
    st.one_of(
        st.binary(max_size=100),
        st.builds(lambda tail: b"HR\x01" + tail, st.binary(max_size=100)),
        st.builds(lambda tail: b"HR" + tail, st.binary(max_size=100)),
        st.just(notice("mac")),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", ["memory", "ipc"])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage(name: str, kind: str, make_ends: Callable[[str], Ends]) -> None:
    """A3: any multipart frame at all into any kind of end."""
    target = Target(make_ends(name), kind)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(PARTS, max_size=5))
    def throw(frames: list[Parts]) -> None:
        before = sum(target.end.stats.refused.values()) + target.end.stats.refused_by_peer
        for parts in frames:
            target.inject(parts)
        target.accepts()
        assert sum(target.end.stats.refused.values()) + target.end.stats.refused_by_peer == before + len(frames)

    throw()
    assert set(target.end.stats.refused) <= set(REFUSALS)
    assert target.end.stats.gaps == 0
