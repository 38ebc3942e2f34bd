"""guidellm: a benchmark of chat and of completions with 8 concurrent streams; every request completes, with the exact
number of tokens, and its counts are the server's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

REQUESTS, PROMPT, OUTPUT = 40, 32, 16


def main() -> None:
    url, folder = sys.argv[1:3]
    for route in ("/v1/chat/completions", "/v1/completions"):
        with tempfile.TemporaryDirectory() as name:
            report = Path(name) / "report.json"
            benchmark(url, folder, route, report)
            check(json.loads(report.read_text()), route)
    print("guidellm", version("guidellm"), "transformers", version("transformers"))


def benchmark(url: str, folder: str, route: str, report: Path) -> None:
    key = os.environ["OPENAI_API_KEY"]
    arguments = {
        "backend": f"kind=openai_http,target={url},model=tiny,request_format={route},api_key={key}",
        "tokenizer": f"kind=huggingface_auto,model={folder}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "profile": "kind=concurrent,streams=8",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress"]
    for name, value in arguments.items():
        command += [f"--{name}", value]
    subprocess.run(command, check=True)


def check(report: Any, route: str) -> None:
    (run,) = report["benchmarks"]
    requests = run["requests"]
    done, failed = requests["successful"], requests["errored"]
    print(f"{route}: {len(done)} successful, {len(failed)} failed, {len(requests['incomplete'])} incomplete")
    assert not failed, failed[0]
    assert len(done) >= REQUESTS
    for request in done:
        assert request["output_metrics"]["text_tokens"] == OUTPUT, request
        assert request["input_metrics"]["text_tokens"] >= PROMPT
        assert request["time_to_first_token_ms"] > 0


if __name__ == "__main__":
    main()
