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
from headrace.forms.elsewhere import EventMaker
from headrace.ipc.channel import KEY_BYTES
from headrace.ipc.messages import Buffer, TextEnd, TextFeed, TextJob, TextPieces, TextReady
from headrace.ipc.socket_channel import inherit_pair
from headrace.outputs import FinishReason, Released
from headrace.text.recipes import Recipes
from headrace.text.stage import PlainText, StoppingText, text_stage
from headrace.worker.guard import guard, set_process_name

log = logging.getLogger("headrace.worker")


class _Request:
    """``held``: of its tokens those that were not let out yet; kept only where ``form`` makes events of what is."""

    __slots__ = ("form", "held", "stage")

    def __init__(self, stage: PlainText | StoppingText, form: EventMaker | None) -> None:
        self.stage = stage
        self.form = form
        self.held: list[int] = []

    def make(self, ids: list[int], end: int, answered: int, ending: tuple[str, int | None] | None) -> tuple[Released, list[bytes]]:
        """What ``ids`` let out, of which the first ``answered`` are known, and its events."""
        form = self.form
        if answered:
            known = self.stage.feed(ids[:answered])
            if form is not None:
                self.held += ids[:answered]
                form.skip(self._let_out(known.num_tokens), known.text)
            ids = ids[answered:]
        released = _make(self.stage, ids, end)
        if form is None:
            return released, []
        self.held += ids
        reason: tuple[str | None, int | str | None] = (None, None) if ending is None else ending
        if released.stop is not None:
            reason = (str(FinishReason.STOP), released.stop)
        return released, form.feed(self._let_out(released.num_tokens), released.text, *reason)

    def _let_out(self, count: int) -> list[int]:
        out = self.held[:count]
        del self.held[:count]
        return out


class TextMaker:
    """Feeds in, pieces out. ``new_stage`` makes what makes the text of one request."""

    def __init__(self, new_stage: Callable[[TextJob], PlainText | StoppingText]) -> None:
        self._new_stage = new_stage
        # Exactly the requests that were begun here, and have not ended, stopped or failed.
        self._live: dict[int, _Request] = {}

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def answer(self, feed: TextFeed) -> TextPieces:
        """Raises ValueError or IndexError for a feed that contradicts itself, and MsgspecError for one whose forms are none."""
        for job in feed.jobs:
            form = EventMaker.from_bytes(job.form) if job.form else None
            self._live[job.request_id] = _Request(self._new_stage(job), form)
        tokens = feed.token_ids.as_int32().tolist()
        counts: list[int] = []
        texts: list[str] = []
        stops: dict[int, str] = {}
        errors: dict[int, str] = {}
        events: dict[int, list[bytes]] = {}
        start = 0
        for request_id, count, end in zip(feed.request_ids.as_int64().tolist(), feed.counts.as_int32().tolist(), feed.ends, strict=True):
            ids, start = tokens[start : start + count], start + count
            released = Released(0, "")
            made: list[bytes] = []
            # A request that has stopped or failed here is fed on until the user process knows.
            request = self._live.get(request_id)
            if request is not None:
                try:
                    released, made = request.make(ids, end, feed.answered.get(request_id, 0), feed.endings.get(request_id))
                except Exception as error:
                    # One feed carries many requests: the fault of one stage ends its request only.
                    log.exception("making text failed")
                    errors[len(counts)] = described(error)
            if made:
                events[len(counts)] = made
            if released.stop is not None:
                stops[len(counts)] = released.stop
            if end != TextEnd.MORE or released.stop is not None or len(counts) in errors:
                self._live.pop(request_id, None)
            counts.append(released.num_tokens)
            texts.append(released.text if request is None or request.form is None else "")
        return TextPieces(feed.number, Buffer.int32(counts), Buffer.int32(map(len, texts)), "".join(texts), stops, errors, events)


def _make(stage: PlainText | StoppingText, ids: list[int], end: int) -> Released:
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
