"""``LoraRequest``: the adapter that a request is run with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.errors import RequestError
from headrace.validation import text

MAX_NAME_CHARS = 256


class LoraRequest(msgspec.Struct, frozen=True):
    """A LoRA adapter in the format of PEFT. Raises RequestError, where it is made, if there is none.

    Attributes:
        name: for people, and for what is cached of it.
        path: its folder, which every rank must see; kept as an absolute path.
    """

    name: str
    path: str | Path

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", text("name", self.name, MAX_NAME_CHARS))
        if not isinstance(self.path, str | Path):
            raise RequestError(f"path must be that of a folder, not {type(self.path).__name__}")
        folder = Path(self.path).absolute()
        if not (folder / "adapter_config.json").is_file():
            raise RequestError(f"{folder} is no LoRA adapter: it holds no adapter_config.json")
        msgspec.structs.force_setattr(self, "path", str(folder))
