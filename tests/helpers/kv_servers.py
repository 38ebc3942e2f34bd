"""A `quire kv-server` of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def kv_server(key: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    command = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "kv-server",
        "--key-file",
        str(key),
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, "--size", "64MiB"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"quire: keeping KV blocks in 64(\.0+)? MiB at 127\.0\.0\.1:(\d+)\n", line)
        assert found, line
        yield process, int(found[2])
    finally:
        process.kill()
        process.wait()
