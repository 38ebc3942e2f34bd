"""`quire stack` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.process import children
from helpers.server import GUARD


def stack(folder: Path, text: str) -> Path:
    """Write the file of a stack whose state is in the same folder."""
    file = folder / "some.toml"
    file.write_text(f"state = {json.dumps(str(folder / 'state'))}\n{text}")
    return file


def command(action: str, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a stack."""
    words = [sys.executable, "-m", "quire.cli.main", "stack", action, str(file), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=GUARD, check=False)


def status(file: Path) -> dict[str, Any]:
    """What `quire stack status` says."""
    found: dict[str, Any] = json.loads(command("status", file, "--json").stdout)
    return found


def told(folder: Path) -> dict[str, Any]:
    """What the stack whose state is there wrote of itself last, whatever its file says: quicker than the command."""
    found: dict[str, Any] = json.loads((folder / "state/status.json").read_text())
    return found


def pids(found: dict[str, Any]) -> list[int]:
    """Processes of all parts, with those that they have started."""
    own = [each["pid"] for each in found["parts"] if each["pid"] is not None]
    return [*own, *(child for pid in own for child in children(pid, "*"))]


@contextlib.contextmanager
def up(folder: Path, text: str) -> Iterator[Path]:
    """A stack that is up."""
    file = stack(folder, text)
    made = command("up", file, "--detach")
    try:
        assert made.returncode == 0, made.stderr
        yield file
    finally:
        command("down", file)
