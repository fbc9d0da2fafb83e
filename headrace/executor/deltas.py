"""Result frames: as Python lists, and several of them as one. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.ipc.messages import Buffer, Deltas
from headrace.outputs import FinishReason

FINISH_OF_CODE: tuple[FinishReason | None, ...] = (None, *FinishReason)

#: a count of 1, as it crosses
_ONE = bytes(Buffer.int32([1]).view)


def unpack(deltas: Deltas) -> tuple[list[int], list[int], list[int], bytes]:
    """Request ids [n], token counts [n], token ids [sum(counts)], and endings [n], each a place in ``FINISH_OF_CODE``.

    Raises ValueError, TypeError or IndexError for a frame that contradicts itself; nothing of it can be used then.
    """
    ids, tokens, finish = deltas.request_ids.as_int64().tolist(), deltas.token_ids.as_int32().tolist(), deltas.finish
    # As most are: a token for each, and no ending. Bytes tell that sooner than numbers.
    if deltas.counts.view.tobytes() == _ONE * len(finish):
        counts = [1] * len(finish)
    else:
        counts = deltas.counts.as_int32().tolist()
        if counts and min(counts) < 0:
            raise ValueError(f"a count is {min(counts)}")
    if not len(ids) == len(counts) == len(finish) or sum(counts) != len(tokens):
        raise ValueError(f"{len(ids)} ids, {len(counts)} counts, {len(finish)} endings and {len(tokens)} tokens do not fit together")
    if finish.count(0) != len(finish) and max(finish) >= len(FINISH_OF_CODE):
        raise ValueError(f"there is no ending {max(finish)}")
    return ids, counts, tokens, finish


class Run:
    """Frames that follow each other, each with one more token for the same requests and nothing else, as one frame.

    What a frame costs is mostly for each request in it. So they cost little more than one of them, when more of them have come than could
    be delivered one by one; and it is then that it matters.
    """

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        # Two or more only if all of them are such frames.
        self._frames: list[Deltas] = []

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, deltas: Deltas) -> bool:
        """Take one more frame. False: it is another kind of frame than those that are here, which have to be taken first."""
        frames = self._frames
        if frames:
            first = frames[0]
            # Those of one batch have the same ids, so that most that cannot be joined are found by that alone.
            if deltas.request_ids != first.request_ids or not _only_one_more(deltas) or not (frames[1:] or _only_one_more(first)):
                return False
        frames.append(deltas)
        return True

    def take(self) -> Deltas:
        """All of them; at least one."""
        frames, self._frames = self._frames, []
        last = frames[-1]
        if len(frames) == 1:
            return last
        # int32 [requests, frames]
        tokens = np.stack([np.frombuffer(frame.token_ids.view, dtype=np.int32) for frame in frames], axis=1)
        counts = np.full(len(tokens), len(frames), dtype=np.int32)
        return msgspec.structs.replace(last, counts=Buffer(counts), token_ids=Buffer(tokens))


def _only_one_more(deltas: Deltas) -> bool:
    """Whether it brings one token for each of its requests, and nothing else."""
    count = len(deltas.finish)
    return (
        deltas.request_ids.view.nbytes == 8 * count
        and deltas.token_ids.view.nbytes == 4 * count
        and deltas.counts.view.tobytes() == _ONE * count
        and not any(deltas.finish)
        and not (deltas.stop_reasons or deltas.errors or deltas.beams)
        and not (deltas.logprobs or deltas.prompt_logprobs or deltas.generation_logits or deltas.context_logits)
    )
