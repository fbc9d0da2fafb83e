"""Run as a script between the user process and the world: ``janitor.py OWNER_PID FOLDER COMMAND [ARG ...]``.

It is there before the session folder is. Told to by a byte on stdin, it starts COMMAND (mpiexec), passes SIGTERM on to it, kills it at
SIGUSR1, and exits as it exits: with its code, or with 128 plus the signal that killed it. When the owner dies first, by whatever signal and
at whatever moment, it ends the command; when stdin ends without the byte, there is none. In every case it kills what the command left in
its session, and removes the session folder, before it exits: an owner that learns of the end by that exit may itself be dying, and then
nobody else would. When the janitor is killed, the kernel kills the command, and the owner the rest.

Its parent has blocked both signals for it, or one that comes while Python starts would end it. It only waits, so it costs nothing but its
memory; only a few modules of the standard library may be imported here, since it runs with ``python -I -S`` and every start waits for it.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG = 1

#: seconds that an orphaned command gets to end its ranks before it is killed
GRACE = 0.3

#: signal to the janitor -> signal to the command
PASSED_ON: dict[int, int] = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGKILL}

#: exit code when the owner was dead before the command was started, or gave up, or died while it ran
EXIT_ORPHANED = 75


def main() -> int:
    """Serve one command to its end."""
    owner_pid, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # Until the child is there signals stay pending, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    owner = _wait_for_order(owner_pid)
    if owner is None:
        _remove(folder)
        return EXIT_ORPHANED
    janitor = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, janitor)
    child_fd = os.pidfd_open(child)
    for received in PASSED_ON:
        signal.signal(received, lambda number, frame: _send(child_fd, PASSED_ON[number]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    # The death of the owner decides, also when both are seen at once: ranks that notice it by themselves may end the command before us.
    orphaned = owner in _wait(None, owner, child_fd)
    if orphaned:
        _send(child_fd, signal.SIGTERM)
        if not _wait(GRACE, child_fd):
            _send(child_fd, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_session(janitor)
    _remove(folder)
    if orphaned:
        return EXIT_ORPHANED
    return code if code >= 0 else 128 - code


def _wait_for_order(owner_pid: int) -> "int | None":
    """A descriptor of the owner once it wants the command started; None when it has died, or wants nothing any more."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return None
    # Looked at after the descriptor was opened: while the owner is our parent, its number cannot have gone to a stranger.
    if os.getppid() != owner_pid or owner in _wait(None, owner, 0) or not os.read(0, 1):
        return None
    return owner


def _become(command: list[str], janitor: int) -> None:
    """In the child: be ended with the janitor, and turn into the command."""
    # SIGKILL, for a command that is stopped would never get to SIGTERM. Its ranks end with it, and what it leaves lies in the folder.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # Had the janitor died before the call above, no signal would come.
    if os.getppid() == janitor:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.execv(command[0], command)
    os._exit(EXIT_ORPHANED)


def end_session(leader: int) -> None:
    """SIGKILL for the others in the session that ``leader``, which lives or was not collected yet, has made; so its number is its own.

    Ranks end by themselves with what has started them, but one that is just starting does not look yet, and on a busy machine not for long.
    """
    seen = {leader, os.getpid()}
    while found := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in seen and _in_session(pid, leader)]:
        for pid in found:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            # Looked at again, for the number may have gone to another before the descriptor was opened.
            if _in_session(pid, leader):
                _send(fd, signal.SIGKILL)
            os.close(fd)
        seen.update(found)


def _in_session(pid: int, leader: int) -> bool:
    try:
        return os.getsid(pid) == leader
    except ProcessLookupError:
        return False


def _send(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        # It has ended and been collected: a SIGTERM that comes to us after that has nobody to go to.
        return


def _wait(timeout: "float | None", *fds: int) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]


def _remove(folder: str) -> None:
    # Ranks that die a moment after mpiexec may still have added a file, and a folder that is not empty stays.
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
