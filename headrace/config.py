"""Frozen, typed settings of a world, and the facts that a started world reports back."""

from __future__ import annotations

from typing import Literal

import msgspec

Runner = Literal["auto", "native", "torch", "onnxruntime", "tensorrt", "tensorrt-rtx", "echo"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "none", "int8", "int4"]
KVCacheDType = Literal["auto", "float16", "int8"]
CapacityPolicy = Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"]


class EchoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The echo engine: no model; token i of a request is prompt[i % len(prompt)] shifted by i // len(prompt), modulo the vocabulary, and by
    the seed where it samples. Logprobs and logits are made up, the same ones for a token wherever it stands.

    Attributes:
        vocab_size: size of its vocabulary; id 0 is its end of sequence and is never generated.
        max_seq_len: prompt plus output, in tokens.
        max_batch_size: requests that run at once.
        step_time: seconds that every step takes, 0 for as fast as possible.
        load_time: seconds that every rank spends loading.
        fail_load_rank: this rank raises while it loads.
        kill_load_rank: this rank kills itself with SIGKILL while it loads.
        kill_rank: this rank kills itself with SIGKILL when it is about to run step ``kill_step``.
        kill_step: see ``kill_rank``.
        raise_step: the step with this number raises.
        kill_token: a request whose prompt holds this token kills rank 0 with SIGKILL when it would run.
        fail_token: a request whose prompt holds this token fails with a RequestError in the engine.
    """

    vocab_size: int = 1000
    max_seq_len: int = 8192
    max_batch_size: int = 1024
    step_time: float = 0.0
    load_time: float = 0.0
    fail_load_rank: int | None = None
    kill_load_rank: int | None = None
    kill_rank: int | None = None
    kill_step: int = 0
    raise_step: int | None = None
    fail_token: int | None = None
    kill_token: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a world runs; written by the user process, read by every rank.

    Attributes:
        model: absolute path of a GGUF file or a Hugging Face folder, or ``"echo"``.
        tokenizer: where to read the tokenizer, if not from the model; only grammars need one in the world.
        runner: who runs the forward pass; ``selection`` puts a name in the place of "auto" before a world starts.
        runner_reason: why it was chosen, for people.
        tensor_parallel_size: number of ranks that share every layer.
        pipeline_parallel_size: number of stages, each of ``tensor_parallel_size`` ranks, that share the layers out among them.
        dtype: type of weights and activations; auto: float32 on CPU, bfloat16 on a GPU.
        device: where the torch runner computes; auto: on GPUs where every rank has one, else on the CPU.
        cuda_graphs: steps in which all requests decode are recorded on a GPU, and then started as one.
        quantization: type that matrices are stored in, on CPU; auto: as they are in the checkpoint where the native runner computes, else
            none. int8 and int4 are made when the model is loaded.
        max_batch_size: most requests in one step.
        max_num_tokens: most tokens in one step, prefill and decode together.
        max_seq_len: most tokens of prompt plus output; None: the model's context length, as far as the KV cache holds it.
        kv_cache_tokens: size of the KV cache in tokens, for all requests together. TensorRT engines have ``max_batch_size`` times the
            ``max_seq_len`` that they were built for.
        tokens_per_block: tokens in one KV block.
        num_threads: threads for each rank; None: cores divided by ranks.
        enable_block_reuse: requests take KV blocks that others have filled with the same tokens after the same beginning.
        enable_partial_reuse: where only some of a block's tokens are the same, a copy of these is taken.
        capacity_scheduler_policy: MAX_UTILIZATION admits requests as long as there is room and, when there is none, stops the last one;
            its tokens are computed again later, which its text does not show. GUARANTEED_NO_EVICT admits only what can run to its
            ``max_tokens``. The first is the default: what is stopped is mostly found in the cache again, and the second one leaves places
            empty in proportion to how much ``max_tokens`` exceeds what is generated; ``max_tokens=None`` counts as the whole context.
        event_buffer_max_size: events of the KV cache that are kept for readers; 0: none.
        iter_stats_max_iterations: steps whose statistics are kept for readers; 0: none.
        max_loras: most LoRA adapters that are loaded, and so that requests of one step use; a request for another one waits until a place
            is free. 0: none are run. Runners other than torch run none, whatever this says.
        max_lora_rank: highest rank of an adapter.
        echo: settings of the echo engine.
        skip_selftest: runners that may serve although ``headrace selftest`` has not passed with them on this machine.
        kv_cache_dtype: type that the native runner stores keys and values in; auto: float16. int8 has a scale for each token of a head.
    """

    model: str
    tokenizer: str | None = None
    runner: Runner = "auto"
    runner_reason: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: DType = "auto"
    device: Device = "auto"
    cuda_graphs: bool = True
    quantization: Quantization = "auto"
    max_batch_size: int = 64
    max_num_tokens: int = 2048
    max_seq_len: int | None = None
    kv_cache_tokens: int = 32768
    tokens_per_block: int = 32
    num_threads: int | None = None
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    capacity_scheduler_policy: CapacityPolicy = "MAX_UTILIZATION"
    event_buffer_max_size: int = 4096
    iter_stats_max_iterations: int = 1000
    max_loras: int = 4
    max_lora_rank: int = 64
    echo: EchoConfig = EchoConfig()
    skip_selftest: tuple[Runner, ...] = ()
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a READY world says of itself; the user process validates requests against it.

    Attributes:
        model: short name of the model.
        runner: runner in use.
        dtype: type of weights and activations.
        vocab_size: token ids are 0 to vocab_size - 1.
        max_seq_len: most tokens of prompt plus output.
        max_batch_size: most requests in one step.
        eos_token_ids: tokens that end a sequence.
        num_kv_blocks: KV blocks in the pool, 0 where there is none.
        tokens_per_block: tokens in one KV block, 0 where there is none.
        tensor_parallel_size: ranks that share every layer.
        versions: name and version of what runs in the world.
        max_loras: most LoRA adapters that run at once; 0: none can.
        max_lora_rank: highest rank of one.
        pipeline_parallel_size: stages that share the layers out among them.
        runner_reason: why the runner was chosen, one clause.
        quantization: type that projections are stored in; none: that of the others.
    """

    model: str
    runner: str
    dtype: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_kv_blocks: int = 0
    tokens_per_block: int = 0
    tensor_parallel_size: int = 1
    versions: dict[str, str] = {}
    max_loras: int = 0
    max_lora_rank: int = 0
    pipeline_parallel_size: int = 1
    runner_reason: str = ""
    quantization: str = "none"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
