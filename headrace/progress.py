"""A bar on stderr for the weights that all ranks load."""

from __future__ import annotations

from typing import Any


class LoadBar:
    """A progress listener. It counts the bytes of all ranks together; a world without weights shows none."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._ranks: dict[int, tuple[int, int]] = {}

    def __call__(self, rank: int, stage: str, done: int, total: int) -> None:
        """Note where a rank is."""
        if stage != "load" or not total:
            return
        self._ranks[rank] = (done, total)
        if self._bar is None:
            from tqdm import tqdm

            # The monitor thread is for bars that get stuck; it would outlive this one.
            tqdm.monitor_interval = 0
            self._bar = tqdm(desc="loading weights", unit="B", unit_scale=True, leave=False)
        self._bar.total = sum(total for _, total in self._ranks.values())
        self._bar.update(sum(done for done, _ in self._ranks.values()) - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
