"""The tokenizer of a checkpoint without its weights: as files that ``text.load_tokenizer`` reads as it reads the checkpoint."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from headrace.checkpoint.gguf import GGUFFile
from headrace.errors import ModelError

#: the metadata of a GGUF file without its tensors
GGUF_TOKENIZER = "tokenizer.gguf"

#: of a Hugging Face folder: vocabulary, settings, chat templates; patterns within the folder
PATTERNS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Name in a folder, with ``/`` between parts, -> content. Empty where a folder has no tokenizer. Raises ModelError."""
    if not path.is_dir():
        with closing(GGUFFile(path)) as file:
            return {GGUF_TOKENIZER: file.without_tensors()}
    try:
        found = sorted(file for pattern in PATTERNS for file in path.glob(pattern) if file.is_file())
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error
