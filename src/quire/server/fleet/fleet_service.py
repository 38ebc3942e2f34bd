"""All applications of a server with several models, and what runs beside their requests."""

from __future__ import annotations

import asyncio

from quire.engine.api import Engine
from quire.server.app import open_routes
from quire.server.batches.batch_endpoints import batch_endpoints
from quire.server.context import ServerContext
from quire.server.dialects.response_store import ResponseStore
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.fleet_app import FleetApp
from quire.server.fleet.fleet_context import FleetContext
from quire.server.fleet.member import Member
from quire.server.request_memory import RequestMemory


class FleetService:
    """A Service of several models. Stored responses and tool servers are those of all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.app = FleetApp(fleet)
        config = fleet.config
        self._responses = ResponseStore(
            config.response_store, config.response_store_size, config.response_store_days
        )
        self.context = FleetContext(fleet, self.app.memory)
        self.app.context = self.context
        if config.files_dir is not None:
            from quire.server.batches.batch_service import BatchService

            self.context.batches = BatchService(
                config, self.app, self.app.memory, batch_endpoints(open_routes(config))
            )
        self._sweeping: asyncio.Task[None] | None = None
        self._behind: dict[str, asyncio.Task[None]] = {}
        first = fleet.default.service.context
        self._tools, self._simulations = first.tools, first.simulations
        for member in fleet.members.values():
            self.adopt(member.service.context)
        fleet.added = self.added
        if self._simulations.on:
            self._simulations.engines = self._engines

    @property
    def memory(self) -> RequestMemory:
        """What the bodies of requests are taken from as they arrive."""
        return self.app.memory

    def _engines(self) -> dict[str, Engine]:
        named = {**self._fleet.members, **dict(self._fleet.names())}
        return {name: member.service.context.engine for name, member in named.items()}

    def added(self, member: Member) -> None:
        """A version that has come while the server runs."""
        self.adopt(member.service.context)
        member.service.start()

    def adopt(self, context: ServerContext) -> None:
        """Make a model's stored responses, tool servers and simulations those of all."""
        context.responses, context.behind, context.tools = self._responses, self._behind, self._tools
        context.simulations = self._simulations

    def start(self) -> None:
        """Begin with what runs beside requests."""
        for member in self._fleet.members.values():
            member.service.start()
        self._sweeping = asyncio.create_task(self.context.sweep())
        if self.context.batches is not None:
            self.context.batches.start()

    def reload(self) -> None:
        """Read the file of tenants again."""
        self.context.reload()

    async def stop_batches(self) -> None:
        """Leave the batches where they are; the next server goes on with them."""
        if self.context.batches is not None:
            await self.context.batches.stop()

    async def stop(self) -> None:
        """End all that runs beside requests; to be called when these have ended."""
        await self.stop_batches()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for member in self._fleet.members.values():
            await member.service.stop()
