"""A60, invariant 9: what waits costs nothing, in every form, for as long as the line says."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.http.test_ending import Process
from tests.integration.test_lanes import attach
from tests.integration.test_postprocess import PROMPT, send, texting
from tests.integration.worlds import LONG, eventually, pids, submit, world

#: seconds of rest, and the CPU seconds that all processes of a form may use in them
REST = 10.0
MOST = 0.1


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of(processes: set[int], seconds: float) -> float:
    """That they use while so much time passes."""
    before = {pid: cpu_seconds(pid) for pid in processes}
    time.sleep(seconds)  # the time itself is what is measured
    return sum(cpu_seconds(pid) - used for pid, used in before.items())


def test_ten_seconds_of_rest_cost_less_than_a_hundredth_of_a_core():
    """All forms rest at the same time: a world of two ranks that two executors share, one with postprocess workers, and a service with two
    frontends. This process is part of the first two, and does nothing but wait; its own use is counted for both.
    """
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(world(2))
        shared = stack.enter_context(attach(owner))
        texts = stack.enter_context(texting())
        service = stack.enter_context(contextlib.closing(Process("--frontends", "2", "--postprocess-workers", "1")))
        for handle in [*submit(owner, [1]), *submit(shared, [1]), *send(texts, PROMPT, max_tokens=5)]:
            handle.result(LONG)
        assert service.ask(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200")
        forms = {
            "shared world": {*pids(owner).values(), owner._dispatcher.hub._janitor.pid, os.getpid()},
            "postprocess workers": {*pids(texts).values(), *texts.processes().values(), os.getpid()},
            "service": {service.pid, *service.children()},
        }
        assert len(forms["service"]) >= 8
        # Postprocess workers are not waited for by those that start them: on a busy machine they load their tokenizers well into the rest.
        others = set().union(*forms.values()) - {os.getpid()}
        assert eventually(lambda: cpu_seconds_of(others, 1.0) < len(forms) * MOST / REST)
        before = {pid: cpu_seconds(pid) for form in forms.values() for pid in form}
        time.sleep(REST)  # the time itself is what is measured
        used = {name: sum(cpu_seconds(pid) - before[pid] for pid in form) for name, form in forms.items()}
    print(f"CPU seconds in {REST} s: {used}")
    assert max(used.values()) < MOST, used
