"""One request as its client saw it, and its figures.

All times are seconds since the start of the run. `scheduled` is the time at which the request was due, not the time at
which it was sent, so delays of client and server count in the latencies (no coordinated omission).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

CountSource = Literal["server", "tokenizer", "chunks", "unknown"]


class RequestRecord(msgspec.Struct):
    """One request.

    `times[i]` is the arrival of chunk i with text, `counts[i]` its tokens; `counts` is empty if they are unknown.
    `finished` is the arrival of the last token: the last chunk with text or the finish reason, whichever came later;
    None for a failure. `output_tokens` includes an end-of-sequence token without text, as servers count it. `error` is
    empty for a success, else one line.
    """

    index: int
    scheduled: float
    sent: float | None = None
    times: list[float] = []
    counts: list[int] = []
    finished: float | None = None
    closed: float = 0.0
    error: str = ""
    status: int = 0
    streamed: bool = True
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    input_source: CountSource = "unknown"
    output_source: CountSource = "unknown"
    asked_tokens: int | None = None
    finish_reason: str = ""
    warm_up: bool = False
    session: int = -1
    server: dict[str, float] = {}  # the server's split of the request's time, seconds by phase

    @property
    def failed(self) -> bool:
        return bool(self.error)


class RequestMetrics(msgspec.Struct, frozen=True):
    """Figures of one successful request, in seconds; None if undefined.

    `itl` are the gaps between tokens: k tokens in one chunk are one gap and k-1 gaps of 0. `exact` is false if the
    tokens per chunk are unknown; then the gaps are those between chunks, as always in `icl`.
    """

    ttft: float | None
    tpot: float | None
    e2e: float
    itl: list[float]
    icl: list[float]
    exact: bool
    send_lag: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of this stream after its first token."""
        return 1.0 / self.tpot if self.tpot else None


def gaps(times: Sequence[float]) -> list[float]:
    """Return the differences between neighbouring times."""
    return [after - before for before, after in itertools.pairwise(times)]


def token_times(record: RequestRecord) -> list[float] | None:
    """Return the arrival of each output token; None if the tokens per chunk are unknown."""
    if not _knows_tokens(record):
        return None
    if record.counts:
        times = [at for at, count in zip(record.times, record.counts, strict=True) for _ in range(count)]
    else:
        times = list(record.times)
    if record.finished is not None and record.output_tokens == len(times) + 1:
        times.append(record.finished)
    return times


def _knows_tokens(record: RequestRecord) -> bool:
    """Whether it is known how many tokens came when."""
    total, found = record.output_tokens, sum(record.counts) if record.counts else len(record.times)
    if total is None or found == total:
        return bool(record.counts) or total is not None or record.output_source == "chunks"
    # An end-of-sequence token has no text: it arrived with the finish reason.
    return found == total - 1 and record.finished is not None


def request_metrics(record: RequestRecord, *, with_gaps: bool = True) -> RequestMetrics:
    """Compute the figures of a successful request; without gaps `itl` and `icl` are empty. Raises ValueError for a
    failed one."""
    if record.failed or record.finished is None:
        raise ValueError(
            f"request {record.index}: {record.error or 'not finished'}: a failed request has no latencies"
        )
    start, end = record.scheduled, record.finished
    first = record.times[0] if record.times and record.streamed else None
    exact = record.streamed and _knows_tokens(record)
    count = record.output_tokens if record.output_tokens is not None else len(record.times)
    tpot = None
    if first is not None and count > 1:
        tpot = (end - first) / (count - 1)
    icl = gaps(record.times) if record.streamed and with_gaps else []
    times = token_times(record) if exact and with_gaps else None
    itl = icl if times is None or times == record.times else gaps(times)
    return RequestMetrics(
        ttft=None if first is None else first - start,
        tpot=tpot,
        e2e=end - start,
        itl=itl,
        icl=icl,
        exact=exact,
        send_lag=max(0.0, (start if record.sent is None else record.sent) - start),
    )


def latencies(good: Sequence[RequestMetrics]) -> dict[str, list[float]]:
    """Figures with one value per request, in seconds (the rate of a stream in tokens per second)."""
    return {
        "ttft": [one.ttft for one in good if one.ttft is not None],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "e2el": [one.e2e for one in good],
        "stream_rate": [rate for one in good if (rate := one.tokens_per_second) is not None],
        "send_lag": [one.send_lag for one in good],
    }


def gap_clusters(good: Sequence[RequestMetrics]) -> dict[str, list[list[float]]]:
    """Gaps of tokens and chunks in seconds, those of one request together."""
    return {"itl": [one.itl for one in good if one.itl], "icl": [one.icl for one in good if one.icl]}
