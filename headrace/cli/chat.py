"""``headrace chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli._options import add_debug_option, add_model_options, add_sampling_options, llm_arguments, sampling_params
from headrace.errors import ModelError, RequestError
from headrace.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

MAX_TOKENS = 512

#: seconds that an aborted answer may take to end; the world answers within a step, and one step takes at most about a second
ABORT_TIMEOUT = 10.0

HELP = """\
/reset        forget the conversation
/system TEXT  set the system message and forget the conversation; without TEXT the model's own
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer and keeps the conversation."""

Message = dict[str, str]


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "chat", help="talk to a model", description=f"Talk to a model.\n\n{HELP}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the model's own)")
    add_model_options(parser)
    add_sampling_options(parser, MAX_TOKENS)
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


class Conversation:
    """The messages so far: perhaps a system message, then user and assistant in turn, complete exchanges only."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def messages(self, question: str) -> list[Message]:
        """All so far and ``question``."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.exchanges:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*messages, {"role": "user", "content": question}]

    def trim(self, question: str, fits: Callable[[list[Message]], bool]) -> int:
        """Drop the oldest exchanges until ``messages(question)`` fits or none is left; how many were dropped."""
        dropped = 0
        while self.exchanges and not fits(self.messages(question)):
            del self.exchanges[0]
            dropped += 1
        return dropped


def run(arguments: argparse.Namespace) -> int:
    """0 when the user leaves."""
    params = sampling_params(arguments)
    interactive = sys.stdin.isatty()
    if interactive:
        # Only importing it gives `input` line editing and history; some builds of Python lack it, and input works without.
        try:
            import readline  # noqa: F401
        except ImportError:
            print("headrace: no line editing: this Python has no readline", file=sys.stderr)
    from headrace.llm import LLM

    with LLM(**llm_arguments(arguments)) as llm:
        if not llm.tokenizer.chat_template:
            raise ModelError(f"{llm.facts.model} has no chat template; headrace generate --raw continues a text with it")
        if interactive:
            print(f"{llm.facts.model}, {llm.facts.world_size} ranks. /help lists the commands, Ctrl-D ends.", file=sys.stderr)
        session = Session(llm, params, Conversation(arguments.system))
        while (line := _read(interactive)) is not None and session.take(line):
            pass
    return 0


def _read(interactive: bool) -> str | None:
    """The next line; None at the end. Ctrl-C at the prompt drops what was typed."""
    while True:
        try:
            return input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D or /exit ends)", file=sys.stderr)


class Session:
    """What the lines that the user types do."""

    def __init__(self, llm: LLM, params: SamplingParams, conversation: Conversation) -> None:
        self.llm = llm
        self.params = params
        self.conversation = conversation

    def take(self, line: str) -> bool:
        """One line; False when the user leaves."""
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self.conversation = Conversation(self.conversation.system)
        elif command == "/system":
            self.conversation = Conversation(rest.strip() or None)
        elif command == "/help":
            print(HELP, file=sys.stderr)
        elif command.startswith("/"):
            print(f"unknown command {command}; /help lists them", file=sys.stderr)
        elif command:
            try:
                self._ask(line)
            except KeyboardInterrupt:
                # Before the answer began, or a second one while the first was being obeyed: the handle is dropped, which cancels it.
                print("\n(stopped)", file=sys.stderr)
        return True

    def _ask(self, question: str) -> None:
        dropped = self.conversation.trim(question, self._fits)
        if dropped:
            print(
                f"(the context of {self.llm.facts.max_seq_len} tokens is full: the oldest {dropped} exchanges were dropped)",
                file=sys.stderr,
            )
        try:
            answer = self._answer(self.conversation.messages(question))
        except RequestError as error:
            # The question stays out of the conversation, which can go on without it.
            print(f"headrace: error: {error}", file=sys.stderr)
            return
        self.conversation.exchanges.append((question, answer))

    def _fits(self, messages: list[Message]) -> bool:
        prompt = self.llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        length = len(self.llm.tokenizer.encode(prompt, add_special_tokens=False))
        return length + (self.params.max_tokens or 1) <= self.llm.facts.max_seq_len

    def _answer(self, messages: list[Message]) -> str:
        """Print the answer as it comes; all of it, or what there was when the user stopped it."""
        handle = self.llm.chat_async(messages, self.params, streaming=True)
        shown = ""
        try:
            for output in handle:
                print(output.outputs[0].text_diff, end="", flush=True)
                shown += output.outputs[0].text_diff
        except KeyboardInterrupt:
            handle.abort()
        final = handle.result(timeout=ABORT_TIMEOUT).outputs[0]
        # What arrived between the interrupt and the end belongs to the answer, and the model will be shown it.
        print(final.text[len(shown) :])
        if final.finish_reason == "abort":
            print("(stopped)", file=sys.stderr)
        elif final.finish_reason == "length":
            print(f"(cut at {final.length} tokens; --max-tokens sets the limit)", file=sys.stderr)
        return final.text
