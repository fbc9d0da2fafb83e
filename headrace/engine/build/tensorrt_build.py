"""From the ONNX file of one rank to a TensorRT plan: parse, look at what was parsed, build, write.

The file that is parsed is the one that onnxruntime runs, byte for byte.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.config import ModelConfig
from headrace.engine.base import ProgressHook
from headrace.engine.build.spec import GraphSpec
from headrace.engine.build.tensorrt_guards import check_network
from headrace.engine.build.tensorrt_library import Capability, load_library, logger_of, parse_capability, targets
from headrace.engine.build.tensorrt_network import prepare_network
from headrace.engine.build.tensorrt_profiles import EngineLimits, Profile, profiles, row_bytes
from headrace.errors import ModelError

log = logging.getLogger("headrace.tensorrt")

#: of how plans are made here; another one makes plans anew
PLAN_FORMAT = 1
#: progress of a build is told in parts of so many
PROGRESS_STEPS = 1000


class PlanBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan follows from, beside its graph. Plans of equal graphs and equal bases are as good as each other.

    Attributes:
        format: ``PLAN_FORMAT``.
        backend: that builds and runs it.
        version: of the library; no other one runs what it built.
        capabilities: compute capabilities that it runs on, as "8.6", ascending; none: all that TensorRT for RTX supports.
        limits: what it must run at most.
        profiles: bounds of sizes that follow from them.
    """

    format: int
    backend: str
    version: str
    capabilities: tuple[str, ...]
    limits: EngineLimits
    profiles: tuple[Profile, Profile]

    @property
    def capability(self) -> str | None:
        """As text; None for all."""
        return ", ".join(self.capabilities) or None

    def key(self, *, model: str, spec: GraphSpec, graph_version: int) -> str:
        """SHA-256 of everything that the plan of one rank follows from, in hexadecimal.

        Args:
            model: SHA-256 of the model's files.
            spec: its part of the model: rank and stage, of how many, and the type of numbers.
            graph_version: of how graphs are written.
        """
        return hashlib.sha256(msgspec.json.encode([self, model, spec, graph_version], order="deterministic")).hexdigest()


class PlanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was built.

    Attributes:
        name: of its file, beside the graph's.
        nbytes: its size.
        sha256: of the file, in hexadecimal.
        seconds: that it took.
    """

    name: str
    nbytes: int
    sha256: str
    seconds: float


def plan_basis(backend: str, limits: EngineLimits, capabilities: Sequence[str] = ()) -> PlanBasis:
    """What plans will follow from here and now; before any graph is written, so that what cannot be built is refused at once.

    Args:
        backend: "tensorrt", which builds for the GPU that is here, or "tensorrt-rtx".
        limits: what the plans must run.
        capabilities: compute capabilities to build for, as "8.6"; none: that of the GPU here, or all that TensorRT for RTX supports.

    Raises ModelError if the library is missing or too old, or does not build for these capabilities here.
    """
    trt = load_library(backend)
    return PlanBasis(
        format=PLAN_FORMAT,
        backend=backend,
        version=trt.__version__,
        capabilities=tuple(_capabilities(trt, backend, capabilities)),
        limits=limits,
        profiles=profiles(limits),
    )


def build_plan(
    onnx_path: Path, spec: GraphSpec, config: ModelConfig, basis: PlanBasis, *, progress: ProgressHook, timing_cache: Path | None = None
) -> PlanInfo:
    """Make ``STEM.plan`` beside ``STEM.onnx``, whose weights lie there too.

    Args:
        onnx_path: the graph.
        spec, config: what it was written from.
        basis: of ``plan_basis``, in this process.
        progress: told of the stage "plan" in parts of ``PROGRESS_STEPS``. What it raises ends the build.
        timing_cache: file in which the builder keeps how fast kernels are, for the next build; TensorRT for RTX measures none.

    Raises ModelError if the library refuses the graph, or makes another network of it than was written.
    """
    if spec.max_seq_len != basis.limits.max_seq_len:
        raise ModelError(f"the graph is for max_seq_len {spec.max_seq_len}, the plan for {basis.limits.max_seq_len}")
    if spec.flavour != "portable":
        raise ModelError(f"TensorRT runs graphs of the portable flavour, not of the {spec.flavour} one")
    row_bytes(spec, config)
    began = time.monotonic()
    plan = PlanBuilder(load_library(basis.backend), basis).build(onnx_path, spec, config, progress, timing_cache)
    path = onnx_path.with_suffix(".plan")
    content = memoryview(plan)
    _replace(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return PlanInfo(name=path.name, nbytes=content.nbytes, sha256=digest, seconds=time.monotonic() - began)


class PlanBuilder:
    """Makes one plan. Keeps alive what TensorRT's objects point to without a reference."""

    def __init__(self, trt: Any, basis: PlanBasis) -> None:
        self._trt = trt
        self._basis = basis
        self._logger = logger_of(trt)
        self._builder = trt.Builder(self._logger)

    def build(self, onnx_path: Path, spec: GraphSpec, config: ModelConfig, progress: ProgressHook, timing_cache: Path | None) -> Any:
        """The plan, an ``IHostMemory``; see ``build_plan``."""
        trt = self._trt
        self._logger.take_faults()
        network = self.parse(onnx_path)
        check_network(trt, network, spec, config)
        prepare_network(trt, network)
        settings = self._builder.create_builder_config()
        # Products of float32 numbers would be made of 10 bits of each otherwise: who wants that has float16.
        settings.clear_flag(trt.BuilderFlag.TF32)
        if self._basis.backend == "tensorrt-rtx":
            # Its engines take memory of their own while they run otherwise, which no CUDA graph can.
            settings.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            if self._basis.capabilities:
                self._set_targets(settings, self._basis.capabilities)
        for profile in self._basis.profiles:
            self._add_profile(settings, network, profile)
        cache = self._load_timing_cache(settings, timing_cache)
        monitor = make_monitor(trt, progress)
        settings.progress_monitor = monitor
        plan = self._builder.build_serialized_network(network, settings)
        fault = monitor.take_fault()
        if fault is not None:
            # Of what is left in the log none is news: the build was ended.
            self._logger.take_faults()
            raise fault
        if plan is None:
            raise ModelError(f"{trt.__name__} cannot build {onnx_path.name}: {self._logger.take_faults()}")
        if cache is not None and timing_cache is not None:
            _replace(timing_cache, settings.get_timing_cache().serialize())
        return plan

    def parse(self, onnx_path: Path) -> Any:
        """The file as a strongly typed ``INetworkDefinition``: no number gets another type than the graph says. Raises ModelError."""
        trt = self._trt
        self._network = self._builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(self._network, self._logger)
        if not parser.parse_from_file(str(onnx_path)):
            reasons = [parser.get_error(index) for index in range(parser.num_errors)]
            told = "; ".join(f"node {reason.node_name()} ({reason.node_operator()}): {reason.desc()}" for reason in reasons)
            raise ModelError(f"{trt.__name__} cannot parse {onnx_path}: {told or self._logger.take_faults()}")
        # The network refers to weights that belong to the parser.
        self._parser = parser
        return self._network

    def _set_targets(self, settings: Any, capabilities: Sequence[str]) -> None:
        members = targets(self._trt)
        settings.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            if not settings.set_compute_capability(members[parse_capability(capability)], index):
                raise ModelError(f"{self._trt.__name__} does not build for compute capability {capability}: {self._logger.take_faults()}")

    def _add_profile(self, settings: Any, network: Any, profile: Profile) -> None:
        made = self._builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if -1 in tensor.shape:
                made.set_shape(tensor.name, *profile.bounds(tensor.name, tuple(tensor.shape)))
        if settings.add_optimization_profile(made) < 0:
            raise ModelError(f"{self._trt.__name__} refuses the profile {profile}: {self._logger.take_faults()}")

    def _load_timing_cache(self, settings: Any, path: Path | None) -> Any | None:
        """The cache in use, which must live until the plan is built; None without one."""
        # TensorRT for RTX compiles kernels when it runs; its timing caches do nothing, and say so in a warning.
        if path is None or self._basis.backend != "tensorrt":
            return None
        cache = settings.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if not settings.set_timing_cache(cache, ignore_mismatch=False):
            log.warning("%s is of another GPU or version of TensorRT; a new one takes its place", path)
            cache = settings.create_timing_cache(b"")
            settings.set_timing_cache(cache, ignore_mismatch=False)
        return cache


def make_monitor(trt: Any, progress: ProgressHook) -> Any:
    """An ``IProgressMonitor`` that tells ``progress`` how much of the build is done.

    TensorRT tells of phases within phases, each of so many steps: the share that is done is that of the outermost phase, plus what its
    current step has of it, and so on inwards. It never goes back: a phase that begins anew, as they do, does not take anything away.
    What ``progress`` raises ends the build; ``take_fault`` gives it, for an exception cannot pass through TensorRT. An object of TensorRT
    must not keep one: it leads to the frames in which the object is, and Python finds no such circle to free it.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            # Running phases, the outermost first: name -> [steps that are done, steps]
            self._phases: dict[str, list[int]] = {}
            self._told = -1
            self._fault: BaseException | None = None

        def take_fault(self) -> BaseException | None:
            fault, self._fault = self._fault, None
            return fault

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = [0, max(1, num_steps)]
            self._tell()

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._phases:
                self._phases[phase_name][0] = step + 1
            self._tell()
            return self._fault is None

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)
            if not self._phases:
                self._tell(PROGRESS_STEPS)

        def _tell(self, done: int | None = None) -> None:
            if done is None:
                share, part = 0.0, 1.0
                for steps, total in self._phases.values():
                    share += part * min(steps, total) / total
                    part /= total
                # The whole is told when the outermost phase has ended.
                done = min(int(share * PROGRESS_STEPS), PROGRESS_STEPS - 1)
            if done > self._told and self._fault is None:
                self._told = done
                try:
                    progress("plan", done, PROGRESS_STEPS)
                except BaseException as error:
                    self._fault = error

    return Monitor()


def _capabilities(trt: Any, backend: str, capabilities: Sequence[str]) -> list[str]:
    """Those that the plan will be for. Raises ModelError for what the backend does not build for here."""
    asked = [parse_capability(text) for text in capabilities]
    if backend == "tensorrt-rtx":
        known = targets(trt)
        for capability in asked:
            if capability not in known:
                raise ModelError(f"TensorRT for RTX does not build for compute capability {_text(capability)}, only for {_texts(known)}")
        return [_text(capability) for capability in sorted(set(asked))]
    here = _capability_here()
    if any(capability != here for capability in asked):
        raise ModelError(
            f"TensorRT builds for the GPU that is here, of compute capability {_text(here)}, not for {_texts(asked)}; build on such a GPU"
        )
    return [_text(here)]


def _capability_here() -> Capability:
    from headrace.engine.runners.cuda_driver import CudaDriver, CudaError

    try:
        devices = CudaDriver().devices()
    except CudaError as error:
        raise ModelError(f"TensorRT builds plans on a GPU of the kind that they run on, and there is none: {error}") from None
    if not devices:
        raise ModelError("TensorRT builds plans on a GPU of the kind that they run on, and this process sees none")
    capability = devices[0].capability
    parse_capability(_text(capability))
    return capability


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _texts(capabilities: Any) -> str:
    return ", ".join(_text(capability) for capability in sorted(capabilities))


def _replace(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
