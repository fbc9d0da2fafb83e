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


def test_groups_sum_and_gather_among_themselves(world: MpiWorld) -> None:
    """Of one rank and of the others: two stages of different size, which no MPI call can tell apart from any other split."""
    members = [0] if world.rank == 0 else list(range(1, world.size))
    group = world.split(members)
    assert (group.rank, group.size) == (members.index(world.rank), len(members)) and group in world.parts
    array = np.full(5, world.rank + 1, np.float32)
    group.all_reduce(array)
    np.testing.assert_array_equal(array, sum(member + 1 for member in members))
    gathered = group.gather_columns(np.full((2, 3), world.rank, np.float32), [3] * len(members))
    assert (gathered is not None) == (world.rank == members[0])
    if gathered is not None:
        np.testing.assert_array_equal(gathered, np.repeat(np.array(members, np.float32), 3)[None, :].repeat(2, axis=0))
    assert group.broadcast_bytes(bytes([world.rank])) == bytes([members[0]])
    assert group.gather_bytes(bytes([world.rank])) == [bytes([member]) for member in members]


@pytest.mark.parametrize("shape", [(0, 576), (1, 64), (2048, 576)])
def test_an_array_goes_from_rank_to_rank(world: MpiWorld, shape: tuple[int, int]) -> None:
    """Around all ranks: more than MPI takes without a receiver, and nothing."""
    sent = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    following = (world.rank + 1) % world.size
    if world.rank == 0:
        world.send(sent, following)
    received = np.empty(shape, np.float32)
    world.receive(received, (world.rank - 1) % world.size)
    np.testing.assert_array_equal(received, sent)
    if world.rank != 0:
        world.send(received, following)
