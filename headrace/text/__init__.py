"""Text on the user's side of the boundary: tokenizer, chat template, incremental detokenising, stop strings."""

from __future__ import annotations

from pathlib import Path

from headrace.checkpoint.tokenizer_files import GGUF_TOKENIZER
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher
from headrace.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a GGUF file, a Hugging Face folder or an engine folder.

    Raises ModelError if there is none that this build can use.
    """
    path = Path(path)
    if path.is_dir() and not (path / GGUF_TOKENIZER).is_file():
        from headrace.text.huggingface_tokenizer import load_from_folder

        return load_from_folder(path)
    from headrace.text.gguf_tokenizer import load_from_gguf

    return load_from_gguf(path / GGUF_TOKENIZER if path.is_dir() else path)
