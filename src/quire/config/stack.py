"""What `quire stack` runs on one machine, from a TOML file: a router, servers, and a server of KV blocks.

    first-port = 8001          # of what is behind the router, one after the other; 0: free ones
    hung-seconds = 30          # after which a part that answers nobody is ended and started again; 0: never
    [router]                   # options of quire router
    [kv-server]                # options of quire kv-server; without it there is none
    [defaults]                 # options of all servers
    [[serve]]                  # options of quire serve, and count, role, min, max, down, idle

Here are the parts and their names; what a value may be is said by the command of the part.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.config.env import state_folder
from quire.config.routing import ROLES
from quire.records import dataclass
from quire.routing.servers_needed import ScalingBounds

MOST_SERVERS = 64
_NAMES_OF_MODELS = ("model", "served_model_name")
_TOP = ("name", "state", "first_port", "hung_seconds", "router", "kv_server", "defaults", "serve")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StackServer:
    """A server of a stack: its name, and its role, "" for none. `where` names its entry in errors; `table` is its table
    with these very options, for what is learned of its load."""

    name: str
    role: str
    where: str
    table: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackScale:
    """The servers of a table whose number follows the load: their names, and how many start with the stack."""

    where: str
    table: str
    names: tuple[str, ...]
    first: int
    bounds: ScalingBounds


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A stack; options as they stand in `file`, with underscores. `state` is the folder of what it writes."""

    name: str
    file: Path
    state: Path
    first_port: int | None  # None: that after the router's
    router: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of all servers
    kv_server: Mapping[str, Any] | None
    servers: tuple[StackServer, ...]
    scales: tuple[StackScale, ...] = ()
    hung_seconds: float = 30.0  # after which a part that answers nobody is started again; 0: never

    @property
    def later(self) -> frozenset[str]:
        """The servers that do not start with the stack."""
        return frozenset(name for each in self.scales for name in each.names[each.first :])


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
    defaults = _table(found, "defaults") or {}
    servers, scales = _servers(found, defaults, blocks is not None)
    hung = found.get("hung_seconds", 30.0)
    if type(hung) not in {int, float} or not (hung == 0 or 1 <= hung <= 1e6):
        raise ValueError(f"hung-seconds: {hung!r} is not 0 or a number of seconds from 1 on")
    file = path.absolute()
    return StackConfig(
        name, file, file.parent / folder, port, router, defaults, blocks, servers, scales, float(hung)
    )


def _servers(
    found: Mapping[str, Any], defaults: Mapping[str, Any], with_blocks: bool
) -> tuple[tuple[StackServer, ...], tuple[StackScale, ...]]:
    entries = found.get("serve", [])
    if not isinstance(entries, list) or not entries:
        raise ValueError("serve: at least one [[serve]] table is needed")
    made, scales, models = [], list[StackScale](), dict[str, str]()  # models: of the tables that answer
    numbers: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"serve {number}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: is not a table")
        options = _plain(entry, where)
        role = options.pop("role", "")
        if role and role not in ROLES:
            raise ValueError(f"{where}: role: {role!r} is not one of {', '.join(ROLES)}")
        if role and not with_blocks:
            raise ValueError(f"{where}: role: needs a table [kv-server], over which blocks go")
        kind = role if role in {"prefill", "decode"} else "serve"
        first, bounds = _counts(options, where)
        names, digest = [], blake2b(repr((role, sorted(options.items()))).encode(), digest_size=4)
        table = (
            f"{where} {digest.hexdigest()}"  # another one, when the file is read again, with other options
        )
        for _ in range(first if bounds is None else bounds.most):
            numbers[kind] = numbers.get(kind, 0) + 1
            names.append(f"{kind}-{numbers[kind]}")
            made.append(StackServer(names[-1], role, where, table, options))
        if role != "prefill":
            models[where] = str([{**defaults, **options}.get(name) for name in _NAMES_OF_MODELS])
        if bounds is not None:
            if role == "prefill" and not bounds.least:
                raise ValueError(
                    f"{where}: min: is 1 or more for role prefill: without one no prompt goes there"
                )
            scales.append(StackScale(where, table, tuple(names), first, bounds))
    if not 0 < len(made) <= MOST_SERVERS:
        raise ValueError(f"serve: {len(made)} servers are not 1 to {MOST_SERVERS}")
    answering = [each.name for each in made if each.role != "prefill"]
    if not answering:
        raise ValueError("serve: role: all of them are prefill: none answers")
    _check_loads(scales, models)
    return tuple(made), tuple(scales)


def _check_loads(scales: list[StackScale], models: Mapping[str, str]) -> None:
    """Raises ValueError if a table that follows its load shares it with another one."""
    for table in {each.where for each in scales} & models.keys():
        for other in models.keys() - {table}:
            if models[other] == models[table]:
                raise ValueError(
                    f"{table}: max: {other} answers for the same model: the load would be that of both"
                )


def _counts(options: dict[str, Any], where: str) -> tuple[int, ScalingBounds | None]:
    """Take out how many servers a table has: at first, and between what bounds."""
    most = options.pop("max", None)
    if most is None:
        for name in ("min", "down", "idle"):
            if name in options:
                raise ValueError(f"{where}: {name}: needs max")
        return _count(options.pop("count", 1), "count", where, 0, MOST_SERVERS), None
    _count(most, "max", where, 1, MOST_SERVERS)
    least = _count(options.pop("min", 1), "min", where, 0, most)
    first = _count(options.pop("count", least), "count", where, least, most)
    return first, ScalingBounds(
        least, most, _seconds(options, "down", where, 60.0), _seconds(options, "idle", where, 300.0)
    )


def _count(value: Any, name: str, where: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{where}: {name}: {value!r} is not in [{least}, {most}]")
    return value


def _seconds(options: dict[str, Any], name: str, where: str, default: float) -> float:
    value = options.pop(name, default)
    if type(value) not in {int, float} or not 0 < value <= 1e6:
        raise ValueError(f"{where}: {name}: {value!r} is not a number of seconds above 0")
    return float(value)


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
