"""The GGUF reader: every value and tensor type, slices, and files that lie."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import closing
from pathlib import Path

import gguf.quants as gguf_quants
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.gguf import GGUFFile
from headrace.checkpoint.gguf_checkpoint import stored_rows
from headrace.checkpoint.quantization import OTHER_TYPES, TENSOR_TYPES
from headrace.engine.models import open_checkpoint
from headrace.errors import ModelError
from headrace.text import load_tokenizer
from tests.gguf_writer import (
    LLAMA,
    TYPE_NUMBERS,
    Tensor,
    Typed,
    byte_tokenizer,
    encode_string,
    f32,
    gguf_bytes,
    interleave,
    llama_tensors,
    llama_weights,
    random_blocks,
    write,
)

SCALARS = {
    "u8": 255,
    "i8": -128,
    "u16": 65535,
    "i16": -32768,
    "u32": 2**32 - 1,
    "i32": -(2**31),
    "f32": 0.5,
    "bool": True,
    "str": "grün",
    "u64": 2**64 - 1,
    "i64": -(2**63),
    "f64": 1e300,
}


def reference(tensor: Tensor) -> np.ndarray:
    """What the library of llama.cpp makes of it, which does not know Q8_K."""
    kind = TENSOR_TYPES[tensor.kind]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(-1, kind.block_bytes)
    if kind.name == "Q8_K":
        values = raw[:, :4].copy().view("<f4") * raw[:, 4:260].view(np.int8)
    else:
        values = gguf_quants.dequantize(raw, GGMLQuantizationType[kind.name])
    return np.asarray(values, np.float32).reshape(tensor.shape)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type(tmp_path: Path, version: int) -> None:
    metadata = {kind: Typed(kind, value) for kind, value in SCALARS.items()}
    arrays = {f"{kind}s": Typed(kind, [value, value]) for kind, value in SCALARS.items()}
    other = {"empty": Typed("str", []), "no numbers": Typed("f32", []), "nested": [["a"], ["b", "c"]]}
    with closing(GGUFFile(write(tmp_path / "a.gguf", gguf_bytes(metadata | arrays | other, version=version)))) as file:
        for kind, value in SCALARS.items():
            assert file.metadata[kind] == value
            assert type(file.metadata[kind]) is type(value)
            assert list(file.metadata[f"{kind}s"]) == [value, value]
        assert file.metadata["empty"] == []
        assert len(file.metadata["no numbers"]) == 0
        assert file.metadata["nested"] == [["a"], ["b", "c"]]
        assert file.tensors == {}


@pytest.mark.parametrize("kind", TYPE_NUMBERS)
def test_tensors_of_every_type_and_slices_of_them(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(7)
    width = max(96, 3 * TENSOR_TYPES[TYPE_NUMBERS[kind]].block_size)
    matrix, vector = random_blocks(kind, (5, width), rng), random_blocks(kind, (width,), rng)
    tensors = {"odd": f32(rng.standard_normal(3)), "matrix": matrix, "vector": vector}
    with closing(GGUFFile(write(tmp_path / "a.gguf", gguf_bytes({}, tensors)))) as file:
        if TENSOR_TYPES[TYPE_NUMBERS[kind]].block_size == 1:
            vector = file.read("vector", (3, 40))
            np.testing.assert_array_equal(vector, reference(tensors["vector"])[3:40].astype(np.float32))
        whole = file.read("matrix")
        # A scale times a weight is exact in float32 save for the last rounding.
        np.testing.assert_allclose(whole, reference(tensors["matrix"]), rtol=1e-6, atol=1e-6)
        for rows in (None, (0, 5), (1, 4), (2, 2), (5, 5)):
            for columns in (None, (0, width), (1, 2), (31, 33), (40, width - 6), (32, 64), (7, 7)):
                part = file.read("matrix", rows, columns)
                assert part.dtype == np.float32
                assert part.flags.c_contiguous
                np.testing.assert_array_equal(part, whole[slice(*rows or (None,)), slice(*columns or (None,))])
        for rows, columns in (((0, 6), None), ((-1, 2), None), ((3, 2), None), (None, (0, width + 1)), (None, (5, 4))):
            with pytest.raises(ValueError, match="outside"):
                file.read("matrix", rows, columns)
        np.testing.assert_array_equal(file.read("odd"), reference(tensors["odd"]).astype(np.float32))
        with pytest.raises(ValueError, match="no columns"):
            file.read("odd", None, (0, 1))
    np.testing.assert_array_equal(whole[0], whole[0].copy())  # it lives on after the mapping is gone


@pytest.mark.parametrize("alignment", [8, 64])
def test_the_alignment_of_the_file_is_followed(tmp_path: Path, alignment: int) -> None:
    tensors = {"odd": f32(np.arange(3)), "even": f32(np.arange(4))}
    with closing(GGUFFile(write(tmp_path / "a.gguf", gguf_bytes({}, tensors, alignment=alignment)))) as file:
        assert file.tensors["even"].offset % alignment == 0
        np.testing.assert_array_equal(file.read("odd"), np.arange(3))
        np.testing.assert_array_equal(file.read("even"), np.arange(4))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_large_tensors_are_decoded_in_chunks(tmp_path: Path, kind: str) -> None:
    tensor = random_blocks(kind, (700, 512), np.random.default_rng(1))  # more than one chunk, the last one cut short
    with closing(GGUFFile(write(tmp_path / "a.gguf", gguf_bytes({}, {"w": tensor})))) as file:
        np.testing.assert_allclose(file.read("w"), reference(tensor), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [16, 19, 999])
def test_an_unreadable_type_is_named_only_when_it_is_asked_for(tmp_path: Path, number: int) -> None:
    data = gguf_bytes({"key": "value"}, {"w": Tensor(number, (2, 256), bytes(288))})
    with closing(GGUFFile(write(tmp_path / "a.gguf", data))) as file:
        assert file.metadata["key"] == "value"
        with pytest.raises(ModelError, match=f"tensor w is of type {OTHER_TYPES.get(number, 'number 999')}"):
            file.read("w")


@given(st.integers(1, 5), st.sampled_from([2, 4, 6, 64]), st.data())
def test_stored_rows_undo_the_permutation_of_the_converter(heads: int, head_dim: int, data: st.DataObject) -> None:
    rows = heads * head_dim
    stored = interleave(np.arange(rows)[:, None], heads)[:, 0]
    start = data.draw(st.integers(0, rows))
    wanted = np.arange(start, data.draw(st.integers(start, rows)))
    np.testing.assert_array_equal(stored[stored_rows(wanted, head_dim)], wanted)


# --- whole checkpoints ------------------------------------------------------------------------------------------------------------------


def llama_file(path: Path, metadata: dict | None = None, drop: tuple[str, ...] = (), **extra: Tensor) -> Path:
    tensors = llama_tensors(llama_weights(np.random.default_rng(3)))
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    return write(path, gguf_bytes(LLAMA | (metadata or {}), kept | extra))


def test_a_checkpoint_speaks_hugging_face(tmp_path: Path) -> None:
    weights = llama_weights(np.random.default_rng(3))
    with open_checkpoint(llama_file(tmp_path / "tiny.gguf")) as checkpoint:
        assert checkpoint.name == "tiny"
        assert set(checkpoint.names()) == set(weights)
        for name, weight in weights.items():
            assert checkpoint.has(name)
            assert checkpoint.shape(name) == weight.shape
            assert checkpoint.nbytes(name) == weight.nbytes
            np.testing.assert_array_equal(checkpoint.tensor(name), weight)
        name = "model.layers.1.self_attn.q_proj.weight"
        for rows in ((0, 16), (5, 43), (16, 17), (63, 64)):
            np.testing.assert_array_equal(checkpoint.tensor(name, rows, (9, 41)), weights[name][slice(*rows), 9:41])
        config = checkpoint.config
        assert (config.family, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 64, 2, 4, 2)
        assert (config.head_dim, config.vocab_size, config.max_seq_len, config.rope_theta) == (16, 64, 128, 10000.0)
        assert config.tie_word_embeddings
        assert not checkpoint.has("lm_head.weight")
        with pytest.raises(ModelError, match="has no tensor lm_head"):
            checkpoint.tensor("lm_head.weight")
    checkpoint.close()


def test_an_output_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    with open_checkpoint(llama_file(tmp_path / "a.gguf", **{"output.weight": f32(np.ones((64, 64)))})) as checkpoint:
        assert not checkpoint.config.tie_word_embeddings
        assert checkpoint.tensor("lm_head.weight").sum() == 64 * 64


def test_every_end_of_sequence_token_counts_once(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": id for name, id in {"bos": 1, "eos": 2, "eot": 3, "eom": 2}.items()}
    with open_checkpoint(llama_file(tmp_path / "a.gguf", ends)) as checkpoint:
        assert checkpoint.config.bos_token_id == 1
        assert checkpoint.config.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"llama.rope.scaling.type": "dynamic"}, "llama.rope.scaling.type is 'dynamic'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "rope scaling: factor is 0.0"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3 key-value heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv is of type ndarray, not int"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"llama.block_count": 2**32 - 1}, "num_layers is 4294967295"),
        ({"llama.block_count": 2**31 - 1}, "num_layers is 2147483647: at most 65536"),
        ({"llama.feed_forward_length": 64}, r"shape \[96, 64\], the configuration asks for \[64, 64\]"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps is nan"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta is 0.0"),
        ({"tokenizer.ggml.eos_token_id": 64}, "special token id 64 is outside the vocabulary of 64"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, metadata: dict, message: str) -> None:
    path = llama_file(tmp_path / "a.gguf", metadata)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).count(str(path)) == 1


def test_missing_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight is missing"):
        open_checkpoint(llama_file(tmp_path / "a.gguf", drop=("blk.1.ffn_up.weight",)))
    with pytest.raises(ModelError, match=r"has no tensor token_embd\.weight"):
        open_checkpoint(llama_file(tmp_path / "b.gguf", drop=("token_embd.weight",)))
    for name in ("blk.0.ffn_gate_exps.weight", "blk.0.attn_norm.bias", "blk.0.output_norm.weight", "attn_q.weight", "rope_freqs"):
        with pytest.raises(ModelError, match=rf"'{name}' is not part of any model"):
            open_checkpoint(llama_file(tmp_path / "c.gguf", **{name: f32(np.ones(8))}))
    with pytest.raises(ModelError, match="rope scaling has 7 factors for 8 frequencies"):
        open_checkpoint(llama_file(tmp_path / "c.gguf", **{"rope_freqs.weight": f32(np.ones(7))}))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is of type IQ1_S"):
        open_checkpoint(llama_file(tmp_path / "d.gguf", **{"blk.1.ffn_up.weight": Tensor(19, (96, 64), b"")}))


# --- damaged and hostile files ----------------------------------------------------------------------------------------------------------


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def array_head(kind: int, count: int) -> bytes:
    return encode_string("k") + struct.pack("<IIQ", 9, kind, count)


def tensor_head(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return encode_string("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE = {
    "empty": (b"", "cannot open"),
    "another format": (b"PK\3\4" + bytes(40), "not a GGUF file"),
    "old version": (head(0, 0, 1), "version 1 cannot be read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "nothing after the magic": (b"GGUF", "truncated"),
    "countless pairs": (head(0, 2**64 - 1) + bytes(64), "18446744073709551615 metadata pairs"),
    "countless tensors": (head(2**63, 0) + bytes(64), "tensors were announced"),
    "endless key": (head(0, 1) + struct.pack("<Q", 2**62) + bytes(64), "truncated"),
    "endless array of numbers": (head(0, 1) + array_head(6, 2**61) + bytes(64), "array elements"),
    "endless array of strings": (head(0, 1) + array_head(8, 2**61) + bytes(64), "array elements"),
    "endless string in an array": (head(0, 1) + array_head(8, 1) + struct.pack("<Q", 2**63) + bytes(8), "inside a string"),
    "deep arrays": (head(0, 1) + array_head(9, 1) + struct.pack("<IQ", 9, 1) * 5000, "nested"),
    "unknown value type": (head(0, 1) + encode_string("k") + struct.pack("<I", 77) + bytes(32), "type 77 does not exist"),
    "unknown element type": (head(0, 1) + array_head(77, 1) + bytes(32), "type 77 does not exist"),
    "broken text": (gguf_bytes({"k": b"\xff\xfe"}), "not UTF-8"),
    "broken text in an array": (gguf_bytes({"k": ["fine", b"\xc3"]}), "not UTF-8"),
    "no dimensions": (head(1, 0) + tensor_head(()) + bytes(64), "0 dimensions"),
    "many dimensions": (head(1, 0) + tensor_head((1,) * 5) + bytes(64), "5 dimensions"),
    "empty tensor": (head(1, 0) + tensor_head((4, 0)) + bytes(64), "is empty"),
    "huge tensor": (head(1, 0) + tensor_head((2**63, 2**63)) + bytes(64), "behind the end of the file"),
    "offset behind the end": (head(1, 0) + tensor_head((1,), offset=2**63) + bytes(64), "behind the end of the file"),
    "crooked offset": (head(1, 0) + tensor_head((1,), offset=4) + bytes(64), "multiple of 32"),
    "broken block": (head(1, 0) + tensor_head((33,), 2) + bytes(64), "no multiple of the 32 of Q4_0"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "power of two"),
    "alignment 24": (gguf_bytes({"general.alignment": 24}), "power of two"),
    "alignment in words": (gguf_bytes({"general.alignment": "32"}), "power of two"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = write(tmp_path / "a.gguf", data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_names_that_appear_twice_are_refused(tmp_path: Path) -> None:
    pair = encode_string("key") + struct.pack("<IB", 0, 1)
    with pytest.raises(ModelError, match="metadata key 'key' appears twice"):
        GGUFFile(write(tmp_path / "a.gguf", head(0, 2) + pair * 2))
    with pytest.raises(ModelError, match="tensor 't' appears twice"):
        GGUFFile(write(tmp_path / "b.gguf", head(2, 0) + tensor_head((1,)) * 2 + bytes(64)))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot open"):
            GGUFFile(path)


SOUND = gguf_bytes(LLAMA | byte_tokenizer(words=("the",)), llama_tensors(llama_weights(np.random.default_rng(3), vocab_size=64)))
HEAD_BYTES = len(SOUND) - sum(len(tensor.data) for tensor in llama_tensors(llama_weights(np.random.default_rng(3))).values())


def use(path: Path) -> None:
    """Everything that one does with a file; anything but ModelError is a bug."""
    for action in (read_everything, load_tokenizer):
        try:
            action(path)
        except ModelError as error:
            assert str(path) in str(error)


def read_everything(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names():
            with np.errstate(all="ignore"):
                assert checkpoint.tensor(name).shape == checkpoint.shape(name)


def test_the_file_that_is_damaged_below_is_sound(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", SOUND)
    read_everything(path)
    assert load_tokenizer(path).encode("the") == [len(byte_tokenizer(words=("the",))["tokenizer.ggml.tokens"]) - 1]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "damaged.gguf"


DAMAGE = st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", 2**31), struct.pack("<I", 9)])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, HEAD_BYTES), DAMAGE), min_size=1, max_size=4), st.none() | st.integers(0, len(SOUND)))
def test_damaged_files_give_model_errors(scratch: Path, changes: list[tuple[int, bytes]], length: int | None) -> None:
    data = bytearray(SOUND)
    for at, change in changes:
        data[at : at + len(change)] = change
    use(write(scratch, bytes(data[:length])))


STRANGE = [Typed("u8", 7), Typed("i32", -1), 2**31, 0.5, float("nan"), True, "text", [], ["a"], [["a"]], [1, 2]]


def test_metadata_of_a_wrong_type_gives_model_errors(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_weights(np.random.default_rng(3)))
    sound = LLAMA | byte_tokenizer(words=("the",))
    for key in sound:
        for value in STRANGE:
            use(write(tmp_path / "a.gguf", gguf_bytes(sound | {key: value}, tensors)))
