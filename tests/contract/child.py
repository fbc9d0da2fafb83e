"""A process that connects to a pair and sends back every plan that it receives, until the end of plans.

Started by test_processes with the endpoint as its argument and the session key on standard input.
"""

from __future__ import annotations

import sys

from headrace.ipc.channel import Address
from headrace.ipc.messages import CHANNELS, Plan, PlanEnd
from headrace.ipc.zmq_channel import connect_pair


def main(endpoint: str, key: bytes) -> int:
    CHANNELS["duplex"] = {"binder": (Plan, PlanEnd), "connector": (Plan, PlanEnd)}
    channel = connect_pair(Address(channel="duplex", endpoint=endpoint), key)
    while (message := channel.recv(20.0)) is not None:
        channel.send(message, 20.0)
        if isinstance(message, PlanEnd):
            break
    channel.close(linger=20.0)
    return 0 if message is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.buffer.read()))
