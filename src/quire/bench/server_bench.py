"""Measure a server over HTTP: identify it, warm it up, send a workload, compute the figures."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import msgspec

from quire.bench.arrivals import Process, arrivals, at_rate
from quire.bench.endpoints import Endpoint, RequestOptions, backend_of, endpoint
from quire.bench.load_generator import LoadRun
from quire.bench.request_metrics import Summary, summarize
from quire.bench.sender import HttpSender
from quire.bench.server_metrics import ServerWatch
from quire.bench.statistics import percentile
from quire.bench.timeline import RequestRecord
from quire.bench.workloads import Piece, Session, Speller, Turn, Workload
from quire.objectives import SLO
from quire.records import dataclass
from quire.types import QuireError
from quire.util.http_client import Client, ClientError, Clock, Target

CALIBRATION = (32, 160)  # words of the two prompts that show how the server counts
BUSY_CLIENT = 0.5  # of one core; above this the client itself may be the limit
CACHED_SHARE = 0.05  # of prompt tokens; more changes what a run measures
Progress = Callable[[RequestRecord], None]


class ServeError(QuireError):
    """The server cannot be measured; the message contains its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address and API of a server. `backend` "auto" is detected from GET /v1/models; `model` "" is the first listed."""

    target: Target
    backend: str = "auto"
    api: str = "chat"
    ask: RequestOptions = field(default_factory=RequestOptions)
    timeout: float | None = 600.0
    token_ids: range | None = None
    counter: Callable[[str], int] | None = None
    watch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Open loop at `rate` (or at the times of a trace) or closed loop with `clients`.

    Exactly one of `rate`, `trace` and `clients` is set. `duration` ends a closed loop early.
    """

    rate: float | None = None
    clients: int | None = None
    trace: bool = False
    process: Process = "poisson"
    burstiness: float = 1.0
    keep_pattern: bool = False  # `rate` stretches the pattern of the trace
    duration: float | None = None
    max_in_flight: int | None = None
    seed: int = 0

    def times(self, workload: Workload) -> list[float] | None:
        """The due time of each session; None for a closed loop. Raises ValueError for a trace without times."""
        if self.clients is not None:
            return None
        traced = workload.times()
        if self.trace or self.keep_pattern:
            if traced is None:
                raise ValueError("arrival: this workload has no times; set a rate or a concurrency")
            return traced if self.rate is None else at_rate(traced, self.rate)
        assert self.rate is not None
        return arrivals(self.process, self.rate, len(workload.sessions), self.seed, self.burstiness)

    def __str__(self) -> str:
        if self.clients is not None:
            return f"closed loop, {self.clients} clients"
        if self.trace or self.keep_pattern:
            if self.rate is None:
                return "open loop, times of the trace"
            return f"open loop, {self.rate:g} requests/s in the pattern of the trace"
        burst = f" (burstiness {self.burstiness:g})" if self.process == "gamma" else ""
        return f"open loop, {self.process}{burst}, {self.rate:g} requests/s"


@dataclass(slots=True)
class Outcome:
    """One measured run. Times of records are seconds from its start."""

    summary: Summary
    records: list[RequestRecord]
    overhead: dict[str, float]
    server_means: dict[str, float]
    server_counters: dict[str, float]
    server_samples: list[dict[str, float]]
    notes: list[str]


class ServerBench:
    """A server being measured. Call `open` first and `close` last, and `measure` any number of times in between."""

    def __init__(self, options: ServerOptions, clock: Clock = time.perf_counter) -> None:
        self.options, self.clock = options, clock
        self.client = Client(options.target, clock)
        self.backend, self.model = options.backend, options.ask.model
        self.speller = Speller(ids=options.token_ids)
        self.round_trip: float | None = None
        self._watcher = Client(options.target, clock)
        self._endpoint: Endpoint | None = None
        self._sender: HttpSender | None = None

    @property
    def sender(self) -> HttpSender:
        """The sender; available after `open`."""
        assert self._sender is not None
        return self._sender

    async def open(self) -> None:
        """Identify the server. Raises ServeError if it cannot be reached or has no model."""
        options = self.options
        try:
            backend, models = await self._discover()
        except ClientError as error:
            raise ServeError(f"{options.target.url}: {error}") from None
        if self.backend == "auto":
            self.backend = backend
        self._endpoint = endpoint(self.backend, options.api)
        if not self.model:
            if not models and self._endpoint.path.startswith(("/v1", "/api")):
                raise ServeError(f"{options.target.url}: GET /v1/models lists no model: set --model")
            self.model = models[0] if models else ""
        ask = dataclasses.replace(options.ask, model=self.model)
        self._sender = HttpSender(self.client, self._endpoint, ask, self.speller, options.counter)

    async def calibrate(self) -> str:
        """Learn how the server counts tokens, with two short requests that are not measured; return it in words."""
        if self.speller.ids is not None:
            return "prompts are token ids"
        counts = []
        for words in CALIBRATION:
            piece = Piece(f"calibrate {words} {random.random()}", words)
            record = await self._one(Turn((piece,), output_tokens=1))
            if record.failed or record.input_tokens is None:
                return "the server does not count prompt tokens: one word counts as one token"
            counts.append(record.input_tokens)
        self.speller.calibrate((CALIBRATION[0], counts[0]), (CALIBRATION[1], counts[1]))
        return f"{self.speller.words_per_token:.3f} words per token, {self.speller.overhead:.0f} extra tokens a prompt"

    async def warm_up(self, count: int, pace: Pace, workload: Workload) -> None:
        """Send `count` unmeasured requests like the first ones of the workload, with the concurrency of the run.

        Raises ServeError with the first reason if all of them fail.
        """
        if not count:
            return
        likes = [session.turns[0] for session in (workload.sessions * count)[:count]]
        sessions = [Session((_unlike(turn, i),)) for i, turn in enumerate(likes)]
        load = LoadRun(self.sender, self.clock, timeout=self.options.timeout)
        await load.closed(sessions, min(count, pace.clients or 4))
        if all(record.failed for record in load.records):
            reason = next(iter(self.sender.sample_errors.values()), load.records[0].error)
            raise ServeError(f"{self.options.target.url}: every warm-up request failed: {reason}")

    async def measure(self, workload: Workload, pace: Pace, slo: SLO | None, ended: Progress) -> Outcome:
        """Send the workload and compute the figures. Failures are counted, never raised."""
        times = pace.times(workload)
        sender, options = self.sender, self.options
        load = LoadRun(
            sender, self.clock, timeout=options.timeout, max_in_flight=pace.max_in_flight, ended=ended
        )
        watch = ServerWatch(self._watcher, load.now)
        if options.watch:
            await watch.start()
        sender.chunks = sender.words = 0
        sender.sample_errors.clear()
        cpu, wall, opened = time.process_time(), time.perf_counter(), self.client.opened
        if times is None:
            assert pace.clients is not None
            await load.closed(workload.sessions, pace.clients, pace.duration)
        else:
            await load.open(workload.sessions, times, pace.duration)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if options.watch:
            await watch.stop()
        records = sorted(load.records, key=lambda record: record.index)
        summary = summarize(records, slo)
        overhead = self._overhead(cpu, wall, load) | {"connections": float(self.client.opened - opened)}
        drained = max(r.closed for r in records) - max(r.scheduled for r in records)
        notes = _notes(summary, overhead, sender, drained, open_loop=times is not None)
        notes += _cache_notes(watch.counters())
        return Outcome(
            summary, records, overhead, watch.means(), watch.counters(), watch.samples, notes
        )  # fmt: skip

    async def close(self) -> None:
        """Hang up."""
        await self.client.close()
        await self._watcher.close()

    async def _discover(self) -> tuple[str, list[str]]:
        trips = []
        for _ in range(5):
            start = self.clock()
            status, body = await self._watcher.get("/v1/models")
            trips.append(self.clock() - start)
        self.round_trip = percentile(sorted(trips[1:]), 50.0)
        if status in {401, 403}:
            where = self.options.target.url
            raise ServeError(f"{where}: HTTP {status}: the server requires an API key (--api-key)")
        try:
            return backend_of(json.loads(body)) if status == 200 else ("openai", [])
        except ValueError:
            return "openai", []

    async def _one(self, turn: Turn) -> RequestRecord:
        load = LoadRun(self.sender, self.clock, timeout=self.options.timeout)
        await load.closed([Session((turn,))], 1)
        return load.records[0]

    def _overhead(self, cpu: float, wall: float, load: LoadRun) -> dict[str, float]:
        """The client's own cost: CPU as a share of one core and per chunk, and the lag of its loop (seconds)."""
        lags = sorted(load.lags) or [0.0]
        found = {
            "cpu_share": cpu / wall if wall else 0.0,
            "cpu_per_chunk": cpu / max(1, self.sender.chunks),
            "loop_lag_p50": percentile(lags, 50.0),
            "loop_lag_p99": percentile(lags, 99.0),
            "loop_lag_max": lags[-1],
            "words": float(self.sender.words),
        }
        if self.round_trip is not None:
            found["round_trip"] = self.round_trip
        return found


def _cache_notes(counters: Mapping[str, float]) -> list[str]:
    """Warn of prefix hits: a second run with the same seed sends the same prompts."""
    asked, hits = counters.get("prefix_queries", 0.0), counters.get("prefix_hits", 0.0)
    if hits <= CACHED_SHARE * asked:
        return []
    return [
        f"{hits / asked:.0%} of prompt tokens were in the server's prefix cache, from this or an earlier run: TTFT is "
        "that of repeated prompts. Another --seed sends other prompts"
    ]


def _unlike(turn: Turn, number: int) -> Turn:
    """A turn with the same lengths and other text, so that the measured one is not cached."""
    pieces = turn.pieces or (Piece(f"text {number}", 64),)
    return Turn(
        tuple(Piece(f"warm {piece.key}", piece.tokens) for piece in pieces), output_tokens=turn.output_tokens
    )


def _notes(
    summary: Summary, overhead: dict[str, float], sender: HttpSender, drained: float, *, open_loop: bool
) -> list[str]:
    notes = [*summary.notes]
    notes += [f"first failure of its kind: {message}" for message in list(sender.sample_errors.values())[:4]]
    if overhead["cpu_share"] > BUSY_CLIENT:
        notes.append(f"the client used {overhead['cpu_share']:.0%} of a core and may be the limit")
    e2el = summary.distributions.get("e2el")
    if (
        open_loop
        and e2el is not None
        and drained > 0.25 * summary.seconds
        and drained * 1e3 > 3 * e2el.points[50.0].value
    ):
        notes.append(
            f"the server needed {drained:.1f} s after the last arrival: the load exceeds its capacity"
        )
    if not sender.endpoint.eos and sender.ask.ignore_eos:
        notes.append("this API cannot ignore the end of text, so the model decides output lengths")
    return notes


# ---- the result file


def request_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Records as rows of a table. Times of chunks are microseconds since the previous one, in one string."""
    rows = []
    for record in records:
        row = msgspec.to_builtins(record)
        micros = [round(at * 1e6) for at in record.times]
        row["times"] = " ".join(str(b - a) for a, b in zip([0, *micros], micros, strict=False))
        row["counts"] = "" if not record.counts else " ".join(map(str, record.counts))
        for name in ("scheduled", "sent", "finished", "closed"):
            row[name] = None if row[name] is None else round(row[name], 6)
        rows.append(
            {name: value for name, value in row.items() if value not in ("", None, {}) or name == "times"}
        )
    return rows


def records_of(rows: Sequence[dict[str, Any]]) -> list[RequestRecord]:
    """Records from the table of a result file. Raises ServeError naming the row and field."""
    records = []
    for number, row in enumerate(rows):
        try:
            at, times = 0, []
            for word in str(row.get("times", "")).split():
                at += int(word)
                times.append(at / 1e6)
            counts = [int(word) for word in str(row.get("counts", "")).split()]
            record = msgspec.convert({**row, "times": times, "counts": counts}, RequestRecord)
        except (ValueError, msgspec.ValidationError) as error:
            raise ServeError(f"requests: row {number}: {error}") from None
        if record.counts and len(record.counts) != len(record.times):
            raise ServeError(f"requests: row {number}: {len(counts)} counts of {len(times)} chunks")
        records.append(record)
    return records
