"""User processes that share a world, as children of a test: the owner of one, and those that attach to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.worlds import LONG

ROOT = Path(__file__).parents[2]

#: attaches, answers each line {"prompts", "max_tokens"} on stdin with a line when every request has its first token, and one at the end
FRONTEND = """
import json, sys
from headrace.executor.proxy import GenerationExecutorProxy
from headrace.executor.request import GenerationRequest
from headrace.params import SamplingParams

def say(**what):
    print(json.dumps(what), flush=True)

executor = GenerationExecutorProxy.attach(sys.argv[1], start_timeout=30)
executor.start()
say(lane=executor._launcher.lane)
for line in sys.stdin:
    order = json.loads(line)
    params = SamplingParams(max_tokens=order["max_tokens"])
    handles = executor.submit([GenerationRequest(prompt, params, True) for prompt in order["prompts"]])
    pieces = [list(next(handle).outputs[0].token_ids_diff) for handle in handles]
    say(begun=len(pieces))
    for tokens, handle in zip(pieces, handles):
        for output in handle:
            tokens += output.outputs[0].token_ids_diff
    say(tokens=pieces, counters=executor.counters())
executor.close()
say(closed=True)
"""

#: owns a world, says where it is, and lives until its input ends
OWNER = """
import json, sys
from tests.integration.worlds import folder, pids, world

with world(2, step_time=0.002) as executor:
    handle = executor.attach_handle
    janitor = executor._dispatcher.hub._janitor.pid
    print(json.dumps({"handle": str(handle), "folder": str(folder(executor)), "pids": {**pids(executor), "janitor2": janitor}}), flush=True)
    sys.stdin.read()
"""


class Child:
    """A process that speaks JSON, a line each."""

    def __init__(self, script: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            cwd=ROOT,
        )
        self.pid = self.process.pid
        self._rest = b""

    def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout: float = LONG) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + timeout
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0 and poll.poll(left * 1000), f"process {self.pid} says nothing"
            piece = os.read(fd, 65536)
            assert piece, f"process {self.pid} has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Close its input and wait; its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(LONG)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait(LONG)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def frontends(handle: Path, number: int) -> Iterator[list[Child]]:
    """So many processes that have attached."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(contextlib.closing(Child(FRONTEND, str(handle)))) for _ in range(number)]
        lanes = [child.hear()["lane"] for child in children]
        assert len(set(lanes)) == number
        yield children
