"""Memory that a server's process holds besides that of its engine: planned and actual."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.kv_events import parse_kv_events
from quire.config.resolve import DEFAULT_MEMORY_SHARE
from quire.config.serving import ServingConfig
from quire.engine.build.opening import TOKENIZER_FACTOR, tokenizer_memory
from quire.engine.cache_log import event_bytes
from quire.util.platform import available_memory, resident_exactly, started_by
from quire.util.resident import Area, resident_parts

if TYPE_CHECKING:
    from quire.loader import GGUFFiles

# Growth of this process once it serves, apart from what requests hold: code that runs for the first time, modules
# imported on demand, threads. Measured: 3.7 MiB up to the first request, 4.8 for the pages of metrics and of the API's
# description, 1.5 for the first chat and the first logprobs.
SERVER_GROWTH = 11 * 2**20
# Texts of tokens in three caches (server/logprob_bodies, front/text_service): 270 bytes measured. Tokenizer files have
# 50 to 100 bytes per token, so the file size is enough to recognise vocabularies below _TEXTS tokens.
_TEXTS, _TEXT_BYTES, _FILE_BYTES = 2**13, 3 * 280, 48
# A connection without a request. Measured with 400 of them, after a request: 8.4 KiB on a quiet machine and
# 11.2 on a busy one, with TLS 54 to 57 KiB; before: 5.9 and 53.1 KiB.
CONNECTION, TLS_CONNECTION = 12 * 2**10, 60 * 2**10
# What each may buffer in addition, on average: incomplete headers, and the pieces that TLS has read and written.
_BUFFER, _TLS_BUFFER, _MIN_BUFFERS = 2**10, 8 * 2**10, 2**20

# gRPC: its modules, and a call that has begun and is not read yet, with what has come of its message (a window of 16
# KiB). Measured: 2.6 MiB, and 20 KiB a call of 100 with 250 KB each.
_GRPC_GROWTH, _GRPC_CALL = 6 * 2**20, 40 * 2**10
GRPC_CALLS = 100  # over one connection, of which there is one for so many of HTTP's:
_GRPC_SHARE = 128


def buffers(serving: ServingConfig) -> int:
    """Bytes that all connections together may buffer."""
    return max(_MIN_BUFFERS, _connections(serving) * (_TLS_BUFFER if serving.ssl_certfile else _BUFFER))


def _connections(serving: ServingConfig) -> int:
    """The largest number of connections: each needs an open file."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return serving.max_connections if files < 0 else min(serving.max_connections, files)


def grpc_connections(serving: ServingConfig) -> int:
    """The largest number of connections over gRPC."""
    return max(1, _connections(serving) // _GRPC_SHARE)


def memory_beside(folder: Path, files: GGUFFiles | None, serving: ServingConfig) -> dict[str, int]:
    """Bytes that this process will hold besides the engine's, under the same bound."""
    alone = server_memory(serving)
    return {**alone, "server": alone["server"] + tokenizer_beside(folder, files)["server"]}


def server_memory(serving: ServingConfig) -> dict[str, int]:
    """Bytes that this process will hold whatever model it serves."""
    each = TLS_CONNECTION if serving.ssl_certfile else CONNECTION
    found = {
        "server": resident_exactly() + SERVER_GROWTH,
        "connections": buffers(serving) + _connections(serving) * each,
    }
    if serving.mcp is not None:
        from quire.mcp.settings import read_settings

        found["tool_servers"] = read_settings(serving.mcp).memory
    if serving.simulator_memory is not None:
        found["simulator"] = serving.simulator_memory
    if (events := parse_kv_events(serving.kv_events_config)).on:
        found["kv_events"] = event_bytes(publishes=events.publishes)
    if serving.grpc_port is not None:
        found["grpc"] = _GRPC_GROWTH + grpc_connections(serving) * GRPC_CALLS * _GRPC_CALL
    return found


def bound_of_several(asked: int | None, held: Mapping[str, int]) -> int:
    """The memory bound of a server with several engines, of which it holds `held` itself: as asked for, or so that the
    engines have the usual share of what is available.
    """
    if asked is not None:
        return asked
    return sum(held.values()) + int(DEFAULT_MEMORY_SHARE * available_memory())


def tokenizer_beside(folder: Path, files: GGUFFiles | None) -> dict[str, int]:
    """Bytes that this process will hold for a model that it serves."""
    tokenizer = tokenizer_memory(folder, files)
    texts = min(_TEXTS, tokenizer // TOKENIZER_FACTOR // _FILE_BYTES) * _TEXT_BYTES
    return {"server": tokenizer + texts}


def memory_held(engine: int | None, compiler: int | None, areas: Sequence[Area]) -> dict[str, dict[str, int]]:
    """What each process holds now, by part. `engine`: the id of the engine process, None for a thread of this one;
    `areas`: its large parts. `compiler`: the process that compiles grammars, None where there is none. What an engine
    process has started are other ranks of the model; a page that ranks share counts in each.
    """
    held = {"server": resident_parts(os.getpid(), areas if engine is None else ())}
    if engine is not None:
        held["engine"] = resident_parts(engine, areas)
        for pid in started_by(engine):
            held[f"rank {pid}"] = resident_parts(pid, ())
    if compiler is not None:
        held["compiler"] = resident_parts(compiler, ())
    return held
