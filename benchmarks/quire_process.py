"""A command of quire's that serves, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

_READY = ("quire: serving ", "quire: keeping ", "quire: routing ")


@contextlib.contextmanager
def quire_process(*command: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The port that a command announces, which should have `--port 0`, and its process. Raises SystemExit if it does
    not start."""
    made = subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", *command], stderr=subprocess.PIPE, text=True
    )
    assert made.stderr is not None
    try:
        line = next((line for line in made.stderr if line.startswith(_READY)), "")
        if not line:
            raise SystemExit(f"{command[0]} did not start")
        threading.Thread(target=made.stderr.read, daemon=True).start()
        yield int(line.partition(" and ")[0].rpartition(":")[2]), made
    finally:
        made.terminate()
        made.wait()


@contextlib.contextmanager
def quire_port(*command: str) -> Iterator[int]:
    """The port alone."""
    with quire_process(*command) as (port, _):
        yield port
