"""Keep KV blocks in memory for engines that share them. docs/kv_cache.md explains what it is for."""

from __future__ import annotations

import argparse
import signal
import socket

from quire.util.sizes import format_size, parse_size
from quire.util.standard_error import say

LEAST_SIZE = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=parse_size, default=2**30, metavar="SIZE", help="memory for blocks (default: 1GiB)"
    )
    parser.add_argument(
        "--key-file", required=True, metavar="FILE",
        help="file with the key that engines must have, 16 bytes at least: head -c 32 /dev/urandom | base64 > FILE",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=7070,
        metavar="N",
        help="TCP port to listen on; 0 picks a free one (default: 7070)",
    )
    parser.add_argument("--quiet", action="store_true", help="write only errors to standard error")


def run(args: argparse.Namespace) -> int:
    from quire.routing.tickets import read_key
    from quire.worker.kv_server import BlockShelf, KvServer

    if args.size < LEAST_SIZE:
        raise ValueError(f"size: {args.size} bytes are below the minimum of {LEAST_SIZE}")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"port: {args.port} is not in [0, 65535]")
    key = read_key(args.key_file)
    try:
        listener = socket.create_server((args.host, args.port), family=_family(args.host), backlog=64)
    except OSError as error:
        raise ValueError(f"host, port: {args.host}:{args.port}: {error.strerror or error}") from None
    server = KvServer(BlockShelf(args.size), key, listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.close())
    if not args.quiet:
        host, port = listener.getsockname()[:2]
        say(f"quire: keeping KV blocks in {format_size(args.size)} at {host}:{port}")
    server.run()
    if not args.quiet:
        shelf = server.shelf
        say(
            f"quire: {shelf.stored} blocks were kept, {shelf.served} given, {shelf.evicted} made room; "
            f"{server.refused} connections refused"
        )
    return 0


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
