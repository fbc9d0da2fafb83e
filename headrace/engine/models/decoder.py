"""A decoder family as data: which tensors its layers are made of, along what each is split, how they are stored, and what is computed.

A family is a description that runners, writers of other formats and readers of checkpoints all read; none of them knows a family by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from headrace.checkpoint.config import ModelConfig


class Axis(enum.Enum):
    """Which axis of a weight [out, in] is split."""

    ROWS = 0
    COLUMNS = 1


class Share(enum.Enum):
    """What a rank has some of; a weight is split along it. Every rank has ALL of the residual stream, and the whole width of one HEAD."""

    ALL = "residual stream"
    HEAD = "width of a head"
    QUERY_HEADS = "query heads"
    KV_HEADS = "key-value heads"
    MLP_COLUMNS = "MLP columns"
    VOCABULARY = "vocabulary"

    def size(self, config: ModelConfig) -> int:
        """Rows or columns of all ranks together."""
        match self:
            case Share.HEAD:
                return config.head_dim
            case Share.QUERY_HEADS:
                return config.num_heads * config.head_dim
            case Share.KV_HEADS:
                return config.num_kv_heads * config.head_dim
            case Share.MLP_COLUMNS:
                return config.intermediate_size
            case Share.VOCABULARY:
                return config.vocab_size
            case _:
                return config.hidden_size


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint, or some rows of one that holds several weights.

    Attributes:
        name: Hugging Face's; inside a layer it follows the layer's prefix.
        axis: which of its axes is split.
        share: what along.
        behind: in a tensor that several weights share, what lies in the rows before this one.
        vector: whether it has one axis only.
    """

    name: str
    axis: Axis = Axis.ROWS
    share: Share = Share.ALL
    behind: tuple[Share, ...] = ()
    vector: bool = False

    @property
    def bias(self) -> Weight:
        """What is added to its products. One that is split by columns adds its bias on one rank only."""
        name = self.name.removesuffix("weight") + "bias"
        return Weight(name, share=self.share if self.axis is Axis.ROWS else Share.ALL, behind=self.behind, vector=True)

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Of the tensor up to the end of this weight."""
        split = sum(share.size(config) for share in (*self.behind, self.share))
        if self.vector:
            return (split,)
        return (split, config.hidden_size) if self.axis is Axis.ROWS else (config.hidden_size, split)


def norm(name: str, share: Share = Share.ALL) -> Weight:
    """The weight of a RMSNorm."""
    return Weight(name, share=share, vector=True)


class Activation(enum.Enum):
    """f in down(f(gate(x)) * up(x)); the values are transformers' names, the usual one first."""

    SILU = ("silu", "swish")
    GELU_TANH = ("gelu_pytorch_tanh",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFormat:
    """How a folder with ``config.json`` says that it holds this family.

    Attributes:
        architecture: the class that it names.
        model_type: where it names no class.
        defaults: keys of config.json that may be left out, where transformers' defaults are other than Llama's.
        qkv_bias: queries, keys and values have biases whatever the configuration says.
        window_period: layers with a sliding window: 0: none; 1: all; n: all but every n-th. ``layer_types`` overrules it.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    qkv_bias: bool = False
    window_period: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """How llama.cpp's converter writes this family.

    Attributes:
        architecture: its name for it.
        tensors: role -> stem of the tensor's name, where it is not that of ``TENSORS``.
        interleaved: query and key rows are in the order of interleaved RoPE.
        window_period: see ``HuggingFaceFormat``.
        local_rope_theta: of layers with a window, where it is not in the file.
        scale_by_width: numbers of layers of those models whose attention scale is 1 / sqrt(hidden_size / num_heads).
        softcaps: attention's and the logits', where they are not in the file.
    """

    architecture: str
    tensors: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    interleaved: bool = False
    window_period: int = 0
    local_rope_theta: float | None = None
    scale_by_width: tuple[int, ...] = ()
    softcaps: tuple[float | None, float | None] = (None, None)

    def tensor(self, role: str) -> str:
        """Stem of the name, without ``.weight`` or ``.bias``."""
        return self.tensors.get(role, TENSORS[role])


#: role, a field of DecoderFamily -> stem of the tensor's name in GGUF; those of a layer follow ``blk.N.``
TENSORS = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "output": "attn_output",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}

#: fields of DecoderFamily that are projections, and the field of ModelConfig that says whether they have a bias
PROJECTIONS = {
    "query": "qkv_bias",
    "key": "qkv_bias",
    "value": "qkv_bias",
    "output": "output_bias",
    "gate": "mlp_bias",
    "up": "mlp_bias",
    "down": "mlp_bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """Layers of the form x += attention(norm(x)); x += mlp(norm(x)), with an embedding before and a norm and a head after them.

    Attention is causal, with rotary embedding and grouped KV heads; the MLP is gated. The defaults are Llama's.

    Attributes:
        post_attention_norm, post_mlp_norm: of what attention and MLP give to the residual stream; None: none.
        query_norm, key_norm: of each query and key head, before it is rotated; None: none.
        activation: of the gate.
        norm_offset: norm weights are stored less this number.
        scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
    """

    name: str
    huggingface: HuggingFaceFormat
    gguf: GGUFFormat | None
    embedding: Weight = Weight("model.embed_tokens.weight", Axis.ROWS, Share.VOCABULARY)
    final_norm: Weight = Weight("model.norm.weight", vector=True)
    head: Weight = Weight("lm_head.weight", Axis.ROWS, Share.VOCABULARY)
    layer_prefix: str = "model.layers.{}."
    attention_norm: Weight = Weight("input_layernorm.weight", vector=True)
    query: Weight = Weight("self_attn.q_proj.weight", Axis.ROWS, Share.QUERY_HEADS)
    key: Weight = Weight("self_attn.k_proj.weight", Axis.ROWS, Share.KV_HEADS)
    value: Weight = Weight("self_attn.v_proj.weight", Axis.ROWS, Share.KV_HEADS)
    query_norm: Weight | None = None
    key_norm: Weight | None = None
    output: Weight = Weight("self_attn.o_proj.weight", Axis.COLUMNS, Share.QUERY_HEADS)
    post_attention_norm: Weight | None = None
    mlp_norm: Weight = Weight("post_attention_layernorm.weight", vector=True)
    gate: Weight = Weight("mlp.gate_proj.weight", Axis.ROWS, Share.MLP_COLUMNS)
    up: Weight = Weight("mlp.up_proj.weight", Axis.ROWS, Share.MLP_COLUMNS)
    down: Weight = Weight("mlp.down_proj.weight", Axis.COLUMNS, Share.MLP_COLUMNS)
    post_mlp_norm: Weight | None = None
    activation: Activation = Activation.SILU
    norm_offset: float = 0.0
    scaled_embedding: bool = False

    def roles(self, config: ModelConfig) -> Iterator[tuple[str, Weight, bool]]:
        """(role, weight, whether it is in every layer) of all weights but biases.

        A head that is tied to the embedding is a use of the embedding, not a weight.
        """
        for role in TENSORS:
            weight: Weight | None = getattr(self, role)
            if weight is not None and not (role == "head" and config.tie_word_embeddings):
                yield role, weight, role not in ("embedding", "final_norm", "head")

    def layer_weights(self, config: ModelConfig) -> Iterator[Weight]:
        """The weights of every layer, biases included, with names that lack the prefix."""
        for role, weight, in_layer in self.roles(config):
            if in_layer:
                yield weight
                if role in PROJECTIONS and getattr(config, PROJECTIONS[role]):
                    yield weight.bias

    def layer(self, weight: Weight, index: int) -> Weight:
        """A layer's weight with its full name."""
        return replace(weight, name=self.layer_prefix.format(index) + weight.name)

    def weights(self, config: ModelConfig) -> Iterator[Weight]:
        """Every weight of a model, with its full name."""
        yield from (weight for _, weight, in_layer in self.roles(config) if not in_layer)
        for index in range(config.num_layers):
            yield from (self.layer(weight, index) for weight in self.layer_weights(config))

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every stored tensor, layer after layer; of one that holds several weights once."""
        yield from ((weight.name, weight.shape(config)) for _, weight, in_layer in self.roles(config) if not in_layer)
        # The weights of a shared tensor come in the order of their rows, so the last of them tells its whole size.
        layer = {weight.name: weight.shape(config) for weight in self.layer_weights(config)}
        for index in range(config.num_layers):
            prefix = self.layer_prefix.format(index)
            yield from ((prefix + name, shape) for name, shape in layer.items())
