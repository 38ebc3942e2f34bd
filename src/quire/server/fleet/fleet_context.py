"""What the routes that concern no single model work with: files, batches, and messages over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.api import EngineState, require_ready
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.served import Served

if TYPE_CHECKING:
    from quire.server.fleet.fleet import Fleet
    from quire.server.request_memory import RequestMemory


class FleetContext(ServerContext):
    """A ServerContext whose names are those of a fleet. What is counted is counted with the first model."""

    def __init__(self, fleet: Fleet, memory: RequestMemory) -> None:
        first = fleet.default.service.context
        super().__init__(
            first.engine, fleet.config, first.metrics, has_keys=first.has_keys, directory=fleet.tenants
        )
        self._fleet, self.memory = fleet, memory

    @property
    def state(self) -> EngineState:
        """Whether requests are taken, for models that are loaded or not."""
        return self._fleet.state

    def check_ready(self) -> None:
        """Raise EngineUnavailableError while requests are not taken."""
        require_ready(self.state)

    def names(self) -> Sequence[str]:
        """The names of all models; the first one answers requests that name none."""
        return [name for name, _ in self._fleet.names()]

    def model(self, asked: str | None, exchange: Exchange | None = None) -> str:
        """The requested name. Raises ApiError 404 for an unknown one, 403 for one that the tenant may not use."""
        name = self.names()[0] if asked is None else asked
        self.tenants.check_model("" if exchange is None else exchange.tenant, Served(name))
        self._fleet.route(name, "")
        return name
