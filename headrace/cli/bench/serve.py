"""``headrace bench serve``: any server with OpenAI's API, measured from outside."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from headrace.cli._options import add_debug_option
from headrace.cli.bench import options

if TYPE_CHECKING:
    from headrace.bench.dataset import Sample
    from headrace.bench.openai_target import OpenAITarget
    from headrace.bench.report import Run
    from headrace.text import Tokenizer

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "OPENAI_API_KEY"
#: the paths, written here as well so that help comes without loading an HTTP client
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "serve",
        help="a running server with OpenAI's API: vLLM, llama.cpp, headrace serve",
        description="Send requests to a server with OpenAI's API that runs already, and measure its streamed answers. Tokens are the "
        "server's count (usage); where it gives none, those of --tokenizer, or else chunks of text.",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default=DEFAULT_URL, metavar="URL", help=f"without /v1 (default: {DEFAULT_URL})")
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help=f"default: {ENDPOINTS[0]}")
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    group.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token (or {API_KEY_VARIABLE}); reports do not have it")
    group.add_argument(
        "--header", action="append", type=_header, default=[], metavar="NAME=VALUE", help="sent as well; may be given several times"
    )
    group.add_argument(
        "--request-timeout", type=options.above_zero, default=600.0, metavar="SECONDS", help="for each request (default: 600)"
    )
    group.add_argument(
        "--ready-timeout", type=_seconds, default=0.0, metavar="SECONDS", help="how long to wait for a server that starts (default: 0)"
    )
    options.add_dataset_options(parser)
    group = parser.add_argument_group("prompts and tokens")
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="a GGUF file, a Hugging Face folder or hub id, or smollm2-135m: makes random prompts, and counts what the server does not",
    )
    group.add_argument("--text", action="store_true", help="random prompts are texts of words (default: token ids, but in chats)")
    options.add_load_options(parser, (None,))
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--ignore-eos", action="store_true", help="ask for exact lengths by ignore_eos, which vLLM, llama.cpp and headrace know"
    )
    group.add_argument("--min-tokens", action="store_true", help="ask for exact lengths by min_tokens")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    group.add_argument("--top-k", type=int, metavar="K", help="sent if given")
    group.add_argument("--top-p", type=float, metavar="P", help="sent if given")
    group.add_argument("--min-p", type=float, metavar="P", help="sent if given")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="an object, merged into every request; null takes a field out"
    )
    options.add_report_options(parser)
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure; 1 if a request failed. Raises HeadraceError, OSError."""
    from headrace.bench.openai_target import OpenAITarget

    options.check_report_options(arguments)
    samples = options.file_samples(arguments)
    if samples is None and arguments.tokenizer is None:
        arguments.parser.error("random prompts need --tokenizer, the model's; or give a --dataset")
    tokenizer = None if arguments.tokenizer is None else _tokenizer(arguments.tokenizer)
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE)
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    target = OpenAITarget(
        arguments.base_url,
        arguments.endpoint,
        model=arguments.model,
        headers={**({"Authorization": f"Bearer {key}"} if key else {}), **dict(arguments.header)},
        extra=sampling | arguments.extra_body,
        ignore_eos=arguments.ignore_eos,
        min_tokens=arguments.min_tokens,
        timeout=arguments.request_timeout,
        count=None if tokenizer is None else lambda text: len(tokenizer.encode_batch([text], add_special_tokens=False)[0]),
    )
    date = options.now()
    runs: list[Run] = []
    asked: list[int] = []
    asyncio.run(_measure(arguments, target, samples, tokenizer, runs, asked))
    _tell(target, runs, asked)
    engine = {"model": target.model, "tokens_counted_by": dict(target.counted_by), "failures": target.details}
    secrets = [key or "", *(value for _, value in arguments.header), target.password]
    return options.finish(arguments, "serve", date, engine, runs, secrets)


async def _measure(
    arguments: argparse.Namespace,
    target: OpenAITarget,
    samples: list[Sample] | None,
    tokenizer: Tokenizer | None,
    runs: list[Run],
    asked: list[int],
) -> None:
    """Fill ``runs``, and ``asked`` with the output tokens that each was to have."""
    import msgspec

    from headrace.bench.sweep import sweep

    load = options.load_of(arguments, streaming=True)
    async with target:
        await target.ready(arguments.ready_timeout)
        for place, limit in enumerate(load.concurrency):
            sent = _random(arguments, tokenizer, place) if samples is None and tokenizer is not None else samples or []
            for sample in sent:
                target.body(sample)  # raises for one that cannot be sent
            asked.append(sum(sample.output_tokens for sample in sent))
            one = msgspec.structs.replace(load, concurrency=(limit,))
            runs += await sweep(target, sent, one, warmup=_warmups(sent, arguments.warmup), on_run=_show)


def _random(arguments: argparse.Namespace, tokenizer: Tokenizer, place: int) -> list[Sample]:
    """Of the same lengths for each run of a sweep, and of other tokens: nobody but the server can empty its prefix cache."""
    import numpy as np

    from headrace.bench.synthetic import added_tokens, id_samples, plain_ids, text_samples

    texts = arguments.text or arguments.endpoint == ENDPOINTS[1]
    lengths = options.synthetic_lengths(arguments, np.random.default_rng((arguments.seed, 0)), 1 + added_tokens(tokenizer) if texts else 1)
    rng = np.random.default_rng((arguments.seed, 1, place))
    return text_samples(*lengths, tokenizer, rng) if texts else id_samples(*lengths, plain_ids(tokenizer), rng)


def _warmups(samples: list[Sample], count: int) -> list[Sample]:
    """Like the first samples, over and over, but with other beginnings, so that nothing of them is in a prefix cache afterwards."""
    import msgspec

    warmups = []
    for number in range(count):
        sample = samples[number % len(samples)]
        if sample.input_ids is not None:
            warmups.append(msgspec.structs.replace(sample, input_ids=sample.input_ids[::-1]))
        else:
            warmups.append(msgspec.structs.replace(sample, prompt=f"{number}: {sample.prompt}"))
    return warmups


def _show(run: Run) -> None:
    options.show("Serving Benchmark Result", run)


def _tell(target: OpenAITarget, runs: list[Run], asked: list[int]) -> None:
    """What the figures rest on, and what the server said where it failed."""
    by = ", ".join(f"{how} ({requests} requests)" for how, requests in target.counted_by.items())
    if by:
        print(f"headrace: output tokens counted by {by}, warm-ups included", file=sys.stderr)
    for run, tokens in zip(runs, asked, strict=True):
        if not run.failed and run.total_output_tokens != tokens:
            print(
                f"headrace: {run.label}: {run.total_output_tokens} output tokens, where {tokens} were asked for: see --ignore-eos",
                file=sys.stderr,
            )
    for cause, detail in target.details.items():
        print(f"headrace: {cause}: {detail}", file=sys.stderr)


def _tokenizer(model: str) -> Tokenizer:
    from headrace.checkpoint import resolve_model
    from headrace.text import load_tokenizer

    return load_tokenizer(resolve_model(model))


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _seconds(text: str) -> float:
    return 0.0 if float(text) == 0 else options.above_zero(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
