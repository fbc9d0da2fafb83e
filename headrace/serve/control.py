"""Routes that concern everybody: pause and resume, profiles, the prefix cache and its events. Names are vLLM's where it has them."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from aiohttp import web

from headrace.errors import RequestError
from headrace.serve.decode import decode_query
from headrace.serve.errors import RETRY_AFTER, ApiError
from headrace.serve.routes import Route, json_response

if TYPE_CHECKING:
    from headrace.serve.service import Service

#: seconds for calls that every engine answers at once
QUICK = 5.0

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of /pause. ``clear_cache``: forget prefixes too. ``timeout``: seconds until 503; the pause goes on all the same."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = False
    timeout: Seconds = 60.0


class KvEventsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of /kv_events: ``next`` of the answer before."""

    after: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1024


class Done(msgspec.Struct):
    """What stands now."""

    status: str


class Paused(msgspec.Struct):
    """Of /is_paused."""

    is_paused: bool


class ProfileFiles(msgspec.Struct):
    """Of /stop_profile: names of the files in the folder for profiles, in the order of the ranks."""

    files: list[str]


class KvEventsPage(msgspec.Struct):
    """``next``: ask from there on. ``lost``: so many were dropped before they were asked for. ``stream``: another one begins at 0 again."""

    events: list[dict[str, Any]]
    next: int
    lost: int
    stream: int


class Control:
    """Handlers of one service. They are about the world, so they do the same on each of its frontends."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Of this part of the service."""
        return [
            Route("POST", "/pause", self.pause, "Let the engine stand still", "admin", query=PauseQuery, answer=Done),
            Route("POST", "/resume", self.resume, "Let it go on", "admin", answer=Done),
            Route("GET", "/is_paused", self.is_paused, "Whether it is to stand still", "admin", answer=Paused),
            Route("POST", "/start_profile", self.start_profile, "Let every rank record its steps", "admin", answer=Done),
            Route("POST", "/stop_profile", self.stop_profile, "Let every rank write them", "admin", answer=ProfileFiles),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, "Forget KV blocks of earlier requests", "admin", answer=Done),
            Route("GET", "/kv_events", self.kv_events, "Events of the KV cache", "admin", query=KvEventsQuery, answer=KvEventsPage),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        """POST /pause."""
        query = decode_query(request.query, PauseQuery)
        executor = self._service.llm.executor
        try:
            await self._service.ask_slowly(executor.pause, query.mode, query.timeout)
        except RequestError as error:
            raise ApiError(409, str(error), code="resumed") from None
        except TimeoutError:
            text = f"the engine does not stand still after {query.timeout:g} s; it will, unless it is resumed before"
            raise ApiError(503, text, code="pausing", retry_after=RETRY_AFTER) from None
        if query.clear_cache:
            await self._service.ask(executor.reset_prefix_cache, QUICK)
        return json_response(Done("paused"))

    async def resume(self, request: web.Request) -> web.Response:
        """POST /resume: never behind the calls that it ends."""
        await self._service.ask(self._service.llm.executor.resume, QUICK)
        return json_response(Done("resumed"))

    async def is_paused(self, request: web.Request) -> web.Response:
        """GET /is_paused: asks nobody."""
        return json_response(Paused(self._service.llm.executor.paused))

    async def start_profile(self, request: web.Request) -> web.Response:
        """POST /start_profile."""
        folder = self._service.settings.profile_dir
        if folder is None:
            raise ApiError(403, "the service was started without a folder for profiles", code="no_profile_dir")
        await self._about_profile(self._service.llm.executor.start_profile, folder)
        return json_response(Done("profiling"))

    async def stop_profile(self, request: web.Request) -> web.Response:
        """POST /stop_profile."""
        files = await self._about_profile(self._service.llm.executor.stop_profile)
        return json_response(ProfileFiles([PurePath(file).name for file in files]))

    async def _about_profile(self, call: Any, *arguments: object) -> Any:
        try:
            return await self._service.ask_slowly(call, *arguments)
        except RequestError as error:
            raise ApiError(409, str(error), code="profile") from None

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """POST /reset_prefix_cache."""
        await self._service.ask(self._service.llm.executor.reset_prefix_cache, QUICK)
        return json_response(Done("reset"))

    async def kv_events(self, request: web.Request) -> web.Response:
        """GET /kv_events: who asks keeps the place, so any number may ask, each on any frontend."""
        query = decode_query(request.query, KvEventsQuery)
        return await self._service.ask(self._kv_events, query)

    def _kv_events(self, query: KvEventsQuery) -> web.Response:
        page = self._service.llm.executor.kv_cache_events_after(query.after, query.limit, QUICK)
        return json_response(KvEventsPage([event.as_dict() for event in page.records], page.next, page.lost, page.stream))
