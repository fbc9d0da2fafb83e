"""Errors as clients see them: OpenAI's shape, a fitting status, and nothing of this machine in the text."""

from __future__ import annotations

import logging
import math
import re

import msgspec

from headrace.errors import ClosedError, EngineDeadError, HeadraceError, ModelError, QueueFullError, RequestError
from headrace.serve.protocol import ChatRequest, CompletionRequest

log = logging.getLogger("headrace.serve")

#: seconds after which to come back to an engine that is starting again or a service that is ending
RETRY_AFTER = 1.0

#: what says something about this machine: absolute paths, addresses of sockets and memory
_PRIVATE = re.compile(r"(?:\b(?:ipc|tcp|inproc|file)://\S+)|(?<![\w.<])/(?:[\w.+@~-]+/)+[\w.+@~-]*|\b0x[0-9a-fA-F]{6,}\b")

#: names of fields that are ordinary words as well
_WORDS = {"prompt", "model", "user", "store", "echo", "messages", "stream", "tools", "metadata", "documents"}
_FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - _WORDS
#: the first field that a message of headrace names
_NAMED = re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(_FIELDS, key=len, reverse=True))})(?![\w.])")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorInfo(msgspec.Struct):
    """What is inside of ``{"error": ...}``. ``param``: the field at fault; ``code``: for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is an error."""

    error: ErrorInfo


class ApiError(Exception):
    """An answer that is an error. ``retry_after``: seconds, sent as a header."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> ErrorBody:
        """As it is sent."""
        return ErrorBody(ErrorInfo(public_text(str(self)), _TYPES.get(self.status, "internal_error"), self.param, self.code))

    def headers(self) -> dict[str, str]:
        """Those that go with it: whole seconds, as HTTP has them, of which there is at least one."""
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def public_text(message: str) -> str:
    """A message without paths, addresses and what follows its first line."""
    return _PRIVATE.sub("...", message.splitlines()[0] if message else "unknown error")


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception. The log has the rest of those that are not the client's fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, RequestError):
        named = _NAMED.search(str(error))
        too_long = "context of" in str(error)
        return ApiError(
            400,
            str(error),
            param=None if named is None else named[0],
            code="context_length_exceeded" if too_long else "invalid_value",
        )
    if isinstance(error, EngineDeadError):
        log.error("a request failed with its world: %s", str(error))
        return ApiError(503, "the engine died and this request with it", code="engine_dead", retry_after=RETRY_AFTER)
    if isinstance(error, ClosedError):
        return ApiError(503, "the service is ending", code="shutting_down", retry_after=RETRY_AFTER)
    if isinstance(error, ModelError):
        log.error("the model cannot do what a request asked for: %s", str(error))
        return ApiError(400, "this model cannot do what was asked for", code="unsupported")
    if isinstance(error, TimeoutError):
        return ApiError(503, "the engine did not answer in time", code="engine_silent", retry_after=RETRY_AFTER)
    kind = "a fault of the engine" if isinstance(error, HeadraceError) else "an internal error"
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{kind} ended this request", code="internal_error")
