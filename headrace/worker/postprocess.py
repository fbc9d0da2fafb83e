"""A postprocess worker: ``python -m headrace.worker.postprocess SOCKET RECIPES OWNER_PID NAME``, with the session key on stdin.

It makes the text of some of a user process's requests, so that process has its own core for other things. ``SOCKET`` and ``RECIPES`` are
inherited descriptors, of the pair to the user process and of a file with the tokenizer's recipes. Its state is that of the live requests it
was fed, and the user process can feed it to another worker again. Exit codes: 0 the user process has closed its end; 75 it is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable

import msgspec

from headrace.errors import ChannelClosedError, described
from headrace.ipc.channel import KEY_BYTES
from headrace.ipc.messages import Buffer, TextEnd, TextFeed, TextJob, TextPieces, TextReady
from headrace.ipc.socket_channel import inherit_pair
from headrace.outputs import Released
from headrace.text.recipes import Recipes
from headrace.text.stage import PlainText, StoppingText, text_stage
from headrace.worker.guard import guard, set_process_name

log = logging.getLogger("headrace.worker")


class TextMaker:
    """Feeds in, pieces out. ``new_stage`` makes what makes the text of one request."""

    def __init__(self, new_stage: Callable[[TextJob], PlainText | StoppingText]) -> None:
        self._new_stage = new_stage
        # Exactly the requests that were begun here, and have not ended, stopped or failed.
        self._stages: dict[int, PlainText | StoppingText] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._stages)

    def answer(self, feed: TextFeed) -> TextPieces:
        """Raises ValueError or IndexError for a feed that contradicts itself."""
        for job in feed.jobs:
            self._stages[job.request_id] = self._new_stage(job)
        tokens = feed.token_ids.as_int32().tolist()
        counts: list[int] = []
        texts: list[str] = []
        stops: dict[int, str] = {}
        errors: dict[int, str] = {}
        start = 0
        for request_id, count, end in zip(feed.request_ids.as_int64().tolist(), feed.counts.as_int32().tolist(), feed.ends, strict=True):
            ids, start = tokens[start : start + count], start + count
            released = Released(0, "")
            # A request that has stopped or failed here is fed on until the user process knows.
            stage = self._stages.get(request_id)
            if stage is not None:
                try:
                    released = _make(stage, ids, end, feed.answered.get(request_id, 0))
                except Exception as error:
                    # One feed carries many requests: the fault of one stage ends its request only.
                    log.exception("making text failed")
                    errors[len(counts)] = described(error)
            if released.stop is not None:
                stops[len(counts)] = released.stop
            if end != TextEnd.MORE or released.stop is not None or len(counts) in errors:
                self._stages.pop(request_id, None)
            counts.append(released.num_tokens)
            texts.append(released.text)
        return TextPieces(feed.number, Buffer.int32(counts), Buffer.int32(map(len, texts)), "".join(texts), stops, errors)


def _make(stage: PlainText | StoppingText, ids: list[int], end: int, answered: int) -> Released:
    if answered:
        stage.feed(ids[:answered])
        ids = ids[answered:]
    count, text, stop = stage.feed(ids)
    if end in (TextEnd.MORE, TextEnd.FORGET) or stop is not None:
        return Released(count, text, stop)
    more, rest, stop = stage.flush()
    return Released(count + more, text + rest, None if end == TextEnd.CUT else stop)


def main() -> None:
    """Serve the user process to its end."""
    socket_fd, recipes_fd, owner, name = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    guard(owner)
    set_process_name(name)
    key = sys.stdin.buffer.read(KEY_BYTES)
    # Not read(): the place in the file is shared with the other workers.
    recipes = msgspec.msgpack.decode(os.pread(recipes_fd, os.fstat(recipes_fd).st_size, 0), type=Recipes)
    os.close(recipes_fd)
    skipping, showing = recipes.skipping.factory(), recipes.showing.factory()

    def new_stage(job: TextJob) -> PlainText | StoppingText:
        detokenizer = skipping() if job.skip_special_tokens else showing()
        return text_stage(detokenizer, job.stops, job.include_stop, job.min_tokens)

    # The tables live as long as this process: no collection needs to go through them.
    gc.freeze()
    channel, maker = inherit_pair("text", key, socket_fd), TextMaker(new_stage)
    try:
        channel.send(TextReady(), timeout=None)
        while True:
            if isinstance(feed := channel.recv(timeout=None), TextFeed):
                channel.send(maker.answer(feed), timeout=None)
    except ChannelClosedError:
        channel.close()


if __name__ == "__main__":
    main()
