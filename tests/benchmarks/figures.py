"""What the benchmarks make of their measurements: rates, percentiles, and the steady part of a load."""

import statistics
from collections.abc import Sequence

import msgspec


class Outcome(msgspec.Struct, kw_only=True):
    """What a load measured, in the order in which the answers came.

    `ended_at` are seconds since the load began, `latencies` the seconds that each answer took; `cpu_seconds` is what
    the process that made the load used of the CPU.
    """

    ended_at: list[float]
    latencies: list[float]
    cpu_seconds: float


class Quantiles(msgspec.Struct, frozen=True):
    """The median and the 99th percentile, in milliseconds."""

    p50_ms: float
    p99_ms: float


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """The percentiles of `seconds`, interpolated; at least one is needed."""
    if len(seconds) == 1:
        return Quantiles(seconds[0] * 1000, seconds[0] * 1000)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Quantiles(cuts[49] * 1000, cuts[98] * 1000)


def steady(outcome: Outcome, clients: int) -> tuple[float, list[float]]:
    """The answers a second and the latencies of the part in which all `clients` were at work.

    The first and the last `clients` answers are left out: a load begins with all requests at once, and ends with
    fewer and fewer. Raises ValueError for a load of less than three answers a client.
    """
    count = len(outcome.ended_at)
    if count < 3 * clients:
        raise ValueError(f"{count} answers to {clients} clients have no steady part")
    seconds = outcome.ended_at[count - clients - 1] - outcome.ended_at[clients - 1]
    return (count - 2 * clients) / seconds, outcome.latencies[clients : count - clients]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ours / theirs, round by round: a slow minute of the machine slows both of its round."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
