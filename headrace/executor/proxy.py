"""``GenerationExecutorProxy``: the user process's end of the boundary, as its callers see it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from headrace.config import EngineConfig, EngineFacts
from headrace.errors import ChannelError, EngineDeadError, HeadraceError, RequestError
from headrace.executor.admission import QueueLimits
from headrace.executor.attached import worlds_of
from headrace.executor.attachment import Attachment
from headrace.executor.control_line import refusal
from headrace.executor.dispatcher import Dispatcher
from headrace.executor.doorbell import MAX_POLL
from headrace.executor.health import PROGRESS_LIMIT, SILENCE_LIMIT, Health, ProgressWatch, describe
from headrace.executor.heartbeat import HangPolicy, HeartbeatThread
from headrace.executor.hub import LaneHub
from headrace.executor.launchers.base import Launcher
from headrace.executor.lifecycle import (
    FAIL,
    HOLDING,
    SERVING,
    Change,
    Close,
    Hurry,
    Lost,
    PauseAsked,
    RestartPolicy,
    ResumeAsked,
    WorldState,
)
from headrace.executor.live import LiveRequest
from headrace.executor.mailbox import Waiter, wake
from headrace.executor.outbox import Admitted
from headrace.executor.ranks import RankStatus, describe_ranks
from headrace.executor.request import CheckedRequest, Checker, GenerationRequest
from headrace.executor.result import GenerationResult
from headrace.executor.stacks import AskStacks, RankStacks
from headrace.executor.startup import ProgressListener
from headrace.executor.texts.pool import TextPool
from headrace.executor.traced_calls import TracedCalls
from headrace.ipc.messages import (
    Pause,
    PauseMode,
    Resume,
    YourTurn,
)
from headrace.ipc.recorder import Recorder

log = logging.getLogger("headrace.executor")

#: states in which other processes may attach
GIVES_LANES = HOLDING | SERVING | {WorldState.STARTING}

#: seconds that `close` waits beyond its budget for the dispatch thread, before it says that something is wrong
CLOSE_MARGIN = 3.0
#: seconds that a start waits for postprocess workers once the world is ready
POSTPROCESS_PATIENCE = 10.0


class GenerationExecutorProxy(TracedCalls):
    """Starts a worker world and pairs requests with results. Every method may be called from any thread.

    Args:
        config: what the world runs.
        launcher: who starts it; or what we have of a world that another process owns, see ``attach``.
        start_timeout: seconds from launch to READY.
        on_engine_death: whether a world that dies is followed by another, which takes over the live requests.
        limits: how much may wait; None: those of ``QueueLimits()``.
        on_hang: what is done about a world that hangs: ``report`` logs it, with the stacks of all ranks; ``kill`` ends it as well, as if it
            had died.
        progress_timeout: seconds without the end of a step, while there is work, after which a world hangs; a step may take as long.
        heartbeat_timeout: seconds without an answer of rank 0, while there is work, after which it is suspected to hang; above 1.
        on_progress: told where each rank is while it starts; called in the dispatch thread.
        record: a file for everything that crosses the boundary; see docs/recording.md.
        record_prompts: with the token ids and texts in it.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher | Attachment,
        *,
        start_timeout: float = 600.0,
        on_engine_death: RestartPolicy = FAIL,
        limits: QueueLimits | None = None,
        on_hang: HangPolicy = "report",
        progress_timeout: float = PROGRESS_LIMIT,
        heartbeat_timeout: float = SILENCE_LIMIT,
        on_progress: ProgressListener | None = None,
        record: str | Path | None = None,
        record_prompts: bool = False,
    ) -> None:
        self._launcher = launcher
        self._ranks = config.world_size
        self.config = config
        self._policy = on_engine_death
        self._on_hang = on_hang
        # Held while the hub is made.
        self._hub_lock = threading.Lock()
        self._recorder = None if record is None else Recorder(record, config, with_prompts=record_prompts)
        limits = limits or QueueLimits()
        self._worlds = worlds_of(launcher)
        self._dispatcher = Dispatcher(config, self._worlds, start_timeout, on_engine_death, limits, on_progress, self._recorder)
        super().__init__(self._dispatcher)
        self._owner = os.getpid()
        # Ids rise in the order of registration; both happen under the dispatcher's lock.
        self._next_id = self._worlds.first_id
        self._texts: TextPool | None = None
        dispatcher = self._dispatcher
        self._heartbeat = HeartbeatThread(
            self.ping,
            lambda: len(dispatcher.pairing.ledger),
            lambda: "\n\n".join(map(str, self.dump_stacks())),
            lambda error: dispatcher.post(Lost(error)),
            policy=on_hang,
            watch=ProgressWatch(progress_timeout, heartbeat_timeout),
        )

    @classmethod
    def attach(
        cls,
        handle: str | Path,
        *,
        start_timeout: float = 600.0,
        limits: QueueLimits | None = None,
        progress_timeout: float = PROGRESS_LIMIT,
        heartbeat_timeout: float = SILENCE_LIMIT,
    ) -> GenerationExecutorProxy:
        """An executor that shares the world of another process on this machine, not started: requests, results and everything that is
        said of them are its own; the world, and what is done when it dies or hangs, are the owner's. Its ``close`` ends its own requests
        and leaves the world alone.

        Args:
            handle: the owner's ``attach_handle``.
            start_timeout: seconds until the owner has given us a lane, and then until the world serves it.
            limits, progress_timeout, heartbeat_timeout: as in the constructor; limits count the requests of this process.

        Raises:
            StartupError: there is no such owner, or it has no room for us.
        """
        attachment = Attachment.open(Path(handle), start_timeout)
        try:
            return cls(
                attachment.config,
                attachment,
                start_timeout=start_timeout,
                on_engine_death=attachment.policy,
                limits=limits,
                on_hang=attachment.on_hang,
                progress_timeout=progress_timeout,
                heartbeat_timeout=heartbeat_timeout,
            )
        except BaseException:
            attachment.close()
            raise

    @property
    def attach_handle(self) -> Path:
        """The file by which other processes of this user on this machine share the world; see ``attach``. Asked for the first time, it is
        made; it is there until ``close``. Of an attached executor it is the owner's.

        Raises EngineDeadError, ClosedError: there is no world to share. OSError, StartupError: it cannot be made.
        """
        if self._worlds.handle is not None:
            return self._worlds.handle
        dispatcher = self._dispatcher
        with self._hub_lock:
            if self.state not in GIVES_LANES:
                raise self._refusal()
            if dispatcher.hub is None:
                hub = LaneHub(self.config, self._policy, self._on_hang, lambda: dispatcher.post(YourTurn()), self._hung_elsewhere)
                with dispatcher.lock:
                    # A world that becomes READY, or is lost, after this is told by the dispatch thread.
                    dispatcher.hub = hub
                    dispatcher.turn.share(hub.post)
                    ended, ready = self.state not in GIVES_LANES, self.state in SERVING
                if ready:
                    hub.post(dispatcher.world)
                if ended:
                    hub.stop()
            return dispatcher.hub.handle

    def lanes(self) -> dict[int, int]:
        """Lane -> pid of the processes that share our world now."""
        hub = self._dispatcher.hub
        return {} if hub is None else hub.lanes()

    def _hung_elsewhere(self, error: str) -> None:
        if self._on_hang == "kill":
            self._dispatcher.post(Lost(EngineDeadError(error)))

    def __repr__(self) -> str:
        return f"<GenerationExecutorProxy {self.state.name} live={len(self._dispatcher.pairing.ledger)} ranks={self._ranks}>"

    def start(self) -> EngineFacts:
        """``launch``, then ``wait_ready``."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """Begin to start the world; returns at once."""
        log.info("world of %d ranks: %s", self._ranks, self._launcher.describe())
        self._dispatcher.thread.start()
        atexit.register(self.close)

    def start_postprocess(self, workers: int, recipes: bytes) -> None:
        """Have ``workers`` processes make the texts of requests that have a ``new_stage``, as ``text.stage`` does, from now on. Once, and
        before the first ``submit``.

        ``workers``: from 1 to ``MAX_WORKERS``. ``recipes``: of the tokenizer, as ``text.recipes.Recipes`` in msgpack.
        """
        dispatcher = self._dispatcher
        pairing = dispatcher.pairing
        self._texts = TextPool(workers, recipes, dispatcher.lock, pairing.texts_made)
        dispatcher.post(self._texts)

    def wait_ready(self) -> EngineFacts:
        """Wait until the world is READY.

        Raises:
            StartupError: it died, failed or stalled; nothing of it is left.
        """
        try:
            self._dispatcher.start_over.wait()
            facts = self.facts
            if self._texts is not None:
                # They are quicker than a world, as a rule; if not, texts wait for them.
                self._texts.settled.wait(POSTPROCESS_PATIENCE)
            self._control.open()
            self._heartbeat.start()
            self._annotate()
            return facts
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> EngineFacts:
        """What the world said of itself. Raises the cause if it never became ready."""
        facts = self._dispatcher.facts
        if facts is None:
            raise self._refusal()
        return facts

    @property
    def state(self) -> WorldState:
        """Where the world stands."""
        return self._dispatcher.lifecycle.state

    def counters(self) -> dict[str, int]:
        """The ledger's balance sheet, and what was survived: frames that made no sense, faults of the dispatch thread, records of the
        world that were dropped there before they were read.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            counts = dispatcher.pairing.ledger.counters()
            counts["restarts"] = dispatcher.lifecycle.restarts
            admission = dispatcher.pairing.admission
            counts |= {"waiting": admission.requests, "waiting_tokens": admission.tokens, "refused": admission.refused}
        counts |= {"lost_kv_events": self._kv_events.lost, "lost_iterations": self._iterations.lost}
        if self._texts is not None:
            counts |= self._texts.counters()
        return counts | {"bad_frames": dispatcher.pairing.bad_frames, "dispatch_faults": dispatcher.faults}

    def processes(self) -> dict[str, int]:
        """Process ids of the world that there is: ``root``, which started it, and ``rank0`` and on, as far as they have said hello; and
        ``postprocess0`` and on.
        """
        world = self._dispatcher.world
        pids = {f"rank{rank}": hello.pid for rank, hello in sorted(world.startup.hellos.items())}
        if self._texts is not None:
            pids |= self._texts.pids()
        return pids if world.monitor is None else {"root": world.monitor.world.pid, **pids}

    def ranks(self) -> list[RankStatus]:
        """Where each rank of the world that there is, or was, stands; asks nobody."""
        world = self._dispatcher.world
        deaths = {} if world.monitor is None else world.monitor.deaths
        return describe_ranks(self.state, world.startup, deaths)

    def changes(self) -> list[Change]:
        """The latest changes of ``state``, at most ``MAX_CHANGES``, by time.monotonic."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            return list(dispatcher.lifecycle.changes)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Admit requests, all or none, as one frame; returns their handles in the same order.

        While the world is restarting they are admitted too, and sent to the next one.

        Raises:
            RequestError: one of them is refused; the message names the value and the limit. Nothing was sent.
            QueueFullError: they do not fit into the queue; nothing was registered. ``retry_after`` says when to try again.
            EngineDeadError, ClosedError: the world is not there; nothing was registered.
            ChannelError: sending failed; nothing is registered any more.
        """
        dispatcher, checker = self._dispatcher, Checker(self.facts)
        pairing = dispatcher.pairing
        # Of each request its choices. To the ledger, the queue and the world they are requests of their own.
        checked = checker.check_all(requests)
        self._refuse_what_never_fits(checked)
        results: list[GenerationResult] = []
        elsewhere = None if self._texts is None else self._texts.open
        with dispatcher.lock:
            held = self.state in HOLDING
            if not held and self.state not in SERVING:
                raise self._refusal()
            pairing.admission.enter(sum(map(len, checked)), sum(len(choices) * len(choices[0].token_ids) for choices in checked))
            new_handle, lock, post, replayable = self.new_handle, dispatcher.lock, dispatcher.post, dispatcher.replayable
            admitted: list[Admitted] = []
            live: list[tuple[int, LiveRequest]] = []
            for choices in checked:
                result = new_handle(self._next_id, choices, lock, post, elsewhere)
                results.append(result)
                for choice, mailbox in zip(choices, result.mailboxes, strict=True):
                    admitted.append(Admitted(self._next_id, choice))
                    live.append((self._next_id, LiveRequest(mailbox, choice, replayable)))
                    self._next_id += 1
            # In the ledger before the message leaves. A death is decided under the same lock: it comes before, and the state above says
            # so, or after, and finds these in the ledger.
            pairing.ledger.register(live, held)
            if not held and dispatcher.world.outbox is not None:
                # Under the lock too, so that the shutdown mark, which comes with another state, has every admitted request before it.
                dispatcher.world.outbox.put(*admitted)
        dispatcher.flush()
        self._heartbeat.wake()
        for result in results:
            if isinstance(result.error, ChannelError):
                raise result.error.fresh()
        return results

    def pause(self, mode: PauseMode = "abort", timeout: float | None = None) -> None:
        """Let the world stand still, and return when it does; requests that are submitted from now on wait for ``resume``.

        All pauses are one: a second call, whatever its mode, is about all that was submitted before it, and one ``resume`` ends them.
        Deadlines, cancels and admission limits hold during a pause. ``close(drain=True)`` ends it, and runs to its end what waits;
        ``close()`` aborts that. A world that dies during it is followed, if the restart policy allows, by one that is paused with ``keep``.

        Args:
            mode: of the requests that were submitted before: ``abort`` ends them, with what they have; ``wait`` lets them run to their
                end; ``keep`` leaves them where they are, and ``resume`` lets them go on.
            timeout: seconds until TimeoutError; None: as long as it takes. The pause goes on all the same.

        Raises:
            RequestError: ``resume`` was called before the pause was in effect.
            TimeoutError, EngineDeadError, ClosedError.
        """
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode={mode!r}: it must be one of {', '.join(map(repr, get_args(PauseMode)))}")
        self._pause(mode, timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Let the world go on with everything that waits; returns when it does. Without a pause nothing happens.

        Raises TimeoutError, EngineDeadError, ClosedError.
        """
        self._pause(None, timeout)

    @property
    def paused(self) -> bool:
        """Whether the world is to stand still: from the begin of ``pause`` to that of ``resume``."""
        return self._dispatcher.lifecycle.paused and self.state in SERVING | HOLDING

    def _pause(self, mode: PauseMode | None, timeout: float | None) -> None:
        dispatcher = self._dispatcher
        if self._is_held_here():
            raise RuntimeError("pause and resume wait for the dispatch thread, so they cannot be called in it, or while its lock is held")
        waiters: list[Waiter] = []
        with dispatcher.lock:
            # Between two worlds the owner's word counts: the next one begins with it.
            if self.state not in (SERVING | HOLDING if self._worlds.owned else SERVING):
                raise self._refusal()
            dispatcher.lifecycle.handle(ResumeAsked() if mode is None else PauseAsked(), time.monotonic())
            # Registered under the lock under which a death is decided, so that it is answered, or failed with it.
            call = dispatcher.pauses.begin(mode is not None)
            outbox = dispatcher.world.outbox if self.state in SERVING else None
            if mode == "abort":
                # The world would do it too; but if it dies before, it must be known here that these are not to be run again.
                waiters = dispatcher.pairing.abort_all()
            if outbox is not None:
                outbox.put(Resume(call.number) if mode is None else Pause(call.number, mode))
            else:
                # Nothing runs, and the next world begins as it was asked for.
                dispatcher.pauses.answered(call.number, mode is not None)
        wake(waiters)
        dispatcher.flush()
        if not call.done.wait(MAX_POLL if timeout is None else timeout):
            with dispatcher.lock:
                dispatcher.pauses.forget(call)
            what = "resume" if mode is None else f"pause with mode {mode!r}"
            raise TimeoutError(f"{what} was not in effect within {timeout} s; it goes on")
        if call.error is not None:
            raise call.error

    def health(self) -> Health:
        """How the world is, from what is known already: asks nobody, and never waits for long."""
        dispatcher = self._dispatcher
        return describe(self.state, dispatcher.lifecycle.error, len(dispatcher.pairing.ledger), self._heartbeat.watch, time.monotonic())

    def dump_stacks(self, timeout: float = 2.0) -> list[RankStacks]:
        """The stacks of every rank on this machine, also of one that is stuck in C code; the ranks go on.

        Not in the dispatch thread, which passes on what the ranks write. Raises TimeoutError if other callers took all of the time.
        """
        dispatcher = self._dispatcher
        hellos, here = dispatcher.world.startup.hellos, socket.gethostname()
        ranks = {rank: hello.pid for rank, hello in hellos.items() if hello.host == here}
        return dispatcher.stacks.collect(ranks, lambda rank, number: dispatcher.post(AskStacks(rank, number)), timeout)

    def cancel(self, request_id: int) -> None:
        """Ask for the early end of a request; nothing happens if it has ended or is unknown. Takes no lock and never blocks."""
        self._dispatcher.post(request_id)

    def close(self, drain: bool = False, timeout: float = 5.0) -> None:
        """End the world within ``timeout`` seconds: finish what runs (``drain``) or abort it. May be called any number of times.

        An exception that falls into the waiting, as that of a second Ctrl-C, has the world killed at once and is then raised.
        """
        try:
            self._close(drain, timeout)
        finally:
            self._write_trace()

    def _close(self, drain: bool, timeout: float) -> None:
        dispatcher = self._dispatcher
        atexit.unregister(self.close)
        if self._owner != os.getpid():
            # In a forked child, which has a copy of us but none of our threads: the world is not its to end.
            return
        self._heartbeat.stop()
        # One that has ended is not rung again: in a collection of a cycle, its bell may have gone before us.
        if dispatcher.thread.is_alive():
            try:
                try:
                    timeout = self._end_trace(timeout, not self._is_held_here())
                finally:
                    dispatcher.post(Close(drain, timeout))
                if self._is_held_here():
                    return
                over = dispatcher.over.wait(timeout + CLOSE_MARGIN)
            except BaseException:
                dispatcher.post(Hurry())
                if dispatcher.over.wait(CLOSE_MARGIN):
                    self._let_go(drain)
                raise
            if not over:
                log.error("the dispatch thread did not end within %.1f s: %r", timeout + CLOSE_MARGIN, self)
                return
        else:
            self._end_trace(timeout, not self._is_held_here())
        if dispatcher.thread.ident is None:
            # Otherwise by the thread, as its last act.
            if self._recorder is not None:
                self._recorder.close()
            self._worlds.close()
            if dispatcher.hub is not None:
                dispatcher.hub.stop()
        self._let_go(drain)

    def _is_held_here(self) -> bool:
        """Whether the end has to wait for whoever calls: a progress listener, a collection that fell into the dispatch thread, or a signal
        handler that interrupted a holder of one of its locks. To wait for the thread would be to wait for ourselves; it ends by itself.
        """
        dispatcher = self._dispatcher
        outbox = dispatcher.world.outbox
        return (
            threading.current_thread() is dispatcher.thread
            or dispatcher.lock._is_owned()  # type: ignore[attr-defined]
            or (outbox is not None and outbox.sending_here)
        )

    def _let_go(self, drain: bool) -> None:
        """After the dispatch thread: what else is held."""
        dispatcher = self._dispatcher
        if dispatcher.thread.ident is not None:
            dispatcher.thread.join(CLOSE_MARGIN)
        with dispatcher.lock:
            # A world that had died by itself was reaped by its thread, which has ended: nothing is left to do but to say so.
            if self.state is WorldState.REAPED:
                dispatcher.lifecycle.handle(Close(drain, 0.0), 0.0)
        self._watched_no_more()
        self._control.close(CLOSE_MARGIN)
        self._collective.close(CLOSE_MARGIN)
        self._heartbeat.join(CLOSE_MARGIN)
        if dispatcher.hub is not None:
            dispatcher.hub.join(CLOSE_MARGIN)

    def _refuse_what_never_fits(self, checked: Sequence[Sequence[CheckedRequest]]) -> None:
        """To come back later is no advice for a request that is larger than the empty queue."""
        limits = self._dispatcher.pairing.admission.limits
        for choices in checked:
            count, length = len(choices), len(choices[0].token_ids)
            if count > 1 and (count > limits.requests or count * length > limits.tokens):
                raise RequestError(
                    f"{count} choices with prompts of {length} tokens never fit into a queue of {limits.requests} requests "
                    f"with {limits.tokens} prompt tokens"
                )

    def _refusal(self) -> HeadraceError:
        return refusal(self._dispatcher.lifecycle)
