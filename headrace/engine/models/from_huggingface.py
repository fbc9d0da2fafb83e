"""From ``config.json`` to :class:`ModelConfig`, with the defaults of transformers' configuration classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.config import MAX_LAYERS, ModelConfig, RopeScaling
from headrace.checkpoint.huggingface import HuggingFaceCheckpoint, read_json
from headrace.engine.models.decoder import DecoderFamily
from headrace.engine.models.rope import longrope_attention_factor, yarn_attention_factor
from headrace.errors import ModelError

#: what transformers' configuration classes have in common
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def open_folder(path: Path, families: Iterable[DecoderFamily]) -> HuggingFaceCheckpoint:
    """The weights of a folder, with what they mean. Raises ModelError."""
    return HuggingFaceCheckpoint(path, read_config(path, families))


def read_config(folder: Path, families: Iterable[DecoderFamily]) -> ModelConfig:
    """The hyperparameters. Raises ModelError for what is missing, of the wrong type, or not computed by this build."""
    path = folder / "config.json"
    written = read_json(path)
    try:
        family = _family(written, tuple(families))
        # null means the default as well, save for keys that switch something off.
        settings = DEFAULTS | dict(family.huggingface.defaults)
        settings |= {key: value for key, value in written.items() if value is not None or key in NULLABLE}
        return _read(settings, family, _eos_token_ids(written, folder))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


#: keys for which null is a value of its own
NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def _family(written: Mapping[str, Any], families: tuple[DecoderFamily, ...]) -> DecoderFamily:
    architectures = written.get("architectures")
    if architectures:
        for family in families:
            if isinstance(architectures, list) and architectures[0] == family.huggingface.architecture:
                return family
    else:
        architectures = [written.get("model_type")]
        for family in families:
            if architectures[0] == family.huggingface.model_type:
                return family
    known = ", ".join(family.huggingface.architecture for family in families)
    raise ModelError(f"architecture {architectures!r} is not supported; {known} are")


def _read(settings: dict[str, Any], family: DecoderFamily, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    _check_computed(settings, family)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if type(settings.get(key)) is not int or settings[key] <= 0:
            raise ModelError(f"{key} is {settings.get(key)!r}; it must be a positive integer")
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim", settings["hidden_size"] // heads)
    rope, local_rope = _rope_settings(settings)
    scaling = _rope_scaling(rope, settings)
    max_seq_len = settings["max_position_embeddings"]
    if scaling is not None and scaling.kind == "yarn" and type(max_seq_len) is int:
        # Qwen's cards tell users to add the scaling and leave the rest as it is.
        max_seq_len = max(max_seq_len, int(scaling.original_max_seq_len * scaling.factor))
    rotated = _number(rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0)), "partial_rotary_factor")
    window, pattern = _windows(settings, family.huggingface.window_period)
    scalar = settings.get("query_pre_attn_scalar")
    attention_bias = settings.get("attention_bias") is True
    return ModelConfig(
        family=family.name,
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=settings["vocab_size"],
        max_seq_len=max_seq_len,
        rope_theta=rope.get("rope_theta", settings["rope_theta"]),
        rms_norm_eps=settings["rms_norm_eps"],
        tie_word_embeddings=settings["tie_word_embeddings"] is True,
        bos_token_id=settings.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
        rotary_dim=int(head_dim * rotated) if rotated != 1 and type(head_dim) is int else None,
        rope_scaling=scaling,
        local_rope_theta=local_rope.get("rope_theta", settings.get("rope_local_base_freq")),
        sliding_window=window,
        window_pattern=pattern,
        attention_scale=None if scalar is None else _number(scalar, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=settings.get("attn_logit_softcapping"),
        final_softcap=settings.get("final_logit_softcapping"),
        qkv_bias=attention_bias or family.huggingface.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=settings.get("mlp_bias") is True,
    )


def _check_computed(settings: Mapping[str, Any], family: DecoderFamily) -> None:
    quantization = settings.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"weights quantized by {method!r} are not supported; use the float16 or bfloat16 checkpoint, or a GGUF file")
    for key, computed in (
        ("hidden_act", family.activation.value),
        ("hidden_activation", family.activation.value),
        ("use_bidirectional_attention", (False,)),
    ):
        found = settings.get(key)
        if found is not None and found not in computed:
            raise ModelError(f"{key} is {found!r}; this build computes only {computed[0]!r}")


def _rope_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of all layers, or of those without a window, and those of layers with one.

    Transformers 5 writes theta and scaling into rope_parameters, earlier versions wrote rope_theta and rope_scaling.
    """
    parameters = settings.get("rope_parameters", {})
    for key, found in (("rope_parameters", parameters), ("rope_scaling", settings.get("rope_scaling", {}))):
        if not isinstance(found, dict):
            raise ModelError(f"{key} is {found!r}, not an object")
    local: dict[str, Any] = {}
    if isinstance(parameters.get("full_attention"), dict):
        local = parameters.get("sliding_attention") or {}
        if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
            raise ModelError(f"rope_parameters of sliding_attention are {local!r}; this build computes them only without scaling")
        parameters = parameters["full_attention"]
    return {**settings.get("rope_scaling", {}), **parameters}, local


def _rope_scaling(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
    context = settings["max_position_embeddings"]
    match kind:
        case None | "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=_need(rope, "factor"))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=_need(rope, "factor"),
                low_freq_factor=_need(rope, "low_freq_factor"),
                high_freq_factor=_need(rope, "high_freq_factor"),
                original_max_seq_len=_default(original, context),
            )
        case "yarn":
            original = _positive_int(_default(original, context), "original_max_position_embeddings")
            factor = rope.get("factor")
            factor = _number(context, "max_position_embeddings") / original if factor is None else _number(factor, "factor")
            attention, magnitude, all_dims = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
            if attention is None and magnitude and all_dims:
                magnitude, all_dims = _number(magnitude, "mscale"), _number(all_dims, "mscale_all_dim")
                attention = yarn_attention_factor(factor, magnitude) / yarn_attention_factor(factor, all_dims)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_max_seq_len=original,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                truncate=rope.get("truncate", True) is True,
                attention_factor=_default(attention, yarn_attention_factor(factor)),
            )
        case "longrope" | "su":
            original = _positive_int(_default(original, context), "original_max_position_embeddings")
            factor = rope.get("factor")
            factor = _number(context, "max_position_embeddings") / original if factor is None else _number(factor, "factor")
            return RopeScaling(
                kind="longrope",
                factor=factor,
                original_max_seq_len=original,
                attention_factor=_default(rope.get("attention_factor"), longrope_attention_factor(factor, original)),
                short_factors=_factors(rope, "short_factor"),
                long_factors=_factors(rope, "long_factor"),
            )
        case _:
            raise ModelError(f"rotary embedding with scaling {kind!r} is not supported; linear, llama3, yarn and longrope are")


def _windows(settings: Mapping[str, Any], period: int) -> tuple[int | None, tuple[bool, ...]]:
    """Width of the sliding window and which layers have one."""
    window = settings.get("sliding_window")
    if not period or window is None or settings.get("use_sliding_window") is False:
        return None, (True,)
    layers = settings["num_hidden_layers"]
    types, full = settings.get("layer_types"), settings.get("max_window_layers", 0)
    if types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise ModelError(f"layer_types must name one of {known} for each of the {layers} layers")
        return window, tuple(kind == known[0] for kind in types)
    if full:
        if layers > MAX_LAYERS or type(full) is not int or full < 0:
            raise ModelError(f"max_window_layers is {full!r} with {layers} layers")
        return window, tuple(layer >= full for layer in range(layers))
    period = _positive_int(settings.get("sliding_window_pattern", period), "sliding_window_pattern")
    if period > MAX_LAYERS:
        raise ModelError(f"sliding_window_pattern is {period}")
    return window, (True,) if period == 1 else (*[True] * (period - 1), False)


def _eos_token_ids(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Those of config.json and, since instruction models often list further ones there, of generation_config.json."""
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.append(read_json(folder / "generation_config.json"))
    tokens: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int:
                raise ModelError(f"eos_token_id {value!r} is neither an integer nor a list of them")
            tokens[token] = None
    return tuple(tokens)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _need(settings: Mapping[str, Any], key: str) -> float:
    return _number(settings.get(key), f"rope scaling: {key}")


def _factors(settings: Mapping[str, Any], key: str) -> tuple[float, ...]:
    found = settings.get(key)
    if not isinstance(found, list):
        raise ModelError(f"rope scaling: {key} is {found!r}, not a list of numbers")
    return tuple(found)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{name} is {value!r}: it must be a number above 0")
    return float(value)


def _positive_int(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{name} is {value!r}: it must be a positive integer")
    return value
