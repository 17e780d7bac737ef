"""The figures of `bench api` as a table, with the design's goals beside them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A figure, and the goal that it is held against, if there is one."""

    name: str
    figure: str
    goal: str = ""
    is_met: bool | None = None


def table(figures: dict[str, Any]) -> str:
    """All rows, in columns."""
    rows = list(rows_of(figures))
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("name", "figure", "goal")]
    marks = {None: "", True: "met", False: "MISSED"}
    lines = [
        f"{row.name:<{widths[0]}}  {row.figure:<{widths[1]}}  {row.goal:<{widths[2]}}  {marks[row.is_met]}".rstrip()
        for row in rows
    ]
    machine = figures["machine"]
    head = f"model {figures['model']['source']}, {machine['cpus']} CPUs, load before the start {machine['load_before']}"
    return "\n".join([head, *lines])


def rows_of(figures: dict[str, Any]) -> Iterator[Row]:
    """The rows of what was measured, from top to bottom."""
    if "one_token" in figures:
        yield from _latency(figures["one_token"])
    if "plain_way" in figures:
        yield from _plain_way(figures["plain_way"])
    for level in figures.get("levels", ()):
        yield from _level(level)
    if "completions" in figures:
        yield from _completions(figures["completions"])
    if "waiting" in figures:
        yield _waiting(figures["waiting"])
    if "jobs" in figures:
        yield from _jobs(figures["jobs"])
    for of_round in figures.get("holds", {"rounds": ()})["rounds"]:
        where = f"{of_round['at_once']} at once, {of_round['budgets']} Budgets, {of_round['via']}"
        yield Row(f"Holds taken and settled, {where}", f"{of_round['holds_per_s']:.0f} a second")


def _latency(found: dict[str, Any]) -> Iterator[Row]:
    for side, name in (("api", "through the API"), ("engine", "engine directly")):
        yield Row(f"one token, one client, {name}", _p50_p99(found[side]))
    added = f"p50 {found['added_p50_ms']:.2f}, p99 {found['added_p99_ms']:.2f} ms"
    yield Row("one token, one client, added", added, "p50 under 4 ms", found["added_p50_ms"] < 4)
    yield Row("one token, one client, added over the engine's p50", f"{found['added_over_engine']:.2f}")


def _plain_way(found: dict[str, Any]) -> Iterator[Row]:
    for prefix, name in (("", "the API"), ("plain_way_", "a plain way")):
        added = f"p50 {found[f'{prefix}added_p50_ms']:.2f}, p99 {found[f'{prefix}added_p99_ms']:.2f} ms"
        yield Row(f"one token, one client, added by {name}", added)


def _level(level: dict[str, Any]) -> Iterator[Row]:
    clients = level["clients"]
    what = f"{level['answer_tokens']} tokens, {clients} client{'' if clients == 1 else 's'}"
    for side, name in (("api", "API"), ("engine", "engine")):
        yield Row(f"{what}, {name}", f"{level[side]['per_s']:.1f} a second, {_p50_p99(level[side])}")
    yield Row(f"{what}, added", f"p50 {level['added_p50_ms']:.1f}, p99 {level['added_p99_ms']:.1f} ms")
    ratio = level["throughput_ratio"]
    goal = ("at least 95 % (SmolLM2)", ratio >= 0.95) if clients > 1 else ("", None)
    yield Row(f"{what}, throughput over the engine's", f"{ratio:.1%}", *goal)
    yield Row(f"{what}, CPU of one", f"{_cpu(level['cpu_ms'])}; the engine's share {level['engine_cpu_share']:.1%}")


def _completions(found: dict[str, Any]) -> Iterator[Row]:
    rates = f"{found['per_s']:.0f} a second (engine {found['engine_per_s']:.0f})"
    yield Row(f"Completions of one token, {found['clients']} clients", rates)
    yield Row("CPU of one", _cpu(found["cpu_ms"]))


def _waiting(found: dict[str, Any]) -> Row:
    figure = (
        f"{found['at_once']} at once, {found['answered']} answered, "
        f"{found['rss_before_mib']:.0f} → {found['rss_peak_mib']:.0f} MiB, {found['threads_peak']} threads"
    )
    is_met = found["at_once"] >= found["asked"] <= found["answered"] and found["rss_peak_mib"] < 400
    return Row("requests waiting in one API process", figure, f"{found['asked']:,}, under 400 MiB", is_met)


def _jobs(found: dict[str, Any]) -> Iterator[Row]:
    empty, full = found["submits_per_s"], found["full_submits_per_s"]
    yield Row(
        "Job submits, empty table",
        f"{empty:.0f} a second, p50 {found['submit_p50_ms']:.1f}, p99 {found['submit_p99_ms']:.1f} ms",
        "300 a second",
        empty >= 300,
    )
    yield Row("CPU of one", _cpu(found["cpu_ms"]))
    yield Row(
        f"Job submits, {found['rows']:,} rows",
        f"{full:.0f} a second, p50 {found['full_submit_p50_ms']:.1f}, p99 {found['full_submit_p99_ms']:.1f} ms",
        "as on the empty table",
        full >= 0.9 * empty,
    )
    yield Row(
        f"claim among {found['waiting']:,} waiting",
        f"p50 {found['claim_p50_ms']:.2f}, p99 {found['claim_p99_ms']:.2f} ms",
        "under 5 ms",
        found["claim_p50_ms"] < 5,
    )
    yield Row("claim, Hold and work", f"p50 {found['take_p50_ms']:.2f}, p99 {found['take_p99_ms']:.2f} ms")


def _p50_p99(side: dict[str, float]) -> str:
    return f"p50 {side['p50_ms']:.2f}, p99 {side['p99_ms']:.2f} ms"


def _cpu(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in parts.items()) + " ms"
