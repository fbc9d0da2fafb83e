"""The session folder (invariant 5): made and locked against any sweeper, removed with all that lies in it."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.executor import session
from headrace.executor.session import LOCK_NAME, UNLOCKED_AGE, Session, sweep


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(session.VARIABLE, str(tmp_path))
    return tmp_path


def locked(folder: Path) -> bool:
    with open(folder / LOCK_NAME) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def made() -> Session:
    session = Session()
    assert not session.path.exists()
    session.make()
    return session


def left_by_the_dead(base: Path, name: str) -> Path:
    """A folder with a lock that nobody holds."""
    folder = base / f"headrace-{os.getuid()}-{name}"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "segment").touch()
    (folder / LOCK_NAME).write_text("locked\n")
    return folder


def test_it_is_ones_own_and_goes_with_all_that_lies_in_it():
    own = made()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700 and locked(own.path)
    (own.path / "deep").mkdir()
    (own.path / "deep" / "segment").touch()
    own.remove()
    assert not own.path.exists()
    own.remove()


def test_several_live_side_by_side(base):
    first, second = made(), made()
    assert first.path != second.path and locked(first.path) and locked(second.path)
    first.remove()
    assert second.path.exists()
    second.remove()
    assert list(base.iterdir()) == []


def test_a_start_removes_what_the_dead_have_left_and_nothing_else(base):
    dead = left_by_the_dead(base, "dead")
    others = [base / "headrace-99999-other-user", base / "something", base / f"headrace-{os.getuid()}"]
    for other in others:
        other.mkdir()
        (other / LOCK_NAME).touch()
    living = made()
    own = made()
    assert not dead.exists() and living.path.exists() and all(other.exists() for other in others)
    living.remove()
    own.remove()


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (UNLOCKED_AGE + 60, False)])
@pytest.mark.parametrize("lock", [False, True], ids=["without a lock", "with a lock that was never taken"])
def test_a_folder_is_left_alone_while_it_may_be_in_the_making(lock, age, stays, base):
    folder = base / f"headrace-{os.getuid()}-new"
    folder.mkdir()
    if lock:
        (folder / LOCK_NAME).touch()
    made = folder.stat().st_mtime - age
    os.utime(folder, (made, made))
    sweep(base)
    assert folder.exists() is stays


def test_a_folder_that_has_always_been_in_the_making_stays_while_it_is_locked(base):
    """Its owner may be stopped between two lines, and lives."""
    folder = base / f"headrace-{os.getuid()}-stopped"
    folder.mkdir()
    lock = os.open(folder / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.utime(folder, (0, 0))
    sweep(base)
    assert folder.exists()
    os.close(lock)
    sweep(base)
    assert not folder.exists()


def test_a_link_to_a_folder_is_not_followed(base, tmp_path_factory):
    target = left_by_the_dead(tmp_path_factory.mktemp("elsewhere"), "target")
    (base / f"headrace-{os.getuid()}-link").symlink_to(target)
    sweep(base)
    assert (target / "deep" / "segment").exists()


def test_a_sweeper_that_comes_in_the_middle_of_the_making_does_not_disturb(base, monkeypatch):
    """Before and after each step."""
    sweeping, swept = False, 0

    def between(step):
        def call(*arguments):
            nonlocal sweeping, swept
            if sweeping:
                return step(*arguments)
            sweeping = True
            sweep(base)
            result = step(*arguments)
            sweep(base)
            sweeping = False
            swept += 1
            return result

        return call

    for module, name in ((os, "mkdir"), (os, "open"), (session.fcntl, "flock"), (os, "write")):
        monkeypatch.setattr(module, name, between(getattr(module, name)))
    own = made()
    monkeypatch.undo()
    assert swept == 4 and own.path.exists() and locked(own.path)
    own.remove()


def test_many_at_once_all_get_one(base):
    for name in range(20):
        left_by_the_dead(base, str(name))
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: made(), range(40)))
    assert {own.path for own in sessions} == set(base.iterdir())
    assert len({own.path for own in sessions}) == 40
    for own in sessions:
        own.remove()
    assert list(base.iterdir()) == []


def test_the_base_is_memory_where_there_is_some(monkeypatch):
    monkeypatch.delenv(session.VARIABLE)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert session._base_folder() == Path("/dev/shm")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert session._base_folder() != Path("/dev/shm") and session._base_folder().is_dir()
