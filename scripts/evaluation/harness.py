"""Headrace as a model of EleutherAI's lm-evaluation-harness: scores come from prompt logprobs, texts from greedy generation."""

from __future__ import annotations

from typing import Any, TypeAlias

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from headrace import LLM, SamplingParams

#: a text and its continuation as they were given, then the ids of each
Scored: TypeAlias = tuple[tuple[str, str], list[int], list[int]]


class HeadraceLM(TemplateLM):
    """Takes the arguments of ``LLM``."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__()
        self.llm = LLM(model, **options)

    @property
    def eot_token_id(self) -> int:
        """End of a document, which also stands for an empty context."""
        return self.llm.facts.eos_token_ids[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; special tokens unless told otherwise."""
        return self.llm.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests: list[Scored], **kwargs: Any) -> list[tuple[float, bool]]:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([context + continuation for _, context, continuation in requests], params)
        scores = []
        for (_, context, continuation), output in zip(requests, outputs, strict=True):
            rows = output.prompt_logprobs[len(context) :]
            chosen = [row[token] for row, token in zip(rows, continuation, strict=True)]
            scores.append((sum(entry.logprob for entry in chosen), all(entry.rank == 1 for entry in chosen)))
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, which must fit into the context."""
        pairs = [((text, ""), [self.prefix_token_id], self.tok_encode(text)) for (text,) in (request.args for request in requests)]
        return [score for score, _ in self._loglikelihood_tokens(pairs)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts up to one of the ``until`` strings."""
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            prompts.append(context)
            params.append(SamplingParams(max_tokens=options.get("max_gen_toks", 256), temperature=0, stop=tuple(options.get("until", ()))))
        return [output.outputs[0].text for output in self.llm.generate(prompts, params)]
