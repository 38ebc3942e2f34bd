"""What-ifs that are predicted, then done and measured: python -m benchmarks.applied FILE [--changes …] [MODEL …]

    load as it is, recorded      ──▶ what-if of the change ──▶ predicted  ┐
    server with the change, the same load, recorded        ──▶ measured   ┴ error

Both runs follow each other, so that a machine that drifts spoils few. Where the change makes steps cost something else,
some requests of another load on such a server are recorded in between, and the what-if has that log (`--like`). Figures
are times of the engine. Results are appended to FILE as lines of JSON; `--report` prints the table of all in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.simulated import load, load_rate, server

from quire.bench.request_metrics import Summary, summarize
from quire.bench.simulated_arrivals import RecordedLoad, load_of_log
from quire.bench.what_if import FIGURES, what_if
from quire.objectives import parse_slo
from quire.records import dataclass
from quire.steplog.log_files import log_beside, read_log

BASE = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
OBJECTIVES = ("ttft:500", "tpot:50")
_LIKE_REQUESTS = 60  # of another load, on a server whose steps cost something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`words` are what the server has instead of those of BASE, `settings` what the what-if has. `share` is that of the
    rate at which the requests are served that all come at once; `alone` are words of both servers; `rate` multiplies
    the load. With `like` steps cost something else."""

    settings: dict[str, str]
    words: tuple[str, ...] = ()
    kind: str = "chat"
    share: float = 0.4
    alone: tuple[str, ...] = ()
    rate: float = 1.0
    like: bool = False


CHANGES = {
    "max_num_seqs halved": Change(settings={"max_num_seqs": "8"}, words=("--max-num-seqs", "8")),
    "max_num_seqs doubled": Change(settings={"max_num_seqs": "32"}, words=("--max-num-seqs", "32"), share=0.5),
    "token budget 128": Change(
        settings={"max_num_batched_tokens": "128"}, words=("--max-num-batched-tokens", "128"), kind="documents"
    ),
    "token budget 1024": Change(
        settings={"max_num_batched_tokens": "1024"}, words=("--max-num-batched-tokens", "1024"), kind="documents"
    ),
    "prefix cache off": Change(
        settings={"enable_prefix_caching": "off"}, words=("--no-enable-prefix-caching",), kind="shared prefix"
    ),
    "int8 KV": Change(settings={}, words=("--kv-cache-dtype", "int8"), kind="documents", like=True),
    "speculation on": Change(settings={}, words=("--speculate", "ngram"), like=True),
    "second replica": Change(
        settings={"replicas": "2"}, words=("--data-parallel-size", "2"), alone=("--threads", "1")
    ),
    "policy sjf": Change(
        settings={"scheduling_policy": "sjf"}, words=("--scheduling-policy", "sjf"), kind="bursts"
    ),
    "load × 1.5": Change(settings={"rate": "1.5"}, rate=1.5),
}  # fmt: skip


def trial(name: str, seconds: float, words: Sequence[str]) -> dict[str, Any]:
    """Predict a change, make it, measure it."""
    change = CHANGES[name]
    before, after = [*BASE, *change.alone, *words], [*BASE, *change.alone, *words, *change.words]
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "a.qlog", before) as url:
        rate = change.share * load_rate(load(url, change.kind, float("inf"), 48))
    count = max(20, int(rate * seconds))
    was, _ = _served(before, change.kind, rate, count)
    like = None
    if change.like:
        like, _ = _served(after, "chat" if change.kind != "chat" else "bursts", rate / 2, _LIKE_REQUESTS)
    slo = parse_slo(OBJECTIVES)
    found = what_if(was, change.settings, slo, like=like)
    _, measured = _served(after, change.kind, rate * change.rate, count)
    then = measured.metrics()
    figures = {
        one.name: (one.measured, one.now.value, one.then.value, one.then.low, one.then.high, then[one.name].value)
        for one in found.figures
        if then[one.name].value is not None
    }  # fmt: skip
    return {"change": name, "kind": change.kind, "rate": rate, "requests": count, "outside": found.outside,
            "steps": (like or was).fit.steps, "step_error": (like or was).fit.error, "figures": figures}  # fmt: skip


def _served(words: Sequence[str], kind: str, rate: float, count: int) -> tuple[RecordedLoad, Summary]:
    """The load as a server has recorded it, and its figures; those of all replicas together."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "a.qlog"
        with server(log, [*words]) as url:
            load(url, kind, rate, count)
        logs = [log] if log.exists() else [Path(log_beside(str(log), str(i))) for i in range(2)]
        loads = [load_of_log(read_log(one)) for one in logs]
    records = [record for one in loads for record in one.records]
    return loads[0], summarize(records, parse_slo(OBJECTIVES))


def report(path: Path) -> None:
    """The table of all changes in a file: measured, and how far the prediction is from it."""
    names = ["ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90", "e2el_mean", "e2el_p90", "goodput"]
    print(
        f"| change | load, requests/s | {' | '.join(names)} | median |error| |\n|---|---|{'---|' * len(names)}--:|"
    )
    for line in path.read_text().splitlines():
        one = json.loads(line)
        cells, errors = [], []
        for name in names:
            if name not in one["figures"]:
                cells.append("–")
                continue
            was, _, then, low, high, real = one["figures"][name]
            errors.append(abs(then / real - 1) if real else 0.0)
            inside = "" if low <= real <= high else ", outside the bar"
            cells.append(f"{was:.3g} → {real:.3g}, {100 * (then / real - 1) if real else 0:+.0f} %{inside}")
        print(
            f"| {one['change']} | {one['kind']}, {one['rate']:.1f} | {' | '.join(cells)} | {median(errors):.0%} |"
        )


def main() -> None:
    """Make trials, or print what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("words", nargs="*", help="model and options of the servers")
    args = parser.parse_args()
    if args.report:
        report(args.file)
        return
    for name in args.changes:
        found = trial(name, args.seconds, args.words)
        assert set(found["figures"]) <= set(FIGURES)
        with args.file.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
