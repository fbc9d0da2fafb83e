"""Checkpoints: finding a model, and its weights as float32 slices. Formats: GGUF and Hugging Face folders.

What the weights mean is for ``engine.models`` to say, which opens checkpoints.
"""

from __future__ import annotations

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.config import ModelConfig
from headrace.checkpoint.resolve import resolve_model

__all__ = ["Checkpoint", "ModelConfig", "resolve_model"]
