"""The kill matrix (A9, A23, A25, A32): whoever is killed in whatever phase, everybody who waits is told, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from headrace.errors import EngineDeadError
from tests.chaos.matrix import PHASES, PROCESSES, Cell, measure, table
from tests.integration.worlds import LONG, Deaths, pids, submit, world

#: Seconds. The promises are one until everybody was told and two until nothing is left; the machine of a test may be busy with others.
TOLD = 10.0
GONE = 12.0


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[tuple[str, str], Cell]]:
    cells: dict[tuple[str, str], Cell] = {}
    yield cells
    print(f"\nmilliseconds until told / until nothing was left\n{table(cells)}")


#: of a postprocess worker in the others nothing is different
TEXT_PHASES = ("starting", "decode", "draining", "closing")


@pytest.mark.kill
@pytest.mark.parametrize(
    ("process", "phase"),
    [(process, phase) for process in PROCESSES for phase in (TEXT_PHASES if process == "text0" else PHASES)],
)
def test_whoever_is_killed_whenever_all_are_told_and_nothing_is_left(process, phase, cells):
    """A9, A23, A25, A32; A28 for a postprocess worker, whose death nobody is told of."""
    cells[process, phase] = cell = measure(process, phase)
    assert cell.wrong == ""
    assert (cell.told or 0.0) < TOLD and cell.gone < GONE


@pytest.mark.kill
@pytest.mark.parametrize("stopped", ["janitor", "mpiexec", "rank1"])
def test_whoever_is_stopped_does_not_outlive_its_world(stopped):
    """A23, A25: a process that is stopped answers no signal but SIGKILL."""
    with world(2, step_time=0.002) as executor:
        (handle,) = submit(executor, [1], max_tokens=8000)
        processes = pids(executor)
        deaths = Deaths(processes)
        os.kill(processes[stopped], signal.SIGSTOP)
        os.kill(processes["rank0"], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            handle.result(LONG)
        assert deaths.survivors(GONE) == []
        deaths.close()
