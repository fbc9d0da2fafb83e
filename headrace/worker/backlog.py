"""Outputs that the result channel did not take."""

from __future__ import annotations

from array import array

from headrace.engine.base import StepOutputs
from headrace.outputs import FinishReason

#: Most token ids and records in one frame: what a try costs at most that finds the channel full, however much is held.
FRAME_SIZE = 4096


class Backlog:
    """One slot for each request. Its outputs merge there in their order, without loss, until they are sent.

    The bound: what is held are tokens (4 bytes each) and endings of requests that are live in the proxy's ledger, for it has not read their
    endings. So it is at most ``max_tokens`` for each of them, and admission limits how many they are; tokens stop coming with the endings.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """Requests that have something to report."""
        return len(self._slots)

    def merge(self, outputs: StepOutputs) -> None:
        """Add what one step brought. Costs no more than that, however much is held."""
        start = 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            slot = self._slots.get(request_id)
            if slot is None:
                slot = self._slots[request_id] = _Slot()
            slot.token_ids.extend(outputs.token_ids[start : start + count])
            if finish:
                slot.finish = FinishReason(finish)
                slot.stop_reason = outputs.stop_reasons.get(request_id)
                slot.error = outputs.errors.get(request_id)
            start += count

    def frame(self) -> StepOutputs:
        """What is to be sent next, at most ``FRAME_SIZE`` tokens and records; all of it stays here until ``sent``."""
        outputs = StepOutputs()
        room = FRAME_SIZE
        for request_id, slot in self._slots.items():
            room -= 1
            if room <= 0:
                break
            if len(slot.token_ids) > room:
                # Of this one only a part; its ending comes with the rest.
                outputs.add(request_id, slot.token_ids[:room])
                break
            outputs.add(request_id, slot.token_ids, slot.finish, stop_reason=slot.stop_reason, error=slot.error)
            room -= len(slot.token_ids)
        return outputs

    def sent(self, frame: StepOutputs) -> None:
        """Drop what ``frame`` gave out; nothing was merged in between."""
        for request_id, count in zip(frame.request_ids, frame.counts, strict=True):
            slot = self._slots[request_id]
            if count == len(slot.token_ids):
                del self._slots[request_id]
            else:
                del slot.token_ids[:count]


class _Slot:
    """What one request has to report."""

    __slots__ = ("error", "finish", "stop_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.finish: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
