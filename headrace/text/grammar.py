"""What the text of a request must match, as a grammar of llguidance, and the check of it before anything is sent.

The same few functions serve both sides: the user process compiles a grammar over a vocabulary of single bytes, to refuse one that is wrong
and say why; rank 0 compiles it over the model's own. ``grammar`` is Lark as llguidance takes it, or GBNF as llama.cpp takes it (its rules
have ``::=``); a regular expression is one of Rust's ``regex`` crate, without look-around, and matches the whole text; a schema may use what
llguidance implements, and any other keyword is refused by its name.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import QueueFullError, RequestError
from headrace.params import MAX_GRAMMAR_CHARS, GuidedDecodingParams
from headrace.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: bytes of stack where grammars are compiled: llguidance goes down one level for each rule that a rule leads to. Chains of rules as long as
#: MAX_GRAMMAR_CHARS allows need a quarter of it.
STACK_SIZE = 128 * 1024 * 1024

#: items that the parser makes in the search for one token's mask. Wide schemas need some thousands; the library's 50,000 let an ambiguous
#: grammar take seconds for a token, these a fifth of one.
MAX_STEP_ITEMS = 10_000

#: seconds that a check may take; an ordinary schema takes some milliseconds, but whether patterns exclude each other can take for ever
CHECK_SECONDS = 5.0

#: checks that ran into that limit and still run, beyond which no other begins
MAX_ABANDONED = 2

#: verdicts that are kept
MAX_VERDICTS = 256

MAX_MESSAGE_CHARS = 400

#: Between the tokens of JSON. Endless by default, and a model that is made to write a schema which does not suit it is fond of spaces.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def grammar_of(params: GuidedDecodingParams) -> str:
    """The grammar in llguidance's own format. Raises RequestError for what does not even parse."""
    from llguidance import LLMatcher, grammar_from

    if params.json is not None or params.json_object:
        try:
            schema = {"type": "object"} if params.json is None else json.loads(params.json)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"guided decoding: json is no JSON schema: {error}") from None
        if schema is True:
            schema = {}  # the same by JSON Schema, and the one that options can be applied to
        if not isinstance(schema, dict):
            raise RequestError(f"guided decoding: json must be a schema, which is an object or true, not {json.dumps(schema)[:40]}")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        try:
            return grammar_from("grammar", params.grammar)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"guided decoding: {_shortened(str(error))}") from None
    # One terminal, which the lexer reads as one automaton: of rules a parser takes no more than 2000 side by side.
    source = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in params.choice)
    if len(source) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"guided decoding: the choices have {len(source)} characters together; at most {MAX_GRAMMAR_CHARS} are allowed")
    return LLMatcher.grammar_from_lark(source)


def grammar_tokens(vocabulary: Vocabulary) -> LLTokenizer:
    """A vocabulary as llguidance wants it. The end of sequence is one token more than there are: ending is for the engine to decide."""
    from llguidance import LLTokenizer

    return LLTokenizer(_Wrapped(vocabulary))  # type: ignore[arg-type]  # it looks for the attributes only


class _Wrapped:
    """What ``LLTokenizer`` reads: the attributes of ``llguidance.TokenizerWrapper``."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, b"<end of grammar>"]
        self.special_token_ids = sorted({*vocabulary.special, self.eos_token_id})
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def compile_grammar(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at its beginning. It takes milliseconds and lets other threads run. Raises RequestError if nothing can ever match."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, step_max_items=MAX_STEP_ITEMS))
    if matcher.is_error():
        raise RequestError(f"guided decoding: {_shortened(matcher.get_error())}")
    # That nothing matches shows when the first token is looked for.
    anything = int.from_bytes(matcher.compute_bitmask(), "little") % (1 << tokens.vocab_size - 1)
    if matcher.is_error() or not (anything or matcher.is_accepting()):
        raise RequestError("guided decoding: no text can match")
    if not anything:
        raise RequestError("guided decoding: only the empty text can match")
    return matcher


def _shortened(message: str) -> str:
    """The errors of llguidance show the whole grammar; the line that says what is wrong begins with ``error:`` or is the first."""
    lines = message.split("<non-verbose/>")[0].strip().splitlines() or ["it cannot be compiled"]
    wrong = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    first = lines[0] if len(lines[0]) <= MAX_MESSAGE_CHARS // 2 else lines[0][: MAX_MESSAGE_CHARS // 2] + "..."
    return (first if wrong is None else f"{first} {wrong}")[:MAX_MESSAGE_CHARS]


class GrammarChecker:
    """Refuses bad grammars in the user process. Safe to use from several threads.

    Args:
        special: names of the model's special tokens, which a Lark grammar may use.
    """

    def __init__(self, special: list[str]) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [name.encode() for name in special]
        self._vocabulary = Vocabulary(tokens, frozenset(range(256, len(tokens))), lambda text: list(text.encode()))
        self._tokens: LLTokenizer | None = None
        self._lock = threading.Lock()
        # By parameters, the least recently used first: what is wrong with them, empty if nothing is.
        self._verdicts: OrderedDict[GuidedDecodingParams, str] = OrderedDict()
        self._abandoned: list[threading.Thread] = []

    def check(self, params: GuidedDecodingParams) -> None:
        """Milliseconds for parameters that are new, microseconds for others; never more than ``CHECK_SECONDS``.

        Raises:
            RequestError: what is wrong with the grammar, or that it takes too long to find out.
            QueueFullError: too many checks are on the way that took too long.
        """
        with self._lock:
            verdict = self._verdicts.get(params)
            if verdict is not None:
                self._verdicts.move_to_end(params)
        if verdict is None:
            verdict = self._judge(params)
            with self._lock:
                self._verdicts[params] = verdict
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise RequestError(verdict)

    def _judge(self, params: GuidedDecodingParams) -> str:
        with self._lock:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise QueueFullError("grammars that take too long to check keep the checker busy", retry_after=CHECK_SECONDS)
        verdicts: list[str] = []

        def judge() -> None:
            verdicts.append(self._compile(params))

        # A thread for each: it has the stack, and one that takes too long cannot be stopped, only left behind.
        with deep_stacks():
            thread = threading.Thread(target=judge, name="headrace-grammar", daemon=True)
            thread.start()
        thread.join(CHECK_SECONDS)
        if thread.is_alive():
            with self._lock:
                self._abandoned.append(thread)
            return f"guided decoding: it took more than {CHECK_SECONDS:g} s to check the grammar, which is therefore too complex"
        return verdicts[0]

    def _compile(self, params: GuidedDecodingParams) -> str:
        try:
            if self._tokens is None:
                self._tokens = grammar_tokens(self._vocabulary)  # two threads may both do it: the results are alike
            compile_grammar(self._tokens, grammar_of(params))
        except RequestError as error:
            return str(error)
        except Exception as error:  # whatever a foreign library raises for this grammar concerns this grammar
            return f"guided decoding: the grammar cannot be compiled: {type(error).__name__}: {error}"
        return ""


_stack_size_lock = threading.Lock()


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started within it have stacks of ``STACK_SIZE``; it is address space, of which only what is used becomes memory."""
    # The size is one setting of the whole process: a thread that somebody else starts at this moment has a large stack too, and no harm.
    with _stack_size_lock:
        before = threading.stack_size(STACK_SIZE)
        try:
            yield
        finally:
            threading.stack_size(before)
