"""A Hugging Face folder through the whole path, against transformers: safetensors, tokenizer.json, a split over two ranks (A46)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from headrace import LLM, LoraRequest, RequestError, SamplingParams
from tests.tiny_folder import tiny_llama

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

TEXTS = ["the quick brown fox", "jumps over", "a lazy dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def adapted(model: Any, path: Path) -> None:
    """Write a LoRA adapter of all attention projections, and put it into the model."""
    tensors, generator = {}, torch.Generator().manual_seed(3)
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(layer.self_attn, name).weight
            down, up = torch.randn(4, weight.shape[1], generator=generator), torch.randn(weight.shape[0], 4, generator=generator) / 4
            weight.data += 2 * up @ down
            prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")


def test_greedy_text_equals_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Also with a LoRA adapter, in the same batch."""
    assert len(list(folder.glob("model-*.safetensors"))) > 1, "the checkpoint has several shards"
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    merged = copy.deepcopy(model)
    adapted(merged, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lora = LoraRequest("mine", tmp_path / "adapter")
    with LLM(folder, runner="torch", tensor_parallel_size=2, kv_cache_tokens=1024) as llm:
        assert llm.facts.max_seq_len == 256
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        outputs = llm.generate(TEXTS * 2, params, use_tqdm=False, lora_request=[None] * len(TEXTS) + [lora] * len(TEXTS))
        assert [output.outputs[0].token_ids for output in outputs[:3]] != [output.outputs[0].token_ids for output in outputs[3:]]
        for text, output, reference in zip(TEXTS * 2, outputs, [model] * 3 + [merged] * 3, strict=True):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert output.prompt_token_ids == ids[0].tolist()
            with torch.inference_mode():
                expected = reference.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
            # min_new_tokens keeps transformers from ending early by forbidding the end of sequence, so equality holds up to that token.
            tokens = output.outputs[0].token_ids
            end = tokens.index(1) if 1 in tokens else 24
            assert tokens[:end] == expected.tolist()[:end] and end > 0
            assert output.outputs[0].text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Two ranks. Every connection is there before a test begins."""
    with LLM(folder, runner="torch", tensor_parallel_size=2, num_threads=1) as llm:
        llm.executor.ping(60.0)
        with pytest.raises(RequestError):
            llm.stop_profile(60.0)
        yield llm


def test_a_pause_between_two_tokens_changes_none(llm: LLM) -> None:
    """A58: over KV blocks that are kept; and what is cancelled meanwhile ends at once."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(TEXTS, params)]
    kept, aborted, other = [llm.generate_async(text, params, streaming=True) for text in TEXTS]
    for handle in (kept, aborted, other):
        next(handle)
    llm.pause("keep", 60.0)
    steps = llm.executor.ping(60.0).steps
    aborted.abort()
    cut = aborted.result(60.0).outputs[0]
    waiting = llm.generate_async(TEXTS[0], params)
    assert cut.finish_reason in ("abort", "length") and cut.token_ids == plain[1][: len(cut.token_ids)]
    assert llm.executor.ping(60.0).steps == steps
    llm.resume(60.0)
    assert [handle.result(60.0).outputs[0].token_ids for handle in (kept, other, waiting)] == [plain[0], plain[2], plain[0]]


def test_a_profile_of_two_ranks_shows_what_each_of_them_computed(llm: LLM, tmp_path: Path) -> None:
    """A59: the steps between start and stop, and in them the operators; the tokens are the same as without, and so is a second profile."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    plain = llm.generate(TEXTS[0], params).outputs[0].token_ids
    for _ in range(2):
        llm.start_profile(tmp_path, 60.0)
        assert llm.generate(TEXTS[0], params).outputs[0].token_ids == plain
        for file in llm.stop_profile(60.0):
            names = [event["name"] for event in json.loads(Path(file).read_text())["traceEvents"] if event.get("ph") == "X"]
            assert [name for name in dict.fromkeys(names) if name.startswith("headrace step")] == [
                f"headrace step {step}" for step in range(4)
            ]
            assert any(name.startswith("aten::") for name in names)
    assert len(list(tmp_path.iterdir())) == 4
