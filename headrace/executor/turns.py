"""Whose suspect a shared world may have; see ``ledger`` on isolation. A ledger that shares a world asks its owner before it sends one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.executor.pairing import Pairing
from headrace.ipc.messages import AskTurn, TurnOver

Tell: TypeAlias = Callable[[AskTurn | TurnOver], None]


class Turns:
    """Who may try a suspect in the world that there is, and who waits for that, by name. Pure."""

    def __init__(self) -> None:
        self.held_by: str | None = None
        self._waiting: deque[str] = deque()

    def __repr__(self) -> str:
        return f"<Turns held_by={self.held_by!r} waiting={[*self._waiting]}>"

    def handle(self, name: str, message: AskTurn | TurnOver) -> str | None:
        """Somebody asks, or needs it no longer, as who has died. To whom it is given now, if to anybody."""
        if name in self._waiting:
            self._waiting.remove(name)
        if isinstance(message, AskTurn):
            self._waiting.append(name)
        if self.held_by == name:
            self.held_by = None
        if self.held_by is None and self._waiting:
            self.held_by = self._waiting.popleft()
            return self.held_by
        return None

    def clear(self) -> None:
        """The world has died, and with it every turn."""
        self.held_by = None
        self._waiting.clear()


class SuspectTurn:
    """The turn of one ledger, which has it always while its world is its own. Driven by the dispatch thread, but for ``share``."""

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self._tell: Tell | None = None

    def __repr__(self) -> str:
        return f"<SuspectTurn shared={self._tell is not None} held={self._pairing.ledger.turn}>"

    def share(self, tell: Tell) -> None:
        """From now on others share the world, and ``tell`` reaches who gives turns. Once; any thread."""
        with self._pairing.lock:
            self._pairing.ledger.turn = False
            self._tell = tell

    def ask(self) -> None:
        """What may be sent was sent: if a suspect is left, ask for the turn."""
        if self._tell is not None and not self._pairing.ledger.turn and self._has_suspects():
            self._tell(AskTurn())

    def granted(self, ready: bool) -> bool:
        """Whether the turn that was given is of use: the world takes requests (``ready``), and a suspect is left. If not, it goes back."""
        assert self._tell is not None
        self._pairing.ledger.turn = ready and self._has_suspects()
        if not self._pairing.ledger.turn:
            self._tell(TurnOver())
        return self._pairing.ledger.turn

    def world_died(self) -> None:
        """And with it every turn that was given."""
        if self._tell is not None:
            self._pairing.ledger.turn = False

    def check(self) -> None:
        """Give it back once no suspect is left."""
        if self._tell is not None and self._pairing.ledger.turn and not self._has_suspects():
            self._pairing.ledger.turn = False
            self._tell(TurnOver())

    def _has_suspects(self) -> bool:
        with self._pairing.lock:
            return self._pairing.ledger.has_suspects
