"""Tenants of a server: their keys, what each may use, and at what weight. Read from a TOML file; see docs/tenants.md.

counts = "/var/lib/quire/counts.json"  # where the day's tokens outlive the server

[shared]                               # in place of counts: several servers or routers count together
redis = "redis://10.0.0.5:6379/0"
instances = 2

[prices]                               # per million tokens, hour of computing, and GiB of KV cache for an hour
currency = "EUR"
prompt = 0.4
generation = 1.2

[tenants.research]
keys = ["sha256:6f0c…"]                # quire tenants key
weight = 2
requests_per_minute = 600
cache_share = 0.25
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.records import dataclass

MAX_TENANTS = 1000
MAX_FILE_BYTES = 2**20
MIN_KEY_CHARS = 24  # of a key that is hashed here: a short one could be guessed from its hash
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
# Never 64 characters: those are names of keys that are in no file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
_CURRENCY = re.compile(r"[A-Za-z]{1,8}")
_MOST = 2**53  # of a count: exact as a float
# The cache domain of tenants that share one; no name of a tenant has a colon.
_SHARED = "shared:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a tenant pays: for a million tokens of each kind, an hour of computing, a GiB of KV cache for an hour."""

    currency: str = ""
    prompt: float = 0.0
    cached: float = 0.0
    generation: float = 0.0
    compute_hour: float = 0.0
    kv_gib_hour: float = 0.0

    def cost(self, prompt: int, cached: int, generation: int, seconds: float, byte_seconds: float) -> float:
        """The price of so much. `cached` tokens of the prompt are paid at their own price."""
        tokens = self.prompt * (prompt - cached) + self.cached * cached + self.generation * generation
        return (
            tokens / 1e6 + self.compute_hour * seconds / 3600 + self.kv_gib_hour * byte_seconds / 2**30 / 3600
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant. `keys` are SHA-256 of its keys; limits are None for none, `models` and `adapters` None for all.

    `classes` are the classes of service that it may ask for, the first of them without a wish; empty for all.
    `cache_domain` names tenants that find one another's prefixes, "" for its own alone.
    """

    name: str
    keys: frozenset[bytes] = field(default=frozenset(), repr=False)
    weight: float = 1.0
    classes: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    cache_share: float = 0.0
    cache_domain: str = ""
    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    admin: bool = False
    prices: Prices | None = None

    @property
    def domain(self) -> str:
        """The name of its prefix cache."""
        return f"{_SHARED}{self.cache_domain}" if self.cache_domain else self.name


@dataclass(frozen=True, slots=True)
class Tenants:
    """What a file says: tenants by name, and the prices of those that have none of their own. `counts` is the file of
    what they have used of the day, None for none; `shared` is where several servers count together."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    prices: Prices | None = None
    counts: str | None = None
    shared: SharedCounts | None = None

    @property
    def floors(self) -> dict[str, float]:
        """Shares of the KV cache by domain; those of tenants with a common one add up."""
        found: dict[str, float] = {}
        for tenant in self.by_name.values():
            if tenant.cache_share:
                found[tenant.domain] = found.get(tenant.domain, 0.0) + tenant.cache_share
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCounts:
    """Where several servers, or several routers, count the limits of their tenants together.

    redis           the address of a Redis, without a password
    instances       processes that share; while Redis is away each of them has this part of every limit
    password_file   a relative path is one from the tenants file
    prefix          what all keys in Redis begin with
    timeout         seconds that a request waits for Redis at most
    """

    redis: str = field(repr=False)
    instances: int
    password_file: str = ""
    prefix: str = "quire"
    timeout: float = 0.5


class TenantsFileError(ValueError):
    """A tenants file is wrong. The message has the file, the line and the field."""


def key_digest(key: str | bytes) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read_tenants(path: str | Path) -> Tenants:
    """The tenants of a file. Raises TenantsFileError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TenantsFileError(f"tenants: {path}: cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TenantsFileError(f"tenants: {path}: over the limit of {MAX_FILE_BYTES} bytes")
    try:
        return parse_tenants(text)
    except TenantsFileError as error:
        raise TenantsFileError(f"tenants: {path}: {error}") from None


def parse_tenants(text: str) -> Tenants:
    """The tenants of a file's text. Raises TenantsFileError naming line and field; never with the value of a key."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TenantsFileError(f"is not TOML: {error}") from None
    reader = _Reader(text)
    reader.known(found, (), ("counts", "prices", "shared", "tenants"))
    counts = found.get("counts")
    if counts is not None and (not isinstance(counts, str) or not counts):
        reader.fail(("counts",), "must be the path of a file")
    sections = found.get("tenants", {})
    if not isinstance(sections, dict) or not sections:
        raise TenantsFileError("tenants: there is no section [tenants.NAME]")
    if len(sections) > MAX_TENANTS:
        raise TenantsFileError(f"tenants: {len(sections)} are over the limit of {MAX_TENANTS}")
    made = {name: reader.tenant(name, section) for name, section in sections.items()}
    _check_together(reader, made)
    prices, shared = found.get("prices"), found.get("shared")
    if counts is not None and shared is not None:
        reader.fail(("counts",), "leave it out: with [shared] counts are in Redis")
    return Tenants(
        made, None if prices is None else reader.prices(("prices",), prices), counts,
        None if shared is None else reader.shared(("shared",), shared),
    )  # fmt: skip


def _check_together(reader: _Reader, tenants: Mapping[str, Tenant]) -> None:
    owners: dict[bytes, str] = {}
    total = 0.0
    for tenant in tenants.values():
        place = "tenants", tenant.name
        for digest in tenant.keys:
            if (other := owners.setdefault(digest, tenant.name)) != tenant.name:
                reader.fail((*place, "keys"), f"one of them is also a key of {other}")
        total += tenant.cache_share
        if total > 1 + 1e-9:
            reader.fail((*place, "cache_share"), f"with those before it, shares add up to {total:g}, above 1")


class _Reader:
    """Turns sections into values. `text` is searched for lines only when there is an error."""

    def __init__(self, text: str) -> None:
        self._text = text

    def fail(self, place: tuple[str, ...], what: str) -> None:
        """Raise TenantsFileError for the field at a place."""
        line = _line_of(self._text, place)
        raise TenantsFileError(f"{f'line {line}: ' if line else ''}{'.'.join(place)}: {what}")

    def known(self, section: Any, place: tuple[str, ...], names: tuple[str, ...]) -> None:
        """Check that a value is a section with no field but these."""
        if not isinstance(section, dict):
            self.fail(place, "must be a section")
        for name in section:
            if name not in names:
                self.fail((*place, name), f"unknown; there are {', '.join(names)}")

    def tenant(self, name: str, section: Any) -> Tenant:
        """One tenant."""
        place = "tenants", name
        if not _NAME.fullmatch(name):
            self.fail(place, "a name has up to 48 letters, digits and _.-, and begins with a letter or digit")
        self.known(section, place, tuple(f.name for f in fields(Tenant) if f.name != "name"))
        values: dict[str, Any] = {}
        for key, value in section.items():
            values[key] = _KINDS[key](self, (*place, key), value)
        return Tenant(name=name, **values)

    def prices(self, place: tuple[str, ...], value: Any) -> Prices:
        """A section of prices."""
        self.known(value, place, tuple(f.name for f in fields(Prices)))
        made: dict[str, Any] = {}
        for key, price in value.items():
            if key == "currency":
                if not isinstance(price, str) or not _CURRENCY.fullmatch(price):
                    self.fail((*place, key), "must be up to 8 letters, like EUR")
                made[key] = price
            else:
                made[key] = self.number((*place, key), price, least=0.0)
        return Prices(**made)

    def shared(self, place: tuple[str, ...], value: Any) -> SharedCounts:
        """Where several servers count together."""
        self.known(value, place, tuple(f.name for f in fields(SharedCounts)))
        for name in ("redis", "instances"):
            if name not in value:
                self.fail(place, f"{name} is missing")
        made = dict(value)
        for name in ("redis", "password_file", "prefix"):
            if name in value and not (isinstance(value[name], str) and value[name]):
                self.fail((*place, name), "must be a text")
        address = urlsplit(value["redis"])
        if not (address.scheme == "unix" and address.path) and not (
            address.scheme in {"redis", "rediss"} and address.hostname
        ):
            self.fail((*place, "redis"), "must be an address such as redis://host:6379/0")
        if address.password or "password=" in address.query:
            self.fail((*place, "redis"), "has a password: put it into a file, and name that in password_file")
        self.count((*place, "instances"), value["instances"])
        made["timeout"] = self.number((*place, "timeout"), value.get("timeout", 0.5), least=0.001, most=60.0)
        return SharedCounts(**made)

    def number(
        self, place: tuple[str, ...], value: Any, *, least: float, most: float = float(_MOST)
    ) -> float:
        """A finite number from `least` to `most`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(place, "must be a number")
        if not least <= value <= most:
            self.fail(place, f"{value:g} is not in [{least:g}, {most:g}]")
        return float(value)

    def weight(self, place: tuple[str, ...], value: Any) -> float:
        """A share of computing, relative to the others."""
        return self.number(place, value, least=0.001, most=1000.0)

    def share(self, place: tuple[str, ...], value: Any) -> float:
        """A part of the KV cache."""
        return self.number(place, value, least=0.0, most=1.0)

    def count(self, place: tuple[str, ...], value: Any) -> int:
        """A limit."""
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            self.fail(place, "must be an integer above 0; leave it out for no limit")
        return int(value)

    def flag(self, place: tuple[str, ...], value: Any) -> bool:
        """True or false."""
        if not isinstance(value, bool):
            self.fail(place, "must be true or false")
        return bool(value)

    def domain(self, place: tuple[str, ...], value: Any) -> str:
        """The name of a common cache."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            self.fail(place, "must be up to 48 letters, digits and _.-")
        return str(value)

    def names(self, place: tuple[str, ...], value: Any) -> tuple[str, ...]:
        """A list of texts."""
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            self.fail(place, "must be a list of texts")
        return tuple(value)

    def keys(self, place: tuple[str, ...], value: Any) -> frozenset[bytes]:
        """Hashes of keys. Their values are in no message: one that is no hash may be a key."""
        found = []
        for index, text in enumerate(self.names(place, value)):
            match = _DIGEST.fullmatch(text)
            if match is None:
                self.fail(
                    place,
                    f"entry {index + 1} is not sha256: and 64 hex digits; `quire tenants hash` makes it",
                )
            else:
                found.append(bytes.fromhex(match[1]))
        return frozenset(found)

    def allowed(self, place: tuple[str, ...], value: Any) -> frozenset[str]:
        """Names that may be used."""
        return frozenset(self.names(place, value))


_KINDS: dict[str, Callable[[_Reader, tuple[str, ...], Any], Any]] = {
    "keys": _Reader.keys, "weight": _Reader.weight, "classes": _Reader.names,
    "requests_per_minute": _Reader.count, "tokens_per_minute": _Reader.count,
    "concurrent_requests": _Reader.count, "tokens_per_day": _Reader.count, "cache_share": _Reader.share,
    "cache_domain": _Reader.domain, "models": _Reader.allowed, "adapters": _Reader.allowed, "admin": _Reader.flag,
    "prices": _Reader.prices,
}  # fmt: skip


def _line_of(text: str, place: tuple[str, ...]) -> int:
    """The line of a field in sections that are written as usual, else that of its section; 0 if neither is found."""
    parts = [re.compile(rf"\s*[\"']?{re.escape(part)}[\"']?\s*") for part in place]
    best, best_depth, section = 0, 0, ()  # type: tuple[int, int, tuple[str, ...]]
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            section = tuple(part.strip().strip("\"'") for part in _split(header[1]))
            depth = min(len(section), len(place))
            depth = depth if section[:depth] == place[:depth] else 0
        elif section == place[:-1] and parts and re.match(parts[-1].pattern + "[=.]", line):
            depth = len(place)
        else:
            continue
        if depth > best_depth:
            best, best_depth = number, depth
    return best


def _split(header: str) -> list[str]:
    """The parts of a section's name, where quoted ones may have dots."""
    return re.findall(r"\"[^\"]*\"|'[^']*'|[^.\s]+", header)
