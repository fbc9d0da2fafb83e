"""What an engine folder decides about its world, what is left to say, and what a machine must have to run it.

The user process reads the manifest, and nothing else of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import DType, Quantization
from headrace.errors import ModelError
from headrace.selection import INSTALL

if TYPE_CHECKING:
    from headrace.engine.build.manifest import EngineManifest


#: backend -> what is imported, and the names under which it may be installed; the native library is a part of this package
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "onnxruntime": ("onnxruntime", ("onnxruntime",)),
    "tensorrt": ("tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")),
    "tensorrt-rtx": ("tensorrt_rtx", ("tensorrt-rtx",)),
}


class Settings(NamedTuple):
    """Settings of a world that an engine folder has a say in; None: nobody says."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    max_batch_size: int | None = None
    max_seq_len: int | None = None


def engine_manifest(path: str | Path) -> EngineManifest | None:
    """The manifest of an engine folder, checked; None where ``path`` is something else. Raises ModelError that says what does not fit."""
    from headrace.checkpoint.resolve import is_engine_folder

    if not is_engine_folder(path):
        return None
    from headrace.engine.build.manifest import load_manifest

    return load_manifest(path)


def follow(manifest: EngineManifest, asked: Settings, folder: str | Path) -> Settings:
    """The settings that the engine was built with, where ``asked`` does not want less of what can be less: sequences and tokens.

    Raises ModelError for what contradicts it, with both values and the command that builds what was asked for.
    """
    fixed = (
        ("tensor_parallel_size", "tp", asked.tensor_parallel_size, manifest.tp),
        ("pipeline_parallel_size", "pp", asked.pipeline_parallel_size, manifest.pp),
        ("dtype", "dtype", None if asked.dtype == "auto" else asked.dtype, manifest.dtype),
        ("quantization", "quantization", None if asked.quantization == "auto" else asked.quantization, manifest.quantization),
    )
    for name, option, wanted, built in fixed:
        if wanted is not None and wanted != built:
            raise ModelError(f"{name}={wanted!r}, but this engine was built for {built!r}: {_command(manifest, folder, option, wanted)}")
    for name, option, most, built_most in (
        ("max_batch_size", "max-batch", asked.max_batch_size, manifest.max_batch_size),
        ("max_seq_len", "max-seq-len", asked.max_seq_len, manifest.max_seq_len),
    ):
        if most is not None and most > built_most:
            raise ModelError(
                f"{name}={most}, but this engine was built for at most {built_most}: {_command(manifest, folder, option, most)}"
            )
    return Settings(
        tensor_parallel_size=manifest.tp,
        pipeline_parallel_size=manifest.pp,
        dtype=manifest.dtype,
        quantization="auto" if manifest.quantization == "stored" else manifest.quantization,
        max_batch_size=manifest.max_batch_size if asked.max_batch_size is None else asked.max_batch_size,
        max_seq_len=manifest.max_seq_len if asked.max_seq_len is None else asked.max_seq_len,
    )


def _command(manifest: EngineManifest, folder: str | Path, option: str, value: int | str) -> str:
    from headrace.engine.build.manifest import SHORT_DTYPES

    short: dict[str, str] = {str(long): name for long, name in SHORT_DTYPES.items()}
    return manifest.command(folder=folder, **{option.replace("-", "_"): short.get(str(value), value)})


class Here(NamedTuple):
    """What there is to run an engine with.

    Attributes:
        version: of the backend's package, or the native library's instruction set; empty: nobody knows; None: it is not there.
        capabilities: of the GPUs that this process may use, as ``8.9``.
        memory: bytes of memory that are free for use; None: unknown.
    """

    version: str | None
    capabilities: tuple[str, ...] = ()
    memory: int | None = None


def obstacles(manifest: EngineManifest, here: Here) -> list[str]:
    """Why the engine cannot run here, with what mends it; empty where nothing speaks against it."""
    backend = manifest.backend
    if here.version is None:
        return [f"{backend} is not installed: {INSTALL[backend]}"]
    if backend in ("native", "onnxruntime"):
        return _memory(manifest, here.memory)
    found = []
    built = manifest.versions.get(backend)
    if built and here.version and built != here.version:
        found.append(f"its plans were built by {backend} {built}, and {here.version} is installed: {manifest.command()}")
    if len(here.capabilities) < manifest.size:
        found.append(f"each of its {manifest.size} ranks needs a GPU, and GPUs here: {len(here.capabilities)}")
    if manifest.capability is not None:
        fitting = [capability.strip() for capability in manifest.capability.split(",")]
        others = sorted({capability for capability in here.capabilities if capability not in fitting})
        if others:
            found.append(
                f"its plans are for GPUs of compute capability {manifest.capability}, and here are some of {', '.join(others)}: "
                + manifest.command()
            )
    return found


def _memory(manifest: EngineManifest, free: int | None) -> list[str]:
    needed = sum(file.nbytes for rank in manifest.ranks for file in rank.files)
    if free is None or needed <= free:
        return []
    return [f"its weights take {needed} bytes of memory, and {free} are free"]
