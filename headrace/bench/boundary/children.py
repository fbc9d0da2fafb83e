"""Processes that measure for us: one question, one answer, each a line of JSON on the child's standard input and output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from headrace.errors import HeadraceError
from headrace.worker.guard import guard

#: seconds that one answer may take; loading a model is the longest
PATIENCE = 180.0
#: seconds from the end of its input until a child is killed
END_PATIENCE = 10.0

Handlers = Mapping[str, Callable[..., Any]]


class ChildError(HeadraceError):
    """A measuring process failed, or did not answer in time."""


class Child:
    """``python -m module``, which runs ``serve``. Its standard error is ours, and it dies with us."""

    def __init__(self, module: str) -> None:
        # A session of its own: Ctrl-C reaches us alone, and we end it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            start_new_session=True,
        )
        self._module = module
        self._received = b""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def has_answered(self) -> bool:
        """Whether ``answer`` would not wait."""
        assert self._process.stdout is not None
        return b"\n" in self._received or bool(select.select([self._process.stdout], [], [], 0.0)[0])

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have it call one of its handlers; what that returned. Raises ChildError: it raised, has ended, or was silent for too long."""
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what: str, **arguments: Any) -> None:
        """As ``ask``, without waiting: ``answer`` must follow."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(f"{self._module} has ended with code {self._process.wait()}") from None

    def answer(self) -> Any:
        """What the handler returned. Raises as ``ask``."""
        kind, value = json.loads(self._line(time.monotonic() + PATIENCE))
        if kind == "error":
            raise ChildError(f"{self._module}: {value}")
        return value

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChildError(f"{self._module} has not answered within {PATIENCE:.0f} s")
                data = os.read(fd, 1 << 16)
                if not data:
                    raise ChildError(f"{self._module} has ended with code {self._process.wait()}")
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """End its input and wait until it has ended; one that does not end is killed."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a question that was not written any more: it has ended
            process.stdin.close()
        try:
            process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(handlers: Handlers) -> None:
    """In the child: answer questions until the input ends. What is printed meanwhile goes to standard error."""
    guard()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = ["ok", handlers[what](**arguments)]
        except Exception as error:
            answer = ["error", f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=answers, flush=True)
