"""An application with what runs beside its requests, whatever serves it."""

from __future__ import annotations

import asyncio

from quire.config.serving import ServingConfig
from quire.engine.api import Engine
from quire.server.app import App, open_routes
from quire.server.batches.batch_endpoints import batch_endpoints
from quire.server.context import ServerContext, directory_of
from quire.server.metrics import ServerMetrics
from quire.server.request_memory import RequestMemory
from quire.server.tenant_access import TenantDirectory


class Service:
    """Answers requests by `app` as soon as it is made: with 503 until the engine is ready."""

    def __init__(self, engine: Engine, config: ServingConfig, tenants: TenantDirectory | None = None) -> None:
        """`tenants`: those of a server of several applications."""
        tenants = tenants or directory_of(config)
        self.context = ServerContext(engine, config, ServerMetrics(engine), tenants)
        tenants.changed.append(lambda: engine.share_cache(tenants.floors()))
        engine.share_cache(tenants.floors())
        if config.otlp_traces_endpoint is not None:
            from quire.server.tracing import Tracer

            self.context.tracer = Tracer(config.otlp_traces_endpoint)
        if config.output_hook is not None:
            from quire.server.output_hooks import OutputHooks

            self.context.hooks = OutputHooks(config, self.context.metrics.hooked)
        if config.mcp is not None:
            from quire.mcp.settings import read_settings
            from quire.server.tool_servers import ToolServers

            self.context.tools = ToolServers(read_settings(config.mcp))
        self.app = App(self.context)
        if config.files_dir is not None:
            from quire.server.batches.batch_service import BatchService

            self.context.batches = BatchService(
                config, self.app, self.context.memory, batch_endpoints(open_routes(config))
            )
        self._sweeping: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    @property
    def memory(self) -> RequestMemory:
        """What the bodies of requests are taken from as they arrive."""
        return self.context.memory

    def start(self) -> None:
        """Begin with what runs beside requests, in the running event loop."""
        context = self.context
        self._sweeping = asyncio.create_task(context.sweep())
        if context.simulations.on:
            self._checking = asyncio.create_task(
                context.simulations.check_always(context.engine, context.metrics)
            )
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
        await self.stop_alone()
        behind = list(self.context.behind.values())  # most have ended with the engine
        for task in behind:
            task.cancel()
        if behind:
            await asyncio.wait(behind)
        await self.context.tenants.stop()  # after the last that are counted
        if self.context.responses is not None:
            await asyncio.to_thread(self.context.responses.close)
        if self.context.tools is not None:
            await asyncio.to_thread(self.context.tools.close)

    async def stop_alone(self) -> None:
        """End what is of this application alone, not of others that share its responses."""
        await self.stop_batches()
        self.context.tenants.save()
        for task in (self._sweeping, self._checking):
            if task is not None:
                task.cancel()
        if self.context.hooks is not None:
            self.context.hooks.close()
        if self.context.tracer is not None:
            self.context.profile.tell()
            await asyncio.to_thread(self.context.tracer.close)
