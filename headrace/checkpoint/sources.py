"""The identity of a checkpoint: SHA-256 over names, sizes and contents of the files that its weights and settings are read from.

Hashing reads everything, so what is known of files that have not changed since (same path, size and time) is taken over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headrace.checkpoint.hashing import Progress, hash_files
from headrace.checkpoint.huggingface import INDEX, SINGLE, read_json
from headrace.errors import ModelError


class SourceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint as it was when it was hashed: while path, size and time stay, so does the hash."""

    path: str
    nbytes: int
    mtime_ns: int
    sha256: str


def source_paths(path: Path) -> list[Path]:
    """The files that the weights and settings of a GGUF file or a Hugging Face folder are read from. Raises ModelError."""
    if not path.is_dir():
        return [path]
    paths = [file for name in ("config.json", "generation_config.json", INDEX, SINGLE) if (file := path / name).is_file()]
    if path / INDEX in paths:
        shards = read_json(path / INDEX).get("weight_map")
        names = sorted(set(shards.values())) if isinstance(shards, dict) else []
        paths = [file for file in paths if file.name != SINGLE] + [path / name for name in names if isinstance(name, str)]
    return paths


def hash_sources(
    paths: Iterable[Path], known: Iterable[SourceFile] = (), progress: Progress = lambda done, total: None
) -> list[SourceFile]:
    """Hash files, those that ``known`` has as they are now not at all. Raises ModelError if one cannot be read."""
    remembered = {_key(file): file for file in known}
    wanted = [_as_it_is(path) for path in paths]
    unknown = [file for file in wanted if _key(file) not in remembered]
    for file, digest in zip(unknown, hash_files([Path(file.path) for file in unknown], progress), strict=True):
        if isinstance(digest, OSError):
            raise ModelError(f"cannot read {file.path}: {digest.strerror or digest}") from digest
        remembered[_key(file)] = msgspec.structs.replace(file, sha256=digest)
    return [remembered[_key(file)] for file in wanted]


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise ModelError if one of them is not what was hashed any more, as far as size and time tell."""
    for file in files:
        if _key(_as_it_is(Path(file.path))) != _key(file):
            raise ModelError(f"{file.path} has been changed since it was hashed: run the build again")


def _as_it_is(path: Path) -> SourceFile:
    """Without its hash."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return SourceFile(path=str(path.absolute()), nbytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256="")


def _key(file: SourceFile) -> tuple[str, int, int]:
    return file.path, file.nbytes, file.mtime_ns


def model_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 of names, sizes and contents, wherever the files lie."""
    entries = sorted((Path(file.path).name, file.nbytes, file.sha256) for file in files)
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
