"""Which clock a process reads, and how far another one is from it. Pure, but for what the kernel says of the clock.

All processes of one machine read the same CLOCK_MONOTONIC, unless they are in different time namespaces. The distance of another one is
estimated from exchanges, as NTP does it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


def clock_identity() -> str:
    """Two processes with the same one read the same CLOCK_MONOTONIC: the boot of the machine, and the time namespace."""
    boot = namespace = "unknown"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):  # kernels before 5.6 have none
        namespace = os.readlink("/proc/self/ns/time")
    return f"{boot} {namespace}"


class Exchange(NamedTuple):
    """A question and its answer: ``sent`` and ``received`` by the clock of who asked, ``remote`` by that of who answered; nanoseconds."""

    sent: int
    remote: int
    received: int


class Offset(NamedTuple):
    """``nanoseconds``: to be added to a time of ours to have one of the other clock. ``uncertainty``: it is wrong by that at most."""

    nanoseconds: int
    uncertainty: int

    def beyond(self, nearer: Offset) -> Offset:
        """Of a clock whose distance from another is this, when that other is ``nearer`` away from us."""
        return Offset(self.nanoseconds + nearer.nanoseconds, self.uncertainty + nearer.uncertainty)


SAME_CLOCK = Offset(0, 0)


def estimate(exchanges: Iterable[Exchange]) -> Offset:
    """From the quickest exchange: its answer was made between the two times, and so the middle is wrong by half of them at most.

    Formula: RFC 5905 (NTP version 4), section 8: theta = ((T2 - T1) + (T3 - T4)) / 2, delta = (T4 - T1) - (T3 - T2), where the other clock
    is read once, T2 = T3; the error is at most delta / 2. That the clocks drift apart by some 50 ppm is not corrected.

    Raises ValueError if there is none, or one that was answered before it was asked.
    """
    quickest = min(exchanges, key=lambda exchange: exchange.received - exchange.sent)
    if quickest.received < quickest.sent:
        raise ValueError(f"an answer at {quickest.received} ns to a question of {quickest.sent} ns")
    middle, half = (quickest.sent + quickest.received) // 2, (quickest.received - quickest.sent + 1) // 2
    return Offset(quickest.remote - middle, half)
