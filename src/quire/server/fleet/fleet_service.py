"""All applications of a server with several models, and what runs beside their requests."""

from __future__ import annotations

import asyncio

from quire.server.context import ServerContext
from quire.server.dialects.response_store import ResponseStore
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.fleet_app import FleetApp
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
        self._behind: dict[str, asyncio.Task[None]] = {}
        self._tools = fleet.default.service.context.tools
        for member in fleet.members.values():
            self.adopt(member.service.context)
        fleet.added = self.added

    @property
    def context(self) -> ServerContext:
        """The context of the model for requests that name none."""
        return self._fleet.default.service.context

    @property
    def memory(self) -> RequestMemory:
        """What the bodies of requests are taken from as they arrive."""
        return self.app.memory

    def added(self, member: Member) -> None:
        """A version that has come while the server runs."""
        self.adopt(member.service.context)
        member.service.start()

    def adopt(self, context: ServerContext) -> None:
        """Make a model's stored responses and tool servers those of all."""
        context.responses, context.behind, context.tools = self._responses, self._behind, self._tools

    def start(self) -> None:
        """Begin with what runs beside requests."""
        for member in self._fleet.members.values():
            member.service.start()

    async def stop_batches(self) -> None:
        """There are none."""

    async def stop(self) -> None:
        """End all that runs beside requests; to be called when these have ended."""
        for member in self._fleet.members.values():
            await member.service.stop()
