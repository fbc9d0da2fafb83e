"""``LoraRequest``: the adapter that a request is run with, and what the configuration of an adapter may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.errors import RequestError
from headrace.validation import number, text

MAX_NAME_CHARS = 256
CONFIG_FILE = "adapter_config.json"
#: of the configuration, which is read at every request
MAX_CONFIG_BYTES = 1 << 20
#: no adapter's rank comes near it
MAX_RANK = 1 << 16

#: settings of PEFT's LoraConfig that change what is computed -> the values that mean that they do not
COMPUTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None,),
    # The others also change the weights of the model that they are for.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


class LoraRequest(msgspec.Struct, frozen=True):
    """A LoRA adapter in the format of PEFT. Raises RequestError, where it is made, if there is none or it is of a kind that cannot be run.

    Attributes:
        name: for people, and for what is cached of it.
        path: its folder, which every rank must see; kept as an absolute path.
        rank: of its matrices, read from its configuration.
    """

    name: str
    path: str | Path
    rank: int = 0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", text("name", self.name, MAX_NAME_CHARS))
        if not isinstance(self.path, str | Path):
            raise RequestError(f"path must be that of a folder, not {type(self.path).__name__}")
        folder = Path(self.path).absolute()
        msgspec.structs.force_setattr(self, "rank", read_adapter_config(folder).rank)
        msgspec.structs.force_setattr(self, "path", str(folder))


class AdapterConfig(NamedTuple):
    """``rank`` of the products B A, which are multiplied by ``scaling``."""

    rank: int
    scaling: float


def read_adapter_config(folder: Path) -> AdapterConfig:
    """From the ``adapter_config.json`` of PEFT. Raises RequestError, with the setting's name, for what is missing or cannot be computed."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RequestError(f"{folder} is no LoRA adapter: it holds no {CONFIG_FILE}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} does not hold a JSON object")
    for key, computed in COMPUTED.items():
        found = config.get(key)
        # True is no 1 here.
        if not any(found == value and type(found) is type(value) for value in computed):
            raise RequestError(f"{path}: {key} is {found!r}: such adapters cannot be run")
    rank = config.get("r")
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        raise RequestError(f"{path}: r is {rank!r}; it must be an integer from 1 to {MAX_RANK}")
    alpha = number(f"{path}: lora_alpha", config.get("lora_alpha", 8), -1e9, 1e9)
    # Kalajdzievski: "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
    return AdapterConfig(rank, alpha / (rank**0.5 if config.get("use_rslora") is True else rank))
