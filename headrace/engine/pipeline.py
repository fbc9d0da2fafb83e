"""``Pipeline``: one rank's ties to the ranks of its own stage, of the stages beside it, and to rank 0, which samples."""

from __future__ import annotations

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32
from headrace.engine.place import Place


class Pipeline:
    """A step goes through the stages one after the other. Every rank of a stage has the whole residual stream, and gives it to the rank in
    the same place of the next stage; the first of the last stage has the logits, and gives them to rank 0.

    Attributes:
        place: where this rank is.
        world: all ranks.
        group: those of its stage, which share every layer.
    """

    def __init__(self, config: EngineConfig, world: Collectives) -> None:
        """Every rank makes one at the same time."""
        self.place = place = Place.of(world.rank, config)
        self.world = world
        self.group: Collectives = world if place.pipeline_parallel_size == 1 else world.split(place.group)

    def receive(self, rows: int, width: int) -> Float32:
        """[rows, width]: the residual stream behind the stage before this one."""
        assert self.place.previous is not None
        x: Float32 = np.empty((rows, width), np.float32)
        self.world.receive(x, self.place.previous)
        return x

    def send(self, x: Float32) -> None:
        """Give the residual stream to the next stage."""
        assert self.place.next is not None
        self.world.send(x, self.place.next)

    def bring_logits(self, logits: Float32 | None, rows: int, vocab_size: int) -> Float32 | None:
        """[rows, vocab_size] on rank 0, None on the others. ``logits``: what the last stage has gathered on its first rank, None elsewhere.

        Where no rows are wanted nothing crosses, and rank 0 may begin the next step while later stages still run this one.
        """
        place = self.place
        if place.pipeline_parallel_size > 1 and rows:
            if place.rank == place.gathering:
                assert logits is not None and logits.shape == (rows, vocab_size)
                self.world.send(np.ascontiguousarray(logits), 0)
                return None
            if place.rank == 0:
                logits = np.empty((rows, vocab_size), np.float32)
                self.world.receive(logits, place.gathering)
        if place.rank != 0:
            return None
        return np.empty((0, vocab_size), np.float32) if logits is None else logits
