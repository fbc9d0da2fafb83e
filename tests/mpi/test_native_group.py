"""Sums inside a step of the native library, in a real MPI world of one host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from headrace.engine.runners.native_group import RankSums
from headrace.worker.world import MpiWorld

pytestmark = pytest.mark.mpi(min_size=2)


def test_ranks_of_one_host_sum_through_shared_memory() -> None:
    world = MpiWorld()
    sums = RankSums(world)
    assert sums.shared
    all_reduce = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(sums.function)
    for count in (1, 576, 70_000, 0, 4096):
        random = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(world.size)]
        array = random[world.rank].copy()
        assert all_reduce(sums.context, array.ctypes.data, count) == 0
        total = random[0]
        for other in random[1:]:
            total = total + other
        assert array.tobytes() == total.tobytes()
    sums.close()
