"""The parts of a stack: what each is started with, where it listens, and what it may take of this machine."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.config_file import options_of
from quire.cli.kv_server import LEAST_SIZE
from quire.cli.router import settings as router_settings
from quire.cli.serve import settings
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig
from quire.config.stack import StackConfig, StackServer
from quire.records import dataclass
from quire.util.files import UNFINISHED, written_anew
from quire.util.http_client import host_of_url
from quire.util.platform import total_memory, usable_cores
from quire.util.sizes import format_size, parse_size

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig

HERE = "127.0.0.1"
ROUTER_PROCESS = 96 * 2**20
BLOCKS_PROCESS = 64 * 2**20  # of a kv-server without blocks
STACK_PROCESS = 96 * 2**20  # that runs the parts, with the lines of their logs that wait
# What the stack itself gives to a part, or cannot do without.
_OWN_OF_ROUTER = ("backend", "prefill", "backends_file", "uds", "quiet")
_OWN_OF_SERVERS = (
    "host", "port", "uds", "quiet", "models", "models_dir", "ssl_keyfile", "ssl_certfile", "router"
)  # fmt: skip
_FILES_OF_ROUTER = {"backends_file": "backends.toml", "kv_key_file": "kv.key"}
MOST_PATH = 107  # bytes, of a Unix socket
HOLD_SECONDS = 30.0  # that a request waits for a server that starts
START_SECONDS = 5.0  # so far ahead the load is forecast
_ALL_ADDRESSES = {"0.0.0.0": HERE, "::": "::1"}  # and where they are reached from this machine


@dataclass(slots=True)
class StackPart:
    """A part: its command, and the options of its file by field name. `port` 0 is any that is free; `memory` is what
    it takes at most, in bytes; `seconds`: what it may take to end."""

    name: str
    kind: str  # the command
    host: str
    port: int
    memory: int
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    role: str = ""
    table: str = ""
    tls: bool = False
    model: str = ""
    engine: EngineConfig | None = None
    serving: ServingConfig | None = None

    @property
    def at(self) -> str:
        """Its address and port, as its clients on this machine write them."""
        host = _ALL_ADDRESSES.get(self.host, self.host)
        return f"{host_of_url(host)}:{self.port or '(free)'}"

    @property
    def url(self) -> str:
        """What its clients on this machine call."""
        return self.at if self.kind == "kv-server" else f"http{'s' if self.tls else ''}://{self.at}"


def memory_of(parts: list[StackPart]) -> int:
    """Bytes that a stack takes at most."""
    return STACK_PROCESS + sum(each.memory for each in parts)


def check_memory(parts: list[StackPart]) -> None:
    """Raises ValueError unless this machine has the memory for all parts."""
    taken, there = memory_of(parts), total_memory()
    if taken > there:
        raise ValueError(
            f"memory: {format_size(taken)} of all parts and of this process, more than this machine has "
            f"({format_size(there)})"
        )


def parts_of(config: StackConfig, kept: Mapping[str, int] = MappingProxyType({})) -> list[StackPart]:
    """The parts in the order in which they start, the router last; a part whose port is not given has the one that it
    had, of `kept`. Raises ValueError naming the field.
    """
    router = _router(config)
    first = config.first_port
    if first is None:
        first = router.port + 1 if router.port else 0
    made = [] if config.kv_server is None else [_blocks(config.kv_server)]
    threads = max(1, usable_cores() // len(config.servers))
    defaults = {"threads": threads} | _chosen(config.defaults, "defaults", _OWN_OF_SERVERS)
    made += [_server(each, defaults, config.kv_server is not None) for each in config.servers]
    for each in (*made, router):
        each.port = each.port or kept.get(each.name, 0)
    taken = {each.port for each in made if each.port}
    for each in made:
        while first in taken:
            first += 1
        if not each.port and first:
            each.port, first = first, first + 1
    if first > 65536:
        if config.first_port is None:
            raise ValueError(
                f"router: port: {router.port} leaves no room after it for {len(made)}: give first-port"
            )
        raise ValueError(f"first-port: {config.first_port} leaves no room for {len(made)} ports")
    ports = [each.port for each in [*made, router] if each.port]
    for port in ports:
        if ports.count(port) > 1:
            raise ValueError(f"first-port: two parts would have port {port}")
    return [*made, router]


class StackFiles(NamedTuple):
    """The command of each part, by its name, and the text of each file that the stack writes for them."""

    commands: dict[str, list[str]]
    texts: dict[str, str]

    def differs(self, other: StackFiles, name: str) -> bool:
        """Whether a part has to be started again for what has changed."""
        file = f"{name}.json"
        return self.commands[name] != other.commands[name] or self.texts.get(file) != other.texts.get(file)


def files_of(config: StackConfig, parts: list[StackPart]) -> StackFiles:
    """What the parts read, once all ports are known."""
    state, key = config.state, config.state / "kv.key"
    blocks = next((each for each in parts if each.kind == "kv-server"), None)
    commands, texts = dict[str, list[str]](), dict[str, str]()
    for part in parts:
        options = dict(part.options)
        if part.kind == "kv-server":
            words = [
                f"--size={options['size']}",
                f"--key-file={key}",
                f"--host={HERE}",
                f"--port={part.port}",
                *([f"--uds={path}"] if (path := _socket_in(state)) else []),
            ]
        else:
            if part.kind == "serve":
                options |= {"host": HERE, "port": part.port}
                if blocks is None:
                    options["router"] = f"key={key}"
                else:
                    options["kv_tiers"] = _tiers(
                        options, part.role, f"{_socket_in(state) or f'{HERE}:{blocks.port}'}:{key}"
                    )
            else:
                options |= {
                    "host": part.host,
                    "port": part.port,
                    "backends_file": str(state / "backends.toml"),
                    "kv_key_file": str(key),
                }
            texts[f"{part.name}.json"] = json.dumps(options, indent=1)
            words = [f"--config={state / f'{part.name}.json'}"]
        commands[part.name] = [
            sys.executable, "-m", "quire.cli.stack_process", str(os.getpid()), part.kind, *words
        ]  # fmt: skip
    texts |= lists_of(parts)
    return StackFiles(commands, texts)


def lists_of(parts: list[StackPart]) -> dict[str, str]:
    """The files that name the servers: for the router, and for Prometheus."""
    backends = [
        {"name": each.name, "url": each.url, "group": each.table} | ({"role": each.role} if each.role else {})
        for each in parts if each.kind == "serve"
    ]  # fmt: skip
    seen = [{"targets": [each.at], "labels": {"part": each.name}}
            for each in parts if each.kind != "kv-server"]  # fmt: skip
    return {
        "backends.toml": "\n".join(_backend(each) for each in backends),
        "prometheus.json": json.dumps(seen, indent=1),
    }


def write_files(config: StackConfig, parts: list[StackPart]) -> StackFiles:
    """Write what the parts read. Raises OSError and ValueError."""
    for left in config.state.glob(f".*{UNFINISHED}"):  # by a stack that was killed
        left.unlink(missing_ok=True)
    make_key(config)
    files = files_of(config, parts)
    for name, text in files.texts.items():
        write_own(config.state / name, text)
    return files


def make_key(config: StackConfig) -> None:
    """See that there is a key, by which all parts know each other. Raises OSError and ValueError."""
    key = config.state / "kv.key"
    if os.path.lexists(key):
        _check_own(key, stat.S_ISREG)
    else:
        write_own(key, b64encode(os.urandom(32)).decode())


def _router(config: StackConfig) -> StackPart:
    own = {name: str(config.state / file) for name, file in _FILES_OF_ROUTER.items()}
    given = _chosen(config.router, "router", (*_OWN_OF_ROUTER, *own), RouterConfig)
    options = {"hold_seconds": HOLD_SECONDS, "start_seconds": START_SECONDS} | given
    try:
        routing, serving = router_settings(options | own)
    except ValueError as error:
        raise ValueError(f"router: {error}") from None
    if not serving.host:
        raise ValueError("router: host: is empty")
    from quire.router.router_context import BODY_MEMORY, KEPT_MEMORY, SHADOW_MEMORY, semantic_memory

    return StackPart(
        "router", "router", serving.host.strip("[]"), serving.port,
        ROUTER_PROCESS + BODY_MEMORY + KEPT_MEMORY + SHADOW_MEMORY + semantic_memory(routing.semantic_cache),
        serving.shutdown_timeout, options,
        tls=serving.ssl_certfile is not None, serving=serving,
    )  # fmt: skip


def _chosen(
    given: Mapping[str, Any], where: str, own: Iterable[str], further: type | None = None
) -> dict[str, Any]:
    """Options of a table by field name, none of which is the stack's own, whatever it is called elsewhere."""
    options = options_of(given, where, further)
    for name in own:
        if name in options:
            raise ValueError(f"{where}: {name.replace('_', '-')}: is the stack's to choose")
    return options


def _blocks(given: Mapping[str, Any]) -> StackPart:
    options = {"size": "1GiB", "port": 0} | dict(given)
    for name in options.keys() - {"size", "port"}:
        raise ValueError(f"kv-server: {name.replace('_', '-')}: is not one of size, port")
    size, port = options["size"], options["port"]
    try:
        found = parse_size(str(size)) if type(size) in {str, int} else 0
    except ValueError as error:
        raise ValueError(f"kv-server: size: {error}") from None
    if found < LEAST_SIZE:
        raise ValueError(f"kv-server: size: {size!r} is not a size of {LEAST_SIZE} bytes or more")
    if type(port) is not int or not 0 <= port <= 65535:
        raise ValueError(f"kv-server: port: {port!r} is not in [0, 65535]")
    return StackPart("kv-server", "kv-server", HERE, port, found + BLOCKS_PROCESS, 1.0, {"size": found})


def _server(each: StackServer, defaults: Mapping[str, Any], with_blocks: bool) -> StackPart:
    options = dict(defaults) | _chosen(each.options, each.where, _OWN_OF_SERVERS)
    checked = options | {"quiet": True}
    if with_blocks:
        checked["kv_tiers"] = _tiers(checked, each.role, f"{HERE}:1:key")
    try:
        model, engine, serving = settings({}, checked)
    except ValueError as error:
        raise ValueError(f"{each.where}: {error}") from None
    if engine.limits.memory is None:
        raise ValueError(f"{each.where}: memory: missing: say how much of this machine it may take")
    return StackPart(
        each.name, "serve", HERE, 0, engine.limits.memory, serving.shutdown_timeout, options, each.role, each.table,
        serving.ssl_certfile is not None, model, engine, serving,
    )  # fmt: skip


def _socket_in(state: Path) -> str:
    """The Unix socket by which servers share memory with the server of blocks; "" where its path cannot be one."""
    path = str(state.absolute() / "kv.sock")
    return path if len(os.fsencode(path)) <= MOST_PATH and not {":", ","} & {*path} else ""


def _tiers(options: Mapping[str, Any], role: str, remote: str) -> str:
    own = [options["kv_tiers"]] if options.get("kv_tiers") else []
    return ",".join([*own, f"remote={remote}", *([f"role={role}"] if role else [])])


def _backend(entry: Mapping[str, str]) -> str:
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in entry.items())
    return f"[[backend]]\n{lines}\n"


def own_folder(folder: Path) -> None:
    """Make a folder of the state, or see that it is one that this user alone can use. Raises OSError and ValueError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(folder, stat.S_ISDIR)


def _check_own(path: Path, is_kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(f"state: {path}: is not one of this user's own, or a link")
    if found.st_mode & 0o077:
        raise ValueError(f"state: {path}: others can use it: its mode is {found.st_mode & 0o777:o}")


def write_own(path: Path, text: str) -> None:
    """Write a file of the state, whole or not at all."""
    with written_anew(path, private=True) as file:
        file.write(text.encode())


class HeldPorts:
    """Ports that nobody else gets while the stack is up, even while a part starts again: sockets that do not listen."""

    def __init__(self) -> None:
        self._socks: dict[tuple[str, int], socket.socket] = {}  # by host and port

    def hold(self, parts: list[StackPart]) -> None:
        """Hold the port of every part; one of port 0 gets a free one. Raises ValueError, and holds no more than before,
        for one that is in use."""
        made: dict[tuple[str, int], socket.socket] = {}
        try:
            for part in sorted(parts, key=lambda each: not each.port):
                if (part.host, part.port) not in self._socks:
                    sock = _bound(part)
                    part.port = sock.getsockname()[1]
                    made[part.host, part.port] = sock
        except ValueError:
            for sock in made.values():
                sock.close()
            raise
        self._socks |= made

    def keep(self, parts: list[StackPart]) -> None:
        """Hold those of these parts alone."""
        kept = {(each.host, each.port) for each in parts}
        for place in self._socks.keys() - kept:
            self._socks.pop(place).close()

    def close(self) -> None:
        """Give them up."""
        self.keep([])


def _bound(part: StackPart) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in part.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((part.host, part.port))
    except OSError as error:
        sock.close()
        raise ValueError(f"{part.name}: {part.url}: {error.strerror or error}") from None
    return sock
