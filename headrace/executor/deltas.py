"""A result frame as Python lists. Pure."""

from __future__ import annotations

from headrace.ipc.messages import Deltas
from headrace.outputs import FinishReason

FINISH_OF_CODE: tuple[FinishReason | None, ...] = (None, *FinishReason)


def unpack(deltas: Deltas) -> tuple[list[int], list[int], list[int], bytes]:
    """Request ids [n], token counts [n], token ids [sum(counts)], and endings [n], each a place in ``FINISH_OF_CODE``.

    Raises ValueError, TypeError or IndexError for a frame that contradicts itself; nothing of it can be used then.
    """
    ids, counts = deltas.request_ids.as_int64().tolist(), deltas.counts.as_int32().tolist()
    tokens, finish = deltas.token_ids.as_int32().tolist(), deltas.finish
    if not len(ids) == len(counts) == len(finish) or sum(counts) != len(tokens) or (counts and min(counts) < 0):
        raise ValueError(f"{len(ids)} ids, {len(counts)} counts, {len(finish)} endings and {len(tokens)} tokens do not fit together")
    if finish and max(finish) >= len(FINISH_OF_CODE):
        raise ValueError(f"there is no ending {max(finish)}")
    return ids, counts, tokens, finish
