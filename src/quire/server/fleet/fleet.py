"""The models of a server: their shares of the memory, who is loaded, and who gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quire.config.lora_modules import adapter_paths
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.build.opening import find_model, gguf_files
from quire.engine.host.held import tokenizer_beside
from quire.engine.host.memory_ledger import MemoryLedger
from quire.engine.host.messages import Load
from quire.engine.host.plan_process import planned
from quire.objectives import parse_degrade
from quire.routing.traffic import TrafficRoute, TrafficRule, TrafficRules
from quire.server.context import directory_of
from quire.server.errors import ApiError, shorten
from quire.server.fleet.member import Member
from quire.server.fleet.places import ModelPlaces
from quire.server.fleet.shadows import Shadows
from quire.server.fleet.shares import ServedModel, Shares, with_share
from quire.server.logs import log
from quire.types import MemoryBudgetError

_TICK = 0.25


def check_for_several(serving: ServingConfig, models: Sequence[ServedModel] = ()) -> None:
    """Raise ValueError for options that a server with several models cannot have."""
    if any(each.config.parallel.data_parallel_size > 1 for each in models):
        raise ValueError("data_parallel_size: a server of several models has one replica of each")
    if serving.served_model_name:
        raise ValueError(
            "served_model_name: with several models each has its name: use aliases in the --models file"
        )


class Fleet:
    """Several models, of which each may have several versions. Belongs to the event loop that starts it.

    Raises ValueError for names that are given twice.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        shares: Shares,
        serving: ServingConfig,
        options: EngineConfig | None = None,
    ) -> None:
        check_for_several(serving, models)
        self.config, self.shares, self.tenants = serving, shares, directory_of(serving)
        self._options = options or EngineConfig()  # of models that come while the server runs
        self.places = ModelPlaces(shares.places, shares.place) if shares.places else None
        self._folder = tempfile.TemporaryDirectory(prefix="quire-")
        self._loading_turn = asyncio.Lock()
        self.ledger = MemoryLedger(shares.bound - sum(shares.server.values()))
        self.members: dict[str, Member] = {}  # by id; the first one answers requests that name no model
        self.current: dict[str, str] = {}  # name of a model -> id of the version that answers
        self._aliases: dict[str, str] = {}
        self._extra: dict[str, TrafficRule] = {}
        for each in models:
            for name in (each.name, *each.aliases):
                if name in self.current or name in self._aliases:
                    raise ValueError(f"{name}: two models have this name")
            own = shares.models.get(each.name)
            member = self.add(each if own is None else with_share(each, own), 1, placed=own is None)
            self.current[each.name] = member.id
            if own is not None:
                self.shares = self.shares.with_model(each.name, 0).with_model(member.id, own)
            self._aliases |= dict.fromkeys(each.aliases, each.name)
        self.rules = self._make_rules()
        for each in models:
            for step in parse_degrade(each.config.scheduler.degrade):
                if step.kind == "model" and step.value not in self.rules:
                    raise ValueError(f"degrade: {step}: there is no model or name {step.value!r}")
        self.shadows = Shadows()
        self.added: Callable[[Member], None] = lambda _: (
            None
        )  # called for versions that come while the server runs
        self.state = EngineState.STARTING  # STARTING, READY or DRAINING: whether requests are taken
        self._leaving: asyncio.Task[None] | None = None
        self._leavings: set[asyncio.Task[None]] = set()

    @property
    def default(self) -> Member:
        """The model for requests that name none."""
        return self.members[next(iter(self.current.values()))]

    @property
    def memory_lines(self) -> list[str]:
        """The memory bound by part, as lines of text."""
        return self.shares.lines()

    def names(self) -> Iterator[tuple[str, Member]]:
        """Every name that requests may use, with the member that mostly answers it."""
        for name in (*self.current, *self._aliases, *self._extra):
            yield name, self.members[self.rules.route(name, name).target]

    def route(self, name: str, key: str) -> TrafficRoute:
        """Where a request goes. Raises ApiError 404 for an unknown name."""
        if name not in self.rules:
            plain = name.removesuffix(":latest")  # Ollama's clients add it
            if plain not in self.rules:
                plain = self._with_adapter(name) or plain
            if plain not in self.rules:
                there = ", ".join(known for known, _ in self.names())
                message = f"model: {shorten(name, 200)!r} is not served here; available: {shorten(there)}"
                raise ApiError(404, message, code="model_not_found", param="model")
            name = plain
        return self.rules.route(name, key)

    def lighter(self, target: str) -> tuple[str, str] | None:
        """The model that answers in place of one that is saturated, and the step by which it does; None mostly."""
        engine = self.members[target].service.context.engine
        step = next((step for step in engine.degraded if step.kind == "model"), None)
        if step is None or step.value not in self.rules:
            return None
        other = self.rules.route(step.value).target
        return None if other == target else (other, str(step))

    def _with_adapter(self, name: str) -> str | None:
        """The model that serves an adapter under this name."""
        for known, of in self.current.items():
            if name in self.members[of].adapters:
                return known
        return None

    async def settled_route(self, name: str | None, key: str) -> TrafficRoute:
        """Where a request goes, once no version of its model is being swapped. Raises ApiError 404 and 503."""
        asked = next(iter(self.current)) if name is None else name
        route = self.route(asked, key)
        while (swap := self.members[route.target].swap) is not None:
            try:
                async with asyncio.timeout(self.config.max_load_wait):
                    await asyncio.shield(swap)
            except TimeoutError:
                raise EngineUnavailableError(f"{asked} is being replaced by another version") from None
            route = self.route(asked, key)
        return route

    async def ready(self, member: Member) -> None:
        """Return when requests can be passed to a member; raises what Member.ready raises."""
        await member.ready(self.config.max_load_wait, self.config.max_num_queued_reqs)

    def add(self, served: ServedModel, version: int, *, placed: bool = False) -> Member:
        """A version of a model, which gets no requests yet; one that is `placed` takes a place when it is loaded."""
        places = self.places if placed else None
        if places is not None:
            served = with_share(served, places.size)
        memory = self.ledger.entry(served.config.limits.memory or 0)
        cores = str(Path(self._folder.name) / "cores")
        member = Member(served, version, cores, self._loading_turn, places, memory, self.tenants)
        self.members[member.id] = member
        return member

    def add_stored(self, name: str, path: str) -> Member:
        """A version of a model of the store, which gets no requests yet."""
        numbers = [each.version for each in self.members.values() if each.served.name == name]
        served = ServedModel(name, path, self._options, self.config, stored=True)
        return self.add(served, 1 + max(numbers, default=0), placed=True)

    def set_rules(self, extra: dict[str, TrafficRule], current: dict[str, str], without: str = "") -> None:
        """Replace the rules at once; no request goes to the version `without` then. Raises ValueError for
        rules that lead nowhere, and changes nothing then.
        """
        before = self._extra, self.current
        self._extra, self.current = extra, current
        try:
            self.rules = self._make_rules(without)
        except ValueError:
            self._extra, self.current = before
            raise

    @property
    def extra(self) -> dict[str, TrafficRule]:
        """The rules that administrators made, by name."""
        return dict(self._extra)

    def _make_rules(self, without: str = "") -> TrafficRules:
        plain = {**self.current, **self._aliases}
        rules = {name: TrafficRule(((target, 1.0),)) for name, target in plain.items()} | self._extra
        made = TrafficRules(rules, self.members.keys() - {without})
        for member in self.members.values():
            member.service.context.served.also = frozenset((*rules, *self.members))
        return made

    async def start(self) -> None:
        """Check that each model fits its share. Nothing is loaded yet. Raises MemoryBudgetError naming the model."""
        checked = [member.served for member in self.members.values() if not member.served.stored]
        await check_shares(checked)
        self._leaving = asyncio.create_task(self._leave_idle())
        self.state = EngineState.READY

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for so long, end all engines."""
        self.state = EngineState.DRAINING
        if self._leaving is not None:
            self._leaving.cancel()
        await asyncio.gather(*self._leavings, return_exceptions=True)
        await asyncio.gather(*(member.stop(drain_seconds) for member in self.members.values()))
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    async def failed(self) -> None:
        """Never returns: a model that has failed leaves the others as they are."""
        await asyncio.Event().wait()

    async def _leave_idle(self) -> None:
        """End the engines that have had no request for as long as --keep-alive says."""
        tick = min(_TICK, max(abs(self.config.keep_alive), 0.01))
        while True:
            await asyncio.sleep(tick)
            for member in [each for each in self.members.values() if self._may_leave(each)]:
                log.info("%s leaves: it is idle", member.id)
                task = asyncio.create_task(
                    member.leave() if member.places else member.sleep(2, 0.0, held=False)
                )
                self._leavings.add(task)
                task.add_done_callback(self._leavings.discard)
                await asyncio.gather(task, return_exceptions=True)

    def keeps(self, member: Member) -> float:
        """Seconds that a model stays without a request; below 0: for ever."""
        return self.config.keep_alive if member.keep is None else member.keep

    def _may_leave(self, member: Member) -> bool:
        seconds = self.keeps(member)
        return seconds >= 0 and member.idle(seconds)


async def check_shares(models: Sequence[ServedModel]) -> None:
    """Raise MemoryBudgetError naming the first model that does not fit its share."""
    if not models:
        return
    found = await planned(await asyncio.to_thread(lambda: [_load_of(each) for each in models]))
    for served, plan in zip(models, found, strict=True):
        if isinstance(plan, MemoryBudgetError):
            raise MemoryBudgetError(f"{served.name}: {plan}")


def _load_of(served: ServedModel) -> Load:
    folder = find_model(served.model)
    first = tuple(adapter_paths(served.serving.lora_modules).values())
    beside = tokenizer_beside(folder, gguf_files(folder))
    return Load(str(folder), served.config, beside, adapters=first)
