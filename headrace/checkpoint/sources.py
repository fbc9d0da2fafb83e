"""The identity of a checkpoint: SHA-256 over names, sizes and contents of the files that its weights and settings are read from.

Hashing reads everything, so what is known of files that have not changed since (same path, size and time) is taken over.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

import msgspec

from headrace.checkpoint.huggingface import INDEX, SINGLE, read_json
from headrace.errors import ModelError

#: bytes that are hashed at once
CHUNK_BYTES = 4 << 20
#: files that are hashed at once: more than a disk and a few cores have use for
MAX_THREADS = 8

#: (bytes done, bytes in all)
Progress = Callable[[int, int], None]


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
    """Hash files side by side in threads, those that ``known`` has as they are now not at all. Raises ModelError if one cannot be read."""
    remembered = {(file.path, file.nbytes, file.mtime_ns): file for file in known}
    wanted: list[tuple[str, int, int]] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        wanted.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
    total = sum(key[1] for key in wanted if key not in remembered)
    done, lock, stopped = 0, Lock(), Event()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    def hashed(key: tuple[str, int, int]) -> SourceFile:
        if (file := remembered.get(key)) is not None:
            return file
        path, nbytes, mtime_ns = key
        try:
            return SourceFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, sha256=_digest(path, count, stopped))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

    workers = max(1, min(MAX_THREADS, len(wanted), len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers, thread_name_prefix="headrace-hash") as pool:
        try:
            return list(pool.map(hashed, wanted))
        finally:
            # After a fault or Ctrl-C the others end at their next piece, and leaving the pool does not wait for gigabytes.
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def model_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 of names, sizes and contents, wherever the files lie."""
    entries = sorted((Path(file.path).name, file.nbytes, file.sha256) for file in files)
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _digest(path: str, count: Callable[[int], None], stopped: Event) -> str:
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            if stopped.is_set():
                break
            hasher.update(buffer[:size])
            count(size)
    return hasher.hexdigest()
