"""Outputs that the result channel did not take."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.engine.base import Beam, Float32, LogprobRows, StepOutputs
from headrace.outputs import FinishReason

#: Most token ids and records in one frame: what a try costs at most that finds the channel full, however much is held.
FRAME_SIZE = 4096

#: Most bytes of logprobs and logits in one frame; what belongs to one token may be more by itself.
FRAME_BYTES = 16 << 20

#: Bytes of logprobs and logits from which on the backlog is full.
FULL_BYTES = 256 << 20

Rows = LogprobRows | Float32

#: fields of StepOutputs with one row for each token that comes with them, and those with rows of the prompt
PER_TOKEN = ("logprobs", "generation_logits")
PER_PROMPT = ("prompt_logprobs", "context_logits")


class Backlog:
    """One slot for each request. Its outputs merge there in their order, without loss, until they are sent.

    The bound: what is held are tokens (4 bytes each) and endings of requests that are live in the proxy's ledger, for it has not read their
    endings. So it is at most ``max_tokens`` for each of them, and admission limits how many they are; tokens stop coming with the endings.
    Of logprobs and logits, which for one token may be a megabyte, it is ``FULL_BYTES`` and what one step brings: then the engine rests
    until the proxy, for which alone it works, reads again.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._bytes = 0
        # Held by all slots together; read by the control thread.
        self.tokens = 0

    def __len__(self) -> int:
        """Requests that have something to report."""
        return len(self._slots)

    @property
    def full(self) -> bool:
        """Whether nothing more should come before some has been sent."""
        return self._bytes >= FULL_BYTES

    def merge(self, outputs: StepOutputs) -> None:
        """Add what one step brought. Costs no more than that, however much is held."""
        start = 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            slot = self._slots.get(request_id)
            if slot is None:
                slot = self._slots[request_id] = _Slot()
            slot.token_ids.extend(outputs.token_ids[start : start + count])
            self.tokens += count
            if finish:
                slot.finish = FinishReason(finish)
                slot.stop_reason = outputs.stop_reasons.get(request_id)
                slot.error = outputs.errors.get(request_id)
                slot.beams = outputs.beams.get(request_id)
            start += count
        for kind in (*PER_TOKEN, *PER_PROMPT):
            for request_id, rows in getattr(outputs, kind).items():
                self._bytes += self._slots[request_id].keep(kind, rows)

    def frame(self) -> StepOutputs:
        """What is to be sent next, within ``FRAME_SIZE`` and ``FRAME_BYTES``; all of it stays here until ``sent``."""
        outputs = StepOutputs()
        room, room_bytes = FRAME_SIZE, FRAME_BYTES
        for request_id, slot in self._slots.items():
            room -= 1
            if room <= 0 or room_bytes <= 0:
                break
            count, used, whole = slot.give(request_id, room, room_bytes, first=not outputs.request_ids, outputs=outputs)
            room -= count
            room_bytes -= used
            if not whole:
                # Of this one only a part; its ending comes with the rest.
                break
        return outputs

    def sent(self, frame: StepOutputs) -> None:
        """Drop what ``frame`` gave out; nothing was merged in between."""
        for request_id, count in zip(frame.request_ids, frame.counts, strict=True):
            slot = self._slots[request_id]
            del slot.token_ids[:count]
            self.tokens -= count
            for kind in (*PER_TOKEN, *PER_PROMPT):
                if (rows := getattr(frame, kind).get(request_id)) is not None:
                    self._bytes -= slot.rows[kind].drop(len(rows))
                    if not len(slot.rows[kind]):
                        del slot.rows[kind]
            if not slot.token_ids and not slot.rows:
                del self._slots[request_id]


class _Slot:
    """What one request has to report."""

    __slots__ = ("beams", "error", "finish", "rows", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.rows: dict[str, _Rows] = {}
        self.finish: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.beams: Sequence[Beam] | None = None

    def keep(self, kind: str, rows: Rows) -> int:
        """Add rows of one kind; how many bytes they have."""
        return self.rows.setdefault(kind, _Rows()).add(rows)

    def give(self, request_id: int, room: int, room_bytes: int, *, first: bool, outputs: StepOutputs) -> tuple[int, int, bool]:
        """Put as much as there is room for into ``outputs``, of the ``first`` in a frame at least something.

        Returns the number of tokens and of bytes, and whether that was all.
        """
        used = 0
        held = len(self.token_ids)
        parts: dict[str, Rows] = {}
        for kind in PER_PROMPT:
            if (rows := self.rows.get(kind)) is not None:
                number = min(len(rows), max((room_bytes - used) // rows.row_bytes, 1 if first and not used else 0))
                if number:
                    parts[kind] = rows.first(number)
                    used += number * rows.row_bytes
        # Tokens follow when the prompt is through, for nobody could tell what belongs to it after the ending.
        through = all(len(parts.get(kind, ())) == len(self.rows.get(kind, ())) for kind in PER_PROMPT)
        per_token = sum(rows.row_bytes for kind in PER_TOKEN if (rows := self.rows.get(kind)) is not None)
        count = min(held, room) if through else 0
        if per_token and count:
            count = min(count, max((room_bytes - used) // per_token, 1 if first and not used else 0))
        for kind in PER_TOKEN:
            if count and (rows := self.rows.get(kind)) is not None:
                parts[kind] = rows.first(count)
        used += count * per_token
        whole = through and count == held
        if whole:
            outputs.add(request_id, self.token_ids, self.finish, stop_reason=self.stop_reason, error=self.error)
            if self.beams is not None:
                outputs.beams[request_id] = self.beams
        elif count or parts:
            outputs.add(request_id, self.token_ids[:count])
        for kind, part in parts.items():
            getattr(outputs, kind)[request_id] = part
        return count, used, whole


class _Rows:
    """Rows of one kind, as they came: pieces that follow each other, of equal width."""

    __slots__ = ("_length", "_pieces", "row_bytes")

    def __init__(self) -> None:
        self._pieces: list[Rows] = []
        self._length = 0
        self.row_bytes = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: Rows) -> int:
        if isinstance(rows, np.ndarray) and rows.base is not None:
            rows = rows.copy()  # a view keeps the logits of the whole step
        if len(rows):
            self._pieces.append(rows)
            self._length += len(rows)
            self.row_bytes = rows.nbytes // len(rows)
        return rows.nbytes

    def first(self, count: int) -> Rows:
        """The first ``count`` rows, which stay."""
        pieces: list[Rows] = []
        for piece in self._pieces:
            if count <= 0:
                break
            pieces.append(piece[:count])
            count -= len(piece)
        return join(pieces)

    def drop(self, count: int) -> int:
        """Without the first ``count`` rows; how many bytes they had."""
        dropped = count * self.row_bytes
        self._length -= count
        whole = 0
        while whole < len(self._pieces) and len(self._pieces[whole]) <= count:
            count -= len(self._pieces[whole])
            whole += 1
        del self._pieces[:whole]
        if count:
            self._pieces[0] = self._pieces[0][count:]
        return dropped


def join(pieces: Sequence[Rows]) -> Rows:
    """One after the other; at least one."""
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], LogprobRows):
        return LogprobRows.join([piece for piece in pieces if isinstance(piece, LogprobRows)])
    return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])
