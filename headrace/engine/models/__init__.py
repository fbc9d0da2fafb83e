"""Model families: what their layers are made of and how they split over ranks. Who computes them is a runner."""

from __future__ import annotations

from pathlib import Path

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.resolve import is_engine_folder
from headrace.engine.models.decoder import DecoderFamily
from headrace.engine.models.from_gguf import open_gguf
from headrace.engine.models.from_huggingface import open_folder
from headrace.engine.models.gemma2 import GEMMA2
from headrace.engine.models.gemma3 import GEMMA3
from headrace.engine.models.llama import LLAMA
from headrace.engine.models.mistral import MISTRAL
from headrace.engine.models.phi3 import PHI3
from headrace.engine.models.qwen2 import QWEN2
from headrace.engine.models.qwen3 import QWEN3
from headrace.errors import ModelError

FAMILIES: dict[str, DecoderFamily] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3)}


def family_of(config: ModelConfig) -> DecoderFamily:
    """The family of a checkpoint. Raises ModelError for one that this build cannot run."""
    family = FAMILIES.get(config.family)
    if family is None:
        raise ModelError(f"model family {config.family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return family


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder; names and shapes of all weights are checked, none is read.

    Raises ModelError for anything that cannot be read or is not supported, with the file and the reason in its text.
    """
    path = Path(path)
    if is_engine_folder(path):
        raise ModelError(f"{path} is an engine folder, and this needs the checkpoint that it was built from")
    checkpoint: Checkpoint = open_folder(path, FAMILIES.values()) if path.is_dir() else open_gguf(path, FAMILIES.values())
    try:
        _check_weights(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _check_weights(checkpoint: Checkpoint) -> None:
    """Raise ModelError if a weight is missing, of a type that cannot be read, or of a shape that the configuration contradicts.

    Stops at the first fault, so that an absurd number of layers costs no time.
    """
    for name, shape in family_of(checkpoint.config).tensors(checkpoint.config):
        if not checkpoint.has(name):
            raise ModelError(f"{checkpoint.path}: weight {name} is missing")
        found = checkpoint.shape(name)
        if found != shape:
            raise ModelError(f"{checkpoint.path}: weight {name} has shape {list(found)}, the configuration asks for {list(shape)}")
        checkpoint.nbytes(name)
