"""The verdict over one world after its end: every request ended once, as what happened allows, with the tokens it should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from headrace.errors import HeadraceError
from tests.chaos.clients import Asked, Crowd, Rig

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
    for one in crowd.asked:
        if one.handle is None:
            continue
        if not one.handle.finished:
            yield f"{LOST}: {one.handle!r} has no ending"
            continue
        ending, tokens = _ending(one)
        endings[ending] += 1
        yield from (f"{one.handle!r} of {one.prompt} {fault}" for fault in _faults(one, rig, ending, tokens, allowed))
    yield from _imbalance(crowd, counters, endings)


def outcomes(crowd: Crowd) -> Counter[str]:
    """Requests by how they ended, for the summary."""
    return Counter("dropped" if one.handle is None else ",".join(one.endings) or LOST for one in crowd.asked)


def _ending(one: Asked) -> tuple[str, list[int]]:
    """Asked again, after all is over: how it ended, and its tokens. An error has none."""
    assert one.handle is not None
    try:
        completion = one.handle.result(0).outputs[0]
    except HeadraceError as error:
        return type(error).__name__, []
    return str(completion.finish_reason), completion.token_ids


def _faults(one: Asked, rig: Rig, ending: str, tokens: list[int], allowed: frozenset[str]) -> Iterator[str]:
    if one.endings != [ending]:
        yield f"ended as {one.endings} for its reader, and as {ending} when asked again"
    if _ending(one) != (ending, tokens):
        yield "gives another answer when asked again"
    own = {"length"} | ({"abort"} if one.aborted else set()) | ({"timeout"} if one.hurried else set())
    if ending not in allowed | own:
        yield f"ended as {ending}, which nothing here explains"
    if ending == "length" and len(tokens) != one.max_tokens:
        yield f"has {len(tokens)} tokens and not {one.max_tokens}"
    if tokens != rig.answer(one.prompt, len(tokens)):
        yield f"has other tokens than undisturbed: {tokens}"
    if one.iterated:
        # A world that dies may cut a stream off, but what it gave must be right.
        whole = tokens if ending in ("length", "abort", "timeout") else rig.answer(one.prompt, len(one.pieces))
        if one.pieces != whole:
            yield f"streamed {one.pieces} and not {whole}"


def _imbalance(crowd: Crowd, counters: Mapping[str, int], endings: Counter[str]) -> Iterator[str]:
    if counters["admitted"] != len(crowd.asked):
        yield f"{counters['admitted']} were admitted and {len(crowd.asked)} asked"
    by_counter: Counter[str] = Counter()
    for ending, count in endings.items():
        by_counter[COUNTER_OF_ENDING.get(ending, ending)] += count
    # What readers did not see is what was dropped.
    unseen = {name: counters[name] - by_counter[name] for name in ("finished", "aborted", "failed", "timed_out", "dead")}
    if counters["live"] != 0 or min(unseen.values()) < 0 or sum(unseen.values()) != crowd.dropped:
        yield f"the ledger says {dict(counters)}, readers saw {dict(endings)} and dropped {crowd.dropped}"
    if counters["dispatch_faults"] or counters["bad_frames"] or counters["unknown_deltas"]:
        yield f"the dispatch thread met what cannot be: {dict(counters)}"
