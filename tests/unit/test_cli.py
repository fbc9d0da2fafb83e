"""argv to settings, output and exit codes of the command line, over a stand-in for ``LLM``."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import types
from typing import ClassVar

import pytest

from headrace.cli import _prompts, main
from headrace.config import EngineConfig, EngineFacts
from headrace.errors import EngineDeadError, ModelError, RequestError, StartupError
from headrace.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.params import SamplingParams


class Handle:
    """An answer that comes in pieces. An exception among the pieces is raised in its turn."""

    def __init__(self, pieces, prompt="", request_id=0):
        self.pieces = list(pieces)
        self.prompt = prompt
        self.request_id = request_id
        self.text = ""
        self.tokens = []

    async def __aiter__(self):
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, BaseException):
                raise piece
            self.text += piece
            self.tokens.append(number)
            last = number == len(self.pieces) - 1
            completion = CompletionOutput(
                text=self.text,
                token_ids=list(self.tokens),
                text_diff=piece,
                token_ids_diff=[number],
                finish_reason="stop" if last else None,
            )
            yield RequestOutput(
                request_id=self.request_id, prompt=self.prompt, prompt_token_ids=[1, 2], outputs=[completion], finished=last
            )


class StandIn:
    """What the command line sees of ``LLM``. ``answers``: prompt -> pieces, or an exception to raise at submit."""

    answers: ClassVar[dict] = {}
    start_error: BaseException | None = None
    made: ClassVar[list] = []
    chat_template = True

    def __init__(self, model, **settings):
        if self.start_error is not None:
            raise self.start_error
        self.settings = {"model": model, **settings}
        self.calls = []
        self.closed = False
        self.facts = EngineFacts(model=model, runner="echo", dtype="none", vocab_size=10, max_seq_len=100, max_batch_size=2)
        self.tokenizer = types.SimpleNamespace(chat_template=self.chat_template)
        type(self).made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True

    def generate_async(self, prompt, sampling_params=None, streaming=False):
        self.calls.append(("generate", prompt, sampling_params, streaming))
        return self._handle(prompt)

    def chat_async(self, messages, sampling_params=None, streaming=True):
        self.calls.append(("chat", messages, sampling_params, streaming))
        return self._handle(messages[-1]["content"])

    def _handle(self, prompt):
        answer = self.answers.get(prompt, ["an", "swer"])
        if isinstance(answer, BaseException):
            raise answer
        return Handle(answer, prompt)


@pytest.fixture
def llm(monkeypatch):
    """The stand-in's class, put where the command line looks for the real one."""
    stand_in = type("LLM", (StandIn,), {"answers": {}, "made": []})
    module = types.ModuleType("headrace.llm")
    module.LLM = stand_in
    monkeypatch.setitem(sys.modules, "headrace.llm", module)
    return stand_in


def test_options_become_settings_and_parameters(llm, capsys):
    options = (
        "generate Why --model m.gguf --tp 3 --pp 2 --runner echo --dtype bfloat16 --max-batch-size 5 --max-num-tokens 6 --max-seq-len 7 "
        "--kv-cache-tokens 8 --kv-cache-dtype int8 --threads 9 --mpi mpich --record file --record-prompts "
        "--max-tokens 10 --temperature 0.5 --top-k 11 "
        "--trace trace --quantization int8 --device cuda --no-cuda-graphs --skip-selftest tensorrt "
        "--top-p 0.9 --seed 12 --stop a --stop b"
    )
    assert main(options.split()) == 0
    made = llm.made[0]
    assert made.settings == {
        "model": "m.gguf",
        "tensor_parallel_size": 3,
        "pipeline_parallel_size": 2,
        "runner": "echo",
        "dtype": "bfloat16",
        "quantization": "int8",
        "device": "cuda",
        "cuda_graphs": False,
        "max_batch_size": 5,
        "max_num_tokens": 6,
        "max_seq_len": 7,
        "kv_cache_tokens": 8,
        "kv_cache_dtype": "int8",
        "num_threads": 9,
        "mpi": "mpich",
        "record": "file",
        "record_prompts": True,
        "trace": "trace",
        "skip_selftest": ["tensorrt"],
        "progress": False,
    }
    params = SamplingParams(max_tokens=10, temperature=0.5, top_k=11, top_p=0.9, seed=12, stop=("a", "b"))
    assert made.calls == [("chat", [{"role": "user", "content": "Why"}], params, True)]
    assert made.closed


def test_defaults_are_those_of_the_settings(llm):
    assert main(["generate", "Why"]) == 0
    settings = llm.made[0].settings
    defaults = EngineConfig(model="")
    for name in (
        "runner",
        "dtype",
        "quantization",
        "device",
        "cuda_graphs",
        "max_num_tokens",
        "max_seq_len",
        "kv_cache_tokens",
        "kv_cache_dtype",
        "num_threads",
    ):
        assert settings[name] == getattr(defaults, name)
    # What an engine folder may say for itself.
    assert settings["max_batch_size"] is settings["pipeline_parallel_size"] is None
    assert (settings["model"], settings["tensor_parallel_size"], settings["mpi"]) == ("smollm2-135m", None, "auto")


@pytest.mark.parametrize(
    ("template", "option", "call"),
    [(True, [], "chat"), (True, ["--raw"], "generate"), (False, [], "generate"), (False, ["--chat"], "chat"), (True, ["--chat"], "chat")],
)
def test_the_chat_template_is_used_where_there_is_one_or_as_asked(template, option, call, llm):
    llm.chat_template = template
    assert main(["generate", "Why", *option]) == 0
    assert llm.made[0].calls[0][0] == call


def test_text_goes_to_stdout_and_the_summary_to_stderr(llm, capsys):
    assert main(["generate", "Why"]) == 0
    out, err = capsys.readouterr()
    assert out == "answer\n"
    assert re.fullmatch(r"headrace: 2 tokens in \d+\.\d\d s, \d+\.\d tokens/s, first token after \d+\.\d\d s\n", err)


def test_a_stream_writes_every_piece_at_once(llm, monkeypatch):
    llm.answers = {"Why": ["a", "b", "c"]}
    stdout = Recorder()
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["generate", "Why", "--stream"]) == 0
    assert stdout.seen_at_flush[:3] == ["a", "ab", "abc\n"]


class Recorder(io.StringIO):
    """Remembers what had been written at every flush."""

    def __init__(self):
        super().__init__()
        self.seen_at_flush = []

    def flush(self):
        self.seen_at_flush.append(self.getvalue())


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_json_is_one_object_for_each_prompt_and_nothing_else(llm, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_text("one\ntwo\n")
    assert main(["generate", "--prompt-file", str(file), "--json"]) == 0
    out = capsys.readouterr().out
    assert [r["prompt"] for r in records(out)] == ["one", "two"]
    assert records(out)[0] == {
        "index": 0,
        "prompt": "one",
        "text": "answer",
        "token_ids": [0, 1],
        "prompt_tokens": 2,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_streamed_json_is_one_object_for_each_piece_and_joins_to_the_whole(llm, capsys):
    llm.answers = {"Why": ["an", "sw", "er"]}
    assert main(["generate", "Why", "--json", "--stream"]) == 0
    pieces = records(capsys.readouterr().out)
    assert [p["text_diff"] for p in pieces] == ["an", "sw", "er"]
    assert [p["finish_reason"] for p in pieces] == [None, None, "stop"]
    assert [t for p in pieces for t in p["token_ids_diff"]] == [0, 1, 2]
    assert set(pieces[0]) == {"index", "text_diff", "token_ids_diff", "finish_reason", "stop_reason"}


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_several_answers_come_in_the_order_of_the_prompts(stream, llm, tmp_path, capsys):
    # The later a prompt, the shorter its answer: the last is complete first.
    llm.answers = {f"p{n}": ["x"] * (9 - n) for n in range(9)}
    file = tmp_path / "prompts"
    file.write_text("\n".join(llm.answers))
    assert main(["generate", "--prompt-file", str(file), *stream]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"== {n + 1}: p{n}\n{'x' * (9 - n)}\n" for n in range(9))
    assert err.startswith("headrace: 9 prompts, 45 tokens")


@pytest.mark.parametrize("when", ["at submit", "in the middle"])
def test_a_refused_prompt_is_told_in_its_place_and_the_others_are_answered(when, llm, tmp_path, capsys):
    refusal = RequestError("too long: 9 of 8 tokens")
    llm.answers = {"bad": refusal if when == "at submit" else ["begun", refusal]}
    file = tmp_path / "prompts"
    file.write_text("good\nbad\nbetter\n")
    assert main(["generate", "--prompt-file", str(file), "--json"]) == 1
    out, err = capsys.readouterr()
    assert [(r["index"], r.get("text"), r.get("error")) for r in records(out)] == [
        (0, "answer", None),
        (1, None, "too long: 9 of 8 tokens"),
        (2, "answer", None),
    ]
    assert "1 refused" in err
    assert main(["generate", "--prompt-file", str(file), "--stream"]) == 1
    out, err = capsys.readouterr()
    assert "== 1: good\nanswer\n" in out
    assert out.endswith("== 3: better\nanswer\n")
    assert "headrace: error: prompt 2: too long: 9 of 8 tokens\n" in err


def test_no_more_requests_are_under_way_than_the_world_has_use_for(llm, tmp_path):
    under_way = []
    most = []

    class Counting(Handle):
        async def __aiter__(self):
            under_way.append(self)
            most.append(len(under_way))
            async for output in super().__aiter__():
                yield output
            under_way.remove(self)

    llm._handle = lambda self, prompt: Counting(["a"] * 30, prompt)
    file = tmp_path / "prompts"
    file.write_text("\n".join(f"p{n}" for n in range(100)))
    assert main(["generate", "--prompt-file", str(file)]) == 0
    assert len(most) == 100
    assert max(most) == 8  # four times max_batch_size of the stand-in


@pytest.fixture
def interruptible():
    """Interrupts are taken also where the tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("where", ["submit", "answer"])
def test_an_interrupt_is_seen_though_nothing_ever_waits(where, llm, interruptible, tmp_path, capsys):
    """All answers are there at once, so no await waits; the interrupt comes in the third submission, or in the third piece written."""

    class Interrupting(Handle):
        async def __aiter__(self):
            async for output in super().__aiter__():
                told.append(output)
                if where == "answer" and len(told) == 3:
                    signal.raise_signal(signal.SIGINT)
                yield output

    submitted, told = [], []

    def handle(self, prompt):
        submitted.append(prompt)
        if where == "submit" and len(submitted) == 3:
            signal.raise_signal(signal.SIGINT)
        return Interrupting("piece by piece", prompt)

    llm._handle = handle
    file = tmp_path / "prompts"
    file.write_text("\n".join(f"p{n}" for n in range(100)))
    assert main(["generate", "--prompt-file", str(file), "--json", "--stream"]) == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"
    assert len(submitted) <= 4 and len(told) < 4 * 4
    assert llm.made[0].closed


class Choices(Handle):
    """Two answers, of which the second ends first."""

    async def __aiter__(self):
        def one(index, tokens, new, finish):
            logprobs = [{token: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)} for token in tokens]
            return CompletionOutput(
                index=index,
                text="ab"[index] * len(tokens),
                token_ids=tokens,
                text_diff="ab"[index] * new,
                token_ids_diff=tokens[len(tokens) - new :],
                finish_reason=finish,
                logprobs=logprobs,
                logprobs_diff=logprobs[len(tokens) - new :],
                cumulative_logprob=-0.5 * len(tokens),
            )

        for outputs in ([one(0, [1], 1, None), one(1, [2], 1, "stop")], [one(0, [1, 1], 1, "length"), one(1, [2], 0, "stop")]):
            finished = all(output.finish_reason for output in outputs)
            yield RequestOutput(request_id=0, prompt=self.prompt, prompt_token_ids=[1, 2], outputs=outputs, finished=finished)


def test_several_choices_are_told_apart(llm, capsys):
    """A39."""
    llm._handle = lambda self, prompt: Choices([], prompt)
    assert main(["generate", "Why", "-n", "2", "--temperature", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "== 1.1: Why\naa\n== 1.2: Why\nb\n" and "3 tokens" in err
    assert llm.made[0].calls[0][2].n == 2
    assert main(["generate", "Why", "-n", "2", "--temperature", "1", "--json", "--logprobs", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(choice["choice"], choice["token_ids"], choice["cumulative_logprob"]) for choice in record["choices"]] == [
        (0, [1, 1], -1.0),
        (1, [2], -0.5),
    ]
    assert record["choices"][1]["logprobs"] == [
        [{"token_id": 2, "logprob": -0.5, "rank": 2}, {"token_id": 9, "logprob": -0.25, "rank": 1}],
    ]
    assert main(["generate", "Why", "-n", "2", "--temperature", "1", "--json", "--stream"]) == 0
    pieces = [json.loads(line)["choices"] for line in capsys.readouterr().out.splitlines()]
    assert [[(one["choice"], one["token_ids_diff"]) for one in piece] for piece in pieces] == [[(0, [1]), (1, [2])], [(0, [1]), (1, [])]]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("no such file or folder: m.gguf"), 1, "headrace: error: no such file or folder: m.gguf\n"),
        (StartupError("rank 1 failed"), 3, "headrace: error: rank 1 failed\n"),
        (
            EngineDeadError("rank 1 died", remote_cause="Traceback: secret"),
            3,
            "headrace: error: rank 1 died\n(--debug shows what the workers wrote)\n",
        ),
        (KeyboardInterrupt(), 130, "headrace: interrupted\n"),
        (ZeroDivisionError("oh"), 1, "headrace: error: unexpected ZeroDivisionError: oh\n(--debug shows the traceback)\n"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 1, "headrace: error: x.txt: No such file or directory\n"),
    ],
)
def test_errors_end_with_one_message_and_their_code(error, code, text, llm, capsys):
    llm.start_error = error
    assert main(["generate", "Why"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", text)


def test_debug_shows_the_traceback_and_the_cause(llm, capsys):
    llm.start_error = EngineDeadError("rank 1 died", remote_cause="what rank 1 wrote")
    assert main(["generate", "Why", "--debug"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "what rank 1 wrote" in err
    assert err.endswith("headrace: error: rank 1 died\n")


def test_a_death_during_an_answer_ends_the_run_once(llm, tmp_path, capsys):
    llm.answers = {"two": ["be", EngineDeadError("rank 1 died")]}
    file = tmp_path / "prompts"
    file.write_text("one\ntwo\nthree\n")
    assert main(["generate", "--prompt-file", str(file)]) == 3
    assert capsys.readouterr().err == "headrace: error: rank 1 died\n"
    assert llm.made[0].closed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generate", "x", "--tp", "0"], "0 is not at least 1"),
        (["generate", "x", "--pp", "0"], "0 is not at least 1"),
        (["generate", "x", "--tp", "two"], "invalid positive value: 'two'"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["generate", "x", "--top-p", "1.5"], "top_p=1.5 is out of range"),
        (["generate", "x", "-n", "2", "--stream"], "needs --json"),
        (["generate", "x", "--best-of", "2", "--json", "--stream"], "which are the best is known at the end"),
        (["generate", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "x", "--min-tokens", "20", "--max-tokens", "10"], "min_tokens=20"),
        (["generate", "x", "--chat", "--raw"], "not allowed with argument"),
        (["generate", "x", "--prompt-file", "y"], "give a prompt or --prompt-file, not both"),
        (["generate", "x", "--runner", "abacus"], "invalid choice"),
        (["chat", "--seed", "-1"], "seed=-1 is out of range"),
    ],
)
def test_usage_errors_exit_with_2_before_anything_is_started(options, text, llm, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(options)
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err
    assert llm.made == []


def test_version(capsys):
    import headrace

    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize("prompt", [["-"], []])
def test_the_prompt_can_come_from_standard_input(prompt, llm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", *prompt]) == 0
    assert llm.made[0].calls[0][1] == [{"role": "user", "content": "two\nlines"}]


def test_prompts_from_standard_input_line_by_line(llm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", "--prompt-file", "-"]) == 0
    assert len(llm.made[0].calls) == 2


def test_no_prompt_at_a_terminal_is_an_error_of_usage(llm, monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(SystemExit):
        main(["generate"])
    assert "give a prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\ntwo", ["one", "two"]),
        ("one\r\n\n  \ntwo\r\n", ["one", "two"]),
        ("a\x0cb\u2028c\n", ["a\x0cb\u2028c"]),
        ('{"prompt": "one\\ntwo", "id": 7}\n\n{"prompt": ""}', ["one\ntwo", ""]),
        ('[1]\n{"prompt": "x"}', ["[1]", '{"prompt": "x"}']),
        ("", []),
        (" \n", []),
    ],
)
def test_prompt_files(text, prompts):
    assert _prompts.parse_prompts(text) == prompts


@pytest.mark.parametrize("second", ["no json", "{", '{"text": "x"}', '{"prompt": 5}', "[]"])
def test_a_bad_line_of_json_is_named(second, tmp_path, llm, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n\n' + second)
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--prompt-file", str(file)])
    assert exit_.value.code == 2
    assert f'{file}: line 3 is not a JSON object with a string "prompt"' in capsys.readouterr().err


@pytest.mark.parametrize(("content", "text"), [(b"\n", "no prompt in it"), (b"\xff\xfe", "can't decode")])
def test_a_file_without_prompts_is_an_error_of_usage(content, text, tmp_path, llm, capsys):
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["generate", "--prompt-file", str(file)])
    assert text in capsys.readouterr().err


def test_a_missing_prompt_file_is_named(tmp_path, llm, capsys):
    assert main(["generate", "--prompt-file", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"headrace: error: {tmp_path / 'none'}: No such file or directory\n"
