"""The world as a process sees it that only has a lane of it: it starts nothing, kills nothing, and is told what becomes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError, StartupError
from headrace.executor.attachment import LINGER, Attachment
from headrace.executor.launchers.base import ExitCause, Launcher
from headrace.executor.monitor import WorldMonitor
from headrace.executor.outbox import Outbox, SentHook
from headrace.executor.turns import SuspectTurn
from headrace.executor.world import OwnWorlds, World, Worlds
from headrace.ipc.channel import Address
from headrace.ipc.greeting import Greeting
from headrace.ipc.lanes import control_names
from headrace.ipc.messages import AnyMessage, Farewell, LaneOrdered, LaneReady, WorldHung, WorldLost

#: Seconds from the owner's word that the world connects to our channels until it must have answered on them; beyond what rank 0 gives us,
#: so that one of us tries again and not both.
ANSWER_PATIENCE = 12.0


class Elsewhere:
    """In place of a world that was launched here: one that runs for another process, ``pid``, and is not ours to end."""

    output_fd = -1

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def go(self) -> None:
        """It runs."""

    def read_output(self) -> list[str]:
        """What it says goes to its owner."""
        return []

    def output_tail(self) -> str:
        """As ``read_output``."""
        return ""

    def poll(self) -> ExitCause | None:
        """Its owner, which is no child of ours, tells nobody how it ended."""
        return ExitCause(None, None)

    def kill(self, attempt: int) -> None:
        """It is not ours."""

    def close(self) -> None:
        """Nothing is held."""


class OwnerMonitor(WorldMonitor):
    """Watches the owner, and takes its word for the world. There is nothing to wait for after a loss: the processes are not ours."""

    def __init__(self, attachment: Attachment) -> None:
        self.world = Elsewhere(attachment.owner_pid)
        self.root_fd = os.dup(attachment.owner_fd)
        self._ranks = {}
        self._dead = []
        self._error: EngineDeadError | None = None
        self._told = False
        self._answer_by: float | None = None
        self._answered = False
        self._final = False
        self._gone = False

    def __repr__(self) -> str:
        return f"<OwnerMonitor owner={self.world.pid} error={self._error!r} final={self._final} gone={self._gone}>"

    def ordered(self, now: float) -> None:
        """Rank 0 is connecting to our channels. It may have done so already: that comes by another way than the owner's word of it."""
        if not self._answered:
            self._answer_by = now + ANSWER_PATIENCE

    def answered(self) -> None:
        """It has."""
        self._answered, self._answer_by = True, None

    def lose(self, error: EngineDeadError, final: bool) -> None:
        """The world is lost to us. The first cause stays, but a later word may be the final one: of a world that is dead for good the owner
        also tells, soon after, that it was closed, which is not why.
        """
        if self._error is None or (final and not self._final and not self._told):
            self._error, self._final = error, final
        self._gone = True

    def leave(self) -> None:
        """We need it no longer."""
        self._gone = True

    def root_died(self, now: float) -> None:
        self.lose(EngineDeadError(f"the process that owns the world (pid {self.world.pid}) has ended", pid=self.world.pid), final=True)

    @property
    def deadline(self) -> float | None:
        return self._answer_by

    @property
    def gone(self) -> bool:
        return self._gone

    @property
    def final(self) -> bool:
        return self._final

    def loss(self, now: float, starting: bool) -> EngineDeadError | None:
        if self._answer_by is not None and now >= self._answer_by:
            self._answer_by = None
            self.lose(EngineDeadError(f"nothing came on this lane for {ANSWER_PATIENCE} s: another process has taken its place"), False)
        if self._error is None or self._told:
            return None
        self._told = True
        return self.describe(starting)

    def describe(self, starting: bool) -> EngineDeadError:
        error = self._error or EngineDeadError("this process has left the world")
        if not starting or isinstance(error, StartupError):
            return error
        return StartupError(
            str(error), rank=error.rank, pid=error.pid, signal=error.signal, exit_code=error.exit_code, remote_cause=error.remote_cause
        )


class AttachedWorld(World):
    """One world of the owner's, as our lane has it. Another follows when the owner says that this one is lost, but not for good."""

    owned = False
    # Rank 0 waits for our Farewell.
    linger = LINGER

    def __init__(self, config: EngineConfig, attachment: Attachment) -> None:
        super().__init__(config, None)
        self._attachment = attachment
        self._owner: OwnerMonitor | None = None

    def open(self, on_send_failed: Callable[[list[int], Exception], None], on_sent: SentHook | None) -> None:
        """Bind the channels of our lane and tell the owner. Raises ChannelError, OSError."""
        from headrace.ipc.zmq_channel import bind_pair

        self.monitor = self._owner = OwnerMonitor(self._attachment)
        binding = self._attachment.next_binding()
        self.results = bind_pair(binding.results, binding.key)
        self.requests = bind_pair(binding.requests, binding.key)
        self.greeting = Greeting(self.requests)
        self.outbox = Outbox(self.requests, on_send_failed, on_sent)
        self.news = self._attachment.news
        self._attachment.bound(binding)

    def heard(self, message: AnyMessage, now: float) -> None:
        """The owner has told us something."""
        assert self._owner is not None
        if isinstance(message, LaneOrdered):
            self._owner.ordered(now)
        elif isinstance(message, WorldLost):
            error = EngineDeadError(
                message.error,
                rank=message.rank,
                pid=message.pid,
                signal=message.signal,
                exit_code=message.exit_code,
                remote_cause=message.remote_cause,
            )
            self._owner.lose(error, message.final)

    def served(self, message: LaneReady) -> None:
        """Rank 0 takes our requests."""
        assert self._owner is not None
        self._owner.answered()
        lane = self._attachment.lane
        self.control = (
            Address(channel="control", endpoint=message.control, peer=f"{control_names(lane)}{os.urandom(8).hex()}"),
            bytes(message.key.view),
        )

    def closed_by_owner(self) -> bool:
        """It is. Rank 0 waits until it knows that we have read all."""
        assert self._owner is not None and self.outbox is not None
        self.outbox.put(Farewell())
        self._owner.lose(EngineDeadError(f"the world was closed by the process that owns it (pid {self._owner.world.pid})"), final=True)
        return True

    def left(self) -> None:
        """Nothing of us is there any more; the world goes on."""
        assert self._owner is not None
        self._owner.leave()

    def hung(self, error: EngineDeadError) -> bool:
        """Tell the owner, who decides."""
        self._attachment.tell(WorldHung(str(error)))
        return False

    def kill(self) -> None:
        """Leave: whatever we still have in the world is cancelled there. Of a world that is lost there is nothing to leave."""
        assert self._owner is not None
        if not self._owner.gone:
            self._attachment.detach()
            self._owner.leave()


class LentWorlds:
    """Those of the owner. There is a lane for us in each, over all of which ``attachment`` lasts."""

    owned = False

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.first_id = attachment.first_id
        self.handle: Path | None = attachment.path

    def next(self, config: EngineConfig) -> World:
        """As all of these as ``Worlds`` has them."""
        return AttachedWorld(config, self._attachment)

    def share(self, turn: SuspectTurn) -> None:
        """The owner gives turns."""
        turn.share(self._attachment.tell)

    def close(self) -> None:
        """Leave."""
        self._attachment.close()


def worlds_of(launcher: Launcher | Attachment) -> Worlds:
    """The one place that asks whose they are."""
    return LentWorlds(launcher) if isinstance(launcher, Attachment) else OwnWorlds(launcher)
