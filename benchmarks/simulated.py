"""The simulator beside a server: four kinds of load at three rates below saturation, python -m benchmarks.simulated.

Each trial serves a load with a log, then simulates the requests of that log as they were. The rates are shares of the
rate at which requests are served that all come at once. `--kinds` and `--seconds` bound how long it takes; results are
appended to FILE as lines of JSON, and `--report` prints the tables of all that are there.

With `--knee` the same requests come at rising rates, and the log of the lowest says at which of them fewer than nine of
ten would keep the objectives: beside the rate at which they do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from quire.bench.fitted_steps import fit_steps, timed_steps
from quire.bench.request_metrics import summarize
from quire.bench.scenario import scenario_of_log
from quire.bench.simulated_arrivals import load_of_log
from quire.bench.what_if import FIGURES
from quire.core.cost_model import StepCostModel
from quire.objectives import parse_slo
from quire.steplog import log_rows as rows
from quire.steplog.log_files import read_log

KINDS = {
    "chat": "--input-len 50-350 --output-len 20-100",
    "bursts": "--input-len lognormal:150:0.6 --output-len lognormal:40:0.6 --arrival gamma --burstiness 0.25",
    "documents": "--input-len 500-1200 --output-len 10-40",
    "shared prefix": "--prefix-len 256 --prefix-families 4 --input-len 320-500 --output-len 20-100",
}
SHARES = (0.2, 0.4, 0.6)
OBJECTIVES = ("ttft:200", "tpot:20")
_ALL_AT_ONCE = 48  # requests
_KEPT = 0.9  # of the requests, up to the knee
_KNEE_SHARES = (0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)


@contextmanager
def server(log: Path, words: list[str]) -> Iterator[str]:
    """The address of a server that writes a log."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        *words,
        "--port",
        str(port),
        "--record",
        str(log),
        "--quiet",
    ]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"{url}/health"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("the server has not started")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def load(url: str, kind: str, rate: float, requests: int) -> dict[str, Any]:
    """What the client saw of so many requests."""
    command = [
        sys.executable, "-m", "quire", "bench", "serve", url, *KINDS[kind].split(), "--rate", f"{rate:.3f}",
        "--num-requests", str(requests), "--quiet", "--json",
    ]  # fmt: skip
    if rate == float("inf"):
        command = [word for word in command if word not in {"--arrival", "gamma", "--burstiness", "0.25"}]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def trial(kind: str, rate: float, seconds: float, words: list[str], keep: Path | None) -> dict[str, Any]:
    """Measured and simulated figures of one load; its log is kept in the folder `keep`, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "a.qlog"
        with server(log, words) as url:
            load(url, kind, rate, max(20, int(rate * seconds)))
        written = read_log(log)
        recorded, fifty = load_of_log(written), error_after(written.rows, 50)
        if keep is not None:
            shutil.copy(log, keep / f"{kind.replace(' ', '-')}-{rate:.0f}.qlog")
    slo = parse_slo(OBJECTIVES)
    was = summarize(recorded.records, slo).metrics()
    runs = [summarize(scenario_of_log(recorded).run(seed)[0].records, slo).metrics() for seed in range(3)]
    found = {}
    for name in FIGURES:
        values = [run[name].value for run in runs if name in run]
        measured = was[name].value if name in was else None
        if measured and values and None not in values:
            found[name] = (measured, sum(value for value in values if value is not None) / len(values))
    return {
        "kind": kind, "rate": rate, "requests": len(recorded.arrivals), "steps": recorded.fit.steps,
        "step_error": recorded.fit.error, "error_after_50": fifty, "figures": found,
    }  # fmt: skip


def error_after(log: Sequence[rows.AnyRow], count: int) -> float | None:
    """The median error of steps that come after so many, from which they are fitted; None for fewer than twice that."""
    steps = [i for i, row in enumerate(log) if isinstance(row, rows.Step)]
    if len(steps) < 2 * count:
        return None
    fit = fit_steps(log[: steps[count]], StepCostModel().weights)
    later = list(timed_steps(log))[count:]
    return median(abs(fit.seconds(features) / seconds - 1) for features, seconds in later if seconds)


def knee_trial(kind: str, most: float, requests: int, words: list[str]) -> dict[str, Any]:
    """The share of requests that keep the objectives at rising rates, measured and simulated from the lowest."""
    slo, found, first = parse_slo(OBJECTIVES), [], None
    for share in _KNEE_SHARES:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "a.qlog"
            with server(log, words) as url:
                load(url, kind, share * most, requests)
            recorded = load_of_log(read_log(log))
        first = first or scenario_of_log(recorded)
        faster = first.faster(share / _KNEE_SHARES[0])
        kept = [
            summarize(recorded.records, slo),
            *(summarize(faster.run(i)[0].records, slo) for i in range(3)),
        ]
        was, *runs = [one.goodput.share for one in kept if one.goodput is not None]
        found.append((share * most, was, sum(runs) / len(runs)))
    return {"kind": kind, "rows": found, "measured": knee_of(found, 1), "simulated": knee_of(found, 2)}


def knee_of(shares: Sequence[tuple[float, ...]], column: int) -> float | None:
    """Where the share falls below what is to be kept, between two rates on a straight line; None if it does not."""
    for before, after in itertools.pairwise(shares):
        high, low = before[column], after[column]
        if high >= _KEPT > low:
            return before[0] + (after[0] - before[0]) * (high - _KEPT) / (high - low)
    return None


def report(path: Path) -> None:
    """The tables of all trials in a file: errors of the simulator, and knees."""
    names = [name for name in FIGURES if name.startswith(("ttft", "tpot", "e2el", "goodput"))]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    head = f"| load | requests/s | {' | '.join(names)} | step error; fitted to 50 steps |"
    print(f"{head}\n|---|---|{'---|' * len(names)}--:|")
    for one in (each for each in found if "figures" in each):
        figures = [one["figures"].get(name, (0.0, 0.0)) for name in names]
        cells = [f"{was:.3g}, {100 * (then / was - 1) if was else 0:+.0f} %" for was, then in figures]
        errors = "; ".join(
            "–" if error is None else f"{error:.1%}" for error in (one["step_error"], one["error_after_50"])
        )
        print(f"| {one['kind']} | {one['rate']:.1f} | {' | '.join(cells)} | {errors} |")
    print("\n| load | requests/s: kept, simulated | knee | simulated | error |\n|---|---|--:|--:|--:|")
    for one in (each for each in found if "rows" in each):
        shares = ", ".join(f"{rate:.1f}: {was:.0%}, {then:.0%}" for rate, was, then in one["rows"])
        was, then = one["measured"], one["simulated"]
        error = f"{then / was - 1:+.0%}" if was and then else "–"
        knees = " | ".join("–" if knee is None else f"{knee:.1f}" for knee in (was, then))
        print(f"| {one['kind']} | {shares} | {knees} | {error} |")


def main() -> None:
    """Run trials, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs")
    parser.add_argument("--knee", action="store_true", help="the rate up to which objectives are kept")
    parser.add_argument("--requests", type=int, default=200, help="at each rate of --knee")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("words", nargs="*", help="model and options of the server")
    args = parser.parse_args()
    if args.report:
        report(args.file)
        return
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "a.qlog", args.words) as url:
            most = load_rate(load(url, kind, float("inf"), _ALL_AT_ONCE))
        for share in [None] if args.knee else args.shares:
            if share is None:
                found = knee_trial(kind, most, args.requests, args.words)
            else:
                found = trial(kind, share * most, args.seconds, args.words, args.keep)
            with args.file.open("a") as file:
                file.write(json.dumps(found) + "\n")


def load_rate(found: dict[str, Any]) -> float:
    """Requests a second that were served."""
    return float(found["metrics"]["request_rate"]["value"])


if __name__ == "__main__":
    main()
