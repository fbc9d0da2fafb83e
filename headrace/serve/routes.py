"""What a route is: for the router, for the gate before it, and for its page in the documentation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from aiohttp import web

from headrace.serve.errors import ApiError

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: open: to everybody; key: to those with an API key, where there are any; admin: to those with the admin key
Access: TypeAlias = Literal["open", "key", "admin"]

JSON = "application/json"

_encoder = msgspec.json.Encoder()


class Route(NamedTuple):
    """``body``, ``answer``: types of what is sent as JSON; ``media_type``: of an answer that is something else; ``query``: of what stands
    behind the question mark.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    access: Access = "key"
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    media_type: str = JSON
    streams: bool = False
    query: type[msgspec.Struct] | None = None


def json_response(answer: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """``answer``: whatever msgspec encodes."""
    return web.Response(body=_encoder.encode(answer), status=status, headers=headers, content_type=JSON)


def error_response(error: ApiError) -> web.Response:
    """In OpenAI's shape."""
    return json_response(error.body(), error.status, error.headers())
