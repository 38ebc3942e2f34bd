"""AsyncEngine: many callers on one event loop, one engine behind a socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import (
    REQUESTS,
    DeadlineError,
    EngineState,
    EngineStats,
    EngineUnavailableError,
    GenerateAsk,
    ModelCard,
    RequestBlockedError,
    Stream,
    require_ready,
)
from quire.engine.build.opening import Model, find_model, gguf_files, kept_files, open_model
from quire.engine.front.admission import Admission
from quire.engine.front.held import memory_beside, memory_held
from quire.engine.front.output import OutputProcessor
from quire.engine.front.stream import Direct, Live, LiveStream
from quire.engine.front.suspects import KEEP_SECONDS, Suspects, digest_of
from quire.engine.front.text_service import TextService, read_template
from quire.engine.host.hosts import host_factory
from quire.engine.host.messages import (
    SAMPLE_BITS,
    SAMPLE_MASK,
    Abort,
    Add,
    AskRecords,
    Finish,
    Load,
    Note,
    Ready,
    Records,
    Refused,
    Report,
    Stats,
    Step,
    pack_ids,
    unpack_handles,
    unpack_ids,
    unpack_logprobs,
)
from quire.engine.host.spawn import Spawned
from quire.engine.host.supervisor import Hooks, Supervisor
from quire.text.chat import ChatAsk
from quire.text.stop import StopStrings
from quire.types import QuireError, Request, RequestError, SeqEvent
from quire.util.startup import Startup

if TYPE_CHECKING:
    from quire.loader import GGUFFiles

logger = logging.getLogger("quire.engine")

_RECORDS = 256
_DEBUG_SECONDS = 2.0

Progress = Callable[[int, int], None]


class AsyncEngine:
    """api.AsyncEngine with the engine in a process of its own, or with `in_process` in a thread of this one.

        engine = AsyncEngine("path/to/model", EngineConfig(memory=6 * 2**30))
        await engine.start()
        async for delta in engine.generate(GenerateAsk(request_id="1", prompt_token_ids=ids, params=params)):
            print(delta.text, end="")
        await engine.stop(drain_seconds=10)

    Belongs to the event loop that starts it. `spawned` is an engine process that was started before.
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
    ) -> None:
        self.serving = serving or ServingConfig()
        self._name, self._config = str(model), config or EngineConfig()
        self._progress = progress
        self._startup = Startup()
        self._new_host = host_factory(in_process=in_process, spawned=spawned)
        self._in_process = in_process
        self._supervisor: Supervisor | None = None
        self._text: TextService | None = None
        self._model: Model | None = None
        self._admission: Admission | None = None
        self._output: OutputProcessor | None = None
        self._facts: Ready | None = None
        self._card: ModelCard | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, Live] = {}
        self._direct: dict[int, Direct] = {}  # by key of a row: samples whose text has a sink
        self._handles: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._stats = Stats(0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0.0, {}, 0, 0, (), 0)
        self._running = self._waiting = 0
        self._wasted = 0
        self._drained: asyncio.Event | None = None
        self._records: list[asyncio.Future[list[Any]]] = []
        self._suspects = Suspects()
        self._watched: dict[
            int, bytes
        ] = {}  # handle -> digest, of requests that came while there were suspects
        self._careful: int | None = None  # the handle of the one suspect that runs
        self._held: deque[Live] = deque()  # suspects that wait for it

    # -- state --------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        state = self._supervisor.state if self._supervisor else EngineState.STARTING
        # the engine process may be ready before the tokenizer is
        return EngineState.STARTING if state is EngineState.READY and self._card is None else state

    @property
    def pid(self) -> int | None:
        """Process id of the engine process; None in a thread, or while there is none."""
        return self._supervisor.pid if self._supervisor else None

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineUnavailableError("the engine is loading")
        return self._card

    @property
    def memory_lines(self) -> tuple[str, ...]:
        """The memory bound by part, as lines of text."""
        return self._facts.memory_lines if self._facts else ()

    @property
    def request_memory(self) -> int:
        return self._facts.memory_parts[REQUESTS] if self._facts else 0

    @property
    def stats(self) -> EngineStats:
        admission, facts = self._admission, self._facts
        return EngineStats(
            **msgspec.structs.asdict(self._stats)
            | {"running": self._running, "waiting": self._waiting},  # as of the last step
            waiting_tokens=admission.waiting_tokens if admission else 0,
            wasted_tokens=self._wasted,
            restarts=self._supervisor.restarts if self._supervisor else 0,
            memory_parts=facts.memory_parts if facts else {},
        )

    @property
    def startup(self) -> list[dict[str, Any]]:
        """Where the time went, from the start of this process; see api.AsyncEngine."""
        return self._startup.report()

    async def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        folder = await loop.run_in_executor(None, find_model, self._name)
        files = await loop.run_in_executor(None, gguf_files, folder)
        beside = {} if self._in_process else memory_beside(folder, files, self.serving)
        self._supervisor = Supervisor(
            Load(str(folder), self._config, beside),
            self.serving,
            self._new_host,
            Hooks(self._receive, self._lost, self._ready, lambda: bool(self._live), self._tick),
        )
        loading = asyncio.create_task(self._supervisor.start(self._progress))
        try:
            # the tokenizer is read here while the engine reads the weights
            opened = await loop.run_in_executor(None, self._open, folder, files)
            self._model, self._text = opened
            self._output = OutputProcessor(opened[0].tokenizer, self._stop_sample, time.monotonic)
            await loading
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self._supervisor.stop()
            if self._text is not None:
                self._text.close()
            raise
        self._make_card()
        if self._facts is not None:
            self._startup.add(self._facts.startup)
        self._startup.mark("ready")

    async def stop(self, drain_seconds: float) -> None:
        if self._supervisor is None or self._drained is None:
            return
        self._supervisor.drain()
        if self._live and drain_seconds > 0:
            try:
                async with asyncio.timeout(drain_seconds):
                    await self._drained.wait()
            except TimeoutError:
                logger.warning("%d requests were still running at shutdown", len(self._live))
        self._end_all("the server is shutting down")
        await self._supervisor.stop()
        if self._text is not None:
            self._text.close()

    async def ping(self, timeout: float) -> bool:
        return self._supervisor is not None and await self._supervisor.ping(timeout)

    async def debug(self) -> Mapping[str, Any]:
        """The latest step records, for explanations of latency."""
        if self._supervisor is None or self._loop is None:
            return {"steps": []}
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        self._records.append(answer)
        self._supervisor.send(AskRecords(_RECORDS))
        try:
            async with asyncio.timeout(_DEBUG_SECONDS):
                records = await answer
        except TimeoutError:
            raise EngineUnavailableError(f"the engine did not answer within {_DEBUG_SECONDS:g} s") from None
        finally:
            if answer in self._records:
                self._records.remove(answer)
        return {"steps": msgspec.to_builtins(records)}

    async def memory(self) -> Mapping[str, Any]:
        """What both processes hold, by part, beside what was planned; see docs/memory.md."""
        if self._facts is None:
            raise EngineUnavailableError("the engine is loading")
        measured = await asyncio.to_thread(memory_held, self.pid, self._facts.memory_areas)
        return {
            "bound": self._facts.memory_bound,
            "planned": dict(self._facts.memory_parts),
            "resident": sum(sum(parts.values()) for parts in measured.values()),
            "processes": measured,
        }

    # -- text ---------------------------------------------------------------------------------------------

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        return await self._texts().encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        return await self._texts().encode_chat(ask)

    async def render_chat(self, ask: ChatAsk) -> str:
        return await self._texts().render_chat(ask)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._texts().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return self._texts().pieces(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts().token_bytes(token_id)

    # -- requests -----------------------------------------------------------------------------------------

    def generate(self, ask: GenerateAsk) -> Stream:
        now = time.monotonic()
        supervisor, admission, output = self._supervisor, self._admission, self._output
        if supervisor is None or admission is None or output is None or self._loop is None:
            raise EngineUnavailableError("the engine is loading")
        require_ready(self.state)
        for limit, name in ((ask.deadline, "deadline"), (ask.queue_deadline, "longest queue time")):
            if limit is not None and limit <= now:
                raise DeadlineError(f"the request's {name} had passed before it started")
        if ask.request_id in self._handles:
            raise RequestError("request_id", f"{ask.request_id!r} is already in use")
        request = self._request(ask, now)
        admission.check(request)
        digest = self._known_digest(ask, now)
        stops = self._stops(ask)
        handle = next(self._numbers)
        admission.admit(handle, ask, now)
        live = Live(handle, ask, output.add(request, ask.prompt_text, stops, keep=ask.keep_output))
        if not self._live:
            supervisor.began()
        self._live[handle] = live
        self._handles[ask.request_id] = handle
        if digest is not None:
            self._watched[handle] = digest
        self._launch(live)
        self._set_timers(live, ask, now)
        return LiveStream(live, self._loop, self.cancel, self._deliver)

    def cancel(self, live: Live) -> None:
        """Stop computing a request; harmless when it has ended."""
        self._end(live, None)

    def _deliver(self, live: Live) -> None:
        """The samples of a request have got sinks."""
        for index, direct in enumerate(live.directs):
            if direct is not None:
                self._direct[live.handle << SAMPLE_BITS | index] = direct

    def _known_digest(self, ask: GenerateAsk, now: float) -> bytes | None:
        """A request's digest, None while nothing is suspected. Raises RequestBlockedError for one that is to blame."""
        if not self._suspects:
            return None
        digest = digest_of(ask)
        deaths = self._suspects.deaths(digest, now)
        if deaths:
            raise _blocked(deaths)
        return digest

    def _launch(self, live: Live) -> None:
        """Send a request to the engine; a suspect waits while another one runs."""
        assert self._supervisor is not None
        digest = self._watched.get(live.handle)
        if digest is not None and self._suspects.careful(digest):
            if self._careful is not None:
                self._held.append(live)
                return
            self._careful = live.handle
        ask = live.ask
        self._supervisor.send(
            Add(
                handle=live.handle,
                request_id=ask.request_id,
                prompt=pack_ids(ask.prompt_token_ids),
                params=ask.params,
                arrival=live.output.timings.arrival,
                priority=ask.priority,
                namespace=ask.namespace,
                tenant=ask.tenant if self.serving.prefix_cache_sharing == "key" else "",
            )
        )

    def _launch_next(self) -> None:
        """The suspect that ran has ended."""
        self._careful = None
        waiting, self._held = self._held, deque()
        for live in waiting:
            self._launch(live)

    def _request(self, ask: GenerateAsk, now: float) -> Request:
        return Request(
            request_id=ask.request_id,
            prompt_token_ids=ask.prompt_token_ids,
            params=ask.params,
            arrival=now,
            priority=ask.priority,
            namespace=ask.namespace,
        )

    def _stops(self, ask: GenerateAsk) -> StopStrings | None:
        if not ask.params.stop:
            return None
        if self._texts().tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and this model folder has none")
        return StopStrings(ask.params.stop)

    def _set_timers(self, live: Live, ask: GenerateAsk, now: float) -> None:
        assert self._loop is not None
        if ask.deadline is not None:
            error = DeadlineError(f"the request was not finished within {ask.deadline - now:.3f} s")
            live.timers.append(self._loop.call_later(ask.deadline - now, self._end, live, error))
        if ask.queue_deadline is not None:
            live.timers.append(
                self._loop.call_later(
                    ask.queue_deadline - now, self._leave_queue, live, ask.queue_deadline - now
                )
            )

    def _leave_queue(self, live: Live, waited: float) -> None:
        if not live.output.timings.scheduled:
            self._end(live, DeadlineError(f"the request waited for {waited:.3f} s and has not been started"))

    def _end(self, live: Live, error: QuireError | None) -> None:
        """End a request before its time: the engine stops computing it before its next step."""
        if live.handle not in self._live or self._supervisor is None:
            return
        self._supervisor.send(Abort(live.handle))
        self._forget(live)
        assert self._output is not None
        self._output.end(live.request_id, time.monotonic())
        self._wasted += live.unread
        live.end(error)

    def _forget(self, live: Live) -> None:
        for index, direct in enumerate(live.directs):
            if direct is not None:
                direct.settle()
                live.directs[index] = None  # they know each other
                del self._direct[live.handle << SAMPLE_BITS | index]
        del self._live[live.handle]
        del self._handles[live.request_id]
        self._watched.pop(live.handle, None)
        if live in self._held:
            self._held.remove(live)
        elif live.handle == self._careful:
            self._launch_next()
        if self._admission is not None:
            self._admission.leave(live.handle)
        if not self._live and self._drained is not None and self.state is EngineState.DRAINING:
            self._drained.set()

    def _end_all(self, reason: str) -> None:
        self._held.clear()
        for live in list(self._live.values()):
            self._end(live, EngineUnavailableError(f"{reason}; the request was not completed"))

    def _stop_sample(self, request_id: str, index: int) -> None:
        """A stop string was found in a sample's text."""
        if self._supervisor is not None:
            self._supervisor.send(Finish(self._handles[request_id], index))

    # -- what the engine says -----------------------------------------------------------------------------

    def _receive(self, report: Report) -> None:
        match report:
            case Step():
                self._stepped(report)
            case Stats():
                self._stats = report
                self._running, self._waiting = report.running, report.waiting
            case Refused(handle, field, message):
                live = self._live.get(handle)
                if live is not None:
                    self._end(live, RequestError(field, message))
            case Records(records):
                for answer in self._records:
                    if not answer.done():
                        answer.set_result(records)
            case _:
                logger.warning("the engine sent a %s, which is not expected now", type(report).__name__)

    def _stepped(self, step: Step) -> None:
        now = time.monotonic()
        admission, output, lives, directs = self._admission, self._output, self._live, self._direct
        assert admission is not None
        assert output is not None
        admission.stepped(step.seen, step.running, step.waiting)
        self._running, self._waiting = step.running, step.waiting
        for handle in unpack_handles(step.started):
            admission.started(handle, now)
            live = lives.get(handle)
            if live is not None:
                output.started([live.request_id], step.start)
        tokens = unpack_ids(step.tokens)
        if tokens:
            self._startup.mark("first token")
        rows = unpack_handles(step.rows)
        news = _split(tokens, unpack_ids(step.sizes)) if step.sizes else [[token] for token in tokens]
        notes = {note.row: note for note in step.notes}
        for row, (key, new) in enumerate(zip(rows, news, strict=True)):
            direct = directs.get(key)
            if direct is not None and direct.open and row not in notes:
                direct.take(new, now)
            else:
                self._grow(key, new, notes.get(row), now)

    def _grow(self, key: int, new: list[int], note: Note | None, now: float) -> None:
        """Add a row of a step to what its reader will read."""
        assert self._output is not None
        direct = self._direct.get(key)
        if direct is not None:
            direct.settle()
        live = self._live.get(key >> SAMPLE_BITS)
        if live is None:
            self._wasted += len(new)
            return
        if note is None:
            delta = self._output.grow(live.following, key & SAMPLE_MASK, new, now)
        else:
            delta = self._output.apply(_event(live, key & SAMPLE_MASK, new, note), now)
        if delta is None:
            self._wasted += len(new)
            return
        live.push(delta, now)
        if delta.finish_reason is not None and live.output.finished:
            if live.handle in self._watched:
                self._suspects.clear(self._watched[live.handle])
            self._forget(live)
            live.end()

    def _ready(self, facts: Ready) -> None:
        self._facts = facts
        self._admission = Admission(
            facts, self.serving.max_num_queued_reqs, self.serving.max_num_queued_tokens
        )
        if self._text is not None:
            self._text.limit(facts.scheduler.max_model_len)
        if self._card is not None:  # started again, perhaps with less memory than the first time
            self._card = replace(self._card, max_model_len=facts.scheduler.max_model_len)

    def _lost(self, reason: str) -> int:
        """The engine died: end what it computed. Returns how many deaths the request to blame explains."""
        now = time.monotonic()
        held = {live.handle for live in self._held}
        present = {live: digest_of(live.ask) for live in self._live.values() if live.handle not in held}
        blamed = self._suspects.died(set(present.values()), now)
        deaths = self._suspects.deaths(blamed, now) if blamed else 0
        for live in [live for live, digest in present.items() if digest == blamed]:
            logger.error("request %s was being computed at %d deaths of the engine and is refused from now on",
                         live.request_id, deaths)  # fmt: skip
            self._end(live, _blocked(deaths))
        self._end_all(reason)
        return deaths

    def _tick(self, now: float) -> None:
        """End the requests of readers that do not read. Readers that have been woken come first: after a standstill
        of this process there may be some.
        """
        assert self._loop is not None
        late = [live for live in self._live.values() if self._unread_too_long(live, now)]
        if late:
            self._loop.call_soon(self._end_unread, late, now)

    def _unread_too_long(self, live: Live, now: float) -> bool:
        limit = self.serving.reader_tokens * len(live.output.outputs)
        return bool(live.pending) and (
            now - live.unread_since > self.serving.reader_timeout or live.unread > limit
        )

    def _end_unread(self, late: list[Live], now: float) -> None:
        for live in late:
            if self._unread_too_long(live, now):
                waited = now - live.unread_since
                message = f"{live.unread} tokens were left unread for {waited:.1f} s: the request has ended"
                self._end(live, QuireError(message))

    # -- start-up -----------------------------------------------------------------------------------------

    def _open(self, folder: Path, files: GGUFFiles | None) -> tuple[Model, TextService]:
        template = read_template(self.serving.chat_template)
        model = open_model(folder, startup=self._startup, files=files, cache=kept_files(self._config))
        return model, TextService(model.tokenizer, template)

    def _texts(self) -> TextService:
        if self._text is None:
            raise EngineUnavailableError("the engine is loading")
        return self._text

    def _make_card(self) -> None:
        assert self._model is not None
        assert self._facts is not None
        limits, facts = self._facts.scheduler, self._model.facts
        self._texts().limit(limits.max_model_len)
        names = self.serving.served_model_name
        self._card = ModelCard(
            name=names[0] if names else self._name,
            architecture=facts.architecture,
            max_model_len=limits.max_model_len,
            vocab_size=self._facts.vocab,
            config_sha256=facts.config_sha256,
            template_hash=self._texts().template_hash,
            created=int(time.time()),
            default_sampling=dict(facts.generation.sampling),
            notices=self._facts.notices,
        )


def _blocked(deaths: int) -> RequestBlockedError:
    return RequestBlockedError(
        f"this request was being computed at {deaths} deaths of the engine; it is refused for"
        f" {KEEP_SECONDS / 60:g} minutes"
    )


def _split(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes))
    return [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _event(live: Live, index: int, tokens: list[int], note: Note) -> SeqEvent:
    """A row of a step as the event it was in the engine."""
    if note.cached_tokens is not None:
        live.cached_tokens = note.cached_tokens
    return SeqEvent(
        live.request_id,
        index,
        tokens,
        unpack_logprobs(note.logprobs),
        unpack_logprobs(note.prompt_logprobs),
        note.finish_reason,
        note.stop_token_id,
        live.cached_tokens,
    )
