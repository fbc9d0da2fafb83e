"""``StepPlan``: what every rank computes in one step, as int32 arrays whose sizes say everything that is needed to read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.engine.base import Int32
from headrace.engine.cache import Cache
from headrace.engine.sequence import Chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    """T tokens of S sequences; the fields are the plan's arrays in this order.

    Where sequences are in slots (``SlotCache``), a block is a slot here: a table is one slot, and copies are between slots.

    A runner first makes the copies, one after the other. Then, in every layer, it writes the keys and values of all T tokens before it
    reads any: a sequence may attend to blocks that another one fills in the same step.

    Attributes:
        tokens: [T] token ids, sequence after sequence.
        starts: [S] position of the first of each sequence's tokens, which is how many it has in the KV cache already.
        lengths: [S] tokens of each sequence in this step, at least 1; they sum to T.
        tables: block tables joined; sequence s has ceil((starts[s] + lengths[s]) / tokens_per_block) entries, or one, its slot.
        samples: [R] indices into ``tokens`` whose logits are wanted, ascending: of each chunk ``wanted``, and the last if it samples.
        copies: [3 C] for each copy the block that is read, the block that is written, which may be the same, and how many of its first
            tokens are copied; the rest of the written block is cleared.
        adapters: [S] slot of each sequence's LoRA adapter, -1 for none; empty if no sequence has one.
        loads: LoRA adapters to put into slots first; see ``encode_loads``.
        candidates: [R] of each row of ``samples`` how many of its greatest logits are wanted, 0: all its logits; empty: all of all rows.
    """

    tokens: Int32
    starts: Int32
    lengths: Int32
    tables: Int32
    samples: Int32
    copies: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    adapters: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    loads: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    candidates: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of(cls, chunks: Sequence[Chunk], cache: Cache) -> StepPlan:
        """The plan of these chunks, whose blocks the cache has already handed out, and of the copies that are due."""
        tokens, tables = bytearray(), bytearray()
        starts: list[int] = []
        lengths: list[int] = []
        rows: list[int] = []
        candidates: list[int] = []
        end, some = 0, False
        for chunk in chunks:
            sequence, start, length = chunk
            stop = start + length
            tokens += memoryview(sequence.tokens[start:stop]).cast("B")
            tables += memoryview(cache.table(sequence.request_id)[: cache.blocks_for(stop)]).cast("B")
            starts.append(start)
            lengths.append(length)
            end += length
            if sequence.wanted:
                wanted, shift = chunk.wanted, end - stop
                rows.extend(range(wanted.start + shift, wanted.stop + shift))
                candidates.extend([0] * len(wanted))
                if not chunk.own_row:
                    continue
            elif stop < len(sequence.tokens):
                continue
            rows.append(end - 1)
            candidates.append(sequence.candidates)
            some = some or sequence.candidates > 0
        return cls(
            tokens=np.frombuffer(tokens, dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            lengths=np.array(lengths, dtype=np.int32),
            tables=np.frombuffer(tables, dtype=np.int32),
            samples=np.array(rows, dtype=np.int32),
            copies=np.frombuffer(cache.take_copies(), dtype=np.int32),
            candidates=np.array(candidates if some else (), dtype=np.int32),
        )

    @classmethod
    def from_arrays(cls, arrays: Sequence[Int32]) -> StepPlan:
        """What ``arrays`` gave, on another rank."""
        return cls(*arrays)

    def arrays(self) -> tuple[Int32, ...]:
        """The arrays to broadcast."""
        return self.tokens, self.starts, self.lengths, self.tables, self.samples, self.copies, self.adapters, self.loads, self.candidates

    def with_adapters(self, slots: Sequence[int], loads: Sequence[tuple[int, str]]) -> StepPlan:
        """The same with LoRA adapters: the slot of each sequence, and (slot, path) of what is to be loaded."""
        return replace(self, adapters=np.array(slots, dtype=np.int32), loads=encode_loads(loads))


def encode_loads(loads: Sequence[tuple[int, str]]) -> Int32:
    """(slot, path) of each as int32: slot, bytes of the path, and these bytes, which zeros fill up to a whole number."""
    data = bytearray()
    for slot, path in loads:
        name = os.fsencode(path)
        data += np.array([slot, len(name)], dtype=np.int32).tobytes() + name + bytes(-len(name) % 4)
    return np.frombuffer(data, dtype=np.int32)


def decode_loads(loads: Int32) -> Iterator[tuple[int, str]]:
    """What ``encode_loads`` was given."""
    place = 0
    while place < len(loads):
        slot, size = loads[place : place + 2].tolist()
        place += 2
        end = place - (-size // 4)
        yield slot, os.fsdecode(loads[place:end].tobytes()[:size])
        place = end
