"""The arithmetic of the benchmarks, and the table of `bench api`."""

import pytest

from acsinfra.management.commands.bench import API_FIGURES
from tests.benchmarks.api import FULL, MEASURES, QUICK
from tests.benchmarks.figures import Outcome, median_ratio, quantiles, steady
from tests.benchmarks.report import rows_of, table

SIDE = {"p50_ms": 5.0, "p99_ms": 9.0}
FIGURES = {
    "machine": {"cpus": 2, "load_before": 0.1},
    "model": {"source": "tiny", "max_num_seqs": 64, "quick": True},
    "one_token": {
        "requests": 500,
        "api": SIDE,
        "engine": SIDE,
        "added_p50_ms": 3.1,
        "added_p99_ms": 4.5,
        "added_over_engine": 0.62,
    },
    "plain_way": {
        "requests": 500,
        **dict.fromkeys(("api", "engine", "plain_way"), SIDE),
        "added_p50_ms": 3.1,
        "added_p99_ms": 4.5,
        "plain_way_added_p50_ms": 2.9,
        "plain_way_added_p99_ms": 4.1,
    },
    "levels": [
        {
            "clients": 16,
            "answer_tokens": 32,
            "requests": 960,
            "api": {"per_s": 100.0, **SIDE},
            "engine": {"per_s": 108.0, **SIDE},
            "added_p50_ms": 1.0,
            "added_p99_ms": 2.0,
            "throughput_ratio": 0.926,
            "cpu_ms": {"api": 5.0, "engine": 95.0},
            "engine_cpu_share": 0.95,
        }
    ],
    "completions": {"clients": 64, "per_s": 600.0, "engine_per_s": 900.0, "cpu_ms": {"api": 1.5, "client": 0.03}},
    "waiting": {
        "asked": 2000,
        "at_once": 2000,
        "answered": 2000,
        "rss_before_mib": 110.0,
        "rss_peak_mib": 180.0,
        "threads_peak": 12,
    },
    "jobs": {
        "submits_per_s": 320.0,
        "submit_p50_ms": 40.0,
        "submit_p99_ms": 80.0,
        "cpu_ms": {"api": 2.0},
        "rows": 1_002_000,
        "waiting": 100_000,
        "full_submits_per_s": 310.0,
        "full_submit_p50_ms": 41.0,
        "full_submit_p99_ms": 82.0,
        "claim_p50_ms": 5.5,
        "claim_p99_ms": 9.0,
        "take_p50_ms": 8.0,
        "take_p99_ms": 12.0,
    },
    "holds": {
        "rounds": [
            {"via": "async", "at_once": 64, "budgets": 1, "holds_per_s": 2000.0, "p50_ms": 30.0, "p99_ms": 60.0}
        ],
        "imbalances": 0,
    },
    "seconds": {},
}


def _outcome(ended_at: list[float], latencies: list[float] | None = None) -> Outcome:
    return Outcome(ended_at=ended_at, latencies=latencies or [1.0] * len(ended_at), cpu_seconds=0.0)


def test_percentiles_are_interpolated_milliseconds() -> None:
    found = quantiles([number / 1000 for number in range(101)])
    assert found.p50_ms == pytest.approx(50)
    assert found.p99_ms == pytest.approx(99)
    assert quantiles([0.002]).p99_ms == pytest.approx(2)


def test_the_beginning_and_the_end_of_a_load_do_not_count() -> None:
    # Two clients, an answer of each a second; the first pair is slow, the last answer late.
    outcome = _outcome([9.0, 10.0, 10.5, 11.0, 11.5, 12.0, 30.0, 40.0], [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 20.0, 20.0])
    rate, latencies = steady(outcome, clients=2)
    assert rate == pytest.approx(4 / 2.0)
    assert latencies == [1.0] * 4


def test_waves_of_answers_are_counted_whole() -> None:
    # All of four clients' answers come together, every second.
    ends = [float(wave) for wave in range(1, 6) for _ in range(4)]
    assert steady(_outcome(ends), clients=4)[0] == pytest.approx(4.0)


def test_a_load_without_a_steady_part_is_refused() -> None:
    with pytest.raises(ValueError, match="no steady part"):
        steady(_outcome([1.0, 2.0]), clients=1)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was ten times slower in the last round, for both.
    assert median_ratio([100.0, 90.0, 9.0], [100.0, 100.0, 10.0]) == pytest.approx(0.9)


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_load_of_the_plans_has_a_steady_part(plan: object) -> None:
    assert isinstance(plan, type(FULL))
    assert all(plan.answers(clients) >= 3 * clients for clients in plan.levels)
    assert plan.one_token_requests % plan.one_token_block == 0
    assert FULL.one_token_requests == 500
    assert FULL.ended_jobs + FULL.waiting_jobs >= 1_000_000
    assert FULL.waiting_jobs == 100_000


def test_the_table_holds_each_figure_against_its_goal() -> None:
    found = {row.name: row.is_met for row in rows_of(FIGURES) if row.goal}
    assert found == {
        "one token, one client, added": True,
        "32 tokens, 16 clients, throughput over the engine's": False,
        "requests waiting in one API process": True,
        "Job submits, empty table": True,
        "Job submits, 1,002,000 rows": True,
        "claim among 100,000 waiting": False,
    }
    figures = {row.name: row.figure for row in rows_of(FIGURES)}
    assert figures["one token, one client, added by the API"] == "p50 3.10, p99 4.50 ms"
    assert figures["one token, one client, added by a plain way"] == "p50 2.90, p99 4.10 ms"
    lines = table(FIGURES).splitlines()
    assert len(lines) == 1 + len(list(rows_of(FIGURES)))
    assert sum(line.endswith("MISSED") for line in lines) == 2
    assert sum(line.endswith(" met") for line in lines) == 4


def test_the_command_knows_every_figure() -> None:
    assert tuple(MEASURES) == API_FIGURES
