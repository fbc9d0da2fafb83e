"""Builds an engine folder: a graph for each rank, a plan from it where the backend wants one, the tokenizer, and at last the manifest.

One rank after the other, so that the memory that is needed does not grow with their number. What has not changed since the last build
stays; ``target.plan_work`` says what has.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.checkpoint import Checkpoint, resolve_model
from headrace.checkpoint.hashing import hash_files
from headrace.checkpoint.resolve import PACKAGED
from headrace.checkpoint.sources import SourceFile, check_unchanged, hash_sources, model_digest, source_paths
from headrace.checkpoint.tokenizer_files import tokenizer_files
from headrace.engine.base import ProgressHook
from headrace.engine.build.folder import BuildFolder, Progress
from headrace.engine.build.manifest import FORMAT, EngineFile, EngineManifest, EngineRank, describe_file
from headrace.engine.build.target import RankWork, Target, Wanted, plan_work
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError
from headrace.version import __version__

#: beside what a rank's files take, for everything else that may be written meanwhile
SPARE_BYTES = 64 << 20


class Compiler(Protocol):
    """Makes the files of ranks, in the folder that it is given. ``engine.build.compiler`` has the real one.

    Attributes:
        versions: of what it makes them with.
        capability: of the GPUs that its plans run on, as text; None: any.
    """

    versions: dict[str, str]
    capability: str | None

    def graph_fingerprint(self, rank: int, model_sha256: str) -> str:
        """Of all that the graph of a rank is made from."""

    def plan_fingerprint(self, rank: int, graph_fingerprint: str) -> str | None:
        """Of all that its plan is made from; None: there is none."""

    def needed_bytes(self, rank: int) -> int:
        """Size of its graph's weights, which is that of its plan too."""

    def write_graph(self, rank: int, folder: Path, stem: str, progress: ProgressHook) -> list[str]:
        """Write the graph, or what the backend has in its place, behind what it refers to; their names. Raises ModelError, OSError."""

    def write_plan(self, rank: int, graph: Path, progress: ProgressHook) -> str:
        """Put the plan of the graph in this file beside it, whole or not at all; its name. Raises ModelError, OSError."""


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """One line of the report. ``kept``: it is of an earlier build."""

    name: str
    nbytes: int
    kept: bool


@dataclass(slots=True)
class BuildReport:
    """What a build did. ``seconds`` and ``peak_bytes`` are of this process as a whole."""

    manifest: EngineManifest
    files: list[BuiltFile] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0


def build_from(
    model: str,
    prepare: Callable[[Checkpoint], tuple[Target, Compiler]],
    folder: Path,
    *,
    force: bool = False,
    progress: ProgressHook = lambda stage, done, total: None,
) -> BuildReport:
    """``build_engine`` of a model that is named as ``LLM`` takes it. ``prepare``: what to build of its checkpoint, and who makes it."""
    path = resolve_model(model)
    # As it is called from anywhere on this machine.
    source = str(path) if Path(model).expanduser().exists() and model not in PACKAGED else model
    with open_checkpoint(path) as checkpoint:
        target, compiler = prepare(checkpoint)
        return build_engine(
            model_path=path,
            source=source,
            name=model if model in PACKAGED else checkpoint.name,
            target=target,
            compiler=compiler,
            folder=folder,
            force=force,
            progress=progress,
        )


def build_engine(
    *,
    model_path: Path,
    source: str,
    name: str,
    target: Target,
    compiler: Compiler,
    folder: Path,
    force: bool = False,
    progress: ProgressHook = lambda stage, done, total: None,
) -> BuildReport:
    """Build, or bring up to date, the engine in ``folder``.

    Args:
        model_path: the checkpoint.
        source: the same as the user calls it.
        name: of the model.
        target: what to build.
        compiler: makes the files.
        folder: empty, not there yet, or of an earlier build.
        force: make everything anew.
        progress: told of the stages "hash", "check", and for each rank "rank R: graph" and "rank R: plan".

    Raises:
        ModelError: it cannot be built, or written; an engine that was there before and has been changed already is refused until a build
            ends.
    """
    began = time.monotonic()
    with BuildFolder(folder) as place:
        try:
            report = _Build(place, target, compiler, progress).run(model_path, source, name, force)
        except OSError as error:
            raise ModelError(_told(error, place)) from error
    report.seconds, report.peak_bytes = time.monotonic() - began, _peak_bytes()
    return report


def _told(error: OSError, place: BuildFolder) -> str:
    where = error.filename or place.path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{where} cannot be written: the disk of {place.path} is full; make room and run the same build again, which goes on from here"
        )
    return f"{where} cannot be written: {error.strerror or error}"


class _Build:
    def __init__(self, place: BuildFolder, target: Target, compiler: Compiler, progress: ProgressHook) -> None:
        self._place = place
        self._target = target
        self._compiler = compiler
        self._progress = progress

    def run(self, model_path: Path, source: str, name: str, force: bool) -> BuildReport:
        old_manifest, old = self._place.previous()
        sources = hash_sources(
            source_paths(model_path), () if force else old.source_files, lambda done, total: self._progress("hash", done, total)
        )
        model_sha256 = model_digest(sources)
        wanted = self._wanted(model_sha256)
        old_ranks = {rank.rank: rank for rank in old.ranks}
        work = plan_work(wanted, old_ranks, [] if force else self._sound(old.ranks), force)
        texts = tokenizer_files(model_path)
        tokenizer = self._kept_tokenizer(texts, [] if force else old.tokenizer)
        ranks = [one.kept for one in work if one.kept is not None]
        if old_manifest is not None and len(ranks) == len(work) and len(tokenizer) == len(texts):
            manifest = self._manifest(name, source, model_sha256, sources, ranks, tokenizer)
            if msgspec.structs.replace(manifest, created=old_manifest.created).signed() == old_manifest:
                return self._report(old_manifest, {file.name for file in old_manifest.files()}, [])
        self._place.begin(Progress(ranks=tuple(ranks), source_files=tuple(sources)))
        kept = {file.name for rank in ranks for file in rank.files} | {file.name for file in tokenizer}
        for one, fingerprints in zip(work, wanted, strict=True):
            if one.kept is None:
                rank, kept_files = self._make(one, fingerprints)
                kept |= kept_files
                ranks.append(rank)
                self._place.record(Progress(ranks=tuple(ranks), source_files=tuple(sources)))
        # What was written may be of another model than what was hashed.
        check_unchanged(sources)
        for file, content in texts.items():
            if file not in kept:
                self._place.put_bytes(file, content)
        tokenizer = tuple(describe_file(self._place.path, file) for file in texts)
        manifest = self._manifest(name, source, model_sha256, sources, sorted(ranks, key=lambda rank: rank.rank), tokenizer)
        stale = {file.name for rank in old.ranks for file in rank.files} | {file.name for file in old.tokenizer}
        removed = sorted(stale - {file.name for file in manifest.files()})
        self._place.finish(manifest.signed(), removed)
        return self._report(manifest.signed(), kept, removed)

    def _wanted(self, model_sha256: str) -> list[Wanted]:
        wanted = []
        for rank in range(self._target.tp * self._target.pp):
            graph = self._compiler.graph_fingerprint(rank, model_sha256)
            wanted.append(Wanted(rank, graph, self._compiler.plan_fingerprint(rank, graph)))
        return wanted

    def _sound(self, ranks: Iterable[EngineRank]) -> list[EngineFile]:
        """Files that are as they were built, each read whole."""
        files = [file for rank in ranks for file in rank.files if self._has_size(file)]
        digests = hash_files([self._place.path / file.name for file in files], lambda done, total: self._progress("check", done, total))
        return [file for file, digest in zip(files, digests, strict=True) if digest == file.sha256]

    def _has_size(self, file: EngineFile) -> bool:
        path = self._place.path / file.name
        return path.is_file() and path.stat().st_size == file.nbytes

    def _kept_tokenizer(self, texts: Mapping[str, bytes], old: Iterable[EngineFile]) -> tuple[EngineFile, ...]:
        """Files that are there and as they would be written."""
        known = {file.name: file for file in old if self._has_size(file)}
        return tuple(
            known[name]
            for name, content in texts.items()
            if name in known
            and known[name].sha256 == hashlib.sha256(content).hexdigest()
            and (self._place.path / name).read_bytes() == content
        )

    def _make(self, work: RankWork, wanted: Wanted) -> tuple[EngineRank, set[str]]:
        """Make what a rank needs; its entry, and the names of files that it keeps."""
        began = time.monotonic()
        place, compiler, rank = self._place, self._compiler, work.rank
        stem = f"rank{rank}"
        old = {} if work.old is None else {file.name: file for file in work.old.files}
        old_plan = None if work.old is None else work.old.plan
        needed = compiler.needed_bytes(rank) * (work.graph + work.plan) + SPARE_BYTES
        if needed > (free := place.free_bytes()):
            raise ModelError(f"rank {rank} needs {needed} bytes in {place.path}, and {free} are free on its disk")
        if work.graph:
            names = compiler.write_graph(rank, place.work, stem, self._stage(f"rank {rank}: graph"))
            for name in names:
                place.put(name)
            graph, files = names[-1], [describe_file(place.path, name) for name in names]
        else:
            assert work.old is not None
            graph, files = work.old.graph, [file for file in old.values() if file.name != old_plan]
        plan = None
        if wanted.plan is not None:
            if work.plan:
                plan = compiler.write_plan(rank, place.path / graph, self._stage(f"rank {rank}: plan"))
                place.sync(plan)
                files.append(describe_file(place.path, plan))
            else:
                assert old_plan is not None
                plan = old_plan
                files.append(old[plan])
        made = self._entry(wanted, graph, plan, tuple(files), time.monotonic() - began)
        return made, {file.name for file in files if old.get(file.name) is file}

    def _stage(self, stage: str) -> ProgressHook:
        return lambda _, done, total: self._progress(stage, done, total)

    def _entry(self, wanted: Wanted, graph: str, plan: str | None, files: tuple[EngineFile, ...], seconds: float) -> EngineRank:
        spec = self._target.specs[wanted.rank]
        shard, layers = spec.shard(self._target.config), spec.layers(self._target.config)
        return EngineRank(
            rank=wanted.rank,
            stage=spec.stage,
            place=spec.rank,
            layers=(layers.start, layers.stop),
            query_heads=shard.query_heads,
            kv_heads=shard.kv_heads,
            mlp_columns=shard.mlp_columns,
            vocabulary=shard.vocabulary,
            graph=graph,
            plan=plan,
            graph_fingerprint=wanted.graph,
            plan_fingerprint=wanted.plan,
            files=files,
            seconds=round(seconds, 3),
            peak_bytes=_peak_bytes(),
        )

    def _manifest(
        self,
        name: str,
        source: str,
        model_sha256: str,
        sources: Iterable[SourceFile],
        ranks: Iterable[EngineRank],
        tokenizer: tuple[EngineFile, ...],
    ) -> EngineManifest:
        target = self._target
        return EngineManifest(
            format=FORMAT,
            model=name,
            model_sha256=model_sha256,
            source=source,
            source_files=tuple(sources),
            config=target.config,
            tp=target.tp,
            pp=target.pp,
            dtype=target.dtype,
            quantization=target.quantization,
            backend=target.backend,
            flavour=target.flavour,
            max_batch_size=target.max_batch_size,
            max_seq_len=target.max_seq_len,
            chunk=target.chunk,
            versions={"headrace": __version__, **self._compiler.versions},
            capability=self._compiler.capability,
            ranks=tuple(ranks),
            tokenizer=tokenizer,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _report(self, manifest: EngineManifest, kept: set[str], removed: list[str]) -> BuildReport:
        return BuildReport(manifest, [BuiltFile(file.name, file.nbytes, file.name in kept) for file in manifest.files()], removed)


def _peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
