"""What ``headrace selftest`` has found right on this machine, and the refusal to serve on what it has not.

A note is about a subject: a runner with its library, on a kind of GPU with its driver, at a number of ranks and a type, by this very code.
Each note is a file of its own, named by a hash of its subject, so that tests that end at the same time do not take each other's place.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import cast

import msgspec

from headrace.config import EngineFacts, Runner
from headrace.errors import ModelError
from headrace.version import __version__

#: runners that serve nothing until they have passed on this machine; what computes the others is tested where headrace is developed
GATED: tuple[Runner, ...] = ("tensorrt", "tensorrt-rtx")

#: of the package, what decides what is computed: who changes it tests anew, whether or not a version says so
SOURCES = ("engine/models/*.py", "engine/build/*.py", "engine/runners/*.py")

SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was tested, and what would serve.

    Attributes:
        runner: that computes.
        library: its version.
        driver: version of the GPU's driver.
        gpu: the GPU's name.
        capability: its compute capability, as ``8.9``.
        ranks: that share each layer.
        dtype: of weights and activations.
    """

    runner: str
    library: str
    driver: str
    gpu: str
    capability: str
    ranks: int
    dtype: str

    @classmethod
    def of(cls, facts: EngineFacts) -> Subject:
        """Of a world whose runner has put ``versions`` into its own."""
        versions = facts.versions
        return cls(
            runner=facts.runner,
            library=versions.get(facts.runner, ""),
            driver=versions.get("driver", ""),
            gpu=versions.get("gpu", ""),
            capability=versions.get("capability", ""),
            ranks=facts.tensor_parallel_size,
            dtype=facts.dtype,
        )

    def versions(self) -> dict[str, str]:
        """What a runner tells in its ``versions``, so that the user process knows what it is about."""
        return {self.runner: self.library, "driver": self.driver, "gpu": self.gpu, "capability": self.capability}

    @property
    def command(self) -> str:
        """What tests it."""
        return f"headrace selftest --engine {self.runner} --tp {self.ranks} --dtype {SHORT_DTYPES.get(self.dtype, self.dtype)}"

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"{self.runner} {self.library} with {self.dtype} on {ranks} of {self.gpu} (capability {self.capability}, driver {self.driver})"
        )


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One passed test. ``worst``: the largest relative difference of its logits; ``at``: in ISO 8601."""

    subject: Subject
    headrace: str
    code: str
    at: str
    worst: float


def driver_version(cuda: str, told: Path = Path("/proc/driver/nvidia/version")) -> str:
    """``cuda``, the newest CUDA that the driver runs, and the driver's own version, as far as it tells that, as "13.0, 580.65.06"."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", told.read_text())
    except (OSError, UnicodeDecodeError):
        found = None
    return cuda if found is None else f"{cuda}, {found[1]}"


def skipped(names: str | Iterable[str]) -> tuple[Runner, ...]:
    """``LLM(skip_selftest=...)`` as it crosses. Raises ValueError for what is no gated runner."""
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in GATED:
            raise ValueError(f"skip_selftest={name!r}: only {' and '.join(map(repr, GATED))} must pass a self-test")
    return cast("tuple[Runner, ...]", chosen)


def require_tested(subject: Subject, skip: Collection[str], environ: Mapping[str, str] = os.environ) -> None:
    """Called by every rank for what it is about to serve with. ``skip``: runners that the user has named to be served untested.

    Raises:
        ModelError: it has not passed here; the message has the command that tests it, and how to go without.
    """
    if subject.runner not in GATED or subject.runner in skip or read_note(subject, environ) is not None:
        return
    raise ModelError(
        f"{subject} has not passed the self-test on this machine, so nothing is served with it: run\n    {subject.command}\n"
        f"or go without, by --skip-selftest {subject.runner} or LLM(skip_selftest={subject.runner!r})"
    )


def write_note(subject: Subject, worst: float, environ: Mapping[str, str] = os.environ) -> Path:
    """Note that it has passed. Raises OSError."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = Note(subject=subject, headrace=__version__, code=code_digest(), at=at, worst=worst)
    path = _path(subject, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        # A reader sees all of it or nothing.
        try:
            file.write(msgspec.json.format(msgspec.json.encode(note), indent=1) + b"\n")
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path


def read_note(subject: Subject, environ: Mapping[str, str] = os.environ) -> Note | None:
    """The note that this subject has passed with this code; None: there is none, or none that can be read."""
    try:
        note = msgspec.json.decode(_path(subject, environ).read_bytes(), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return note if (note.subject, note.headrace, note.code) == (subject, __version__, code_digest()) else None


def remove_note(subject: Subject, environ: Mapping[str, str] = os.environ) -> None:
    """What was right once is not any more."""
    _path(subject, environ).unlink(missing_ok=True)


@cache
def code_digest() -> str:
    """SHA-256 of the source of ``SOURCES``."""
    package = Path(__file__).parent
    hasher = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in package.glob(pattern)):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


def _path(subject: Subject, environ: Mapping[str, str]) -> Path:
    # https://specifications.freedesktop.org/basedir-spec: what is not absolute is ignored.
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path(environ.get("HOME") or Path.home()) / ".cache"
    name = hashlib.sha256(msgspec.json.encode([subject, __version__, code_digest()])).hexdigest()[:32]
    return base / "headrace" / "selftest" / f"{name}.json"
