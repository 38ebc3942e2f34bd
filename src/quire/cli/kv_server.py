"""Keep KV blocks in memory for engines that share them. docs/kv_cache.md explains what it is for."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import ssl
import threading

from quire.util.sizes import format_size, parse_size
from quire.util.standard_error import say

LEAST_SIZE = 2**20
SEND_BYTES = 2**18  # names; blocks go through shared memory


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
        "--uds",
        metavar="PATH",
        help="listen on this Unix socket, too: engines of this host share memory with it",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=7070,
        metavar="N",
        help="TCP port to listen on; 0 picks a free one (default: 7070)",
    )
    parser.add_argument(
        "--ssl-certfile", metavar="FILE", help="certificate (PEM): the address speaks TLS alone"
    )
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="its private key (PEM)")
    parser.add_argument(
        "--nixl", action="store_true",
        help="move blocks by NIXL for engines that want it (via=nixl); needs pip install nixl",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="write only errors to standard error")


def run(args: argparse.Namespace) -> int:
    from quire.routing.tickets import read_key
    from quire.worker.kv_server import BlockShelf, KvServer

    if args.size < LEAST_SIZE:
        raise ValueError(f"size: {args.size} bytes are below the minimum of {LEAST_SIZE}")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"port: {args.port} is not in [0, 65535]")
    key = read_key(args.key_file)
    tls = _tls(args)
    listeners, shelf = _listeners(args), BlockShelf(args.size)
    server = KvServer(shelf, key, listeners[0], tls, nixl=args.nixl)
    others = [KvServer(shelf, key, each) for each in listeners[1:]]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.close())
    if not args.quiet:
        host, port = listeners[0].getsockname()[:2]
        also = f" and {args.uds}" if args.uds else ""
        say(f"quire: keeping KV blocks in {format_size(args.size)} at {host}:{port}{also}")
    for other in others:
        threading.Thread(target=other.run, daemon=True).start()
    server.run()
    for other in others:
        other.close()
        with contextlib.suppress(OSError):
            os.unlink(args.uds)
    if not args.quiet:
        refused = server.refused + sum(other.refused for other in others)
        say(
            f"quire: {shelf.stored} blocks were kept, {shelf.served} given, {shelf.evicted} made room; "
            f"{refused} connections refused"
        )
    return 0


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    from quire.util.listening import BindError, server_tls

    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise ValueError("ssl-certfile, ssl-keyfile: give both, or none")
    try:
        return None if args.ssl_certfile is None else server_tls(args.ssl_certfile, args.ssl_keyfile)
    except BindError as error:
        raise ValueError(str(error)) from None


def _listeners(args: argparse.Namespace) -> list[socket.socket]:
    from quire.util.listening import BindError, bind_path

    try:
        made = [socket.create_server((args.host, args.port), family=_family(args.host), backlog=64)]
    except OSError as error:
        raise ValueError(f"host, port: {args.host}:{args.port}: {error.strerror or error}") from None
    if args.uds:
        try:
            made.append(bind_path(args.uds, SEND_BYTES))
        except BindError as error:
            made[0].close()
            raise ValueError(f"uds: {error}") from None
    return made


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
