"""What a rank needs to find and trust its proxy: one small file in the session folder, written by the proxy, read by every rank.

The key travels in a file that only its owner can read and that is removed as soon as every rank has said hello: never in a command line,
nor in an environment, which others could read for as long as the process lives.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from headrace.config import EngineConfig
from headrace.ipc.channel import Address

FILE_NAME = "bootstrap.json"
SOCKETS = ("request", "result", "init", "control")


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """``endpoints``: channel name -> endpoint. ``plan_endpoint`` has ``{rank}`` in it, one plan channel for each rank but the first.
    ``owner_pid`` and ``root_pid``: the user process, and the one that starts the ranks for it; no rank outlives either.
    """

    key: bytes
    owner_pid: int
    root_pid: int
    endpoints: dict[str, str]
    plan_endpoint: str
    config: EngineConfig

    def address(self, channel: str, rank: int = 0) -> Address:
        """Where this rank finds the channel, and its name there.

        Whoever connects under a name takes over the connection of who had it, before a key is asked for: so nobody without it can know one.
        """
        endpoint = self.plan_endpoint.format(rank=rank) if channel == "plan" else self.endpoints[channel]
        secret = hashlib.blake2b(channel.encode(), key=self.key, digest_size=8, person=b"headrace-names").hexdigest()
        return Address(channel=channel, endpoint=endpoint, peer=f"rank{rank}-{secret}")


def local_bootstrap(folder: Path, key: bytes, root_pid: int, config: EngineConfig) -> Bootstrap:
    """A bootstrap for a world on this machine: every socket is a file in ``folder``."""
    return Bootstrap(
        key=key,
        owner_pid=os.getpid(),
        root_pid=root_pid,
        endpoints={channel: f"ipc://{folder}/{channel}" for channel in SOCKETS},
        plan_endpoint=f"ipc://{folder}/plan.{{rank}}",
        config=config,
    )


def write_bootstrap(folder: Path, bootstrap: Bootstrap) -> Path:
    """Write it so that nobody but the owner can read it. Raises FileExistsError if there is one."""
    path = folder / FILE_NAME
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(bootstrap))
    return path


def read_bootstrap(path: Path) -> Bootstrap:
    """Raises OSError; msgspec.ValidationError for a file that another version wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Bootstrap)
