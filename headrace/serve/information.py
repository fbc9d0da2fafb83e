"""Routes that tell and do not generate: models, tokens, health, versions, metrics, and the end of a request that somebody names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from headrace.errors import HeadraceError
from headrace.executor.lifecycle import WorldState
from headrace.serve.answers import Aborted, Detokenized, HealthAnswer, ModelCard, ModelList, RankLoading, Tokens, Version
from headrace.serve.decode import decode_body
from headrace.serve.errors import ApiError
from headrace.serve.metrics import CONTENT_TYPE, Family, by_route, exposition, numbers, over_all
from headrace.serve.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from headrace.serve.routes import Route, json_response
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.executor.proxy import GenerationExecutorProxy
    from headrace.serve.service import Service

#: seconds for the engine's own numbers at /metrics and /server_info, which are left out after that
ENGINE_TIMEOUT = 1.0
#: seconds after which to ask again whether it is ready
RETRY_AFTER = 1.0

#: states in which ranks are on their way to ready
STARTS = (WorldState.STARTING, WorldState.REVIVING)

#: of the executor's numbers, those that rise and fall; the others only rise
EXECUTOR_GAUGES = ("live", "waiting", "waiting_tokens", "postprocess_here")
#: of the engine's, those that only rise
ENGINE_COUNTERS = (
    "steps",
    "tokens",
    "computed_tokens",
    "preemptions",
    "kv_blocks_allocated",
    "kv_blocks_reused",
    "kv_blocks_missed",
    "lora_loads",
    "bad_messages",
    "deadlines_expired",
)


def where_ranks_are(executor: GenerationExecutorProxy) -> list[RankLoading]:
    """Of a world that starts; empty at other times."""
    if executor.state not in STARTS:
        return []
    return [
        RankLoading(rank=rank.rank, stage=rank.stage or rank.state, share=rank.done / rank.total if rank.total else None)
        for rank in executor.ranks()
    ]


def health_answer(executor: GenerationExecutorProxy, fine: bool, yes: str, no: str) -> web.Response:
    """Status 200 if it is ``fine``, 503 otherwise; the word for it, and what it rests on."""
    health = executor.health()
    answer = HealthAnswer(
        status=yes if fine else no,
        state=health.state.name.lower(),
        progressing=health.progressing.value,
        live_requests=health.live,
        loading=where_ranks_are(executor),
    )
    return json_response(answer, 200 if fine else 503, {} if fine else {"Retry-After": "1"})


class Information:
    """Handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)
        self._abort = msgspec.json.Decoder(AbortRequest)
        self._of_sibling = msgspec.json.Decoder(list[Family])

    def routes(self) -> list[Route]:
        """Of this part of the service."""
        return [
            Route("GET", "/v1/models", self.models, "List the models", answer=ModelList),
            Route("GET", "/v1/models/{model}", self.model, "One model", answer=ModelCard),
            Route("POST", "/tokenize", self.tokenize, "Token ids of a text or a conversation", body=TokenizeRequest, answer=Tokens),
            Route("POST", "/detokenize", self.detokenize, "Text of token ids", body=DetokenizeRequest, answer=Detokenized),
            Route("POST", "/abort", self.abort, "End a request, or with the admin key all of them", body=AbortRequest, answer=Aborted),
            Route("GET", "/health/live", self.live, "Whether to leave the service running", "open", answer=HealthAnswer),
            Route("GET", "/health/ready", self.ready, "Whether to send requests", "open", answer=HealthAnswer),
            Route("GET", "/health", self.ready, "The same as /health/ready", "open", answer=HealthAnswer),
            Route("GET", "/version", self.version, "Version of headrace", "open", answer=Version),
            Route("GET", "/server_info", self.server_info, "Settings and facts of the world", answer=dict[str, Any]),
            Route("GET", "/metrics", self.metrics, "Numbers for Prometheus", "open", answer=str, media_type="text/plain"),
        ]

    # --- models and tokens

    def _cards(self) -> list[ModelCard]:
        prompts, settings = self._service.prompts, self._service.settings
        root = prompts.names[0]
        cards = [ModelCard(id=name, created=self._created, root=root, max_model_len=prompts.max_model_len) for name in prompts.names]
        return cards + [
            ModelCard(id=name, created=self._created, root=name, parent=root, max_model_len=prompts.max_model_len)
            for name in settings.loras
        ]

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_response(ModelList(data=self._cards()))

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/NAME."""
        name = request.match_info["model"]
        for card in self._cards():
            if card.id == name:
                return json_response(card)
        raise ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        async with self._service.bodies.read(request) as body:
            return await self._service.in_thread(lambda: json_response(self._tokens(body)))

    def _tokens(self, body: bytes) -> Tokens:
        prompts = self._service.prompts
        request = decode_body(body, self._tokenize)
        prompts.model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        if request.messages is not None:
            text = prompts.render(
                request.messages,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                tools=None if request.tools is None else msgspec.to_builtins(request.tools),
                variables=request.chat_template_kwargs,
            )
        else:
            text = request.prompt or ""
        special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
        self._need_tokenizer()
        prompts.check_length(text)
        ids = self._service.llm.tokenizer.encode(text, add_special_tokens=special)
        names = prompts.token_names() if request.return_token_strs else None
        strings = None if names is None else [names.text(token) for token in ids]
        return Tokens(count=len(ids), max_model_len=prompts.max_model_len, tokens=ids, token_strs=strings)

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        async with self._service.bodies.read(request) as body:
            return await self._service.in_thread(lambda: json_response(self._text(body)))

    def _text(self, body: bytes) -> Detokenized:
        request = decode_body(body, self._detokenize)
        self._service.prompts.model(request.model)
        self._need_tokenizer()
        size = self._service.llm.facts.vocab_size
        wrong = next((token for token in request.tokens if token >= size), None)
        if wrong is not None:
            raise ApiError(
                400, f"tokens: id {wrong} is out of range: ids of this model are 0 to {size - 1}", param="tokens", code="invalid_value"
            )
        return Detokenized(self._service.llm.tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens))

    def _need_tokenizer(self) -> None:
        if not self._service.llm.requests.takes_text:
            raise ApiError(400, "this model has no tokenizer", code="unsupported")

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort."""
        async with self._service.bodies.read(request) as body:
            asked = await self._service.in_thread(decode_body, body, self._abort)
        if asked.abort_all:
            self._service.gate.require(request, admin=True)
            return await self._aborted(request, self._service.live.abort_all(), asked)
        if asked.request_id is None:
            raise ApiError(400, "request_id: missing required field", param="request_id", code="missing_field")
        return await self._aborted(request, self._service.live.abort(asked.request_id), asked)

    async def _aborted(self, request: web.Request, here: int, asked: AbortRequest) -> web.Response:
        """Those of other frontends too."""
        siblings = self._service.siblings
        if siblings is not None and not siblings.is_from_one(request):
            for answer in await siblings.ask_all("POST", "/abort", request, msgspec.json.encode(asked)):
                here += msgspec.json.decode(answer, type=Aborted).aborted
        return json_response(Aborted(here))

    # --- health and numbers

    async def live(self, request: web.Request) -> web.Response:
        """GET /health/live: asks nobody."""
        executor = self._service.llm.executor
        return health_answer(executor, executor.health().alive, "alive", "dead")

    async def ready(self, request: web.Request) -> web.Response:
        """GET /health/ready: asks nobody."""
        executor = self._service.llm.executor
        ready = executor.health().ready
        return health_answer(executor, ready and not self._service.draining, "ready", "draining" if ready else "not ready")

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return json_response(Version(__version__))

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: nothing of the machine, and no keys."""
        service = self._service
        facts, settings, health = service.llm.facts, service.settings, service.llm.executor.health()
        return json_response(
            {
                "version": __version__,
                "engine": msgspec.to_builtins(facts),
                "models": [card.id for card in self._cards()],
                "health": {"alive": health.alive, "ready": health.ready, "state": health.state.name.lower(), "live": health.live},
                "draining": service.draining,
                "engine_stats": await self._engine_stats(),
                "limits": {
                    "max_model_len": facts.max_seq_len,
                    "max_body_bytes": settings.max_body_bytes,
                    "request_timeout": settings.request_timeout,
                    "write_timeout": settings.write_timeout,
                    "drain_timeout": settings.drain_timeout,
                    "resume_grace": settings.resume_grace,
                    "resume_bytes": settings.resume_bytes,
                },
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics: over all frontends; what the engine says is left out while it does not answer."""
        families = self._families()
        requests = self._service.metrics.requests.copy()
        siblings = self._service.siblings
        if siblings is not None and siblings.is_from_one(request):
            return await self._service.in_thread(lambda: json_response([by_route(requests), *families]))
        others = [] if siblings is None else await siblings.ask_all("GET", "/metrics", request)
        stats = await self._engine_stats()
        text = await self._service.in_thread(lambda: self._exposition([by_route(requests), *families], others, stats))
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    def _exposition(self, families: list[Family], others: list[bytes], stats: Mapping[str, float]) -> str:
        if others:
            families = over_all(families, [self._of_sibling.decode(answer) for answer in others])
        families += numbers("engine_", stats, ENGINE_COUNTERS, "The engine, over all frontends: {}.")
        return exposition(families)

    def _families(self) -> list[Family]:
        """Of this frontend."""
        service = self._service
        counters = service.llm.executor.counters()
        rising = [name for name in counters if name not in EXECUTOR_GAUGES]
        health = service.llm.executor.health()
        families = service.metrics.families()
        # Each frontend sees the same deaths.
        families += [
            family._replace(over="max") if family.name == "requests_restarts_total" else family
            for family in numbers("requests_", counters, rising, "Requests, by the ledger: {}.")
        ]
        families += [
            Family("up", "gauge", "Whether the world is there and takes requests.", [("", (), float(health.ready))], "own"),
            Family("draining", "gauge", "Whether the service is ending.", [("", (), float(service.draining))], "max"),
            Family("frontends", "gauge", "Processes that serve.", [("", (), 1)]),
            Family("http_live_requests", "gauge", "Generating requests that there are.", [("", (), len(service.live))]),
            Family("http_connections", "gauge", "Open connections.", [("", (), service.num_connections)]),
            Family("resumable_streams", "gauge", "Resumable streams that are kept.", [("", (), len(service.resumable))]),
            Family("resumable_bytes", "gauge", "What they keep.", [("", (), service.resumable.size)]),
            Family("event_loop_slow_callbacks_total", "counter", "Steps of the event loop over 1 ms.", [("", (), service.meter.slow)]),
            Family(
                "event_loop_worst_callback_seconds", "gauge", "The longest step of the event loop.", [("", (), service.meter.worst)], "max"
            ),
            Family("info", "gauge", "What runs.", [("", (("version", __version__), ("model", service.prompts.names[0])), 1)], "own"),
        ]
        return families

    async def _engine_stats(self) -> dict[str, float]:
        """By the control channel, so every frontend has the same."""
        try:
            return await self._service.ask(self._service.llm.executor.stats, ENGINE_TIMEOUT)
        except (HeadraceError, TimeoutError):
            return {}
