"""What a machine must have to run an engine folder: pure, so that ``headrace inspect`` and whoever starts a world say the same."""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine.build.manifest import Backend, EngineManifest

#: backend -> (PyPI package whose version matters, what installs it)
PACKAGES: dict[Backend, tuple[str, str]] = {
    "onnxruntime": ("onnxruntime", "pip install onnxruntime onnx onnxruntime-extensions"),
    "tensorrt": ("tensorrt", "pip install tensorrt"),
    "tensorrt-rtx": ("tensorrt-rtx", "pip install tensorrt-rtx"),
}


class Here(NamedTuple):
    """What there is.

    Attributes:
        version: of the backend's package; None: it is not installed.
        capabilities: of the GPUs that this process may use, as ``8.9``.
        memory: bytes of memory that are free for use; None: unknown.
    """

    version: str | None
    capabilities: tuple[str, ...] = ()
    memory: int | None = None


def obstacles(manifest: EngineManifest, here: Here) -> list[str]:
    """Why the engine cannot run here, with what mends it; empty where nothing speaks against it."""
    package, install = PACKAGES[manifest.backend]
    if here.version is None:
        return [f"{package} is not installed: {install}"]
    if manifest.backend == "onnxruntime":
        return _memory(manifest, here.memory)
    found = []
    built = manifest.versions.get(package)
    if built is not None and built != here.version:
        found.append(f"its plans were built by {package} {built}, and {here.version} is installed: {manifest.command()}")
    if len(here.capabilities) < manifest.size:
        found.append(f"it needs {manifest.size} GPUs, one for each rank, and there are {len(here.capabilities)}")
    if manifest.capability is not None:
        fitting = [capability.strip() for capability in manifest.capability.split(",")]
        others = sorted({capability for capability in here.capabilities if capability not in fitting})
        if others:
            found.append(
                f"its plans are for GPUs of compute capability {manifest.capability}, and here are some of {', '.join(others)}: "
                + manifest.command()
            )
    return found


def _memory(manifest: EngineManifest, free: int | None) -> list[str]:
    needed = sum(file.nbytes for rank in manifest.ranks for file in rank.files)
    if free is None or needed <= free:
        return []
    return [f"its weights take {needed} bytes of memory, and {free} are free"]
