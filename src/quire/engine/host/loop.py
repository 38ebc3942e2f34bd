"""The engine's loop: read commands, run a step, report it. Runs in the engine process, or in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from quire.config.live import LiveEngineConfig
from quire.core.cache_changes import CacheChanges
from quire.core.streams import partial_prompts
from quire.engine.core import EngineCore
from quire.engine.host.borrowing import RoomInUse
from quire.engine.host.channel import Channel
from quire.engine.host.core_shares import CoreShares
from quire.engine.host.engine_view import engine_view
from quire.engine.host.messages import (
    SAMPLE_BITS,
    Abort,
    AddRequest,
    AskLog,
    AskRecords,
    AskView,
    CacheChanged,
    CacheWatched,
    ClearCache,
    Command,
    Configure,
    Configured,
    Finish,
    ForgetAdapter,
    GivePages,
    GrantRoom,
    LimitDrafts,
    LogRows,
    Note,
    OpenAdapter,
    Ping,
    Pong,
    Records,
    Refused,
    Stats,
    StepReport,
    Stop,
    Tell,
    Viewed,
    Vocabulary,
    WatchCache,
    pack_handles,
    pack_ids,
    pack_logprobs,
    pack_score,
)
from quire.engine.host.opening_adapters import OpeningAdapters
from quire.engine.host.stats import StepTotals
from quire.types import RequestError, SeqEvent

STATS_SECONDS = 0.25
TIERS_SECONDS = 1.0  # between two looks at tiers while nothing runs: they come, go and change by themselves


class _Live:
    """A request in the engine: its handle, its running samples, and whether its cache hit was reported."""

    __slots__ = ("handle", "reported", "samples")

    def __init__(self, handle: int, samples: int) -> None:
        self.handle = handle
        self.samples = samples
        self.reported = False


class EngineLoop:
    """Steps an EngineCore for the other end of a channel.

    Commands are handled between steps, so that an abort or a stop string wastes at most the current step.
    """

    def __init__(
        self,
        core: EngineCore,
        channel: Channel,
        cores: CoreShares | None = None,
        give_pages: Callable[[], object] = lambda: None,
        room: RoomInUse | None = None,
        idle: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`idle`: in its contexts no step runs, and it may come to the steps of others; see IdleRounds."""
        self._core, self._channel = core, channel
        self._cores, self._give_pages = cores, give_pages
        self._room, self._idle = room, idle
        self._totals = StepTotals(core)
        self._adapters = OpeningAdapters(core.adapters, channel)
        self._live: dict[str, _Live] = {}
        self._ids: dict[int, str] = {}
        self._seen = 0
        self._stats_due = 0.0
        self._dirty = True
        self._changes: CacheChanges | None = None  # once somebody follows the cache
        self._tiers: tuple[int, ...] = ()  # their state at the last report

    def run(self) -> None:
        """Serve until a Stop command. Raises ChannelClosedError when the other end goes away."""
        while True:
            due = self._adapters.settle(self._core.ready_in())
            if self._core.refused:
                self._refuse()
            if due is None and self._core.tiers is not None:
                due = TIERS_SECONDS
            idle = due != 0.0
            self._send_changes()
            self._send_stats(now=idle)
            with self._idle() if idle else nullcontext():
                commands = self._channel.receive(wait=idle, seconds=due)
            for command in commands:
                if isinstance(command, Stop):
                    return
                self._obey(command)
            if self._core.ready_in() == 0.0:
                self._step()

    def _obey(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case Abort(handle):
                request_id = self._ids.get(handle)
                if request_id is not None:
                    self._core.abort(request_id)
                    self._forget(request_id)
                    self._dirty = True
            case Finish(handle, index):
                self._finish(handle, index)
            case Ping(number):
                self._channel.send(Pong(number))
            case AskRecords() | AskLog() | AskView() | WatchCache() | Tell():
                self._tell(command)
            case Vocabulary(tokens):
                self._core.vocabulary = tokens
            case LimitDrafts(most):
                self._core.limit_drafts(most)
            case Configure(number, live):
                self._configure(number, live)
            case ClearCache() | GivePages() | GrantRoom():
                self._obey_memory(command)
            case OpenAdapter() | ForgetAdapter():
                self._adapters.obey(command)
            case _:
                raise TypeError(f"{type(command).__name__} is not valid for a running engine")

    def _tell(self, command: AskRecords | AskLog | AskView | WatchCache | Tell) -> None:
        """Show or add to what was recorded."""
        recorder = self._core.recorder
        if isinstance(command, AskRecords):
            self._core.time_stages(command.stages)
            self._channel.send(Records(list(self._core.records)[-command.count :]))
        elif isinstance(command, AskLog):
            self._channel.send(LogRows(b"" if recorder is None else recorder.ring()))
        elif isinstance(command, AskView):
            self._channel.send(Viewed(engine_view(self._core, command.after)))
        elif isinstance(command, WatchCache):
            self._watch_cache()
        elif recorder is not None:
            recorder.told(command.row)

    def _finish(self, handle: int, index: int) -> None:
        request_id = self._ids.get(handle)
        if request_id is not None and self._core.finish(request_id, index) is not None:
            self._end_sample(request_id)
            self._dirty = True

    def _configure(self, number: int, live: LiveEngineConfig) -> None:
        error = ""
        try:
            self._core.configure(live)
        except ValueError as wrong:
            error = str(wrong)
        self._dirty = True
        self._channel.send(Configured(number, error))

    def _obey_memory(self, command: ClearCache | GivePages | GrantRoom) -> None:
        if isinstance(command, GrantRoom):
            if self._room is not None:
                self._room.obey(command)
            return
        tiers, sleeps = self._core.tiers, isinstance(command, GivePages)
        if tiers is not None and sleeps:
            tiers.save_all()
            tiers.sleeping = True
        self._core.scheduler.clear_prefix_cache()
        if self._core.swap is not None:
            self._core.swap.clear()
        if tiers is not None:
            if not sleeps:
                tiers.clear()
            tiers.sleeping = False
        if sleeps:
            if self._room is not None:
                self._room.give()
            self._give_pages()
        self._dirty = True

    def _watch_cache(self) -> None:
        """Report changes of the prefix caches, in which there is nothing yet. Without prefix caching there are none."""
        caches = self._core.scheduler.caches
        if self._core.misses is not None and self._changes is None:
            self._changes = CacheChanges(caches, self._core.scheduler.config.block_size)
            self._channel.send(CacheWatched(b"" if caches.tier is None else caches.tier.fingerprint))

    def _send_changes(self) -> None:
        if self._changes is not None and (found := self._changes.take()):
            self._channel.send(CacheChanged(found))

    def _add(self, command: AddRequest) -> None:
        self._seen = max(self._seen, command.handle)
        request = command.request
        try:
            self._core.add(request)
        except RequestError as error:
            self._channel.send(Refused(command.handle, error.field, error.message))
            return
        self._live[request.request_id] = _Live(command.handle, request.params.n)
        self._ids[command.handle] = request.request_id
        self._dirty = True

    def _refuse(self) -> None:
        """Report requests whose grammars could not be compiled."""
        refused, self._core.refused = self._core.refused, []
        for request_id, error in refused:
            if request_id in self._live:
                self._channel.send(Refused(self._live[request_id].handle, error.field, error.message))
                self._forget(request_id)

    def _step(self) -> None:
        start = time.monotonic()
        if self._cores is None:
            events = self._core.step()
        else:
            with self._cores.step():
                events = self._core.step()
        end = time.monotonic()
        if self._room is not None:
            self._room.stepped()
        if not self._core.rows:
            return  # moves go on, and no sequence can run before they end, or blocks are saved
        self._totals.add_step()
        self._send_changes()  # before the step: its prompts can be found by then
        self._channel.send(self._report(start, end, events))
        self._totals.add_send(time.monotonic() - end)
        self._dirty = True

    def _report(self, start: float, end: float, events: list[SeqEvent]) -> StepReport:
        record, live = self._core.records[-1], self._live
        started = [live[request_id].handle for request_id in self._core.started if request_id in live]
        partial = partial_prompts(self._core.scheduler.running) if record.prefill_tokens else ()
        prompts = [number for name, *counts in partial for number in (live[name].handle, *counts)]
        rows: list[int] = []
        tokens: list[int] = []
        sizes: list[int] = []
        notes: list[Note] = []
        drafts: list[int] = []
        scores = bytearray()
        for row, event in enumerate(events):
            request = live[event.request_id]
            new = event.new_token_ids
            rows.append(request.handle << SAMPLE_BITS | event.sample_index)
            sizes.append(len(new))
            tokens += new
            if event.drafts is not None:
                drafts += (row, *event.drafts)
            fresh = not request.reported
            other, table = fresh or event.finish_reason or event.prompt_logprobs, event.logprobs
            if table and not other and len(new) == len(table.ids) == 1:
                scores += pack_score(row, table)
            elif other or table:
                notes.append(_note(row, event, fresh=fresh))
                request.reported = True
                if event.finish_reason is not None:
                    self._end_sample(event.request_id)
        return StepReport(
            number=record.step,
            start=start,
            end=end,
            seen=self._seen,
            running=self._core.scheduler.num_running,
            waiting=self._core.scheduler.num_waiting,
            prefill_tokens=record.prefill_tokens,
            decode_tokens=record.decode_tokens,
            started=pack_handles(started),
            rows=pack_handles(rows),
            tokens=pack_ids(tokens),
            sizes=b"" if len(tokens) == len(rows) and 0 not in sizes else pack_ids(sizes),
            drafts=pack_ids(drafts),
            notes=tuple(notes),
            prompts=pack_handles(prompts),
            scores=bytes(scores),
        )

    def _end_sample(self, request_id: str) -> None:
        request = self._live[request_id]
        request.samples -= 1
        if not request.samples:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._ids[self._live.pop(request_id).handle]

    def _send_stats(self, *, now: bool) -> None:
        if self._core.tiers is not None and self._core.tiers.state != self._tiers:
            self._tiers, self._dirty = self._core.tiers.state, True
        if not self._dirty:
            return
        at = time.monotonic()
        if now or at >= self._stats_due:
            self._channel.send(Stats(self._totals.report()))
            self._stats_due = at + STATS_SECONDS
            self._dirty = False


def _note(row: int, event: SeqEvent, *, fresh: bool) -> Note:
    return Note(
        row=row,
        cached_tokens=event.cached_tokens if fresh else None,
        finish_reason=event.finish_reason,
        stop_token_id=event.stop_token_id,
        logprobs=pack_logprobs(event.logprobs),
        prompt_logprobs=pack_logprobs(event.prompt_logprobs),
        pooled=event.pooled,
    )
