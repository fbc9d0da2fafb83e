"""The verdict over one world after its end: every request ended once, as what happened allows, with the tokens it should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.errors import HeadraceError
from tests.chaos.clients import Asked, Crowd, Rig, ending_of

#: ending as a reader sees it -> counter of the ledger
COUNTER_OF_ENDING = {
    "length": "finished",
    "stop": "finished",
    "abort": "aborted",
    "timeout": "timed_out",
    "RequestError": "failed",
    "EngineDeadError": "dead",
    "ClosedError": "dead",
}


#: of a request that nobody was told the end of
LOST = "lost"


def judge(crowd: Crowd, rig: Rig, counters: Mapping[str, int], allowed: frozenset[str]) -> Iterator[str]:
    """What is wrong, one line each. ``allowed``: endings, beside ``length``, that requests may have that nobody aborted."""
    yield from crowd.faults
    endings: Counter[str] = Counter()
    # Choices of requests that failed: how each of them ended nobody was told.
    untold = 0
    for one in crowd.asked:
        if one.handle is None:
            continue
        if not one.handle.finished:
            yield f"{LOST}: {one.handle!r} has no ending"
            continue
        answer = _answer(one)
        endings.update(answer.each)
        if not answer.each and one.choices > 1:
            untold += one.choices
        elif not answer.each:
            endings[answer.ending] += 1
        yield from (f"{one.handle!r} of {one.prompt} {fault}" for fault in _faults(one, rig, answer, allowed))
    yield from _imbalance(crowd, counters, endings, untold)


def outcomes(crowd: Crowd) -> Counter[str]:
    """Requests by how they ended, for the summary."""
    return Counter("dropped" if one.handle is None else ",".join(one.endings) or LOST for one in crowd.asked)


class Answer(NamedTuple):
    """How a request ended, and for each choice how, and with which tokens and logprobs. An error has none."""

    ending: str
    each: list[str]
    tokens: list[list[int]]
    logprobs: list[list[int] | None]


def _answer(one: Asked) -> Answer:
    """Asked again, after all is over."""
    assert one.handle is not None
    try:
        output = one.handle.result(0)
    except HeadraceError as error:
        return Answer(type(error).__name__, [], [], [])
    return Answer(
        ending_of(output),
        [str(completion.finish_reason) for completion in output.outputs],
        [completion.token_ids for completion in output.outputs],
        [None if completion.logprobs is None else [next(iter(entry)) for entry in completion.logprobs] for completion in output.outputs],
    )


def _faults(one: Asked, rig: Rig, answer: Answer, allowed: frozenset[str]) -> Iterator[str]:
    if one.endings != [answer.ending]:
        yield f"ended as {one.endings} for its reader, and as {answer.ending} when asked again"
    if _answer(one) != answer:
        yield "gives another answer when asked again"
    own = {"length"} | ({"abort"} if one.aborted else set()) | ({"timeout"} if one.hurried else set())
    if unexplained := set(answer.each or [answer.ending]) - allowed - own:
        yield f"ended as {unexplained}, which nothing here explains"
    if answer.each and len(answer.each) != one.choices:
        yield f"has {len(answer.each)} choices and not {one.choices}"
    for ending, tokens, logprobs in zip(answer.each, answer.tokens, answer.logprobs, strict=True):
        if ending == "length" and len(tokens) != one.max_tokens:
            yield f"has {len(tokens)} tokens and not {one.max_tokens}"
        if tokens != rig.answer(one.prompt, len(tokens)):
            yield f"has other tokens than undisturbed: {tokens}"
        if logprobs is not None and logprobs != tokens:
            yield f"has logprobs of {logprobs} and not of {tokens}"
    if one.iterated:
        # A world that dies may cut a stream off, but what it gave must be right.
        whole = answer.tokens or [rig.answer(one.prompt, len(pieces)) for pieces in one.pieces]
        if one.pieces != whole:
            yield f"streamed {one.pieces} and not {whole}"


def _imbalance(crowd: Crowd, counters: Mapping[str, int], endings: Counter[str], untold: int) -> Iterator[str]:
    asked = sum(one.choices for one in crowd.asked)
    if counters["admitted"] != asked:
        yield f"{counters['admitted']} were admitted and {asked} asked"
    by_counter: Counter[str] = Counter()
    for ending, count in endings.items():
        by_counter[COUNTER_OF_ENDING.get(ending, ending)] += count
    # What readers did not see is what was dropped, or failed with another choice.
    unseen = {name: counters[name] - by_counter[name] for name in ("finished", "aborted", "failed", "timed_out", "dead")}
    if counters["live"] != 0 or min(unseen.values()) < 0 or sum(unseen.values()) != crowd.dropped + untold:
        yield f"the ledger says {dict(counters)}, readers saw {dict(endings)} and dropped {crowd.dropped}; {untold} failed with others"
    if counters["dispatch_faults"] or counters["bad_frames"] or counters["unknown_deltas"]:
        yield f"the dispatch thread met what cannot be: {dict(counters)}"
