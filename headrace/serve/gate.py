"""What stands before every route: ids, keys, origins; and behind it: errors in OpenAI's shape, headers, counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from headrace.serve.errors import ApiError, api_error
from headrace.serve.metrics import Metrics
from headrace.serve.routes import Handler, Route, error_response
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from headrace.serve.sse import PIECE, write_in_pieces

log = logging.getLogger("headrace.serve")

ID_HEADER = "X-Request-Id"
#: where the id is left for handlers
ID_KEY = web.RequestKey("request_id", str)
_ID = re.compile(r"[\x21-\x7e]{1,128}")

#: what a page of another origin may send and see
CORS_METHODS = "GET, POST, OPTIONS"
CORS_HEADERS = "Authorization, Content-Type, Last-Event-ID, X-Request-Id"
CORS_EXPOSED = "Retry-After, X-Request-Id"
CORS_SECONDS = "600"


def request_id(request: web.Request) -> str:
    """The client's own, or one that was made."""
    return request[ID_KEY]


class Gate:
    """``draining``: whether answers should be the last of their connections. ``refusal``: what is said where there is no route; None: that.

    It wraps handlers and is no middleware of aiohttp, which would keep every handler that it ever had, and with it the whole service.
    """

    def __init__(
        self, settings: ServeSettings, metrics: Metrics, draining: Callable[[], bool], refusal: Callable[[], ApiError] | None = None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._draining = draining
        self._refusal = refusal
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin_key = None if settings.admin_key is None else settings.admin_key.encode()

    def add(self, router: web.UrlDispatcher, routes: Sequence[Route]) -> None:
        """All routes, and an answer for whatever is none of them."""
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            # A name in a path may have slashes, as those of models on the hub, and line ends, which a dot does not match.
            router.add_route("*", path.replace("}", r":[\s\S]+}"), self._wrapped(methods))
        router.add_route("*", r"/{path:[\s\S]*}", self._wrapped({}))

    def _wrapped(self, methods: Mapping[str, Route]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            began = time.monotonic()
            route = methods.get("GET" if request.method == "HEAD" else request.method)
            response = await self._answer(request, methods, route)
            if not Siblings.is_from_one(request):
                self._metrics.answered("unknown" if route is None else route.path, response.status)
            if self._settings.access_log:
                seconds = time.monotonic() - began
                log.info("%s %s %d %.3f s, id %s", request.method, request.path, response.status, seconds, request_id(request))
            return response

        return handle

    async def _answer(self, request: web.Request, methods: Mapping[str, Route], route: Route | None) -> web.StreamResponse:
        try:
            return await _whole(request, await self._admit(request, methods, route))
        except asyncio.CancelledError:
            self._metrics.vanished += 1
            raise
        except ConnectionError:
            # Found out by writing, a moment before aiohttp would have cancelled us for it; as an error it would be logged as one.
            self._metrics.vanished += 1
            raise asyncio.CancelledError from None
        except Exception as error:
            answer = api_error(error)
            response = error_response(answer)
            if answer.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            if answer.status == 405:
                response.headers["Allow"] = ", ".join(sorted(methods))
            return response

    async def _admit(self, request: web.Request, methods: Mapping[str, Route], route: Route | None) -> web.StreamResponse:
        given = request.headers.get(ID_HEADER)
        fine = given is None or _ID.fullmatch(given) is not None
        request[ID_KEY] = given if given is not None and fine else uuid.uuid4().hex
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204)
        if not fine:
            raise ApiError(400, f"{ID_HEADER}: it must have 1 to 128 visible ASCII characters", param=ID_HEADER, code="invalid_value")
        if not methods:
            if self._refusal is not None:
                raise self._refusal()
            raise ApiError(404, "there is no such route", code="not_found")
        if route is None:
            raise ApiError(405, "this method is not allowed here", code="method_not_allowed")
        self._check_key(request, route)
        return await route.handler(request)

    def _check_key(self, request: web.Request, route: Route) -> None:
        if route.access == "open" or (route.access == "key" and not self._keys):
            return
        if route.access == "admin" and self._admin_key is None:
            raise ApiError(403, "this route needs the service to be started with an admin key", code="no_admin_key")
        self.require(request, admin=route.access == "admin")

    def require(self, request: web.Request, admin: bool) -> None:
        """Raises ApiError 401 without a fitting key. The admin key opens everything."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        fitting = ([] if self._admin_key is None else [self._admin_key]) + ([] if admin else self._keys)
        # All are compared, so that the time says nothing about which of them is nearly right.
        if not any([hmac.compare_digest(given, one) for one in fitting]):
            what = "the admin key" if admin else "a valid API key"
            raise ApiError(401, f"this route needs {what}: Authorization: Bearer KEY", code="invalid_api_key")

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before the head of any answer leaves."""
        # Not there where the request was refused before it came to us.
        if ID_KEY in request:
            response.headers[ID_HEADER] = request_id(request)
        origin = request.headers.get("Origin")
        allowed = self._settings.cors_origins
        if origin is not None and ("*" in allowed or origin in allowed):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in allowed else origin
            response.headers["Access-Control-Expose-Headers"] = CORS_EXPOSED
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = CORS_METHODS
                response.headers["Access-Control-Allow-Headers"] = CORS_HEADERS
                response.headers["Access-Control-Max-Age"] = CORS_SECONDS
        if allowed and "*" not in allowed:
            response.headers["Vary"] = "Origin"
        if self._draining():
            response.force_close()
            # By itself this comes too late to be told, and a client that knows nothing of it may send its next request into the end.
            response.headers["Connection"] = "close"


async def _whole(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
    """A large answer is written here, in pieces; aiohttp would copy all of it at once."""
    if not isinstance(answer, web.Response) or not isinstance(answer.body, bytes) or len(answer.body) <= PIECE or request.method == "HEAD":
        return answer
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(answer.body)
    await response.prepare(request)
    await write_in_pieces(response, answer.body)
    await response.write_eof()
    return response
