"""Runs other people's clients against a live server.

PYTHONPATH=src:tests python tests/clients/run.py CLIENT --environment FOLDER [--model CHECKPOINT] [more for the client]

CLIENT is a script beside this file (CLIENT_client.py or .mjs) that knows nothing of Quire. FOLDER is where the client
is installed: a virtual environment, or a folder with node_modules (README.md says with what). After the client the
server must be idle, hold no block and no descriptor more than before, and have answered nothing with a 5xx but 503 and
504.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers.pooling_folders import pooling_folder
from helpers.scripted import Script
from helpers.server import LiveServer, served_folder, serving
from quire.loader import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
KEY, ADMIN_KEY = "secret", "administrator"
# 504 is the right answer to a deadline that has passed, 503 to a request during a start.
ALLOWED_FAILURES = {"503", "504"}
ENCODER = "encoder"  # in place of a checkpoint: a tiny model of vectors
# The first request: of a text, one that starts the process that compiles grammars.
WARM_TEXT = (
    "/v1/completions",
    {"prompt": "warm", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}},
)
WARM_VECTOR = ("/v1/embeddings", {"model": "tiny", "input": "a"})
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    clients = {path.stem.removesuffix("_client"): path for path in HERE.glob("*_client.*")}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("client", choices=sorted(clients))
    parser.add_argument("--environment", type=Path, required=True, help="where the client is installed")
    parser.add_argument("--model", help="a checkpoint, or encoder (default: a tiny one, made for this)")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = _checkpoint(args.model, Path(name) / "tiny")
        if args.model == DEFAULT_MODEL:
            stack.enter_context(two_calls(folder).played())
        options: dict[str, Any] = {"api_key": (KEY,)}
        if args.client == "schemathesis":
            options = {"admin_api_key": (ADMIN_KEY,), "profile_dir": str(Path(name) / "profiles")}
        if args.client == "triton":
            options["grpc_port"] = 0
        length = 48 if args.model == ENCODER else 1024
        engine = {
            "max_model_len": length,
            "dtype": "float32",
        }  # lm_eval compares with transformers in float32
        server = stack.enter_context(serving(folder, engine, served_model_name=("tiny",), **options))
        if server.http.grpc is not None:
            rest = [str(server.http.grpc.port), *rest]
        command = [*_command(clients[args.client], args.environment), server.url, str(folder), *rest]
        return _run(server, command, WARM_VECTOR if args.model == ENCODER else WARM_TEXT)


def _checkpoint(model: str | None, folder: Path) -> Path:
    if model == ENCODER:
        return pooling_folder("bert", folder)[0]
    return resolve_model(model) if model else served_folder(folder)


def two_calls(folder: Path) -> Script:
    """What the shipped model does not do by itself: to one question it says two calls in one answer, behind a text."""
    script = Script(folder, "<|im_end|>")
    calls = "\n".join(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Paris", "Rome")
    )
    script.says("in Paris and in Rome?", f"Let me look.\n{calls}")
    for space in ("", " "):  # clients write the result of a function either way
        script.says(f'"temperature":{space}34', "In Paris it is 21 degrees, and in Rome 34.")
    return script


def _command(client: Path, environment: Path) -> list[str]:
    if client.suffix == ".py":
        return [str(environment / "bin" / "python"), str(client)]
    return ["node", shutil.copy(client, environment)]  # modules are found from where the script lies


def _run(server: LiveServer, command: list[str], warm: tuple[str, dict[str, Any]]) -> int:
    key = {"authorization": f"Bearer {KEY}"}
    assert server.post(*warm, key).status == 200
    before = len(os.listdir("/proc/self/fd"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=clean | OFFLINE | {"OPENAI_API_KEY": KEY, "ADMIN_KEY": ADMIN_KEY}, check=False
    )
    server.wait(server.idle)
    server.wait(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert server.post(*warm, key).status == 200
    statuses = {labels[2] for labels in server.http.context.metrics.http}
    failures = {status for status in statuses if status >= "500"} - ALLOWED_FAILURES
    print(f"{Path(command[1]).name}: exit status {done.returncode}, answers {sorted(statuses)}")
    return done.returncode or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
