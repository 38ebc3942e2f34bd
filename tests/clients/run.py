"""Runs other people's clients against a live server on a tiny checkpoint.

PYTHONPATH=src:tests python tests/clients/run.py CLIENT --python VENV/bin/python [arguments for the client]

CLIENT is langchain, litellm, lm_eval, guidellm or schemathesis: each is a script beside this file that knows nothing
of Quire and runs in an environment of its own, where the client is installed (README.md says how). Not part of the
suite: they take up to minutes. After the client the server must be idle, hold no block and no descriptor more than
before, and have answered nothing with a 5xx but 503 and 504.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.server import LiveServer, served_folder, serving

HERE = Path(__file__).parent
KEY = "secret"
# 504 is the right answer to a deadline that has passed, 503 to a request during a start.
ALLOWED_FAILURES = {"503", "504"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "client", choices=sorted(path.stem.removesuffix("_client") for path in HERE.glob("*_client.py"))
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the client's environment")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a tiny one, made for this)")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.model or Path(name) / "tiny"
        if args.model is None:
            served_folder(folder)
        options = {} if args.client == "schemathesis" else {"api_key": (KEY,)}
        engine = {"max_model_len": 1024, "dtype": "float32"}  # lm_eval compares with transformers in float32
        with serving(folder, engine, served_model_name=("tiny",), **options) as server:
            return _run(
                server, [args.python, str(HERE / f"{args.client}_client.py"), server.url, str(folder), *rest]
            )


def _run(server: LiveServer, command: list[str]) -> int:
    key = {"authorization": f"Bearer {KEY}"}
    assert server.post("/tokenize", {"prompt": "warm"}, key).status == 200
    before = len(os.listdir("/proc/self/fd"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=clean | OFFLINE | {"OPENAI_API_KEY": KEY}, check=False)
    server.wait(server.idle)
    server.wait(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, key).status == 200
    statuses = {labels[2] for labels in server.http.context.metrics.http}
    failures = {status for status in statuses if status >= "500"} - ALLOWED_FAILURES
    print(f"{command[1].rpartition('/')[2]}: exit status {done.returncode}, answers {sorted(statuses)}")
    return done.returncode or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
