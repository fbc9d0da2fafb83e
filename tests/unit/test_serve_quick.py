"""While a process serves, the collector leaves alone what was there before, and threads give way sooner; afterwards all is as it was."""

from __future__ import annotations

import gc
import sys

import pytest

from headrace.serve.quick import SWITCH_INTERVAL, quick_threads


def test_what_was_there_is_not_collected_and_threads_give_way():
    before = sys.getswitchinterval()
    tables = [[number] for number in range(1000)]
    with pytest.raises(KeyError), quick_threads():
        assert gc.get_freeze_count() > len(tables)
        known = {id(one) for one in gc.get_objects()}
        assert id(tables[0]) not in known and id(tables) not in known, "what is frozen is not gone through"
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
        raise KeyError
    assert gc.get_freeze_count() == 0 and sys.getswitchinterval() == pytest.approx(before)
    assert gc.is_tracked(tables) and any(one is tables for one in gc.get_objects())
