"""vLLM's routes that load and unload adapters, for administrators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request, shorten
from quire.server.exchange import Body, Exchange
from quire.server.routes import PLAIN, HttpRoute, Post
from quire.server.served import Served
from quire.types import CheckpointError

_SHOWN = 200  # characters of a name in a message


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(description="the model name of the adapter in requests")]
    lora_path: Annotated[str, Meta(description="its folder or file in --lora-dir")]
    load_inplace: Annotated[
        bool | None, Meta(description="false: refuse a name that is taken; else it gets a new version")
    ] = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(context: ServerContext, exchange: Exchange, read: Body[LoadAdapterRequest]) -> bytes:
    """Have a name stand for an adapter from now on. Raises ApiError; then nothing has changed."""
    body, card = read.value, context.card()
    name = body.lora_name
    if context.config.lora_dir is None:
        raise bad_request(
            "lora_path", "lora_path: this server loads no adapters; it was started without --lora-dir"
        )
    if name in context.names():
        raise bad_request("lora_name", f"lora_name: {shorten(name, _SHOWN)!r} is the model itself")
    if body.load_inplace is False and name in context.engine.adapters:
        raise bad_request("lora_name", f"lora_name: {shorten(name, _SHOWN)!r} is loaded already")
    folder = Path(context.config.lora_dir).absolute()
    try:
        version = await context.engine.load_adapter(name, _below(folder, body.lora_path), root=str(folder))
    except CheckpointError as error:
        raise bad_request("lora_path", f"lora_path: {error}") from None
    fingerprint = Served(name, version).fingerprint(card)
    exchange.add_headers([(b"x-quire-model-version", fingerprint.encode())])
    return f"Success: LoRA adapter {name!r} added successfully.".encode()


def _below(folder: Path, path: str) -> str:
    """A path as a name in the folder, where it is written as a whole."""
    given = Path(path)
    return str(given.relative_to(folder)) if given.is_absolute() and given.is_relative_to(folder) else path


async def unload_adapter(context: ServerContext, _: Exchange, read: Body[UnloadAdapterRequest]) -> bytes:
    """Have a name stand for nothing. Raises ApiError 404 for one that does not stand for an adapter."""
    name = read.value.lora_name
    if name not in context.engine.adapters:
        message = f"lora_name: {shorten(name, _SHOWN)!r} is not loaded"
        raise ApiError(404, message, code="model_not_found", param="lora_name")
    context.engine.unload_adapter(name)
    return f"Success: LoRA adapter {name!r} removed successfully.".encode()


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/v1/load_lora_adapter", summary="Load an adapter, or a new version of it", tag="admin",
        handler=load_adapter, request=LoadAdapterRequest, response=str, media=PLAIN, admin=True,
    ),
    Post(
        path="/v1/unload_lora_adapter", summary="Unload an adapter", tag="admin", handler=unload_adapter,
        request=UnloadAdapterRequest, response=str, media=PLAIN, admin=True,
    ),
)  # fmt: skip
