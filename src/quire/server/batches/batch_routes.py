"""OpenAI's /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from quire.server.batches.batch_states import BatchBody, Metadata
from quire.server.batches.file_store import MAX_FILES, FileBody, storage_error
from quire.server.batches.upload import Upload
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Body, Exchange
from quire.server.query import PAGE, page_of, query_of
from quire.server.routes import Act, HttpRoute, Post
from quire.util.files import open_regular

if TYPE_CHECKING:
    from quire.server.batches.batch_service import BatchService

_FILES, _BATCHES = "/v1/files/", "/v1/batches/"
_WINDOW = re.compile(r"(\d{1,3})([hd])", re.ASCII)
_HOURS = {"h": 1, "d": 24}
_MAX_HOURS = 30 * 24
_SECONDS = (3600, 30 * 24 * 3600)  # for which files may be kept
_CHUNK = 256 * 1024
_OF_FILES = (*PAGE, "purpose")


class ExpiresAfter(msgspec.Struct):
    """How long a file is kept after it was made, in seconds."""

    seconds: int
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    data: list[FileBody]
    object: Literal["list"] = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches, the newest first."""

    data: list[BatchBody]
    object: Literal["list"] = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def _service(context: ServerContext, exchange: Exchange) -> tuple[BatchService, str]:
    """The files and batches of a server, and the domain of a request."""
    if context.batches is None:
        message = "this server keeps no files; start it with --files-dir DIR for files and batches"
        raise ApiError(404, message, code="files_disabled")
    return context.batches, context.batches.files.domain(exchange.tenant)


async def upload(context: ServerContext, exchange: Exchange) -> FileBody:
    """Keep a file."""
    service, domain = _service(context, exchange)
    config, files = context.config, service.files
    files.check_room(domain, int(exchange.header(b"content-length") or 0))
    name = files.new_id()
    part = files.folder(domain) / f"{name}.part"
    read = Upload(part)
    try:
        await read.read(exchange, config.max_file_size, config.body_timeout)
        seconds = _checked(read.fields)
        files.check_room(domain, read.size)
        return files.add(domain, name, part, read.filename, "batch", seconds)
    except OSError as error:
        raise storage_error(error) from None
    finally:
        part.unlink(missing_ok=True)


def _checked(fields: dict[str, str]) -> float | None:
    """Check the fields of an upload; returns the seconds that its file is kept, None for the default."""
    known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in fields.keys() - known:
        raise bad_request(name[:100], f"{name[:100]}: not a field of an upload", "unknown_field")
    purpose = fields.get("purpose")
    if purpose != "batch":
        shown = "missing" if purpose is None else f"{purpose[:50]!r} is not supported"
        raise bad_request("purpose", f"purpose: {shown}; files are kept for batches: 'batch'")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise bad_request("expires_after", "expires_after.anchor: is not 'created_at'")
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    return _expiry("expires_after", int(text) if text.isascii() and text.isdigit() else -1)


def _expiry(field: str, seconds: int) -> float:
    if not _SECONDS[0] <= seconds <= _SECONDS[1]:
        raise bad_request(field, f"{field}.seconds: is not from {_SECONDS[0]} to {_SECONDS[1]}")
    return float(seconds)


async def list_files(context: ServerContext, exchange: Exchange) -> FileList:
    """The files of a client."""
    service, domain = _service(context, exchange)
    query = query_of(exchange.scope["query_string"], _OF_FILES)
    purpose = query.get("purpose")
    found = [body for body in service.files.all(domain) if purpose in {None, body.purpose}]
    page, more = page_of(found, _id_of, query, MAX_FILES, MAX_FILES)
    first, last = _ends(page)
    return FileList(data=page, has_more=more, first_id=first, last_id=last)


async def file_or_content(context: ServerContext, exchange: Exchange) -> FileBody | None:
    """A file, or with /content its bytes."""
    service, domain = _service(context, exchange)
    name, slash, rest = exchange.path.removeprefix(_FILES).partition("/")
    body = service.files.get(domain, name)
    if not slash:
        return body
    if rest != "content":
        raise ApiError(404, "no such path; see /openapi.json", code="not_found")
    length = (b"content-length", str(body.bytes).encode())
    with open_regular(service.files.path(domain, name)) as file:
        await exchange.start(200, [(b"content-type", b"application/octet-stream"), length])
        async with exchange.watch() as watch:
            with context.watched(watch):
                while piece := await asyncio.to_thread(file.read, _CHUNK):
                    await exchange.write(piece)
                await exchange.write(b"", more=False)
    return None


async def delete_file(context: ServerContext, exchange: Exchange) -> FileDeleted:
    """Remove a file."""
    service, domain = _service(context, exchange)
    name = exchange.path.removeprefix(_FILES)
    service.files.delete(domain, name)
    return FileDeleted(name)


async def create_batch(context: ServerContext, exchange: Exchange, read: Body[BatchRequest]) -> BatchBody:
    """Run the requests of a file when nothing else runs."""
    service, domain = _service(context, exchange)
    body = read.value
    if body.endpoint not in service.endpoints:
        known = ", ".join(sorted(service.endpoints))
        raise bad_request("endpoint", f"endpoint: {body.endpoint[:100]!r} is not one of {known}")
    match = _WINDOW.fullmatch(body.completion_window)
    hours = int(match[1]) * _HOURS[match[2]] if match else 0
    if not 1 <= hours <= _MAX_HOURS:
        message = f"completion_window: {body.completion_window[:20]!r} is not from 1h to 30d, like 24h"
        raise bad_request("completion_window", message)
    kept = body.output_expires_after
    seconds = None if kept is None else _expiry("output_expires_after", kept.seconds)
    if service.files.get(domain, body.input_file_id).purpose != "batch":
        raise bad_request(
            "input_file_id", "input_file_id: the file was not uploaded with the purpose 'batch'"
        )
    window = body.completion_window, hours * 3600.0
    try:
        return service.create(domain, body.endpoint, body.input_file_id, window, body.metadata, seconds)
    except OSError as error:
        raise storage_error(error) from None


async def list_batches(context: ServerContext, exchange: Exchange) -> BatchList:
    """The batches of a client, the newest first."""
    service, domain = _service(context, exchange)
    query = query_of(exchange.scope["query_string"], PAGE)
    page, more = page_of(service.states.all(domain), _id_of, query, 20, 100)
    first, last = _ends(page)
    return BatchList(data=page, has_more=more, first_id=first, last_id=last)


async def batch(context: ServerContext, exchange: Exchange) -> BatchBody:
    """A batch."""
    service, domain = _service(context, exchange)
    return service.states.get(domain, exchange.path.removeprefix(_BATCHES))


async def cancel_batch(context: ServerContext, exchange: Exchange) -> BatchBody:
    """End a batch early."""
    service, domain = _service(context, exchange)
    name, _, rest = exchange.path.removeprefix(_BATCHES).partition("/")
    if rest != "cancel":
        raise ApiError(404, "no such path; see /openapi.json", code="not_found")
    return service.cancel(domain, name)


def _id_of(item: FileBody | BatchBody) -> str:
    return item.id


def _ends(page: Sequence[FileBody | BatchBody]) -> tuple[str | None, str | None]:
    """The ids of the first and the last item."""
    return (page[0].id, page[-1].id) if page else (None, None)


ROUTES: tuple[HttpRoute, ...] = (
    Act(verb="POST", path="/v1/files", summary="Upload a file", tag="batches", handler=upload, response=FileBody,
        form={"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}),
    Act(verb="GET", path="/v1/files", summary="The files", tag="batches", handler=list_files, response=FileList,
        query=_OF_FILES),
    Act(
        verb="GET", path="/v1/files/{}", rest="file", summary="A file; with /content, its bytes", tag="batches",
        handler=file_or_content, response=FileBody,
    ),
    Act(
        verb="DELETE", path="/v1/files/{}", rest="file", summary="Delete a file", tag="batches", handler=delete_file,
        response=FileDeleted,
    ),
    Post(
        path="/v1/batches", summary="Run the requests of a file", tag="batches", handler=create_batch,
        request=BatchRequest, response=BatchBody,
    ),
    Act(verb="GET", path="/v1/batches", summary="The batches", tag="batches", handler=list_batches, response=BatchList,
        query=PAGE),
    Act(
        verb="GET", path="/v1/batches/{}", rest="batch", summary="A batch", tag="batches", handler=batch,
        response=BatchBody,
    ),
    Act(
        verb="POST", path="/v1/batches/{}", rest="batch", summary="Cancel a batch: its id and /cancel", tag="batches",
        handler=cancel_batch, response=BatchBody,
    ),
)  # fmt: skip
