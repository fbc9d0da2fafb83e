"""What the service answers, put together: its parts know the service, and the service knows routes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.control import Control
from headrace.serve.documentation import documentation_routes
from headrace.serve.generation import Generation
from headrace.serve.information import Information
from headrace.serve.metrics import Metrics
from headrace.serve.routes import Route
from headrace.serve.service import Service
from headrace.serve.settings import ServeSettings
from headrace.serve.siblings import Siblings
from headrace.serve.web_page import WebPage
from headrace.serve.world_view import WorldView

if TYPE_CHECKING:
    from headrace.llm import LLM


def make_service(llm: LLM, settings: ServeSettings, siblings: Siblings | None = None, metrics: Metrics | None = None) -> Service:
    """A service with all its routes, to be started. ``metrics``: what has been counted on its port already."""
    service = Service(llm, settings, siblings, metrics)
    view = WorldView(llm.executor, service.metrics.first_token.take, model=service.prompts.names[0])
    page = WebPage(lambda *seen: service.ask(view.look, *seen))
    routes: list[Route] = [*Generation(service).routes(), *Information(service).routes(), *Control(service).routes(), *page.routes()]
    service.routes = [*routes, *documentation_routes(routes), *page.file_routes()]
    return service
