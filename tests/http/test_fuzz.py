"""Requests that are made from the served OpenAPI document, right ones and wrong ones (A30, A48): never a 500, never a traceback, and what
is answered is what the document says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, Site, chat, site

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

ROOT = Path(__file__).parents[2]

#: of each route and kind of data
EXAMPLES = 15


@pytest.fixture(scope="module")
def small() -> Iterator[Site]:
    """A context of 64 tokens and a short time for each, so that no request that happens to be right takes long."""
    limits = ServeSettings(admin_key="boss", request_timeout=0.5, keep_alive_interval=0.2)
    with site(limits, max_seq_len=64) as made:
        yield made


OPERATIONS = ["post_v1_chat_completions", "post_v1_completions", "post_tokenize", "post_detokenize", "post_abort", "get_v1_models_model"]


# Every text may be the name of a model, so there are no wrong ones.
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in OPERATIONS for mode in GenerationMode if (name, mode) != (OPERATIONS[-1], "negative")]
)
def test_requests_made_from_the_document(small: Site, name: str, mode: GenerationMode):
    schema = schemathesis.openapi.from_dict(small.get("/openapi.json").json)
    operation = schema.find_operation_by_id(name)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body.pop("model", None)  # or nearly all would end with its being unknown
        response = case.call(base_url=small.url, timeout=10)
        case.validate_response(response, checks=CHECKS)
        assert "Traceback" not in response.text and str(ROOT) not in response.text

    send()
    assert small.post(CHAT, chat(max_tokens=1)).status == 200
    counters = small.service.llm.executor.counters()
    assert (counters["dispatch_faults"], counters["bad_frames"], counters["restarts"]) == (0, 0, 0)


def test_all_routes_with_bodies_are_tried(small: Site):
    document = small.get("/openapi.json").json
    with_input = {
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation or "parameters" in operation
    }
    assert set(OPERATIONS) <= with_input
