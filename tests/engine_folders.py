"""Engine folders whose files are no engines, and a compiler that makes such files: for what reads manifests and moves files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.engine.base import ProgressHook
from headrace.engine.build.driver import BuildReport, build_engine
from headrace.engine.build.manifest import MANIFEST, ON_CPU, EngineManifest, EngineRank, describe_file, encode_manifest
from headrace.engine.build.target import BuildOptions, Target, resolve_target
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
        names = [f"rank{rank}.weights"] if backend == "native" else [f"rank{rank}.onnx", f"rank{rank}.onnx.data"]
        names += [] if backend in ON_CPU else [f"rank{rank}.plan"]
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
                plan=None if backend in ON_CPU else names[2],
                graph_fingerprint=f"{rank:064x}",
                plan_fingerprint=None if backend in ON_CPU else f"{rank:064x}",
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
        "capability": None if backend in ON_CPU else "8.9",
        "ranks": tuple(ranks),
        "tokenizer": tuple(describe_file(folder, name) for name in ("tokenizer.json", "tokenizer_config.json")),
        "created": "2026-01-01T00:00:00+00:00",
    }
    manifest = EngineManifest(**(fields | changes)).signed()
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    return manifest


class SmallCompiler:
    """Files that say what they are. ``before``: called with the name of what is about to be written."""

    def __init__(self, target: Target, before: Callable[[str], None] = lambda name: None) -> None:
        self.target = target
        self.before = before
        self.versions = {"small": "1.0"}
        self.capability = "8.9" if target.has_plans else None
        self.made: list[str] = []
        self.size = 1000
        self.recipe = "a recipe"

    def graph_fingerprint(self, rank: int, model_sha256: str) -> str:
        return hashlib.sha256(repr((model_sha256, self.target.specs[rank], self.recipe)).encode()).hexdigest()

    def plan_fingerprint(self, rank: int, graph_fingerprint: str) -> str | None:
        limits = self.target.max_batch_size, self.target.chunk
        return hashlib.sha256(repr((graph_fingerprint, limits)).encode()).hexdigest() if self.target.has_plans else None

    def needed_bytes(self, rank: int) -> int:
        return self.size

    def write_graph(self, rank: int, folder: Path, stem: str, progress: ProgressHook) -> list[str]:
        names = [f"{stem}.onnx.data", f"{stem}.onnx"]
        for name in names:
            self.before(name)
            progress("export", 0, 1)
            (folder / name).write_text(f"{name} of {self.target.specs[rank]}")
            progress("export", 1, 1)
            self.made.append(name)
        return names

    def write_plan(self, rank: int, graph: Path, progress: ProgressHook) -> str:
        name = f"rank{rank}.plan"
        self.before(name)
        part = graph.with_name(f"{name}.{os.getpid()}.part")
        part.write_text(f"plan of {graph.read_text()} for {self.target.max_batch_size}, {self.target.chunk}")
        part.replace(graph.with_name(name))
        self.made.append(name)
        return name


def target(**options: Any) -> Target:
    return resolve_target(BuildOptions(**options), tiny_config(), "portable", "none")


def build(model: Path, folder: Path, compiler: SmallCompiler, **more: Any) -> BuildReport:
    compiler.made.clear()
    return build_engine(model_path=model, source="tiny.gguf", name="tiny", target=compiler.target, compiler=compiler, folder=folder, **more)
