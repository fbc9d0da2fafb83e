"""The collectives of a real MPI world, on every rank. Run: mpiexec -n N python -m pytest --with-mpi tests/mpi"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.world import MpiWorld

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def world() -> MpiWorld:
    return MpiWorld()


@pytest.mark.parametrize("shape", [(1,), (576,), (3, 5, 7), (32, 576), (512, 1536), (0, 576)])
def test_all_reduce_sums_in_place(world: MpiWorld, shape: tuple[int, ...]) -> None:
    random = [np.random.default_rng(rank).standard_normal(shape).astype(np.float32) for rank in range(world.size)]
    array = random[world.rank].copy()
    view = array[:]
    world.all_reduce(array)
    np.testing.assert_allclose(view, np.sum(random, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_gather_columns_of_uneven_widths(world: MpiWorld, rows: int) -> None:
    widths = [3 * rank + 1 for rank in range(world.size)]
    parts = [np.random.default_rng(rank).standard_normal((rows, width)).astype(np.float32) for rank, width in enumerate(widths)]
    gathered = world.gather_columns(parts[world.rank], widths)
    if world.rank == 0:
        assert gathered is not None
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis=1))
    else:
        assert gathered is None


def test_bytes_of_any_length_reach_every_rank(world: MpiWorld) -> None:
    own = bytes(range(world.rank, world.rank + 3)) * world.rank  # rank 0 gives none
    expected = [bytes(range(rank, rank + 3)) * rank for rank in range(world.size)]
    assert world.gather_bytes(own) == expected
    assert world.broadcast_bytes(b"of rank 0, with a \0 in it" if world.rank == 0 else own) == b"of rank 0, with a \0 in it"
    assert world.broadcast_bytes(own if world.rank == 0 else b"longer") == b""


def test_version_names_the_library(world: MpiWorld) -> None:
    name, version = world.version.rsplit(" ", 1)
    assert name in ("Open MPI", "MPICH")
    assert version[0].isdigit()
