"""Run as a script by the janitor of a world whose ranks run in the slots of the user's mpirun, in the place that mpiexec has otherwise:
``slotexec.py LISTENER SIZE ORDER``.

LISTENER is the descriptor of the socket on which the slots connect (``slot.py``), ORDER in JSON what each is to start; the workers write to
our standard output. It ends when all workers have ended, or with the first that fails, or at SIGTERM; its own end ends them. It exits as
mpiexec does: with the code of the first worker that failed, or 128 plus the signal that killed it.

Only the standard library may be imported: it runs with ``python -I -S``, and every start waits for it.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time

PACKET = 1 << 16

#: seconds in which slots end their workers when the world is over
LEAVING = 2.0

#: exit code when a slot ends without a word, so that somebody must have killed it
EXIT_SLOT_KILLED = 128 + signal.SIGKILL
EXIT_TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Run one world to its end."""
    terminated, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    listener = socket.socket(fileno=int(sys.argv[1]))
    # The slot of rank 0, which listens too, may accept one that we were told of.
    listener.setblocking(False)
    world = World(listener, int(sys.argv[2]), sys.argv[3].encode())
    try:
        return world.run(terminated)
    finally:
        world.end()


class World:
    """The slots that have come, and what has become of their workers."""

    def __init__(self, listener: socket.socket, size: int, order: bytes) -> None:
        self._listener = listener
        self._size = size
        self._order = order
        # By descriptor: those that are connected, and what rank each has said to be of.
        self._slots: dict[int, socket.socket] = {}
        self._ranks: dict[int, int] = {}
        # How the workers have ended, by rank.
        self._codes: dict[int, int] = {}

    def run(self, terminated: int) -> int:
        """The exit code. ``terminated``: a descriptor that is readable after SIGTERM."""
        while len(self._codes) < self._size:
            ready = wait(None, terminated, self._listener.fileno(), *self._slots)
            if terminated in ready:
                return EXIT_TERMINATED
            if self._listener.fileno() in ready:
                self._accept()
            for fd in [fd for fd in self._slots if fd in ready]:
                self._read(fd)
            if failed := [code for code in self._codes.values() if code]:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
        return 0

    def end(self) -> None:
        """End all workers, and wait for that. A slot closes its connection after its worker has ended."""
        for connection in self._slots.values():
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                # It has closed it already, which its descriptor tells below.
                continue
        deadline = time.monotonic() + LEAVING
        while self._slots and (left := deadline - time.monotonic()) > 0:
            for fd in wait(left, *self._slots):
                if not receive(self._slots[fd]):
                    self._slots.pop(fd).close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.getuid():
            self._slots[connection.fileno()] = connection
        else:
            connection.close()

    def _read(self, fd: int) -> None:
        connection, rank = self._slots[fd], self._ranks.get(fd)
        data = receive(connection)
        if not data:
            if rank is not None and rank not in self._codes:
                print(f"the process that mpirun has started for rank {rank} has ended", flush=True)
                self._codes[rank] = EXIT_SLOT_KILLED
            self._slots.pop(fd).close()
            self._ranks.pop(fd, None)
            return
        message = json.loads(data)
        if rank is not None:
            self._codes[rank] = int(message["ended"])
            return
        rank = int(message["rank"])
        # Of two with one number the second is of another headrace under the same mpirun. It is left to wait.
        if rank not in self._ranks.values():
            self._ranks[fd] = rank
            try:
                socket.send_fds(connection, [self._order], [1])
            except ConnectionError:
                # It has just gone, which its descriptor will tell.
                return


def receive(connection: socket.socket) -> bytes:
    """One packet; nothing at its end."""
    try:
        return connection.recv(PACKET)
    except ConnectionError:
        return b""


def wait(timeout: float | None, *fds: int) -> list[int]:
    """Those that are readable, or at their end, after at most so many seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]


if __name__ == "__main__":
    sys.exit(main())
