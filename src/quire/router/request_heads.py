"""The heads of requests to servers, and the headers that a router has for itself."""

from __future__ import annotations

from collections.abc import Sequence

from quire.router.backend_server import BackendServer
from quire.router.picked import PICKED, SERVED
from quire.server.exchange import Exchange

# Headers that concern one connection, or are the router's own business; x-quire-* are between servers.
_NOT_PASSED = frozenset((
    b"host", b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"accept-encoding", b"expect", b"origin", b"cookie",
    b"x-request-id",
))  # fmt: skip
_KEYS = frozenset((b"authorization", b"x-api-key"))
_NOT_OF_CLIENTS = (b"x-quire-", PICKED)
_PASSED_OWN = frozenset((b"x-quire-tag",))
BACKEND = b"x-quire-backend"
MODEL = b"x-quire-model"  # that was asked, for a name that stands for others
SUFFICES = b"x-quire-suffices"  # the probability that the small model suffices, where that decides
OWN = frozenset((BACKEND, MODEL, SUFFICES, SERVED))


def request_head(
    exchange: Exchange, backend: BackendServer, own: Sequence[str], size: int | None, *, passes_key: bool
) -> bytes:
    """The head of the request of an exchange to a server, with lines of the router's `own`. `size`: bytes of its body,
    if it has one. `passes_key`: the server sees the client's key, unless the router has one for it."""
    server = backend.client.server
    query = exchange.scope.get("query_string", b"")
    path = server.base.encode("latin-1") + exchange.scope.get("raw_path", exchange.path.encode())
    method = "GET" if exchange.method == "HEAD" else exchange.method
    lines = [
        b"%b %b HTTP/1.1" % (method.encode(), path + b"?" + query if query else path),
        b"host: " + server.authority.encode(),
        b"x-request-id: " + exchange.request_id.encode("latin-1"),
        *(each.encode("latin-1") for each in own),
    ]
    if size is not None:
        lines.append(b"content-length: %d" % size)
    passes_key = passes_key and "authorization" not in server.headers
    for name, value in exchange.scope["headers"]:
        if name in _NOT_PASSED or (name in _KEYS and not passes_key):
            continue
        if name.startswith(_NOT_OF_CLIENTS) and name not in _PASSED_OWN:
            continue
        lines.append(name + b": " + value)
    lines += [f"{name}: {value}".encode("latin-1") for name, value in server.headers.items()]
    return b"\r\n".join((*lines, b"", b""))
