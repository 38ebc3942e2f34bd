"""What `quire stack` runs on one machine, from a TOML file: a router, servers, and a server of KV blocks.

    first-port = 8001          # of what is behind the router, one after the other; 0: free ones
    [router]                   # options of quire router
    [kv-server]                # options of quire kv-server; without it there is none
    [defaults]                 # options of all servers
    [[serve]]                  # options of quire serve, and count and role

Here are the parts and their names; what a value may be is said by the command of the part.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from quire.config.env import state_folder
from quire.config.routing import ROLES
from quire.records import dataclass

MOST_SERVERS = 64
_TOP = ("name", "state", "first_port", "router", "kv_server", "defaults", "serve")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StackServer:
    """A server of a stack: its name, and its role, "" for none. `where` names its entry in errors."""

    name: str
    role: str
    where: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A stack; options as they stand in the file, with underscores. `state` is the folder of what it writes."""

    name: str
    state: Path
    first_port: int | None  # None: that after the router's
    router: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of all servers
    kv_server: Mapping[str, Any] | None
    servers: tuple[StackServer, ...]


def read_stack(path: Path) -> StackConfig:
    """The stack of a file. Raises ValueError naming the field."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    found = _plain(document, "")
    for name in found.keys() - set(_TOP):
        raise ValueError(f"{name}: is not one of {', '.join(each.replace('_', '-') for each in _TOP)}")
    name = _text(found, "name", path.stem)
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} is not of letters, digits, '.', '-' and '_'")
    folder = _text(found, "state", "") or state_folder(f"stacks/{name}")
    if folder is None:
        raise ValueError("state: there is no home folder: name one")
    if "," in str(folder):
        raise ValueError(f"state: {folder}: must have no comma")
    port = found.get("first_port")
    if port is not None and (type(port) is not int or not 0 <= port <= 65535):
        raise ValueError(f"first-port: {port!r} is not in [0, 65535]")
    router, blocks = _table(found, "router") or {}, _table(found, "kv_server")
    servers = _servers(found, blocks is not None)
    defaults = _table(found, "defaults") or {}
    return StackConfig(name, path.absolute().parent / folder, port, router, defaults, blocks, servers)


def _servers(found: Mapping[str, Any], with_blocks: bool) -> tuple[StackServer, ...]:
    entries = found.get("serve", [])
    if not isinstance(entries, list) or not entries:
        raise ValueError("serve: at least one [[serve]] table is needed")
    made = []
    numbers: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"serve {number}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: is not a table")
        options = _plain(entry, where)
        count, role = options.pop("count", 1), options.pop("role", "")
        if type(count) is not int or not 0 <= count <= MOST_SERVERS:
            raise ValueError(f"{where}: count: {count!r} is not in [0, {MOST_SERVERS}]")
        if role and role not in ROLES:
            raise ValueError(f"{where}: role: {role!r} is not one of {', '.join(ROLES)}")
        if role and not with_blocks:
            raise ValueError(f"{where}: role: needs a table [kv-server], over which blocks go")
        kind = role if role in {"prefill", "decode"} else "serve"
        for _ in range(count):
            numbers[kind] = numbers.get(kind, 0) + 1
            made.append(StackServer(f"{kind}-{numbers[kind]}", role, where, options))
    if not 0 < len(made) <= MOST_SERVERS:
        raise ValueError(f"serve: {len(made)} servers are not 1 to {MOST_SERVERS}")
    if all(each.role == "prefill" for each in made):
        raise ValueError("serve: role: all of them are prefill: none answers")
    return tuple(made)


def _table(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The options of a table."""
    value, where = found.get(name), name.replace("_", "-")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: is not a table")
    return _plain(value, where)


def _plain(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options by field name."""
    made: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in made:
            raise ValueError(f"{where}: {key}: is given twice")
        made[name] = value
    return made


def _text(found: Mapping[str, Any], name: str, default: str) -> str:
    value = found.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not a text")
    return value
