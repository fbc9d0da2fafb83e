"""Checks around every test. The books of every executor that it made must balance (A14, tests/books.py); and nothing may leak: threads,
processes, file descriptors, socket files, session folders and shared memory.

Three autouse fixtures, one for each of the scopes session, module and function, note what exists before and fail the test (or the last
test of the module or session) when something new is left after. Of the fixtures of one scope an autouse one of the top conftest is set up
first and so torn down last, and wider scopes come before narrower ones: what a function check notes therefore includes the fixtures that
are shared by several tests, and excludes those of the test itself. A wider fixture that is first asked for later, inside a test or by the
second test of a module, is added to what the narrower checks have noted (see pytest_fixture_setup).

Ends of processes and threads are seen a little later than they are caused, so a check polls until nothing is left or SETTLE has passed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.executor.session import VARIABLE, _base_folder
from tests.books import Books

# As in worlds, but here onnxruntime may be imported before the first runner is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# What is compared with a CPU's numbers is computed on the CPU, also where there are GPUs; tests/gpu is for those, and is run by itself.
if "HEADRACE_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

#: seconds: an orphan of ours is allowed to live for 2 s, a busy machine may take as long again to show that it is gone
SETTLE = 5.0
POLL = 0.01

#: carried in the environment of every process that a test starts, so that an orphan is known after its parent has died
MARK = f"HEADRACE_TEST_SESSION={os.getpid()}-{time.time_ns()}"

#: what our own worlds and their MPI leave behind when nobody cleans up
REMAINS = ("headrace-", "ompi.", "sm_segment.", "mpich_shm_")

SHARED_MEMORY = "/dev/shm"

#: Files that take longest. Where files run side by side these begin first, so that at the end none of them runs alone.
LONGEST = {
    *("test_cli.py", "test_external.py", "test_lanes_death.py", "test_packaging.py", "test_restart.py", "test_signals.py", "test_start.py"),
    *("test_ending.py", "test_frontends.py", "test_fuzz.py", "test_idle.py", "test_loading.py", "test_openai_client.py"),
    *("test_page_browser.py", "test_sampler.py"),
    *("test_engine_folder.py", "test_onnx_world.py", "test_pipeline_world.py", "test_selftest.py", "test_tensorrt_selftest.py"),
}

#: in the order in which pytest sets them up
SCOPES = ("session", "package", "module", "class", "function")


@dataclass
class Resources:
    """What exists at one moment.

    Threads are Python's. Native ones cannot be told apart: those of OpenMP, BLAS and Rayon live as long as the process and are no leak;
    those of a ZMQ context show as its event descriptors.
    """

    threads: set[threading.Thread]
    pids: frozenset[int]
    descriptors: Counter[str]
    files: set[str]

    @classmethod
    def now(cls) -> Resources:
        """Of this process; ``pids`` are all of the machine, for telling new from old ones costs less than asking each whose it is."""
        return cls(
            # The timer of the time limit belongs to whichever test runs, and is there before its fixtures and after them.
            threads={thread for thread in threading.enumerate() if not thread.name.startswith("pytest_timeout ")},
            pids=_pids(),
            descriptors=_descriptors(),
            files=_remains(),
        )

    def add(self, before: Resources, after: Resources) -> None:
        """Also allow what came between these two moments."""
        self.threads |= after.threads - before.threads
        self.pids |= after.pids - before.pids
        self.descriptors += after.descriptors - before.descriptors
        self.files |= after.files - before.files

    def leaked_since(self, before: Resources, with_descriptors: bool) -> list[str]:
        """One line for each thing that is here and was not there."""
        lines = [f"thread {thread.name!r}{' (daemon)' * thread.daemon}" for thread in self.threads - before.threads]
        lines += [line for pid in sorted(self.pids - before.pids) if (line := _describe_ours(pid)) is not None]
        if with_descriptors:
            lines += [f"file descriptor of {target}" for target in (self.descriptors - before.descriptors).elements()]
        lines += [f"file {path}" for path in sorted(self.files - before.files) if not _used_by_others(path)]
        return lines


#: the last number given to a process or thread, and the processes, at the last look
_SEEN: tuple[bytes, frozenset[int]] = b"", frozenset()


def _pids() -> frozenset[int]:
    """Of every process on the machine.

    The last number that was given to a process or thread is read first, for that costs a twentieth: where it is the same as at the last
    look, no process has been started since, and the processes are those of then or fewer.
    """
    global _SEEN
    with open("/proc/loadavg", "rb") as file:
        last = file.read().rpartition(b" ")[2]
    if last != _SEEN[0] or last == b"0\n":  # imitations of /proc know no last number and write 0
        _SEEN = last, frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
    return _SEEN[1]


def _descriptors() -> Counter[str]:
    if "HEADRACE_TEST_GPU" in os.environ:
        return Counter()  # the driver and NCCL open some whenever they like, and keep them
    # By target and not by number: one closed and another opened must not cancel out, and sockets and pipes have unique names.
    targets: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{name}")] += 1
        except OSError:  # listing the folder took a descriptor itself
            continue
    return targets


def _remains() -> set[str]:
    # Paths as text: this is called twice for each test, and Path objects would be most of its cost.
    found: set[str] = set()
    for folder in {SHARED_MEMORY, tempfile.gettempdir(), os.environ.get(VARIABLE) or str(_base_folder())}:
        with contextlib.suppress(FileNotFoundError):
            found.update(f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(REMAINS))
    return found


def _stat(pid: int) -> tuple[str, str, int] | None:
    """Name, state letter and parent of a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # the name may itself hold brackets and blanks
    state, parent = rest.split()[:2]
    return name, state, int(parent)


def _is_ours(pid: int) -> bool:
    """Whether this process descends from us, by its parents or, where those have died, by the mark in its environment."""
    ancestor = pid
    while ancestor > 1:
        stat = _stat(ancestor)
        if stat is None:
            break
        ancestor = stat[2]
        if ancestor == os.getpid():
            return True
    try:
        return MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, a zombie of others, or of another user
        return False


def _describe_ours(pid: int) -> str | None:
    stat = _stat(pid)
    if stat is None or not _is_ours(pid):
        return None
    name, state, parent = stat
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"process {pid} ({name}{', zombie' if state == 'Z' else ''}, child of {parent}) {command[:200]}".rstrip()


#: what was seen in use by processes that are not ours
_OF_OTHERS: set[str] = set()


def _used_by_others(path: str) -> bool:
    """Whether a process that is not ours has, or had at an earlier look, this or something in it open or mapped: /dev/shm belongs to the
    whole machine. Once is enough: what others leave there when they die is theirs as well.
    """
    if os.path.dirname(path) != SHARED_MEMORY:
        return False
    if path not in _OF_OTHERS and any(_uses(pid, path) and not _is_ours(pid) for pid in _pids() - {os.getpid()}):
        _OF_OTHERS.add(path)
    return path in _OF_OTHERS


def _uses(pid: int, path: str) -> bool:
    try:
        if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        return any(os.readlink(link).startswith(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # gone, of another user, or it closed a descriptor while we looked: the next look sees it as it is then
        return False


@dataclass
class Checks:
    """The checks under way, by scope."""

    noted: dict[str, Resources] = field(default_factory=dict)


CHECKS = pytest.StashKey[Checks]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CHECKS] = Checks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    # What the modules of tests and their libraries made lives until the end: no collection needs to go through it each time.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Function) -> None:
    # pytest keeps a test's arguments until all its fixtures are torn down, and so alive what only a collected object gives back.
    item.funcargs.clear()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None, object, object]:
    noted = request.config.stash[CHECKS].noted
    narrower = [noted[scope] for scope in SCOPES[SCOPES.index(fixturedef.scope) + 1 :] if scope in noted]
    if not narrower:
        return (yield)
    before = Resources.now()
    try:
        return (yield)
    finally:
        after = Resources.now()
        for resources in narrower:
            resources.add(before, after)


def _check(request: pytest.FixtureRequest) -> Iterator[None]:
    noted = request.config.stash[CHECKS].noted
    # Inside an MPI world the library opens descriptors on first use of a peer and keeps them; they are not the test's.
    with_descriptors = not request.config.getoption("--with-mpi", default=False)
    noted[request.scope] = before = Resources.now()
    yield
    del noted[request.scope]
    if leaked := _settle(lambda: Resources.now().leaked_since(before, with_descriptors)):
        # Said once is enough: the wider checks do not say it again.
        after = Resources.now()
        for wider in noted.values():
            wider.add(before, after)
        where = "this test" if request.scope == "function" else f"the fixtures of this {request.scope}"
        pytest.fail(f"{where} left behind:\n  " + "\n  ".join(leaked), pytrace=False)


def _settle(leaked: Callable[[], list[str]]) -> list[str]:
    lines = leaked()
    if not lines:
        return lines
    began = time.monotonic()
    collected = False
    while (lines := leaked()) and time.monotonic() < began + SETTLE:
        time.sleep(POLL)
        # What only a reference cycle holds is not leaked. A collection takes as long as many looks, and most ends are seen at the next.
        if not collected and time.monotonic() > began + 3 * POLL:
            gc.collect()
            collected = True
    return lines


@pytest.fixture(scope="session", autouse=True)
def _private_temp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of this run's own for temporary files and for sessions, so that what appears in them is ours; short, for socket paths end at
    107 bytes.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are, and are kept for a look after a failure
    with contextlib.ExitStack() as stack:
        folder, sessions = (stack.enter_context(tempfile.TemporaryDirectory(prefix="hr", dir=base)) for base in (None, _base_folder()))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TMPDIR", folder)
        patch.setenv(VARIABLE, sessions)
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv(*MARK.split("="))
        yield


@pytest.fixture(scope="session", autouse=True)
def _session_leaks(_private_temp: None, request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _check(request)


@pytest.fixture(scope="module", autouse=True)
def _module_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _check(request)


@pytest.fixture(autouse=True)
def _leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _check(request)


@pytest.fixture(scope="session", autouse=True)
def _books() -> Iterator[Books]:
    books = Books()
    with pytest.MonkeyPatch.context() as patch:
        books.watch(patch)
        yield books


@pytest.fixture(autouse=True)
def _balance(_leaks: None, _books: Books, request: pytest.FixtureRequest) -> Iterator[None]:
    """Invariant 1, in every test's teardown. A test that provokes faults in the dispatch thread is marked so, and must have some."""
    yield
    faults = _books.faults()
    provoked = [fault for fault in faults if fault.startswith("a fault in a dispatch thread")]
    if request.node.get_closest_marker("dispatch_fault") is not None:
        assert provoked, "this test was to provoke a fault in a dispatch thread"
        faults = [fault for fault in faults if fault not in provoked]
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
