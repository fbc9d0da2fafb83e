"""A model without weights that is as strict as one: its logits follow from what the KV cache holds, so a wrong block or row shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from headrace.checkpoint import ModelConfig
from headrace.config import EngineConfig
from headrace.engine.base import Beam, EngineRequest, Float32, Int32, LogprobRows, StepOutputs
from headrace.engine.candidates import Candidates, StepLogits
from headrace.engine.kv_cache import cache_limits
from headrace.engine.model_engine import ModelEngine
from headrace.engine.plan import StepPlan
from headrace.engine.slots import Clear, Copy, RowPlanner, Run, Swap
from headrace.outputs import FinishReason
from headrace.params import SamplingParams

VOCAB = 24
EOS = 23


def tiny_config(vocab_size: int, *, max_seq_len: int = 64, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Of a model that has no weights: the engine looks at the numbers that are asked for here."""
    return ModelConfig(
        family="llama",
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=eos_token_ids,
    )


class TinyRunner:
    """Logits of a token are normal numbers that belong to all tokens up to it. Blocks hold token ids; what is not written is -1."""

    model_name = "tiny"
    dtype = "float32"
    quantization = "none"
    max_candidates = 0
    model_config = tiny_config(VOCAB, eos_token_ids=(EOS,))

    def __init__(self, config: EngineConfig) -> None:
        self.versions: dict[str, str] = {}
        self.limits = cache_limits(config, self.model_config.max_seq_len)
        self.max_loras = config.max_loras
        self.size = config.tokens_per_block
        self.cache = np.full((config.kv_cache_tokens // self.size, self.size), -1, np.int32)
        self.plans: list[StepPlan] = []

    def execute(self, arrays: Sequence[Int32]) -> Any:
        plan = StepPlan.from_arrays(arrays)
        self.plans.append(plan)
        for source, target, count in plan.copies.reshape(-1, 3).tolist():
            content = self.cache[source, :count].copy()
            self.cache[target] = -1
            self.cache[target, : len(content)] = content
        contexts: list[Any] = []
        first, place = 0, 0
        for start, length in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            end = start + length
            table = plan.tables[place : place + -(-end // self.size)]
            place += len(table)
            for position in range(start, end):
                self.cache[table[position // self.size], position % self.size] = plan.tokens[first + position - start]
            contexts += [(table, position + 1) for position in range(start, end)]
            first += length
        assert place == len(plan.tables) and first == len(plan.tokens)
        rows = [self.logits_after(self.cache[table].reshape(-1)[:length]) for table, length in map(contexts.__getitem__, plan.samples)]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def logits_after(self, tokens: Any) -> Float32:
        """float32 [VOCAB] of the token that follows."""
        return logits_after(tokens)

    def close(self) -> None:
        pass


class TinyChoosyRunner(TinyRunner):
    """The same, and of rows whose tokens are chosen from few of them it gives no other logits."""

    max_candidates = 4

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.chosen = 0

    def execute(self, arrays: Sequence[Int32]) -> Any:
        logits: Float32 = super().execute(arrays)
        counts = self.plans[-1].candidates
        if not len(counts):
            return logits
        assert len(counts) == len(logits) and counts.max() <= self.max_candidates
        few = counts > 0
        self.chosen += int(few.sum())
        return StepLogits(counts, logits[~few], Candidates.of(logits[few], counts[few]))


class TinySlotRunner(TinyRunner):
    """The same with a row for each sequence."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.limits = self.limits._replace(num_slots=config.max_batch_size)
        self.size = self.limits.max_seq_len
        self.cache = np.full((config.max_batch_size, self.size), -1, np.int32)


class TinyRowRunner(TinySlotRunner):
    """The same as a runner with a graph does it: slots are in rows that move, and sequences are padded to runs.

    What lies behind the end of a row is -2, also what padding writes; nothing but a run may write to a row that is in it.
    """

    max_run_tokens: int | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.rows = RowPlanner(config.max_batch_size, self.size, max_run_tokens=self.max_run_tokens)
        self.moved = 0
        self.widest = 0

    def execute(self, arrays: Sequence[Int32]) -> Float32:
        plan = StepPlan.from_arrays(arrays)
        self.plans.append(plan)
        logits = np.full((len(plan.samples), VOCAB), np.nan, np.float32)
        computed: list[int] = []
        for action in self.rows.follow(plan):
            match action:
                case Copy(source, target, count):
                    self.cache[target, :count] = self.cache[source, :count]
                case Clear(row, start, stop):
                    assert (self.cache[row, stop:] == -1).all(), "nothing is written behind what is cleared"
                    self.cache[row, start:stop] = -1
                case Swap(first, second, first_count, second_count):
                    assert (self.cache[first, first_count:] == -1).all() and (self.cache[second, second_count:] == -1).all()
                    self.cache[[first, second]] = self.cache[[second, first]]
                    self.moved += first_count + second_count
                case Run():
                    self.run(action, plan, logits)
                    computed += [index for row, length in zip(action.index, action.lengths, strict=True) for index in row[:length].tolist()]
        assert sorted(computed) == list(range(len(plan.tokens))), "each token once"
        return logits

    def run(self, run: Run, plan: StepPlan, logits: Float32) -> None:
        count, width = run.index.shape
        assert self.max_run_tokens is None or width == 1 or count * width <= self.max_run_tokens
        self.widest = max(self.widest, count if width > 1 else 0)
        for place, (start, length) in enumerate(zip(run.starts.tolist(), run.lengths.tolist(), strict=True)):
            row = self.cache[run.first + place]
            assert start + width <= self.size, "a write past the end of a row"
            row[start : start + width] = -2
            row[start : start + length] = plan.tokens[run.index[place, :length]]
        for sample, out in zip(run.samples.tolist(), run.rows.tolist(), strict=True):
            place, step = divmod(sample, width)
            assert run.index[place, step] == plan.samples[out] and run.positions[place, step] == run.starts[place] + step
            logits[out] = self.logits_after(self.cache[run.first + place, : run.starts[place] + step + 1])


class TinyStripRunner(TinyRowRunner):
    """The same with few tokens in a run: prompts are cut into several."""

    max_run_tokens = 4


def logits_after(tokens: Any) -> Float32:
    """float32 [VOCAB] of the token that follows."""
    assert min(tokens, default=0) >= 0, "attention read what nobody wrote"
    seed = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()
    return (np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(VOCAB) * 2).astype(np.float32)


class Got:
    """All that an engine has said of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.beams: Sequence[Beam] = ()
        self.rows: dict[str, Any] = {}

    def keep(self, kind: str, rows: Any) -> None:
        before = self.rows.get(kind)
        join: Callable[[list[Any]], Any] = LogprobRows.join if isinstance(rows, LogprobRows) else np.concatenate
        self.rows[kind] = rows if before is None else join([before, rows])


class TinyEngine:
    """The model engine over a ``TinyRunner``, and what it has said."""

    def __init__(self, kind: type[TinyRunner] = TinyRunner, **config: Any) -> None:
        settings: dict[str, Any] = {"model": "tiny", "kv_cache_tokens": 256, "tokens_per_block": 4, "max_seq_len": 48, **config}
        self.config = EngineConfig(**settings)
        self.runner = kind(self.config)
        self.engine = ModelEngine(self.config, self.runner)
        self.got: dict[int, Got] = {}

    def submit(self, request_id: int, prompt: Iterable[int], params: SamplingParams, **head: Any) -> None:
        tokens = np.array(list(prompt), np.int32)
        self.engine.submit(EngineRequest(request_id, tokens, params, params.max_tokens or 32, params.seed or 0, **head))

    def step(self) -> StepOutputs:
        outputs = self.engine.step()
        assert len(set(outputs.request_ids)) == len(outputs.request_ids), "a request appears once in a step"
        place = 0
        for request_id, count, finish in zip(outputs.request_ids, outputs.counts, outputs.finish, strict=True):
            got = self.got.setdefault(request_id, Got())
            assert got.finish is None, "nothing follows an ending"
            got.tokens += outputs.token_ids[place : place + count]
            place += count
            if finish:
                got.finish = FinishReason(finish)
                got.stop_reason, got.error = outputs.stop_reasons.get(request_id), outputs.errors.get(request_id)
                got.beams = outputs.beams.get(request_id, ())
            for kind in ("logprobs", "generation_logits"):
                if (rows := getattr(outputs, kind).get(request_id)) is not None:
                    assert len(rows) == count, "as many rows as tokens"
                    got.keep(kind, rows)
            for kind in ("prompt_logprobs", "context_logits"):
                if (rows := getattr(outputs, kind).get(request_id)) is not None:
                    got.keep(kind, rows)
        assert place == len(outputs.token_ids)
        return outputs

    def run(self) -> dict[int, Got]:
        for _ in range(2000):
            if not self.engine.has_work:
                assert self.engine.stats()["kv_blocks_used"] == 0, "blocks leak"
                return self.got
            self.step()
        raise AssertionError("the engine does not end")


def alone(prompt: Iterable[int], params: SamplingParams, **head: Any) -> Got:
    """What a request gets that has an engine for itself."""
    engine = TinyEngine()
    engine.submit(1, prompt, params, **head)
    return engine.run()[1]
