"""The memory of a server with several models: one bound, a part for the server itself, a fixed share for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.host.held import bound_of_several, server_memory
from quire.records import dataclass
from quire.server.fleet.pulls import PROCESS_BYTES
from quire.types import MemoryBudgetError
from quire.util.sizes import format_size

BODIES = "bodies"  # what requests hold here before they are passed to a model
_BODIES_SHARE, _LEAST_BODIES, _MOST_BODIES = 32, 4 * 2**20, 256 * 2**20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as it was asked for: its name in requests, and where it is. `config` has its share of the memory, if that
    was asked for; `serving` the options of the server, with what is its own.
    """

    name: str
    model: str
    config: EngineConfig
    serving: ServingConfig
    aliases: tuple[str, ...] = ()
    stored: bool = False  # of the store: it is served as far as it can be


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes under one bound: of the server itself by part, of each model with a share of its own by name, and of each
    of the `places` that the other models take in turns.
    """

    bound: int
    server: Mapping[str, int]
    models: Mapping[str, int]
    places: int = 0
    place: int = 0

    @property
    def free(self) -> int:
        """Bytes that nothing has."""
        return self.bound - sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, int]:
        """All of them by name."""
        taken = {f"{self.places} models at a time": self.places * self.place} if self.places else {}
        return {**self.server, **self.models, **taken}

    def with_model(self, name: str, size: int) -> Shares:
        """With another share of a model; none if it is 0."""
        others = {other: share for other, share in self.models.items() if other != name}
        return replace(self, models={**others, name: size} if size else others)

    def lines(self) -> list[str]:
        """The sum in readable form, one part a line."""
        parts = self.parts
        width = max(len(name) for name in parts)
        lines = [f"{name:<{width}}  {format_size(size):>11}" for name, size in parts.items()]
        total = format_size(sum(parts.values()))
        return [*lines, f"{'sum':<{width}}  {total:>11}  at most, of {format_size(self.bound)}"]


def divided(bound: int | None, models: Sequence[ServedModel], serving: ServingConfig) -> Shares:
    """The shares of models: as asked, and equal parts of the rest for those that did not ask. With `models_max`
    these are places for so many at a time; models that are pulled while the server runs take one, too.

    Raises MemoryBudgetError, with the sum by part, when it is over the bound.
    """
    server = dict(server_memory(serving))
    bound = bound_of_several(bound, server)
    if serving.pull_limit is not None:
        server["pulls"] = PROCESS_BYTES
    server[BODIES] = max(_LEAST_BODIES, min(bound // _BODIES_SHARE, _MOST_BODIES))
    asked = {each.name: each.config.limits.memory or 0 for each in models}
    rest = bound - sum(server.values()) - sum(asked.values())
    without = [name for name, size in asked.items() if not size]
    pulls = serving.pull_limit is not None
    places = 0
    if pulls:
        named = [each for each in models if not each.stored and each.name in without]
        places = serving.models_max or max(1, len(named))
    elif without:
        places = min(serving.models_max, len(without))
    if rest < 0 or (without and rest < len(without)):
        table = "; ".join(f"{name} {format_size(size)}" for name, size in {**server, **asked}.items() if size)
        short = f" and {', '.join(without)} would have none" if without else ""
        raise MemoryBudgetError(
            f"memory: {format_size(bound)} is less than the sum {format_size(bound - rest)} of its parts "
            f"({table}){short}. To fit: raise --memory, or lower the memory of a model."
        )
    if places:
        return Shares(
            bound, server, {name: size for name, size in asked.items() if size}, places, rest // places
        )
    return Shares(bound, server, {name: size or rest // len(without) for name, size in asked.items()})


def with_share(model: ServedModel, size: int) -> ServedModel:
    """The model with its share of the memory."""
    return replace(model, config=model.config.replace(memory=size))
