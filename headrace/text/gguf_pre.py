"""How byte-level BPE cuts a text before it merges: the kinds that GGUF files name in ``tokenizer.ggml.pre``.

The names are llama.cpp's, and so is what adds BOS and what takes a word that is a token as it is; the expressions are those of each model's
own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"

_LLAMA_3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}"
_QWEN_2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}[\r\n]*|{_SPACES}"
_QWEN_3_5 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"

# Words that end where capitals begin again: lower case behind upper case, or all of it upper case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_MARKS}[\r\n/]*|{_SPACES}"
_GPT_4O = rf"{_CASED[0]}{_SUFFIXES}?|{_CASED[1]}{_SUFFIXES}?|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}"

_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Pre:
    """One kind.

    Attributes:
        splits: expressions that cut the text, one after the other; none: that of GPT-2.
        single_digits: every digit is cut off before GPT-2's expression is used.
        nfc: the text is normalised first.
        whole_words: what is a token as a whole is taken as it is, even where merging would not lead to it.
        adds_bos: where the file says nothing about it.
    """

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> PreTokenizer:
        """The pre-tokenizer, which also turns bytes into the characters that stand for them."""
        if self.splits:
            cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
            return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]) if self.single_digits else gpt2


_GPT_2 = Pre()
_SINGLE_DIGITS = Pre(single_digits=True)
_LLAMA = Pre((_LLAMA_3,), whole_words=True, adds_bos=True)
_QWEN = Pre((_QWEN_2,), nfc=True)

PRE_TOKENIZERS: dict[str, Pre] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _SINGLE_DIGITS),
    "command-r": Pre(single_digits=True, nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA),
    "dbrx": Pre((_LLAMA_3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    "qwen35": Pre((_QWEN_3_5,), nfc=True),
    "tekken": Pre((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre((_GPT_4O,))),
    "deepseek-v3": Pre(_DEEPSEEK_3),
    "deepseek-coder": Pre(_DEEPSEEK_CODER),
}
