"""The kill matrix: every process of a world, killed in every phase of its life. How long until everybody who waits was told, and until the
last process and the session folder were gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import EngineDeadError, HeadraceError, StartupError
from headrace.executor import session
from headrace.executor.lifecycle import WorldState
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.result import GenerationResult
from tests.chaos.processes import MARK, Marked
from tests.chaos.processes import send as send_signal
from tests.integration.test_postprocess import PROMPT, RECIPES, read, send, text_of
from tests.integration.worlds import LONG, Deaths, eventually, make, submit

PROCESSES = ("rank0", "rank1", "mpiexec", "janitor", "user", "text0")

#: starting: the process has just been started; loading: it loads; prefill: the first step of the requests runs; decode: tokens come;
#: draining: close(drain=True) waits for requests; closing: all have ended and the ranks are leaving
PHASES = ("starting", "loading", "idle", "prefill", "decode", "draining", "closing")

ROOT = Path(__file__).resolve().parents[2]


class Cell(NamedTuple):
    """Seconds from the kill until every waiter was told (None where those who wait were killed) and until nothing was left; ``wrong``: what
    should not be, "" if all is well. Of a postprocess worker, whose death is told to nobody: until another took its place, and until it was
    gone itself.
    """

    told: float | None
    gone: float
    wrong: str


class Waiters:
    """Everybody who can wait: a thread for a start or a close, threads and a task for answers and for pieces."""

    def __init__(self) -> None:
        self.endings: dict[str, str] = {}
        self.told_at: dict[str, float] = {}
        self.pieces = 0
        self.handles: list[GenerationResult] = []
        self._threads: list[threading.Thread] = []

    def add(self, name: str, wait: Callable[[], object]) -> None:
        """A thread that waits for something, with a name for what it is."""

        def waits() -> None:
            ending = "an answer"
            try:
                wait()
            except HeadraceError as error:
                ending = type(error).__name__
            self.told_at[name] = time.monotonic()
            self.endings[name] = ending

        thread = threading.Thread(target=waits, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def add_readers(self, executor: GenerationExecutorProxy) -> None:
        """For the whole answer, piece by piece, and from an event loop."""
        self.handles = submit(executor, [1], [2], [3], max_tokens=8000, streaming=True)
        whole, stream, task = self.handles

        def read() -> None:
            for _ in stream:
                self.pieces += 1

        async def wait() -> None:
            await task

        self.add("whole", whole.result)
        self.add("stream", read)
        self.add("task", lambda: asyncio.run(wait()))

    def add_text(self, executor: GenerationExecutorProxy) -> None:
        """For the text of a stream, which is compared with what its tokens say; see ``read``."""
        self.handles = send(executor, PROMPT, max_tokens=8000)

        def count(tokens: int) -> None:
            self.pieces += 1

        def wait() -> None:
            text, tokens, _ = read(self.handles[0], count)
            whole = text_of(tokens)
            assert whole.startswith(text) and len(whole) - len(text) <= 1, f"{len(text)} characters of {len(whole)}"

        self.add("text", wait)

    def join(self) -> list[str]:
        """Until all were told; those who still wait after LONG."""
        deadline = time.monotonic() + LONG
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]


class Scene:
    """A world of two ranks that is brought into a phase. ``texts``: with two postprocess workers."""

    def __init__(self, phase: str, texts: bool = False) -> None:
        self.phase = phase
        self.texts = texts
        self.waiters = Waiters()
        self.loading = threading.Event()
        self._at_load: set[int] = set()
        # So long that the phase lasts until the kill: loading and the first step, which is the prefill.
        load_time = 1000.0 if phase == "loading" else 0.0
        step_time = 1000.0 if phase == "prefill" else 0.002
        self.executor = make(2, start_timeout=10 * LONG, on_progress=self._progress, load_time=load_time, step_time=step_time)

    def _progress(self, rank: int, stage: str, done: int, total: int) -> None:
        if stage == "load":
            self._at_load.add(rank)
        if self._at_load == {0, 1}:
            self.loading.set()

    def enter(self, appeared: Callable[[], bool]) -> None:
        """Bring it into its phase; AssertionError if it does not get there. ``appeared`` waits for the process that will be killed."""
        executor, waiters = self.executor, self.waiters
        executor.launch()
        if self.texts:
            executor.start_postprocess(2, RECIPES)
        waiters.add("start", executor.wait_ready)
        if self.phase == "starting":
            assert appeared(), "the process did not appear"
            return
        if self.phase == "loading":
            assert self.loading.wait(LONG), "the ranks do not load"
            return
        assert eventually(lambda: waiters.endings.get("start") == "an answer"), f"not ready: {executor!r}"
        if self.phase == "idle":
            return
        if self.texts:
            waiters.add_text(executor)
        else:
            waiters.add_readers(executor)
        if self.phase == "prefill":
            assert eventually(lambda: executor.ping(LONG).step_age > 0.0), "the first step does not run"
            return
        assert eventually(lambda: waiters.pieces > 2), "no tokens come"
        if self.phase == "draining":
            waiters.add("close", lambda: executor.close(drain=True, timeout=LONG))
            assert eventually(lambda: executor.state is WorldState.DRAINING), f"it does not drain: {executor!r}"
        elif self.phase == "closing":
            waiters.add("close", lambda: executor.close(timeout=LONG))
            assert eventually(lambda: executor.state in (WorldState.LEAVING, WorldState.CLOSED)), f"it does not close: {executor!r}"


def measure(process: str, phase: str) -> Cell:
    """One cell: bring a world there, kill, and watch."""
    with Marked.by_us() as marked:
        if process == "user":
            return _kill_user(phase, marked)
        return _kill_text(process, phase, marked) if process.startswith("text") else _kill(process, phase, marked)


def _kill(process: str, phase: str, marked: Marked) -> Cell:
    scene = Scene(phase)
    executor, waiters = scene.executor, scene.waiters
    try:
        scene.enter(lambda: marked.wait_for(process, LONG))
        # In the phase "closing" it may have left already; all that follows must hold none the less.
        hit = marked.send(process, signal.SIGKILL)
        struck = time.monotonic()
        wrong = [] if hit or phase == "closing" else [f"there is no {process}"]
        wrong += [f"{name} still waits" for name in waiters.join()]
        if phase == "idle" and not eventually(lambda: executor.state is not WorldState.READY):
            wrong.append("nobody noticed")
        told = time.monotonic() if phase == "idle" else max(waiters.told_at.values())
        if survivors := marked.wait_gone(LONG):
            wrong.append(f"living on: {marked.describe(survivors)}")
        gone = time.monotonic()
        wrong += _wrong_endings(phase, waiters.endings)
    finally:
        executor.close(timeout=LONG)
    counters = executor.counters()
    if counters["live"] or counters["admitted"] != counters["dead"] + counters["aborted"]:
        wrong.append(f"the ledger says {counters}")
    return Cell(told - struck, gone - struck, "; ".join(wrong))


def _kill_text(process: str, phase: str, marked: Marked) -> Cell:
    """Nobody may notice: what waits goes on to wait, what reads goes on to read."""
    scene = Scene(phase, texts=True)
    executor, waiters = scene.executor, scene.waiters
    wrong: list[str] = []
    try:
        scene.enter(lambda: marked.wait_for(process, LONG))
        pieces, pidfd = waiters.pieces, marked.open(process)
        replaced = gone = struck = time.monotonic()
        if pidfd is not None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            struck = time.monotonic()
            send_signal(pidfd, signal.SIGKILL)
            wrong += [] if poll.poll(1000 * LONG) else [f"{process} lives on"]
            gone = time.monotonic()
            os.close(pidfd)
        if phase != "closing":
            # In that phase it has left, or is about to.
            if pidfd is None or not eventually(lambda: executor.counters()["postprocess_restarts"] > 0):
                wrong.append("no other took its place")
            replaced = time.monotonic()
            if phase == "starting" and not eventually(lambda: "start" in waiters.endings):
                wrong.append("it did not become ready")
            if phase in ("decode", "draining") and not eventually(lambda: waiters.pieces > pieces):
                wrong.append("no pieces come any more")
            wrong += [f"{name} ended with {ending}" for name, ending in waiters.endings.items() if (name, ending) != ("start", "an answer")]
    finally:
        for handle in waiters.handles:
            handle.abort()
        # The first step is not waited for: it takes as long as anything here may.
        executor.close(timeout=1.0 if phase == "prefill" else LONG)
    wrong += [f"{name} still waits" for name in waiters.join()]
    # A start that was under way, and a first step, are ended by the close.
    ended_by_close = {"start": phase == "loading", "text": phase == "prefill"}
    wrong += [f"{name} ended with {end}" for name, end in waiters.endings.items() if end != "an answer" and not ended_by_close.get(name)]
    if survivors := marked.wait_gone(LONG):
        wrong.append(f"living on: {marked.describe(survivors)}")
    return Cell(replaced - struck, gone - struck, "; ".join(wrong))


def _wrong_endings(phase: str, endings: dict[str, str]) -> Iterator[str]:
    """Whom was told something else than what happened."""
    dead = {EngineDeadError.__name__}
    allowed = {
        "start": {StartupError.__name__} if phase in ("starting", "loading") else {"an answer"},
        "close": {"an answer"},
    }
    readers = {"an answer"} if phase == "closing" else dead  # an abort is an answer
    for name, ending in endings.items():
        if ending not in allowed.get(name, readers):
            yield f"{name} ended with {ending}"


def _kill_user(phase: str, marked: Marked) -> Cell:
    base = Path(tempfile.mkdtemp(prefix="hr", dir=session._base_folder()))
    script = "import sys; from tests.chaos.matrix import die; die(*sys.argv[1:])"
    command = [sys.executable, "-c", script, str(base), phase]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Popen.wait looks only every 50 ms.
        deaths = Deaths({"user": process.pid})
        deaths.survivors(2 * LONG)
        struck = time.monotonic()
        deaths.close()
        process.kill()  # nothing, unless it did not come into its phase
        code = process.wait()
        wrong = [] if code == -signal.SIGKILL else [f"it ended with {code}: {process.stderr.read()}"]
    if survivors := marked.wait_gone(LONG):
        wrong.append(f"living on: {marked.describe(survivors)}")
    if not eventually(lambda: not any(base.iterdir())):
        wrong.append(f"left behind: {[str(path) for path in base.rglob('*')]}")
    gone = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        base.rmdir()
    return Cell(None, gone - struck, "; ".join(wrong))


def die(base: str, phase: str) -> None:
    """In a user process of its own: come into the phase, then die by one's own hand, at once and without a race."""
    os.environ[session.VARIABLE] = base
    marked = Marked(os.environ[MARK])
    Scene(phase).enter(lambda: marked.wait_for("janitor", LONG))
    os.kill(os.getpid(), signal.SIGKILL)


def table(cells: dict[tuple[str, str], Cell]) -> str:
    """As Markdown: a row for each process, a column for each phase, ``told / gone`` in milliseconds."""
    lines = [f"| killed | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for process in PROCESSES:
        row = [_shown(cells.get((process, phase))) for phase in PHASES]
        lines.append(f"| {process} | {' | '.join(row)} |")
    return "\n".join(lines)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    told = "" if cell.told is None else f"{1000 * max(0.0, cell.told):.0f} / "
    return f"{told}{1000 * cell.gone:.0f}{' WRONG' if cell.wrong else ''}"
