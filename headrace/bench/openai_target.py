"""Any server that speaks OpenAI's API over HTTP as a ``Target``: vLLM, llama.cpp, TensorRT-LLM, headrace serve.

Answers are streamed. A chunk counts as an event when it carries text, so that the role a chat begins with is no first token; servers do not
say how many tokens a chunk has, and it counts as one. Totals are the server's own (``usage``) where it gives them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias

import aiohttp
import msgspec
from yarl import URL

from headrace.bench.dataset import Sample
from headrace.bench.target import Answer, RequestFailedError
from headrace.errors import HeadraceError, RequestError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"

#: where a request's number of output tokens is from
CountedBy: TypeAlias = Literal["usage", "tokenizer", "events"]

#: bytes of one line of a stream; one with the logprobs of many tokens has some thousands
MAX_LINE = 1024 * 1024
#: bytes of an error's body that are read
MAX_ERROR = 4096
#: seconds between attempts to reach a server that is not there yet
RETRY = 0.1


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def written(self) -> str:
        """What the model wrote in this chunk."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


class _Stream:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.events = 0
        self.written: list[str] = []
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.done = False


class OpenAITarget:
    """One server and what is asked of it; an async context manager, which holds the connections.

    Args:
        base_url: scheme, host and port, and whatever the server's paths are behind; ``endpoint`` is added to it.
        endpoint: ``COMPLETIONS`` takes texts and ids, ``CHAT`` texts, each as the message of a user.
        model: as the server calls it; None: the first that it lists, which ``ready`` finds out.
        headers: sent with each request, an API key among them.
        extra: merged into the body of each request; a value of None takes a field away.
        ignore_eos, min_tokens: whether these fields, which are not OpenAI's, ask for exactly a sample's output tokens.
        timeout: seconds for one request, from sending to its end.
        count: tokens of a text, where the server gives no ``usage``; None: its chunks are counted.

    Raises:
        RequestError: a URL that is none.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str = COMPLETIONS,
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        min_tokens: bool = False,
        timeout: float = 600.0,
        count: Callable[[str], int] | None = None,
    ) -> None:
        self._base = _base_url(base_url, endpoint)
        self._url = URL(self._base + endpoint)
        self.model = model
        self._chat = endpoint.endswith("/chat/completions")
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        self._extra = dict(extra or {})
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._timeout = timeout
        self._count = count
        self._session: aiohttp.ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Chunk)
        #: requests by what their output tokens were counted by
        self.counted_by: Counter[CountedBy] = Counter()
        #: the first answer to fail with each message, as far as it said anything of itself
        self.details: dict[str, str] = {}

    @property
    def password(self) -> str:
        """That of the URL, which is no matter for a report; empty without one."""
        return self._url.password or ""

    async def __aenter__(self) -> OpenAITarget:
        # A connection for each request: servers close idle ones when they like, llama.cpp's after every stream and without a word, and what
        # is sent on one just then fails without a fault of the answer's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._session is not None
        await self._session.close()

    def body(self, sample: Sample) -> dict[str, Any]:
        """What is posted for it. Raises RequestError for a sample that this endpoint cannot take."""
        body: dict[str, Any] = {"model": self.model}
        if self._chat:
            if sample.prompt is None:
                raise RequestError(f"sample {sample.task_id}: a chat takes a text as `prompt`, and it has `input_ids`; use {COMPLETIONS}")
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt if sample.input_ids is None else sample.input_ids
        body |= {"max_tokens": sample.output_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._min_tokens:
            body["min_tokens"] = sample.output_tokens
        return {name: value for name, value in (body | self._extra).items() if value is not None}

    async def ready(self, timeout: float) -> str:
        """Wait until the server lists its models; the name of the one that is asked for. Raises HeadraceError with what came instead."""
        assert self._session is not None
        url = URL(self._base + MODELS)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                limit = aiohttp.ClientTimeout(total=max(deadline - loop.time(), 5.0))
                async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
                    said = await _read(response, MAX_LINE)
                    if response.status == 200:
                        return self._chosen(said)
                    if response.status in (401, 403):
                        deadline = loop.time()  # no waiting gives the right to ask
                fault = f"HTTP {response.status}: {_message(said)}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                fault = _fault(error, self._timeout)
            if loop.time() + RETRY > deadline:
                raise HeadraceError(f"{url}: {fault}")
            await asyncio.sleep(RETRY)

    def _chosen(self, said: bytes) -> str:
        if self.model is None:
            try:
                self.model = msgspec.json.decode(said, type=_Models).data[0].id
            except (msgspec.DecodeError, IndexError, UnicodeDecodeError):
                raise HeadraceError(f"{self._base}{MODELS} lists no models: {_message(said)}; name one with --model") from None
        return self.model

    async def generate(self, sample: Sample, arrived: Callable[[int], None]) -> Answer:
        """See ``Target``. Messages of failures are few and the same for the same cause, so that they can be counted."""
        assert self._session is not None
        body = msgspec.json.encode(self.body(sample))
        begun = False
        try:
            async with self._session.post(
                self._url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self._failed(f"HTTP {response.status}", _message(await _read(response, MAX_ERROR)))
                begun = True
                return await self._stream(sample, response, arrived)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._failed(_fault(error, self._timeout, begun), str(error)) from None

    async def _stream(self, sample: Sample, response: aiohttp.ClientResponse, arrived: Callable[[int], None]) -> Answer:
        stream = _Stream()
        rest = b""
        # To its very end, also behind [DONE]: only then is it known to have come whole.
        async for piece in response.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            if len(long := max((*lines, rest), key=len)) > MAX_LINE:
                raise self._failed(f"a line of more than {MAX_LINE} bytes", _message(long[:MAX_ERROR]))
            for line in lines:
                self._take(stream, line, arrived)
        self._take(stream, rest, arrived)
        if not stream.done and stream.finish_reason is None:
            raise self._failed("the stream ended before the answer did", f"after {stream.events} events with text")
        output, by = self._output_tokens(stream)
        if not stream.events and output:
            # Tokens without text, as special ones are: when they came shows only now.
            arrived(output)
        self.counted_by[by] += 1
        return Answer(prompt_tokens=self._prompt_tokens(sample, stream.usage), output_tokens=output, finish_reason=stream.finish_reason)

    def _take(self, stream: _Stream, line: bytes, arrived: Callable[[int], None]) -> None:
        if not line.startswith(b"data:"):
            return  # a comment, the name or number of an event, or the end of one
        data = line[5:].strip()
        if data == b"[DONE]":
            stream.done = True
            return
        chunk = self._chunk(data)
        stream.usage = chunk.usage or stream.usage
        for choice in chunk.choices:
            if choice.written or (choice.delta is not None and choice.delta.tool_calls):
                arrived(1)
                stream.events += 1
                stream.written.append(choice.written)
            stream.finish_reason = choice.finish_reason or stream.finish_reason

    def _chunk(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._failed("an event that is no chunk of an answer", f"{error}: {_message(data)}") from None
        if chunk.error is not None:
            raise self._failed("an error in the stream", _message(data))
        return chunk

    def _output_tokens(self, stream: _Stream) -> tuple[int, CountedBy]:
        if stream.usage is not None and stream.usage.completion_tokens is not None:
            return stream.usage.completion_tokens, "usage"
        if self._count is not None:
            return self._count("".join(stream.written)), "tokenizer"
        return stream.events, "events"

    def _prompt_tokens(self, sample: Sample, usage: _Usage | None) -> int:
        if usage is not None and usage.prompt_tokens is not None:
            return usage.prompt_tokens
        if sample.input_ids is not None:
            return len(sample.input_ids)
        return 0 if self._count is None or sample.prompt is None else self._count(sample.prompt)

    def _failed(self, cause: str, detail: str) -> RequestFailedError:
        self.details.setdefault(cause, detail)
        return RequestFailedError(cause)


def _base_url(text: str, endpoint: str) -> str:
    try:
        url = URL(text)
    except ValueError as error:
        raise RequestError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment:
        raise RequestError(f"{text!r} is not the URL of a server, as http://127.0.0.1:8000 is")
    if not endpoint.startswith("/"):
        raise RequestError(f"{endpoint!r} does not begin with /, as {COMPLETIONS} does")
    base = str(url).rstrip("/")
    if base.endswith("/v1") and endpoint.startswith("/v1/"):
        raise RequestError(f"{text!r} ends in /v1, and so would the path have it twice: give it without")
    return base


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or as much of it; ``read`` gives what has come by now."""
    try:
        return await response.content.readexactly(most)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _fault(error: Exception, timeout: float, begun: bool = False) -> str:
    """The cause in words that are the same for the same cause: no addresses, no times."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # its own words have the address
        return f"cannot connect: {os.strerror(number) if number else type(error.os_error).__name__}"
    if isinstance(error, asyncio.TimeoutError):
        return f"no end within {timeout:g} s"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | OSError):
        return f"the connection broke {'within' if begun else 'before'} the answer"
    return f"no HTTP: {type(error).__name__}"


def _message(said: bytes) -> str:
    """What an error says of itself, in one line that fits into a report."""
    text = " ".join(said.decode("utf-8", "replace").split())
    return text if len(text) <= 300 else text[:300] + " ..."
