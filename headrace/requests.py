"""From what users give to what the executor takes: prompts in all their forms, texts made ids, bad strings made rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headrace.errors import ModelError, RequestError
from headrace.lora import LoraRequest
from headrace.params import GuidedDecodingParams, SamplingParams
from headrace.tracing.hooks import Point
from headrace.tracing.spans import About

if TYPE_CHECKING:
    from headrace.executor.request import GenerationRequest, TextStage
    from headrace.text.grammar import GrammarChecker
    from headrace.text.tokenizer import Tokenizer

#: a text, the ids of one prompt, or a mapping with "prompt" or "prompt_token_ids"
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class RequestMaker:
    """Makes the requests of one ``LLM``. ``tokenizer`` is None where there is none: prompts are ids then, and answers too."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # The last parameters with bad strings, and what became of them: the prompts of a list share theirs.
        self._resolved: tuple[SamplingParams, SamplingParams] | None = None
        self._grammars: GrammarChecker | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError where there is none."""
        if self._tokenizer is None:
            raise ModelError("the echo engine has no tokenizer: give prompts as token ids, or LLM(tokenizer=...)")
        return self._tokenizer

    @property
    def takes_text(self) -> bool:
        """Whether there is a tokenizer, so that prompts may be texts."""
        return self._tokenizer is not None

    def trace_points(self) -> list[Point]:
        """Where it can be watched."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return []
        return [Point(tokenizer, "encode_batch", "tokenise", _encoded), Point(tokenizer, "apply_chat_template", "render template")]

    def one(self, prompt: Prompt, params: SamplingParams | None, streaming: bool) -> GenerationRequest:
        """Raises RequestError, ModelError."""
        from headrace.executor.request import GenerationRequest

        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        if params.guided_decoding is not None:
            self._check_grammar(params.guided_decoding)
        if params.bad:
            params = self._with_bad_tokens(params)
        add_special_tokens = params.add_special_tokens
        if isinstance(prompt, Mapping):
            if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1:
                raise RequestError(f'a prompt mapping has either "prompt" or "prompt_token_ids"; this one has {sorted(map(str, prompt))}')
            # A rendered chat template already has the special tokens that belong there.
            add_special_tokens = bool(prompt.get("add_special_tokens", add_special_tokens))
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        elif not isinstance(prompt, Sequence) and not hasattr(prompt, "__array__"):
            raise RequestError(f"a prompt is a string or a list of integer token ids, not {type(prompt).__name__}")
        return GenerationRequest(ids, params, streaming, text, self._new_stage(params))

    def many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        loras: LoraRequest | Sequence[LoraRequest | None] | None = None,
        salts: str | Sequence[str | None] | None = None,
    ) -> list[GenerationRequest]:
        """One request for each prompt; of the other arguments one for all, or one for each. Raises as ``one``."""
        count = len(prompts)
        each = _for_each("SamplingParams", SamplingParams() if params is None else params, count)
        requests = [self.one(prompt, own, False) for prompt, own in zip(prompts, each, strict=True)]
        for request, lora, salt in zip(
            requests, _for_each("LoraRequests", loras, count), _for_each("cache salts", salts, count), strict=True
        ):
            request.lora, request.cache_salt = lora, salt
        return requests

    def _with_bad_tokens(self, params: SamplingParams) -> SamplingParams:
        """A word is another token behind a space than at the beginning, so each is forbidden in both forms."""
        resolved = self._resolved
        if resolved is None or resolved[0] is not params:
            encode = self.tokenizer.encode
            rows = {tuple(encode(form, add_special_tokens=False)) for word in params.bad for form in (word, " " + word)}
            bad = (*params.bad_token_ids, *sorted(row for row in rows if row))
            resolved = self._resolved = (params, msgspec.structs.replace(params, bad=(), bad_token_ids=bad))
        return resolved[1]

    def _check_grammar(self, params: GuidedDecodingParams) -> None:
        """Raises RequestError if it is wrong; what is right is known by then."""
        if self._grammars is None:
            from headrace.text.grammar import GrammarChecker

            if self._tokenizer is None:
                raise RequestError("guided decoding needs a tokenizer, and the echo engine has none: LLM(tokenizer=...)")
            # Two threads may both make one: they agree.
            self._grammars = GrammarChecker(self._tokenizer.special_tokens())
        self._grammars.check(params)

    def _new_stage(self, params: SamplingParams) -> Callable[[], TextStage] | None:
        tokenizer = self._tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        from headrace.text.stage import text_stage

        skip, stops, include = params.skip_special_tokens, params.stop, params.include_stop_str_in_output
        passing = params.min_tokens or 0
        return lambda: text_stage(tokenizer.detokenizer(skip_special_tokens=skip), stops, include, passing)


def _encoded(arguments: Sequence[Any], rows: Any) -> About:
    return About(facts={"prompts": len(rows), "tokens": sum(map(len, rows))})


def is_one_prompt(inputs: Any) -> bool:
    """A list of ints is one prompt; an empty list is no prompt at all, and its answer the empty list."""
    if isinstance(inputs, str | Mapping) or hasattr(inputs, "__array__"):
        return True
    if not isinstance(inputs, Sequence):
        raise RequestError(f"inputs must be a prompt or a list of prompts, not {type(inputs).__name__}")
    return bool(inputs) and not isinstance(inputs[0], str | Sequence | Mapping) and not hasattr(inputs[0], "__array__")


def _for_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts came with {len(value)} {name}; give one for each, or one for all")
    return value
