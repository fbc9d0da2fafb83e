"""Which LoRA adapters the runners hold: rank 0 decides, and the plan tells every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from headrace.checkpoint.config import ModelConfig
from headrace.engine.base import EngineRequest
from headrace.engine.models.adapters import AdapterFile, fingerprint, path_of
from headrace.engine.sequence import Chunk
from headrace.errors import RequestError

#: adapters whose files have been checked are not checked again until so many others were
MAX_CHECKED = 1024


class AdapterSlots:
    """A number of slots in each runner, filled by least recent use; adapters of requests that run stay.

    An adapter is named by its fingerprint, so that one that is written anew is another one.

    Attributes:
        num_loads: adapters put into slots so far.
    """

    def __init__(self, model: ModelConfig, num_slots: int, max_rank: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._max_rank = max_rank
        # Names of those whose files fit the model, the latest used last.
        self._checked: OrderedDict[str, None] = OrderedDict()
        # Name -> slot, the latest used last.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self.num_loads = 0

    def __len__(self) -> int:
        """Adapters that are loaded."""
        return len(self._slots)

    def check(self, request: EngineRequest) -> str | None:
        """The name of the request's adapter, whose files are all that they must be; None: it has none. Raises RequestError."""
        if request.lora is None:
            return None
        if not self._num_slots:
            raise RequestError("this world runs no LoRA adapters: it was made with max_loras=0, or its runner has none")
        name = fingerprint(request.lora)
        if name not in self._checked:
            with AdapterFile(request.lora, self._model, self._max_rank):
                self._checked[name] = None
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        self._checked.move_to_end(name)
        return name

    def place(self, names: Sequence[str | None], pinned: Iterable[str]) -> tuple[list[int], list[tuple[int, str]]]:
        """Slots of the adapters of a step's sequences, -1 for none, and (slot, path) of what is to be loaded before.

        ``pinned``: names of the adapters of all requests that run, of which there are no more than slots.
        """
        keep = set(pinned)
        slots, loads = [], []
        for name in names:
            if name is None:
                slots.append(-1)
                continue
            if name not in self._slots:
                slot = self._free(keep)
                self._slots[name] = slot
                loads.append((slot, path_of(name)))
                self.num_loads += 1
            self._slots.move_to_end(name)
            slots.append(self._slots[name])
        return slots, loads

    def forget(self, slot: int) -> str:
        """What was to be loaded into this slot was not; its name."""
        (name,) = [name for name, taken in self._slots.items() if taken == slot]
        del self._slots[name]
        self._checked.pop(name, None)
        return name

    def _free(self, keep: set[str]) -> int:
        if len(self._slots) < self._num_slots:
            return min(set(range(self._num_slots)) - set(self._slots.values()))
        for name in self._slots:
            if name not in keep:
                return self._slots.pop(name)
        raise RuntimeError(f"requests run with more than {self._num_slots} LoRA adapters")


def without(chunks: Sequence[Chunk], names: Container[str | None]) -> tuple[list[Chunk], list[int]]:
    """The chunks whose adapters are not among these, and which rows of all chunks' logits are theirs."""
    kept: list[Chunk] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        count = len(chunk.wanted) + chunk.own_row
        if chunk.sequence.adapter not in names:
            kept.append(chunk)
            rows += range(row, row + count)
        row += count
    return kept, rows
