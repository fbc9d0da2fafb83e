"""Guided decoding on rank 0: grammars compiled beside the engine loop, and the constraint that one of them puts on one request's tokens.

A request waits outside the scheduler until its grammar is ready, so a step never waits for one. Requests without a grammar meet nothing of
this. The state of a constraint follows from the tokens generated so far: a preempted request keeps it, and one that comes from a dead world
gets it from the tokens at the end of its prompt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.base import EngineRequest, Float32
from headrace.errors import HeadraceError, RequestError
from headrace.params import GuidedDecodingParams
from headrace.text.grammar import compile_grammar, deep_stacks, grammar_of, grammar_tokens
from headrace.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("headrace.engine")

#: two, so that a grammar of seconds does not hold up one of milliseconds
COMPILER_THREADS = 2

#: compiled grammars that are kept; each holds up to some megabytes, where it was used much
MAX_COMPILED = 64


#: CPU seconds that the grammar of one request may take beside the model, at first and with each token. An ordinary one takes 0.0001 for a
#: token; an ambiguous one may take seconds, for which every other request of the step would wait.
FIRST_SECONDS = 1.0
TOKEN_SECONDS = 0.01


class Grammar(NamedTuple):
    """A compiled grammar. ``matcher`` stays at its beginning. ``num_tokens``: tokens of the tokenizer; ids from there on are none.
    ``special``: those of them that give no text, and that only a grammar which names them allows.
    """

    matcher: LLMatcher
    num_tokens: int
    special: frozenset[int]


class TokenConstraint:
    """Which tokens may come next in one request.

    Args:
        grammar: what its text must match.
        vocab_size: logits in a row.
        ending: tokens that end the request; they are allowed exactly where the text so far is complete, or where the grammar names one.
        generated: tokens that the request has generated already.

    Raises RequestError if these do not match.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, ending: Iterable[int], generated: Sequence[int] = ()) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._num_tokens = grammar.num_tokens
        self._vocab_size = vocab_size
        self._ending = np.fromiter(ending, dtype=np.int64)
        # Their text may be part of what the grammar allows, which does not know that it would be the last.
        self._textual_ending = np.array([token for token in self._ending.tolist() if token not in grammar.special], dtype=np.int64)
        # Whether each token is forbidden as the next one, where that is known already.
        self._forbidden: npt.NDArray[np.bool_] | None = None
        # What it has cost, in CPU seconds of this thread, so that a busy machine fails nobody; and what it may.
        self._seconds = 0.0
        self._allowance = FIRST_SECONDS
        #: nothing can follow but the end
        self.finished = False
        if len(generated) and not self._matcher.consume_tokens(list(generated)):
            raise self._failure()
        self._look_for_end()

    def mask(self, row: Float32) -> None:
        """Set the logits [vocabulary] of tokens that may not come next to -inf. Raises RequestError if the matcher fails."""
        if self._forbidden is None:
            # Not complete, or _look_for_end would have found out.
            self._forbidden = self._find_forbidden()
            self._forbidden[self._textual_ending] = True
        np.copyto(row, np.float32(-np.inf), where=self._forbidden)

    def accept(self, token: int) -> None:
        """``token``, which does not end the request, was generated. Raises RequestError if it does not match or the matcher fails."""
        self._forbidden = None
        self._allowance += TOKEN_SECONDS
        began = time.thread_time()
        accepted = self._matcher.consume_token(token)
        self._seconds += time.thread_time() - began
        if not accepted:
            raise self._failure()
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._matcher.is_stopped():
            self.finished = True
        elif self._matcher.is_accepting():
            # Whether anything can follow, the matcher may know only when it looks for it.
            self._forbidden = self._find_forbidden()
            self.finished = bool(self._forbidden.all())
            self._forbidden[self._ending] = False

    def _find_forbidden(self) -> npt.NDArray[np.bool_]:
        """By the grammar alone; what is no token of the tokenizer is forbidden, for a model may have more logits than tokens."""
        began = time.thread_time()
        bits = self._matcher.compute_bitmask()
        self._seconds += time.thread_time() - began
        if self._matcher.is_error():
            raise self._failure()
        if self._seconds > self._allowance:
            raise RequestError(
                f"guided decoding: the grammar is too ambiguous: it took {self._seconds:.2f} s of computing, of {self._allowance:.2f} s "
                "that it may for so many tokens"
            )
        allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        forbidden: npt.NDArray[np.bool_] = allowed == 0
        forbidden[self._num_tokens :] = True  # there, too, is the grammar's own end
        return forbidden

    def _failure(self) -> RequestError:
        return RequestError(f"guided decoding: {self._matcher.get_error().partition('<non-verbose/>')[0].strip()}")


class GuidedRequests:
    """Requests whose grammar is being compiled: the scheduler does not have them yet.

    Args:
        load_vocabulary: see ``GrammarCompiler``.
        vocab_size: logits in a row.
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._compiler = GrammarCompiler(load_vocabulary)
        self._vocab_size = vocab_size
        # By id; with each the tokens that end it.
        self._waiting: dict[int, tuple[EngineRequest, frozenset[int]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def ids(self) -> list[int]:
        """In the order in which they came."""
        return list(self._waiting)

    @property
    def has_answers(self) -> bool:
        """Whether ``take`` has anything to give."""
        return self._compiler.has_answers

    def add(self, request: EngineRequest, params: GuidedDecodingParams, eos: frozenset[int]) -> None:
        """``take`` gives it back when its grammar is ready. ``eos``: tokens that end its text, besides its stop tokens."""
        ending = eos.union(token for token in request.params.stop_token_ids if token < self._vocab_size)
        self._waiting[request.request_id] = (request, ending)
        self._compiler.ask(request, params)

    def discard(self, request_id: int) -> bool:
        """It has been cancelled. False if it is not here."""
        return self._waiting.pop(request_id, None) is not None

    def take(self) -> Iterator[tuple[EngineRequest, TokenConstraint | RequestError]]:
        """Those whose grammar is ready, each with what it puts on the tokens to come, or why there is nothing."""
        for request, grammar in self._compiler.take():
            # The same id may stand for another request by now.
            waiting, ending = self._waiting.get(request.request_id, (None, frozenset()))
            if waiting is not request:
                continue
            del self._waiting[request.request_id]
            if isinstance(grammar, RequestError):
                yield request, grammar
                continue
            generated = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_generated :].tolist()
            try:
                constraint: TokenConstraint | RequestError = TokenConstraint(grammar, self._vocab_size, ending, generated)
            except RequestError as error:
                constraint = error
            except Exception as error:  # whatever a foreign library raises concerns this request
                log.exception("request %d cannot be guided", request.request_id)
                constraint = RequestError(f"guided decoding: {type(error).__name__}: {error}")
            yield request, constraint

    def close(self) -> None:
        """Nothing more is compiled."""
        self._compiler.close()


class GrammarCompiler:
    """Compiles grammars in threads of its own, each once. All methods are for the engine's thread.

    Args:
        load_vocabulary: reads the model's tokenizer; called once, in one of the threads, when the first grammar is asked for.
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._pool: ThreadPoolExecutor | None = None
        self._loaded: tuple[Vocabulary, LLTokenizer] | None = None
        self._loading = threading.Lock()
        # The least recently used first; of one that cannot be compiled, why.
        self._compiled: OrderedDict[GuidedDecodingParams, Grammar | RequestError] = OrderedDict()
        # Who waits for what is being compiled.
        self._waiting: dict[GuidedDecodingParams, list[EngineRequest]] = {}
        # Filled by the threads.
        self._done: deque[tuple[GuidedDecodingParams, Grammar | RequestError]] = deque()
        self._answers: list[tuple[EngineRequest, Grammar | RequestError]] = []

    @property
    def has_answers(self) -> bool:
        """Whether ``take`` has anything to give."""
        return bool(self._done or self._answers)

    def ask(self, request: EngineRequest, params: GuidedDecodingParams) -> None:
        """For the grammar of a request; ``take`` gives it, at once if it is known."""
        known = self._compiled.get(params)
        if known is not None:
            self._compiled.move_to_end(params)
            self._answers.append((request, known))
        elif params in self._waiting:
            self._waiting[params].append(request)
        else:
            self._waiting[params] = [request]
            # Threads start within submit.
            with deep_stacks():
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(COMPILER_THREADS, "headrace-grammar")
                self._pool.submit(self._compile, params)

    def take(self) -> list[tuple[EngineRequest, Grammar | RequestError]]:
        """Answers since the last call: each request and its grammar, or why there is none."""
        while self._done:
            params, result = self._done.popleft()
            self._compiled[params] = result
            self._answers += [(request, result) for request in self._waiting.pop(params)]
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Nothing more is compiled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: GuidedDecodingParams) -> None:
        try:
            with self._loading:
                if self._loaded is None:
                    read = self._load_vocabulary()
                    self._loaded = read, grammar_tokens(read)
                vocabulary, tokens = self._loaded
            matcher = compile_grammar(tokens, grammar_of(params))
            self._done.append((params, Grammar(matcher, len(vocabulary.tokens), vocabulary.special)))
        except HeadraceError as error:
            self._done.append((params, RequestError(str(error))))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            self._done.append((params, RequestError(f"the grammar cannot be compiled: {type(error).__name__}: {error}")))
