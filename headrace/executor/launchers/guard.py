"""Run as a script: ``guard.py PARENT_PID COMMAND [ARG ...]`` becomes COMMAND, which is sent SIGTERM when its parent dies.

A script, because the alternative, code between fork and exec in a process with threads, can deadlock. PR_SET_PDEATHSIG survives execve. The
kernel fires it when the *thread* that forked us ends, so the launcher starts us from a thread that lives as long as the world. Only the
standard library may be imported here: the script runs with ``python -I -S``.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, make sure that it is not too late to ask, become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # A parent that died before the call above will never be reported; then we have been given to another one.
    if os.getppid() != parent:
        sys.exit("the process that started this world is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
