"""How a run over rows of the KV cache becomes executions of a TensorRT plan, whose profiles bound what one of them can do. Pure.

Prefill is cut into pieces that the profile holds. A decode step is an execution of just its rows; one that comes again has a *window*, rows
that it is padded to, so that few CUDA graphs, each over fixed addresses, serve all decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.build.tensorrt_profiles import EngineLimits
from headrace.engine.slots import Run

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """One execution over rows ``first`` to ``first + B - 1``, with S tokens of each.

    Attributes:
        first: the first row.
        index: int64 [B, S], which of the plan's tokens each is; any of them where it is padding.
        inside: bool [B, S], which are none.
        positions: int64 [B, S].
        writes: int64 [B], where the first token of each row goes.
        samples: int64 [at least 1], which of the B * S tokens' logits are wanted.
        rows: int64, which rows of the plan's logits the first of them are; what is behind these is dropped.
    """

    first: int
    index: Int64
    inside: npt.NDArray[np.bool_]
    positions: Int64
    writes: Int64
    samples: Int64
    rows: Int64


class Window(NamedTuple):
    """Rows ``first`` to ``first + size - 1``."""

    first: int
    size: int


def prefill_pieces(run: Run, limits: EngineLimits) -> Iterator[Piece]:
    """A run with several tokens of a sequence, in pieces of at most ``prefill_batch`` rows, ``chunk`` tokens, ``prefill_samples`` samples.

    A piece of which more samples are wanted comes several times: it writes the same keys and values again.
    """
    batch, width = run.index.shape
    real = np.arange(width) < run.lengths[:, None]
    sample_rows, sample_places = np.divmod(run.samples, width)
    for top in range(0, batch, limits.prefill_batch):
        rows = slice(top, top + limits.prefill_batch)
        for left in range(0, width, limits.chunk):
            columns = slice(left, left + limits.chunk)
            index = run.index[rows, columns]
            mine = (sample_rows >= top) & (sample_rows < rows.stop) & (sample_places >= left) & (sample_places < columns.stop)
            samples = (sample_rows[mine] - top) * index.shape[1] + sample_places[mine] - left
            for begin in range(0, max(1, len(samples)), limits.prefill_samples):
                some = slice(begin, begin + limits.prefill_samples)
                yield Piece(
                    run.first + top,
                    index,
                    real[rows, columns],
                    run.positions[rows, columns],
                    run.starts[rows] + left,
                    # A graph gives one row of logits at least.
                    samples[some] if len(samples) else np.zeros(1, np.int64),
                    run.rows[mine][some],
                )


def decode_piece(run: Run, window: Window | None = None, pads: Sequence[int] = ()) -> Piece:
    """A run with one token of each sequence, over just its rows or those of a window, which hold them. All rows are sampled.

    ``pads``: of every row of the window where a token that does not belong to it can be written.
    """
    batch = len(run.index)
    if window is None:
        window = Window(run.first, batch)
    place = run.first - window.first
    index, positions = np.zeros((window.size, 1), np.int64), np.zeros((window.size, 1), np.int64)
    inside, writes = np.zeros((window.size, 1), np.bool_), np.zeros(window.size, np.int64)
    writes[: len(pads)] = pads
    mine = slice(place, place + batch)
    index[mine], inside[mine], positions[mine], writes[mine] = run.index, True, run.positions, run.starts
    rows = np.full(window.size, -1)
    rows[run.samples + place] = run.rows
    # Wanted samples first.
    wanted = np.flatnonzero(rows >= 0)
    samples = np.concatenate([wanted, np.flatnonzero(rows < 0)])
    return Piece(window.first, index, inside, positions, writes, samples, rows[wanted])


def window_of(first: int, count: int, num_rows: int, buckets: Sequence[int]) -> Window | None:
    """The smallest window that holds these rows, of a bucket's size, at a multiple of half of it; None if only one of all rows would.

    The multiples keep windows few: about two for every row that a bucket is smaller than the cache.
    """
    for size in buckets:
        step = max(1, size // 2)
        start = min(first // step * step, num_rows - size)
        if size >= count and start >= 0 and start <= first and first + count <= start + size:
            return Window(start, size)
    return None


class RowEnds:
    """How far each row has been written, so that padding and clearing find what is in nobody's way.

    Attributes:
        ends: by row, tokens up to which something of a sequence may be.
        written: by row, tokens up to which anything was written since it was cleared, padding included.
    """

    def __init__(self, num_rows: int, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.ends = [0] * num_rows
        self.written = [0] * num_rows

    def copy(self, target: int, count: int) -> None:
        """``count`` tokens were copied into a row."""
        self._reach(target, count)

    def run(self, run: Run) -> None:
        """A run has written its tokens."""
        width = run.index.shape[1]
        for row, start in enumerate(run.starts.tolist(), run.first):
            self._reach(row, start + width)

    def clear(self, row: int, start: int) -> int:
        """Everything from token ``start`` on is cleared: returns up to where that is."""
        stop = self.written[row]
        self.ends[row], self.written[row] = min(self.ends[row], start), min(stop, start)
        return stop

    def swap(self, first: int, second: int) -> int:
        """Two rows change places: returns how many tokens have to."""
        for tokens in (self.ends, self.written):
            tokens[first], tokens[second] = tokens[second], tokens[first]
        return max(self.written[first], self.written[second])

    def pad(self, window: Window, run: Run) -> list[int] | None:
        """Where padding can be written in each row of a window: behind the end of what is there. None if a row has no such place.

        The rows of ``run`` are not padded.
        """
        rows = range(window.first, window.first + window.size)
        padded = [row for row in rows if not run.first <= row < run.first + len(run.index)]
        if any(self.ends[row] >= self._max_seq_len for row in padded):
            return None
        for row in padded:
            self.written[row] = max(self.written[row], self.ends[row] + 1)
        return [min(self.ends[row], self._max_seq_len - 1) for row in rows]

    def _reach(self, row: int, end: int) -> None:
        self.ends[row] = max(self.ends[row], end)
        self.written[row] = max(self.written[row], end)
