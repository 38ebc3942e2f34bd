"""SGLang's benchmark client: 40 requests, 8 at once, over its own route and over OpenAI's; every one completes with the
exact number of tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REQUESTS, PROMPT, OUTPUT = 40, 32, 16
# It imports torchvision, whose wheel is for GPUs: with torch for CPUs the operators that it describes must be declared.
LAUNCH = """
import runpy, torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
"""


def main() -> None:
    url, folder = sys.argv[1:3]
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat", "vllm"):
        with tempfile.TemporaryDirectory() as name:
            result = Path(name) / "result.jsonl"
            benchmark(url, folder, backend, result)
            check(backend, json.loads(result.read_text()))
    print("sglang", version("sglang"), "transformers", version("transformers"))


def benchmark(url: str, folder: str, backend: str, result: Path) -> None:
    options = {
        "backend": backend, "base-url": url, "model": "tiny", "tokenizer": folder, "dataset-name": "random-ids",
        "random-input-len": PROMPT, "random-output-len": OUTPUT, "random-range-ratio": 1.0, "num-prompts": REQUESTS,
        "max-concurrency": 8, "output-file": result,
    }  # fmt: skip
    command = [sys.executable, "-c", LAUNCH, "--disable-tqdm", "--output-details"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, env=os.environ | {"API_KEY": os.environ["OPENAI_API_KEY"]})


def check(backend: str, result: dict[str, object]) -> None:
    print(f"{backend}: {result['completed']} completed, {result['total_output_tokens']} tokens")
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * OUTPUT
    assert not any(result["errors"])  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
