"""What may change while an engine runs: its settings, and the names of its adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from quire.config.live import LiveConfig
from quire.engine.api import (
    AdapterVersion,
    EngineState,
    EngineStats,
    EngineUnavailableError,
    ModelCard,
    require_ready,
)
from quire.engine.cache_log import CacheLog
from quire.engine.front.adapter_names import AdapterNames
from quire.engine.front.admission import Admission
from quire.engine.front.saturation import Saturation
from quire.engine.front.stream import LiveRequest
from quire.engine.host.client import EngineClient
from quire.engine.host.messages import (
    AdapterOpened,
    CacheChanged,
    CacheWatched,
    Command,
    Configure,
)
from quire.engine.usage_ledger import UsageLedger, UsageMeter
from quire.objectives import parse_classes

logger = logging.getLogger("quire.engine")


class EngineSettings:
    """The part of an AsyncEngine that changes settings and adapters, over what that holds."""

    _client: EngineClient | None
    _admission: Admission | None
    _card: ModelCard | None
    _live: dict[int, LiveRequest]
    _live_config: LiveConfig | None
    _first_live: LiveConfig | None
    _shares: Mapping[str, float]
    _adapters: AdapterNames
    _cache: CacheLog | None
    _saturation: Saturation
    ledger: UsageLedger
    _meter: UsageMeter

    @property
    def state(self) -> EngineState:
        raise NotImplementedError

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    @property
    def live(self) -> LiveConfig:
        if self._live_config is None:
            raise EngineUnavailableError("the engine is loading")
        return self._live_config

    async def configure(self, live: LiveConfig) -> None:
        require_ready(self.state)
        assert self._client is not None
        await self._client.configure(live.engine)
        self.adopt(live)

    @property
    def first_live(self) -> LiveConfig:
        if self._first_live is None:
            raise EngineUnavailableError("the engine is loading")
        return self._first_live

    def share_cache(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        if self._live_config is not None:
            self.adopt(replace(self._live_config, cache_shares=dict(shares)))
            self._send(Configure(0, self._live_config.engine))

    def adopt(self, live: LiveConfig) -> None:
        """Take over what the engine has taken."""
        self._live_config = live
        if self._admission is not None:
            self._admission.configure(live)
        classes = parse_classes(live.slo)
        self._saturation.degrading.use(classes)
        if self._card is not None:
            self._card = replace(self._card, service_classes=classes)

    def predict(self, live: LiveConfig, prompt: int) -> Mapping[str, float] | None:
        if self._admission is None or self._client is None:
            return None
        return self._admission.outlook.effect(live, prompt, self._live.values(), self._client.reported)

    def counted(self, stats: EngineStats) -> None:
        self._meter.take(stats.usage)

    def cache_logs(self) -> Sequence[CacheLog]:
        return () if self._cache is None else (self._cache,)

    def cache_reported(self, report: CacheWatched | CacheChanged) -> None:
        if self._cache is None:
            return
        if isinstance(report, CacheWatched):
            self._cache.began(report.fingerprint)
        else:
            self._cache.changed(report.changes)

    @property
    def adapters(self) -> Mapping[str, AdapterVersion]:
        return self._adapters.named

    async def load_adapter(self, name: str, path: str, *, root: str | None = None) -> AdapterVersion:
        require_ready(self.state)
        return await self._adapters.load(name, path, root)

    async def mix_adapters(
        self, parts: Sequence[tuple[str, float]]
    ) -> tuple[AdapterVersion, Callable[[], None]]:
        require_ready(self.state)
        version = await self._adapters.mix(parts)
        return version, partial(self._adapters.leave, version.digest)

    def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def keep_adapter(self, digest: str) -> Callable[[], None]:
        self._adapters.enter(digest)
        return partial(self._adapters.leave, digest)

    def adapter(self, name: str) -> AdapterVersion:
        """What a name stands for now. Raises RequestError for an unknown one."""
        return self._adapters.version(name)

    def adapter_name(self, digest: str) -> str:
        return self._adapters.name(digest)

    def adapter_opened(self, report: AdapterOpened) -> None:
        self._adapters.opened(report)
