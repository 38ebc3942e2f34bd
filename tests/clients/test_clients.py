"""Other people's clients, each in an environment of its own: `make test-clients`. It needs a package index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.loader import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
# client -> packages, and whether it talks to the shipped model in place of a tiny one of random weights
CLIENTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "structured": (
        ("openai", "instructor", "pydantic-ai-slim[openai]", "langchain-openai", "opentelemetry-api<1.35"),
        True,
    ),
}


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, tmp_path: Path) -> None:
    packages, shipped = CLIENTS[client]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    model = ["--model", str(resolve_model(DEFAULT_MODEL))] if shipped else []
    paths = {"PYTHONPATH": os.pathsep.join(str(HERE.parents[1] / part) for part in ("src", "tests"))}
    command = [sys.executable, str(HERE / "run.py"), client, "--python", str(python), *model]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
