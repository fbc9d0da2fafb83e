"""The conversation in the terminal: commands, interrupts, a full context; over a stand-in for ``LLM``."""

from __future__ import annotations

import builtins
import sys
import types

import pytest

from headrace.cli import main
from headrace.cli.chat import Conversation
from headrace.config import EngineFacts
from headrace.errors import EngineDeadError, RequestError
from headrace.outputs import CompletionOutput, RequestOutput


def output(text, diff, finish):
    completion = CompletionOutput(text=text, token_ids=[0] * len(text), text_diff=diff, finish_reason=finish)
    return RequestOutput(request_id=0, prompt=None, prompt_token_ids=[], outputs=[completion], finished=finish is not None)


class Handle:
    """Pieces, then the end. A KeyboardInterrupt among them is raised; what follows it arrives before the abort takes effect."""

    def __init__(self, pieces, finish="stop"):
        self.pieces = pieces
        self.finish = finish

    def __iter__(self):
        text = ""
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            text += piece
            yield output(text, piece, None)

    def abort(self):
        self.finish = "abort"

    def result(self, timeout=None):
        assert timeout is not None, "an answer that was stopped must not be waited for without a limit"
        return output("".join(p for p in self.pieces if isinstance(p, str)), "", self.finish)


class Tokenizer:
    """A token for each character; the rendered prompt is the contents joined."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return "".join(m["content"] for m in messages)

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens, "a rendered template has its special tokens already"
        return list(text)


class StandIn:
    def __init__(self, model, **settings):
        self.facts = EngineFacts(model="toy", runner="echo", dtype="none", vocab_size=10, max_seq_len=40, max_batch_size=1)
        self.tokenizer = Tokenizer(type(self).template)
        self.asked = type(self).asked

    template = "yes"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        type(self).closed = True

    def chat_async(self, messages, sampling_params=None, streaming=False):
        assert streaming
        self.asked.append(messages)
        answer = self.answers.pop(0) if self.answers else ["fine"]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, Handle) else Handle(answer)


@pytest.fixture
def chat(monkeypatch, capsys):
    """chat(lines, answers) -> exit code, stdout, stderr, and the messages of every question."""

    def run(lines, answers=(), options=("--max-tokens", "8"), template="yes", interactive=True):
        stand_in = type("LLM", (StandIn,), {"asked": [], "answers": list(answers), "template": template, "closed": False})
        module = types.ModuleType("headrace.llm")
        module.LLM = stand_in
        monkeypatch.setitem(sys.modules, "headrace.llm", module)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: interactive, raising=False)
        todo = list(lines)

        def read(prompt=""):
            if not todo:
                raise EOFError
            line = todo.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        code = main(["chat", *options])
        assert stand_in.closed
        return types.SimpleNamespace(code=code, out=(c := capsys.readouterr()).out, err=c.err, asked=stand_in.asked)

    return run


def contents(messages):
    return [m["content"] for m in messages]


def test_each_question_carries_what_was_said_before(chat):
    result = chat(["hi", "and?"], [["he", "llo"], ["bye"]])
    assert result.code == 0
    assert result.out == "hello\nbye\n\n"
    assert [contents(m) for m in result.asked] == [["hi"], ["hi", "hello", "and?"]]
    assert [m["role"] for m in result.asked[1]] == ["user", "assistant", "user"]


def test_reset_forgets_and_system_stays(chat):
    result = chat(["hi", "/reset", "again"], options=("--max-tokens", "8", "--system", "brief"))
    assert [contents(m) for m in result.asked] == [["brief", "hi"], ["brief", "again"]]
    assert result.asked[0][0]["role"] == "system"


def test_system_sets_and_unsets_the_system_message(chat):
    result = chat(["/system be kind", "hi", "/system", "hi"])
    assert [contents(m) for m in result.asked] == [["be kind", "hi"], ["hi"]]


@pytest.mark.parametrize("end", ["/exit", " /exit "])
def test_exit_leaves(end, chat):
    assert chat([end, "never asked"]).asked == []


def test_blank_lines_ask_nothing_and_unknown_commands_are_told(chat):
    result = chat(["", "   ", "/nonsense", "/help"])
    assert result.asked == []
    assert "unknown command /nonsense" in result.err
    assert "/system TEXT" in result.err


def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(chat):
    result = chat(["hi", "go on"], [["one ", KeyboardInterrupt(), "two"], ["three"]])
    assert result.code == 0
    assert "(stopped)" in result.err
    assert result.out == "one two\nthree\n\n"
    assert contents(result.asked[1]) == ["hi", "one two", "go on"]


def test_an_interrupt_before_the_answer_began_keeps_the_session(chat):
    result = chat(["hi", "again"], [KeyboardInterrupt()])
    assert "(stopped)" in result.err
    assert [contents(m) for m in result.asked] == [["hi"], ["again"]]


def test_an_interrupt_at_the_prompt_drops_the_line(chat):
    result = chat([KeyboardInterrupt(), "hi"])
    assert (result.code, len(result.asked)) == (0, 1)
    assert "Ctrl-D or /exit" in result.err


def test_an_interrupt_ends_a_conversation_from_a_pipe(chat):
    assert chat([KeyboardInterrupt()], interactive=False).code == 130


def test_a_refused_question_is_told_and_forgotten(chat):
    result = chat(["bad", "good"], [RequestError("the prompt is too long")])
    assert "headrace: error: the prompt is too long" in result.err
    assert [contents(m) for m in result.asked] == [["bad"], ["good"]]


def test_a_dead_world_ends_the_session_with_its_code(chat):
    result = chat(["hi", "never asked"], [EngineDeadError("rank 1 died")])
    assert (result.code, len(result.asked)) == (3, 1)
    assert result.err.endswith("headrace: error: rank 1 died\n")


def test_an_answer_that_was_cut_is_marked(chat):
    result = chat(["hi"], [Handle(["abc"], finish="length")])
    assert "(cut at 3 tokens" in result.err


def test_the_oldest_exchanges_go_when_the_context_is_full(chat):
    # 40 tokens, 8 of them for the answer: 32 characters fit.
    result = chat(["a" * 10, "b" * 10, "c" * 10, "d" * 10], [["A" * 5], ["B" * 5], ["C" * 5], ["D" * 5]], ("--max-tokens", "8"))
    assert [contents(m)[0][0] for m in result.asked] == ["a", "a", "b", "c"]
    assert "(the context of 40 tokens is full: the oldest 1 exchanges were dropped)" in result.err
    assert all(sum(map(len, contents(m))) <= 32 for m in result.asked)


def test_a_model_without_template_is_refused(chat):
    result = chat([], template="")
    assert result.code == 1
    assert "toy has no chat template" in result.err


def test_trim_gives_up_when_nothing_is_left_to_drop():
    conversation = Conversation("system")
    conversation.exchanges = [("a", "b"), ("c", "d")]
    assert conversation.trim("q", lambda messages: False) == 2
    assert contents(conversation.messages("q")) == ["system", "q"]
