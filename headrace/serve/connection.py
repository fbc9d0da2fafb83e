"""One connection: aiohttp's protocol, with errors of what is no HTTP in the shape of all others, and one line in the log for each."""

from __future__ import annotations

import logging
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from headrace.serve.errors import ApiError
from headrace.serve.routes import error_response

log = logging.getLogger("headrace.serve")


class Connection(RequestHandler):
    """What comes before a handler, and so before the gate: broken request lines and headers, and such that are too long."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer, after which the connection is closed. Anybody may send what is no HTTP: it is no error of ours."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a fault outside of all handlers", exc_info=exc)
        else:
            log.info("%s sent what is no HTTP: %s", request.remote, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        fault = "an internal error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else f"this is no valid HTTP: {HTTPStatus(status).phrase}"
        response = error_response(ApiError(status, fault, code="invalid_http"))
        response.force_close()
        return response

    def log_exception(self, *arguments: object, **options: object) -> None:
        """What goes wrong behind an answer, as the rest of a body whose encoding is broken: it is the client's, and needs no traceback."""
        log.info("a connection was given up after its answer: %s", type(options.get("exc_info")).__name__)
