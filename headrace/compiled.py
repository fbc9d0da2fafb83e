"""What an engine folder decides about its world, and what is left to say. The user process reads its manifest, and nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import DType, Quantization
from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.engine.build.manifest import EngineManifest


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
        quantization=manifest.quantization,
        max_batch_size=manifest.max_batch_size if asked.max_batch_size is None else asked.max_batch_size,
        max_seq_len=manifest.max_seq_len if asked.max_seq_len is None else asked.max_seq_len,
    )


def _command(manifest: EngineManifest, folder: str | Path, option: str, value: int | str) -> str:
    from headrace.engine.build.manifest import SHORT_DTYPES

    short: dict[str, str] = {str(long): name for long, name in SHORT_DTYPES.items()}
    return manifest.command(folder=folder, **{option.replace("-", "_"): short.get(str(value), value)})
