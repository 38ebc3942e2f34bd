"""Tasks of lm-evaluation-harness over the API of a server that runs for them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.schema import OPTIONS
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig

_SHOWN = 6  # last lines of a program that failed
_START_SECONDS = 3600.0


def run_tasks(
    model: str,
    asked: EngineConfig,
    tasks: Sequence[str],
    *,
    limit: int | None,
    task_path: str | None,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Rows {"task", "metric", "value", "error"}, of each metric with its standard error where there is one.

    The harness is the command lm_eval (QUIRE_LM_EVAL names another one), which may be installed in an environment of
    its own. Raises QuireError if it is missing, or it or the server fails; the message ends with what it said.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} is not a positive integer")
    if task_path is not None and not Path(task_path).is_dir():
        raise ValueError(f"task_path: {task_path} is not a folder")
    harness = shutil.which(os.environ.get("QUIRE_LM_EVAL", "lm_eval"))
    if harness is None:
        raise QuireError("tasks: lm-evaluation-harness is not installed: pip install 'lm_eval[api]'")
    from quire.engine.build.opening import find_model

    folder = find_model(model)
    with tempfile.TemporaryDirectory(prefix="quire-eval-") as name, _served(model, asked, quiet=quiet) as url:
        command = [harness, "--model", "local-completions", "--tasks", ",".join(tasks), "--output_path", name,
                   "--model_args", _model_args(url, folder)]  # fmt: skip
        if limit is not None:
            command += ["--limit", str(limit)]
        if task_path is not None:
            command += ["--include_path", task_path]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        found = sorted(Path(name).rglob("results_*.json"))
        if done.returncode or not found:
            raise QuireError(f"tasks: lm_eval failed (status {done.returncode}):\n{_tail(done.stdout)}")
        return list(_rows(json.loads(found[-1].read_text())))


def _model_args(url: str, folder: Path) -> str:
    """The tokens of the requests come from the checkpoint's tokenizer, or without one from the server."""
    tokens = f"tokenizer={folder},tokenizer_backend=huggingface"
    if folder.is_file():
        tokens = "tokenizer_backend=remote"
    return f"model=evaluated,base_url={url}/v1/completions,num_concurrent=8,{tokens}"


def _rows(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                error = found.get(f"{metric}_stderr,{kind}")
                name = metric if kind == "none" else f"{metric} ({kind})"
                shown = float(error) if isinstance(error, int | float) else None
                yield {"task": task, "metric": name, "value": float(value), "error": shown}


@contextmanager
def _served(model: str, asked: EngineConfig, *, quiet: bool) -> Iterator[str]:
    """The address of a server of the model, which is ready and ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        model,
        "--port",
        str(port),
        "--served-model-name",
        "evaluated",
    ]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        server = subprocess.Popen([*words, *option_words(asked)], stdout=log, stderr=log if quiet else None)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url, log)
            yield url
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Any) -> None:
    """Until the server is ready."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            log.seek(0)
            raise QuireError(
                f"tasks: the server did not start (status {server.returncode}):\n{_tail(log.read())}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise QuireError(f"tasks: the server was not ready after {_START_SECONDS:g} s")


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_SHOWN:])


def option_words(asked: EngineConfig, names: Collection[str] = OPTIONS) -> list[str]:
    """Those of the options that are not the defaults, as words; speculation, which changes no answer, stays out."""
    words: list[str] = []
    for name, value in asked.values().items():
        flag = name.replace("_", "-")
        if name not in names or value == OPTIONS[name].default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [word for each in value for word in (f"--{flag}", str(each))]
        elif isinstance(value, str | int | float):
            words += [f"--{flag}", str(value)]
    return words
