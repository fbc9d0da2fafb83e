"""A Hugging Face folder through the whole path, against transformers: safetensors, tokenizer.json, a split over two ranks (A46)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

TEXTS = ["the quick brown fox", "jumps over", "a lazy dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer whose vocabulary is the 256 bytes and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # transformers shows bars, and the thread that looks after them would be left
    path = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {char: index + 2 for index, char in enumerate(alphabet)}
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rust.add_special_tokens(["<s>", "</s>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="200KB")
    return path


def test_greedy_text_equals_that_of_transformers(folder: Path) -> None:
    assert len(list(folder.glob("model-*.safetensors"))) > 1, "the checkpoint has several shards"
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(folder, tensor_parallel_size=2, kv_cache_tokens=1024) as llm:
        assert llm.facts.max_seq_len == 256
        outputs = llm.generate(TEXTS, SamplingParams(max_tokens=24, ignore_eos=True), use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert output.prompt_token_ids == ids[0].tolist()
            with torch.inference_mode():
                expected = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
            # min_new_tokens keeps transformers from ending early by forbidding the end of sequence, so equality holds up to that token.
            tokens = output.outputs[0].token_ids
            end = tokens.index(1) if 1 in tokens else 24
            assert tokens[:end] == expected.tolist()[:end] and end > 0
            assert output.outputs[0].text == tokenizer.decode(tokens, skip_special_tokens=True)
