"""One rank's share of a stage of a decoder for the native library: what it is made of, from a family's description, and its KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Collectives, Float32
from headrace.engine.models import family_of
from headrace.engine.models.decoder import Activation, Weight
from headrace.engine.models.rope import frequencies
from headrace.engine.models.shard import Shard
from headrace.engine.models.stage import Stage
from headrace.engine.plan import StepPlan
from headrace.engine.runners.native_file import Weights
from headrace.engine.runners.native_group import RankSums
from headrace.errors import ModelError
from headrace.native import decoder
from headrace.native.attention import KVCache, KVLayer
from headrace.native.decoder import Decoder, DecoderSpec, Layer, Linear, Moment, Rotation
from headrace.native.linear import MatrixStructure
from headrace.native.pool import Pool

ACTIVATIONS = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh"}


class NativeDecoder:
    """The model of one rank.

    Attributes:
        hidden_size: width of the residual stream.
        stage: which layers, and what it has beside them.
        vocabulary_widths: of the head, what each rank of the stage has.
        dtype, quantization: see ``Weights``.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        stage: Stage,
        collectives: Collectives,
        config: EngineConfig,
        pool: Pool,
        sums: RankSums,
        *,
        num_blocks: int,
        max_seq_len: int,
    ) -> None:
        """``weights``: this rank's share. ``collectives``: of its stage's ranks. Raises ModelError if the split is not possible."""
        self._model, self._family, self._collectives = model, family_of(model), collectives
        self.hidden_size, self.stage = model.hidden_size, stage
        self._shard = shard = Shard.of(model, collectives.rank, collectives.size)
        spans = [Shard.of(model, rank, collectives.size).vocabulary for rank in range(collectives.size)]
        self.vocabulary_widths = [stop - start for start, stop in spans]
        family = self._family
        self._sums = sums
        self._weights: Weights | None = weights
        self.dtype, self.quantization = weights.dtype, weights.quantization
        # What the library reads and numpy holds.
        self._held: list[npt.NDArray[Any]] = []
        self._cache: KVCache | None = self._make_cache(num_blocks, config)
        layers = [self._layer(index, cache, weights) for index, cache in zip(stage.layers, self._cache.layers, strict=True)]
        nothing = MatrixStructure()
        head = family.embedding if model.tie_word_embeddings else family.head
        local = any(layer.rotation for layer in layers)
        spec = DecoderSpec(
            hidden=model.hidden_size,
            head_dim=model.head_dim,
            query_heads=shard.num_query_heads,
            kv_heads=shard.num_kv_heads,
            group=shard.group_size,
            first_slot=shard.first_slot,
            vocabulary=model.vocab_size,
            first_token=shard.vocabulary[0],
            pairs=model.num_rotated // 2,
            max_seq_len=max_seq_len,
            eps=model.rms_norm_eps,
            embedding_scale=math.sqrt(model.hidden_size) if family.scaled_embedding else 1.0,
            final_softcap=model.final_softcap or 0.0,
            activation=decoder.ACTIVATIONS[ACTIVATIONS[family.activation]],
            rotations=(Rotation * 2)(
                self._rotation(max_seq_len, local=False), self._rotation(max_seq_len, local=True) if local else Rotation()
            ),
            embedding=weights.matrix(family.embedding).structure() if stage.is_first else nothing,
            final_norm=self._hold(weights.norm(family.final_norm)) if stage.is_last else None,
            head=weights.matrix(head).structure() if stage.is_last else nothing,
            num_layers=len(layers),
            layers=(Layer * len(layers))(*layers),
            sum=self._sums.function,
            sum_context=self._sums.context,
        )
        self._decoder = Decoder(spec, pool)

    def step(self, plan: StepPlan, x: Float32 | None) -> tuple[Float32, Float32 | None]:
        """Run a plan: [T, hidden] behind this stage; in the last one [samples that want all logits, share of the vocabulary], and
        for the others, if there are any, what ``gather_candidates`` takes.

        ``x``: [T, hidden] behind the stage before; None in the first. Raises RuntimeError for a plan that is not possible.
        """
        best: Float32 | None = None
        shape = (len(plan.tokens), self.hidden_size)
        if self.stage.is_last:
            chosen = int(np.count_nonzero(plan.candidates))
            shape = (len(plan.samples) - chosen, self.vocabulary_widths[self._collectives.rank])
            best = np.empty((chosen, plan.candidates.max(), 2), np.float32) if chosen else None
        out: Float32 = np.empty(shape, np.float32)
        try:
            self._decoder.step(
                plan.tokens, plan.starts, plan.lengths, plan.tables, plan.samples, plan.copies, plan.candidates, x, out, best
            )
        except RuntimeError:
            self._sums.raise_failure()
            raise
        return out, best

    def gather_logits(self, share: Float32) -> Float32 | None:
        """[rows, vocabulary] on the first rank of the last stage, from what its ranks have."""
        return self._collectives.gather_columns(share, self.vocabulary_widths)

    def gather_candidates(self, best: Float32) -> Float32 | None:
        """[rows, ranks * most candidates * 2] on the first rank of the last stage: of each row what its ranks have found among theirs."""
        rows = best.reshape(len(best), -1)
        return self._collectives.gather_columns(rows, [rows.shape[1]] * self._collectives.size)

    def record(self, *, on: bool) -> None:
        """Whether each step from now on leaves its moments."""
        # 8 parts of each layer, and what is beside them.
        self._decoder.record(8 * len(self.stage.layers) + 4 if on else 0)

    def recorded(self) -> list[Moment]:
        """Of the last step."""
        return self._decoder.recorded()

    def close(self) -> None:
        """Drop weights and cache. May be called again."""
        self._decoder.close()
        self._held.clear()
        self._weights = self._cache = None

    def _hold(self, array: npt.NDArray[Any]) -> int:
        self._held.append(array)
        return decoder.address(array)

    def _rotation(self, max_seq_len: int, *, local: bool) -> Rotation:
        radians, factor = frequencies(self._model, max_seq_len, local=local)
        angles = np.arange(max_seq_len)[:, None] * radians
        return Rotation(
            self._hold((np.cos(angles) * factor).astype(np.float32)),
            self._hold((np.sin(angles) * factor).astype(np.float32)),
        )

    def _make_cache(self, num_blocks: int, config: EngineConfig) -> KVCache:
        try:
            return KVCache(
                "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
                layers=len(self.stage.layers),
                num_blocks=num_blocks,
                kv_heads=self._shard.num_kv_heads,
                tokens_per_block=config.tokens_per_block,
                head_dim=self._model.head_dim,
            )
        except MemoryError:
            raise ModelError(
                f"this machine has no memory for a KV cache of {num_blocks} blocks of {config.tokens_per_block} tokens: "
                "a smaller kv_cache_tokens takes less"
            ) from None

    def _layer(self, index: int, cache: KVLayer, weights: Weights) -> Layer:
        model, family = self._model, self._family
        window = model.window(index)

        def norm(weight: Weight | None) -> int | None:
            return None if weight is None else self._hold(weights.norm(family.layer(weight, index)))

        def linear(*parts: Weight, biased: bool, summed: bool = False) -> Linear:
            each: Sequence[Weight] = [family.layer(part, index) for part in parts]
            bias = weights.vector(*(part.bias for part in each)) if biased else None
            # Ranks add up what they have, so one of them adds the bias; the others read it for the sake of progress in bytes.
            if bias is not None and not (summed and self._collectives.rank):
                self._hold(bias)
            else:
                bias = None
            return decoder.linear([weights.matrix(part) for part in each], bias)

        return Layer(
            attention_norm=norm(family.attention_norm),
            qkv=linear(family.query, family.key, family.value, biased=model.qkv_bias),
            query_norm=norm(family.query_norm),
            key_norm=norm(family.key_norm),
            output=linear(family.output, biased=model.output_bias, summed=True),
            post_attention_norm=norm(family.post_attention_norm),
            mlp_norm=norm(family.mlp_norm),
            gate_up=linear(family.gate, family.up, biased=model.mlp_bias),
            down=linear(family.down, biased=model.mlp_bias, summed=True),
            post_mlp_norm=norm(family.post_mlp_norm),
            cache=cache,
            scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
            softcap=model.attention_softcap or 0.0,
            window=window or 0,
            rotation=int(window is not None and model.local_rope_theta is not None),
        )
