"""``Place``: where a rank is, when some ranks share every layer and others share the layers out.

Ranks are numbered stage after stage, so that those of one stage, which sum in every layer, are neighbours and on one host where that is
possible; between stages goes one array a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Rank ``rank`` of ``tensor_parallel_size`` x ``pipeline_parallel_size``.

    Raises ValueError for a rank that there is not.
    """

    rank: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.pipeline_parallel_size < 1:
            raise ValueError(f"{self.tensor_parallel_size} ranks in each of {self.pipeline_parallel_size} stages: both must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size} ranks")

    @classmethod
    def of(cls, rank: int, config: EngineConfig) -> Place:
        """Of a rank of the world of ``config``."""
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage(self) -> int:
        """Which of the stages it is in."""
        return self.rank // self.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Which of its stage's ranks it is; the first gathers what the stage gives."""
        return self.rank % self.tensor_parallel_size

    @property
    def group(self) -> range:
        """The ranks of its stage."""
        first = self.rank - self.tensor_rank
        return range(first, first + self.tensor_parallel_size)

    @property
    def previous(self) -> int | None:
        """The rank that gives it the residual stream; None in the first stage."""
        return self.rank - self.tensor_parallel_size if self.stage else None

    @property
    def next(self) -> int | None:
        """The rank that it gives the residual stream to; None in the last stage."""
        following = self.rank + self.tensor_parallel_size
        return following if following < self.world_size else None

    @property
    def gathering(self) -> int:
        """The rank that has the logits: the first of the last stage. Rank 0 samples, so it gets them from there."""
        return self.world_size - self.tensor_parallel_size
