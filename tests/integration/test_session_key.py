"""A4: the session key reaches the ranks and nobody else, and a stranger without it changes nothing."""

from __future__ import annotations

import base64
import logging
import stat
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import NotAcknowledgedError
from headrace.ipc.bootstrap import FILE_NAME
from headrace.ipc.channel import Address, new_key
from headrace.ipc.messages import Failed, Ping
from headrace.ipc.zmq_channel import connect_served


def _family(pid: int) -> list[int]:
    """This process and its descendants."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").iterdir():
            todo += map(int, (task / "children").read_text().split())
    return found


def test_key_is_in_no_file_command_line_environment_or_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), LLM("echo", tensor_parallel_size=2) as llm:
        world = llm.executor._dispatcher.world
        assert world.bootstrap is not None and world.session is not None and world.monitor is not None
        key, folder = world.bootstrap.key, world.session.path
        forms = {key, base64.b64encode(key), key.hex().encode()}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not (folder / FILE_NAME).exists(), "every rank has read it"
        family = _family(world.monitor.world.pid)
        assert len(family) >= 4, "janitor, mpiexec and two ranks"
        for pid in family:
            for name in ("cmdline", "environ"):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                assert not any(form in content for form in forms), (pid, name)
        for path in folder.rglob("*"):
            if path.is_file():
                assert not any(form in path.read_bytes() for form in forms), path
        assert not any(form.decode("latin-1") in caplog.text for form in forms)


def test_a_stranger_is_refused_and_told_why_and_the_world_goes_on() -> None:
    with LLM("echo", tensor_parallel_size=1) as llm:
        bootstrap = llm.executor._dispatcher.world.bootstrap
        assert bootstrap is not None
        stranger = connect_served(Address(channel="init", endpoint=bootstrap.endpoints["init"], peer="rank7"), new_key())
        try:
            with pytest.raises(NotAcknowledgedError, match=r"the peer refused \d+ of our frames: is the session key right\?"):
                stranger.notify(Failed(7, 1, "forged", ""), timeout=2.0, attempts=2)
        finally:
            stranger.close()
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2)).outputs[0].token_ids == [2, 3]


def test_a_stranger_cannot_take_a_name() -> None:
    """Who connects under a name takes over its connection before any key is asked for: names are secret, so nobody else can."""
    with LLM("echo", tensor_parallel_size=1) as llm:
        bootstrap = llm.executor._dispatcher.world.bootstrap
        assert bootstrap is not None
        llm.executor.ping(30.0)
        for name in ("rank0", "rank0-"):
            stranger = connect_served(Address(channel="control", endpoint=bootstrap.endpoints["control"], peer=name), new_key())
            try:
                with pytest.raises(TimeoutError, match="is the session key right"):
                    stranger.call(Ping(), timeout=2.0)
            finally:
                stranger.close()
            assert llm.executor.ping(30.0).steps == 0
