"""``LLM``: the Python API. Names follow TensorRT-LLM's LLM API."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import msgspec

from headrace.compiled import Settings, engine_manifest, follow
from headrace.config import CapacityPolicy, Device, DType, EchoConfig, EngineConfig, EngineFacts, KVCacheDType, Quantization, Runner
from headrace.errors import ModelError, QueueFullError, RequestError
from headrace.lora import LoraRequest
from headrace.operations import EngineOperations
from headrace.outputs import RequestOutput
from headrace.params import SamplingParams
from headrace.requests import Prompt, RequestMaker, is_one_prompt
from headrace.selection import Asked, choose_runner, look
from headrace.tested import skipped

if TYPE_CHECKING:
    from headrace.executor.launchers.forms import LauncherName
    from headrace.executor.lifecycle import RestartPolicy
    from headrace.executor.proxy import GenerationExecutorProxy
    from headrace.executor.request import GenerationRequest
    from headrace.executor.result import GenerationResult
    from headrace.text.tokenizer import Tokenizer

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
ProgressListener: TypeAlias = Callable[[int, str, int, int], None]

log = logging.getLogger("headrace")

_DEFAULTS = EngineConfig(model="")

#: of a list of prompts, so many requests are under way at once for each that can run in one step, and at least MIN_WINDOW
WINDOW_PER_RUNNING = 4
MIN_WINDOW = 1024


class LLM(EngineOperations):
    """A model in a world of workers, from the constructor, which returns when the world is ready, to ``close``.

    Args:
        model: a GGUF file, a Hugging Face folder or hub id, ``"smollm2-135m"``, an engine folder, which ``headrace build`` makes, or
            ``"echo"`` for the engine without a model. An engine folder says for itself how many ranks and which runner it needs.
        tokenizer: where to read the tokenizer, if not from the model.
        tensor_parallel_size: ranks that share every layer; None: as many as the user's mpirun has started for each stage, one where there
            is no mpirun.
        pipeline_parallel_size: stages, each of ``tensor_parallel_size`` ranks, that share the layers out among them; None: one.
        runner: who runs the forward pass; auto: what fits the machine and the other settings, see docs/engines.md. ``facts.runner`` is what
            was chosen, ``facts.runner_reason`` why.
        dtype: type of weights and activations; auto: float32 on CPU, bfloat16 on a GPU.
        device: "cpu" or "cuda", one GPU for each rank; auto: GPUs where there are any that the runner can use.
        cuda_graphs: record steps in which all requests decode on a GPU, which makes them faster and takes memory.
        quantization: type that projections are stored in.
        max_batch_size: most requests in one step; None: 64, or what an engine folder was built for.
        max_num_tokens: most tokens in one step.
        max_seq_len: most tokens of prompt plus output; None: the model's context length, as far as the KV cache holds it.
        kv_cache_tokens: size of the KV cache in tokens.
        kv_cache_dtype: type that the native runner stores keys and values in: "float16", or "int8", half of it; auto: "float16".
        tokens_per_block: tokens in one KV block.
        num_threads: threads for each rank; None: cores divided by ranks.
        enable_block_reuse: requests take KV blocks that others have filled with the same tokens after the same beginning.
        enable_partial_reuse: where only some of a block's tokens are the same, a copy of these is taken.
        capacity_scheduler_policy: "MAX_UTILIZATION" or "GUARANTEED_NO_EVICT"; see docs/operations.md.
        event_buffer_max_size: events of the KV cache that are kept for ``get_kv_cache_events``.
        iter_stats_max_iterations: steps whose statistics are kept for ``get_stats``.
        max_loras: most LoRA adapters that are loaded at once, and that one step uses. A number above 0 makes ``runner="auto"`` take torch,
            which alone runs them. None: 4 on torch.
        max_lora_rank: highest rank of one.
        mpi: which MPI starts the world: auto, openmpi, mpich, system, or the path of an mpiexec.
        launcher: "external": the ranks of the mpirun that has started this script are the workers; "spawn": the world is an MPI job of its
            own; "auto": external where there is such an mpirun and ``mpi`` is auto. See ``headrace.launch`` and docs/operations.md.
        start_timeout: seconds that the world may take until it is ready.
        max_queued_requests: most requests that may wait for their first token; more are refused with QueueFullError.
        max_queued_tokens: most prompt tokens of all of them together.
        on_engine_death: what happens when the world dies: "fail" ends all requests with EngineDeadError; "restart" starts another world,
            which goes on with them where they were; or a RestartPolicy.
        on_hang: what happens when no step ends for ``progress_timeout`` seconds while there is work: "report" logs it, with the stacks of
            all ranks; "kill" ends the world as well, as if it had died.
        progress_timeout: see ``on_hang``; longer than the longest step, which is that of a long prefill.
        postprocess_workers: processes that make the texts, so that this one has less to do; 0: it makes them itself.
        progress: True: a bar on stderr while weights load; or a callable (rank, stage, done, total), called in another thread.
        record: a file for everything that crosses the boundary, to be replayed later; see docs/recording.md.
        record_prompts: with the token ids and texts in it.
        trace: a file that shows, when this is closed, what each process did for which request; see ``start_trace`` and docs/tracing.md.
        skip_selftest: "tensorrt", or several runners: serve with them although ``headrace selftest`` has not passed on this machine.
        echo: settings of the echo engine.
        wait: False: return while the world starts. Until ``wait_ready`` has returned only ``executor``, which tells how the start goes, and
            ``close``, which ends it, are of use.

    Raises:
        ModelError: the model cannot be found or read, or the engine was built for other settings than these.
        StartupError: the world died, failed or stalled while it started; nothing of it is left.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        runner: Runner = _DEFAULTS.runner,
        dtype: DType = _DEFAULTS.dtype,
        device: Device = _DEFAULTS.device,
        cuda_graphs: bool = _DEFAULTS.cuda_graphs,
        quantization: Quantization = _DEFAULTS.quantization,
        max_batch_size: int | None = None,
        max_num_tokens: int = _DEFAULTS.max_num_tokens,
        max_seq_len: int | None = _DEFAULTS.max_seq_len,
        kv_cache_tokens: int = _DEFAULTS.kv_cache_tokens,
        kv_cache_dtype: KVCacheDType = _DEFAULTS.kv_cache_dtype,
        tokens_per_block: int = _DEFAULTS.tokens_per_block,
        num_threads: int | None = _DEFAULTS.num_threads,
        enable_block_reuse: bool = _DEFAULTS.enable_block_reuse,
        enable_partial_reuse: bool = _DEFAULTS.enable_partial_reuse,
        capacity_scheduler_policy: CapacityPolicy = _DEFAULTS.capacity_scheduler_policy,
        event_buffer_max_size: int = _DEFAULTS.event_buffer_max_size,
        iter_stats_max_iterations: int = _DEFAULTS.iter_stats_max_iterations,
        max_loras: int | None = None,
        max_lora_rank: int = _DEFAULTS.max_lora_rank,
        mpi: str = "auto",
        launcher: LauncherName = "auto",
        start_timeout: float = 600.0,
        max_queued_requests: int = 4096,
        max_queued_tokens: int = 4 * 1024 * 1024,
        on_engine_death: Literal["fail", "restart"] | RestartPolicy = "fail",
        on_hang: Literal["report", "kill"] = "report",
        progress_timeout: float = 60.0,
        postprocess_workers: int = 0,
        progress: bool | ProgressListener = False,
        record: str | Path | None = None,
        record_prompts: bool = False,
        trace: str | Path | None = None,
        skip_selftest: Runner | Sequence[Runner] = (),
        echo: EchoConfig | None = None,
        wait: bool = True,
    ) -> None:
        from headrace.executor.admission import QueueLimits
        from headrace.executor.launchers.forms import be_rank, choose
        from headrace.executor.proxy import GenerationExecutorProxy
        from headrace.executor.texts.pool import check_count
        from headrace.executor.tracing import prepare

        # First of all: in a rank of the user's mpirun the process ends here, and what it had done would be in vain.
        be_rank(launcher, mpi)
        path, engine = "echo", None
        if model != "echo":
            from headrace.checkpoint import resolve_model

            path = str(resolve_model(str(model)).resolve())
            engine = engine_manifest(path)
        settings = Settings(tensor_parallel_size, pipeline_parallel_size, dtype, quantization, max_batch_size, max_seq_len)
        if engine is not None:
            settings = follow(engine, settings, model)
        pipeline_parallel_size = settings.pipeline_parallel_size or 1
        choice = choose(launcher, mpi, settings.tensor_parallel_size, pipeline_parallel_size)
        if trace is not None:
            prepare(trace)  # before the world is started in vain
        reason = ""
        if path == "echo":
            runner = "echo"
        else:
            backend = None if engine is None else engine.backend
            asked = Asked(runner, settings.dtype, settings.quantization, max_loras, backend, device, kv_cache_dtype)
            runner, reason = choose_runner(asked, look())
            log.info("runner %s: %s", runner, reason)
        source = tokenizer if tokenizer is not None else (path if path != "echo" else None)
        check_count(postprocess_workers)
        loaded: Tokenizer | None = None
        if runner == "echo" and source is not None and echo is None:
            # Its vocabulary is that of the tokenizer, so that it answers texts with texts.
            loaded = _load_tokenizer(source)
            echo = EchoConfig(vocab_size=loaded.vocab_size)
        config = EngineConfig(
            model=path,
            tokenizer=None if tokenizer is None else str(Path(tokenizer).resolve()),
            runner=runner,
            runner_reason=reason,
            tensor_parallel_size=choice.tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            dtype=settings.dtype,
            device=device,
            cuda_graphs=cuda_graphs,
            quantization=settings.quantization,
            max_batch_size=_DEFAULTS.max_batch_size if settings.max_batch_size is None else settings.max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=settings.max_seq_len,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_dtype=kv_cache_dtype,
            tokens_per_block=tokens_per_block,
            num_threads=num_threads,
            enable_block_reuse=enable_block_reuse,
            enable_partial_reuse=enable_partial_reuse,
            capacity_scheduler_policy=capacity_scheduler_policy,
            event_buffer_max_size=event_buffer_max_size,
            iter_stats_max_iterations=iter_stats_max_iterations,
            max_loras=(_DEFAULTS.max_loras if runner in ("torch", "echo") else 0) if max_loras is None else max_loras,
            max_lora_rank=max_lora_rank,
            echo=echo if echo is not None else EchoConfig(),
            skip_selftest=skipped(skip_selftest),
        )
        self._bar, listener = _listener(progress)
        self._trace = trace
        self._executor = GenerationExecutorProxy(
            config,
            choice.launcher,
            start_timeout=start_timeout,
            on_engine_death=choice.policy(_policy(on_engine_death)),
            limits=QueueLimits(max_queued_requests, max_queued_tokens),
            on_hang=on_hang,
            progress_timeout=progress_timeout,
            on_progress=listener,
            record=record,
            record_prompts=record_prompts,
        )
        self._launch(loaded, source, postprocess_workers)
        if wait:
            self.wait_ready()

    @classmethod
    def attach(
        cls,
        handle: str | Path,
        *,
        start_timeout: float = 600.0,
        max_queued_requests: int = 4096,
        max_queued_tokens: int = 4 * 1024 * 1024,
        progress_timeout: float = 60.0,
        postprocess_workers: int = 0,
    ) -> LLM:
        """An LLM that shares the model of another process on this machine: that one's ``attach_handle`` says where it is.

        Requests and their ends are this process's own, and ``close`` ends nothing else. The world is the owner's: whether it is restarted
        when it dies, and what is done when it hangs, is as the owner has said; when the owner closes it, or dies, what is under way here
        ends with EngineDeadError.

        Args:
            handle: the owner's ``attach_handle``.
            start_timeout: seconds until the owner has answered, and then until the world is ready.
            max_queued_requests, max_queued_tokens, progress_timeout, postprocess_workers: as in the constructor, for this process.

        Raises:
            StartupError: there is no such owner, it has no room, or its world died.
        """
        from headrace.executor.admission import QueueLimits
        from headrace.executor.proxy import GenerationExecutorProxy
        from headrace.executor.texts.pool import check_count

        check_count(postprocess_workers)
        llm = cls.__new__(cls)
        limits = QueueLimits(max_queued_requests, max_queued_tokens)
        llm._executor = executor = GenerationExecutorProxy.attach(
            handle, start_timeout=start_timeout, limits=limits, progress_timeout=progress_timeout
        )
        config = executor.config
        llm._bar = llm._trace = None
        llm._launch(None, config.tokenizer or (config.model if config.model != "echo" else None), postprocess_workers)
        llm.wait_ready()
        return llm

    def _launch(self, loaded: Tokenizer | None, source: str | Path | None, postprocess_workers: int) -> None:
        self._loaded, self._source, self._postprocess_workers = loaded, source, postprocess_workers
        try:
            if postprocess_workers and source is None:
                raise ModelError("postprocess_workers: the echo engine has no tokenizer, and so no texts: LLM(tokenizer=...)")
            self._executor.launch()
        except BaseException:
            self._executor.close()
            raise

    def wait_ready(self) -> None:
        """What the constructor does last, if it is not told to leave it: wait until the world is ready. Once, in any thread.

        Raises:
            ModelError, StartupError: as the constructor; nothing of it is left.
            ClosedError: ``close`` was called meanwhile.
        """
        loaded = self._loaded
        try:
            if loaded is None and self._source is not None:
                loaded = _load_tokenizer(self._source)  # while the world loads
            if self._postprocess_workers and loaded is not None:
                self._executor.start_postprocess(self._postprocess_workers, msgspec.msgpack.encode(loaded.recipes()))
            self._requests = RequestMaker(loaded)
            self._executor.points_above += self._requests.trace_points()
            self.facts: EngineFacts = self._executor.wait_ready()
            if self._trace is not None:
                self._executor.start_trace(self._trace)
        except BaseException:
            self._executor.close()
            raise
        finally:
            if self._bar is not None:
                self._bar.close()

    def __repr__(self) -> str:
        return f"<LLM {self._executor.config.model} {self._executor!r}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        executor = getattr(self, "_executor", None)
        # When the interpreter is on its way out its daemon threads stand still, with what they hold, and none may be waited for.
        if executor is not None and not sys.is_finalizing():
            executor.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError for the echo engine without one."""
        return self._requests.tokenizer

    @property
    def attach_handle(self) -> Path:
        """A file by which other processes of this user on this machine share the model: ``LLM.attach``. Made when it is first asked for."""
        return self._executor.attach_handle

    @property
    def requests(self) -> RequestMaker:
        """What makes the requests that the executor takes."""
        return self._requests

    @property
    def executor(self) -> GenerationExecutorProxy:
        """The boundary beneath: state, counters, engine statistics."""
        return self._executor

    @overload
    def generate(
        self,
        inputs: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        inputs: list[str] | list[list[int]] | list[Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | Sequence[LoraRequest | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]: ...
    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | Sequence[LoraRequest | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or a list of them side by side, and wait.

        Args:
            inputs: one prompt (a text, a list of ints, a mapping with "prompt" or "prompt_token_ids"), or a list of prompts.
            sampling_params: for all of them, or one for each.
            use_tqdm: show a bar for a list, where stderr is a terminal.
            lora_request: the adapter to run them with; for all of them, or one for each.
            cache_salt: only requests of the same salt share what is cached of their prompts; for all of them, or one for each.

        Raises:
            RequestError: a prompt is refused; nothing was sent.
            EngineDeadError: the world died.
        """
        if is_one_prompt(inputs):
            if isinstance(sampling_params, Sequence):
                raise RequestError("one prompt takes one SamplingParams, not a list of them")
            return self._submit(self._requests.many([inputs], sampling_params, lora_request, cache_salt))[0].result()
        return self._answer_all(self._requests.many(inputs, sampling_params, lora_request, cache_salt), use_tqdm)

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        priority: float = 0.5,
        timeout: float | None = None,
        lora_request: LoraRequest | None = None,
        cache_salt: str | None = None,
    ) -> GenerationResult:
        """Start one request and return its handle: ``.result(timeout)``, ``await``, ``for``, ``async for``, ``.abort()``.

        Dropping the handle cancels the request, and so does cancelling every task that waits for it.

        Args:
            inputs: a text, a list of ints, a mapping with "prompt" or "prompt_token_ids".
            sampling_params: how to sample.
            streaming: iterating over the handle yields as tokens arrive.
            priority: higher runs first; equal ones keep their order.
            timeout: seconds after which the request ends with ``finish_reason="timeout"`` and what it has; None: no deadline.
            lora_request: the adapter to run it with.
            cache_salt: only requests of the same salt share what is cached of their prompts.

        Raises:
            RequestError: the prompt is refused.
            QueueFullError: too much waits already; ``retry_after`` is a hint in seconds.
            EngineDeadError, ClosedError: there is no world.
        """
        request = self._requests.one(inputs, sampling_params, streaming)
        request.priority, request.timeout = priority, timeout
        request.lora, request.cache_salt = lora_request, cache_salt
        return self._submit([request])[0]

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | Sequence[LoraRequest | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoraRequest | Sequence[LoraRequest | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation, a list of {"role": ..., "content": ...}, or a list of them, through the model's chat template.

        Args:
            tools: JSON schemas of functions that the model may call, for all conversations.
            chat_template_kwargs: what else the template takes: ``documents``, ``continue_final_message``, ``enable_thinking`` and so on, as
                :meth:`headrace.text.chat_template.ChatTemplate.render` has them.

        The other arguments are those of ``generate``.
        """
        if messages and isinstance(messages[0], Mapping):
            if isinstance(sampling_params, Sequence):
                raise RequestError("one conversation takes one SamplingParams, not a list of them")
            prompts = [self._chat_prompt(messages, tools, chat_template_kwargs)]
            return self._submit(self._requests.many(prompts, sampling_params, lora_request, cache_salt))[0].result()
        prompts = [self._chat_prompt(conversation, tools, chat_template_kwargs) for conversation in messages]
        return self._answer_all(self._requests.many(prompts, sampling_params, lora_request, cache_salt), use_tqdm)

    def chat_async(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        priority: float = 0.5,
        timeout: float | None = None,
        lora_request: LoraRequest | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> GenerationResult:
        """As ``generate_async``, for one conversation; ``tools`` and ``chat_template_kwargs`` as in ``chat``."""
        return self.generate_async(
            self._chat_prompt(messages, tools, chat_template_kwargs),
            sampling_params,
            streaming,
            priority=priority,
            timeout=timeout,
            lora_request=lora_request,
            cache_salt=cache_salt,
        )

    def close(self, drain: bool = False, timeout: float = 5.0) -> None:
        """End the world within ``timeout`` seconds: finish what runs (``drain``) or abort it. May be called any number of times."""
        self._executor.close(drain, timeout)

    # --- from what users give to what the executor takes

    def _submit(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        return self._executor.submit(requests)

    def _answer_all(self, requests: list[GenerationRequest], use_tqdm: bool) -> list[RequestOutput]:
        """In their order. However many there are, no more are under way than keep every step full, so the queue has room for others too."""
        from tqdm import tqdm

        # A choice is a request of its own to whom it waits for.
        choices = max((request.params.width for request in requests), default=1)
        window = max(1, max(MIN_WINDOW, WINDOW_PER_RUNNING * self.facts.max_batch_size) // choices)
        under_way: deque[GenerationResult] = deque()
        outputs: list[RequestOutput] = []
        size, begun = window, 0
        # tqdm's monitor thread is for bars that get stuck; it would outlive this one. None: a bar where stderr is a terminal.
        tqdm.monitor_interval = 0
        with tqdm(total=len(requests), unit="prompt", disable=None if use_tqdm else True) as bar:
            while len(outputs) < len(requests):
                if begun < len(requests) and len(under_way) <= window // 2:
                    burst = requests[begun : begun + min(size, window - len(under_way))]
                    try:
                        under_way += self._submit(burst)
                        begun += len(burst)
                        continue
                    except QueueFullError:
                        # Smaller bursts, since long prompts fill the queue sooner, or after some of ours have left it.
                        if not under_way and len(burst) == 1:
                            raise
                        size = max(1, len(burst) // 2)
                        if not under_way:
                            continue
                outputs.append(under_way.popleft().result())
                bar.update()
        return outputs

    def _chat_prompt(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None, further: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        if not isinstance(further, Mapping | None):
            raise RequestError(f"chat_template_kwargs must be a mapping, not {type(further).__name__}")
        prompt = self.tokenizer.apply_chat_template(messages, **{**(further or {}), "tools": tools})
        return {"prompt": prompt, "add_special_tokens": False}


def _load_tokenizer(path: str | Path) -> Tokenizer:
    from headrace.text import load_tokenizer

    loaded = load_tokenizer(path)
    # Builds the table that all requests share; otherwise the first of them would wait for it.
    loaded.detokenizer()
    return loaded


def _policy(on_engine_death: str | RestartPolicy) -> RestartPolicy:
    from headrace.executor.lifecycle import FAIL, RESTART

    if isinstance(on_engine_death, str):
        named = {"fail": FAIL, "restart": RESTART}.get(on_engine_death)
        if named is None:
            raise ValueError(f"on_engine_death={on_engine_death!r}: it must be 'fail', 'restart' or a RestartPolicy")
        return named
    return on_engine_death


def _listener(progress: bool | ProgressListener) -> tuple[Any, ProgressListener | None]:
    if callable(progress):
        return None, progress
    if not progress:
        return None, None
    from headrace.progress import LoadBar

    bar = LoadBar()
    return bar, bar
