"""The session folder (invariant 5): made and locked against any sweeper, removed with all that lies in it."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.executor import session
from headrace.executor.session import LOCK_NAME, LOCKLESS_AGE, Session, sweep


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


def left_by_the_dead(base: Path, name: str) -> Path:
    """A folder with a lock that nobody holds."""
    folder = base / f"headrace-{os.getuid()}-{name}"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "segment").touch()
    (folder / LOCK_NAME).touch()
    return folder


def test_it_is_ones_own_and_goes_with_all_that_lies_in_it():
    own = Session()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700 and locked(own.path)
    (own.path / "deep").mkdir()
    (own.path / "deep" / "segment").touch()
    own.remove()
    assert not own.path.exists()
    own.remove()


def test_several_live_side_by_side(base):
    first, second = Session(), Session()
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
    living = Session()
    own = Session()
    assert not dead.exists() and living.path.exists() and all(other.exists() for other in others)
    living.remove()
    own.remove()


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (LOCKLESS_AGE + 60, False)])
def test_a_folder_without_a_lock_is_left_alone_while_it_may_be_in_the_making(age, stays, base):
    folder = base / f"headrace-{os.getuid()}-lockless"
    folder.mkdir()
    made = folder.stat().st_mtime - age
    os.utime(folder, (made, made))
    sweep(base)
    assert folder.exists() is stays


def test_a_link_to_a_folder_is_not_followed(base, tmp_path_factory):
    target = left_by_the_dead(tmp_path_factory.mktemp("elsewhere"), "target")
    (base / f"headrace-{os.getuid()}-link").symlink_to(target)
    sweep(base)
    assert (target / "deep" / "segment").exists()


@pytest.mark.parametrize("moment", ["before the lock", "while the sweeper holds it"])
def test_a_sweeper_that_comes_between_making_and_locking_gets_a_folder_and_we_another(moment, base, monkeypatch):
    """The one interleaving in which a sweeper can hold the lock of a folder whose owner lives."""
    flock, first = fcntl.flock, iter([True])
    held: list[int] = []

    def flock_after_sweep(lock: int, operation: int) -> None:
        if next(first, False):
            folder = Path(os.readlink(f"/proc/self/fd/{lock}")).parent
            if moment == "before the lock":
                sweep(base)
                assert not folder.exists()
            else:
                held.append(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC))
                flock(held[0], fcntl.LOCK_EX)
        flock(lock, operation)

    monkeypatch.setattr(session.fcntl, "flock", flock_after_sweep)
    own = Session()
    assert own.path.exists() and locked(own.path)
    for lock in held:
        os.close(lock)
    own.remove()


def test_many_at_once_all_get_one(base):
    for name in range(20):
        left_by_the_dead(base, str(name))
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: Session(), range(40)))
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
