"""AsyncEngine: many callers on one event loop, one engine behind a socket."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.kv_events import parse_kv_events
from quire.config.live import LiveConfig
from quire.config.lora_modules import adapter_paths
from quire.config.router_link import key_file_of
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import (
    CompiledStructure,
    DeadlineError,
    EngineState,
    EngineStats,
    EngineUnavailableError,
    GenerateAsk,
    ModelCard,
    RequestCancelledError,
    Stream,
    require_ready,
)
from quire.engine.build.opening import Model, find_model, gguf_files, kept_files, open_model
from quire.engine.build.tasks import for_task
from quire.engine.cache_log import CacheLog
from quire.engine.front.adapter_names import AdapterNames
from quire.engine.front.admission import Admission
from quire.engine.front.card import first_live_config, model_card
from quire.engine.front.engine_ends import EngineEnds
from quire.engine.front.engine_settings import EngineSettings
from quire.engine.front.engine_texts import EngineTexts
from quire.engine.front.event_publisher import make_cache_log
from quire.engine.front.given_texts import GivenTexts
from quire.engine.front.grammars import GrammarService
from quire.engine.front.output import OutputBuilder
from quire.engine.front.pool_inputs import PoolInputs
from quire.engine.front.saturation import Saturation
from quire.engine.front.sharing_replica import SharingReplica
from quire.engine.front.slow_readers import SlowReaders
from quire.engine.front.stream import LiveRequest, LiveStream, SinkPath
from quire.engine.front.suspects import SuspectLane
from quire.engine.front.text_service import TextService
from quire.engine.host.client import EngineClient
from quire.engine.host.held import memory_beside, tokenizer_beside
from quire.engine.host.hosts import host_factory
from quire.engine.host.memory_ledger import LedgerEntry
from quire.engine.host.messages import (
    SAMPLE_BITS,
    SAMPLE_MASK,
    Abort,
    AddRequest,
    ClearCache,
    Command,
    Configure,
    Finish,
    Load,
    Note,
    Ready,
    Refused,
    Score,
    StepReport,
    Tell,
    Vocabulary,
    WatchCache,
    unpack_handles,
)
from quire.engine.host.spawn import Spawned
from quire.engine.usage_ledger import UsageLedger, UsageMeter
from quire.engine.view import EngineView
from quire.objectives import DegradeStep
from quire.outputs import RequestOutput
from quire.parameters import Structure
from quire.text.chat_renderer import read_template
from quire.text.token_bytes import TokenBytes
from quire.types import QuireError, Request, RequestError
from quire.util.startup_spans import Startup

if TYPE_CHECKING:
    from quire.loader import GGUFFiles

logger = logging.getLogger("quire.engine")

Progress = Callable[[int, int], None]
_REFUSING = (EngineState.DRAINING, EngineState.SLEEPING)


class AsyncEngine(EngineSettings, EngineTexts, EngineEnds):
    """api.Engine with the engine in a process of its own, or with `in_process` in a thread of this one.

        engine = AsyncEngine("path/to/model", EngineConfig(memory=6 * 2**30))
        await engine.start()
        request = Request(request_id="1", prompt_token_ids=TokenIds(ids), params=params)
        async for delta in engine.generate(GenerateAsk(request=request)):
            print(delta.text, end="")
        await engine.stop(drain_seconds=10)

    Belongs to the event loop that starts it. `spawned` is an engine process started earlier. `cores`: the file by
    which the engines of one server share the cores; the memory of the server itself is then not in the bound of each.
    `memory`: its account with these, by which unused memory is lent. `like`: an engine of the same model, started
    before this one, whose texts and ledger it uses. `apart`: the memory of the server is in no bound.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        serving: ServingConfig | None = None,
        *,
        in_process: bool = False,
        progress: Progress | None = None,
        spawned: Spawned | None = None,
        cores: str = "",
        memory: LedgerEntry | None = None,
        like: AsyncEngine | None = None,
        apart: bool = False,
    ) -> None:
        self.serving = serving or ServingConfig()
        self._name, self._config = str(model), config or EngineConfig()
        if self.serving.lora_modules and not self._config.adapters.enable_lora:
            raise ValueError("lora_modules: they need enable_lora")
        self._progress = progress
        self._startup = Startup()
        self._new_host = host_factory(in_process=in_process, spawned=spawned, cores=cores)
        self._in_process, self._memory = in_process, memory
        self._like, self._apart = like, apart or bool(cores)
        self._opened: tuple[Model, TextService] | None = None
        self.left: Callable[[Request], None] = lambda _: None  # called when a request has ended
        self._client: EngineClient | None = None
        self._text: TextService | None = None
        self._admission: Admission | None = None
        self._card: ModelCard | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, LiveRequest] = {}  # by handle
        self._direct: dict[int, SinkPath] = {}  # by name of a row: samples that have a sink, for the hot path
        self._names: set[str] = set()  # request ids in use
        self._numbers = itertools.count(1)
        self._given = GivenTexts(self._launch, self._end)
        self._wasted = 0
        self._drained: asyncio.Event | None = None
        self._vocabulary: TokenBytes | None = None  # once a request has needed it
        self._inputs = None
        self._times_text = self.serving.otlp_traces_endpoint is not None
        self._lane = SuspectLane()
        self._adapters = AdapterNames(self._send)
        self._grammars = GrammarService()
        self._cache: CacheLog | None = None  # once it has started, if anybody may follow it
        self.rank = 0  # among replicas
        self.near: tuple[int, ...] = ()  # processors that the engine stays on; any if there are none
        self.sharing: SharingReplica | None = None  # where replicas share experts
        self._saturation = Saturation(self._config.scheduler, self._send)
        self._readers = SlowReaders(self.serving, self._end)
        self.ledger = UsageLedger() if like is None else like.ledger
        self._meter = UsageMeter(self.ledger)
        self._live_config: LiveConfig | None = None  # since the first start
        self._first_live: LiveConfig | None = None
        self._shares: Mapping[str, float] = {}  # of the cache, before it

    @property
    def state(self) -> EngineState:
        state = self._client.state if self._client else EngineState.STARTING
        # the engine process may be ready before the tokenizer is
        return EngineState.STARTING if state is EngineState.READY and self._card is None else state

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client else None

    @property
    def restarts(self) -> int:
        """Starts of the engine process after its first."""
        return self._client.restarts if self._client else 0

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineUnavailableError("the engine is loading")
        return self._card

    @property
    def memory_lines(self) -> tuple[str, ...]:
        """The memory bound by part, as lines of text."""
        return self._client.facts.memory_lines if self._client and self._client.facts else ()

    @property
    def request_memory(self) -> int:
        return self._client.request_memory if self._client else 0

    @property
    def stats(self) -> EngineStats:
        if self._client is None:
            return EngineStats()
        waiting = self._admission.waiting_tokens if self._admission else 0
        calls, words = (self._text.calls, self._text.words) if self._text else ({}, (0, 0))
        found = self._client.stats(
            waiting_tokens=waiting, wasted_tokens=self._wasted, calls=calls, words=words
        )
        found = self._saturation.add_to(found)
        return self._admission.outlook.add_to(found) if self._admission else found

    @property
    def degraded(self) -> Sequence[DegradeStep]:
        return self._saturation.degrading.active

    @property
    def startup(self) -> list[dict[str, Any]]:
        """Where the time went, from the start of this process; see api.Engine."""
        return self._startup.report()

    async def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if self._client is not None:  # it was stopped, and starts anew
            self._grammars, self._vocabulary = GrammarService(), None
        self._drained = asyncio.Event()
        folder = await loop.run_in_executor(None, find_model, self._name)
        files = await loop.run_in_executor(None, gguf_files, folder)
        if self._config.execution.enable_prompt_embeds:
            importlib.import_module("numpy")  # what it takes is then in the plan
        if self._like is not None:
            beside = {}
        elif self._apart:
            beside = tokenizer_beside(folder, files)
        else:
            beside = {} if self._in_process else memory_beside(folder, files, self.serving)
        first = adapter_paths(self.serving.lora_modules)
        tiers = self._config.cache.tiers
        named = bool(key_file_of(self.serving.router, "" if tiers is None else tiers.key_file))
        load = Load(str(folder), self._config, beside, None, tuple(first.values()), self.near, named)
        events = parse_kv_events(self.serving.kv_events_config)
        self._cache = make_cache_log(events, self.rank, self.adapter_name)
        client = self._client = EngineClient(load, self.serving, self._new_host, self, self._memory)
        loading = asyncio.create_task(client.start(self._progress))
        try:
            # this process reads the tokenizer while the engine reads the weights
            opened = self._opened = await loop.run_in_executor(None, self._open, folder, files)
            self._text = opened[1]
            await loading
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await client.stop()
            self._close_texts()
            raise
        try:
            await asyncio.gather(
                *(self._adapters.load(adapter, path, None) for adapter, path in first.items())
            )
        except BaseException:
            await client.stop()
            self._close_texts()
            raise
        ready, (model, text) = client.facts, opened
        assert ready is not None
        text.limit(ready.scheduler.window)
        if model.facts.pooling is not None:
            self._inputs = PoolInputs(model.facts, model.tokenizer, ready.scheduler.max_model_len)
        name = next(iter(self.serving.served_model_name), self._name)
        self._card = model_card(name, model, ready, text, self._config)
        self._startup.add(ready.startup)
        self._startup.mark("ready")

    def kill(self, reason: str) -> None:
        """End the engine's process, which is started again."""
        if self._client is not None:
            self._client.kill(reason)

    async def failed(self) -> None:
        """Returns when the engine has been given up."""
        assert self._client is not None
        await self._client.failed()

    async def ping(self, timeout: float) -> bool:
        return self._client is not None and await self._client.ping(timeout)

    async def clear_prefix_cache(self, timeout: float) -> bool:
        if self._client is None:
            return False
        self._client.send(ClearCache())
        return await self.ping(timeout)  # commands are obeyed in order

    async def debug(self, stages: bool = False) -> Mapping[str, Any]:
        records = await self._client.records(stages) if self._client else []
        return {"steps": msgspec.to_builtins(records)}

    async def log(self, request_id: str = "", replica: int = 0) -> bytes:
        del request_id, replica  # there is one log
        return await self._client.log() if self._client else b""

    async def view(self, after: int) -> EngineView:
        return await self._client.view(after) if self._client else EngineView()

    def tell(self, row: bytes, request_id: str) -> None:  # noqa: ARG002
        self._send(Tell(row))

    async def memory(self) -> Mapping[str, Any]:
        if self._client is None:
            raise EngineUnavailableError("the engine is loading")
        return await self._client.memory(self._grammars.pid)

    async def compile(self, asked: Structure, tenant: str = "") -> CompiledStructure:
        made = await self._grammars.compile(asked, tenant)
        await self.share_vocabulary()
        return made

    async def share_vocabulary(self) -> None:
        # once: an engine that is started again gets it again
        if self._vocabulary is None:
            made = await self._texts().vocabulary(self.card.vocab_size)
            if self._vocabulary is None:
                self._vocabulary = made
                self._send_vocabulary()

    def _send_vocabulary(self) -> None:
        if self._vocabulary is not None:
            self._send(Vocabulary(self._vocabulary))

    def _send(self, command: Command) -> None:
        if self._client is not None:
            self._client.send(command)

    # -- requests -----------------------------------------------------------------------------------------

    def requests(self) -> Sequence[tuple[Request, RequestOutput]]:
        return [(live.request, live.output) for live in self._live.values()]

    def cancel(self, request_id: str) -> bool:
        found = [live for live in self._live.values() if live.request_id == request_id]
        for live in found:
            self._end(live, RequestCancelledError("the request was cancelled"))
        return bool(found)

    def generate(self, ask: GenerateAsk) -> Stream:
        now = time.monotonic()
        client, admission = self._client, self._admission
        if client is None or admission is None or self._loop is None:
            raise EngineUnavailableError("the engine is loading")
        require_ready(self.state)
        ask.check_deadlines(now)
        ask = self._saturation.served(ask)
        request = ask.request
        if request.request_id in self._names:
            raise RequestError("request_id", f"{request.request_id!r} is already in use")
        admission.check(request)
        if request.adapter:
            self._adapters.check(request.adapter)
        digest = self._lane.check(request, now)
        handle = next(self._numbers)
        stop = partial(self._stop_sample, handle)
        following = OutputBuilder(
            request, ask.prompt_text, self._texts().tokenizer, stop, keep=ask.keep_output, reading=ask.reading,
            accepted=ask.accepted,
        )  # fmt: skip
        with self._saturation.admitting(now):
            admission.admit(handle, ask, now, self._live.values(), client.reported)
        live = LiveRequest(handle, request, following, digest, progress=ask.progress)
        live.place = admission.outlook.place(request)
        if not self._live:
            client.began()
        self._live[handle] = live
        if request.adapter:
            self._adapters.enter(request.adapter)
        self._names.add(request.request_id)
        self._given.launch(live, self._texts())
        live.set_timers(ask, now, self._loop, self._end)
        return LiveStream(live, self._loop, self._end, self._direct.update)

    def _launch(self, live: LiveRequest) -> None:
        """Send a request to the engine; a suspect waits while another one runs."""
        if not self._lane.enter(live):
            return
        assert self._client is not None
        self._client.send(AddRequest(live.handle, live.request))

    def _end(self, live: LiveRequest, error: QuireError | None = None) -> None:
        """End a request early: the engine stops computing it before its next step. Harmless when it has
        ended.
        """
        if live.handle not in self._live or self._client is None:
            return
        self._client.send(Abort(live.handle))
        if self._admission is not None:
            self._admission.outlook.left(live.request_id, late=isinstance(error, DeadlineError))
        self._forget(live)
        live.following.abort(time.monotonic())
        self._wasted += live.unread
        live.end(error)

    def _forget(self, live: LiveRequest) -> None:
        for row in live.rows():
            del self._direct[row]
        live.drop_sinks()
        del self._live[live.handle]
        self._names.discard(live.request_id)
        self.left(live.request)
        if live.request.adapter:
            self._adapters.leave(live.request.adapter)
        for waiting in self._lane.leave(live):
            self._launch(waiting)
        if self._admission is not None:
            self._admission.remove(live.handle)
        if not self._live and self._drained is not None and self.state in _REFUSING:
            self._drained.set()

    def _end_all(self, reason: str) -> None:
        self._lane.clear()
        for live in list(self._live.values()):
            self._end(live, EngineUnavailableError(f"{reason}; the request was not completed"))

    def _stop_sample(self, handle: int, index: int) -> None:
        """The text of a sample contains a stop string."""
        if self._client is not None:
            self._client.send(Finish(handle, index))

    # -- host.client.Listener -----------------------------------------------------------------------------

    def working(self) -> bool:
        return bool(self._live)

    def refused(self, report: Refused) -> None:
        live = self._live.get(report.handle)
        if live is not None:
            self._end(live, RequestError(report.field, report.message))

    def stepped(self, step: StepReport) -> None:
        now = time.monotonic()
        admission, lives, directs = self._admission, self._live, self._direct
        assert admission is not None
        admission.stepped(step, now)
        for handle in unpack_handles(step.started):
            admission.started(handle, now)
            live = lives.get(handle)
            if live is not None:
                live.following.started(step.start)
        for handle, computed, cached in step.unpack_prompts():
            live = lives.get(handle)
            if live is not None:
                live.computed(computed, cached, now)
        self._saturation.look(now, lives.values())
        rows, news = step.unpack()
        admission.outlook.came(rows, news, lives, now)
        if step.tokens:
            self._startup.mark("first token")
        notes, scores = {note.row: note for note in step.notes}, step.unpack_scores()
        if self._cache is not None and self._cache.is_followed:
            first = [rows[note.row] >> SAMPLE_BITS for note in step.notes if note.cached_tokens is not None]
            self._cache.computed([lives[handle].request for handle in first if handle in lives])
        for row, drafts in step.unpack_drafts():
            live = lives.get(rows[row] >> SAMPLE_BITS)
            if live is not None:
                live.following.drafted(rows[row] & SAMPLE_MASK, drafts)
        for row, (key, new) in enumerate(zip(rows, news, strict=True)):
            timed = lives.get(key >> SAMPLE_BITS) if self._times_text else None
            began = 0.0 if timed is None else time.monotonic()
            direct, note, score = directs.get(key), notes.get(row), scores.get(row)
            if (
                direct is not None
                and direct.open
                and (note is None or direct.takes(note))
                and (score is None or direct.whole)
            ):
                direct.take(new, now, note, score)
            else:
                self._grow(key, new, now, note, score)
            if timed is not None:
                timed.output.timings.text += time.monotonic() - began

    def _grow(self, key: int, new: list[int], now: float, note: Note | None, score: Score | None) -> None:
        """Add a row of a step to what its reader will read."""
        direct = self._direct.get(key)
        if direct is not None:
            direct.settle()
        live = self._live.get(key >> SAMPLE_BITS)
        if live is None:
            self._wasted += len(new)
            return
        if score is not None:
            delta = live.following.apply(live.scored(key & SAMPLE_MASK, new[0], score), now)
        elif note is None:
            delta = live.following.grow(key & SAMPLE_MASK, new, now)
        else:
            delta = live.following.apply(live.event(key & SAMPLE_MASK, new, note), now)
        if delta is None:
            self._wasted += len(new)
            return
        live.push(delta, now)
        if delta.finish_reason is not None and live.output.finished:
            self._lane.completed(live)
            if self._admission is not None:
                self._admission.outlook.ended(live.request, live.output)
            self._forget(live)
            live.end()

    def engine_ready(self, facts: Ready) -> None:
        bounds = self.serving.max_num_queued_reqs, self.serving.max_num_queued_tokens
        self._admission = Admission(facts, *bounds, self._config.scheduler)
        self._meter.engine_started(facts.memory_parts.get("kv", 0) // facts.scheduler.num_blocks)
        first = first_live_config(facts.scheduler, self._config.scheduler, self.serving, self._shares)
        self._first_live = first
        live = self._live_config or first
        self.adopt(live)
        self._send(Configure(0, live.engine))  # one that was restarted goes on as it was changed
        self._saturation.restarted()
        self._adapters.started()
        self._grammars.planned = facts.memory_parts["compiler"]
        self._send_vocabulary()
        if self._cache is not None:
            self._cache.block_size = facts.scheduler.block_size
            self._send(WatchCache())
        if self._text is not None:
            self._text.limit(facts.scheduler.window)
        if self._card is not None:  # started again, perhaps with less memory than the first time
            self._card = replace(self._card, max_model_len=facts.scheduler.max_model_len)

    @property
    def shares_experts(self) -> bool:
        """Whether it shares experts with other replicas."""
        return self._client is not None and self._client.facts is not None and self._client.facts.shares

    @property
    def cpu_seconds(self) -> float:
        """Of its process so far, as far as they are known."""
        return self._client.cpu_seconds if self._client else 0.0

    def used(self, own: float | None) -> float | None:
        return own if own is None or self.sharing is None else own + self.sharing.cpu_of_others()

    def opening(self, load: Load) -> Load:
        return load if self.sharing is None else msgspec.structs.replace(load, replicas=self.sharing.join())

    def engine_lost(self, reason: str) -> int:
        """End the requests that the engine was computing. Returns how many deaths the request to blame explains."""
        with_another = self.sharing is not None and self.sharing.died()
        deaths, guilty = (1, {}) if with_another else self._lane.died(self._live.values(), time.monotonic())
        for live, error in guilty.items():
            self._end(live, error)
        self._end_all(reason)
        self._adapters.lost(reason)
        if self._cache is not None:
            self._cache.cleared()
        return deaths

    def tick(self, now: float) -> None:
        assert self._loop is not None
        self._saturation.look(now, self._live.values())
        self._readers.look(self._live.values(), now, self._loop)

    # -- start-up -----------------------------------------------------------------------------------------

    def _open(self, folder: Path, files: GGUFFiles | None) -> tuple[Model, TextService]:
        if self._like is not None:
            assert self._like._opened is not None
            return self._like._opened
        template = read_template(self.serving.chat_template)
        model = open_model(folder, startup=self._startup, files=files, cache=kept_files(self._config))
        names = {
            "tool_call_parser": self.serving.tool_call_parser,
            "reasoning_parser": self.serving.reasoning_parser,
        }
        model = for_task(model, self._config)
        return model, TextService(model.tokenizer, template, **names)

    def _close_texts(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache = None
        if self._text is not None and self._like is None:
            self._text.close()
        self._text = self._inputs = self._opened = None  # its vocabulary is a part of the memory plan
