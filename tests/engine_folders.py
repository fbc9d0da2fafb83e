"""Engine folders whose files are no engines: for what reads manifests and moves files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.engine.build.manifest import MANIFEST, EngineManifest, EngineRank, describe_file, encode_manifest
from headrace.engine.models.shard import Shard
from tests.memory_checkpoint import tiny_config


def make_folder(folder: Path, tp: int = 2, pp: int = 1, **changes: Any) -> EngineManifest:
    """Write a folder of tiny files with its manifest, which is given back."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    backend = changes.get("backend", "onnxruntime")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    ranks = []
    for rank in range(tp * pp):
        stage, place = divmod(rank, tp)
        shard = Shard.of(config, place, tp)
        names = [f"rank{rank}.onnx", f"rank{rank}.onnx.data"] + ([] if backend == "onnxruntime" else [f"rank{rank}.plan"])
        for name in names:
            (folder / name).write_bytes(f"{name} of the engine".encode() * 100)
        ranks.append(
            EngineRank(
                rank=rank,
                stage=stage,
                place=place,
                layers=(stage * config.num_layers // pp, (stage + 1) * config.num_layers // pp),
                query_heads=shard.query_heads,
                kv_heads=shard.kv_heads,
                mlp_columns=shard.mlp_columns,
                vocabulary=shard.vocabulary,
                graph=names[0],
                plan=None if backend == "onnxruntime" else names[2],
                fingerprint=f"{rank:064x}",
                files=tuple(describe_file(folder, name) for name in names),
                seconds=0.5,
                peak_bytes=1 << 20,
            )
        )
    fields: dict[str, Any] = {
        "format": 1,
        "model": "tiny",
        "model_sha256": "a" * 64,
        "source": "models/tiny one",
        "source_files": (),
        "config": config,
        "tp": tp,
        "pp": pp,
        "dtype": "float32",
        "quantization": "none",
        "backend": backend,
        "flavour": "portable",
        "max_batch_size": 4,
        "max_seq_len": 64,
        "chunk": 32,
        "versions": {"headrace": "0.0", "onnx": "1.0"},
        "capability": None if backend == "onnxruntime" else "8.9",
        "ranks": tuple(ranks),
        "tokenizer": tuple(describe_file(folder, name) for name in ("tokenizer.json", "tokenizer_config.json")),
        "created": "2026-01-01T00:00:00+00:00",
    }
    manifest = EngineManifest(**(fields | changes)).signed()
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    return manifest
