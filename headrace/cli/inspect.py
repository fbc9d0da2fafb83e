"""``headrace inspect``: what an engine folder holds, and whether this machine can run it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli._options import add_debug_option
from headrace.cli._sizes import size, table
from headrace.cli.build import Bars
from headrace.compiled import PACKAGES, Here, obstacles

if TYPE_CHECKING:
    from headrace.engine.build.manifest import EngineManifest, EngineRank

#: quantization in words, where it is not its name
WEIGHTS = {"none": "not quantized", "stored": "as the checkpoint has them"}
#: spans of a rank that people ask about
SPANS = ("layers", "query_heads", "kv_heads", "mlp_columns", "vocabulary")


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "inspect",
        help="explain an engine folder",
        description="Explain what an engine folder holds, how the model is split over ranks, and whether this machine can run it.",
    )
    parser.add_argument("folder", metavar="DIR", help="made by headrace build")
    parser.add_argument("--verify", action="store_true", help="read every file whole and compare its hash")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when a file is not as it was built, or when this machine cannot run the engine."""
    from headrace.engine.build.manifest import load_manifest, verify

    folder = Path(arguments.folder)
    manifest = load_manifest(folder)
    faults: list[str] | None = None
    if arguments.verify:
        bars = Bars()
        try:
            faults = verify(manifest, folder, lambda done, total: bars("verify", done, total))
        finally:
            bars.close()
    against = obstacles(manifest, look(manifest))
    if arguments.json:
        print(json.dumps(as_json(manifest, folder, faults, against), indent=2))
    else:
        print(as_text(manifest, folder, faults, against))
    return 1 if faults or against else 0


def look(manifest: EngineManifest) -> Here:
    """At this machine, for this engine; nothing is imported."""
    version = _instruction_set() if manifest.backend == "native" else _package(*PACKAGES[manifest.backend])
    amounts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(amounts["MemAvailable"].split()[0]) * 1024
    return Here(version, () if manifest.backend in ("native", "onnxruntime") else _gpus(), memory)


def _package(module: str, names: tuple[str, ...]) -> str | None:
    return None if importlib.util.find_spec(module) is None else next(filter(None, map(_version, names)), "")


def _instruction_set() -> str | None:
    from headrace.native import NativeLibraryError, instruction_set

    try:
        return instruction_set()
    except NativeLibraryError:
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    from headrace.engine.runners.cuda_driver import CudaDriver, CudaError

    try:
        devices = CudaDriver().devices()
    except CudaError:
        return ()
    return tuple("{}.{}".format(*device.capability) for device in devices)


def as_json(manifest: EngineManifest, folder: Path, faults: list[str] | None, against: list[str]) -> dict[str, Any]:
    """For programs."""
    import msgspec

    def described(rank: EngineRank) -> dict[str, Any]:
        per_token = manifest.kv_bytes_per_token(rank.rank)
        slot = {"kv_bytes_per_token": per_token, "kv_bytes_per_slot": per_token * manifest.max_seq_len}
        return {**msgspec.to_builtins(rank), **slot}

    return {
        "folder": str(folder.absolute()),
        "family": manifest.family,
        **msgspec.to_builtins(manifest),
        "ranks": [described(rank) for rank in manifest.ranks],
        "faults": faults,
        "runs_here": not against,
        "obstacles": against,
    }


def as_text(manifest: EngineManifest, folder: Path, faults: list[str] | None, against: list[str]) -> str:
    """For people."""
    config = manifest.config
    total = sum(file.nbytes for file in manifest.files())
    ranks = f"tp {manifest.tp}" + (f" x pp {manifest.pp}" if manifest.pp > 1 else "")
    for_gpus = (
        ""
        if manifest.backend in ("native", "onnxruntime")
        else f", for compute capability {manifest.capability or 'any that TensorRT for RTX knows'}"
    )
    facts = [
        ("folder", str(folder.absolute())),
        ("model", f"{manifest.model}, from {manifest.source} (sha256 {manifest.model_sha256[:16]})"),
        (
            "family",
            f"{manifest.family}: {config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads and {config.num_kv_heads} "
            f"KV heads of {config.head_dim}, MLP {config.intermediate_size}, vocabulary {config.vocab_size}",
        ),
        ("runs on", f"{manifest.backend}, {ranks}: {manifest.size} {'rank' if manifest.size == 1 else 'ranks'}{for_gpus}"),
        ("numbers", f"{manifest.dtype}, weights {WEIGHTS.get(manifest.quantization, manifest.quantization)}"),
        ("graphs", manifest.flavour),
        ("limits", f"{manifest.max_batch_size} sequences of {manifest.max_seq_len} tokens, {manifest.chunk} of one in a step"),
        ("built", f"{manifest.created} by {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"),
        ("size", f"{size(total)} in {sum(1 for _ in manifest.files())} files"),
    ]
    heads = [
        "rank",
        "layers",
        "heads",
        "KV heads",
        "MLP columns",
        "vocabulary",
        "KV of a token",
        "KV of a slot",
        "files",
        "built in",
        "memory",
    ]
    rows = [heads, *(_row(manifest, rank) for rank in manifest.ranks)]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {what}" for name, what in facts]
    lines += ["", table(rows), ""]
    lines += [table([[file.name, size(file.nbytes), file.sha256[:16]] for file in manifest.files()]), ""]
    if faults is None:
        lines.append("files are there with their sizes; --verify compares their contents as well")
    elif not faults:
        lines.append("all files are as they were built")
    else:
        lines += [f"DAMAGED  {fault}" for fault in faults]
        lines.append(f"         -> {manifest.command(folder=folder)}")
    lines += [f"CANNOT RUN HERE  {reason}" for reason in against] or [f"can run here: headrace serve {folder}"]
    return "\n".join(lines)


def _row(manifest: EngineManifest, rank: EngineRank) -> list[str]:
    per_token = manifest.kv_bytes_per_token(rank.rank)
    cells = [str(rank.rank)]
    for name in SPANS:
        if name == "vocabulary" and rank.stage < manifest.pp - 1:
            cells.append("none")  # the head is on the last stage
            continue
        start, stop = getattr(rank, name)
        cells.append(f"{start}-{stop - 1}" if stop - start > 1 else str(start))
    cells += [size(per_token), size(per_token * manifest.max_seq_len), size(sum(file.nbytes for file in rank.files))]
    return [*cells, f"{rank.seconds:.1f} s", size(rank.peak_bytes)]
