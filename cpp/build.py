"""Compiles the sources of the native library: each file that has changed, several at a time, then links them.

    python cpp/build.py [--sanitize] [--output FILE]

``setup.py`` calls ``build``; by hand it is for whoever works on the sources. CXX chooses the compiler, CXXFLAGS adds options.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shlex
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARY = "libheadrace.so"

# Products and sums are fused where the sources say so and nowhere else: results must not depend on what a compiler makes of a loop.
FLAGS = ["-std=c++20", "-O3", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1"]


def build(output: Path, folder: Path, *, sanitize: bool = False) -> None:
    """Make ``output`` from the sources; objects are kept in ``folder``. Raises CalledProcessError, OSError where there is no compiler."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, *(SANITIZERS if sanitize else []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inl"), Path(__file__)])
    command = shlex.join([*compiler, *flags])
    said = folder / "command"
    same = said.exists() and said.read_text() == command
    objects: list[Path] = []
    stale: list[tuple[Path, Path]] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        made = folder / f"{source.stem}.o"
        objects.append(made)
        if not same or not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            stale.append((source, made))
    said.write_text(command)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(lambda pair: subprocess.run([*compiler, *flags, "-c", pair[0], "-o", pair[1]], check=True), stale))
    output.parent.mkdir(parents=True, exist_ok=True)
    # Another process may have the old one loaded: it keeps the file that it has.
    fresh = output.with_suffix(f".{os.getpid()}")
    subprocess.run([*compiler, *flags, "-shared", *objects, "-o", fresh], check=True)
    fresh.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    root = SOURCES.parents[1]
    kind = "sanitized" if arguments.sanitize else "native"
    output = arguments.output or (root / "build" / kind / LIBRARY if arguments.sanitize else root / "headrace" / "native" / LIBRARY)
    try:
        build(output, root / "build" / kind / "objects", sanitize=arguments.sanitize)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"the native library could not be built: {error}")


if __name__ == "__main__":
    main()
