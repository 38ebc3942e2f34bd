"""The examples of the pages on structured output and programs run as they are written: `make test-model`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.memory import memory_for
from quire import LLM, SamplingParams, StructuredOutput
from quire.mcp.settings import read_settings

pytestmark = pytest.mark.model
DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False}


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found
    return found


def run(command: list[str], folder: Path, **options: Any) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("page", ["structured.md", "programs.md"])
def test_python(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        assert run([sys.executable, "-c", block], tmp_path)


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(SCHEMA))
    lines = [line for block in blocks("structured.md", "sh") for line in block.splitlines()]
    commands = [line.partition("  #")[0].strip() for line in lines if line.startswith("quire ")]
    assert len(commands) >= 3
    for command in commands:
        shell = f"exec {sys.executable} -m {command}"
        assert run(["sh", "-c", shell], tmp_path, input="Tell me about the sun.\n")


def test_grammars_tags_and_tool_servers(tmp_path: Path) -> None:
    page = (DOCS / "structured.md").read_text()
    gbnf = textwrap.dedent("\n".join(re.findall(r"^    \w+ +::=.*$", page, re.MULTILINE)))
    *tags, servers = map(json.loads, blocks("structured.md", "json"))
    forms = [StructuredOutput(grammar=gbnf), *(StructuredOutput(structural_tag=tag) for tag in tags)]
    with LLM(progress=False, memory=memory_for(2**30)) as llm:
        params = [SamplingParams(structured=form, max_tokens=20) for form in forms]
        assert len(llm.generate(["a"] * len(forms), params)) == len(forms) == 3
    (tmp_path / "mcp.json").write_text(json.dumps(servers))
    assert len(read_settings(str(tmp_path / "mcp.json")).servers) == 2


def tutorials() -> Iterator[Any]:
    """Title and commands of each tutorial."""
    for part in re.split(r"^## ", (DOCS / "tutorials.md").read_text(), flags=re.MULTILINE)[1:]:
        title, commands = part.splitlines()[0], "".join(re.findall(r"^```sh\n(.*?)^```$", part, re.S | re.M))
        without = "nginx" in commands and not shutil.which("nginx")
        yield pytest.param(title, commands, marks=pytest.mark.skipif(without, reason="needs nginx"), id=title)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(("title", "commands"), [*tutorials()])
def test_a_tutorial(title: str, commands: str, tmp_path: Path) -> None:
    script = "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + commands
    for port in ("8123", "8124"):
        script = script.replace(port, str(free_port()))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run(["sh", "-c", script], tmp_path, env={**os.environ, "PATH": path}), title
