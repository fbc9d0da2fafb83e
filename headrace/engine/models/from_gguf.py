"""From the metadata and tensors of a GGUF file to :class:`ModelConfig`, as llama.cpp reads them (``llama-model.cpp``, ``load_hparams``)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from headrace.checkpoint.config import MAX_LAYERS, ModelConfig, RopeScaling
from headrace.checkpoint.gguf import GGUFFile
from headrace.checkpoint.gguf_checkpoint import GGUFCheckpoint
from headrace.engine.models.decoder import PROJECTIONS, TENSORS, DecoderFamily, GGUFFormat
from headrace.engine.models.rope import yarn_attention_factor
from headrace.errors import ModelError

T = TypeVar("T")

LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
#: divisors of the rotary frequencies, which are configuration: of Llama 3, and LongRoPE's
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def open_gguf(path: Path, families: Iterable[DecoderFamily]) -> GGUFCheckpoint:
    """The weights of a file, with what they mean. Raises ModelError, also for tensors and settings that would be computed wrongly."""
    file = GGUFFile(path)
    try:
        known = {family.gguf.architecture: family for family in families if family.gguf is not None}
        architecture = file.get("general.architecture", str)
        family = known.get(architecture)
        if family is None or family.gguf is None:
            raise ModelError(f"{path}: architecture {architecture!r} is not supported; {', '.join(known)} are")
        reader = _Reader(file, family, family.gguf)
        config, sources = reader.config(), reader.sources()
        interleaved = {name for name in sources if reader.is_interleaved(name)}
        return GGUFCheckpoint(file, config, sources, interleaved)
    except BaseException:
        file.close()
        raise


@dataclass(frozen=True, slots=True)
class _Reader:
    file: GGUFFile
    family: DecoderFamily
    gguf: GGUFFormat

    def sources(self) -> dict[str, str]:
        """Hugging Face's name -> name in the file, of every tensor that is a weight."""
        names = {}
        for role in TENSORS:
            weight = getattr(self.family, role)
            if weight is not None:
                names[self.gguf.tensor(role)] = weight.name.removesuffix(".weight")
        sources = {}
        for source in self.file.tensors:
            if source in (FACTORS, LONG_FACTORS, SHORT_FACTORS):
                continue
            match = LAYER_TENSOR.fullmatch(source)
            stem, _, kind = source.rpartition(".") if match is None else (match[2], "", match[3])
            name = names.get(stem)
            in_layer = stem not in map(self.gguf.tensor, ("embedding", "final_norm", "head"))
            # To leave one out would compute another model: a bias, the experts of a mixture.
            if name is None or in_layer != (match is not None) or (kind == "bias" and not self._has_biases(stem)):
                raise ModelError(f"{self.file.path}: tensor {source!r} is not part of any model that this build computes")
            prefix = "" if match is None else self.family.layer_prefix.format(match[1])
            sources[f"{prefix}{name}.{kind}"] = source
        return sources

    def is_interleaved(self, name: str) -> bool:
        stem = name.rpartition(".")[0]
        return self.gguf.interleaved and stem.endswith(tuple(w.name.removesuffix(".weight") for w in (self.family.query, self.family.key)))

    def config(self) -> ModelConfig:
        heads, hidden = self._get("attention.head_count", int), self._get("embedding_length", int)
        if heads == 0:
            raise ModelError(f"{self.file.path}: metadata {self.gguf.architecture}.attention.head_count is 0")
        head_dim = self._or("attention.key_length", hidden // heads)
        rotary_dim = self._or("rope.dimension_count", head_dim)
        for key, computed in (
            ("attention.value_length", head_dim),
            ("expert_count", 0),
            # Rows are put back into Hugging Face's order head by head, as if all of it were rotated.
            ("rope.dimension_count", head_dim if self.gguf.interleaved else rotary_dim),
        ):
            found = self._or(key, computed)
            if found != computed:
                raise ModelError(f"{self.file.path}: {self.gguf.architecture}.{key} is {found!r}; this build computes only {computed!r}")
        layers, context = self._get("block_count", int), self._get("context_length", int)
        bos, *eos = (self.file.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom"))
        attention_softcap, final_softcap = self.gguf.softcaps
        window = self._or("attention.sliding_window", 0) if self.gguf.window_period else 0
        by_width = layers in self.gguf.scale_by_width
        mlp, kv_heads = self._get("feed_forward_length", int), self._or("attention.head_count_kv", heads)
        theta, epsilon = self._or("rope.freq_base", 10000.0), self._get("attention.layer_norm_rms_epsilon", float)
        scaling = self._rope_scaling(context)
        try:
            return ModelConfig(
                family=self.family.name,
                hidden_size=hidden,
                intermediate_size=mlp,
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                # The rows of the embedding decide: vocab_size is optional, and some writers leave padding out of it.
                vocab_size=self._embedding_rows(),
                max_seq_len=context,
                rope_theta=theta,
                rms_norm_eps=epsilon,
                tie_word_embeddings=f"{self.gguf.tensor('head')}.weight" not in self.file.tensors,
                bos_token_id=bos,
                eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
                rotary_dim=None if rotary_dim == head_dim else rotary_dim,
                rope_scaling=scaling,
                local_rope_theta=self._find("rope.freq_base_swa", float) or self.gguf.local_rope_theta,
                sliding_window=window or None,
                window_pattern=self._window_pattern(layers),
                attention_scale=(hidden // heads) ** -0.5 if by_width else None,
                attention_softcap=self._find("attn_logit_softcapping", float) or attention_softcap,
                final_softcap=self._find("final_logit_softcapping", float) or final_softcap,
                qkv_bias=self._has_bias("query"),
                output_bias=self._has_bias("output"),
                mlp_bias=self._has_bias("up"),
                norms_are_complete=self.family.norm_offset != 0,
            )
        except ModelError as error:
            raise ModelError(f"{self.file.path}: {error}") from None

    def _window_pattern(self, layers: int) -> tuple[bool, ...]:
        key = f"{self.gguf.architecture}.attention.sliding_window_pattern"
        found = self.file.metadata.get(key, self.gguf.window_period)
        if isinstance(found, np.ndarray) and len(found) == layers:
            return tuple(bool(window) for window in found.tolist())
        if type(found) is not int or not 0 <= found <= MAX_LAYERS:
            raise ModelError(f"{self.file.path}: metadata {key} is {found!r}: it must be a number of layers, or say of each what it has")
        return (*[True] * (found - 1), found < 2)

    def _rope_scaling(self, context: int) -> RopeScaling | None:
        kind = self._or("rope.scaling.type", "none")
        original = self._or("rope.scaling.original_context_length", context)
        attention = self._or("rope.scaling.attn_factor", 1.0)
        factor = self._or("rope.scaling.factor", 1.0)
        try:
            if SHORT_FACTORS in self.file.tensors or LONG_FACTORS in self.file.tensors:
                return RopeScaling(
                    kind="longrope",
                    original_max_seq_len=original,
                    attention_factor=attention,
                    short_factors=self._factors(SHORT_FACTORS),
                    long_factors=self._factors(LONG_FACTORS),
                )
            if kind == "yarn":
                return RopeScaling(
                    kind="yarn",
                    factor=factor,
                    original_max_seq_len=original,
                    attention_factor=attention * yarn_attention_factor(factor),
                )
            if kind not in ("none", "linear"):
                raise ModelError(f"{self.gguf.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are computed")
            if FACTORS in self.file.tensors:
                return RopeScaling(kind="factors", short_factors=self._factors(FACTORS), attention_factor=attention)
            return RopeScaling(kind="linear", factor=factor) if kind == "linear" else None
        except ModelError as error:
            raise error if str(self.file.path) in str(error) else ModelError(f"{self.file.path}: {error}") from None

    def _factors(self, name: str) -> tuple[float, ...]:
        if name not in self.file.tensors:
            raise ModelError(f"tensor {name} is missing")
        return tuple(self.file.read(name).reshape(-1).tolist())

    def _embedding_rows(self) -> int:
        name = f"{self.gguf.tensor('embedding')}.weight"
        if name not in self.file.tensors:
            raise ModelError(f"it has no tensor {name}")
        return self.file.tensors[name].shape[0]

    def _has_bias(self, role: str) -> bool:
        return f"blk.0.{self.gguf.tensor(role)}.bias" in self.file.tensors

    def _has_biases(self, stem: str) -> bool:
        return any(self.gguf.tensor(role) == stem for role in PROJECTIONS)

    def _get(self, key: str, kind: type[T]) -> T:
        return self.file.get(f"{self.gguf.architecture}.{key}", kind)

    def _find(self, key: str, kind: type[T]) -> T | None:
        return self.file.find(f"{self.gguf.architecture}.{key}", kind)

    def _or(self, key: str, default: T) -> T:
        found = self._find(key, type(default))
        return default if found is None else found
