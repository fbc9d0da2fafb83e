"""``python -m headrace.bench.boundary.baseline.worker``: the echo engine behind the common design."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import zmq

from headrace.bench.boundary.baseline.wire import Request, Response, SignedSocket
from headrace.bench.boundary.children import serve
from headrace.config import EngineConfig
from headrace.engine.base import EngineRequest
from headrace.engine.echo import EchoEngine, EchoRunner


def run(config: dict[str, Any], requests: str, results: str, key: str) -> int:
    """The engine loop, until None comes instead of a request: receive, step, reply; how many steps there were."""
    settings = msgspec.convert(config, EngineConfig)
    runner = EchoRunner(settings.echo, 0, lambda stage, done, total: None)
    engine = EchoEngine(settings, runner, lambda plan: None)
    context: zmq.Context[Any] = zmq.Context()
    incoming, outgoing = (SignedSocket(context, kind, bytes.fromhex(key)) for kind in (zmq.PULL, zmq.PUSH))
    incoming.socket.connect(requests)
    outgoing.socket.connect(results)
    outgoing.send(None)  # ready
    try:
        return _loop(engine, incoming, outgoing)
    finally:
        # Its last words must arrive; who reads them is there, or we die with it.
        outgoing.socket.close(linger=1000)
        incoming.socket.close()
        context.term()


def _loop(engine: EchoEngine, incoming: SignedSocket, outgoing: SignedSocket) -> int:
    steps = 0
    while True:
        # Waits only when there is nothing to run.
        while not engine.has_work or incoming.socket.poll(0):
            request: Request | None = incoming.recv()
            if request is None:
                outgoing.send(None)
                return steps
            prompt = np.array(request.prompt_token_ids, dtype=np.int32)
            engine.submit(EngineRequest(request.request_id, prompt, request.params, request.max_tokens, 0))
        outputs, start = engine.step(), 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            outgoing.send(Response(request_id, outputs.token_ids[start : start + count], finish))
            start += count
        steps += 1


if __name__ == "__main__":
    serve({"run": run})
