"""Access control: API keys, Host and Origin."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from quire.config.router_link import parse_router
from quire.config.serving import ServingConfig
from quire.routing.tickets import read_key
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.tenant_access import TenantDirectory

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_KEY_BYTES = 4096
ALL = "*"
# Headers that must not be repeated: a second value would contradict the first.
_ONCE = frozenset({b"host", b"authorization", b"x-api-key", b"origin", b"content-type", b"idempotency-key"})
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)
_FRAME = "*" * 88
_EXPOSED = b", ".join((
    b"x-request-id, retry-after, retry-after-ms, idempotency-replayed",
    *(b"x-ratelimit-%b-requests, x-ratelimit-%b-tokens" % (what, what) for what in (b"limit", b"remaining", b"reset")),
))  # fmt: skip


class AccessControl:
    """Checks made before a request is read.

    On a loopback address only loopback names are accepted as Host, so that a web page cannot reach the server
    by a name that it resolves to this machine (DNS rebinding); elsewhere any, unless a list is given. A browser's
    Origin must be listed, or be that of the server itself. Keys are compared in constant time.
    """

    def __init__(self, config: ServingConfig, tenants: TenantDirectory) -> None:
        self._keys = [key.encode() for key in read_keys(config)]
        self._directory = tenants
        # Tenants are named by the key itself: its index may belong to another key later. A single key has no tenant.
        several = len(self._keys) > 1 or tenants.path is not None
        self._tenants = [hashlib.sha256(key).hexdigest() if several else "" for key in self._keys]
        self._hosts = _allowed_hosts(config)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._any_origin = ALL in self._origins

    def check_source(self, exchange: Exchange) -> None:
        """Raise ApiError 403 for a Host or Origin that is not allowed, 400 for a missing Host or a repeated header."""
        counts = Counter(name for name, _ in exchange.scope["headers"] if name in _ONCE)
        for name, count in counts.items():
            if count > 1:
                message = f"{name.decode()}: sent more than once"
                raise ApiError(400, message, code="invalid_header", close=True)
        if b"host" not in counts and exchange.scope["http_version"] != "1.0":
            raise ApiError(400, "host: missing", code="invalid_header", close=True)
        host = exchange.header(b"host").lower()
        if self._hosts is not None and host and _without_port(host) not in self._hosts:
            raise ApiError(
                403, "host: this name is not allowed (see --allowed-hosts)", code="host_not_allowed"
            )
        origin = exchange.header(b"origin").lower()
        if origin and not self._may_call(origin) and urlsplit_netloc(origin) != host:
            raise ApiError(
                403, "origin: this origin is not allowed (see --allowed-origins)", code="origin_not_allowed"
            )

    @property
    def has_keys(self) -> bool:
        """Whether clients must present a key."""
        return bool(self._keys) or self._directory.path is not None

    def check_key(self, exchange: Exchange) -> None:
        """Raise ApiError 401 unless a known key was presented; records which one when there are several."""
        if not self.has_keys:
            return
        tenant = self._directory.of_key(presented(exchange))
        if tenant is None:
            exchange.tenant = self._tenants[presented_key(exchange, self._keys, "API key")]
        else:
            exchange.tenant = tenant.name
        exchange.held.assign(exchange.tenant)

    def cors_headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Headers that let a listed browser origin read the response; none for other origins."""
        origin = exchange.header(b"origin")
        if not origin or not self._may_call(origin.lower()):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]

    def _may_call(self, origin: str) -> bool:
        return self._any_origin or origin in self._origins

    def preflight_headers(self, exchange: Exchange, methods: list[str]) -> list[tuple[bytes, bytes]]:
        """Headers for the preflight request of a listed origin, in addition to `cors_headers`: any header may be sent.

        Clients send many (`x-stainless-os`, ...), and none of them grants a page more than its origin already has.
        """
        if not self.cors_headers(exchange):
            return []
        answer = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", b"600"),
        ]
        asked = exchange.header(b"access-control-request-headers")
        if _HEADER_NAMES.fullmatch(asked):
            answer.append((b"access-control-allow-headers", asked.encode()))
        return answer


def presented_key(exchange: Exchange, keys: Sequence[bytes], kind: str) -> int:
    """The index in `keys`, which are of a `kind`, of the one that the client presented. Raises ApiError 401."""
    given = presented(exchange)
    found = -1
    for index, key in enumerate(keys):  # compares with every key, so that timing reveals nothing
        if hmac.compare_digest(key, given):
            found = index
    if found < 0:
        missing = f"missing {kind}: send Authorization: Bearer KEY, or x-api-key: KEY"
        message = f"incorrect {kind}" if given else missing
        code = "missing_api_key" if not given else "invalid_api_key"
        raise ApiError(401, message, code=code, headers=[(b"www-authenticate", b"Bearer")])
    return found


def presented(exchange: Exchange) -> bytes:
    """The key in a request's headers, cut to MAX_KEY_BYTES; empty without one. Anthropic's clients send `x-api-key`."""
    scheme, _, given = exchange.header(b"authorization").partition(" ")
    if scheme.lower() != "bearer":
        given = exchange.header(b"x-api-key")
    return given.strip().encode("latin-1")[:MAX_KEY_BYTES]


def router_key(config: ServingConfig) -> bytes:
    """The key that a server and its router have, by its own option; empty without it. Raises ValueError."""
    link = parse_router(config.router)
    try:
        return read_key(link.key_file) if link.key_file else b""
    except ValueError as error:
        raise ValueError(f"router: key: {error}") from None


def read_keys(config: ServingConfig, name: str = "api_key") -> list[str]:
    """Keys from the option `name` and its file. Raises ValueError when the file cannot be read or is empty."""
    keys, file = list(getattr(config, name)), getattr(config, f"{name}_file")
    if file is not None:
        try:
            lines = Path(file).read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}_file: cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ValueError(f"{name}_file: contains no key")
        keys += found
    if any(len(key) > MAX_KEY_BYTES for key in keys):
        raise ValueError(f"{name}: a key is longer than the limit of {MAX_KEY_BYTES} bytes")
    return list(dict.fromkeys(keys))


def exposure(config: ServingConfig) -> list[str]:
    """Warnings about who can reach the server, shown at start-up; each has one or more lines."""
    found = []
    if (
        config.uds is None
        and not is_loopback(config.host)
        and config.tenants is None
        and not read_keys(config)
    ):
        found.append("\n".join([
            _FRAME,
            f"NO API KEY: everyone who can reach {config.host}, port {config.port}, can use this model,",
            "keep it busy, and read /metrics. To keep others out, stop this server and start it with",
            "  --api-key-file FILE    clients must present a key from this file, or",
            "  --host 127.0.0.1       only programs on this machine can connect",
            _FRAME,
        ]))  # fmt: skip
    if ALL in config.allowed_origins:
        found.append("--allowed-origins '*': every web page that a user opens may call this server")
    if ALL in config.allowed_hosts and is_loopback(config.host):
        found.append(
            "--allowed-hosts '*': any web page can reach this server through its own host name (DNS rebinding)"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether an address or name is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def urlsplit_netloc(origin: str) -> str:
    """Host and port of an origin, "" when the origin is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _allowed_hosts(config: ServingConfig) -> frozenset[str] | None:
    """Accepted host names, without ports; None accepts every name."""
    if ALL in config.allowed_hosts:
        return None
    if not config.allowed_hosts and (config.uds is not None or not is_loopback(config.host)):
        return None
    bound = f"[{config.host}]" if ":" in config.host else config.host
    admin = () if config.admin_host is None else (config.admin_host,)
    names: Iterable[str] = (*_LOOPBACK_NAMES, bound, *admin, *config.allowed_hosts)
    return frozenset(name.lower() for name in names)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
