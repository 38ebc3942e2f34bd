"""Make keys of tenants, hash keys, and check a file of tenants. docs/tenants.md explains the file."""

from __future__ import annotations

import argparse
import secrets
import sys

from quire.config.tenants import MIN_KEY_CHARS, key_digest, read_tenants
from quire.util.printable import printable

_KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("key", "hash", "check"),
        help="key: make a key, and print it and its hash; hash: print the hash of the key on standard input; check: "
        "read a file as `quire serve --tenants` does",
    )  # fmt: skip
    parser.add_argument("file", nargs="?", help="the file to check")


def run(args: argparse.Namespace) -> int:
    if (args.file is not None) != (args.action == "check"):
        raise ValueError("file: `quire tenants check FILE` needs one, key and hash take none")
    if args.action == "check":
        tenants = read_tenants(args.file)
        for tenant in tenants.by_name.values():
            limits = [
                f"{name} {value}"
                for name in (
                    "requests_per_minute",
                    "tokens_per_minute",
                    "concurrent_requests",
                    "tokens_per_day",
                )
                if (value := getattr(tenant, name)) is not None
            ]
            parts = [f"{len(tenant.keys)} keys", f"weight {tenant.weight:g}", *limits]
            print(f"{tenant.name}: {', '.join(parts)}, cache share {tenant.cache_share:g}")
        return 0
    if args.action == "key":
        key = f"qk-{secrets.token_urlsafe(_KEY_BYTES)}"
        print(f"key   {key}")
        print(f"hash  sha256:{key_digest(key).hex()}")
        return 0
    key = sys.stdin.readline().strip()
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not printable(key) == key:
        raise ValueError(
            f"key: it must be at least {MIN_KEY_CHARS} printable ASCII characters: a shorter one could be guessed from "
            "its hash; `quire tenants key` makes one"
        )
    print(f"sha256:{key_digest(key).hex()}")
    return 0
