"""``headrace bench prepare-dataset``: datasets of exact lengths, to be measured with again and elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli._options import DEFAULT_MODEL, add_debug_option, positive
from headrace.cli.bench.options import count, length, spread

if TYPE_CHECKING:
    from headrace.bench.dataset import Sample
    from headrace.text import Tokenizer


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = kinds.add_parser(
        "prepare-dataset",
        help="write a dataset, of random tokens or words or from ShareGPT",
        description="Write a dataset as JSON Lines, of random tokens or words or from ShareGPT, with exact lengths in the model's tokens.",
    )
    _add_common(parser, default=True)
    sources = parser.add_subparsers(metavar="SOURCE", required=True)
    normal = _source(sources, "token-norm-dist", "random prompts, lengths from a normal distribution", _normal)
    uniform = _source(sources, "token-unif-dist", "random prompts, lengths from a uniform distribution", _uniform)
    sharegpt = _source(sources, "sharegpt", "conversations of a file in ShareGPT's format, sampled as vllm bench does", _sharegpt)
    for what in ("input", "output"):
        normal.add_argument(f"--{what}-mean", type=length, required=True, metavar="N", help=f"mean {what} tokens")
        normal.add_argument(f"--{what}-stdev", type=spread, default=0.0, metavar="S", help="their standard deviation (default: 0)")
        uniform.add_argument(f"--{what}-min", type=length, required=True, metavar="N", help=f"fewest {what} tokens")
        uniform.add_argument(f"--{what}-max", type=length, required=True, metavar="N", help=f"most {what} tokens")
    for random in (normal, uniform):
        random.add_argument("--text", action="store_true", help="prompts are texts of words (default: token ids)")
    sharegpt.add_argument("--input", dest="source", required=True, metavar="FILE", help="the JSON file with the conversations")
    sharegpt.add_argument("--output-len", type=length, metavar="N", help="tokens to generate (default: as many as the answer there has)")
    sharegpt.add_argument("--max-input-len", type=length, default=1024, metavar="N", help="most tokens of a prompt (default: 1024)")
    sharegpt.add_argument(
        "--max-seq-len", type=length, default=2048, metavar="N", help="most tokens of prompt and answer together (default: 2048)"
    )


def _source(
    sources: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    make: Callable[[argparse.Namespace, Any], list[Sample]],
) -> argparse.ArgumentParser:
    parser = sources.add_parser(name, help=what, description=f"A dataset of {what}.")
    parser.add_argument("--num-requests", type=positive, required=True, metavar="N", help="samples")
    _add_common(parser, default=False)
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser, make=make)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: bool) -> None:
    """Options that may stand before the source, as trtllm-bench has them, or behind it. ``default``: whether theirs are set here."""

    def of(value: Any) -> Any:
        # What stands before the source is not to be overwritten by a default of what stands behind it.
        return value if default else argparse.SUPPRESS

    what = f"whose tokens (default: {DEFAULT_MODEL}); echo: those of the echo engine"
    parser.add_argument("--model", default=of(DEFAULT_MODEL), help=what)
    parser.add_argument("--output", default=of("-"), metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument("--seed", type=count, default=of(0), metavar="N", help="the same seed gives the same dataset (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    import numpy as np

    from headrace.bench.dataset import write_jsonl

    samples = arguments.make(arguments, np.random.default_rng(arguments.seed))
    if arguments.output == "-":
        write_jsonl(sys.stdout.buffer, samples)
    else:
        with open(arguments.output, "wb") as file:
            write_jsonl(file, samples)
        print(f"headrace: {len(samples)} samples in {arguments.output}", file=sys.stderr)
    return 0


def _normal(arguments: argparse.Namespace, rng: Any) -> list[Sample]:
    from headrace.bench.synthetic import added_tokens, normal_lengths

    number, tokenizer = arguments.num_requests, _tokenizer(arguments)
    low = 1 + added_tokens(tokenizer) if arguments.text and tokenizer is not None else 1
    inputs = normal_lengths(number, arguments.input_mean, arguments.input_stdev, rng, low)
    return _samples(arguments, tokenizer, inputs, normal_lengths(number, arguments.output_mean, arguments.output_stdev, rng), rng)


def _uniform(arguments: argparse.Namespace, rng: Any) -> list[Sample]:
    from headrace.bench.synthetic import uniform_lengths

    lengths = []
    for what in ("input", "output"):
        low, high = (getattr(arguments, f"{what}_{end}") for end in ("min", "max"))
        if low > high:
            arguments.parser.error(f"--{what}-min {low} is more than --{what}-max {high}")
        lengths.append(uniform_lengths(arguments.num_requests, low, high, rng))
    inputs, outputs = lengths
    return _samples(arguments, _tokenizer(arguments), inputs, outputs, rng)


def _samples(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, inputs: Sequence[int], outputs: Sequence[int], rng: Any
) -> list[Sample]:
    from headrace.bench.synthetic import id_samples, plain_ids, text_samples
    from headrace.config import EchoConfig

    if arguments.text:
        if tokenizer is None:
            parser: argparse.ArgumentParser = arguments.parser
            parser.error("--text needs a model with a tokenizer, and the echo engine has none")
        return text_samples(inputs, outputs, tokenizer, rng)
    return id_samples(inputs, outputs, range(1, EchoConfig().vocab_size) if tokenizer is None else plain_ids(tokenizer), rng)


def _sharegpt(arguments: argparse.Namespace, rng: Any) -> list[Sample]:
    from headrace.bench.sharegpt import read_sharegpt

    tokenizer = _tokenizer(arguments)
    if tokenizer is None:
        parser: argparse.ArgumentParser = arguments.parser
        parser.error("sharegpt needs a model with a tokenizer, and the echo engine has none")
    return read_sharegpt(
        arguments.source,
        arguments.num_requests,
        tokenizer.encode_batch,
        rng,
        output_tokens=arguments.output_len,
        max_input=arguments.max_input_len,
        max_total=arguments.max_seq_len,
    )


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """Of --model; None for the echo engine. Raises ModelError."""
    if arguments.model == "echo":
        return None
    from headrace.checkpoint import resolve_model
    from headrace.text import load_tokenizer

    return load_tokenizer(resolve_model(arguments.model))
