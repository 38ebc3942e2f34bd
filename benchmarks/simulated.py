"""The simulator beside a server: kinds of load at three rates, python -m benchmarks.simulated FOLDER.

Each trial serves a load and keeps the log of the server in FOLDER, KIND-RATE.qlog; rates are shares of that at which
requests are served that all come at once. `--report` simulates the requests of each log and prints the tables: with the
step times and deviations of the same log, with those of its first half for the requests of the second, which it has not
seen, and with those of a log of another rate.

With `--knee` the same requests come at rising rates, each to a server of its own, into knee-KIND-RATE.qlog. Servers
take turns, slice by slice, so that all have met the machine of the same minutes. The log of the lowest rate says at
which of them fewer than nine of ten would keep the objectives: beside the rate at which they do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from quire.bench.fitted_steps import fit_steps, timed_steps
from quire.bench.request_metrics import summarize
from quire.bench.scenario import Scenario, scenario_like, scenario_of_log
from quire.bench.simulated_arrivals import RecordedLoad, load_of_log
from quire.bench.what_if import FIGURES
from quire.core.cost_model import StepCostModel
from quire.objectives import SLO, parse_slo
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log, read_log

KINDS = {
    "chat": "--input-len 50-350 --output-len 20-100",
    "bursts": "--input-len lognormal:150:0.6 --output-len lognormal:40:0.6 --arrival gamma --burstiness 0.25",
    "documents": "--input-len 500-1200 --output-len 10-40",
    "shared prefix": "--prefix-len 256 --prefix-families 4 --input-len 320-500 --output-len 20-100",
    # a quarter of the prompt, for a model that would take half an hour for the two above
    "short documents": "--input-len 125-300 --output-len 10-40",
    "short shared prefix": "--prefix-len 64 --prefix-families 4 --input-len 80-125 --output-len 20-100",
}
SHARES = (0.2, 0.4, 0.6)
OBJECTIVES = ("ttft:200", "tpot:20")
_ALL_AT_ONCE = 48  # requests
_LEAST = 20  # requests of a trial
_KEPT = 0.9  # of the requests, up to the knee
SLICES = 6  # of the requests of each server, where these take turns
_KNEE_SHARES = (0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)
_SEEDS = (1, 2, 3)  # of simulations with the deviations of another log
_SHOWN = tuple(name for name in FIGURES if name.startswith(("ttft", "tpot", "e2el", "goodput")))

Trials = Mapping[str, Mapping[float, Log]]  # by kind and rate


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


def load(url: str, kind: str, rate: float, requests: int, *words: str) -> dict[str, Any]:
    """What the client saw of so many requests; `words` are further options of it."""
    command = [
        sys.executable, "-m", "quire", "bench", "serve", url, "--api", "completions", *KINDS[kind].split(),
        "--rate", f"{rate:.3f}",
        "--num-requests", str(requests), "--quiet", "--json", *words,
    ]  # fmt: skip
    if rate == float("inf"):
        command = [word for word in command if word not in {"--arrival", "gamma", "--burstiness", "0.25"}]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Turns(NamedTuple):
    """A server with a log, and its load: `requests` of a slice, the first one drawn with `seed`."""

    log: Path
    words: list[str]
    kind: str
    rate: float
    requests: int
    seed: int = 0


def record_in_turns(each: Sequence[Turns]) -> None:
    """Serve loads slice by slice, forwards and backwards in turns, so that all meet the machine of the same minutes."""
    with ExitStack() as stack:
        turns = [(stack.enter_context(server(one.log, one.words)), one) for one in each]
        for number in range(SLICES):
            for url, one in turns:
                load(url, one.kind, one.rate, one.requests, "--seed", str(one.seed + number))
            turns.reverse()


def record(kind: str, rate: float, requests: int, words: list[str], log: Path) -> None:
    """Serve a load with a log."""
    with server(log, words) as url:
        load(url, kind, rate, requests)


def recorded(folder: Path, *, knee: bool) -> Trials:
    """The logs in a folder, at rising rates."""
    found: dict[str, dict[float, Log]] = {}
    for path in sorted(folder.glob("*.qlog")):
        kind, rate = path.stem.rsplit("-", 1)
        if kind.startswith("knee ") == knee:
            found.setdefault(kind.removeprefix("knee "), {})[float(rate)] = read_log(path)
    return {kind: dict(sorted(logs.items())) for kind, logs in found.items()}


def simulated(scenario: Scenario, slo: SLO, seeds: Iterable[int]) -> dict[str, float]:
    """The figures of a simulation, means over seeds."""
    runs = [summarize(scenario.run(seed)[0].records, slo).metrics() for seed in seeds]
    values = {name: [run[name].value for run in runs if name in run] for name in _SHOWN}
    return {
        name: fmean(value for value in seen if value is not None)
        for name, seen in values.items()
        if seen and None not in seen
    }


def error_after(log: Sequence[rows.AnyRow], count: int) -> float | None:
    """The median error of steps that come after so many, from which they are fitted; None for fewer than twice that."""
    steps = [i for i, row in enumerate(log) if isinstance(row, rows.Step)]
    if len(steps) < 2 * count:
        return None
    fit = fit_steps(log[: steps[count]], StepCostModel().weights)
    later = list(timed_steps(log))[count:]
    return median(abs(fit.seconds(features) / seconds - 1) for _, features, seconds in later if seconds)


def parts_of(log: Log) -> tuple[RecordedLoad, RecordedLoad]:
    """What the first half of a log says, and the requests of the second half."""
    whole = load_of_log(log)
    middle = min(record.scheduled for record in whole.records) + whole.hours * 1800
    cut = next(i for i, row in enumerate(log.rows) if isinstance(row, rows.Step) and row.at / 1e9 > middle)
    return load_of_log(Log(log.rows[:cut], log.damage)), load_of_log(log, last=whole.hours * 1800)


def report_trials(trials: Trials, slo: SLO) -> None:
    """A table for each source of step times, and how far all errors are from 0."""
    head = f"| load | requests/s | requests | {' | '.join(_SHOWN)} |\n|---|--:|--:|{'--:|' * len(_SHOWN)}"
    for source in ("the same log, in the same second", "the half of the log before", "a log of another rate"):
        print(f"Step times and deviations of {source}:\n\n{head}")
        seen: dict[str, list[float]] = {}
        for kind, logs in trials.items():
            for rate, log in logs.items():
                own = load_of_log(log)
                scenario = scenario_of_log(own)
                seeds: tuple[int, ...] = _SEEDS
                if source.startswith("the same"):
                    seeds = (0,)
                elif source.startswith("the half"):
                    before, own = parts_of(log)
                    scenario = scenario_like(own, before)
                else:
                    rest = [one for at, one in logs.items() if at > rate]
                    rest += [one for at, one in logs.items() if at < rate]
                    scenario = scenario_like(own, load_of_log(rest[0]) if rest else own)
                then, was = simulated(scenario, slo, seeds), summarize(own.records, slo).metrics()
                cells = []
                for name in _SHOWN:
                    real = was[name].value if name in was else None
                    error = then[name] / real - 1 if real and name in then else 0.0
                    seen.setdefault(name, []).append(abs(error))
                    cells.append(f"{real or 0:.3g}, {100 * error:+.0f} %")
                print(f"| {kind} | {rate:.1f} | {len(own.records)} | {' | '.join(cells)} |")
        for word, sum_up in (("median", median), ("largest", max)):
            print(
                f"| {word} error | | | {' | '.join(f'{sum_up(seen[name]):.1%}' for name in _SHOWN if name in seen)} |"
            )
        print()


def report_steps(folder: Path) -> None:
    """How well steps are fitted."""
    print("| log | steps | error of the fit | fitted to the first 50 |\n|---|--:|--:|--:|")
    for path in sorted(folder.glob("*.qlog")):
        log = read_log(path)
        fit, after = load_of_log(log).fit, error_after(log.rows, 50)
        print(f"| {path.stem} | {fit.steps} | {fit.error:.1%} | {'–' if after is None else f'{after:.1%}'} |")


def report_knees(trials: Trials, slo: SLO) -> None:
    """The share of requests that keep the objectives at rising rates, measured, and simulated: requests as they came,
    which is later than they should where the client waits for a processor, and the machine of the lowest rate."""
    print("| load | requests/s: kept, simulated | knee | simulated | error |\n|---|---|--:|--:|--:|")
    for kind, logs in trials.items():
        lowest, *_ = logs
        first, found = load_of_log(logs[lowest]), []
        for rate, log in logs.items():
            own = load_of_log(log)
            told = scenario_like(own, first)
            runs = [summarize(told.run(seed)[0].records, slo) for seed in _SEEDS]
            kept = [one.goodput.share for one in (summarize(own.records, slo), *runs) if one.goodput]
            found.append((rate, kept[0], fmean(kept[1:])))
        shares = ", ".join(f"{rate:.1f}: {was:.0%}, {then:.0%}" for rate, was, then in found)
        was, then = knee_of(found, 1), knee_of(found, 2)
        knees = " | ".join("–" if knee is None else f"{knee:.1f}" for knee in (was, then))
        print(f"| {kind} | {shares} | {knees} | {f'{then / was - 1:+.0%}' if was and then else '–'} |")


def knee_of(shares: Sequence[tuple[float, ...]], column: int) -> float | None:
    """Where the share falls below what is to be kept, between two rates on a straight line; None if it does not."""
    for before, after in itertools.pairwise(shares):
        high, low = before[column], after[column]
        if high >= _KEPT > low:
            return before[0] + (after[0] - before[0]) * (high - _KEPT) / (high - low)
    return None


def main() -> None:
    """Run trials, or print what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS)[:4])
    parser.add_argument("--shares", nargs="+", type=float, default=None)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--knee", action="store_true", help="the rate up to which objectives are kept")
    parser.add_argument("--requests", type=int, default=200, help="at each rate of --knee")
    parser.add_argument("--goodput", nargs="+", default=OBJECTIVES, help="objectives of --report")
    parser.add_argument("--report", action="store_true")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="model and options of the server"
    )
    args = parser.parse_args()
    if args.report:
        slo = parse_slo(args.goodput)
        report_trials(recorded(args.folder, knee=False), slo)
        report_knees(recorded(args.folder, knee=True), slo)
        report_steps(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "a.qlog", args.serve) as url:
            most = load_rate(load(url, kind, float("inf"), _ALL_AT_ONCE))
        for old in args.folder.glob(f"{'knee ' * args.knee}{kind}-*.qlog"):
            old.unlink()
        rates = [share * most for share in args.shares or (_KNEE_SHARES if args.knee else SHARES)]
        if args.knee:
            places = {rate: args.folder / f"knee {kind}-{rate:06.2f}.qlog" for rate in rates}
            slices = args.requests // SLICES
            record_in_turns([Turns(log, args.serve, kind, rate, slices) for rate, log in places.items()])
            continue
        for rate in rates:
            log = args.folder / f"{kind}-{rate:06.2f}.qlog"
            record(kind, rate, max(_LEAST, int(rate * args.seconds)), args.serve, log)


def load_rate(found: dict[str, Any]) -> float:
    """Requests a second that were served."""
    return float(found["metrics"]["request_rate"]["value"])


if __name__ == "__main__":
    main()
