"""Races of the pool's and the group's threads: a program under the thread sanitizer, which cannot be in one process with Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "cpp" / "src"


@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build it with")
def test_no_two_threads_touch_anything_in_no_order(tmp_path):
    # This process may have been started with another sanitizer in it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    program = tmp_path / "stress"
    options = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    subprocess.run(["g++", *options, Path(__file__).with_name("stress_threads.cpp"), "-o", program], check=True, env=environment)
    ran = subprocess.run([program, "600"], capture_output=True, text=True, env=environment | {"TSAN_OPTIONS": "halt_on_error=1"})
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
