"""Runs self-tests: for each model, type and number of ranks a world, its checks, and a note of what has passed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.config import Runner
from headrace.errors import HeadraceError, ModelError
from headrace.llm import LLM
from headrace.selftest.checks import KV_CACHE_TOKENS, LIMITS, MAX_BATCH_SIZE, MAX_NUM_TOKENS, NATIVE_LIMIT, Outcome, run_checks
from headrace.selftest.model import CONTEXT, MODELS, TinyModel, write_folder
from headrace.tested import GATED, SHORT_DTYPES, Subject, remove_note, write_note

EngineDType = Literal["float32", "float16", "bfloat16"]
#: int8: matrices quantised to it, beside float32
NumberType = EngineDType | Literal["int8"]

#: what a runner is tested with where nobody says
DTYPES: dict[Runner, tuple[NumberType, ...]] = {
    "native": ("float32", "int8"),
    "torch": ("float32",),
    "onnxruntime": ("float32",),
    "tensorrt": ("float16", "bfloat16"),
    "tensorrt-rtx": ("float16", "bfloat16"),
}

#: seconds that building the engine of a tiny model may take
BUILD_TIMEOUT = 900.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one world, as a line of the report.

    Attributes:
        engine, ranks, dtype, model: of the world.
        check: what was compared; "world" for one that could not be made or died.
        rows: logit vectors that were compared.
        worst: relative difference of the worst logit; None: nothing was compared.
        limit: most that is allowed.
        fault: why it has failed; None: it has passed.
    """

    engine: str
    ranks: int
    dtype: str
    model: str
    check: str
    rows: int
    worst: float | None
    limit: float
    fault: str | None


def self_test(
    engine: Runner,
    ranks: Iterable[int],
    dtypes: Sequence[NumberType],
    *,
    models: Sequence[TinyModel] = MODELS[:1],
    mpi: str = "auto",
    tell: Callable[[Case], None] = lambda case: None,
    environ: Mapping[str, str] = os.environ,
) -> list[Case]:
    """All cases. A world that cannot be made, or dies, is a case that has failed; the others are run all the same.

    Args:
        engine: whose worlds.
        ranks: numbers of ranks, one world for each, model and type.
        dtypes: of weights and activations, or "int8".
        models: what they run.
        mpi: as in ``LLM``.
        tell: called with each case as it is done.
        environ: says where notes are kept.
    """
    cases: list[Case] = []
    for size in ranks:
        for dtype in dtypes:
            passed: list[Case] = []
            subjects: set[Subject] = set()
            for model in models:
                for case in _world(engine, size, dtype, model, mpi, subjects):
                    passed.append(case)
                    tell(case)
            cases += passed
            if engine in GATED:
                _note(subjects, passed, environ)
    return cases


def _note(subjects: Iterable[Subject], cases: Sequence[Case], environ: Mapping[str, str]) -> None:
    right = all(case.fault is None for case in cases)
    for subject in subjects:
        if right:
            write_note(subject, max(case.worst or 0.0 for case in cases), environ)
        else:
            remove_note(subject, environ)


def _world(engine: Runner, size: int, kind: NumberType, model: TinyModel, mpi: str, subjects: set[Subject]) -> Iterator[Case]:
    tensors, limit = model.tensors(), max(LIMITS[kind], NATIVE_LIMIT if engine == "native" else 0.0)
    dtype: EngineDType = "float32" if kind == "int8" else kind

    def case(outcome: Outcome) -> Case:
        fault = outcome.fault
        if fault is None and not outcome.worst <= limit:
            fault = "the difference is too large"
        worst = outcome.worst if outcome.rows else None
        return Case(
            engine=engine,
            ranks=size,
            dtype=kind,
            model=model.name,
            check=outcome.check,
            rows=outcome.rows,
            worst=worst,
            limit=limit,
            fault=fault,
        )

    try:
        with tempfile.TemporaryDirectory(prefix="headrace-selftest-") as folder:
            checkpoint = Path(folder, "model")
            write_folder(checkpoint, model, tensors)
            engine_or_model = _build(checkpoint, engine, dtype, size, Path(folder, "engine")) if engine in GATED else checkpoint
            with LLM(
                engine_or_model,
                runner=engine,
                tensor_parallel_size=size,
                launcher="spawn",
                mpi=mpi,
                dtype=dtype,
                quantization="int8" if kind == "int8" else "auto",
                max_batch_size=MAX_BATCH_SIZE,
                max_num_tokens=MAX_NUM_TOKENS,
                max_seq_len=CONTEXT,
                kv_cache_tokens=KV_CACHE_TOKENS,
                skip_selftest=[engine] if engine in GATED else (),
            ) as llm:
                subjects.add(Subject.of(llm.facts))
                yield from map(case, run_checks(llm, model, tensors, limit))
    except (HeadraceError, TimeoutError, OSError) as error:
        yield case(Outcome("world", 0, 0.0, str(error) or type(error).__name__))


def _build(checkpoint: Path, engine: Runner, dtype: EngineDType, size: int, folder: Path) -> Path:
    """Build an engine, as a user would; in a process of its own, which a crash of the library ends alone. Raises ModelError."""
    options = {
        "model": checkpoint,
        "backend": engine,
        "tp": size,
        "dtype": SHORT_DTYPES[dtype],
        "max-batch": MAX_BATCH_SIZE,
        "max-seq-len": CONTEXT,
        "chunk": MAX_NUM_TOKENS,
    }
    command = [sys.executable, "-m", "headrace", "build", *(f"--{name}={value}" for name, value in options.items()), "-o", str(folder)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"the engine was not built within {BUILD_TIMEOUT:g} s") from None
    if done.returncode:
        told = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise ModelError(f"the engine could not be built (exit code {done.returncode}):\n{told}")
    return folder
