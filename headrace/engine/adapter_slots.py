"""Which LoRA adapters the runners hold: rank 0 decides, and the plan tells every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.checkpoint.config import ModelConfig
from headrace.engine.base import EngineRequest
from headrace.engine.models.adapters import AdapterFile, fingerprint
from headrace.errors import RequestError

#: adapters whose files have been checked are not checked again until so many others were
MAX_CHECKED = 1024

#: (slot, path)
Load = tuple[int, str]


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
        # Name -> path of those whose files fit the model, the latest used last.
        self._checked: OrderedDict[str, str] = OrderedDict()
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
            raise RequestError("this world runs no LoRA adapters: it was made with max_loras=0")
        name = fingerprint(request.lora)
        if name not in self._checked:
            with AdapterFile(request.lora, self._model, self._max_rank):
                pass
            self._checked[name] = request.lora
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        self._checked.move_to_end(name)
        return name

    def place(self, wanted: Sequence[tuple[str, str] | None], pinned: Iterable[str]) -> tuple[list[int], list[Load]]:
        """Slots of the adapters of a step's sequences, -1 for none, and what is to be loaded into slots before.

        Args:
            wanted: name and path of each.
            pinned: names of the adapters of all requests that run, of which there are no more than slots.
        """
        keep = set(pinned)
        slots, loads = [], []
        for adapter in wanted:
            if adapter is None:
                slots.append(-1)
                continue
            name, path = adapter
            if name not in self._slots:
                loads.append((self._free(keep), path))
                self._slots[name] = loads[-1][0]
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
