"""What throughput and latency share: a sweep over an ``LLM`` of this process."""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from headrace.cli._options import add_debug_option, add_model_options, llm_arguments
from headrace.cli.bench import options
from headrace.errors import RequestError
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.bench.dataset import Sample
    from headrace.bench.report import Kind, Run
    from headrace.llm import LLM

#: nothing is refused for its number: what is measured is all that was asked for
NO_LIMIT = 2**62

#: seconds for a control call between two runs: on a machine that is busy an hour's sweep is not to end for one that came late
CONTROL_TIMEOUT = 30.0

#: of the engine's statistics, those that tell why a run was as fast as it was: tokens / steps is the batch that was reached, and computed
#: tokens beyond those of prompts and answers were computed again after a preemption, or found in the cache where they are fewer
ENGINE_COUNTERS = ("steps", "computed_tokens", "preemptions", "kv_blocks_reused")


def add_options(parser: argparse.ArgumentParser, concurrency: tuple[int | None, ...]) -> None:
    """All options but ``streaming``; ``concurrency``: the default."""
    add_model_options(parser)
    options.add_dataset_options(parser)
    options.add_load_options(parser, concurrency)
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="generate exactly as many tokens as asked (default: yes)"
    )
    group.add_argument("--detokenize", action=argparse.BooleanOptionalAction, default=True, help="make texts as well (default: yes)")
    group.add_argument("--temperature", type=float, metavar="T", help="default: the most likely token is always taken")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the tokens that make up the share P of the probability")
    group.add_argument("--min-p", type=float, metavar="P", help="sample among tokens of at least this share of the greatest probability")
    group.add_argument(
        "--postprocess-workers", type=options.count, default=0, metavar="N", help="processes that make the texts (default: 0)"
    )
    options.add_report_options(parser)
    add_debug_option(parser)


def run(arguments: argparse.Namespace, kind: Kind, streaming: bool) -> int:
    """Measure; 1 if a request failed."""
    params = _params(arguments)
    options.check_report_options(arguments)
    samples = options.file_samples(arguments)
    date = options.now()
    import msgspec

    from headrace.llm import LLM

    settings = llm_arguments(arguments) | {
        "max_queued_requests": NO_LIMIT,
        "max_queued_tokens": NO_LIMIT,
        "postprocess_workers": arguments.postprocess_workers,
    }
    runs: list[Run] = []
    with LLM(**settings) as llm:
        engine: dict[str, Any] = msgspec.to_builtins(llm.facts)
        samples, warmup = _samples(arguments, llm, samples)
        try:
            asyncio.run(_measure(arguments, llm, samples, warmup, params, kind, streaming, runs))
        except BaseException:
            # An interrupt, or a death: what took long to measure is kept.
            if runs:
                options.finish(arguments, kind, date, engine, runs)
            raise
    return options.finish(arguments, kind, date, engine, runs)


def _samples(arguments: argparse.Namespace, llm: LLM, samples: list[Sample] | None) -> tuple[list[Sample], list[Sample]]:
    """What is measured, with ids, and what is run before. Raises DatasetError for what the model cannot run."""
    import numpy as np

    from headrace.bench.dataset import check_fit
    from headrace.bench.synthetic import id_samples, plain_ids, warmup_samples

    facts = llm.facts
    # Without a tokenizer it is the echo engine, whose end of sequence is 0.
    vocabulary = plain_ids(llm.tokenizer, facts.vocab_size) if llm.requests.takes_text else range(1, facts.vocab_size)
    if samples is None:
        rng = np.random.default_rng((arguments.seed, 0))
        inputs, outputs = options.synthetic_lengths(arguments, rng)
        samples = id_samples(inputs, outputs, vocabulary, rng)
    else:
        samples = _with_ids(samples, llm)
    check_fit(samples, facts.vocab_size, facts.max_seq_len, arguments.dataset)
    # A generator of its own: the prompts are the same whatever the warm-up is.
    return samples, warmup_samples(samples, arguments.warmup, vocabulary, np.random.default_rng((arguments.seed, 1)))


async def _measure(
    arguments: argparse.Namespace,
    llm: LLM,
    samples: list[Sample],
    warmup: list[Sample],
    params: SamplingParams,
    kind: Kind,
    streaming: bool,
    runs: list[Run],
) -> None:
    """Fill ``runs``."""
    from headrace.bench.llm_target import LLMTarget
    from headrace.bench.sweep import sweep

    def done(run: Run) -> None:
        runs.append(run)
        options.show(f"{kind.capitalize()} Benchmark Result", run)

    await sweep(
        LLMTarget(llm, params, streaming),
        samples,
        options.load_of(arguments, streaming),
        warmup=warmup,
        # Every run has the same prompts: the second of a sweep would find all of them.
        before_run=functools.partial(asyncio.to_thread, llm.executor.reset_prefix_cache, CONTROL_TIMEOUT),
        counters=functools.partial(asyncio.to_thread, _counters, llm),
        on_run=done,
    )


def _counters(llm: LLM) -> dict[str, float]:
    """What the engine counts, as far as it does, and the processor time of this process in seconds."""
    stats = llm.executor.stats(CONTROL_TIMEOUT)
    return {f"engine_{name}": stats[name] for name in ENGINE_COUNTERS if name in stats} | {"client_cpu_seconds": time.process_time()}


def _with_ids(samples: list[Sample], llm: LLM) -> list[Sample]:
    """Texts are tokenised before anything is measured. Raises ModelError where there is no tokenizer."""
    import msgspec

    texts = [sample.prompt for sample in samples if sample.input_ids is None and sample.prompt is not None]
    if not texts:
        return samples
    ids = iter(llm.tokenizer.encode_batch(texts))
    return [sample if sample.input_ids is not None else msgspec.structs.replace(sample, input_ids=tuple(next(ids))) for sample in samples]


def _params(arguments: argparse.Namespace) -> SamplingParams:
    """For all requests, or an error of usage."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "detokenize")
    parser: argparse.ArgumentParser = arguments.parser
    try:
        return SamplingParams(**{name: getattr(arguments, name) for name in names})
    except RequestError as error:
        parser.error(str(error))
