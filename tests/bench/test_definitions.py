"""Every figure on timelines made by hand."""

from __future__ import annotations

import math

import pytest

from quire.bench.goodput import PRESETS, compute_goodput, goodput, misses
from quire.bench.perception import perceived
from quire.bench.request_metrics import compute_metrics, mean_itl, summarize
from quire.bench.serve_result import latency_table
from quire.bench.statistics import PERCENTILES
from quire.bench.timeline import RequestRecord, gaps, request_metrics, token_times
from quire.objectives import SLO, parse_slo


def record(times: list[float], *, scheduled: float = 0.0, **fields: object) -> RequestRecord:
    """A success whose chunks came at `times`, with one token each by default."""
    known = {
        "output_tokens": len(times),
        "output_source": "server",
        "finished": times[-1],
        "closed": times[-1],
    }
    return RequestRecord(
        **{"index": 0, "scheduled": scheduled, "sent": scheduled, "times": times, **known, **fields}
    )


def failure(at: float = 0.0, error: str = "HTTP 429", closed: float = 1.0) -> RequestRecord:
    return RequestRecord(index=0, scheduled=at, error=error, closed=closed)


def test_one_request_by_definition() -> None:
    found = request_metrics(record([1.3, 1.4, 1.6, 1.7], scheduled=1.0))
    assert found.ttft == pytest.approx(0.3)
    assert found.e2e == pytest.approx(0.7)
    assert found.itl == pytest.approx([0.1, 0.2, 0.1])
    assert found.tpot == pytest.approx((0.7 - 0.3) / 3) == pytest.approx(sum(found.itl) / 3)
    assert found.tokens_per_second == pytest.approx(7.5)


def test_the_clock_starts_when_the_request_was_due() -> None:
    late = request_metrics(record([1.3, 1.4], scheduled=1.0, sent=1.25))
    assert late.ttft == pytest.approx(0.3)  # not 0.05: the wait for a free place is the request's
    assert late.send_lag == pytest.approx(0.25)


def test_a_single_token_has_no_tpot() -> None:
    found = request_metrics(record([0.2]))
    assert (found.ttft, found.tpot, found.tokens_per_second, found.itl) == (0.2, None, None, [])


def test_tokens_in_one_chunk_came_together() -> None:
    one = record([0.1, 0.2, 0.4], counts=[1, 3, 2], output_tokens=6)
    assert token_times(one) == [0.1, 0.2, 0.2, 0.2, 0.4, 0.4]
    found = request_metrics(one)
    assert found.itl == pytest.approx([0.1, 0, 0, 0.2, 0])
    assert found.icl == pytest.approx([0.1, 0.2])
    assert found.tpot == pytest.approx(0.3 / 5) == pytest.approx(sum(found.itl) / 5)


def test_chunks_of_unknown_size_give_their_own_gaps_and_say_so() -> None:
    found = request_metrics(record([0.1, 0.2, 0.4], output_tokens=6))
    assert not found.exact
    assert found.itl == found.icl == pytest.approx([0.1, 0.2])
    assert found.tpot == pytest.approx(0.3 / 5)  # the server's count, whatever the chunks
    notes = summarize([record([0.1, 0.2, 0.4], output_tokens=6)]).notes
    assert any("between chunks" in note for note in notes)
    assert any("2.00 tokens per chunk" in note for note in notes)


def test_an_end_mark_without_text_came_with_the_finish_reason() -> None:
    found = request_metrics(record([0.1, 0.2], output_tokens=3, finished=0.35))
    assert found.itl == pytest.approx([0.1, 0.15])
    assert found.tpot == pytest.approx(0.125)


def test_a_failure_has_no_latencies() -> None:
    with pytest.raises(ValueError, match="HTTP 429"):
        request_metrics(failure())


def test_rates_count_from_the_first_send_to_the_last_answer() -> None:
    runs = [
        record([1.5, 2.0], scheduled=1.0, input_tokens=10),
        record([4.0, 6.0], scheduled=3.0, input_tokens=30),
    ]
    found = summarize([*runs, failure(2.0, closed=2.5), record([9.0], scheduled=0.0, warm_up=True)])
    assert found.seconds == pytest.approx(5.0)  # 1.0 … 6.0; the warm-up is not there
    figures = {name: metric.value for name, metric in found.metrics().items()}
    assert figures["request_rate"] == pytest.approx(2 / 5)
    assert figures["input_token_rate"] == pytest.approx(8)
    assert figures["output_token_rate"] == pytest.approx(4 / 5)
    assert figures["failure_rate"] == pytest.approx(1 / 3)
    assert figures["concurrency"] == pytest.approx((1.0 + 3.0 + 0.5) / 5)
    assert figures["offered_rate"] == pytest.approx(1.0)
    assert found.failures == {"HTTP 429": 1}
    assert any("1 of 3 requests failed" in text for text in found.warnings())


@pytest.mark.parametrize(
    ("count", "last"), [(9, 50.0), (10, 90.0), (20, 95.0), (99, 95.0), (100, 99.0), (1000, 99.9)]
)
def test_percentiles_that_the_samples_cannot_carry_are_left_out(count: int, last: float) -> None:
    found = summarize([record([0.001 * i]) for i in range(1, count + 1)]).distributions["ttft"]
    assert max(found.points) == last
    for point in found.points.values():
        assert (point.low or 0) <= point.value <= (point.high or math.inf)
    row = found.row()
    assert all((row[f"p{percent:g}"] is None) == (percent > last) for percent in PERCENTILES)
    assert "–" in latency_table([row])[1]


def test_failures_are_infinitely_late_where_they_count() -> None:
    good = [record([0.01 * i]) for i in range(1, 100)]
    found = summarize([*good, *[failure() for _ in range(11)]]).distributions["ttft"]
    assert found.count == 99
    assert found.points[50.0].value == pytest.approx(500)
    assert found.with_failures[50.0] == pytest.approx(555)
    assert math.isinf(found.with_failures[99.0])
    assert math.isfinite(found.points[95.0].value)
    assert found.row()["p99_with_failures"] is None


def test_a_long_tail_is_reported() -> None:
    fast = [record([0.1, 0.11]) for _ in range(97)]
    assert not summarize(fast).warnings()
    slow = summarize([*fast, *(record([3.0, 3.01]) for _ in range(3))])
    assert any("p99 of TTFT" in text for text in slow.warnings())


def test_goodput_needs_every_objective() -> None:
    slo = parse_slo(["ttft:500", "tpot:50,e2el:2000"])
    cases = {
        (0.5, 0.55): [],  # a bound that is reached is met
        (0.501, 0.551): ["ttft"],
        (0.1, 0.16): ["tpot"],
        (2.1, 2.12): ["ttft", "e2el"],
    }
    metrics = [request_metrics(record(list(times))) for times in cases]
    assert [misses(slo, one) for one in metrics] == list(cases.values())
    found = goodput([*metrics, None], slo, 10.0)
    assert (found.total, found.passed, found.failed) == (5, 1, 1)
    assert found.rate == pytest.approx(0.1)
    assert found.misses == {"ttft": 3, "tpot": 2, "e2el": 2}  # the failure missed all three
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.1 < found.high


def test_one_token_is_not_bound_by_tpot() -> None:
    assert misses(SLO(tpot=1), request_metrics(record([0.2]))) == []


def test_itl_objective_is_the_requests_99th_percentile() -> None:
    steady = [0.1 + 0.01 * i for i in range(201)]
    assert misses(SLO(itl=20), request_metrics(record(steady))) == []
    stalled = steady[:50] + [at + 5 for at in steady[50:]]
    assert misses(SLO(itl=20), request_metrics(record(stalled))) == []  # one gap of two hundred
    often = [at + 5 * (i // 40) for i, at in enumerate(steady)]
    assert misses(SLO(itl=20), request_metrics(record(often))) == ["itl"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ttft"], "does not have the form ttft:500"),
        (["ttft:x"], "'x' is not a number"),
        (["speed:3"], "known objectives: ttft, tpot, itl, e2el"),
        (["ttft:5", "ttft:6"], "twice"),
        (["ttft:-5"], "not a positive"),
        (["ttft:nan"], "not a positive"),
        ([], "no objective"),
    ],
)
def test_objectives_that_make_no_sense(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_slo(words)


def test_presets_match_the_documents() -> None:
    assert {name: slo.ttft for name, (slo, _) in PRESETS.items()} == {
        "chat": 500, "code": 200, "voice": 150, "batch": 2000, "agent": 1000,
    }  # fmt: skip


def test_compute_metrics_is_the_documents_listing() -> None:
    times = [200 + i * 2000 / 49 for i in range(50)]
    assert compute_metrics(200, times) == {
        "ttft_ms": 200, "e2el_ms": 2200.0, "tpot_ms": 40.82, "tokens_per_sec": 24.5, "mean_itl_ms": 40.82,
        "p50_itl_ms": 40.82, "p99_itl_ms": 40.82,
    }  # fmt: skip
    single = compute_metrics(200, [200])
    assert single["tpot_ms"] is None
    assert single["e2el_ms"] == 200
    for bad in ([], [150, 300], [200, 150]):
        with pytest.raises(ValueError, match="token_timestamps_ms"):
            compute_metrics(200, bad)


def test_compute_goodput_is_the_documents_listing() -> None:
    fast, slow = {"ttft_ms": 200, "tpot_ms": 50}, {"ttft_ms": 900, "tpot_ms": 150}
    found = compute_goodput([fast] * 90 + [slow] * 10, slo_ttft_ms=500, slo_tpot_ms=100)
    assert found == {"total_rps": 100, "goodput_rps": 90, "goodput_rate": 0.9, "slo_violations": 10}
    assert compute_goodput([fast] * 90 + [slow] * 10, 500, 100, seconds=8)["goodput_rps"] == 11.25


def test_long_requests_weigh_more_in_the_mean_gap() -> None:
    assert round(mean_itl([(10, 30), (1000, 50)]), 2) == 49.82  # n - 1 gaps, not n
    assert gaps([1, 4, 9]) == [3, 5]


def test_of_very_many_gaps_those_of_some_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other figures are those of all requests."""
    records = [
        RequestRecord(
            index=i, scheduled=i, times=[i + 0.1 * (j + 1) for j in range(5)], finished=i + 0.5, closed=i + 0.5,
            output_tokens=5, output_source="server", input_source="server",
        )
        for i in range(200)
    ]  # fmt: skip
    every = summarize(records)
    assert every.notes == []
    monkeypatch.setattr("quire.bench.request_metrics._MOST_GAPS", 100)
    some = summarize(records)
    assert some.notes == ["ITL and ICL are those of 20 requests, drawn by chance"]
    assert some.distributions["itl"].count == 20 * 4
    assert some.distributions["itl"].mean == pytest.approx(every.distributions["itl"].mean)
    for name in ("ttft", "tpot", "e2el"):
        assert some.distributions[name] == every.distributions[name]
    slo = SLO(itl=50.0)
    assert summarize(records, slo).notes == [], "each request is judged by its own gaps"


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"ttft": 80, "tpot": 19, "itl": 30}, ["at once", "for speech", "hardly ever"]),
        ({"ttft": 500, "tpot": 40, "itl": 100}, ["without a noticed", "instant typing", "hardly ever"]),
        (
            {"ttft": 501, "tpot": 66, "itl": 101},
            ["pause that is", "is a stream", "it begins after", "stutters"],
        ),
        ({"tpot": 67}, ["word by word (TPOT p50 67 ms)"]),
        ({"tpot": 160}, ["slower than a person reads"]),
        ({"ttft": None}, []),
    ],
)
def test_what_a_reader_notices(figures: dict[str, float | None], says: list[str]) -> None:
    rows = [{"name": name, "p50": value, "p99": value} for name, value in figures.items()]
    found = perceived(rows)
    assert len(found) == bool(says)
    assert all(words in found[0] for words in says)
