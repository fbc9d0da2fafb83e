"""Checkpoints: finding a model, its hyperparameters, and its weights as float32 slices. Formats: GGUF and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from headrace.checkpoint.base import Checkpoint, check_weights
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.resolve import resolve_model

__all__ = ["Checkpoint", "ModelConfig", "open_checkpoint", "resolve_model"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder; names and shapes of all weights are checked, none is read.

    Raises ModelError for anything that cannot be read or is not supported, with the file and the reason in its text.
    """
    if Path(path).is_dir():
        from headrace.checkpoint.huggingface import HuggingFaceCheckpoint

        checkpoint: Checkpoint = HuggingFaceCheckpoint(path)
    else:
        from headrace.checkpoint.gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(path)
    try:
        check_weights(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint
