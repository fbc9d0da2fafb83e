"""The native library as a part of an install: what is compiled, what is said where that cannot be done, and what a package has of it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
from setuptools.command.build import build
from setuptools.errors import CompileError

from headrace import native

ROOT = Path(__file__).parents[2]
NO_COMPILER = "there is no C++ compiler '/no/compiler' (No such file or directory)"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command ``build_native`` of setup.py, which builds into a folder of the test's; objects too."""
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    made = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: made.update(arguments))
    parts = list(build.sub_commands)
    monkeypatch.setattr(build, "sub_commands", parts)
    script = runpy.run_path(str(ROOT / "setup.py"))
    assert ("build_native", None) in parts
    command = made["cmdclass"]["build_native"](made["distclass"]({"packages": []}))
    monkeypatch.setitem(command.run.__globals__, "OBJECTS", tmp_path / "objects")
    command.build_lib = str(tmp_path / "lib")
    command.ensure_finalized()
    return SimpleNamespace(command=command, folder=tmp_path / "lib" / script["PLACE"], made=made)


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


#: writes what it was asked for into the file that was asked for
WORKS = 'for last; do :; done; case "$*" in *-o*) echo "$*" >"$last";; *) echo 12;; esac'


def test_without_a_compiler_the_install_goes_on_and_the_package_says_why(command, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/no/compiler")
    command.folder.mkdir(parents=True)
    (command.folder / "libheadrace.so").write_text("of an install before")
    command.command.run()
    assert [path.name for path in command.folder.iterdir()] == ["unbuilt.txt"]
    assert command.command.get_outputs() == [str(command.folder / "unbuilt.txt")]
    assert NO_COMPILER in caplog.text
    # What the package then says, in that place.
    monkeypatch.setattr(native, "__file__", str(command.folder / "__init__.py"))
    monkeypatch.delenv(native.LIBRARY_VARIABLE, raising=False)
    with pytest.raises(native.NativeLibraryError, match=f"^{re.escape(f'libheadrace.so was not built: {NO_COMPILER}')}$"):
        native.library.__wrapped__()


def test_an_install_that_must_have_the_library_fails_without(command, monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("HEADRACE_NATIVE", "require")
    with pytest.raises(CompileError, match="no C\\+\\+ compiler"):
        command.command.run()


def test_what_the_compiler_complains_of_is_told(command, monkeypatch, tmp_path, capfd):
    complaint = 'echo "a.cpp: In function f:" >&2; echo "a.cpp:1:2: error: no such thing" >&2; exit 1'
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", f'case "$*" in *-c*) {complaint};; *) echo 12;; esac'))
    command.command.run()
    assert (command.folder / "unbuilt.txt").read_text() == f"{tmp_path}/c++ says: a.cpp:1:2: error: no such thing\n"
    assert "In function f" in capfd.readouterr().err


def test_only_what_has_changed_is_compiled_again(command, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", f'echo "$*" >>{log}; {WORKS}'))
    sources = len(list((ROOT / "cpp" / "src").glob("*.cpp")))

    def compiled() -> int:
        log.write_text("")
        command.command.run()
        return sum(" -c " in line for line in log.read_text().splitlines())

    assert compiled() == sources
    assert [path.name for path in command.folder.iterdir()] == ["libheadrace.so"]
    assert compiled() == 0
    (tmp_path / "objects" / "api.o").unlink()
    assert compiled() == 1
    # Another compiler by the same name makes all of them anew.
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", f'echo "$*" >>{log}; {WORKS.replace("12", "13")}'))
    assert compiled() == sources


def test_packages_of_source_have_every_source(command):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "cpp").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {"cpp/build.py", "cpp/src/api.h", "cpp/src/kernels.inl", "cpp/src/kernels.cpp"} <= sources
    assert set(command.command.get_source_files()) == sources


def test_one_wheel_fits_every_python_of_a_platform(command):
    wheel = command.made["cmdclass"]["bdist_wheel"](made := command.made["distclass"]({"name": "headrace", "version": "1"}))
    wheel.ensure_finalized()
    python, abi, platform = wheel.get_tag()
    assert (python, abi) == ("py3", "none") and platform.startswith("linux_")
    assert made.has_ext_modules() and not wheel.root_is_pure
