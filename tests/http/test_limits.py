"""Keys, origins, limits, overload, TLS: what is refused, how, and that what goes on beside it is served (A37, A48, A50)."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serve.bodies import AT_ONCE
from headrace.serve.run import tls_context
from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, COMPLETIONS, LONG, Site, chat, eventually, parse_events, read_until, site

KEYS = {"Authorization": "Bearer second"}
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Site]:
    settings = ServeSettings(
        model_names=("river", "stream"),
        api_keys=("first", "second"),
        admin_key="boss",
        cors_origins=("https://page.example",),
        max_body_bytes=4096,
        max_prompt_chars=500,
        body_timeout=0.5,
    )
    with site(settings) as made:
        yield made


@pytest.mark.parametrize("key", [None, "Bearer third", "Bearer", "Basic second", "Bearer seconds", "Bearer \xe9"])
def test_without_a_key_there_is_no_answer(guarded: Site, key: str | None):
    """A48: 401, on every route that is not open."""
    headers = {} if key is None else {"Authorization": key}
    for method, path in (("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/server_info")):
        answer = guarded.call(method, path, chat() if method == "POST" else None, headers)
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer first"}, KEYS, ADMIN, {"Authorization": "bearer second"}])
def test_each_key_opens(guarded: Site, headers: dict):
    assert guarded.post(CHAT, chat(), headers).status == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics", "/version", "/docs", "/openapi.json"])
def test_what_is_open_needs_no_key(guarded: Site, path: str):
    """A50: probes and scrapers have none."""
    assert guarded.get(path).status == 200


def test_a_page_of_another_origin(guarded: Site):
    """CORS: the origin that was allowed may call and see; no other."""
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = guarded.call("OPTIONS", CHAT, None, asked)
    assert answer.status == 204 and answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "POST" in answer.headers["access-control-allow-methods"] and "Authorization" in answer.headers["access-control-allow-headers"]
    for body in (chat(), chat(stream=True), {}):
        answer = guarded.post(CHAT, body, {**KEYS, "Origin": "https://page.example"})
        assert answer.headers["access-control-allow-origin"] == "https://page.example" and answer.headers["vary"] == "Origin"
    stranger = guarded.post(CHAT, chat(), {**KEYS, "Origin": "https://other.example"})
    assert stranger.status == 200 and "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("name", ["river", "stream"])
def test_names_that_were_given_to_the_model(guarded: Site, name: str):
    assert guarded.post(CHAT, chat(model=name), KEYS).json["model"] == name
    assert guarded.post(CHAT, chat(), KEYS).json["model"] == "river"
    assert guarded.post(CHAT, chat(model="echo"), KEYS).error["code"] == "model_not_found"


def test_a_body_that_is_too_large(guarded: Site):
    """A48: 413, by its length before it is read, and by what has come where the length is not told."""
    answer = guarded.post(CHAT, chat("x" * 5000), KEYS)
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    connection = socket.create_connection(("127.0.0.1", guarded.port), LONG)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode() + b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n")
    assert read_until(connection, lambda data: b"}}" in data).startswith(b"HTTP/1.1 413")
    connection.close()


def test_a_body_that_does_not_come(guarded: Site):
    """A48: 408."""
    connection = socket.create_connection(("127.0.0.1", guarded.port), LONG)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert read_until(connection, lambda data: b"}}" in data).startswith(b"HTTP/1.1 408")
    connection.close()


def test_bodies_at_once_are_bounded(guarded: Site, monkeypatch: pytest.MonkeyPatch):
    """A48, invariant 8: by the sizes that they say they have; who sends small ones is served."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first\r\nContent-Length: 4096\r\n\r\n".encode()
    monkeypatch.setattr(guarded.service.bodies, "_timeout", LONG)
    connections = [socket.create_connection(("127.0.0.1", guarded.port), LONG) for _ in range(AT_ONCE)]
    for connection in connections:
        connection.sendall(head)
    assert eventually(lambda: guarded.in_loop(lambda: guarded.service.bodies.reserved) == AT_ONCE * 4096)
    refused = guarded.post(CHAT, chat(), KEYS)
    for connection in connections:
        connection.close()
    assert refused.status == 503 and refused.error["code"] == "queue_full" and refused.headers["retry-after"]
    assert eventually(lambda: guarded.in_loop(lambda: guarded.service.bodies.reserved) == 0)
    assert guarded.post(CHAT, chat(), KEYS).status == 200


def test_a_compressed_body(guarded: Site):
    """Is read; one that says so and is not is refused; one that becomes too large too."""
    import gzip

    packed = {**KEYS, "Content-Encoding": "gzip"}
    assert guarded.call("POST", CHAT, gzip.compress(json.dumps(chat()).encode()), packed).status == 200
    assert guarded.call("POST", CHAT, b"no gzip at all", packed).status == 400
    assert guarded.call("POST", CHAT, gzip.compress(json.dumps(chat("x" * 100_000)).encode()), packed).status == 413


def test_a_prompt_that_is_too_long(guarded: Site):
    """A48: before it is tokenized."""
    answer = guarded.post(COMPLETIONS, {"prompt": "x" * 501}, KEYS)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded" and "501" in answer.error["message"]


def test_beyond_the_queue_there_is_503_with_a_hint():
    """A37, A48, A50: n counts n; health and metrics are answered meanwhile; what was admitted is served."""
    with site(max_queued_requests=4, max_batch_size=1, step_time=0.01) as made:
        running = made.connect(CHAT, chat(stream=True, max_tokens=4000, temperature=0))
        read_until(running, lambda data: b"data: " in data)
        waiting = made.connect(CHAT, chat(n=3, max_tokens=2))
        assert eventually(lambda: made.service.llm.executor.counters()["waiting"] == 3)
        for body in (chat(n=2), chat(n=2, stream=True)):
            refused = made.post(CHAT, body)
            assert refused.status == 503 and refused.error["code"] == "queue_full" and int(refused.headers["retry-after"]) >= 1
        assert made.post(CHAT, chat(n=5)).status == 400  # it never fits
        assert made.get("/health/ready").status == made.get("/health/live").status == 200
        assert made.metric("headrace_requests_refused_total") == 4
        running.close()
        data = read_until(waiting, lambda data: data.endswith(b"}}"))
        waiting.close()
        assert data.startswith(b"HTTP/1.1 200") and data.count(b'"finish_reason":"length"') == 3


def test_a_deadline_ends_a_request(guarded: Site):
    """A36: of the request, and of the service where it says none."""
    with site(ServeSettings(request_timeout=0.2), step_time=0.005) as made:
        for body in (chat(max_tokens=4000), chat(max_tokens=4000, timeout=0.1)):
            assert made.post(CHAT, body).json["choices"][0]["finish_reason"] == "timeout"
        events = made.events(CHAT, chat(max_tokens=4000, stream=True))
        assert events[-2].data["choices"][0]["finish_reason"] == "timeout" and events[-1].data is None


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of localhost, by itself, with its key in the same file."""
    folder = tmp_path_factory.mktemp("tls")
    both = folder / "both.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        ["openssl", *options.split(), "-keyout", both, "-out", folder / "cert.pem"], check=True, capture_output=True, timeout=LONG
    )
    both.write_bytes(both.read_bytes() + (folder / "cert.pem").read_bytes())
    return both


def test_over_tls(certificate: Path):
    with site(tls=tls_context(certificate, None)) as made:
        client = ssl.create_default_context(cafile=certificate)
        request = urllib.request.Request(
            f"https://127.0.0.1:{made.port}{CHAT}", json.dumps(chat(stream=True)).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONG, context=client) as response:
            assert parse_events(response.read())[-1].data is None
        # Plain HTTP gets no answer and harms nobody.
        with pytest.raises(OSError):
            made.get("/health")
        # A49 over TLS.
        connection = client.wrap_socket(socket.create_connection(("127.0.0.1", made.port), LONG), server_hostname="localhost")
        data = json.dumps(chat(max_tokens=8000, stream=True)).encode()
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        read_until(connection, lambda data: b"data: " in data)
        connection.close()
        assert eventually(lambda: made.service.llm.executor.counters()["live"] == 0)


def test_a_model_without_a_tokenizer_takes_ids():
    """A48: what needs texts is refused with what to do."""
    from headrace import LLM

    with LLM("echo") as llm:
        llm.generate([5], use_tqdm=False)
        made = Site(llm)
        made.start()
        try:
            answer = made.post(COMPLETIONS, {"prompt": [5, 7], "max_tokens": 3, "temperature": 0, "return_token_ids": True, "logprobs": 1})
            # Nor has this one an admin key, so nobody may use what needs it.
            assert made.post("/abort", {"abort_all": True}, ADMIN).status == 401
            (choice,) = answer.json["choices"]
            assert choice["text"] == "" and choice["token_ids"] == [6, 8, 7] and choice["logprobs"]["tokens"][0] == "token_id:6"
            for path, body in (
                (CHAT, chat()),
                (COMPLETIONS, {"prompt": "x"}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [5]}),
            ):
                assert made.post(path, body).error["code"] == "unsupported"
        finally:
            made.stop()
            del llm


def test_connections_are_kept_and_pipelined(guarded: Site):
    """One connection, three requests sent at once, three answers in their order."""
    connection = socket.create_connection(("127.0.0.1", guarded.port), LONG)
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    data = read_until(connection, lambda data: False)
    connection.close()
    assert data.count(b"HTTP/1.1 200") == 2 and data.count(b"HTTP/1.1 404") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"nothing that is HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nx",
    ],
)
def test_what_is_no_http(guarded: Site, sent: bytes):
    """A30, A48: also before there is a request; nothing of the service is shown, and it goes on."""
    connection = socket.create_connection(("127.0.0.1", guarded.port), LONG)
    connection.sendall(sent)
    data = read_until(connection, lambda data: b"}}" in data)
    connection.close()
    assert data.startswith(b"HTTP/1.") and data.split(b" ")[1] == b"400", data
    body = json.loads(data.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == "invalid_http" and body["error"]["type"] == "invalid_request_error"
    assert guarded.get("/version").status == 200
