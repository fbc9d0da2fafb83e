"""The package list, and the native library, which an install goes without where it cannot be compiled; the rest is in pyproject.toml.

The library is loaded with ctypes and knows nothing of Python, so that a wheel fits every Python of its platform.
``HEADRACE_NATIVE=require`` makes it an error that the library cannot be compiled.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
PLACE = Path("headrace", "native")
OBJECTS = ROOT / "build" / "native" / "objects"


class BuildNative(Command):
    """A part of ``build``, as setuptools.command.build.SubCommand describes."""

    description = "compile the native library"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        builder: dict[str, Any] = runpy.run_path(str(ROOT / "cpp" / "build.py"))
        library = self._folder() / builder["LIBRARY"]
        if (why := builder["try_build"](library, OBJECTS)) is not None:
            if os.environ.get("HEADRACE_NATIVE") == "require":
                raise CompileError(f"the native library could not be built: {why}")
            self.warn(f"the native library could not be built, so headrace will need PyTorch or onnxruntime to run models: {why}")

    def _folder(self) -> Path:
        assert self.build_lib is not None
        return (ROOT if self.editable_mode else Path(self.build_lib)) / PLACE

    def get_source_files(self) -> list[str]:
        """Which is what an sdist has of them."""
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "cpp").rglob("*")) if path.is_file() and path.suffix != ".pyc"]

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._folder().glob("*") if path.suffix in (".so", ".txt")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformDistribution(Distribution):
    """One that is not the same on every machine."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """For one platform and every Python of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


build.sub_commands.append(("build_native", None))
setup(
    packages=find_packages(include=["headrace", "headrace.*"]),
    cmdclass={"build_native": BuildNative, "bdist_wheel": Wheel},
    distclass=PlatformDistribution,
)
