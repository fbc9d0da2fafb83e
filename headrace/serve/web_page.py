"""The page at / and what it is made of, and /world, from which its live view is drawn.

The files are those of the folder ``page``: no build step, and nothing from other hosts, which the policy that goes with them forbids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple

from aiohttp import web

from headrace.serve.errors import ApiError
from headrace.serve.routes import Handler, Route, json_response
from headrace.serve.world_view import WorldAnswer

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    # Only files of this service, nothing inline: text that a model makes can never run.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept by the browser, but asked for each time, which costs no more than a 304: an update of the service is one of the page.
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """One file as it is sent. ``etag``: of its content."""

    body: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """By name, all of the folder ``page``."""
    made = {}
    for file in files("headrace.serve").joinpath("page").iterdir():
        body = file.read_bytes()
        media_type = MEDIA_TYPES[file.name[file.name.rindex(".") :]]
        made[file.name] = PageFile(body, media_type, hashlib.sha256(body).hexdigest()[:32])
    return made


class WebPage:
    """Handlers of one service. ``look``: that of its ``WorldView``, or why there is none."""

    def __init__(self, look: Callable[[str | None, int, int], Awaitable[WorldAnswer]]) -> None:
        self._look = look

    def routes(self) -> list[Route]:
        """Those that a client of the API may want to know of."""
        return [
            Route("GET", "/", _sender(page_files()["index.html"]), "A page to chat, and to see the world live", "open", answer=str,
                  media_type="text/html"),
            Route("GET", "/world", self.world, "The world as its live page shows it", answer=WorldAnswer),
        ]  # fmt: skip

    @staticmethod
    def file_routes() -> list[Route]:
        """What the page loads."""
        made = page_files()
        return [
            Route("GET", f"/page/{name}", _sender(file), "A file of the page", "open", answer=str, media_type=file.media_type)
            for name, file in made.items()
            if name != "index.html"
        ]

    async def world(self, request: web.Request) -> web.Response:
        """GET /world. In the query, what was seen last: ``source``, and the numbers of its last ``point`` and ``change``."""
        answer = await self._look(request.query.get("source"), _number(request, "point"), _number(request, "change"))
        return json_response(answer, headers={"Cache-Control": "no-store"})


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "-1")
    try:
        # Far more digits than any number here has, and far fewer than int() would refuse.
        return int(text[:20])
    except ValueError:
        raise ApiError(400, f"{name}: it must be a whole number, not {text[:50]!r}", param=name, code="invalid_value") from None


def _sender(file: PageFile) -> Handler:
    async def send(request: web.Request) -> web.Response:
        response = web.Response(headers=HEADERS)
        response.etag = file.etag
        known = request.if_none_match or ()
        if any(tag.value in (file.etag, "*") for tag in known):
            response.set_status(304)
            return response
        response.body = file.body
        response.content_type = file.media_type
        response.charset = "utf-8"
        return response

    return send
