"""The kill matrix (A9, A23, A25, A32): whoever is killed in whatever phase, everybody who waits is told, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.matrix import PHASES, PROCESSES, Cell, measure, table

#: Seconds. The promises are one until everybody was told and two until nothing is left; the machine of a test may be busy with others.
TOLD = 10.0
GONE = 12.0


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[tuple[str, str], Cell]]:
    cells: dict[tuple[str, str], Cell] = {}
    yield cells
    print(f"\nmilliseconds until told / until nothing was left\n{table(cells)}")


@pytest.mark.kill
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("process", PROCESSES)
def test_whoever_is_killed_whenever_all_are_told_and_nothing_is_left(process, phase, cells):
    """A9, A23, A25, A32."""
    cells[process, phase] = cell = measure(process, phase)
    assert cell.wrong == ""
    assert (cell.told or 0.0) < TOLD and cell.gone < GONE
