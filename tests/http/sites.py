"""A service on a real socket for the tests of this folder, and clients of it that hide nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from typing import Any, NamedTuple

from headrace import LLM
from headrace.config import EchoConfig
from headrace.serve.assembly import make_service
from headrace.serve.run import listen
from headrace.serve.service import CONTROL_THREADS, SLOW_THREADS, DrainReport, Service
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings

#: seconds that anything in these tests may take at most on a busy machine; nothing waits for them to pass
LONG = 30.0

#: the echo engine with its tokenizer, so that texts are answered with texts
MODEL = "smollm2-135m"
VOCABULARY = 49152

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """A48: of an error its inside, which has exactly these fields."""
        body = self.json
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
        assert self.headers["content-type"].startswith("application/json")
        return body["error"]


class Event(NamedTuple):
    """``data``: None is [DONE]."""

    id: str | None
    data: Any


class Site:
    """A running service. ``llm`` belongs to whoever made it."""

    def __init__(self, llm: LLM, settings: ServeSettings | None = None, tls: Any = None, siblings: Siblings | None = None) -> None:
        self._siblings = siblings
        self._ready: Future[Service] = Future()
        self._settings = settings or ServeSettings()
        self._llm = llm
        self._tls = tls
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="site")

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        service = make_service(self._llm, self._settings, self._siblings)
        try:
            await service.start(self._listener, tls=self._tls)
            # All threads now, so that none that comes with a test's request is taken for a leak of the test.
            for pool, size in (
                (service._threads, self._settings.threads),
                (service._control_threads, CONTROL_THREADS),
                (service._slow_threads, SLOW_THREADS),
            ):
                barrier = threading.Barrier(size + 1)
                for _ in range(size):
                    pool.submit(barrier.wait, LONG)
                barrier.wait(LONG)
            self._ready.set_result(service)
            await self._end.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise
        finally:
            await service.stop()

    def start(self) -> None:
        self._thread.start()
        self.service = self._ready.result(LONG)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        # A fixture is kept until after the checks for leaks; what it has held is not.
        del self.service, self._llm, self._ready

    def in_loop(self, call: Callable[[], Any]) -> Any:
        """Its result, from the service's event loop."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONG)

    def drain(self, timeout: float) -> Future[DrainReport]:
        return asyncio.run_coroutine_threadsafe(self.service.drain(timeout), self.loop)

    # --- clients

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own; ``body``: bytes, or what becomes JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.call("POST", path, body, headers)

    def events(self, path: str, body: Any, headers: dict[str, str] | None = None) -> list[Event]:
        """All of a stream."""
        answer = self.post(path, body, headers)
        assert answer.status == 200, answer
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.data)

    def metric(self, name: str) -> float:
        """By its whole name with labels."""
        for line in self.get("/metrics").data.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def connect(self, path: str, body: Any, headers: dict[str, str] | None = None) -> socket.socket:
        """Send a request; what comes back is the caller's."""
        connection = socket.create_connection(("127.0.0.1", self.port), LONG)
        connection.sendall(request_bytes(path, body, headers))
        return connection


def request_bytes(path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_until(connection: socket.socket, enough: Callable[[bytes], bool]) -> bytes:
    """What has come when it is enough, or when the other side has ended."""
    data = b""
    while not enough(data) and (more := connection.recv(65536)):
        data += more
    return data


def parse_events(data: bytes) -> list[Event]:
    """Comments are left out; every event is one line of data, perhaps behind one with its id."""
    events = []
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name = None
        if lines[0].startswith("id: "):
            name = lines.pop(0).removeprefix("id: ")
        (line,) = lines
        assert line.startswith("data: "), line
        text = line.removeprefix("data: ")
        events.append(Event(name, None if text == "[DONE]" else json.loads(text)))
    return events


def chat(content: str = "Tell me of rivers.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def eventually(condition: Callable[[], bool], timeout: float = LONG) -> bool:
    """For what no event tells: whether it becomes true."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@contextlib.contextmanager
def echo_llm(**options: Any) -> Iterator[LLM]:
    """The echo engine with SmolLM2's tokenizer; ``step_time`` and so on are its settings, the others those of ``LLM``."""
    echo = {name: options.pop(name) for name in list(options) if name in EchoConfig.__struct_fields__}
    with LLM(MODEL, runner="echo", echo=EchoConfig(**{"vocab_size": VOCABULARY, **echo}), **options) as llm:
        llm.executor.ping(LONG)
        llm.generate([5], use_tqdm=False)
        yield llm


@contextlib.contextmanager
def site(settings: ServeSettings | None = None, tls: Any = None, **options: Any) -> Iterator[Site]:
    """A service with a world of its own."""
    with echo_llm(**options) as llm:
        made = Site(llm, settings, tls)
        made.start()
        try:
            yield made
        finally:
            made.stop()
            del llm


def body_of(data: bytes) -> bytes:
    """Of a chunked answer, perhaps cut off in the middle."""
    rest, out = data.partition(b"\r\n\r\n")[2], b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        out += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return out


@contextlib.contextmanager
def attached_site(owner: LLM, settings: ServeSettings | None = None) -> Iterator[Site]:
    """Another frontend of the world of ``owner``."""
    with LLM.attach(owner.attach_handle, start_timeout=LONG) as llm:
        made = Site(llm, settings)
        made.start()
        try:
            yield made
        finally:
            made.stop()
