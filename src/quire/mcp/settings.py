"""The file that names tool servers, in the form that other clients use, and which of their tools may be called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.records import dataclass
from quire.types import RequestError
from quire.util.strict_json import read_json_object

MAX_FILE_BYTES = 2**20
MAX_SERVERS = 32
MAX_SECONDS = 3600
MAX_ROUNDS = 100
MAX_CALLS = 256
MAX_MESSAGE_BYTES = 64 * 2**20
_CODE = 2 * 2**20
_THREAD = 128 * 1024  # of a call that runs
_NUMBERS = {"rounds": (1, MAX_ROUNDS), "calls": (1, MAX_CALLS), "message_bytes": (1024, MAX_MESSAGE_BYTES)}
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[!-9;-~]+"), re.compile(r"[\t -~]*")
_LISTS, _TABLES, _TEXTS = ("args", "tools"), ("env", "headers"), ("command", "cwd", "url", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One tool server: a `command` that is started, or a `url`. Only `tools` may be called; "*" is all of them.

    `timeout` limits each request to it, in seconds.
    """

    name: str
    tools: frozenset[str] = frozenset()
    timeout: float = 30.0
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def allows(self, tool: str) -> bool:
        """Whether a tool may be called."""
        return tool in self.tools or "*" in self.tools


@dataclass(frozen=True, slots=True)
class McpSettings:
    """The servers of a file; `rounds` limits how often the model may call tools before it must answer, `calls` the
    requests to all servers at a time (of `quire serve`), `message_bytes` each message of a server.
    """

    servers: tuple[ServerSettings, ...]
    rounds: int = 8
    calls: int = 8
    message_bytes: int = 2**20

    @property
    def memory(self) -> int:
        """The most bytes that all servers take in this process: the code (1.5 MiB measured), and for each running call
        its message as it arrives, whole, and its text, which has four bytes for each character if one is wide.
        """
        return _CODE + self.calls * (7 * self.message_bytes + _THREAD)


def read_settings(path: str) -> McpSettings:
    """The servers of a file: {"mcpServers": {NAME: {"command": …} or {"url": …}}, "rounds": N, …}.

    Raises CheckpointError for a file that is no JSON object, RequestError naming the key for what is wrong in it.
    """
    found = read_json_object(Path(path), MAX_FILE_BYTES)
    servers = found.get("mcpServers")
    if not isinstance(servers, dict) or not 0 < len(servers) <= MAX_SERVERS:
        raise RequestError("mcpServers", f"must be an object with 1 to {MAX_SERVERS} servers")
    numbers: dict[str, Any] = {name: found[name] for name in _NUMBERS if name in found}
    for name, number in numbers.items():
        low, high = _NUMBERS[name]
        if type(number) is not int or not low <= number <= high:
            raise RequestError(name, f"{number!r} is not an integer in [{low}, {high}]")
    return McpSettings(tuple(_server(name, given) for name, given in servers.items()), **numbers)


def _server(name: str, given: Any) -> ServerSettings:
    where = f"mcpServers.{name}"
    if not isinstance(given, dict):
        raise RequestError(where, "must be an object")
    for key, value in given.items():
        _check(f"{where}.{key}", key, value)
    command, url = given.get("command"), given.get("url", "")
    if (command is None) == (not url):
        raise RequestError(where, "needs either command or url")
    if url and not _is_address(url):
        raise RequestError(f"{where}.url", f"{url!r} is not an http or https address")
    return ServerSettings(
        name=name,
        tools=frozenset(given.get("tools", ())),
        timeout=given.get("timeout", 30.0),
        command=(command, *given.get("args", ())) if command else (),
        env=given.get("env", {}),
        cwd=given.get("cwd"),
        url=url,
        headers=given.get("headers", {}),
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            url.isascii() and parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        )
    except ValueError:  # of a port, or of brackets
        return False


def _check(where: str, key: str, value: Any) -> None:
    """Raise RequestError for a key that is unknown or has a value of another type."""
    if key in _LISTS:
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        kind = "a list of strings"
    elif key in _TABLES:
        right = isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
        kind = "an object whose values are strings"
        if key == "headers" and right:
            right = all(_HEADER_NAME.fullmatch(n) and _HEADER_VALUE.fullmatch(v) for n, v in value.items())
            kind = "an object of HTTP headers in ASCII"
    elif key in _TEXTS:
        right, kind = isinstance(value, str) and bool(value), "a string that is not empty"
    elif key == "timeout":
        right = type(value) in {int, float} and 0 < value <= MAX_SECONDS
        kind = f"a number of seconds up to {MAX_SECONDS}"
    else:
        raise RequestError(
            where, f"unknown key; a server has {', '.join((*_TEXTS, *_LISTS, *_TABLES, 'timeout'))}"
        )
    if not right:
        raise RequestError(where, f"must be {kind}")
