"""What is to be built, with every choice made: pure, so that what cannot work is refused before anything is read or written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from headrace.checkpoint.config import ModelConfig
from headrace.engine.build.manifest import ON_CPU, Backend, EngineDType, EngineFile, EngineRank, Flavour, Quantization
from headrace.engine.build.spec import GraphSpec
from headrace.engine.models import family_of
from headrace.engine.place import Place
from headrace.errors import ModelError

#: what each backend computes with, its default first
DTYPES: dict[Backend, tuple[EngineDType, ...]] = {
    "native": ("float32", "bfloat16", "float16"),
    "onnxruntime": ("float32", "float16"),
    "tensorrt": ("bfloat16", "float16", "float32"),
    "tensorrt-rtx": ("bfloat16", "float16", "float32"),
}
DEFAULT_BATCH_SIZE = 64
#: tokens of one sequence in one step, where nobody says and the context is longer
DEFAULT_CHUNK = 2048


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks for; None: as the backend or the model has it. ``headrace build --help`` describes each."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: EngineDType | None = None
    quantization: Literal["auto"] | Quantization = "auto"
    backend: Backend = "onnxruntime"
    max_batch_size: int = DEFAULT_BATCH_SIZE
    max_seq_len: int | None = None
    chunk: int | None = None
    capabilities: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is built. ``specs``: of the graph of each rank. ``capabilities``: of GPUs to build plans for; empty: as the backend has it."""

    config: ModelConfig
    backend: Backend
    dtype: EngineDType
    quantization: Quantization
    flavour: Flavour
    tp: int
    pp: int
    max_batch_size: int
    max_seq_len: int
    chunk: int
    specs: tuple[GraphSpec, ...]
    capabilities: tuple[str, ...] = ()

    @property
    def has_plans(self) -> bool:
        """Whether graphs are compiled further."""
        return self.backend not in ON_CPU


def resolve_target(options: BuildOptions, config: ModelConfig, flavour: Flavour, quantization: Quantization) -> Target:
    """Every choice made. Raises ModelError, with value and limit, for what cannot be built or run.

    Args:
        options: what the user asks for.
        config: of the model.
        flavour, quantization: what ``options.quantization`` means for this model and backend.
    """
    family_of(config)
    backend = options.backend
    if backend not in get_args(Backend):
        raise ModelError(f"backend {backend!r} is none of {', '.join(get_args(Backend))}")
    dtype = options.dtype or DTYPES[backend][0]
    if dtype not in DTYPES[backend]:
        raise ModelError(f"{backend} does not compute in {dtype}; choose one of {', '.join(DTYPES[backend])}")
    if options.capabilities and backend in ON_CPU:
        raise ModelError(f"capability {', '.join(options.capabilities)} is of GPUs, and {backend} runs on CPUs here")
    if quantization != "none" and backend not in ON_CPU:
        raise ModelError(f"quantization {quantization} is for {' and '.join(ON_CPU)}; with {backend} leave it out or say none")
    for name, value in (
        ("tp", options.tensor_parallel_size),
        ("pp", options.pipeline_parallel_size),
        ("max-batch", options.max_batch_size),
        ("max-seq-len", options.max_seq_len),
        ("chunk", options.chunk),
    ):
        if value is not None and value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1")
    max_seq_len = options.max_seq_len or config.max_seq_len
    if max_seq_len > config.max_seq_len:
        raise ModelError(f"max-seq-len {max_seq_len} exceeds the context of the model, {config.max_seq_len} tokens")
    chunk = options.chunk or min(DEFAULT_CHUNK, max_seq_len)
    if chunk > max_seq_len:
        raise ModelError(f"chunk {chunk} exceeds max-seq-len {max_seq_len}: no sequence has so many tokens")
    tp, pp = options.tensor_parallel_size, options.pipeline_parallel_size
    if pp > config.num_layers:
        raise ModelError(f"pp {pp} exceeds the {config.num_layers} layers of the model: each stage needs at least one")
    if tp > config.num_heads:
        raise ModelError(f"tp {tp} exceeds the {config.num_heads} attention heads of the model: each rank needs at least one")
    places = [Place(rank, tp, pp) for rank in range(tp * pp)]
    specs = tuple(
        GraphSpec(
            max_seq_len=max_seq_len,
            tensor_parallel_size=tp,
            rank=place.tensor_rank,
            stages=pp,
            stage=place.stage,
            dtype=dtype,
            quantization=quantization,
            flavour=flavour,
        )
        for place in places
    )
    for spec in specs:
        spec.check(config)
    return Target(
        config=config,
        backend=backend,
        dtype=dtype,
        quantization=quantization,
        flavour=flavour,
        tp=tp,
        pp=pp,
        max_batch_size=options.max_batch_size,
        max_seq_len=max_seq_len,
        chunk=chunk,
        specs=specs,
        capabilities=options.capabilities,
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank's files must have been made from; ``plan``: None where there are to be none."""

    rank: int
    graph: str
    plan: str | None


@dataclass(frozen=True, slots=True)
class RankWork:
    """What is to be done for one rank.

    Attributes:
        rank: in the world.
        graph, plan: which of its files are made.
        old: its entry in the last build, some files of which stay.
        kept: its entry, where all stays as it is.
    """

    rank: int
    graph: bool
    plan: bool
    old: EngineRank | None = None
    kept: EngineRank | None = None


def plan_work(wanted: Collection[Wanted], old: Mapping[int, EngineRank], sound: Collection[EngineFile], force: bool) -> list[RankWork]:
    """Which files are made anew: those of another fingerprint, those that are not as they were built, and with ``force`` all.

    A plan depends on its graph's fingerprint and not on its file: a graph that is made again is the same one.

    Args:
        wanted: of every rank.
        old: what an earlier build has made, by rank.
        sound: files of it whose content is still the same.
        force: make all anew.
    """
    work = []
    for one in wanted:
        entry = old.get(one.rank)
        if entry is None or force:
            work.append(RankWork(one.rank, True, one.plan is not None))
            continue
        graph = entry.graph_fingerprint != one.graph or not all(file in sound for file in entry.files if file.name != entry.plan)
        has_plan = entry.plan_fingerprint == one.plan and all(file in sound for file in entry.files if file.name == entry.plan)
        plan = one.plan is not None and not has_plan
        # An entry with a plan that is not wanted any more is written anew without it.
        kept = None if graph or plan or entry.plan_fingerprint != one.plan else entry
        work.append(RankWork(one.rank, graph, plan, entry, kept))
    return work
