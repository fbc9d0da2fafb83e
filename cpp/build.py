"""Compiles the sources of the native library: each file that has changed, several at a time, then links them.

    python cpp/build.py [--sanitize] [--output FILE]

``setup.py`` calls ``try_build``; by hand it is for whoever works on the sources. CXX chooses the compiler, CXXFLAGS adds options.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shlex
import subprocess
import sys
import zlib
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARY = "libheadrace.so"
#: beside where the library would be: why it is not there
UNBUILT = "unbuilt.txt"

# Products and sums are fused where the sources say so and nowhere else: results must not depend on what a compiler makes of a loop.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1", "-g1"]
#: further flags of one file: what is an array and no register gains nothing from -O3, which takes twice as long
FILE_FLAGS = {"kernels_portable": ["-O2"]}


class BuildError(Exception):
    """The library could not be built; the text says why, as one clause."""


def build(output: Path, folder: Path, *, sanitize: bool = False) -> None:
    """Make ``output`` from the sources; objects are kept in ``folder``. Raises BuildError."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    # Python has the structures of the headers: a library that was made with others would crash.
    interface = f"-DHEADRACE_INTERFACE={zlib.crc32(b''.join(path.read_bytes() for path in sorted(SOURCES.glob('*.h'))))}u"
    command = [*compiler, *FLAGS, interface, *(SANITIZERS if sanitize else []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    folder.mkdir(parents=True, exist_ok=True)
    # Objects of another compiler are of no use, nor are those of another machine that a folder may have been copied from.
    made_by = "\n".join([shlex.join(command), _run([*compiler, "--version"]), _run([*compiler, "-dumpmachine"])])
    said = folder / "command"
    same = said.exists() and said.read_text() == made_by
    newest = max(path.stat().st_mtime for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inl"), Path(__file__)])
    objects: list[Path] = []
    stale: list[tuple[Path, Path]] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        made = folder / f"{source.stem}.o"
        objects.append(made)
        if not same or not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            stale.append((source, made))
    # What takes longest is begun first: the kernels, once for each instruction set.
    stale.sort(key=lambda pair: not pair[0].name.startswith("kernels_"))
    for _, made in stale:
        made.unlink(missing_ok=True)  # so that a build that ends half-way leaves none of before for the next one
    said.write_text(made_by)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(lambda pair: _run([*command, *FILE_FLAGS.get(pair[1].stem, []), "-c", str(pair[0]), "-o", str(pair[1])]), stale))
    output.parent.mkdir(parents=True, exist_ok=True)
    # Another process may have the old one loaded: it keeps the file that it has.
    fresh = output.with_suffix(f".{os.getpid()}")
    try:
        _run([*command, "-shared", *map(str, objects), "-o", str(fresh)])
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)


def try_build(output: Path, folder: Path) -> str | None:
    """``build``; where it fails there is a file ``UNBUILT`` beside where the library would be, which says why. Returns what it says."""
    told = output.with_name(UNBUILT)
    try:
        build(output, folder)
    except BuildError as error:
        output.unlink(missing_ok=True)
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(f"{error}\n")
        return str(error)
    told.unlink(missing_ok=True)
    return None


def _run(command: list[str]) -> str:
    """What it writes to stdout; what it complains of goes to stderr, and the first complaint into the error."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"there is no C++ compiler {command[0]!r} ({error.strerror})") from None
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"{command[0]} says: {next((line for line in lines if 'error' in line), lines[-1])}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    root = SOURCES.parents[1]
    kind = "sanitized" if arguments.sanitize else "native"
    output = arguments.output or (root / "build" / kind / LIBRARY if arguments.sanitize else root / "headrace" / "native" / LIBRARY)
    try:
        build(output, output.parent / "objects" if arguments.output else root / "build" / kind / "objects", sanitize=arguments.sanitize)
    except BuildError as error:
        sys.exit(f"the native library could not be built: {error}")


if __name__ == "__main__":
    main()
