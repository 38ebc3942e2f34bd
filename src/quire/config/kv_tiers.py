"""Where KV blocks go that leave the cache: `ram=2GiB,disk=20GiB:/var/cache/quire,remote=host:7070:/etc/kv.key`, and
whether other engines compute prompts for this one: `role=decode`. In place of a quire kv-server there may be a Redis:
`remote=redis://host:6379`."""

from __future__ import annotations

import re
from dataclasses import field
from urllib.parse import urlsplit

from quire.records import dataclass
from quire.util.sizes import parse_size

_FORM = (
    "write ram=SIZE, disk=SIZE:FOLDER, disk-key=KEYFILE, remote=HOST:PORT:KEYFILE, ca=FILE, via=nixl, "
    "or remote=/SOCKET:KEYFILE, role=ROLE, remote=redis://HOST:PORT, remote-key=KEYFILE, or several by commas"
)
_REDIS_FORM = (
    "write redis://USER:PASSWORD@HOST:PORT/DATABASE, rediss:// for TLS, or unix:///SOCKET, without options behind a ?, "
    "and with %2C for a comma in a password"
)
ROLES = ("prefill", "decode", "both")
_VLLM = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_SOCKET = re.compile(r"(/[^:]+):(.+)")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):(\d{1,5}):(.+)")


@dataclass(frozen=True, slots=True)
class KvTiers:
    """Bytes of host memory, and of a file in a folder; 0 for none. A server of blocks, host and port or the path of its
    Unix socket, and the file of its key; None for none. `disk_key`: the file of the key by which the file in the folder
    is encrypted; "" for none. `role`: what an engine does for others by the server of blocks; "" for nothing.
    `authority`: the file with the authority of the server's certificate; "" without TLS, or the system's ones. `nixl`:
    blocks go to it and from it through NIXL. `redis`: the URL of a Redis in place of a server of blocks, with its
    password, and `remote_key` the file of the key by which blocks there are encrypted; "" for none."""

    ram: int
    disk: int
    folder: str
    remote: tuple[str, int] | str | None = None
    key_file: str = ""
    disk_key: str = ""
    role: str = ""
    authority: str = ""
    nixl: bool = False
    redis: str = field(default="", repr=False)
    remote_key: str = ""


def parse_tiers(text: str) -> KvTiers:
    """The tiers of an option's text. Raises ValueError naming what is wrong."""
    found: dict[str, int] = {}
    named: dict[str, str] = {}
    folder = key_file = role = redis = ""
    remote: tuple[str, int] | str | None = None
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in {"disk-key", "remote-key", "ca", "via"} and value and name not in named:
            named[name] = value
            continue
        if name == "role" and (known := _VLLM.get(value, value)) in ROLES and not role:
            role = known
            continue
        if name == "remote":
            if redis or remote:
                raise ValueError("kv_tiers: remote: there are two; a block goes to one place")
            remote, key_file, redis = _server(part.strip(), value)
            continue
        if name not in {"ram", "disk"} or name in found:
            raise ValueError(f"kv_tiers: {_shown(part)} is not a tier; {_FORM}")
        size, colon, path = value.partition(":")
        if name == "disk":
            folder = path
        if bool(colon and path) != (name == "disk") or "@" in size:
            raise ValueError(f"kv_tiers: {_shown(part)} is not a tier; {_FORM}")
        try:
            found[name] = parse_size(size)
        except ValueError as error:
            raise ValueError(f"kv_tiers: {name}: {error}") from None
        if not found[name]:
            raise ValueError(f"kv_tiers: {name}: a size of 0 keeps nothing")
    if role and remote is None:
        raise ValueError(
            "kv_tiers: role needs remote=HOST:PORT:KEYFILE, a quire kv-server by which blocks go from one engine to "
            "another"
        )
    _check_named(named, "disk" in found, remote, redis)
    return KvTiers(
        found.get("ram", 0), found.get("disk", 0), folder, remote, key_file, named.get("disk-key", ""), role,
        named.get("ca", ""), "via" in named, redis, named.get("remote-key", ""),
    )  # fmt: skip


def _check_named(
    named: dict[str, str], with_disk: bool, remote: tuple[str, int] | str | None, redis: str
) -> None:
    """Raise ValueError for what belongs to a tier that is not there."""
    if "disk-key" in named and not with_disk:
        raise ValueError("kv_tiers: disk-key is of disk, which is not there")
    if "remote-key" in named and not redis:
        raise ValueError("kv_tiers: remote-key is of remote=redis://HOST:PORT, which is not there")
    if "ca" in named and not (isinstance(remote, tuple) or redis.startswith("rediss:")):
        raise ValueError("kv_tiers: ca: is for remote=HOST:PORT:KEYFILE or remote=rediss://HOST:PORT")
    if "via" in named and not isinstance(remote, tuple):
        raise ValueError("kv_tiers: via: is for remote=HOST:PORT:KEYFILE")
    if named.get("via", "nixl") != "nixl":
        raise ValueError(f"kv_tiers: via: {_shown('via=' + named['via'])} is not via=nixl")


def _server(part: str, value: str) -> tuple[tuple[str, int] | str | None, str, str]:
    """The address of a server of blocks and the file of its key, or the URL of a Redis."""
    scheme, colon, rest = value.partition(":")
    if colon and scheme.lower() in {"redis", "rediss", "unix"}:
        return None, "", _redis(f"{scheme.lower()}:{rest}")
    if named := _SOCKET.fullmatch(value):
        return named[1], named[2], ""
    if not (named := _ADDRESS.fullmatch(value)) or not 0 < int(named[2]) <= 65535:
        raise ValueError(f"kv_tiers: {_shown(part)} is not a tier; {_FORM}")
    return (named[1].strip("[]"), int(named[2])), named[3], ""


def _redis(url: str) -> str:
    """The URL of a Redis, checked. Errors do not repeat it, as it may have a password."""
    try:
        found = urlsplit(url)
        wrong = found.query or found.fragment or (found.port is not None and not found.port)
    except ValueError:
        wrong = True
    if wrong:
        pass
    elif found.scheme == "unix":
        wrong = found.hostname or not found.path.startswith("/")
    else:
        wrong = not found.hostname or not re.fullmatch(r"/?\d{0,4}", found.path)
    if wrong:
        raise ValueError(f"kv_tiers: remote: not the URL of a Redis; {_REDIS_FORM}")
    return url


def _shown(part: str) -> str:
    """A part as errors show it: without its value, or at all, where a password may be in it."""
    name, equals, _ = part.strip().partition("=")
    if "@" not in part and "://" not in part:
        return repr(part.strip())
    return f"what is given for {name!r}" if equals and "@" not in name else "a part with an @ or ://"
