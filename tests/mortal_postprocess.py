"""A postprocess worker that a token kills: for ``python -m``, in the place of the real one."""

from __future__ import annotations

import os
import signal

from headrace.ipc.messages import TextFeed, TextPieces
from headrace.worker import postprocess

POISON = 666


class Mortal(postprocess.TextMaker):
    """Dies as by a fault in C code: with nothing said."""

    def answer(self, feed: TextFeed) -> TextPieces:
        if POISON in feed.token_ids.as_int32().tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(feed)


if __name__ == "__main__":
    postprocess.TextMaker = Mortal  # type: ignore[misc]
    postprocess.main()
