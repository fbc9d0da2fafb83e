"""The thread ``headrace-heartbeat``: pings a world while it has work, and says when it does not go on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal, NoReturn, TypeAlias

import msgspec

from headrace.errors import ClosedError, EngineDeadError, HeadraceError
from headrace.executor.doorbell import Doorbell
from headrace.executor.health import OVERSLEPT, Alarm, ProgressWatch
from headrace.ipc.messages import Pong

log = logging.getLogger("headrace.executor")

#: seconds from one pong to the next ping
INTERVAL = 1.0

#: what is done about a world that hangs: nothing but to tell, or to kill it, so that its requests end
HangPolicy: TypeAlias = Literal["report", "kill"]


class HangReport(msgspec.Struct, frozen=True):
    """A world of which no progress is seen. ``text``: one sentence for users; ``stacks``: of all ranks, for the log."""

    text: str
    live: int
    hung: bool
    stacks: str


class HeartbeatThread:
    """Watches one world, or one after the other in the same place, from ``start`` to ``stop``.

    Args:
        ping: asks rank 0, waiting at most so many seconds. Raises TimeoutError, and another HeadraceError while there is no world to ask.
        live: requests that have not ended; called in any thread.
        dump: the stacks of all ranks as text; called when a world is suspected and before it is killed.
        kill: end the world with this error. Called once per incident with policy ``kill``, and for a remote world with either.
        on_suspect: told once per incident, in this thread.
        policy: see HangPolicy.
        watch: the judge, with its limits.
        interval: seconds between pings, and from the begin of work to the first one; less than the watch's silence limit.
    """

    def __init__(
        self,
        ping: Callable[[float], Pong],
        live: Callable[[], int],
        dump: Callable[[], str],
        kill: Callable[[EngineDeadError], None],
        *,
        on_suspect: Callable[[HangReport], None] | None = None,
        policy: HangPolicy = "report",
        watch: ProgressWatch | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.watch = ProgressWatch() if watch is None else watch
        if not 0 < interval < self.watch.silence_limit:
            raise ValueError(f"an interval of {interval} s does not lie between 0 and the silence limit of {self.watch.silence_limit} s")
        self._ping = ping
        self._live = live
        self._dump = dump
        self._kill = kill
        self._on_suspect = on_suspect
        self._policy = policy
        self._interval = interval
        # A ping that is sent an interval after a pong comes back without an answer just when the silence has reached its limit.
        self._patience = self.watch.silence_limit - interval
        self.faults = 0
        # None once the thread has ended, which gives its descriptor back.
        self._bell: Doorbell | None = Doorbell()
        self._asleep = False
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name="headrace-heartbeat", daemon=True)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "asleep" if self._asleep else "awake"
        return f"<HeartbeatThread {state} {self.watch!r}>"

    def start(self) -> None:
        """Start the thread, which sleeps until ``wake``."""
        self.thread.start()

    def wake(self) -> None:
        """A request was registered. Cheap, takes no lock, and may be called from anywhere."""
        if self._asleep:
            self._asleep = False
            self._ring()

    def stop(self) -> None:
        """End the thread; it is gone after the ping that is under way. From anywhere, any number of times, also before ``start``."""
        self._stopped = True
        self._ring()

    def join(self, timeout: float) -> bool:
        """Wait for the end after ``stop``, at most so many seconds; whether it has come. The thread itself need not wait for it."""
        if self.thread.ident is None:
            self._forget()
        elif self.thread is not threading.current_thread():
            self.thread.join(max(0.0, min(timeout, threading.TIMEOUT_MAX)))
            return not self.thread.is_alive()
        return True

    def _forget(self) -> None:
        """Nothing is asked any more. Kept, the owner's methods would keep the owner, which keeps us, until the next collection."""

        def ended(*arguments: object) -> NoReturn:
            raise ClosedError("the heartbeat has ended")

        self._ping = self._dump = self._kill = ended
        self._live = lambda: 0
        self._on_suspect = None
        self._bell = None

    # --- the thread

    def _ring(self) -> None:
        # The local name keeps the descriptor ours until it is rung, whatever the thread does meanwhile.
        if (bell := self._bell) is not None:
            bell.ring()

    def _run(self) -> None:
        bell = self._bell
        if bell is None:
            # It was stopped, and joined, before it was started.
            return
        while not self._stopped:
            self._sleep_until_work(bell)
            now = time.monotonic()
            self.watch.working(now)
            due = now + self._interval
            while self._pause(bell, due) and self._live() > 0:
                began = time.monotonic()
                if began > due + OVERSLEPT:
                    self.watch.overslept(began)
                try:
                    self._beat(began)
                except Exception:
                    self.faults += 1
                    log.exception("fault in the heartbeat; it goes on")
                # After a ping that went unanswered the next one follows at once.
                due = max(began + self._interval, time.monotonic())
            self.watch.idle()
        # An exception that somebody keeps keeps our frame, and its names.
        del bell
        self._forget()

    def _sleep_until_work(self, bell: Doorbell) -> None:
        """Costs nothing: no timeout. Announced before the look at the ledger, so that a request comes before the look, or wakes."""
        self._asleep = True
        while not self._stopped and self._live() == 0:
            bell.wait(math.inf)
            bell.silence()
            self._asleep = True
        self._asleep = False

    def _pause(self, bell: Doorbell, until: float) -> bool:
        """Whether the thread is to go on then; ``stop`` ends the pause early."""
        while not self._stopped and (left := until - time.monotonic()) > 0:
            if bell.wait(left):
                bell.silence()
        return not self._stopped

    def _beat(self, began: float) -> None:
        try:
            pong = self._ping(self._patience)
        except TimeoutError:
            self._tell(self.watch.unanswered(began, self._patience, time.monotonic()))
        except HeadraceError:
            # The world has died or is being closed, which is known without us; another may come.
            self.watch.replaced()
            self.watch.working(time.monotonic())
        else:
            self._tell(self.watch.pong(pong.steps, pong.step_age, time.monotonic(), pong.paused))

    def _tell(self, alarms: tuple[Alarm, ...]) -> None:
        if not alarms:
            return
        if alarms == (Alarm.RECOVERED,):
            log.warning("the worker world goes on")
            return
        report = self._report(Alarm.HUNG in alarms)
        log.warning("%s\n%s", report.text, report.stacks)
        if Alarm.SUSPECT in alarms and self._on_suspect is not None:
            try:
                self._on_suspect(report)
            except Exception:
                self.faults += 1
                log.exception("the listener for suspicions raised")
        if report.hung and (self._policy == "kill" or not self.watch.local):
            self._kill(EngineDeadError(f"{report.text}; it was killed", remote_cause=report.stacks))

    def _report(self, hung: bool) -> HangReport:
        live, text = self._live(), self.watch.explain(time.monotonic())
        try:
            stacks = self._dump()
        except Exception as error:
            log.debug("no stacks", exc_info=True)
            stacks = f"(no stacks: {error})"
        return HangReport(f"the worker world {'hangs' if hung else 'may hang'}: {text}, with {live} live requests", live, hung, stacks)
