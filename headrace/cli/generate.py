"""``headrace generate``: answers for one prompt or a file of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from headrace.cli._options import add_debug_option, add_model_options, add_sampling_options, llm_arguments, sampling_params
from headrace.cli._prompts import read_prompts
from headrace.errors import RequestError
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

MAX_TOKENS = 256

#: requests under way for each that fits into a step: no step is short of work, and the world's queue is bounded for files of any length
QUEUED_PER_RUNNING = 4


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "generate",
        help="answer a prompt, or each prompt of a file",
        description="Answer a prompt, or each prompt of a file. Answers go to standard output, everything else to standard error.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="- or nothing: standard input")
    parser.add_argument("--prompt-file", metavar="FILE", help='one prompt a line, or JSON Lines with "prompt"; -: standard input')
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", dest="chat", action="store_true", default=None, help="the prompt is a message of a chat; needs a chat template"
    )
    form.add_argument(
        "--raw", dest="chat", action="store_false", help="the model continues the prompt as it is; default: --chat where possible"
    )
    parser.add_argument("--stream", action="store_true", help="write text as it comes")
    parser.add_argument("--json", action="store_true", help="one JSON object for each prompt; with --stream for each piece of an answer")
    add_model_options(parser)
    add_sampling_options(parser, MAX_TOKENS)
    group = parser.add_argument_group("choices")
    group.add_argument("-n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    group.add_argument("--best-of", type=int, metavar="M", help="generate so many, and give the N of the highest probability")
    group.add_argument("--logprobs", type=int, metavar="K", help="in --json: logprobs of each token, and of the K most likely ones")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """1 when a prompt was refused; the others are answered all the same."""
    prompts = read_prompts(arguments)
    params = sampling_params(arguments, n=arguments.n, best_of=arguments.best_of, logprobs=arguments.logprobs)
    if arguments.stream and params.width > 1 and not arguments.json:
        arguments.parser.error("--stream writes one answer at a time: with several choices it needs --json")
    if arguments.stream and params.width > params.n:
        arguments.parser.error("--stream cannot be used with --best-of: which are the best is known at the end")
    if arguments.logprobs is not None and not arguments.json:
        arguments.parser.error("--logprobs needs --json")
    from headrace.llm import LLM

    with LLM(**llm_arguments(arguments)) as llm:
        chat = bool(llm.tokenizer.chat_template) if arguments.chat is None else arguments.chat
        printer = Printer(prompts, arguments.stream, arguments.json)
        job = Job(llm, params, chat, printer)
        asyncio.run(job.answer(prompts, bar=len(prompts) > 1 and not arguments.stream))
    print(job.summary(), file=sys.stderr)
    return 1 if job.refused else 0


class Job:
    """All prompts of one run, and what is counted about them."""

    def __init__(self, llm: LLM, params: SamplingParams, chat: bool, printer: Printer) -> None:
        self.llm = llm
        self.params = params
        self.chat = chat
        self.printer = printer
        self.prompts = 0
        self.tokens = 0
        self.refused = 0
        self.began = 0.0
        self.first: float | None = None
        self.ended = 0.0
        self._submitting = asyncio.Lock()

    async def answer(self, prompts: list[str], bar: bool) -> None:
        """Answer them side by side. A fault of one prompt is printed in its place; any other error ends the run."""
        from tqdm import tqdm

        self.prompts = len(prompts)
        self.began = time.monotonic()
        at_once = min(len(prompts), QUEUED_PER_RUNNING * self.llm.facts.max_batch_size)
        waiting = iter(enumerate(prompts))
        # None: a bar where stderr is a terminal. tqdm's monitor thread is for bars that get stuck; it would outlive this one.
        tqdm.monitor_interval = 0
        with tqdm(total=len(prompts), unit="prompt", disable=None if bar else True) as progress:

            async def one_after_another() -> None:
                for index, prompt in waiting:
                    await self._one(index, prompt)
                    progress.update()

            tasks = [asyncio.create_task(one_after_another()) for _ in range(at_once)]
            try:
                await asyncio.gather(*tasks)
            finally:
                # The first error leaves the others running, and an interrupt leaves all: dropped handles cancel their requests.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self.ended = time.monotonic()

    async def _one(self, index: int, prompt: str) -> None:
        try:
            # An interrupt is seen, and an error ends the run, between turns of the event loop only. So a turn has one submission, for
            # thousands take seconds, and one piece of each answer, for a world that is faster than we are always has the next one ready.
            async with self._submitting:
                handle = self._submit(prompt)
                await asyncio.sleep(0)
            async for output in handle:
                if self.first is None:
                    self.first = time.monotonic()
                self.tokens += sum(len(completion.token_ids_diff) for completion in output.outputs)
                self.printer.piece(index, output)
                await asyncio.sleep(0)
        except RequestError as error:
            self.refused += 1
            self.printer.refused(index, str(error))

    def _submit(self, prompt: str) -> Any:
        # Streamed in any case, for the time of the first token; the best of several are known at the end.
        streaming = self.params.width == self.params.n
        if self.chat:
            return self.llm.chat_async([{"role": "user", "content": prompt}], self.params, streaming=streaming)
        return self.llm.generate_async(prompt, self.params, streaming=streaming)

    def summary(self) -> str:
        """One line for people."""
        seconds = max(self.ended - self.began, 1e-9)
        parts = [f"{self.prompts} prompts"] if self.prompts > 1 else []
        parts += [f"{self.tokens} tokens in {seconds:.2f} s", f"{self.tokens / seconds:.1f} tokens/s"]
        if self.first is not None:
            parts.append(f"first token after {self.first - self.began:.2f} s")
        if self.refused:
            parts.append(f"{self.refused} refused")
        return "headrace: " + ", ".join(parts)


class Printer:
    """Writes answers to standard output in the order of the prompts, pieces of JSON in the order in which they come."""

    def __init__(self, prompts: list[str], stream: bool, as_json: bool) -> None:
        self._prompts = prompts
        self._stream = stream
        self._json = as_json
        # What came before its turn, which is the turn of the first prompt whose answer is not complete.
        self._turn = 0
        self._early: dict[int, list[str]] = {}
        self._complete: set[int] = set()
        self._begun: set[int] = set()

    def piece(self, index: int, output: RequestOutput) -> None:
        """What is new of one answer; without streaming only the whole of it is written."""
        if self._stream or output.finished:
            text = self._as_json(index, output) if self._json else self._as_text(index, output)
            self._write(index, text, output.finished)

    def refused(self, index: int, error: str) -> None:
        """This prompt gets no answer, or no more of it."""
        if self._json:
            text = json.dumps({"index": index, "prompt": self._prompts[index], "error": error}) + "\n"
        else:
            text = "\n" if index in self._begun else ""
            where = f"prompt {index + 1}: " if len(self._prompts) > 1 else ""
            print(f"headrace: error: {where}{error}", file=sys.stderr)
        self._write(index, text, True)

    def _as_json(self, index: int, output: RequestOutput) -> str:
        """One answer is spread in the record; of several each is a record in ``choices``, when streaming those with something new."""
        records = [self._record(completion) for completion in output.outputs]
        prompt = {} if self._stream else {"prompt": self._prompts[index], "prompt_tokens": len(output.prompt_token_ids)}
        if len(records) == 1:
            return json.dumps({"index": index, **prompt, **records[0]}) + "\n"
        choices = [
            {"choice": completion.index, **record}
            for completion, record in zip(output.outputs, records, strict=True)
            if not self._stream or completion.token_ids_diff or completion.text_diff or completion.finish_reason
        ]
        return json.dumps({"index": index, **prompt, "choices": choices}) + "\n"

    def _record(self, completion: CompletionOutput) -> dict[str, Any]:
        ending = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        record: dict[str, Any]
        if self._stream:
            record = {"text_diff": completion.text_diff, "token_ids_diff": completion.token_ids_diff, **ending}
        else:
            record = {"text": completion.text, "token_ids": completion.token_ids, **ending}
        logprobs = completion.logprobs_diff if self._stream else completion.logprobs
        if logprobs is not None:
            # Of each token first its own; JSON has no integers as keys.
            record["logprobs_diff" if self._stream else "logprobs"] = [
                [{"token_id": token, "logprob": one.logprob, "rank": one.rank} for token, one in entry.items()] for entry in logprobs
            ]
        if completion.cumulative_logprob is not None:
            record["cumulative_logprob"] = completion.cumulative_logprob
        return record

    def _as_text(self, index: int, output: RequestOutput) -> str:
        title = " ".join(self._prompts[index].split())[:100]
        if len(output.outputs) > 1:
            return "".join(f"== {index + 1}.{one.index + 1}: {title}\n{one.text}\n" for one in output.outputs)
        heading = f"== {index + 1}: {title}\n" if len(self._prompts) > 1 and index not in self._begun else ""
        self._begun.add(index)
        (completion,) = output.outputs
        return heading + (completion.text_diff if self._stream else completion.text) + "\n" * output.finished

    def _write(self, index: int, text: str, complete: bool) -> None:
        if self._json and self._stream:
            sys.stdout.write(text)
        else:
            self._early.setdefault(index, []).append(text)
            if complete:
                self._complete.add(index)
            while True:
                sys.stdout.writelines(self._early.pop(self._turn, ()))
                if self._turn not in self._complete:
                    break
                self._turn += 1
        sys.stdout.flush()
