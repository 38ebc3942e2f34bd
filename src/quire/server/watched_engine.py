"""What an engine did in the last second, for the control room: at most one look a second, however many watch.

Counters become rates here, and rows of the log become lanes and finished requests, so that a page computes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from quire.engine.api import Engine, EngineState, EngineStats, EngineUnavailableError
from quire.engine.view import EngineView, ViewedBranch, ViewedSequence
from quire.server.metrics import ServerMetrics
from quire.steplog import log_rows as rows
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import SAMPLE_BITS

SECONDS = 1.0
_FRESH = 0.9 * SECONDS
_BRANCHES = 200
_FINISHED = 512
_KNOWN = 4096
_SPANS = 600
_SPAN_NS = 250_000_000  # rows of a lane that follow each other are one span up to this length
_GAP_NS = 50_000_000


class CacheCounts(msgspec.Struct):
    """Blocks of the KV cache, the tokens of one, and places in held blocks that are empty; `hit_share` of the prompt
    tokens of the last second."""

    blocks: int
    used: int
    cached: int
    pinned: int
    block_tokens: int
    empty_tokens: int
    hit_share: float | None


class DraftCounts(msgspec.Struct):
    """Drafts of the last second, and the seconds that speculation has won since the start, as estimated."""

    drafted: int
    accepted: int
    seconds_won: float


class ClassCounts(msgspec.Struct):
    """A class of service: its levels, requests a second that kept them in the last minute, and counts of the last
    second."""

    name: str
    levels: dict[str, float]
    goodput: float
    kept: int
    missed: int


class AdapterCounts(msgspec.Struct):
    """An adapter, and how often it came into the pool and had to leave it since the start."""

    name: str
    rank: int
    loads: int
    evictions: int


class EngineOverview(msgspec.Struct):
    """What the engine did in the last `seconds`, 0 before there was such a time. Rates are per second, times in
    milliseconds: of an average step by its parts, and of requests on average. `busy` is the share of time in steps."""

    time: float
    seconds: float
    model: str
    state: str
    running: int
    waiting: int
    waiting_tokens: int
    rates: dict[str, float]
    busy: float
    step_ms: dict[str, float]
    request_ms: dict[str, float]
    preemptions: int
    limits: dict[str, int]
    cache: CacheCounts
    drafts: DraftCounts
    classes: list[ClassCounts]
    adapters: list[AdapterCounts]
    degraded: list[str]
    memory: dict[str, int]
    resident: int


class LaneSpan(msgspec.Struct, array_like=True):
    """Steps of a sequence that follow each other: the request, the sample, milliseconds before now at which they began
    and ended, what they did (prefill or decode), and their tokens."""

    request_id: str
    sample: int
    began: float
    ended: float
    kind: str
    tokens: int


class EngineDetail(msgspec.Struct):
    """What an engine holds, for those who may see the requests of all: see engine.api.EngineView. `blocks` has two
    numbers for each run of equal ones: what they are, and how many. `other_branches` are the smaller branches, which
    are left out; `spans` are steps of the last second."""

    stride: int
    blocks: list[int]
    sequences: tuple[ViewedSequence, ...]
    branches: list[ViewedBranch]
    other_branches: int
    spans: list[LaneSpan]


class FinishedRequest(msgspec.Struct):
    """A request whose answer is written: when, in seconds since 1970, and its milliseconds from first byte to last."""

    id: str
    ended: float
    ms: float


_encode = msgspec.json.Encoder().encode


class WatchedEngine:
    """The latest look at an engine, shared by all that watch."""

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._looking = asyncio.Lock()
        self._looked = -SECONDS
        self._counts: _Counts | None = None
        self._rows = 0  # of the log that were read
        self._arrived: OrderedDict[int, tuple[str, int]] = OrderedDict()  # id and prompt tokens by number
        self.finished: OrderedDict[str, FinishedRequest] = OrderedDict()
        self.overview, self.detail = b"{}", b"null"
        self.own: dict[
            str | None, tuple[float, bytes]
        ] = {}  # by account: the time of the look, and what it sees

    async def look(self) -> float:
        """Have `overview`, `detail` and `finished` at most a second old; returns the time of the look."""
        async with self._looking:
            now = time.monotonic()
            if now - self._looked >= _FRESH:
                view = await self._view()
                log = await asyncio.to_thread(read_rows, view.log) if view.log else None
                self._looked = time.monotonic()
                self.own.clear()
                spans = self._read([] if log is None else log.rows)
                self._forget(view.oldest)
                self.overview = _encode(self._overview())
                self.detail = _encode(_detail(view, spans))
            return self._looked

    async def _view(self) -> EngineView:
        if self._engine.state is not EngineState.READY:
            return EngineView()
        try:
            view = await self._engine.view(self._rows)
        except EngineUnavailableError:
            return EngineView()
        if view.rows < self._rows:  # another engine, after a restart
            self._arrived.clear()
        self._rows = view.rows
        return view

    def _read(self, log: Sequence[rows.AnyRow]) -> list[LaneSpan]:
        """Take in the rows of the log since the last look; returns the steps of the last second."""
        wall = time.time() - time.monotonic()
        lanes = _Lanes(self._arrived, time.monotonic_ns())
        for row in log:
            if isinstance(row, rows.Step):
                lanes.add(row)
            elif isinstance(row, rows.Arrived):
                self._arrived[row.number] = row.request_id, row.prompt_tokens
                if len(self._arrived) > _KNOWN:
                    self._arrived.popitem(last=False)
            elif isinstance(row, rows.ServerMarks):
                ended = FinishedRequest(
                    row.request_id, round(row.written + wall, 3), round(1e3 * (row.written - row.begun), 3)
                )
                self.finished[row.request_id] = ended
                if len(self.finished) > _FINISHED:
                    self.finished.popitem(last=False)
        return lanes.spans()

    def _forget(self, oldest: float) -> None:
        """Forget requests that the log cannot explain any more."""
        since = time.time() - time.monotonic() + oldest
        for name, one in [*self.finished.items()]:
            if one.ended - one.ms / 1e3 < since:
                del self.finished[name]

    def _overview(self) -> EngineOverview:
        counts, before = _Counts(self._engine.stats, self._metrics), self._counts
        self._counts = counts
        ready = self._engine.state not in {EngineState.STARTING, EngineState.FAILED}
        card = self._engine.card if ready else None
        stats, since = counts.stats, counts.since(before)
        adapters = [
            AdapterCounts(
                one.name, one.rank, stats.adapter_loads.get(one.digest, 0), stats.adapter_evictions.get(one.digest, 0)
            )
            for one in (self._engine.adapters.values() if ready else ())
        ]  # fmt: skip
        classes = [
            ClassCounts(
                one.name, one.slo.bounds, round(stats.goodput.get(one.name, 0.0), 3), since.kept.get(one.name, 0),
                since.missed.get(one.name, 0),
            )
            for one in (card.service_classes if card else ())
        ]  # fmt: skip
        return EngineOverview(
            time=round(time.time(), 3),
            seconds=round(since.seconds, 3),
            model=card.name if card else "",
            state=str(self._engine.state),
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            rates=since.rates,
            busy=since.busy,
            step_ms=since.step_ms,
            request_ms=since.request_ms,
            preemptions=since.preemptions,
            limits={"tokens": stats.step_budget, "sequences": stats.step_slots},
            cache=CacheCounts(
                stats.blocks, stats.blocks_used, stats.blocks_cached, stats.blocks_pinned, stats.block_size,
                stats.kv_waste_tokens, since.hit_share,
            ),
            drafts=DraftCounts(since.drafted, since.accepted, round(stats.speculation_seconds_won, 3)),
            classes=classes,
            adapters=adapters,
            degraded=[name for name, on in stats.degrade_steps.items() if on],
            memory=dict(stats.memory_parts),
            resident=stats.resident_bytes,
        )  # fmt: skip


class _Since:
    """What grew between two looks."""

    def __init__(self, before: _Counts, after: _Counts) -> None:
        self.seconds = after.at - before.at
        old, new = before.stats, after.stats
        steps = new.steps - old.steps
        if steps < 0:  # another engine
            old, steps = new, 0
        queried = new.prefix_queried_tokens - old.prefix_queried_tokens
        hit = new.prefix_hit_tokens - old.prefix_hit_tokens
        grown = {
            "output_tokens": new.decode_tokens - old.decode_tokens,
            "prompt_tokens": new.prefill_tokens - old.prefill_tokens,
            "steps": steps,
            "requests": after.requests["e2e"][0] - before.requests["e2e"][0],
        }
        seconds = self.seconds or 1.0
        self.rates = {name: round(count / seconds, 3) for name, count in grown.items()}
        self.busy = round((new.step_seconds - old.step_seconds) / seconds, 4)
        self.step_ms = {
            name: round(1e3 * (total - old.step_phase_seconds.get(name, 0.0)) / steps, 4)
            for name, total in new.step_phase_seconds.items()
        } if steps else {}  # fmt: skip
        self.request_ms = {
            name: round(1e3 * (total - before.requests[name][1]) / (count - before.requests[name][0]), 3)
            for name, (count, total) in after.requests.items()
            if count > before.requests[name][0]
        }
        self.preemptions = new.preemptions - old.preemptions
        self.hit_share = round(hit / queried, 4) if queried else None
        self.drafted = new.drafted_tokens - old.drafted_tokens
        self.accepted = new.accepted_tokens - old.accepted_tokens
        self.kept = _grown(before.kept, after.kept)
        self.missed = _grown(before.missed, after.missed)


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


class _Counts:
    """All counters at one moment."""

    def __init__(self, stats: EngineStats, metrics: ServerMetrics) -> None:
        self.at, self.stats = time.monotonic(), stats
        self.kept, self.missed = dict(stats.level_kept), dict(stats.level_missed)
        self.requests = {
            name: (sum(metrics.histograms[name].histogram.counts), metrics.histograms[name].histogram.total)
            for name in ("ttft", "itl", "queue", "e2e")
        }

    def since(self, before: _Counts | None) -> _Since:
        return _Since(before or self, self)


class _Lanes:
    """Steps as spans of the sequences that they computed something of."""

    def __init__(self, arrived: Mapping[int, tuple[str, int]], now: int) -> None:
        self._arrived, self._now = arrived, now
        self._open: dict[int, list[int]] = {}  # by key: began, ended, whether it decodes, tokens
        self._made: list[LaneSpan] = []

    def add(self, step: rows.Step) -> None:
        began, ended = step.at, step.at + step.updated
        if ended < self._now - 2e9 * SECONDS:  # the first look finds older ones
            return
        flat = step.rows
        for i in range(0, len(flat), 4):
            key, start, tokens = flat[i : i + 3]
            if key < 0:
                continue
            prompt = self._arrived.get(key >> SAMPLE_BITS, ("", 0))[1]
            decodes = start + tokens > prompt
            span = self._open.get(key)
            if span is not None and (
                span[2] != decodes or began - span[1] > _GAP_NS or ended - span[0] > _SPAN_NS
            ):
                self._close(key)
                span = None
            if span is None:
                self._open[key] = [began, ended, decodes, tokens]
            else:
                span[1], span[3] = ended, span[3] + tokens

    def spans(self) -> list[LaneSpan]:
        for key in [*self._open]:
            self._close(key)
        return self._made[-_SPANS:]

    def _close(self, key: int) -> None:
        began, ended, decodes, tokens = self._open.pop(key)
        name = self._arrived.get(key >> SAMPLE_BITS, ("", 0))[0]
        self._made.append(
            LaneSpan(
                name, key & (1 << SAMPLE_BITS) - 1, round((self._now - began) / 1e6, 2),
                round((self._now - ended) / 1e6, 2), "decode" if decodes else "prefill", tokens,
            )
        )  # fmt: skip


def _detail(view: EngineView, spans: list[LaneSpan]) -> EngineDetail:
    branches, others = _largest(view.branches)
    runs = [number for state, same in groupby(view.blocks) for number in (state, sum(1 for _ in same))]
    return EngineDetail(view.stride, runs, view.sequences, branches, others, spans)


def _largest(branches: Sequence[ViewedBranch]) -> tuple[list[ViewedBranch], int]:
    """The branches with the most tokens in and below them, and how many are left out. Those above are larger, so they
    are among them."""
    sizes = [branch.tokens for branch in branches]
    for index in range(len(branches) - 1, -1, -1):
        if (parent := branches[index].parent) >= 0:
            sizes[parent] += sizes[index]
    kept = sorted(sorted(range(len(branches)), key=lambda index: -sizes[index])[:_BRANCHES])
    places = {index: place for place, index in enumerate(kept)} | {-1: -1}
    found = [branches[index]._replace(parent=places[branches[index].parent]) for index in kept]
    return found, len(branches) - len(kept)
