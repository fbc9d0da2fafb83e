"""A Hugging Face folder that transformers has written: small weights, a tokenizer, everything that a user's folder has."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm


def tiny_llama(path: Path) -> Path:
    """A tiny random Llama with a byte-level tokenizer whose vocabulary is the 256 bytes and two special tokens."""
    tqdm.monitor_interval = 0  # transformers shows bars, and the thread that looks after them would be left
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
