"""A router's application with what runs beside its requests: what an HttpServer serves."""

from __future__ import annotations

import asyncio

from quire.config.serving import ServingConfig
from quire.router.backends import Backends
from quire.router.router_app import RouterApp
from quire.router.router_context import RouterContext
from quire.server.request_memory import RequestMemory


class RouterService:
    """Answers requests as soon as it is made: with 503 until a server is found to be well."""

    def __init__(self, backends: Backends, config: ServingConfig) -> None:
        self.context = RouterContext(backends, config)
        self.app = RouterApp(self.context)
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def memory(self) -> RequestMemory:
        """What the bodies of requests are taken from as they arrive."""
        return self.context.memory

    def start(self) -> None:
        """Begin with what runs beside requests."""
        self._sweeping = asyncio.create_task(self.context.sweep())

    def reload(self) -> None:
        """Read the files of tenants and servers again; one that is wrong changes nothing."""
        self.context.reload()

    async def stop_batches(self) -> None:
        """A router has no batches."""

    async def stop(self) -> None:
        """End what runs beside requests."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.context.tenants.stop()
        if self.context.semantic is not None:
            await self.context.semantic.stop()
