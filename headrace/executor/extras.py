"""What comes beside the tokens of a request that asked for it: logprobs and logits, of its tokens and of its prompt; or in place of them:
the results of a beam search. Pure.

Rows stay the bytes that they came as, joined, until a reader takes them: what nobody reads costs a copy, and not an object for each number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.ipc.messages import Beam, Buffer, Deltas, LogprobRows
from headrace.outputs import FinishReason, Logprob, TokenLogprobs

#: bytes of an int32 and of a float32
NUMBER = 4

_NOTHING = memoryview(b"")


class Wanted(NamedTuple):
    """What one choice asked for. ``width`` and ``prompt_width``: numbers in a row of logprobs, 0: none are wanted. ``logits`` and
    ``context_logits``: size of the vocabulary, 0 alike. ``prompt_length``: tokens of the prompt. ``beams``: most
    results of a beam search, 0: it is none.
    """

    width: int = 0
    logits: int = 0
    prompt_width: int = 0
    context_logits: int = 0
    prompt_length: int = 1
    beams: int = 0


class BeamResult(NamedTuple):
    """One result of a beam search."""

    token_ids: list[int]
    finish: FinishReason
    stop_reason: int | None
    cumulative_logprob: float


class Columns:
    """A table that grows at its end and is taken from its front; a row has ``sizes[i]`` bytes in column i."""

    __slots__ = ("data", "sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.data = [bytearray() for _ in sizes]

    def __len__(self) -> int:
        """Rows."""
        return len(self.data[0]) // self.sizes[0]

    def count(self, parts: Sequence[memoryview]) -> int:
        """Rows in ``parts``, one part for each column. Raises ValueError when they do not fit together."""
        rows, rest = divmod(len(parts[0]), self.sizes[0])
        if rest or any(len(part) != rows * size for part, size in zip(parts, self.sizes, strict=True)):
            raise ValueError(f"columns of {[len(part) for part in parts]} bytes do not fit together: a row has {list(self.sizes)}")
        return rows

    def extend(self, parts: Sequence[memoryview | bytearray]) -> None:
        """Add rows, which fit together."""
        for column, part in zip(self.data, parts, strict=True):
            column += part

    def take(self, count: int) -> Columns:
        """The first ``count`` rows, which are here no longer."""
        taken = Columns(self.sizes)
        if count == len(self):
            taken.data, self.data = self.data, taken.data
            return taken
        for mine, theirs, size in zip(self.data, taken.data, self.sizes, strict=True):
            theirs += mine[: count * size]
            del mine[: count * size]
        return taken


class PromptRows:
    """Rows about the prompt, that come in pieces, and once more from the beginning in the next world if this one dies."""

    __slots__ = ("_skip", "arrived", "columns", "total")

    def __init__(self, sizes: tuple[int, ...], total: int) -> None:
        self.columns = Columns(sizes)
        self.total = total
        # Rows so far, also those that were taken from `columns`.
        self.arrived = 0
        # So many of those that come next are here already.
        self._skip = 0

    @property
    def complete(self) -> bool:
        """Whether all of them are here."""
        return self.arrived == self.total

    def arrive(self, parts: Sequence[memoryview]) -> None:
        """Take a piece. Raises ValueError when it makes no sense."""
        count = self.columns.count(parts)
        first = min(self._skip, count)
        self._skip -= first
        # In a world that goes on with a request its own output lies behind the prompt; that is not asked about.
        last = min(count, first + self.total - self.arrived)
        self.columns.extend([part[first * size : last * size] for part, size in zip(parts, self.columns.sizes, strict=True)])
        self.arrived += last - first

    def rewind(self) -> None:
        """Another world begins again."""
        self._skip = self.arrived


class Extras:
    """Of one choice. Rows arrive with the tokens of a delta, are held as long as those are, and lie unread until a reader takes them."""

    __slots__ = ("_held", "_unread", "beams", "context_logits", "prompt_logprobs", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        sizes = _logprob_sizes(wanted.width) + _logit_sizes(wanted.logits)
        self._held = Columns(sizes) if sizes else None
        self._unread = Columns(sizes) if sizes else None
        # Best first; they come with the ending.
        self.beams: list[BeamResult] | None = None
        self.prompt_logprobs = PromptRows(_logprob_sizes(wanted.prompt_width), wanted.prompt_length - 1) if wanted.prompt_width else None
        self.context_logits = PromptRows(_logit_sizes(wanted.context_logits), wanted.prompt_length) if wanted.context_logits else None

    def arrive(self, request_id: int, count: int, finish: FinishReason | None, deltas: Deltas) -> None:
        """Take what a frame has for ``count`` new tokens. Raises ValueError when that is not what was asked for, in number or in shape."""
        wanted = self.wanted
        if self._held is not None:
            parts = _logprob_parts(deltas.logprobs.get(request_id), wanted.width) + _logit_parts(
                deltas.generation_logits.get(request_id), wanted.logits
            )
            rows = self._held.count(parts)
            if rows != count:
                raise ValueError(f"{rows} rows of logprobs or logits came with {count} tokens")
            self._held.extend(parts)
        if self.prompt_logprobs is not None and (rows_about := deltas.prompt_logprobs.get(request_id)) is not None:
            self.prompt_logprobs.arrive(_logprob_parts(rows_about, wanted.prompt_width))
        if self.context_logits is not None and (logits := deltas.context_logits.get(request_id)) is not None:
            self.context_logits.arrive(_logit_parts(logits, wanted.context_logits))
        if finish is FinishReason.STOP or finish is FinishReason.LENGTH:
            for name, about in (("prompt logprobs", self.prompt_logprobs), ("context logits", self.context_logits)):
                if about is not None and not about.complete:
                    raise ValueError(f"{about.arrived} of {about.total} rows of {name} came")
            if wanted.beams:
                self.beams = _beams(deltas.beams.get(request_id, ()), wanted.beams)
                if count:
                    raise ValueError(f"{count} tokens came with the results of a beam search")

    def release(self, count: int) -> None:
        """The next ``count`` tokens are let out, and these rows with them."""
        if self._held is None or not count:
            return
        assert self._unread is not None
        rows = self._held.take(count)
        if len(self._unread):
            self._unread.extend(rows.data)
        else:
            self._unread = rows

    def take(self) -> Columns | None:
        """All that lies unread."""
        return None if self._unread is None else self._unread.take(len(self._unread))

    def rewind(self) -> bool:
        """Another world goes on with the request. Whether something was asked about the prompt and need not be asked again."""
        asked = [rows for rows in (self.prompt_logprobs, self.context_logits) if rows is not None]
        for rows in asked:
            rows.rewind()
        return bool(asked) and all(rows.complete for rows in asked)


class Taken:
    """The reader's side: rows as users see them."""

    __slots__ = ("_context", "_logits", "_prompt_logprobs", "beams", "cumulative", "logprobs", "prompt_rows", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.logprobs: TokenLogprobs = []
        self.cumulative = 0.0
        self.prompt_rows: Columns | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._logits: list[bytearray] = []
        self._context: bytearray | None = None
        self.beams: list[BeamResult] | None = None

    def add(self, rows: Columns) -> None:
        """What ``Extras.take`` gave."""
        width = self.wanted.width
        if width:
            fresh = logprob_dicts(rows, width)
            self.logprobs += fresh
            # The first entry is the token itself.
            self.cumulative += sum(next(iter(entry.values())).logprob for entry in fresh)
        if self.wanted.logits:
            self._logits.append(rows.data[-1])

    def add_whole(self, extras: Extras) -> None:
        """What comes once: what there is about the prompt, when it is complete, and beams. Holds the lock of the mailbox."""
        self.beams = extras.beams
        about = extras.prompt_logprobs
        if about is not None and about.complete and self.prompt_rows is None:
            # As it is: to make anything of the rows of a long prompt takes far longer than this lock may be held.
            self.prompt_rows = about.columns.take(len(about.columns))
        context = extras.context_logits
        if context is not None and context.complete and self._context is None:
            self._context = context.columns.take(len(context.columns)).data[0]

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry for each token of the prompt, None for the first; None unless asked for and complete."""
        if self._prompt_logprobs is None and self.prompt_rows is not None:
            self._prompt_logprobs = [None, *logprob_dicts(self.prompt_rows, self.wanted.prompt_width)]
        return self._prompt_logprobs

    def generation_logits(self) -> Any:
        """float32 [tokens, vocabulary]; None unless asked for."""
        if not self.wanted.logits:
            return None
        if len(self._logits) != 1:
            # Once: a choice that has ended is asked again with every piece that another one streams.
            self._logits = [bytearray().join(self._logits)]
        return np.frombuffer(self._logits[0], dtype=np.float32).reshape(-1, self.wanted.logits)

    def context_logits(self) -> Any:
        """float32 [prompt tokens, vocabulary]; None unless asked for and complete."""
        return None if self._context is None else np.frombuffer(self._context, dtype=np.float32).reshape(-1, self.wanted.context_logits)


def logprob_dicts(rows: Columns, width: int) -> TokenLogprobs:
    """A dictionary for each row: the token itself first, whatever its rank, then the most likely ones."""
    ids, logprobs, ranks = rows.data[:3]
    return _dicts(memoryview(ids).cast("i").tolist(), memoryview(logprobs).cast("f").tolist(), memoryview(ranks).cast("i").tolist(), width)


def _dicts(ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int], width: int) -> TokenLogprobs:
    dicts: TokenLogprobs = []
    for row, rank in enumerate(ranks):
        first = row * width
        entry = {ids[first]: Logprob(logprobs[first], rank)}
        for place in range(first + 1, first + width):
            entry.setdefault(ids[place], Logprob(logprobs[place], place - first))
        dicts.append(entry)
    return dicts


def _beams(beams: Sequence[Beam], most: int) -> list[BeamResult]:
    if not 1 <= len(beams) <= most:
        raise ValueError(f"{len(beams)} results of a beam search came, of {most}")
    results = []
    for beam in beams:
        token_ids = beam.token_ids.as_int32().tolist()
        results.append(BeamResult(token_ids, FinishReason(beam.finish), beam.stop_reason, beam.cumulative_logprob))
        if not token_ids:
            raise ValueError("a result of a beam search has no tokens")
    return results


def _logprob_sizes(width: int) -> tuple[int, ...]:
    return (NUMBER * width, NUMBER * width, NUMBER) if width else ()


def _logit_sizes(vocabulary: int) -> tuple[int, ...]:
    return (NUMBER * vocabulary,) if vocabulary else ()


def _logprob_parts(rows: LogprobRows | None, width: int) -> list[memoryview]:
    if not width:
        return []
    if rows is None:
        return [_NOTHING] * 3
    if rows.width != width:
        raise ValueError(f"rows of logprobs are {rows.width} wide instead of {width}")
    return [rows.token_ids.view, rows.logprobs.view, rows.ranks.view]


def _logit_parts(logits: Buffer | None, vocabulary: int) -> list[memoryview]:
    return [_NOTHING if logits is None else logits.view] if vocabulary else []
