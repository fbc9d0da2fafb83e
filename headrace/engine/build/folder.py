"""An engine folder while it is built: one builder at a time, files put into their places whole, and what a killed build leaves taken up.

::

    engine.json              written last; the folder is an engine's from then on
    engine.json.unfinished   from the first change to the last: what has been built so far; a folder that has it is refused
    .headrace-build/         files that are being written
    .headrace-build.lock     locked while a build runs; the file itself stays and means nothing
    .headrace-timing.cache   TensorRT's, kept for the next build

A file is written in ``.headrace-build`` and renamed into its place: whoever has mapped the one that was there keeps it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from headrace.checkpoint.sources import SourceFile
from headrace.engine.build.manifest import MANIFEST, UNFINISHED, EngineFile, EngineManifest, EngineRank, encode_manifest, read_manifest
from headrace.errors import ModelError

WORK = ".headrace-build"
LOCK = ".headrace-build.lock"

#: what TensorRT knows of the speed of kernels on this GPU: the next rank, and the next build, need not measure again
TIMING_CACHE = ".headrace-timing.cache"

#: files that only a build of ours can have left
OURS = re.compile(r"rank\d+\.(onnx|onnx\.data|plan|plan\.\d+\.part|weights)")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """``engine.json.unfinished``: what a build had done when it was last heard of."""

    ranks: tuple[EngineRank, ...] = ()
    source_files: tuple[SourceFile, ...] = ()
    tokenizer: tuple[EngineFile, ...] = ()


class BuildFolder:
    """The folder of one build, locked from ``with`` on.

    Raises ModelError if it cannot be used: another build is at work in it, it holds files of something else, it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.work = self.path / WORK
        self._lock = -1

    def __enter__(self) -> BuildFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ModelError(f"no engine can be built into {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._lock, 20, 0).decode("ascii", "replace") or "unknown"
            self._unlock()
            raise ModelError(f"another build into {self.path} is under way: process {holder}") from None
        except OSError as error:
            self._unlock()
            raise ModelError(f"{self.path / LOCK} cannot be locked: {error.strerror or error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            shutil.rmtree(self.work, ignore_errors=True)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        os.close(lock)

    def _refuse_foreign(self) -> None:
        """A folder that holds other things stays as it is: the model's own folder above all."""
        names = set(os.listdir(self.path)) - {LOCK, WORK, TIMING_CACHE}
        if names and not names & {MANIFEST, UNFINISHED}:
            raise ModelError(
                f"{self.path} holds other files ({sorted(names)[0]}) and is no engine folder: give one that is empty or not there yet"
            )

    def previous(self) -> tuple[EngineManifest | None, Progress]:
        """The manifest of the last build that ended, if it can be read; and what there is to take up, which is never more than it says."""
        try:
            manifest: EngineManifest | None = read_manifest(self.path, ended=False)
        except ModelError:
            manifest = None
        done = Progress()
        if manifest is not None:
            done = Progress(ranks=manifest.ranks, source_files=manifest.source_files, tokenizer=manifest.tokenizer)
        if not (self.path / UNFINISHED).exists():
            return manifest, done
        try:
            made = msgspec.json.decode((self.path / UNFINISHED).read_bytes(), type=Progress)
        except (OSError, ModelError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            made = Progress()
        # What the unfinished build has made is in the place of what was there before.
        ranks = {rank.rank: rank for rank in (*done.ranks, *made.ranks)}
        return None, Progress(ranks=tuple(ranks.values()), source_files=(*done.source_files, *made.source_files), tokenizer=done.tokenizer)

    def begin(self, progress: Progress) -> None:
        """From now on, and until ``finish``, the folder is refused by whoever would run it."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.record(progress)

    def record(self, progress: Progress) -> None:
        """Note what has been done so far, for the build after one that is killed."""
        self._write(UNFINISHED, msgspec.json.encode(progress))

    def put(self, name: str) -> None:
        """Move a file that is complete from ``work`` into its place, and what it holds onto the disk."""
        _sync(self.work / name)
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.work / name, target)

    def sync(self, name: str) -> None:
        """Bring a file that is in its place onto the disk."""
        _sync(self.path / name)

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a small file into its place."""
        target = self.work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        self.put(name)

    def finish(self, manifest: EngineManifest, stale: Iterable[str] = ()) -> None:
        """Take away what no rank uses any more, write the manifest, and let the folder be used."""
        for name in {*stale, *self._leftovers()} - {file.name for file in manifest.files()}:
            (self.path / name).unlink(missing_ok=True)
        self._write(MANIFEST, encode_manifest(manifest))
        (self.path / UNFINISHED).unlink()
        _sync(self.path)

    def free_bytes(self) -> int:
        """Room on its disk."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def _leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.path) if OURS.fullmatch(name)]

    def _write(self, name: str, content: bytes) -> None:
        aside = self.work / name
        aside.write_bytes(content)
        _sync(aside)
        os.replace(aside, self.path / name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
