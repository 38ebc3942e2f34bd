"""Several engines of one model behind one front: data parallelism.

Each engine is a replica: a process with its weights, its cache and its queue. A request goes to the replica that would
answer it first, counting what that has cached of the prompt; to the next one when its queue is full. The tokenizer, the
ledger of usage and the compiler of grammars are there once. A replica that dies is started again, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.live import LiveConfig
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.core.given_output import first_tokens
from quire.engine.api import (
    AdapterVersion,
    CompiledStructure,
    EngineState,
    EngineStats,
    EngineUnavailableError,
    GenerateAsk,
    ModelCard,
    OverloadedError,
    Stream,
    require_ready,
)
from quire.engine.cache_log import CacheLog
from quire.engine.front.async_engine import AsyncEngine, Progress
from quire.engine.front.engine_texts import EngineTexts
from quire.engine.front.merged_stats import merged_stats
from quire.engine.front.sharing_replica import SharingReplica
from quire.engine.front.text_service import TextService
from quire.engine.host.held import bound_of_several, server_memory
from quire.engine.host.replica_files import ReplicaFiles
from quire.engine.host.spawn import Spawned
from quire.engine.usage_ledger import UsageLedger
from quire.engine.view import EngineView
from quire.objectives import DegradeStep
from quire.outputs import RequestOutput
from quire.parameters import Structure
from quire.routing.prefix_index import PrefixIndex, prompt_digests
from quire.routing.router_policies import PrefixAware, RoutedPrompt
from quire.steplog.log_files import log_beside
from quire.types import MemoryBudgetError, Request, RequestError
from quire.util.numa import memory_nodes, near
from quire.util.platform import usable_cores
from quire.util.sizes import format_size

SILENT_SECONDS = 3.0  # the heart of a replica beats 20 times a second
_LOOK_SECONDS = 0.25
_SETTLE_SECONDS = 2.0
_RUNNING = (EngineState.READY, EngineState.STALLED)
_ANSWER_TOKENS = 256  # of a request that sets no limit
_REMEMBERED = 4096  # latest requests, for rows of the log
_PIECES = 2**14  # of prompts that are remembered for each replica: a million tokens
_PIECE_BYTES = 160  # that one takes; measured: 125
_PIECE_TOKENS = 64
# The state of all replicas is the first of these that one of them has.
_STATES = (
    EngineState.DRAINING, EngineState.READY, EngineState.STARTING, EngineState.RESTARTING, EngineState.STALLED,
    EngineState.SLEEPING, EngineState.FAILED,
)  # fmt: skip


class _Replica:
    """One engine, as the policy sees it; `work` is what it has been sent and has not answered, in prompt tokens."""

    weight, queued, distance = 1.0, 0.0, 0.0

    def __init__(self, name: str, engine: AsyncEngine, prefixes: PrefixIndex) -> None:
        self.name, self.engine, self._prefixes = name, engine, prefixes
        self.work = 0.0
        self._costs: dict[str, float] = {}
        self._restarts = 0
        engine.left = self._left

    @property
    def requests(self) -> int:
        """Requests that it has not answered."""
        return len(self._costs)

    def has(self, request_id: str) -> bool:
        """Whether a request is with it."""
        return request_id in self._costs

    def cached(self, digests: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that it has probably cached."""
        restarts = self.engine.restarts
        if restarts != self._restarts:
            self._restarts = restarts
            self._prefixes.forget(self.name)
        return self._prefixes.matched(self.name, digests) * _PIECE_TOKENS

    def take(self, ask: GenerateAsk, digests: Sequence[bytes], cost: float) -> Stream:
        """Give it a request. Raises what Engine.generate raises."""
        stream = self.engine.generate(ask)
        self._costs[ask.request.request_id] = cost
        self.work += cost
        self._prefixes.add(self.name, digests)
        return stream

    def _left(self, request: Request) -> None:
        self.work -= self._costs.pop(request.request_id, 0.0)
        if not self._costs:
            self.work = 0.0  # no sum of rounding errors


class ReplicatedEngine(EngineTexts):
    """api.Engine of `data_parallel_size` replicas, each of all the ranks that the model is spread over.

    The memory bound is divided: the server's part, then equal parts for the replicas. Belongs to the event loop that
    starts it. Raises MemoryBudgetError if nothing would be left for them.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        serving: ServingConfig | None = None,
        *,
        in_process: bool = False,
        progress: Progress | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        self.serving = serving or ServingConfig()
        self._text: TextService | None = None
        self._inputs = None
        self._held = server_memory(self.serving)
        if "kv_events" in self._held:
            self._held["kv_events"] *= config.parallel.data_parallel_size
        self._held["prefixes"] = config.parallel.data_parallel_size * _PIECES * _PIECE_BYTES
        self._bound = bound_of_several(config.limits.memory, self._held)
        configs = _divided(config, self._bound - sum(self._held.values()))
        make = partial(AsyncEngine, model, serving=self.serving, in_process=in_process, apart=True)
        first = make(configs[0], progress=progress, spawned=spawned)
        self._engines = [first, *(make(each, like=first) for each in configs[1:])]
        places = () if in_process else near(memory_nodes(), len(self._engines))
        for number, engine in enumerate(self._engines):
            engine.rank, engine.near = number, tuple(places[number]) if places else ()
        self._shares, self._config = False, config
        self._files: ReplicaFiles | None = None
        self._watching: asyncio.Task[None] | None = None
        self._prefixes = PrefixIndex(_PIECES)
        self._replicas = [
            _Replica(str(number), engine, self._prefixes) for number, engine in enumerate(self._engines)
        ]
        self._policy = PrefixAware()
        self._where: OrderedDict[str, AsyncEngine] = (
            OrderedDict()
        )  # the engine of each of the latest requests

    @property
    def _first(self) -> AsyncEngine:
        return self._engines[0]

    def _texts(self) -> TextService:
        return self._first._texts()

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        found = {engine.state for engine in self._engines}
        states = (EngineState.DRAINING, EngineState.FAILED, *reversed(_STATES)) if self._shares else _STATES
        return next(state for state in states if state in found)

    @property
    def card(self) -> ModelCard:
        return self._first.card

    @property
    def stats(self) -> EngineStats:
        found = merged_stats([engine.stats for engine in self._engines])
        ready = self._ready()
        requests = tuple(each.requests if each.engine in ready else -1 for each in self._replicas)
        return replace(found, replica_requests=requests)

    @property
    def degraded(self) -> Sequence[DegradeStep]:
        return max((engine.degraded for engine in self._engines), key=len)

    @property
    def startup(self) -> list[dict[str, Any]]:
        return self._first.startup

    @property
    def request_memory(self) -> int:
        return sum(engine.request_memory for engine in self._engines)

    @property
    def memory_lines(self) -> tuple[str, ...]:
        """The memory bound by part, as lines of text: of each replica."""
        held = (f"{name}  {format_size(size)}" for name, size in self._held.items())
        lines = self._first.memory_lines
        return (
            *held,
            f"{len(self._engines)} replicas, each:",
            *lines,
            f"in all, of {format_size(self._bound)}",
        )

    async def memory(self) -> Mapping[str, Any]:
        found = [await engine.memory() for engine in self._engines]
        processes = {"server": found[0]["processes"]["server"]}
        for number, each in enumerate(found):
            own = {name: parts for name, parts in each["processes"].items() if name != "server"}
            processes |= {f"{name} of replica {number}": parts for name, parts in own.items()}
        planned = dict(self._held)
        for each in found:
            for name, size in each["planned"].items():
                planned[name] = planned.get(name, 0) + size
        resident = sum(sum(parts.values()) for parts in processes.values())
        return {"bound": self._bound, "planned": planned, "resident": resident, "processes": processes}

    # -- its life -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """One replica first, which packs the weights that the others map; then all others at once."""
        if self._config.shares_experts:
            self._share_experts()
        try:
            await self._first.start()
            self._shares = self._first.shares_experts
            self._text, self._inputs = self._first._text, self._first._inputs
            await asyncio.gather(*(engine.start() for engine in self._engines[1:]))
        except BaseException:
            await self.stop(0.0)
            raise
        if self._files is not None and self._shares:
            self._watching = asyncio.create_task(self._watch(self._files))

    def _share_experts(self) -> None:
        """Have the replicas meet in a file: none of them computes without the others."""
        self._files = files = ReplicaFiles(len(self._engines))
        for number, engine in enumerate(self._engines):
            engine.sharing = SharingReplica(number, self._engines, files)

    async def _settle(self) -> None:
        """Once no replica begins a step any more: wait until none computes one, in which others are needed."""
        if self._shares:
            await asyncio.gather(*(engine.ping(_SETTLE_SECONDS) for engine in self._engines))

    async def _watch(self, files: ReplicaFiles) -> None:
        """End a replica that hangs: the others, whose steps wait for it, are ended with it."""
        size, stages = (
            self._config.parallel.tensor_parallel_size,
            self._config.parallel.pipeline_parallel_size,
        )
        seen = [(0, 0.0)] * len(self._engines)  # beats of each, and for how long they were the same
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for number, engine in enumerate(self._engines):
                beats = files.beats(((stages - 1) * len(self._engines) + number) * size)
                (before, silent), ready = seen[number], engine.state in _RUNNING
                still = files.behind(number) or (beats > 0 and beats == before)
                seen[number] = beats, silent + _LOOK_SECONDS if ready and still else 0.0
                if seen[number][1] > SILENT_SECONDS:
                    engine.kill(f"replica {number} does not answer")
                    seen[number] = beats, 0.0

    async def failed(self) -> None:
        """Returns when all replicas have been given up, or one of those that share experts."""
        tasks = [asyncio.ensure_future(engine.failed()) for engine in self._engines]
        try:
            await asyncio.wait(
                tasks, return_when=asyncio.FIRST_COMPLETED if self._shares else asyncio.ALL_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self, drain_seconds: float) -> None:
        await asyncio.gather(*(engine.finish(drain_seconds) for engine in self._engines))
        await self._settle()
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(engine.stop(0.0) for engine in reversed(self._engines)))
        if self._files is not None:
            self._files.close()
        self._text = self._inputs = self._watching = self._files = None

    async def sleep(self, level: int, drain_seconds: float) -> None:
        for engine in self._engines:
            require_ready(engine.state)
        await asyncio.gather(*(engine.rest(drain_seconds) for engine in self._engines))
        await self._settle()
        await asyncio.gather(*(engine.give_back(level) for engine in self._engines))
        if self._files is not None and level == 2:
            self._files.renew()
        self._forget_prefixes()

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self._engines))

    async def ping(self, timeout: float) -> bool:
        return all(await asyncio.gather(*(engine.ping(timeout) for engine in self._ready()))) and bool(
            self._ready()
        )

    async def clear_prefix_cache(self, timeout: float) -> bool:
        self._forget_prefixes()
        return all(await asyncio.gather(*(engine.clear_prefix_cache(timeout) for engine in self._engines)))

    def _forget_prefixes(self) -> None:
        for each in self._replicas:
            self._prefixes.forget(each.name)

    def _ready(self) -> list[AsyncEngine]:
        return [engine for engine in self._engines if engine.state is EngineState.READY]

    # -- requests -----------------------------------------------------------------------------------------

    def requests(self) -> Sequence[tuple[Request, RequestOutput]]:
        found = [one for engine in self._engines for one in engine.requests()]
        return sorted(found, key=lambda one: one[0].arrival)

    def cancel(self, request_id: str) -> bool:
        found = [engine.cancel(request_id) for engine in self._engines]
        return any(found)

    def generate(self, ask: GenerateAsk) -> Stream:
        request = ask.request
        if any(each.has(request.request_id) for each in self._replicas):
            raise RequestError("request_id", f"{request.request_id!r} is already in use")
        left = [each for each in self._replicas if each.engine.state is EngineState.READY]
        if not left or (self._shares and len(left) < len(self._engines)):
            require_ready(self.state)
        digests = _digests(request)
        answer = request.params.n * min(request.params.max_tokens or _ANSWER_TOKENS, self.card.max_model_len)
        prompt = RoutedPrompt("", first_tokens(request), answer, lambda name: cached[name])
        cached = {each.name: float(each.cached(digests)) for each in left}
        refused: OverloadedError | EngineUnavailableError | None = None
        while left:
            chosen = self._policy.choose(prompt, left)
            try:
                stream = chosen.take(ask, digests, prompt.work(chosen.name))
            except (OverloadedError, EngineUnavailableError) as error:
                if refused is None or error.retry_after < refused.retry_after:
                    refused = error
                left.remove(chosen)
                continue
            self._where[request.request_id] = chosen.engine
            while len(self._where) > _REMEMBERED:
                self._where.popitem(last=False)
            return stream
        assert refused is not None
        raise refused

    async def compile(self, asked: Structure, tenant: str = "") -> CompiledStructure:
        made = await self._first.compile(asked, tenant)
        await self.share_vocabulary()
        return made

    async def share_vocabulary(self) -> None:
        await asyncio.gather(*(engine.share_vocabulary() for engine in self._engines))

    # -- adapters -----------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, AdapterVersion]:
        return self._first.adapters

    async def load_adapter(self, name: str, path: str, *, root: str | None = None) -> AdapterVersion:
        before = self.adapters.get(name)
        for engine in self._engines:
            require_ready(engine.state)
        tasks = [engine.load_adapter(name, path, root=root) for engine in self._engines]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors:
            await self._take_back(name, before, found)
            raise errors[0]
        return self.adapters[name]

    async def _take_back(self, name: str, before: AdapterVersion | None, found: Sequence[Any]) -> None:
        """Have a name stand for what it stood for, where another version was loaded."""
        for engine, one in zip(self._engines, found, strict=True):
            if isinstance(one, AdapterVersion):
                if before is None:
                    engine.unload_adapter(name)
                else:
                    await engine.load_adapter(name, before.path, root=before.root)

    async def mix_adapters(
        self, parts: Sequence[tuple[str, float]]
    ) -> tuple[AdapterVersion, Callable[[], None]]:
        tasks = [engine.mix_adapters(parts) for engine in self._engines]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        made = [one for one in found if not isinstance(one, BaseException)]
        end = _all_of([end for _, end in made])
        for error in found:
            if isinstance(error, BaseException):
                end()
                raise error
        return made[0][0], end

    def unload_adapter(self, name: str) -> None:
        for engine in self._engines:
            engine.unload_adapter(name)

    def keep_adapter(self, digest: str) -> Callable[[], None]:
        return _all_of([engine.keep_adapter(digest) for engine in self._engines])

    def adapter(self, name: str) -> AdapterVersion:
        """What a name stands for now. Raises RequestError for an unknown one."""
        return self._first.adapter(name)

    def adapter_name(self, digest: str) -> str:
        return self._first.adapter_name(digest)

    # -- settings -----------------------------------------------------------------------------------------

    @property
    def live(self) -> LiveConfig:
        return self._first.live

    @property
    def first_live(self) -> LiveConfig:
        return self._first.first_live

    def share_cache(self, shares: Mapping[str, float]) -> None:
        for engine in self._engines:
            engine.share_cache(shares)

    async def configure(self, live: LiveConfig) -> None:
        """All replicas take it; one that is not ready now begins with it."""
        require_ready(self.state)
        ready = self._ready()
        await asyncio.gather(*(engine.configure(live) for engine in ready))
        for engine in self._engines:
            if engine not in ready:
                engine.adopt(live)

    def predict(self, live: LiveConfig, prompt: int) -> Mapping[str, float] | None:
        """What it would do to the replica with the fewest requests."""
        least = min(self._replicas, key=lambda each: each.requests)
        return least.engine.predict(live, prompt)

    @property
    def ledger(self) -> UsageLedger:
        return self._first.ledger

    # -- what it shows ------------------------------------------------------------------------------------

    async def debug(self, stages: bool = False) -> Mapping[str, Any]:
        found = [await engine.debug(stages) for engine in self._ready()]
        return {"steps": [step for each in found for step in each["steps"]]}

    async def log(self, request_id: str = "", replica: int = 0) -> bytes:
        return await self._where.get(request_id, self._engines[replica]).log()

    async def view(self, after: int) -> EngineView:
        """What the first replica holds."""
        return await self._first.view(after)

    def cache_logs(self) -> Sequence[CacheLog]:
        return [log for engine in self._engines for log in engine.cache_logs()]

    def tell(self, row: bytes, request_id: str) -> None:
        self._where.get(request_id, self._first).tell(row, request_id)


def _divided(config: EngineConfig, memory: int) -> list[EngineConfig]:
    """What each replica has of the memory and of the cores; a log of its own beside that which was asked for."""
    count = config.parallel.data_parallel_size
    if memory < count:
        raise MemoryBudgetError(
            f"memory: nothing is left for the {count} replicas of the model; raise --memory"
        )
    threads = config.execution.threads or max(1, usable_cores() // (count * config.parallel.ranks))
    each = [config.of_replica(at).replace(memory=memory // count, threads=threads) for at in range(count)]
    record = config.recording.record
    if record is None:
        return each
    return [one.replace(record=log_beside(record, str(number))) for number, one in enumerate(each)]


def _digests(request: Request) -> list[bytes]:
    """What stands for the pieces of a prompt, in the domain in which its cached blocks are found."""
    if request.prompt_embeds or request.soft_tokens:
        return []
    domain = "\0".join((request.tenant, request.namespace, request.adapter)).encode()
    return prompt_digests(domain, [request.prompt_token_ids.tobytes()])


def _all_of(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        for one in calls:
            one()

    return call
