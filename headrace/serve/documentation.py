"""/openapi.json, made from the types of bodies, and /docs, a page that shows it and asks nobody else for anything."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from headrace.serve.errors import ErrorBody
from headrace.serve.routes import JSON, Route
from headrace.version import __version__

_BEARER: list[dict[str, list[str]]] = [{"bearer": []}]

#: what any route may answer, by status
_ERRORS = {
    "400": "The request is at fault; the field is named.",
    "401": "A key is missing or wrong.",
    "403": "The service has no admin key, so nobody may use this route.",
    "404": "There is no such model, stream or route.",
    "408": "The body did not arrive in time.",
    "409": "It does not fit to what stands: a second profile, the end of none, a pause that was ended before it began.",
    "410": "That part of the stream is not kept any more.",
    "413": "The body is too large.",
    "415": "The body is not JSON by its Content-Type.",
    "500": "A fault of the service.",
    "503": "Overloaded, ending, or not ready; Retry-After says when to come back.",
}
_OF_BODIES = ("400", "408", "413", "415")


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [ErrorBody] + [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    of_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__, "description": "OpenAI's API with the extensions of vLLM."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, of_type: dict[int, Any]) -> dict[str, Any]:
    error = {"content": {JSON: {"schema": of_type[id(ErrorBody)]}}}
    answer = {} if route.answer is None else {route.media_type: {"schema": of_type[id(route.answer)]}}
    if route.streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = ["401", "403", "500", "503"] + (["404"] if route.body is not None or "{" in route.path else [])
    statuses += [*_OF_BODIES, "410"] if route.streams else _OF_BODIES if route.body is not None else ["400"]
    statuses += ["409"] if route.access == "admin" and route.method == "POST" else []
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": answer}}
    if route.path.startswith("/health"):
        responses["503"] = {"description": "It is not.", "content": answer}
    for status in sorted(statuses):
        responses.setdefault(status, {"description": _ERRORS[status], **error})
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('.', '_').replace('{', '').replace('}', '')}",
        "responses": responses,
    }
    if route.access != "open":
        operation["security"] = _BEARER if route.access == "admin" else [{}, *_BEARER]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": of_type[id(route.body)]}}}
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if route.query is not None:
        # Of simple types, so nothing refers to components.
        schema = msgspec.json.schema(route.query)["$defs"][route.query.__name__]
        operation["parameters"] = [{"name": name, "in": "query", "schema": inner} for name, inner in schema["properties"].items()]
    return operation


def documentation_routes(routes: Sequence[Route]) -> list[Route]:
    """The two routes, about all others and themselves."""

    async def document(request: web.Request) -> web.Response:
        return web.Response(body=made[0], content_type=JSON)

    async def page(request: web.Request) -> web.Response:
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(body=made[1], content_type="text/html", charset="utf-8", headers=policy)

    own = [
        Route("GET", "/openapi.json", document, "This description", "open", answer=dict[str, Any]),
        Route("GET", "/docs", page, "This description, to be read", "open", answer=str, media_type="text/html"),
    ]
    described = openapi([*routes, *own])
    made = [msgspec.json.encode(described), _page(described).encode()]
    return own


def _page(described: dict[str, Any]) -> str:
    parts = [_HEAD, f"<h1>headrace {html.escape(__version__)}</h1><p>{html.escape(described['info']['description'])} ",
             'The same for programs: <a href="openapi.json">openapi.json</a>.</p>']  # fmt: skip
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> {html.escape(operation['summary'])}</summary>"
            )
            for parameter in operation.get("parameters", ()):
                parts.append(f"<p><code>{html.escape(parameter['name'])}</code>: {_schema(parameter['schema'])}</p>")
            if "requestBody" in operation:
                parts.append(f"<h3>Body</h3>{_schema(operation['requestBody']['content'][JSON]['schema'])}")
            parts.append("<h3>Answers</h3><ul>")
            for status, response in operation["responses"].items():
                kinds = ", ".join(
                    f"{html.escape(kind)} {_schema(content['schema'])}" for kind, content in response.get("content", {}).items()
                )
                parts.append(f"<li><code>{status}</code> {html.escape(response['description'])} {kinds}</li>")
            parts.append("</ul></details>")
    parts.append("<h2>Types</h2>")
    for name, schema in described["components"]["schemas"].items():
        name, about = html.escape(name), html.escape(schema.get("description", ""))
        parts.append(f'<details id="{name}"><summary><code>{name}</code> {about}</summary>')
        required = set(schema.get("required", ()))
        parts.append("<table>")
        for field, inner in schema.get("properties", {}).items():
            star = " *" if field in required else ""
            default = "" if "default" not in inner else html.escape(msgspec.json.encode(inner["default"]).decode())
            parts.append(f"<tr><td><code>{html.escape(field)}</code>{star}</td><td>{_schema(inner)}</td><td>{default}</td></tr>")
        parts.append("</table></details>")
    return "".join([*parts, "</main></body></html>"])


def _schema(schema: Any) -> str:
    """One line."""
    if not isinstance(schema, dict):
        return "anything"
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(map(_schema, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(html.escape(repr(one)) for one in schema["enum"])
    kind = schema.get("type", "anything")
    inside = f" of {_schema(schema['items'])}" if "items" in schema else ""
    bounds = ", ".join(f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema)
    return html.escape(str(kind)) + inside + (f" ({bounds})" if bounds else "")


_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "above",
    "minLength": "length at least",
    "minItems": "items at least",
}

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>headrace</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { margin: 0 } main { max-width: 60rem; margin: auto; padding: 1rem }
details { border: 1px solid #8886; border-radius: .4rem; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer } h3 { margin: .6rem 0 .2rem; font-size: 1rem }
table { border-collapse: collapse } td { padding: .15rem 1rem .15rem 0; vertical-align: top } code { font-size: .9em }
</style></head><body><main>"""
