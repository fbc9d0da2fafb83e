"""When requests are sent: all at once, or with gaps from a gamma distribution, as ``vllm bench serve`` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.random import Generator


def arrival_times(count: int, rate: float | None, burstiness: float, rng: Generator) -> list[float]:
    """Seconds after the beginning of the run, of each of ``count`` requests, not falling.

    The gaps are drawn from a gamma distribution of shape ``burstiness`` and mean ``1 / rate`` (scale ``1 / (rate * burstiness)``): 1 is a
    Poisson process, less is burstier, more is more even (``get_request`` in ``vllm/benchmarks/serve.py``). As there, they are then scaled
    so that the last request arrives after ``count / rate`` seconds: the rate of a short run is the one asked for and not a draw.

    Args:
        rate: requests a second, above 0; None: all at once.
        burstiness: above 0.
    """
    if rate is None:
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    times = gaps.cumsum()
    # With a burstiness so small that every gap is 0 there is nothing to scale: all come at once.
    if count and times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
