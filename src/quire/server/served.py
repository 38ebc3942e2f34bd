"""The names under which models are served, and what each of them stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire import __version__
from quire.config.serving import ServingConfig
from quire.engine.api import AdapterVersion, Engine, ModelCard
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """A name in requests: of the model alone, or with an adapter."""

    name: str
    adapter: AdapterVersion | None = None

    @property
    def digest(self) -> str:
        """The version of the adapter, as requests name it; "" without one."""
        return "" if self.adapter is None else self.adapter.digest

    def fingerprint(self, card: ModelCard) -> str:
        """Equal for equal versions of Quire serving the same weights: what system_fingerprint promises."""
        text = f"{__version__} {card.config_sha256} {card.template_hash} {card.weights}"
        if self.adapter is not None:
            text += f" {self.adapter.digest}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


class ServedModels:
    """All names of a server, as of now."""

    def __init__(self, engine: Engine, config: ServingConfig) -> None:
        self._engine, self._config = engine, config
        self.also: frozenset[str] = frozenset()  # names that stood for this model before a request came here

    def base(self) -> Sequence[str]:
        """The names of the model alone; the first is reported."""
        return self._config.served_model_name or (self._engine.card.name,)

    def all(self) -> list[Served]:
        """Every name: the model's, then those of the adapters."""
        base = self.base()
        return [
            *map(Served, base),
            *(Served(name, version) for name, version in self._engine.adapters.items() if name not in base),
        ]

    def find(self, name: str | None) -> Served | None:
        """What a name stands for; the model without one."""
        base = self.base()
        if name is None or name in base:
            return Served(base[0] if name is None else name)
        version = self._engine.adapters.get(name)
        return Served(name, version) if version is not None or name in self.also else None
