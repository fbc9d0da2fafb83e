"""``engine.json``: what an engine folder holds, so that it runs without the checkpoint that it was built from.

What is checked when:

* ``load_manifest``, in the user process and in every rank: that the manifest is as its build wrote it (a digest of itself), of a format
  that this version reads, free of contradictions, and that every file is there with its size. Milliseconds for any size of model.
* ``EngineManifest.check_rank``, in each rank for its own files before it loads them: a digest of samples of each file, at most 4 MiB, which
  tells files of another rank, model or build from the right ones, but not a single bit that has changed elsewhere.
* ``verify``, when a build ends and by ``headrace inspect --verify``: the whole of every file.

This module is data and checks alone: it builds nothing and runs nothing, so the user process may read it too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.hashing import Progress, file_digest, hash_files
from headrace.checkpoint.resolve import ENGINE_FILES
from headrace.checkpoint.sources import SourceFile
from headrace.errors import ModelError

#: names of the manifest in an engine folder, and of what is there while a build runs and after one that was killed
MANIFEST, UNFINISHED = ENGINE_FILES
#: of the manifest, and of the inputs and outputs of graphs; changed with every change of what they mean
FORMAT = 1
#: no manifest comes near it; a larger file is something else
MAX_MANIFEST_BYTES = 64 << 20
#: most ranks of one engine
MAX_RANKS = 4096

#: what of a file ``check_rank`` reads: so many pieces of so many bytes, evenly spread, the first and the last of the file among them
SAMPLES = 64
SAMPLE_BYTES = 64 << 10

Backend = Literal["native", "onnxruntime", "tensorrt", "tensorrt-rtx"]
#: those that compute on CPUs, with the files of the build as they are; the others compile them further, for GPUs
ON_CPU: tuple[Backend, ...] = ("native", "onnxruntime")
EngineDType = Literal["float32", "float16", "bfloat16"]
#: stored: as the checkpoint has quantised them
Quantization = Literal["none", "int8", "int4", "stored"]
#: portable: standard operators, the same bytes for onnxruntime and TensorRT; serving: with onnxruntime's own operators; packed: no graph,
#: but weights in the layout of the native library
Flavour = Literal["portable", "serving", "packed"]

#: (start, stop)
Span = tuple[int, int]

_DIGEST = re.compile(r"[0-9a-f]{64}")


class EngineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of an engine folder.

    Attributes:
        name: its path in the folder, with ``/`` between parts.
        nbytes: its size.
        sha256: of its whole content.
        sample_sha256: of samples of it, see ``sample_digest``.
    """

    name: str
    nbytes: int
    sha256: str
    sample_sha256: str


class EngineRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank of the world loads, and which share of the model that is.

    Attributes:
        rank: in the world: ``stage * tp + place``.
        stage: of the pipeline.
        place: among the ranks that share the stage's layers.
        layers, query_heads, kv_heads, mlp_columns, vocabulary: spans of the whole model's; ``vocabulary`` is of the head's rows.
        graph: name of its ONNX file, beside which lies one with its weights; of the packed flavour the name of the latter.
        plan: name of its TensorRT plan; None: the graph itself is run.
        graph_fingerprint: of all that its graph and weights were made from; a build leaves them alone while it stays.
        plan_fingerprint: the same for its plan; None: it has none.
        files: all of its files.
        seconds: that building them took.
        peak_bytes: most memory that the process which built them has had by then.
    """

    rank: int
    stage: int
    place: int
    layers: Span
    query_heads: Span
    kv_heads: Span
    mlp_columns: Span
    vocabulary: Span
    graph: str
    plan: str | None
    graph_fingerprint: str
    plan_fingerprint: str | None
    files: tuple[EngineFile, ...]
    seconds: float
    peak_bytes: int


class EngineManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that there is to know of an engine folder.

    Attributes:
        format: ``FORMAT`` of the version that wrote it.
        model: short name of the model, for people and clients.
        model_sha256: of names, sizes and contents of the checkpoint's files.
        source: what was built, as the user gave it; for ``headrace build`` commands in messages, never opened to run the engine.
        source_files: what of it was hashed.
        config: of the model.
        tp, pp: ranks that share each layer, and stages that the layers are split into; the world has ``tp * pp`` ranks.
        dtype: of weights and activations that are not quantized, and of the KV cache.
        quantization: of the weights.
        backend: what runs it, which is the name of the runner.
        flavour: of the graphs.
        max_batch_size: most rows, each with a sequence, of the KV cache and of one step.
        max_seq_len: most tokens of one sequence, prompt and output together.
        chunk: most tokens of one sequence in one step.
        versions: name and version of what built it.
        capability: compute capability of the GPUs that its plans are for, as ``8.9``; None: it holds no plans, or they are for any.
        ranks: in their order.
        tokenizer: files beside the manifest from which the tokenizer is read.
        created: when, in ISO 8601.
        digest: of this manifest without it.
    """

    format: int
    model: str
    model_sha256: str
    source: str
    source_files: tuple[SourceFile, ...]
    config: ModelConfig
    tp: int
    pp: int
    dtype: EngineDType
    quantization: Quantization
    backend: Backend
    flavour: Flavour
    max_batch_size: int
    max_seq_len: int
    chunk: int
    versions: dict[str, str]
    capability: str | None
    ranks: tuple[EngineRank, ...]
    tokenizer: tuple[EngineFile, ...]
    created: str
    digest: str = ""

    @property
    def family(self) -> str:
        """Of the model."""
        return self.config.family

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.tp * self.pp

    def files(self) -> Iterator[EngineFile]:
        """All files of the folder but the manifest."""
        for rank in self.ranks:
            yield from rank.files
        yield from self.tokenizer

    def kv_bytes_per_token(self, rank: int) -> int:
        """Bytes that one token takes in the KV cache of a rank: keys and values of its heads in each of its layers."""
        share = self.ranks[rank]
        heads, layers = share.kv_heads[1] - share.kv_heads[0], share.layers[1] - share.layers[0]
        size = 4 if self.dtype == "float32" and self.backend != "native" else 2
        return 2 * layers * heads * self.config.head_dim * size

    def command(self, *, folder: str | Path = "DIR", **changes: object) -> str:
        """The ``headrace build`` that builds it again, with other values for some of its settings."""
        settings = {
            "model": self.source,
            "tp": self.tp,
            "pp": self.pp,
            "dtype": SHORT_DTYPES[self.dtype],
            "quantization": "auto" if self.quantization == "stored" else self.quantization,
            "backend": self.backend,
            "max-batch": self.max_batch_size,
            "max-seq-len": self.max_seq_len,
            "chunk": self.chunk,
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        if settings["pp"] == 1:
            del settings["pp"]
        options = [f"--{name} {shlex.quote(str(value))}" for name, value in settings.items()]
        if self.backend == "tensorrt-rtx" and self.capability is not None:
            options.append(f"--capability {self.capability.replace(',', '')}")
        return " ".join(["headrace build", *options, "-o", shlex.quote(str(folder))])

    def check_rank(self, folder: Path, rank: int) -> None:
        """Whether the files of this rank are those that the build wrote, as far as samples of them tell. Raises ModelError."""
        for file in self.ranks[rank].files:
            path = folder / file.name
            try:
                found = sample_digest(path)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
            if found != file.sample_sha256:
                raise ModelError(
                    f"{path} is not the file that the engine was built with: it has been changed or swapped; {_mend(self, folder)}"
                )

    def signed(self) -> EngineManifest:
        """The same with its digest."""
        return msgspec.structs.replace(self, digest=_digest(self))


#: names on the command line
SHORT_DTYPES: dict[EngineDType, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def encode_manifest(manifest: EngineManifest) -> bytes:
    """What is written into the folder: signed, as JSON for people to read."""
    return msgspec.json.format(msgspec.json.encode(manifest.signed()), indent=1) + b"\n"


def load_manifest(folder: str | Path) -> EngineManifest:
    """The manifest of an engine folder, checked; see the head of this module. Raises ModelError that says what does not fit."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    for file in manifest.files():
        path = folder / file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ModelError(f"engine folder {folder} lacks {file.name} ({error.strerror}); {_mend(manifest, folder)}") from error
        if found != file.nbytes or not path.is_file():
            raise ModelError(
                f"{path} has {found} bytes, and the engine was built with {file.nbytes}: it is cut off or of another build; "
                + _mend(manifest, folder)
            )
    return manifest


def read_manifest(folder: Path, *, ended: bool = True) -> EngineManifest:
    """The manifest alone, without a look at the other files. Raises ModelError, with ``ended`` also while a build is under way."""
    path = folder / MANIFEST
    again = "build it again with headrace build"
    if ended and (folder / UNFINISHED).is_file():
        raise ModelError(f"the build of engine folder {folder} is under way, or has not reached its end: run it again")
    try:
        # Not waiting: opening a pipe, which somebody may have put there, would wait for its other end.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not an engine folder: it has no {MANIFEST}; headrace build makes one") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise ModelError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes: that is no manifest; {again}")
    # The format first, alone: what another version writes may differ in everything else.
    try:
        found = msgspec.json.decode(content, type=_Versioned)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not the manifest of an engine: {error}; {again}") from error
    if found.format != FORMAT:
        written = found.versions.get("headrace", "another version")
        raise ModelError(
            f"{path} is of format {found.format}, written by headrace {written}, and this version reads format {FORMAT}: "
            f"{again}, or run it with headrace {written}"
        )
    try:
        manifest = msgspec.json.decode(content, type=EngineManifest)
        _check(manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ModelError) as error:
        raise ModelError(f"{path} is damaged or was edited: {error}; {again}") from error
    if manifest.digest != _digest(manifest):
        raise ModelError(f"{path} was changed after the build: its digest does not fit; {again}")
    return manifest


class _Versioned(msgspec.Struct):
    """What every format has."""

    format: int
    versions: dict[str, str] = {}


def _check(manifest: EngineManifest) -> None:
    """Raise ModelError for a contradiction in a manifest, and for names that lead out of its folder."""
    for name in ("tp", "pp", "max_batch_size", "max_seq_len", "chunk"):
        if getattr(manifest, name) < 1:
            raise ModelError(f"{name} is {getattr(manifest, name)}: it must be at least 1")
    if manifest.size > MAX_RANKS or len(manifest.ranks) != manifest.size:
        raise ModelError(f"there are {len(manifest.ranks)} ranks for tp {manifest.tp} and pp {manifest.pp}")
    if not manifest.chunk <= manifest.max_seq_len <= manifest.config.max_seq_len:
        raise ModelError(
            f"chunk {manifest.chunk}, max_seq_len {manifest.max_seq_len} and the model's {manifest.config.max_seq_len} must ascend"
        )
    config = manifest.config
    limits = {
        "layers": config.num_layers,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp_columns": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for index, share in enumerate(manifest.ranks):
        if (share.rank, share.stage, share.place) != (index, index // manifest.tp, index % manifest.tp):
            raise ModelError(f"rank {index} says that it is rank {share.rank}, place {share.place} of stage {share.stage}")
        for name, most in limits.items():
            start, stop = getattr(share, name)
            if not 0 <= start < stop <= most:
                raise ModelError(f"{name} of rank {index} are {start} to {stop} of {most}")
        names = {file.name for file in share.files}
        if share.graph not in names or not (share.plan is None or share.plan in names):
            raise ModelError(f"rank {index} does not list its own graph or plan among its files")
        if (share.plan is None) != (share.plan_fingerprint is None):
            raise ModelError(f"rank {index} has a plan without a fingerprint, or the reverse")
        if (share.plan is None) != (manifest.backend in ON_CPU):
            raise ModelError(f"rank {index} of an engine for {manifest.backend} {'has no' if share.plan is None else 'has a'} plan")
    seen: set[str] = set()
    for file in manifest.files():
        if not is_inside(file.name) or file.name in seen:
            raise ModelError(f"file name {file.name!r} leads out of the folder, or is there twice")
        seen.add(file.name)
        if file.nbytes < 0 or not _DIGEST.fullmatch(file.sha256) or not _DIGEST.fullmatch(file.sample_sha256):
            raise ModelError(f"size or hash of {file.name} is no such thing")
    if not _DIGEST.fullmatch(manifest.model_sha256):
        raise ModelError(f"model_sha256 is {manifest.model_sha256!r}")


def is_inside(name: str) -> bool:
    """Whether a name means a file in the folder or beneath it."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name == "/".join(parts) and ".." not in parts and not name.startswith("/") and "\0" not in name


def _digest(manifest: EngineManifest) -> str:
    # By way of what is read back: a float that was given as an int, as files of models often have it, is written as a float from then on.
    plain = msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))
    return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(plain, type=EngineManifest))).hexdigest()


def _mend(manifest: EngineManifest, folder: Path) -> str:
    return f"build it again: {manifest.command(folder=folder)}"


def sample_digest(path: Path) -> str:
    """SHA-256 of the size of a file and of ``SAMPLES`` pieces of it; of the whole of a small one. Raises OSError."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        hasher.update(size.to_bytes(8, "little"))
        if size <= SAMPLES * SAMPLE_BYTES:
            places = list(range(0, size, SAMPLE_BYTES))
        else:
            places = [index * (size - SAMPLE_BYTES) // (SAMPLES - 1) for index in range(SAMPLES)]
        for place in places:
            file.seek(place)
            hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest()


def describe_file(folder: Path, name: str) -> EngineFile:
    """A file of the folder as it is now. Raises OSError."""
    path = folder / name
    return EngineFile(name=name, nbytes=path.stat().st_size, sha256=file_digest(path), sample_sha256=sample_digest(path))


def verify(manifest: EngineManifest, folder: Path, progress: Progress = lambda done, total: None) -> list[str]:
    """What is wrong with the files of a folder, each read whole: one line for each."""
    files = list(manifest.files())
    digests = hash_files([folder / file.name for file in files], progress)
    return [line for file, digest in zip(files, digests, strict=True) if (line := _fault(file, digest)) is not None]


def _fault(file: EngineFile, digest: str | OSError) -> str | None:
    if isinstance(digest, OSError):
        return f"{file.name}: {digest.strerror or digest}"
    return None if digest == file.sha256 else f"{file.name}: its content has changed"
