"""Whether, and to whom, a server tells which KV blocks it has: vLLM's `--kv-events-config`, and what we add to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from ipaddress import ip_address
from typing import Any

from quire.records import dataclass

PUBLISHERS = ("null", "zmq")
_SCHEMES = ("tcp://", "ipc://")
_ANY = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """The fields have vLLM's names and meanings. `publisher` is zmq where events are enabled and it is not given.

    endpoint            where batches are published: bound if it has a *, else connected to
    replay_endpoint     where subscribers ask for batches that they have missed; bound
    buffer_steps        batches that are kept for them, within a bound on their bytes
    hwm                 batches that wait for a slow subscriber; further ones are lost to it
    max_queue_size      vLLM's; nothing queues here before it is published
    allow_unencrypted   publish beyond this machine in plain text: tokens of prompts are in it
    curve_secret_key_file  a secret key of CURVE (Z85, 40 characters) by which all is encrypted

    Raises ValueError naming the field.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 1000
    max_queue_size: int = 100_000
    topic: str = ""
    allow_unencrypted: bool = False
    curve_secret_key_file: str | None = None

    def __post_init__(self) -> None:
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        if self.publisher not in PUBLISHERS:
            raise _wrong("publisher", f"{self.publisher!r} is not one of {', '.join(PUBLISHERS)}")
        for name in ("enable_kv_cache_events", "allow_unencrypted"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"{getattr(self, name)!r} is neither true nor false")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
                raise _wrong(name, f"{value!r} is not a positive integer")
        for name in ("endpoint", "topic", "replay_endpoint", "curve_secret_key_file"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name not in {"endpoint", "topic"}):
                raise _wrong(name, f"{value!r} is not a text")
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name) is not None:
                self._check(name, getattr(self, name))

    @property
    def on(self) -> bool:
        """Whether the engine reports its blocks at all."""
        return self.enable_kv_cache_events

    @property
    def publishes(self) -> bool:
        """Whether they are published over ZeroMQ."""
        return self.on and self.publisher == "zmq"

    @property
    def may_leave(self) -> bool:
        """Whether events may leave this machine."""
        return self.allow_unencrypted or self.curve_secret_key_file is not None

    def address(self, endpoint: str, rank: int) -> tuple[str, bool]:
        """Where the replica `rank` publishes, or answers, and whether it binds to that or connects. An address that
        stands for all of this machine's is that of loopback unless events may leave it.
        """
        if endpoint.startswith("ipc://"):
            return endpoint + (f".{rank}" if rank else ""), True
        host, port = _parts(endpoint)
        if host in _ANY:
            return f"tcp://{'*' if self.may_leave else '127.0.0.1'}:{port + rank}", True
        return f"tcp://{host}:{port + rank}", False

    def _check(self, name: str, endpoint: str) -> None:
        if not endpoint.startswith(_SCHEMES):
            raise _wrong(name, f"{endpoint!r} begins with none of {', '.join(_SCHEMES)}")
        if endpoint.startswith("ipc://"):
            return
        try:
            host, _ = _parts(endpoint)
        except ValueError:
            raise _wrong(name, f"{endpoint!r} is not tcp://HOST:PORT") from None
        if host not in _ANY and not _is_loopback(host) and not self.may_leave:
            raise _wrong(
                name,
                f"{endpoint} is beyond this machine, and events have the tokens of prompts in them: give "
                "curve_secret_key_file, which encrypts them, or allow_unencrypted",
            )


def parse_kv_events(given: str | Mapping[str, Any] | None) -> KvEventsConfig:
    """Read a JSON object, or its text. Raises ValueError naming the field."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"kv_events_config: not JSON: {error}") from None
    if found is None:
        return KvEventsConfig()
    if not isinstance(found, Mapping):
        raise ValueError('kv_events_config: not a JSON object such as {"enable_kv_cache_events": true}')
    known = [f.name for f in fields(KvEventsConfig)]
    for name in found:
        if name not in known:
            raise _wrong(str(name), f"is not a field; there are {', '.join(known)}")
    return KvEventsConfig(**found)


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not 0 < int(port) <= 65535:
        raise ValueError(endpoint)
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _wrong(field: str, problem: str) -> ValueError:
    return ValueError(f"kv_events_config.{field}: {problem}")
