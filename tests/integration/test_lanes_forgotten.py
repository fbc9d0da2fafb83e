"""What a world and its owner keep of processes that have left it: next to nothing (A11 for processes that share a world)."""

from __future__ import annotations

import os
import secrets

from headrace.executor.attachment import read_handle
from headrace.ipc.channel import Address
from headrace.ipc.ends import BinderEnd
from headrace.ipc.messages import Attach
from headrace.ipc.zmq_channel import connect_served
from tests.integration.test_lanes import attach, left
from tests.integration.worlds import LONG, eventually, submit, world


def test_of_those_that_have_left_the_owner_keeps_no_key():
    """Neither of one that was attached and asked rank 0, nor of one that could not be."""
    with world(1) as owner:
        for _ in range(2):
            with attach(owner) as one:
                submit(one, [1])[0].result(LONG)
                assert one.stats(LONG)["lanes"] == 2
            assert left(owner)
        handle = read_handle(owner.attach_handle)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        asking = connect_served(Address(channel="attach", endpoint=handle.endpoint, peer=name), handle.key)
        try:
            asking.notify(Attach(name, 2**22 + 1, "ipc:///tmp/x"), LONG)
        finally:
            asking.close()
        hub = owner._dispatcher.hub
        assert isinstance(hub._attach, BinderEnd)
        assert eventually(lambda: len(hub._attach._gone) == 3)
        assert hub._attach._peers == {} and hub.faults == 0
