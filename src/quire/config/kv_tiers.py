"""Where KV blocks go that leave the cache: `ram=2GiB,disk=20GiB:/var/cache/quire,remote=host:7070:/etc/kv.key`, and
whether other engines compute prompts for this one: `role=decode`."""

from __future__ import annotations

import re

from quire.records import dataclass
from quire.util.sizes import parse_size

_FORM = "write ram=SIZE, disk=SIZE:FOLDER, disk-key=KEYFILE, remote=HOST:PORT:KEYFILE, role=ROLE, or several by commas"
ROLES = ("prefill", "decode", "both")
_VLLM = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+):(\d{1,5}):(.+)")


@dataclass(frozen=True, slots=True)
class KvTiers:
    """Bytes of host memory, and of a file in a folder; 0 for none. A server of blocks, and the file of its key; None
    for none. `disk_key`: the file of the key by which the file in the folder is encrypted; "" for none. `role`: what an
    engine does for others by the server of blocks; "" for nothing."""

    ram: int
    disk: int
    folder: str
    remote: tuple[str, int] | None = None
    key_file: str = ""
    disk_key: str = ""
    role: str = ""


def parse_tiers(text: str) -> KvTiers:
    """The tiers of an option's text. Raises ValueError naming what is wrong."""
    found: dict[str, int] = {}
    folder = key_file = disk_key = role = ""
    remote: tuple[str, int] | None = None
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "disk-key" and value and not disk_key:
            disk_key = value
            continue
        if name == "role" and (known := _VLLM.get(value, value)) in ROLES and not role:
            role = known
            continue
        if name == "remote" and remote is None:
            if not (named := _ADDRESS.fullmatch(value)) or not 0 < int(named[2]) <= 65535:
                raise ValueError(f"kv_tiers: {part.strip()!r} is not a tier; {_FORM}")
            remote, key_file = (named[1].strip("[]"), int(named[2])), named[3]
            continue
        if name not in {"ram", "disk"} or name in found:
            raise ValueError(f"kv_tiers: {part.strip()!r} is not a tier; {_FORM}")
        size, colon, path = value.partition(":")
        if name == "disk":
            folder = path
        if bool(colon and path) != (name == "disk"):
            raise ValueError(f"kv_tiers: {part.strip()!r} is not a tier; {_FORM}")
        try:
            found[name] = parse_size(size)
        except ValueError as error:
            raise ValueError(f"kv_tiers: {name}: {error}") from None
        if not found[name]:
            raise ValueError(f"kv_tiers: {name}: a size of 0 keeps nothing")
    if disk_key and "disk" not in found:
        raise ValueError("kv_tiers: disk-key is of disk, which is not there")
    if role and remote is None:
        raise ValueError("kv_tiers: role needs remote, by which blocks go from one engine to another")
    return KvTiers(found.get("ram", 0), found.get("disk", 0), folder, remote, key_file, disk_key, role)
