"""Static files of the web pages. They are open, hold no data, and load nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quire.server.context import ServerContext
from quire.server.errors import ApiError, Header
from quire.server.exchange import Exchange
from quire.server.routes import Act, HttpRoute

_BUILT = Path(__file__).with_name("built")
_MEDIA = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
# Nothing inline, nothing from other hosts; HTML that scripts put in is sanitized first.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    b"trusted-types dompurify"
)
_HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # asks each time, and is told 304
    (b"vary", b"accept-encoding"),
)


class _Page(NamedTuple):
    media: bytes
    plain: bytes
    packed: bytes
    tag: bytes


@cache
def _pages() -> dict[str, _Page]:
    """Every built file by its name: less than a megabyte, read with the first request for one."""
    found = {}
    for path in sorted(_BUILT.iterdir()):
        data = path.read_bytes()
        tag = b'"' + hashlib.sha256(data).hexdigest()[:16].encode() + b'"'
        found[path.name] = _Page(_MEDIA[path.suffix], data, gzip.compress(data, mtime=0), tag)
    return found


async def _start_page(_: ServerContext, exchange: Exchange) -> None:
    await _send(exchange, "index.html")


async def _lesson(_: ServerContext, exchange: Exchange) -> None:
    await _send(exchange, "learn.html")


async def _control_room(_: ServerContext, exchange: Exchange) -> None:
    await _send(exchange, "dashboard.html")


async def _reference(_: ServerContext, exchange: Exchange) -> None:
    await _send(exchange, "reference.html")


async def _file(_: ServerContext, exchange: Exchange) -> None:
    await _send(exchange, exchange.path.removeprefix("/ui/"))


async def _send(exchange: Exchange, name: str) -> None:
    page = _pages().get(name)
    if page is None:
        raise ApiError(404, "no such page", code="not_found")
    headers = [*_HEADERS, (b"etag", page.tag)]
    if exchange.header(b"if-none-match") == page.tag.decode():
        await exchange.respond(304, b"", content_type=page.media, headers=headers)
    elif "gzip" in exchange.header(b"accept-encoding"):
        headers.append((b"content-encoding", b"gzip"))
        await exchange.respond(200, page.packed, content_type=page.media, headers=headers)
    else:
        await exchange.respond(200, page.plain, content_type=page.media, headers=headers)


ROUTES: tuple[HttpRoute, ...] = (
    Act(
        verb="GET", path="/", summary="The web page: a chat", tag="pages", handler=_start_page, response=str,
        media=_MEDIA[".html"], api="", open=True,
    ),
    Act(
        verb="GET", path="/learn", summary="The web page: simulations of the lesson", tag="pages", handler=_lesson,
        response=str, media=_MEDIA[".html"], api="", open=True,
    ),
    Act(
        verb="GET", path="/dashboard", summary="The web page: the control room", tag="pages", handler=_control_room,
        response=str, media=_MEDIA[".html"], api="", open=True,
    ),
    Act(
        verb="GET", path="/docs", summary="The web page: the API", tag="pages", handler=_reference,
        response=str, media=_MEDIA[".html"], api="", open=True,
    ),
    Act(
        verb="GET", path="/ui/{}", rest="file", summary="A file of the web pages", tag="pages", handler=_file,
        response=str, media=b"application/octet-stream", api="", open=True,
    ),
)  # fmt: skip
