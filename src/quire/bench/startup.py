"""Measure start-up of new processes, from their start to the first token.

Every iteration starts the command again with its files in the page cache, as they are after the first one. For a cold
start, neither the model's files nor the cached copies are there. `generate` reports its start and its first token; a
server is polled over HTTP until it answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.bench.results import Metric, metric
from quire.config.schema import OPTIONS, EngineConfig
from quire.engine.build.opening import find_model
from quire.types import QuireError

POLL_SECONDS = 0.005
_SPAN = re.compile(
    r'^quire_startup_seconds\{edge="(begin|end)",phase="([^"]*)",process="([^"]*)"\} (\S+)$', re.MULTILINE
)

DEFINITIONS = {
    "import": "seconds from starting a Python process that only imports quire to its end",
    "generate": "seconds from the start of `quire generate` to its first token, as the process reports it",
    "cold": "the same, after the model's files and their cached copies were dropped from the page cache",
    "generate_process": "seconds from starting the process to its end, one token generated",
    "serve": "seconds from starting `quire serve` to the first token of a streamed completion over HTTP, polled "
    f"every {POLL_SECONDS * 1e3:g} ms until the server is ready",
    "phases": "seconds from the start of the process; a phase that begins and ends at once is an event",
}


class StartupError(QuireError):
    """A started process failed; the message contains the end of its output."""


def engine_flags(config: EngineConfig) -> list[str]:
    """The command-line options for a config: those that differ from the defaults."""
    found: list[str] = []
    for name, value in config.values().items():
        field, flag = OPTIONS[name], name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(field.default, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found


class Starts:
    """Starts commands of this installation on one model.

    `kept` is the folder of packed weights and compiled tokenizers.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        prompt: Sequence[int],
        *,
        kept: Path | None = None,
        timeout: float = 600,
    ) -> None:
        self.model, self.flags, self.prompt, self.timeout = model, list(flags), list(prompt), timeout
        self.kept = kept

    def importing(self) -> dict[str, Any]:
        """Measure a process that imports the package and exits."""
        start = time.monotonic()
        self._complete([sys.executable, "-c", "import quire"])
        return {"seconds": time.monotonic() - start}

    def generate(self) -> dict[str, Any]:
        """Measure `quire generate` of one token: its phases, and the whole process."""
        ids = ",".join(map(str, self.prompt))
        start = time.monotonic()
        out = self._complete(
            [*_command("generate"), self.model, "--prompt-token-ids", ids, "--max-tokens", "1", "--temperature",
             "0", "--ignore-eos", "--json", "--quiet", *self.flags]
        )  # fmt: skip
        seconds = time.monotonic() - start
        spans = json.loads(out)["startup"]
        first = next((span["end"] for span in spans if span["phase"] == "first token"), None)
        return {"seconds": first if first is not None else seconds, "process": seconds, "spans": spans}

    def cold(self) -> dict[str, Any]:
        """Measure `generate` with the model's files and cached copies on disk only."""
        path = find_model(self.model)
        drop_from_page_cache(path.parent if path.is_file() else path)
        if self.kept is not None:
            drop_from_page_cache(self.kept)
        return self.generate()

    def serve(self) -> dict[str, Any]:
        """Measure `quire serve` until the first token of a streamed completion arrives over HTTP."""
        port = _free_port()
        start = time.monotonic()
        command = [
            *_command("serve"),
            self.model,
            "--port",
            str(port),
            "--served-model-name",
            "m",
            *self.flags,
        ]
        with self._running(command) as (process, log):
            while (first := _first_token(port, self.prompt)) is None:
                if process.poll() is not None:
                    raise StartupError(f"quire serve ended with {process.returncode}: {_tail(log)}")
                if time.monotonic() - start > self.timeout:
                    raise StartupError(f"quire serve did not answer within {self.timeout:g} s: {_tail(log)}")
                time.sleep(POLL_SECONDS)
            with _answer(port, "GET", "/metrics") as page:
                return {"seconds": first - start, "spans": _spans(page.read().decode())}

    def _complete(self, command: Sequence[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout, check=False)
        if done.returncode:
            raise StartupError(f"{' '.join(command[1:4])} ended with {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    @contextlib.contextmanager
    def _running(self, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A process group that is ended on exit."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            try:
                yield process, log
            finally:
                _end(process)


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.glob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())  # unwritten pages would stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "quire.cli.main", name]


def _end(process: subprocess.Popen[bytes]) -> None:
    for kind, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _answer(port: int, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def _first_token(port: int, prompt: Sequence[int]) -> float | None:
    """The time of the first token of a completion (time.monotonic); None while the server does not answer yet."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        with _answer(port, "POST", "/v1/completions", body) as response:
            if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
                return None
            if response.status != http.HTTPStatus.OK:
                raise StartupError(f"quire serve answered {response.status}: {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data:") and b'"choices"' in line:
                    return time.monotonic()
    except (OSError, http.client.HTTPException):
        return None
    raise StartupError("quire serve ended the stream before the first token")


def _spans(text: str) -> list[dict[str, Any]]:
    """The start-up phases of a server's metrics page."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for edge, phase, process, value in _SPAN.findall(text):
        found.setdefault((process, phase), {"process": process, "phase": phase})[edge] = float(value)
    return sorted(found.values(), key=lambda span: (span["begin"], span["end"]))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


def measure_startup(
    starts: Starts, kinds: Sequence[str], iterations: int
) -> tuple[dict[str, Metric], dict[str, list[dict[str, Any]]]]:
    """Return metrics and tables. The kinds take turns; one uncounted start of each warms the page cache."""
    functions = {
        "import": starts.importing, "generate": starts.generate, "cold": starts.cold, "serve": starts.serve
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(-1, iterations):
        for kind in kinds:
            one = functions[kind]()
            if number >= 0:
                found[kind].append(one)
    metrics = {kind: metric([one["seconds"] for one in found[kind]], "s", "lower") for kind in kinds}
    if "generate" in found:
        metrics["generate_process"] = metric([one["process"] for one in found["generate"]], "s", "lower")
    phases = [row for kind in kinds if kind != "import" for row in phase_rows(kind, found[kind])]
    return metrics, {"phases": phases}


def phase_rows(kind: str, ones: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median begin and end of each phase over the starts."""
    edges: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in ones:
        for span in one["spans"]:
            edges.setdefault((span["process"], span["phase"]), []).append((span["begin"], span["end"]))
    rows = []
    for (process, phase), times in edges.items():
        begin, end, seconds = map(statistics.median, zip(*((b, e, e - b) for b, e in times), strict=True))
        rows.append(
            {"kind": kind, "process": process, "phase": phase, "begin": begin, "end": end, "seconds": seconds}
        )
    return sorted(rows, key=lambda row: (row["begin"], row["end"]))
