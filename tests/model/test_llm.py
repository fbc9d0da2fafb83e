"""SmolLM2-135M through the whole path, user process to MPI world and back, against an independent reference (A40 in part, A42, A43, A46).

The reference, tests/data/smollm2_greedy.json, was made in float32 by another implementation. Its two best logits are never closer than
0.0116, so in float32 no choice is a matter of rounding and ids are compared exactly: by the native runner and by onnxruntime, whatever the
number of ranks. What `auto` does with this file is nearer to llama.cpp: it computes with the blocks as they are, and rounds activations to
8 bits, so some texts go another way; it must be near the reference, and is held to what it says itself to each prompt alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestError, SamplingParams
from headrace.outputs import CompletionOutput, RequestOutput
from tests.trace_rules import read, spans

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
RESULTS: list[dict[str, Any]] = REFERENCE["results"]
NAMES = [result["prompt"][:20] for result in RESULTS]
TO_THE_END = SamplingParams(max_tokens=64, ignore_eos=True)
TO_EOS = SamplingParams(max_tokens=64)
EOS: int = REFERENCE["eos_token_id"]
FEW = SamplingParams(max_tokens=24, ignore_eos=True)


#: runner, what matrices are stored in, and ranks
WORLDS = {"tp1": ("native", "none", 1), "tp2": ("native", "none", 2), "tp3": ("onnxruntime", "none", 3), "auto": ("auto", "auto", 2)}


def with_world(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("llm", [WORLDS[name]], ids=[name], indirect=True)


#: for what does not depend on the number of ranks
WITH_TWO_RANKS = with_world("tp2")


@pytest.fixture(scope="module", params=WORLDS.values(), ids=WORLDS.keys())
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    runner, quantization, ranks = request.param
    with LLM("smollm2-135m", runner=runner, quantization=quantization, tensor_parallel_size=ranks, kv_cache_tokens=8192) as llm:
        llm.executor.ping(60.0)  # so that the control channel, whose socket comes by itself, belongs to the fixture
        # The same for the line of calls to every rank.
        with pytest.raises(RequestError):
            llm.stop_profile()
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[dict[str, Any]]:
    """What this world must say: what the reference says, or what it says itself where it computes with quantised blocks."""
    if llm.facts.quantization == "none":
        return RESULTS
    return [result | _said(llm.generate(result["prompt_ids"], TO_THE_END).outputs[0]) for result in RESULTS]


def _said(answer: CompletionOutput) -> dict[str, Any]:
    ids = answer.token_ids
    return {"output_ids_ignore_eos": ids, "output_ids_stop_at_eos": ids[: ids.index(EOS) + 1] if EOS in ids else ids}


def test_facts_describe_the_model(llm: LLM) -> None:
    """A8"""
    facts = llm.facts
    assert (facts.vocab_size, facts.eos_token_ids, facts.dtype) == (49152, (EOS,), "float32")
    if facts.runner_reason == "it is the first choice on CPU":
        assert (facts.runner, facts.quantization) == ("native", "Q4_1")
    else:
        assert (facts.runner_reason, facts.quantization) == ("it was asked for", "none")
    assert facts.max_seq_len == 8192
    assert facts.num_kv_blocks * facts.tokens_per_block == 8192
    assert {"headrace", "python", "mpi", facts.runner} <= facts.versions.keys()


@with_world("auto")
def test_quantised_it_is_near_the_reference(llm: LLM) -> None:
    """A46: what the reference says is as likely to it, token by token and in all."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [result["prompt_ids"] + result["output_ids_ignore_eos"] for result in RESULTS]
    own: list[float] = []
    for result, output in zip(RESULTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        own += [one.logprob for entry in output.prompt_logprobs[len(result["prompt_ids"]) :] if entry is not None for one in entry.values()]
    right = [logprob for result in RESULTS for logprob in result["logprobs_ignore_eos"]]
    assert len(own) == len(right) == 5 * 64
    assert sum(own) / len(own) == pytest.approx(sum(right) / len(right), abs=0.02)
    assert sum(abs(one - other) for one, other in zip(own, right, strict=True)) / len(right) < 0.06


@pytest.mark.parametrize("number", range(len(RESULTS)), ids=NAMES)
def test_greedy_alone_streamed(llm: LLM, expected: list[dict[str, Any]], number: int) -> None:
    """A42, A46: token by token, nothing lost, nothing doubled, no character split.

    How many ranks there are shows in the ids only, and of those the batch below compares all 64.
    """
    result = expected[number]
    count = 64 if llm.facts.tensor_parallel_size == 1 else 24
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    pieces: list[RequestOutput] = list(llm.generate_async(result["prompt_text"], params, streaming=True))
    whole = pieces[-1].outputs[0]
    assert pieces[-1].prompt_token_ids == result["prompt_ids"]
    assert whole.token_ids == result["output_ids_ignore_eos"][:count]
    assert [token for piece in pieces for token in piece.outputs[0].token_ids_diff] == whole.token_ids
    assert "".join(piece.outputs[0].text_diff for piece in pieces) == whole.text
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    assert len(pieces) > len(whole.token_ids) // 2, "it streams"
    for piece in pieces:
        assert whole.text.startswith(piece.outputs[0].text)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_greedy_all_in_one_batch(llm: LLM, expected: list[dict[str, Any]]) -> None:
    """A46"""
    outputs = llm.generate([result["prompt_ids"] for result in RESULTS], TO_THE_END, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [result["output_ids_ignore_eos"] for result in expected]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_greedy_with_end_of_sequence(llm: LLM, expected: list[dict[str, Any]]) -> None:
    """A40: the end of sequence is among the ids and gives no text."""
    outputs = llm.generate([result["prompt_text"] for result in RESULTS], TO_EOS, use_tqdm=False)
    for output, result in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == result["output_ids_stop_at_eos"]
        assert answer.text == llm.tokenizer.decode([token for token in answer.token_ids if token != EOS])
        assert answer.text == result["text_stop_at_eos"] or llm.facts.quantization != "none"
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 2 else "length")
        assert answer.stop_reason is None


@WITH_TWO_RANKS
def test_a_common_beginning_is_computed_once_for_each_salt(llm: LLM) -> None:
    """A44: over the whole path; every rank finds the blocks, or the text would differ."""
    prompt, expected = RESULTS[2]["prompt_ids"], RESULTS[2]["output_ids_ignore_eos"][:4]
    full = (len(prompt) - 1) // llm.facts.tokens_per_block
    assert full, "the prompt must fill a block"
    llm.reset_prefix_cache()
    llm.get_stats(), llm.get_kv_cache_events()
    reused = []
    for salt in (None, None, "a", "a", None):
        output = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), cache_salt=salt)
        assert output.outputs[0].token_ids == expected
        reused.append(llm.get_stats()[-1]["kvCacheStats"]["reusedBlocks"])
    # And a copy of all but the last token of the block behind them, if the prompt ends with it.
    assert [later - sooner >= full for sooner, later in pairwise(reused)] == [True, False, True, True]
    stored = [event["data"] for event in llm.get_kv_cache_events() if event["data"]["type"] == "stored"]
    tokens = [[token["token_id"] for token in block["tokens"]] for data in stored for block in data["blocks"]]
    size = llm.facts.tokens_per_block
    for place in range(full):
        assert tokens.count(prompt[place * size : (place + 1) * size]) == 2, "once for each salt"


@WITH_TWO_RANKS
def test_special_tokens_can_be_shown(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True, skip_special_tokens=False)
    assert llm.generate(RESULTS[0]["prompt_text"], params).outputs[0].text == RESULTS[0]["text_ignore_eos_raw"]


@WITH_TWO_RANKS
def test_chat_equals_its_rendered_prompt(llm: LLM) -> None:
    chats = [result for result in RESULTS if result["chat"]]
    outputs = llm.chat([[{"role": "user", "content": result["prompt"]}] for result in chats], TO_EOS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [result["prompt_ids"] for result in chats]
    assert [output.outputs[0].text for output in outputs] == [result["text_stop_at_eos"] for result in chats]
    one = llm.chat([{"role": "user", "content": chats[0]["prompt"]}], TO_EOS)
    assert one.outputs[0].text == chats[0]["text_stop_at_eos"]


@WITH_TWO_RANKS
def test_stop_string_over_several_tokens(llm: LLM) -> None:
    """A40: text and ids are cut at the same place, streaming or not, and the engine is told to stop."""
    result = RESULTS[0]
    full = result["text_stop_at_eos"]
    stop = "France is"
    params = SamplingParams(max_tokens=64, ignore_eos=True, stop=["never there", stop])
    pieces = list(llm.generate_async(result["prompt_text"], params, streaming=True))
    answer = pieces[-1].outputs[0]
    assert answer.text == full[: full.index(stop)]
    assert "".join(piece.outputs[0].text_diff for piece in pieces) == answer.text
    assert [token for piece in pieces for token in piece.outputs[0].token_ids_diff] == answer.token_ids
    assert llm.tokenizer.decode(answer.token_ids).startswith(answer.text)
    assert answer.token_ids == result["output_ids_ignore_eos"][: len(answer.token_ids)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    kept = llm.generate(result["prompt_text"], SamplingParams(max_tokens=64, stop=stop, include_stop_str_in_output=True))
    assert kept.outputs[0].text == full[: full.index(stop) + len(stop)]


@WITH_TWO_RANKS
def test_stop_token_id(llm: LLM) -> None:
    """A40"""
    result = RESULTS[0]
    stop = result["output_ids_ignore_eos"][4]
    answer = llm.generate(result["prompt_text"], SamplingParams(max_tokens=64, stop_token_ids=[stop])).outputs[0]
    assert answer.token_ids == result["output_ids_ignore_eos"][:5]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("llm", [WORLDS[name] for name in ("tp1", "tp2", "tp3")], ids=["tp1", "tp2", "tp3"], indirect=True)
def test_logprobs_with_and_without_streaming(llm: LLM) -> None:
    """A41: those of the reference, for any number of ranks."""
    result = RESULTS[0]
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    output = llm.generate(result["prompt_text"], params)
    whole = output.outputs[0]
    assert whole.token_ids == result["output_ids_ignore_eos"][:8]
    assert whole.logprobs is not None and output.prompt_logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(whole.logprobs, whole.token_ids, strict=True)]
    assert chosen == pytest.approx(result["logprobs_ignore_eos"][:8], abs=5e-3)
    assert whole.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-5)
    assert all(entry[token].rank == 1 and len(entry) == 2 for entry, token in zip(whole.logprobs, whole.token_ids, strict=True))
    assert output.prompt_logprobs[0] is None
    prompt = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    assert all(entry is not None and list(entry) == [token] and entry[token].logprob <= 0 for entry, token in prompt)
    pieces = list(llm.generate_async(result["prompt_text"], params, streaming=True))
    streamed = [entry for piece in pieces for entry in piece.outputs[0].logprobs_diff or []]
    assert [list(entry) for entry in streamed] == [list(entry) for entry in whole.logprobs]
    assert [entry[token].logprob for entry, token in zip(streamed, whole.token_ids, strict=True)] == pytest.approx(chosen, abs=1e-4)


@WITH_TWO_RANKS
def test_logprobs_are_cut_where_the_text_is(llm: LLM) -> None:
    """A40: text, ids and logprobs end at the same place; before min_tokens no stop string is looked for."""
    prompt, text = RESULTS[0]["prompt_text"], RESULTS[0]["text_stop_at_eos"]
    stopped = llm.generate(prompt, SamplingParams(max_tokens=12, stop="France is", logprobs=0)).outputs[0]
    assert stopped.text == text[: text.index("France is")] and stopped.logprobs is not None
    assert [list(entry) for entry in stopped.logprobs] == [[token] for token in stopped.token_ids]
    later = llm.generate(prompt, SamplingParams(max_tokens=12, stop="France is", min_tokens=7)).outputs[0]
    assert later.text == text


@WITH_TWO_RANKS
def test_what_may_not_be_said_is_not_said(llm: LLM) -> None:
    """Bad words through the tokenizer, and the user's own callable, which comes from this file and not from a module."""
    prompt = RESULTS[0]["prompt_text"]
    calls = 3

    def no_the(request_id: int, logits: Any, token_ids: list[int]) -> None:
        assert len(token_ids) >= calls
        logits[RESULTS[0]["output_ids_ignore_eos"][0]] = -float("inf")

    def broken(request_id: int, logits: Any, token_ids: list[int]) -> None:
        raise LookupError("of the user's own making")

    failing = llm.generate_async(prompt, SamplingParams(max_tokens=12, logits_processor=broken))
    free, bad, own = llm.generate(
        [prompt] * 3,
        [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, bad="Paris"), SamplingParams(max_tokens=12, logits_processor=no_the)],
        use_tqdm=False,
    )
    assert free.outputs[0].text == RESULTS[0]["text_stop_at_eos"]
    assert "Paris" not in bad.outputs[0].text and bad.outputs[0].text.startswith("The capital of France is")
    assert not own.outputs[0].text.startswith("The")
    with pytest.raises(RequestError, match="LookupError: of the user's own making"):
        failing.result(60)


@WITH_TWO_RANKS
def test_beams_are_choices_in_the_order_of_their_scores(llm: LLM) -> None:
    output = llm.generate(RESULTS[0]["prompt_text"], SamplingParams(max_tokens=10, use_beam_search=True, n=2, best_of=3))
    first, second = output.outputs
    assert first.text == RESULTS[0]["text_stop_at_eos"] and first.finish_reason == "stop"
    assert second.text != first.text and (second.cumulative_logprob or 0) < (first.cumulative_logprob or 0) < 0


@WITH_TWO_RANKS
def test_seeded_text_does_not_depend_on_neighbours(llm: LLM) -> None:
    """A43"""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, top_k=50, seed=7, ignore_eos=True)
    prompt = RESULTS[1]["prompt_text"]
    alone = llm.generate(prompt, params).outputs[0].token_ids
    others = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(7)]
    batch = llm.generate([prompt] * 8, [*others[:3], params, *others[3:]], use_tqdm=False)
    assert batch[3].outputs[0].token_ids == alone
    assert len({tuple(output.outputs[0].token_ids) for output in batch}) > 1


@WITH_TWO_RANKS
def test_async_side_by_side(llm: LLM) -> None:
    """A20: await and async for, together in one loop."""

    async def stream(result: dict[str, Any]) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate_async(result["prompt_text"], FEW, streaming=True):
            tokens += output.outputs[0].token_ids_diff
        return tokens

    async def both() -> tuple[list[list[int]], RequestOutput]:
        whole = llm.generate_async(RESULTS[0]["prompt_text"], FEW)
        return await asyncio.gather(*map(stream, RESULTS[1:3])), await whole

    streams, whole = asyncio.run(both())
    assert streams == [result["output_ids_ignore_eos"][:24] for result in RESULTS[1:3]]
    assert whole.outputs[0].token_ids == RESULTS[0]["output_ids_ignore_eos"][:24]


@WITH_TWO_RANKS
def test_abort_keeps_the_text_so_far_and_disturbs_nobody(llm: LLM) -> None:
    """A16, A18"""
    victim = llm.generate_async(RESULTS[1]["prompt_text"], SamplingParams(max_tokens=2000, ignore_eos=True), streaming=True)
    other = llm.generate_async(RESULTS[2]["prompt_text"], FEW)
    first = next(victim)
    victim.abort()
    end = victim.result(60)
    assert end.outputs[0].finish_reason == "abort"
    assert end.outputs[0].text.startswith(first.outputs[0].text)
    assert other.result(60).outputs[0].token_ids == RESULTS[2]["output_ids_ignore_eos"][:24]


@WITH_TWO_RANKS
def test_a_refused_prompt_disturbs_nobody(llm: LLM) -> None:
    """A34"""
    with pytest.raises(RequestError, match=r"49152.*49151"):
        llm.generate([1, 49152])
    with pytest.raises(RequestError, match=r"8193.*8192"):
        llm.generate([1] * 8000, SamplingParams(max_tokens=193))
    assert llm.generate(RESULTS[0]["prompt_text"], TO_EOS).outputs[0].text == RESULTS[0]["text_stop_at_eos"]


def test_nothing_is_live_at_the_end(llm: LLM) -> None:
    """A14: every request of this module has had its one ending, and no KV block is held."""
    counters = llm.executor.counters()
    assert counters["live"] == 0
    assert counters["admitted"] == sum(counters[name] for name in ("finished", "aborted", "failed", "timed_out", "dead"))
    assert counters["bad_frames"] == counters["dispatch_faults"] == counters["unknown_deltas"] == 0
    assert llm.executor.stats()["kv_blocks_used"] == 0


@with_world("tp3")
def test_a_trace_shows_text_and_collectives(llm: LLM, tmp_path: Path) -> None:
    """A59: what a model does beside what the echo engine does, in every process."""
    llm.start_trace(tmp_path / "trace.json")
    llm.generate("The capital of France", SamplingParams(max_tokens=2))
    trace = read(llm.stop_trace())
    names = {process: {event["name"] for event in spans(trace, process)} for process in ("user process", "rank 0", "rank 1")}
    assert names["user process"] >= {"tokenise", "submit", "dispatch", "read", "detokenise"}
    assert names["rank 0"] >= {"schedule", "forward", "all_reduce", "gather", "sample"}
    assert names["rank 1"] >= {"receive plan", "forward", "all_reduce", "gather"}
