"""Tests that need CUDA devices. They are run by themselves: HEADRACE_TEST_GPU=1 python -m pytest tests/gpu

Without the variable the other tests, which compare with numbers of a CPU, see no device (tests/conftest.py), and so would these.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASKED = "HEADRACE_TEST_GPU" in os.environ
HOW = "runs with HEADRACE_TEST_GPU=1, by itself"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What of this folder has been collected is skipped, with the way to run it."""
    for item in items:
        if not ASKED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=HOW))
