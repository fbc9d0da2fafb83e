"""The kernels of the native library, through their C interface, on every instruction set that this machine has. Without the library all of
these tests fail, and say why it is not there.
"""

from __future__ import annotations

import pytest

from headrace.native import instruction_sets


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> bytes:
    """Name of an instruction set, as the C interface takes it."""
    name: str = request.param
    return name.encode()
