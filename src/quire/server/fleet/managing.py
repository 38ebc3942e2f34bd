"""Ollama's and llama-server's routes that pull, remove, load and unload models, and show those that are not loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from quire.engine.build.opening import open_model
from quire.server.context import ServerContext
from quire.server.dialects.llama_server_types import LLAMA_SERVER_ERRORS
from quire.server.dialects.ollama import time_text
from quire.server.dialects.ollama_answers import LINES
from quire.server.dialects.ollama_pages import manage, shown
from quire.server.dialects.ollama_types import OLLAMA_ERRORS, OllamaDetails, OllamaShown, OllamaShowRequest
from quire.server.errors import ApiError, ErrorForm, api_error, bad_request, shorten
from quire.server.exchange import Exchange
from quire.server.fleet.admin_bodies import admin_body
from quire.server.fleet.deploy import Deployments
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.member import Member
from quire.server.fleet.pulls import Pulls
from quire.server.routes import Act, HttpRoute
from quire.store.model_store import ModelStore
from quire.store.references import ModelReference
from quire.types import CheckpointError

_encode = msgspec.json.Encoder().encode


class PullBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /api/pull and DELETE /api/delete; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None

    def reference(self) -> ModelReference:
        """The name of the model in the store. Raises ApiError 400."""
        if self.insecure:
            raise bad_request("insecure", "insecure: not supported; the hub's certificate is always checked")
        name = self.model or self.name
        if name is None or self.name not in {None, name}:
            raise bad_request("model", "model: expected the name of a model, once")
        return _reference(name, "model")


class CopyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /api/copy."""

    source: str
    destination: str


class NamedBody(msgspec.Struct):
    """Body of llama-server's /models/load and /models/unload."""

    model: str


class PullStatus(msgspec.Struct, omit_defaults=True):
    """A line of the answer to a pull, and the whole answer without `stream`."""

    status: str
    total: int = 0
    completed: int = 0


class Done(msgspec.Struct):
    """It is done."""

    success: bool = True


class RouterStatus(msgspec.Struct):
    """Whether a model is loaded, in llama-server's words."""

    value: str
    failed: bool = False


class RouterModel(msgspec.Struct):
    """A model in llama-server's list of a router."""

    id: str
    path: str
    status: RouterStatus
    in_cache: bool = True
    object: str = "model"


class RouterModels(msgspec.Struct):
    """Answer to GET /models."""

    data: list[RouterModel]
    object: str = "list"


def _reference(name: str, field: str) -> ModelReference:
    try:
        return ModelReference.parse(name)
    except CheckpointError as error:
        raise bad_request(field, f"{field}: {error}") from None


class Managing:
    """Changes of the models of a fleet and of the store, as other servers' clients ask for them."""

    def __init__(self, fleet: Fleet, deployments: Deployments) -> None:
        self._fleet, self._deployments = fleet, deployments
        limit = fleet.config.pull_limit
        self._pulls = None if limit is None else Pulls(limit)

    async def pull(self, _: ServerContext, exchange: Exchange) -> PullStatus | None:
        """Pull a model of the hub, and serve it."""
        body = await admin_body(self._fleet.config, exchange, PullBody)
        reference = body.reference()
        if "/" not in reference.name:
            known = await asyncio.to_thread(ModelStore().find, reference)
            if known is None:
                message = (
                    f"model: {shorten(str(reference), 200)!r} is not a name of the hub: organisation/name"
                )
                raise bad_request("model", message)
        async with aclosing(self._pulled(reference)) as lines:
            if body.stream is False:
                async with exchange.watch():
                    async for _line in lines:
                        pass
                return PullStatus("success")
            await exchange.start(200, [(b"content-type", LINES)])
            async with exchange.watch():
                try:
                    async for line in lines:
                        await exchange.write(_encode(line) + b"\n")
                except ApiError as error:  # Ollama's clients read it in a line
                    await exchange.write(OLLAMA_ERRORS.event(OLLAMA_ERRORS.body(api_error(error))))
            await exchange.write(b"", more=False)
        return None

    async def _pulled(self, reference: ModelReference) -> AsyncGenerator[PullStatus, None]:
        if self._pulls is None:
            raise bad_request(
                "model", "model: this server pulls nothing; it was started without --pull-limit"
            )
        yield PullStatus("pulling manifest")
        async with aclosing(self._pulls.pull(str(reference))) as progress:
            async for said in progress:
                if isinstance(said, str):
                    yield PullStatus(said)
                else:
                    yield PullStatus(f"pulling {reference}", said[1], said[0])
        await self._deployments.serve_stored(str(reference))
        yield PullStatus("success")

    async def delete(self, _: ServerContext, exchange: Exchange) -> dict[str, Any]:
        """Serve a model of the store no longer, and remove it from there."""
        reference = (await admin_body(self._fleet.config, exchange, PullBody)).reference()
        self._check_store()
        store = ModelStore()
        found = await asyncio.to_thread(store.find, reference)
        if found is None:
            message = f"model: {shorten(str(reference), 200)!r} is not in the store"
            raise ApiError(404, message, code="model_not_found", param="model")
        await self._deployments.drop(found.reference)
        try:
            await asyncio.to_thread(store.remove, reference)
        except CheckpointError as error:
            raise ApiError(409, str(error), code="in_use", param="model") from None
        return {}

    async def copy(self, _: ServerContext, exchange: Exchange) -> dict[str, Any]:
        """Give a model of the store another name, which takes no space."""
        body = await admin_body(self._fleet.config, exchange, CopyBody)
        self._check_store()
        store, to = ModelStore(), _reference(body.destination, "destination")
        found = await asyncio.to_thread(store.find, _reference(body.source, "source"))
        if found is None:
            message = f"source: {shorten(body.source, 200)!r} is not in the store"
            raise ApiError(404, message, code="model_not_found", param="source")
        if await asyncio.to_thread(store.find, to) is not None or str(to) in self._fleet.rules:
            raise bad_request("destination", f"destination: {shorten(str(to), 200)!r} is taken")
        await asyncio.to_thread(store.finish, msgspec.structs.replace(found, reference=str(to)))
        await self._deployments.serve_stored(str(to))
        return {}

    def _check_store(self) -> None:
        if self._pulls is None:
            raise bad_request(
                "model", "model: this server does not change the store; it was started without --pull-limit"
            )

    async def show(self, _: ServerContext, exchange: Exchange) -> OllamaShown:
        """Facts about a model, which is not loaded for that: then what its files say."""
        body = await admin_body(self._fleet.config, exchange, OllamaShowRequest)
        name = body.model or body.name or next(iter(self._fleet.current))
        if body.name not in {None, name}:
            raise bad_request("name", "name: differs from model; set only one of them")
        member = self._fleet.members[self._fleet.route(name, "").target]
        if member.loaded and member.state == "ready":
            return await shown(member.service.context)
        return await asyncio.to_thread(_of_files, member)

    async def load(self, _: ServerContext, exchange: Exchange) -> Done:
        """Begin to load a model."""
        (await self._named(exchange)).begin()
        return Done()

    async def unload(self, _: ServerContext, exchange: Exchange) -> Done:
        """End the engine of a model; the next request loads it again."""
        member = await self._named(exchange)
        if member.state != "ready":
            message = f"model: {member.served.name} is not loaded, it is {member.state}"
            raise ApiError(400, message, code="not_loaded", param="model")
        await member.sleep(2, self._fleet.config.shutdown_timeout, held=False)
        return Done()

    async def _named(self, exchange: Exchange) -> Member:
        body = await admin_body(self._fleet.config, exchange, NamedBody)
        return self._fleet.members[self._fleet.route(body.model, "").target]

    async def list_models(self, _: ServerContext, __: Exchange) -> RouterModels:
        """All names, and whether their models are loaded."""
        found = []
        for name, member in self._fleet.names():
            state = {"ready": "loaded", "failed": "unloaded"}.get(member.state, member.state)
            status = RouterStatus(state, failed=member.failure is not None)
            found.append(RouterModel(name, member.served.model, status))
        return RouterModels(found)


def _of_files(member: Member) -> OllamaShown:
    """What the files of a model say of it. Raises CheckpointError and UnsupportedModelError."""
    facts = open_model(member.served.model, tokenizer=False).facts
    info: dict[str, Any] = {
        "general.architecture": facts.architecture,
        f"{facts.architecture}.context_length": facts.longest,
        f"{facts.architecture}.vocab_size": facts.spec.vocab,
    }
    return OllamaShown(
        parameters="", template="", details=OllamaDetails(facts.architecture, [facts.architecture]), model_info=info,
        capabilities=["completion" if facts.pooling is None else "embedding"],
        modified_at=time_text(datetime.fromtimestamp(member.created, UTC)),
    )  # fmt: skip


def managing_routes(fleet: Fleet, deployments: Deployments) -> tuple[HttpRoute, ...]:
    """The routes, over a fleet."""
    made = Managing(fleet, deployments)

    def act(
        verb: str, path: str, summary: str, handler: Any, response: type[Any], api: str, errors: ErrorForm
    ) -> HttpRoute:
        admin = handler is not manage and path not in {"/models", "/api/show"}
        return Act(
            verb=verb, path=path, summary=summary, tag="admin" if admin else api, handler=handler,
            response=response, admin=admin, api=api, errors=errors,
        )  # fmt: skip

    ollama = partial(act, api="ollama", errors=OLLAMA_ERRORS)
    router = partial(act, api="llama-server", errors=LLAMA_SERVER_ERRORS)
    return (
        ollama("POST", "/api/pull", "Pull a model of the hub, and serve it", made.pull, PullStatus),
        ollama("DELETE", "/api/delete", "Remove a model from the store", made.delete, dict),
        ollama("POST", "/api/copy", "Give a model of the store another name", made.copy, dict),
        *(
            ollama("POST", path, "Refused: models are neither made nor sent away here", manage, dict)
            for path in ("/api/create", "/api/push")
        ),
        ollama("POST", "/api/show", "Facts about a model, in Ollama's form", made.show, OllamaShown),
        router("GET", "/models", "The models and whether they are loaded", made.list_models, RouterModels),
        router("POST", "/models/load", "Begin to load a model", made.load, Done),
        router("POST", "/models/unload", "End the engine of a model", made.unload, Done),
    )
