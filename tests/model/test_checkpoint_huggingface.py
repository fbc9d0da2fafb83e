"""Hugging Face folders, written by the safetensors library and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from headrace.checkpoint.huggingface import folder_name
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError
from tests.gguf_writer import llama_weights

#: its progress bar would leave a thread behind
logging.disable_progress_bar()

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHTS = {name: torch.from_numpy(weight) for name, weight in llama_weights(np.random.default_rng(3)).items()}


def folder(path: Path, config: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, shards: int = 0) -> Path:
    """A folder with the tiny Llama in one file, or in this many shards; ``...`` in ``config`` removes a key."""
    path.mkdir(exist_ok=True)
    settings = {key: value for key, value in (CONFIG | (config or {})).items() if value is not Ellipsis}
    (path / "config.json").write_text(json.dumps(settings))
    weights = {name: weight.to(dtype) for name, weight in WEIGHTS.items()}
    if not shards:
        safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        safetensors.torch.save_file({name: weights[name] for name in weights if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [0, 3])
def test_tensors_and_slices_equal_the_library(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    with open_checkpoint(folder(tmp_path, None, dtype, shards)) as checkpoint:
        assert set(checkpoint.names()) == set(WEIGHTS)
        for name, weight in WEIGHTS.items():
            expected = weight.to(dtype).float().numpy()
            assert checkpoint.shape(name) == expected.shape
            assert checkpoint.nbytes(name) == weight.numel() * dtype.itemsize
            found = checkpoint.tensor(name)
            assert found.dtype == np.float32
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(checkpoint.tensor(name, (3, 29)), expected[3:29])
            if expected.ndim == 2:
                part = checkpoint.tensor(name, (1, 30), (5, 50))
                assert part.flags.c_contiguous
                np.testing.assert_array_equal(part, expected[1:30, 5:50])
        with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight"):
            checkpoint.tensor("lm_head.weight")
        with pytest.raises(ValueError, match="outside 0:64"):
            checkpoint.tensor("model.norm.weight", (0, 65))
    np.testing.assert_array_equal(found, expected)


def test_what_transformers_saves(tmp_path: Path) -> None:
    """The configuration as transformers writes it today, in shards, and the end-of-sequence tokens of generation_config.json."""
    config = LlamaConfig(
        **{key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
        num_key_value_heads=1,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[7, 2], do_sample=False)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with open_checkpoint(tmp_path) as checkpoint:
        found = checkpoint.config
        assert (found.num_kv_heads, found.head_dim, found.rope_theta, found.rms_norm_eps, found.max_seq_len) == (1, 16, 5e5, 1e-5, 256)
        assert (found.bos_token_id, found.eos_token_ids, found.tie_word_embeddings) == (1, (2, 7), False)
        for name, parameter in model.state_dict().items():
            np.testing.assert_array_equal(checkpoint.tensor(name), parameter.float().numpy())


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        ({"head_dim": None}, "head_dim", 16),
        ({}, "rope_theta", 10000.0),
        ({"rope_theta": 5e5}, "rope_theta", 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta", 1e6),
        ({"rope_scaling": None}, "rope_theta", 10000.0),
        ({"rope_scaling": {"type": "default"}}, "rope_theta", 10000.0),
        ({"rms_norm_eps": ...}, "rms_norm_eps", 1e-6),
        ({"max_position_embeddings": ...}, "max_seq_len", 2048),
        ({"eos_token_id": [5, 2, 5]}, "eos_token_ids", (5, 2)),
        ({"eos_token_id": None, "bos_token_id": None}, "eos_token_ids", ()),
        ({"architectures": ...}, "family", "llama"),
        ({"torch_dtype": "bfloat16", "attention_bias": False, "hidden_act": "silu", "pretraining_tp": 1}, "hidden_size", 64),
    ],
)
def test_configurations(tmp_path: Path, config: dict[str, Any], field: str, expected: Any) -> None:
    with open_checkpoint(folder(tmp_path, config)) as checkpoint:
        assert getattr(checkpoint.config, field) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"\['MambaForCausalLM'\] is not supported; LlamaForCausalLM, Mistral"),
        ({"architectures": ..., "model_type": "t5"}, r"\['t5'\] is not supported"),
        ({"architectures": [5]}, "is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, r"factor is -2\.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaling 'dynamic' is not supported; linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor is '4'"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor is None, not a list"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 factors for 8 frequencies"),
        ({"partial_rotary_factor": 0.2}, "rotary_dim is 3"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq'"),
        ({"attention_bias": True}, r"self_attn\.q_proj\.bias is missing"),
        ({"mlp_bias": True}, r"mlp\.gate_proj\.bias is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": ...}, "hidden_size is None; it must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"num_key_value_heads": ...}, r"k_proj\.weight has shape \[32, 64\], the configuration asks for \[64, 64\]"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000: at most 65536"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight is missing"),
        ({"eos_token_id": "2"}, "eos_token_id '2' is neither"),
        ({"bos_token_id": 64}, "special token id 64 is outside"),
        ({"bos_token_id": "1"}, "special token id '1' is outside"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
        ({"tie_word_embeddings": ...}, r"lm_head\.weight is missing"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    path = folder(tmp_path, config)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of its 3 shards: model-00002-of-00003\.safetensors"):
        open_checkpoint(path)
    path = folder(tmp_path / "b", shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for weight_map, message in (
        (None, "has no weight_map"),
        ({"x": 5}, "has no weight_map"),
        ({"x": "../b/model-00001-of-00002.safetensors"}, "is not a file of this folder"),
        (index["weight_map"] | {"absent": "model-00001-of-00002.safetensors"}, "lacks tensor absent"),
    ):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=message):
            open_checkpoint(path)
    path = folder(tmp_path / "c")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, but pickled weights are not read"):
        open_checkpoint(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        open_checkpoint(path)


def test_unreadable_types_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path, dtype=torch.float64)
    with pytest.raises(ModelError, match="is of type F64"):
        open_checkpoint(path)


def test_further_tensors_do_no_harm(tmp_path: Path) -> None:
    """Old checkpoints carry the rotary frequencies, and tied ones the head again."""
    path = folder(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "scalar": torch.tensor(1.0), "none": torch.ones(0)}
    safetensors.torch.save_file(WEIGHTS | extra, path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("model.layers.0.self_attn.rotary_emb.inv_freq").sum() == 8
        for name in ("scalar", "none"):
            with pytest.raises(ModelError, match=f"tensor {name} has the shape"):
                checkpoint.tensor(name)


HOSTILE = {
    "empty": b"",
    "short": b"\1\0\0",
    "endless header": (2**63).to_bytes(8, "little") + bytes(64),
    "header behind the end": (65).to_bytes(8, "little") + bytes(64),
    "no JSON": (4).to_bytes(8, "little") + b"{{{{",
    "deep JSON": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "no object": (2).to_bytes(8, "little") + b"[]",
} | {
    name: len(entry).to_bytes(8, "little") + entry + bytes(16)
    for name, entry in {
        "no shape": b'{"w":{"dtype":"F32"}}',
        "no entry": b'{"w":5}',
        "one offset": b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        "offsets in words": b'{"w":{"dtype":"F32","shape":[1],"data_offsets":["0","4"]}}',
        "behind the end": b'{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}',
        "backwards": b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}',
        "negative": b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        "wrong size": b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
        "huge shape": b'{"w":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,8]}}',
        "shape in words": b'{"w":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}',
        "type a number": b'{"w":{"dtype":0,"shape":[2],"data_offsets":[0,8]}}',
    }.items()
}


def test_hostile_files_give_model_errors(tmp_path: Path) -> None:
    path = folder(tmp_path)
    for name, data in HOSTILE.items():
        (path / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match=r"is not a sound safetensors file|cannot open") as caught:
            open_checkpoint(path)
        assert str(path / "model.safetensors") in str(caught.value), name


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("damaged") / "model")


SOUND = safetensors.torch.save(WEIGHTS)
HEAD_BYTES = 8 + int.from_bytes(SOUND[:8], "little")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, HEAD_BYTES), st.binary(min_size=1, max_size=3) | st.sampled_from([b"9", b"0", b'"', b"]", b"-"])),
        max_size=3,
    ),
    st.none() | st.integers(0, len(SOUND)),
)
def test_damaged_files_give_model_errors(scratch: Path, changes: list[tuple[int, bytes]], length: int | None) -> None:
    data = bytearray(SOUND)
    for at, change in changes:
        data[at : at + len(change)] = change
    (scratch / "model.safetensors").write_bytes(data[:length])
    try:
        with open_checkpoint(scratch) as checkpoint:
            for name in WEIGHTS:
                assert checkpoint.tensor(name).shape == WEIGHTS[name].shape
    except ModelError as error:
        assert str(scratch) in str(error)


def test_names_for_people() -> None:
    assert folder_name(Path("/models/tiny")) == "tiny"
    assert folder_name(Path("/cache/models--org--a--b/snapshots/0123abc")) == "org/a--b"
