"""The ``openai`` package as it is (A54), curl, and the counters that they make (A53)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from headrace import LLM
from headrace.bench.report import read_report
from headrace.cli import main as cli_main
from headrace.lora import LoraRequest
from headrace.serve.settings import ServeSettings
from tests.http.sites import CHAT, COMPLETIONS, LONG, Site, chat, echo_llm, parse_events

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Bonn", "Cork"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"


@pytest.fixture(scope="module")
def echo() -> Iterator[Site]:
    with echo_llm() as llm:
        made = Site(llm, ServeSettings(api_keys=("secret",)))
        made.start()
        yield made
        made.stop()
        del llm


def write_adapter(folder: Path) -> Path:
    """For SmolLM2, strong enough to change every answer."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16, "bias": "none", "target_modules": ["down_proj"]})
    )
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_"
    shapes = {f"{name}A.weight": (2, 1536), f"{name}B.weight": (576, 2)}
    save_file({key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """SmolLM2, in one rank of one thread, with two adapters, of which one is gone since it was looked at."""
    folder = tmp_path_factory.mktemp("adapters")
    loras = {name: LoraRequest(name, write_adapter(folder / name)) for name in ("tuned", "gone")}
    shutil.rmtree(folder / "gone")
    # With adapters, as of `headrace serve --lora`: auto takes the runner that runs them.
    with LLM("smollm2-135m", max_loras=4, num_threads=1, kv_cache_tokens=4096) as llm:
        assert llm.facts.runner == "torch"
        llm.generate("x", use_tqdm=False)
        made = Site(llm, ServeSettings(api_keys=("secret",), loras=loras))
        made.start()
        yield made
        made.stop()
        del llm


@pytest.fixture
def client(echo: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="secret", max_retries=0, timeout=LONG) as made:
        yield made


@pytest.fixture
def real(model: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="secret", max_retries=0, timeout=LONG) as made:
        yield made


def test_models(client: openai.OpenAI, echo: Site):
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id


def test_a_chat_whole_and_as_a_stream(client: openai.OpenAI):
    """A54: with usage, logprobs and two choices."""
    ask: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Tell me of rivers."}],
        "max_tokens": 12,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**ask)
    texts, tokens, usage, reasons = {0: "", 1: ""}, {0: [], 1: []}, None, {}
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += [] if choice.logprobs is None else [one.token for one in choice.logprobs.content]
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert choice.message.role == "assistant" and choice.message.content == texts[choice.index]
        assert [one.token for one in choice.logprobs.content] == tokens[choice.index] and len(tokens[choice.index]) == 12
        assert choice.finish_reason == reasons[choice.index] == "length"
    assert texts[0] != texts[1] and usage == whole.usage and usage.completion_tokens == 24


def test_completions(client: openai.OpenAI):
    """A54"""
    model = client.models.list().data[0].id
    ask: dict[str, Any] = {
        "model": model,
        "prompt": ["The river", "A mill"],
        "max_tokens": 6,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**ask)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == [texts[0], texts[1]] and texts[0].startswith("The river")
    assert whole.choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize(
    ("fields", "error", "status"),
    [
        ({"max_tokens": 100_000}, openai.BadRequestError, 400),
        ({"model": "nothing"}, openai.NotFoundError, 404),
        ({"extra_body": {"made_up": 1}}, openai.BadRequestError, 400),
        ({"extra_headers": {"Authorization": "Bearer wrong"}}, openai.AuthenticationError, 401),
    ],
)
def test_errors_are_those_of_the_client(client: openai.OpenAI, fields: dict, error: type, status: int):
    """A48, A54"""
    ask = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**ask)
    assert caught.value.status_code == status and caught.value.body["message"]


def test_the_extensions_of_vllm(client: openai.OpenAI):
    body = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 4, "priority": -1, "cache_salt": "mine", "return_token_ids": True}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=[{"role": "user", "content": "x"}], max_tokens=4, extra_body=body
    )
    assert len(answer.choices[0].token_ids) == 4 and len(answer.prompt_token_ids) == answer.usage.prompt_tokens


def test_the_counters_agree_with_the_usage_of_all_answers(client: openai.OpenAI, echo: Site):
    """A53: whole answers, streams, echoes of nothing and refusals."""
    names = ("prompt_tokens", "generation_tokens")
    before = [echo.metric(f"headrace_{name}_total") for name in names]
    model = client.models.list().data[0].id
    usages = []
    for n in (1, 3):
        ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Of rivers"}], "max_tokens": 5, "n": n}
        usages.append(client.chat.completions.create(**ask).usage)
        usages += [chunk.usage for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})]
        usages.append(client.completions.create(model=model, prompt=["a", "b"], max_tokens=4, n=n).usage)
    usages.append(client.completions.create(model=model, prompt="a", max_tokens=0, echo=True).usage)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", max_tokens=-1)
    given = [usage for usage in usages if usage is not None]
    after = [echo.metric(f"headrace_{name}_total") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        sum(usage.prompt_tokens for usage in given),
        sum(usage.completion_tokens for usage in given),
    ]


def test_curl_shows_events_as_they_come(echo: Site):
    """``curl -N``."""
    command = ["curl", "-sN", f"{echo.url}{CHAT}", "-H", "Content-Type: application/json", "-H", "Authorization: Bearer secret"]
    ended = subprocess.run([*command, "-d", json.dumps(chat(stream=True))], capture_output=True, check=True, timeout=LONG)
    events = parse_events(ended.stdout)
    assert events[-1].data is None and events[-2].data["choices"][0]["finish_reason"] == "length"


# --- with a real model


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_must_be_called(real: openai.OpenAI, stream: bool):
    """A54: whatever the model would rather say, the call is valid; required leaves it the choice of the function."""
    for choice, names in (({"type": "function", "function": {"name": "weather"}}, {"weather"}), ("required", {"weather", "clock"})):
        ask: dict[str, Any] = {
            "model": real.models.list().data[0].id,
            "messages": [{"role": "user", "content": "How is the weather in Cork?"}],
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": 60,
        }
        if stream:
            name, arguments, reason = "", "", None
            for chunk in real.chat.completions.create(**ask, stream=True):
                for one in chunk.choices:
                    assert not one.delta.content
                    reason = one.finish_reason or reason
                    for call in one.delta.tool_calls or ():
                        assert call.index == 0
                        name, arguments = name + (call.function.name or ""), arguments + call.function.arguments
        else:
            (answer,) = real.chat.completions.create(**ask).choices
            (call,) = answer.message.tool_calls
            assert answer.message.content is None and call.id.startswith("call_") and call.type == "function"
            name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
        assert name in names and reason == ("stop" if len(names) == 1 else "tool_calls")
        assert json.loads(arguments) in ({"town": "Bonn"}, {"town": "Cork"}, {})


@pytest.mark.model
def test_a_format_of_the_answer(real: openai.OpenAI):
    """A54: a schema, also as the client makes it of a type."""
    schema = {"type": "object", "properties": {"sea": {"enum": ["North", "Baltic"]}}, "required": ["sea"], "additionalProperties": False}
    answer = real.chat.completions.create(
        model=real.models.list().data[0].id,
        messages=[{"role": "user", "content": "Into which sea does the Rhine flow?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "sea", "schema": schema, "strict": True}},
        max_tokens=40,
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content)["sea"] in ("North", "Baltic") and answer.choices[0].finish_reason == "stop"


@pytest.mark.model
def test_stop_and_seed(real: openai.OpenAI):
    """A40, A43, A54"""
    ask: dict[str, Any] = {
        "model": real.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Count from one to ten in digits."}],
        "max_tokens": 24,
        "seed": 11,
        "temperature": 0.8,
    }
    first, second = (real.chat.completions.create(**ask).choices[0].message.content for _ in range(2))
    assert first == second and len(first) > 4
    cut = real.chat.completions.create(**ask, stop=[first[2:4]]).choices[0]
    assert cut.message.content == first[: first.find(first[2:4])] and cut.finish_reason == "stop" and cut.stop_reason == first[2:4]


@pytest.mark.model
def test_an_adapter_is_chosen_as_a_model(real: openai.OpenAI):
    """A30, A54: beside the model itself; of one that cannot be read no folder is told."""
    cards = {card.id: card for card in real.models.list().data}
    base = next(iter(cards))
    assert cards["tuned"].parent == base
    ask: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    plain, tuned = (real.completions.create(model=name, **ask) for name in (base, "tuned"))
    assert tuned.model == "tuned" and tuned.choices[0].text != plain.choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        real.completions.create(model="gone", **ask)
    told = caught.value.body["message"]
    assert "cannot be read" in told and "adapters" not in told and "/" not in told


@pytest.mark.model
def test_the_answers_are_those_of_the_reference(model: Site, real: openai.OpenAI):
    """A42, A47: what the model says arrives whole over a stream, characters of several bytes included."""
    france, _, chinese, *_ = json.loads(REFERENCE.read_text())["results"]
    asked = [{"role": "user", "content": france["prompt"]}]
    name = real.models.list().data[0].id
    chunks = real.chat.completions.create(model=name, messages=asked, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == france["text_stop_at_eos"]
    body = {
        "prompt": chinese["prompt_ids"],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    choices = [event.data["choices"][0] for event in model.events(COMPLETIONS, body, {"Authorization": "Bearer secret"})[:-1]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert tokens == chinese["output_ids_ignore_eos"][:12]
    assert "".join(choice["text"] for choice in choices) == model.service.llm.tokenizer.decode(tokens)


def test_the_service_measured_by_its_own_client(echo: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """``headrace bench serve``, another client of OpenAI's API: lengths are exact, sums add up, and no report has the key."""
    report = tmp_path / "report.json"
    server = ("--base-url", echo.url, "--api-key", "secret", "--tokenizer", "smollm2-135m", "--ignore-eos", "--min-tokens")
    lengths = ("--num-requests", "8", "--input-len", "9", "--output-len", "6", "--output-len-std", "2")
    load = (*lengths, "--concurrency", "1", "4")
    assert cli_main(["bench", "serve", *server, *load, "--report", str(report)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Serving Benchmark Result") == 2 and "output tokens counted by usage (20 requests)" in captured.err
    assert "secret" not in report.read_text()
    made = read_report(report)
    (model,) = echo.get("/v1/models", Authorization="Bearer secret").json["data"]
    assert (made.kind, made.engine["model"], made.settings["api_key"]) == ("serve", model["id"], "***")
    for run, limit in zip(made.runs, (1, 4), strict=True):
        assert (run.completed, run.failed, run.max_concurrency) == (8, 0, limit) and run.max_concurrent_requests <= limit
        assert run.total_input_tokens == 72 and run.total_output_tokens == sum(record.output_tokens for record in run.records)
        assert all(record.finish_reason == "length" and 0 < len(record.events) <= record.output_tokens for record in run.records)
    # The same lengths in both, of different tokens.
    assert len({run.total_output_tokens for run in made.runs}) == 1

    # A chat, compared with what is something else; what the server refuses is counted and told.
    chat = ("--endpoint", CHAT, "--model", "unknown")
    assert cli_main(["bench", "serve", *server, *load, *chat, "--compare", str(report)]) == 1
    captured = capsys.readouterr()
    assert "8 failed: HTTP 404" in captured.out and "the model 'unknown' does not exist" in captured.err
    assert "endpoint: '/v1/completions' and '/v1/chat/completions'" in captured.err
    assert cli_main(["bench", "compare", str(report), str(report)]) == 0
    assert capsys.readouterr().out.count("1.000") > 20
