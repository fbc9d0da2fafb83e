"""Bodies and queries of requests: bytes to checked structs, and errors that name the field. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from headrace.serve.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `(?P<path>.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?P<what>unknown|missing required) field `(?P<name>.*)`", re.DOTALL)

#: of a name that a client made up, in an error
MAX_NAME_CHARS = 200


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The struct. Raises ApiError 400, which names the field at fault, for what is no JSON, or not that of this route."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def decode_query(query: Mapping[str, str], kind: type[T]) -> T:
    """What stands behind the question mark, as the struct. Raises ApiError 400, which names the field at fault."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def _field_error(message: str) -> ApiError:
    """Of what msgspec says: the place as OpenAI writes it, ``messages[0].role`` for ``$.messages[0].role``."""
    place = _PLACE.search(message)
    path = "" if place is None else place["path"].removeprefix("$").removeprefix(".")
    text = message if place is None else message[: place.start()]
    field = _FIELD.search(text)
    code = None
    if field is not None:
        path = f"{path}.{field['name']}" if path else field["name"]
        code = "unknown_field" if field["what"] == "unknown" else "missing_field"
        text = f"{field['what']} field"
    path = path[:MAX_NAME_CHARS]
    return ApiError(400, f"{path}: {text}" if path else f"the body: {text}", param=path or None, code=code or "invalid_value")
