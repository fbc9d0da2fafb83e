"""The leak checks of tests/conftest.py, themselves checked: each kind of leak fails its test and is named; shared fixtures are no leaks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"

#: a child that ends by itself when the process that started it ends, so that a leak on purpose is none afterwards
CHILD = "subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    # For what the conftest imports; the tests inside lie elsewhere.
    monkeypatch.setenv("PYTHONPATH", str(CONFTEST.parents[1]))

    def run_inner(source: str) -> pytest.RunResult:
        # Only the time that a leak is given to go away by itself is shortened.
        pytester.makeconftest(CONFTEST.read_text().replace("SETTLE = 5.0", "SETTLE = 0.3"))
        pytester.makepyfile(source)
        # Plugins that nothing here needs and that take longer to load than these tests.
        plugins = ("cacheprovider", "schemathesis", "xdist", "anyio")
        return pytester.runpytest_subprocess("-q", *(f"-pno:{name}" for name in plugins))

    return run_inner


LEAKS = f"""
import os, socket, subprocess, sys, tempfile, threading
import zmq

gate = threading.Event()
kept = []

def test_thread():
    threading.Thread(target=gate.wait, name="forgotten", daemon=True).start()

def test_child():
    kept.append({CHILD})

def test_zombie():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has collected it

def test_orphan():
    # The child ends at once and leaves a grandchild, which waits for the end of its standard input, a pipe that we hold.
    reader, writer = os.pipe()
    kept.append(writer)
    script = "import subprocess; subprocess.Popen(['cat'], stdout=subprocess.DEVNULL)"
    subprocess.run([sys.executable, "-c", script], stdin=reader, check=True)
    os.close(reader)

def test_descriptor():
    kept.append(os.open("/dev/zero", os.O_RDONLY))

def test_second_descriptor_of_the_same_file():
    kept.append(os.open("/dev/zero", os.O_RDONLY))

def test_socket():
    kept.append(socket.socket())

def test_zmq():
    context = zmq.Context()
    kept.append((context, context.socket(zmq.PAIR)))

def test_socket_file():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(tempfile.gettempdir() + "/headrace-left.sock")

def test_session_folder():
    tempfile.mkdtemp(prefix="headrace-session-")

def test_shared_memory():
    open(os.environ["SHM_FILE"], "w").close()
"""

#: test above -> what its report names
NAMED = {
    "test_thread": "thread 'forgotten' (daemon)",
    "test_child": "process * (cat, child of *) cat",
    "test_zombie": "process * zombie, child of *",
    "test_orphan": "process * (cat, child of *) cat",
    "test_descriptor": "file descriptor of /dev/zero",
    "test_second_descriptor_of_the_same_file": "file descriptor of /dev/zero",
    "test_socket": "file descriptor of socket:*",
    "test_zmq": "file descriptor of anon_inode:[[]eventpoll[]]",
    "test_socket_file": "file */headrace-left.sock",
    "test_session_folder": "file */headrace-session-*",
    "test_shared_memory": "file /dev/shm/headrace-leak-check-*",
}


def test_every_kind_of_leak_fails_its_test_and_is_named(run, monkeypatch):
    path = Path(f"/dev/shm/headrace-leak-check-{os.getpid()}")
    monkeypatch.setenv("SHM_FILE", str(path))
    try:
        result = run(LEAKS)
    finally:
        path.unlink(missing_ok=True)
    result.assert_outcomes(passed=len(NAMED), errors=len(NAMED))
    for test, name in NAMED.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of {test} *", "this test left behind:", f"  {name}"])


CLEAN = f"""
import subprocess, threading
import pytest
from hypothesis import given, settings, strategies as st

def test_goes_away_within_the_settling_time():
    threading.Timer(0.1, lambda: None).start()

@settings(database=None, max_examples=5)
@given(st.integers())
def test_property(n):
    assert n == n

def resource():
    child = {CHILD}
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, daemon=True)
    thread.start()
    yield
    gate.set()
    thread.join()
    child.stdin.close()
    child.wait()

def worlds(scope):
    def world():
        yield from resource()
    return pytest.fixture(scope=scope)(world)

session_world, package_world, module_world, class_world, function_world = map(worlds, ("session", "package", "module", "class", "function"))
late_session_world = worlds("session")

def test_first(session_world, function_world): pass
def test_later_and_wider(module_world, package_world): pass
class TestClass:
    def test_class(self, class_world, session_world): pass
    def test_asked_for_inside(self, request): request.getfixturevalue("late_session_world")
    def test_after(self, session_world, module_world, function_world): pass
"""


def test_what_is_cleaned_up_is_no_leak_in_any_scope(run):
    run(CLEAN).assert_outcomes(passed=7)


@pytest.mark.parametrize("scope", ["session", "module"])
def test_a_shared_fixture_that_leaks_is_found_when_its_scope_ends(scope, run):
    result = run(f"""
        import subprocess
        import pytest
        @pytest.fixture(scope={scope!r})
        def world():
            child = {CHILD}
            yield child
        def test_one(world): pass
        def test_two(world): pass
        """)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the fixtures of this {scope} left behind:*", "*process * (cat, child of *) cat*"])
