"""What is counted about HTTP, and the text that Prometheus reads. Used in the event loop only."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: seconds
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
#: values that a RecentHistogram keeps
MAX_RECENT = 1024

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """One metric: its name without ``headrace_``, and its samples as (suffix, labels, value). ``over``: what becomes of it over all
    frontends.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[tuple[str, Labels, float]]
    over: Literal["sum", "max", "own"] = "sum"


class Histogram:
    """How often values came that were at most each bound; for percentiles over time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> list[tuple[str, Labels, float]]:
        """As Prometheus has them: each bucket counts those before it too."""
        made: list[tuple[str, Labels, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            made.append(("_bucket", (("le", bound),), total))
        return [*made, ("_sum", (), self._sum), ("_count", (), total)]


class RecentHistogram(Histogram):
    """Keeps the latest values too, for one who asks now and then."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._recent: deque[float] = deque(maxlen=MAX_RECENT)

    def observe(self, value: float) -> None:
        """One value."""
        super().observe(value)
        self._recent.append(value)

    def take(self) -> list[float]:
        """Those since the last call, the latest MAX_RECENT of them. From any one thread: values may come meanwhile."""
        return [self._recent.popleft() for _ in range(len(self._recent))]


class Metrics:
    """Of one frontend. ``requests``: by route and status, those of unknown routes together."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.vanished = 0
        self.stalled = 0
        self.resumed = 0
        self.chunks = 0
        self.first_token = RecentHistogram(LATENCIES)
        self.between_tokens = Histogram(GAPS)
        self.duration = Histogram(LATENCIES)
        self.loop_lag = Histogram(LAGS)
        self.worst_lag = 0.0

    def answered(self, route: str, status: int) -> None:
        """A request of any route has its answer's head."""
        self.requests[route, status] = self.requests.get((route, status), 0) + 1

    def lagged(self, seconds: float) -> None:
        """The event loop came so much later to something than it was to."""
        self.loop_lag.observe(seconds)
        self.worst_lag = max(self.worst_lag, seconds)

    def families(self) -> list[Family]:
        """All of this frontend but ``by_route``; what an executor and its engine say is added by the caller."""
        return [
            _counter("prompt_tokens_total", "Prompt tokens of requests that were answered, as in their usage.", self.prompt_tokens),
            _counter("generation_tokens_total", "Generated tokens that were sent to clients, as in their usage.", self.generation_tokens),
            _counter("clients_vanished_total", "Requests whose client went away before their end.", self.vanished),
            _counter("clients_stalled_total", "Connections cut because what was sent to them was left unread.", self.stalled),
            _counter("streams_resumed_total", "Streams that a client came back to.", self.resumed),
            _counter("stream_chunks_total", "Writes of events to streams.", self.chunks),
            Family(
                "time_to_first_token_seconds", "histogram", "From the request to its first token, of streams.", self.first_token.samples()
            ),
            Family(
                "inter_token_seconds", "histogram", "Between two tokens of a stream, on average per event.", self.between_tokens.samples()
            ),
            Family("request_seconds", "histogram", "From a generating request to the end of its answer.", self.duration.samples()),
            Family("event_loop_lag_seconds", "histogram", "How late the event loop is.", self.loop_lag.samples()),
            _gauge("event_loop_worst_lag_seconds", "The latest that the event loop has been.", self.worst_lag)._replace(over="max"),
        ]


def by_route(requests: Mapping[tuple[str, int], int]) -> Family:
    """``Metrics.requests``, of which there may be hundreds: in a thread, of a copy."""
    samples = [("", (("route", route), ("status", str(status))), count) for (route, status), count in sorted(requests.items())]
    return Family("http_requests_total", "counter", "Answers by route and status.", samples)


def numbers(prefix: str, values: Mapping[str, float], counters: Iterable[str], help: str) -> list[Family]:
    """A metric for each value; those named in ``counters`` only rise."""
    rising = set(counters)
    made = []
    for name, value in sorted(values.items()):
        if name in rising:
            made.append(_counter(f"{prefix}{name}_total", help.format(name.replace("_", " ")), value))
        else:
            made.append(_gauge(f"{prefix}{name}", help.format(name.replace("_", " ")), value))
    return made


def _counter(name: str, help: str, value: float) -> Family:
    return Family(name, "counter", help, [("", (), value)])


def _gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, [("", (), value)])


def over_all(own: Sequence[Family], others: Sequence[Sequence[Family]]) -> list[Family]:
    """The families of several frontends as those of one."""
    made: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for families in (own, *others):
        for family in families:
            first, samples = made.setdefault(family.name, (family, {}))
            for suffix, labels, value in family.samples:
                place = (suffix, labels)
                before = samples.get(place)
                if before is None or first.over == "max":
                    samples[place] = value if before is None else max(value, before)
                elif first.over == "sum":
                    samples[place] = before + value
    return [
        family._replace(samples=[(suffix, labels, value) for (suffix, labels), value in samples.items()])
        for family, samples in made.values()
    ]


def exposition(families: Iterable[Family]) -> str:
    """Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        name = f"headrace_{family.name}"
        lines += (f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}")
        for suffix, labels, value in family.samples:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{name}{suffix}{{{inside}}} {_shown(value)}" if inside else f"{name}{suffix} {_shown(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _shown(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
