"""What a chaos run does, drawn from a seed. Pure: the same seed and number give the same episode, on every machine and Python.

A run is a sequence of episodes. Each builds one world, lets clients of every kind loose on it, disturbs it, and ends it in one way. Episode
``n`` of a seed is drawn without those before it, so that one that failed is run again alone.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace

#: behaviours of clients; see ``clients.py``
CLIENTS = ("whole", "stream", "abort", "drop", "stall", "unread", "burst", "tasks", "deadline")

#: frames that strangers send; see ``strangers.py``
FRAMES = ("garbage", "forged", "truncated", "replayed")

#: ways to end a world, and how often each is drawn
ENDINGS = {"death": 8, "close": 3, "closing": 3, "start": 3, "user": 2}

#: the same for worlds that come back after a death, which is then no end
RESTART_ENDINGS = {"close": 6, "closing": 2, "user": 1}

#: how often each signal ends a process
DEADLY = {signal.SIGKILL: 6, signal.SIGTERM: 3, signal.SIGSEGV: 1}


@dataclass(frozen=True)
class Client:
    """One thread of the user process: ``rounds`` times it submits ``size`` requests in one call and treats them in its manner."""

    kind: str
    seed: int
    rounds: int
    size: int


@dataclass(frozen=True)
class Fault:
    """A disturbance ``at`` seconds after READY.

    ``kind``: ``pause`` (SIGSTOP, and SIGCONT after ``lasts`` seconds), ``death`` (by ``signal``), or one of FRAMES, without a ``target``.
    """

    at: float
    kind: str
    target: str = ""
    signal: int = 0
    lasts: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Ending:
    """How the world ends.

    death    ``target`` gets ``signal`` ``at`` seconds after READY
    close    the owner closes it ``at`` seconds after READY, with ``drain`` or without
    closing  so too, and ``target`` gets ``signal`` ``then`` seconds later
             both: ``hurried``: also while the world is restarting
    start    ``target`` gets ``signal`` ``at`` seconds after the launch
    user     the whole episode runs in a user process of its own, which gets SIGKILL ``at`` seconds after its launch
    """

    kind: str
    at: float
    target: str = ""
    signal: int = 0
    drain: bool = False
    then: float = 0.0
    hurried: bool = False


@dataclass(frozen=True)
class Episode:
    """One world and all that happens to it. ``step_time`` in seconds; ``queue``: most requests that may wait; ``restart``: after a death
    another world follows, and goes on with the requests.
    """

    seed: int
    number: int
    ranks: int
    step_time: float
    max_batch_size: int
    queue: int
    restart: bool
    clients: tuple[Client, ...] = field(repr=False)
    faults: tuple[Fault, ...]
    ending: Ending

    @property
    def name(self) -> str:
        """How to run it again: ``scripts/soak --seed SEED --episode NUMBER``, and ``--restart`` if it says so."""
        return f"seed {self.seed}, episode {self.number}{', restart' if self.restart else ''}"

    def slowed(self, factor: float) -> Episode:
        """The same with everything later by a factor, for an engine that takes its time."""
        faults = tuple(replace(fault, at=fault.at * factor) for fault in self.faults)
        return replace(self, faults=faults, ending=replace(self.ending, at=self.ending.at * factor))


def draw(seed: int, number: int, restart: bool = False) -> Episode:
    """Episode ``number`` of ``seed``."""
    rng = random.Random(f"{seed}/{number}")
    ranks = rng.choice((1, 2, 2, 2, 3))
    lasts = rng.uniform(0.3, 1.2)
    clients = tuple(_client(rng, kind) for kind in (*rng.sample(CLIENTS, len(CLIENTS) - 2), rng.choice(CLIENTS)))
    faults = [Fault(rng.uniform(0.0, lasts), rng.choice(FRAMES), seed=rng.getrandbits(32)) for _ in range(rng.randint(1, 4))]
    faults += [Fault(rng.uniform(0.0, lasts), "pause", _target(rng, ranks), lasts=rng.uniform(0.02, 0.3)) for _ in range(rng.randint(0, 2))]
    ending = _ending(rng, ranks, lasts, RESTART_ENDINGS if restart else ENDINGS)
    if restart:
        faults += [Fault(rng.uniform(0.0, lasts), "death", _target(rng, ranks), _deadly(rng)) for _ in range(rng.randint(1, 2))]
    return Episode(
        seed=seed,
        number=number,
        ranks=ranks,
        step_time=rng.choice((0.0, 0.0005, 0.002, 0.005)),
        max_batch_size=rng.choice((4, 32, 1024)),
        queue=rng.choice((100, 4096, 4096)),
        restart=restart,
        clients=clients,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        ending=ending,
    )


def _client(rng: random.Random, kind: str) -> Client:
    rounds, size = {"burst": (2, rng.randint(20, 200)), "unread": (1, rng.randint(5, 50)), "stall": (1, rng.randint(1, 4))}.get(
        kind, (rng.randint(3, 30), rng.randint(1, 5))
    )
    return Client(kind, rng.getrandbits(32), rounds, size)


def _ending(rng: random.Random, ranks: int, lasts: float, kinds: dict[str, int]) -> Ending:
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    target, number, drain, hurried = _target(rng, ranks), _deadly(rng), rng.random() < 0.5, rng.random() < 0.3
    if kind == "close":
        return Ending(kind, lasts, drain=drain, hurried=hurried)
    if kind == "closing":
        return Ending(kind, lasts, target, number, drain, rng.uniform(0.0, 0.1), hurried)
    if kind == "start":
        return Ending(kind, rng.uniform(0.0, 0.8), target, number)
    if kind == "user":
        return Ending(kind, rng.uniform(0.2, 1.6), "user", signal.SIGKILL)
    return Ending(kind, lasts, target, number)


def _target(rng: random.Random, ranks: int) -> str:
    return rng.choice(("janitor", "mpiexec", *(f"rank{rank}" for rank in range(ranks))))


def _deadly(rng: random.Random) -> int:
    (number,) = rng.choices(list(DEADLY), list(DEADLY.values()))
    return int(number)
