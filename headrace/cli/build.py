"""``headrace build``: from a checkpoint to an engine folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headrace.cli._options import DEFAULT_MODEL, add_debug_option, positive
from headrace.cli._sizes import size, table
from headrace.config import Quantization
from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.engine.build.driver import BuildReport
    from headrace.engine.build.manifest import EngineDType

DTYPES: dict[str, EngineDType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BACKENDS = ("native", "onnxruntime", "tensorrt", "tensorrt-rtx")


def dtype(text: str) -> str:
    """argparse type: a type of weights and activations, by its short or its long name."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return name


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "build",
        help="compile a model into an engine folder",
        description="Compile a model into a folder that headrace serve, generate, chat, bench and LLM() run instead of the checkpoint. "
        "What has not changed since the last build into it stays as it is.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a GGUF file, a Hugging Face folder or hub id (default: {DEFAULT_MODEL})")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the engine folder: empty, not there yet, or built before")
    group = parser.add_argument_group("engine")
    group.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help=f"what runs it (default: {BACKENDS[0]}, on CPU)")
    group.add_argument(
        "--tp", "--tensor-parallel-size", dest="tp", type=positive, default=1, metavar="N", help="ranks that share every layer (default: 1)"
    )
    group.add_argument(
        "--pp",
        "--pipeline-parallel-size",
        dest="pp",
        type=positive,
        default=1,
        metavar="N",
        help="stages that share the layers (default: 1)",
    )
    group.add_argument(
        "--dtype",
        type=dtype,
        metavar="TYPE",
        help="fp32, fp16 or bf16 (default: as stored for native, fp32 for onnxruntime, bf16 for TensorRT)",
    )
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="auto",
        help="of the weights, on CPU (default: auto: as stored for native, none for onnxruntime)",
    )
    group.add_argument("--max-batch", type=positive, default=64, metavar="N", help="most sequences in one step (default: 64)")
    group.add_argument("--max-seq-len", type=positive, metavar="N", help="most tokens of prompt plus answer (default: the model's context)")
    group.add_argument(
        "--chunk", type=positive, metavar="N", help="most tokens of one sequence in one step (default: 2048, if it has so many)"
    )
    group.add_argument(
        "--capability",
        nargs="+",
        default=[],
        metavar="X.Y",
        help="compute capabilities of the GPUs that tensorrt-rtx builds for (default: all that it supports)",
    )
    parser.add_argument("--force", action="store_true", help="make everything anew")
    parser.add_argument("--json", action="store_true", help="what was built, as one JSON object")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when the engine is there, whether or not something had to be made."""
    from headrace.engine.build.target import BuildOptions

    options = BuildOptions(
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        backend=arguments.backend,
        max_batch_size=arguments.max_batch,
        max_seq_len=arguments.max_seq_len,
        chunk=arguments.chunk,
        capabilities=tuple(arguments.capability),
    )
    build_model = builder(arguments.backend)
    bars = Bars()
    try:
        report = build_model(arguments.model, options, Path(arguments.output), force=arguments.force, progress=bars)
    finally:
        bars.close()
    warn_of_tokenizer(report, Path(arguments.output))
    if arguments.json:
        print(json.dumps(as_json(report, arguments.output), indent=2))
    else:
        print(as_text(report, arguments.output))
    return 0


def builder(backend: str) -> Callable[..., BuildReport]:
    """What builds for this backend: ``build_model`` or ``build_native``. Raises ModelError where what it needs is not there."""
    if backend == "native":
        from headrace.engine.build.native_build import build_native

        return build_native
    try:
        from headrace.engine.build.compiler import build_model
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "ml_dtypes"):
            raise
        raise ModelError(f'headrace build for {backend} needs {error.name}, which is not installed: pip install "headrace[onnx]"') from None
    return build_model


def warn_of_tokenizer(report: BuildReport, folder: Path) -> None:
    """Better here than when the engine is to be run, perhaps elsewhere."""
    from headrace.text import load_tokenizer

    try:
        if not report.manifest.tokenizer:
            raise ModelError("the checkpoint has none")
        load_tokenizer(folder)
    except ModelError as error:
        print(f"headrace: the engine has no tokenizer that can be used, and needs LLM(tokenizer=...): {error}", file=sys.stderr)


class Bars:
    """A bar on stderr, where that is a terminal, for each stage of a build in turn."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """A ``ProgressHook``."""
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            self._stage = stage
            # The monitor thread is for bars that get stuck; it would outlive this one. Plans are told in parts, everything else in bytes.
            tqdm.monitor_interval = 0
            in_bytes = not stage.endswith("plan")
            unit = {"unit": "B", "unit_scale": True} if in_bytes else {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"}
            self._bar = tqdm(desc=stage, total=total, disable=None, leave=False, **unit)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def as_json(report: BuildReport, folder: str) -> dict[str, Any]:
    """For programs."""
    manifest = report.manifest
    return {
        "folder": str(Path(folder).absolute()),
        "model": manifest.model,
        "files": [{"name": file.name, "bytes": file.nbytes, "kept": file.kept} for file in report.files],
        "removed": report.removed,
        "ranks": [{"rank": rank.rank, "seconds": rank.seconds, "peak_bytes": rank.peak_bytes} for rank in manifest.ranks],
        "seconds": round(report.seconds, 3),
        "peak_bytes": report.peak_bytes,
    }


def as_text(report: BuildReport, folder: str) -> str:
    """For people."""
    rows = [[file.name, size(file.nbytes), "kept" if file.kept else "built"] for file in report.files]
    lines = [table(rows), *(f"removed {name}" for name in report.removed)]
    made = sum(not file.kept for file in report.files)
    total = size(sum(file.nbytes for file in report.files))
    lines.append(
        f"{folder}: {total} in {len(report.files)} files, of which {made} were built in {report.seconds:.1f} s; "
        f"most memory {size(report.peak_bytes)}"
        if made
        else f"{folder}: up to date, {total} in {len(report.files)} files"
    )
    lines.append(f"headrace serve {folder}")
    return "\n".join(lines)
