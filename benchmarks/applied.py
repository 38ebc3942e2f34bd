"""What-ifs that are predicted, then done and measured: python -m benchmarks.applied FOLDER [--changes …] [--serve …]

Servers as they are and with the change take turns: a slice of the load goes to the one, the same slice to the other and
to one more as they are, then the next slice. So all have met the machine of the same minute, which can be twice as fast
as the one before. Predictions from the logs of both servers as they are count by halves; how far these two loads are
from each other says how much of an error is the machine's. Where the change makes steps cost something else, some other
requests of the kind go to one more such server, at half of the rate, and the what-if has that log (`--like`). The
change `tuned` is what `quire tune` finds best for a server whose steps are too long for its objectives. Figures are
times of the engine. Each trial has a folder in FOLDER with its logs and trial.json; `--report` predicts from the logs
and prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.simulated import SLICES, Turns, load, load_rate, record, record_in_turns, server

from quire.bench.request_metrics import Summary, summarize
from quire.bench.simulated_arrivals import RecordedLoad, load_of_log
from quire.bench.tuning import tune
from quire.bench.what_if import FIGURES, what_if
from quire.objectives import SLO, parse_slo
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_files import log_beside, read_log

BASE = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
OBJECTIVES = ("ttft:500", "tpot:50")
_LIKE_REQUESTS = 60  # on a server whose steps cost something else
_SIMULATIONS = 24  # of a search
_LEAST = 8  # requests of a slice
_READ_NS = 300_000_000  # at most between two readings of CPU times without a pause
_RATES = ("request_rate", "output_token_rate", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`words` are what the server has instead of those of BASE, `settings` what the what-if has. `share` is that of the
    rate at which the requests are served that all come at once; `alone` are words of both servers; `rate` multiplies
    the load. With `like` steps cost something else; with `tuned` settings and words are what a search finds best."""

    settings: dict[str, str]
    words: tuple[str, ...] = ()
    kind: str = "chat"
    share: float = 0.4
    alone: tuple[str, ...] = ()
    rate: float = 1.0
    like: bool = False
    tuned: bool = False
    objectives: tuple[str, ...] = OBJECTIVES


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
        settings={"data_parallel_size": "2"}, words=("--data-parallel-size", "2"), alone=("--threads", "1")
    ),
    "policy sjf": Change(
        settings={"scheduling_policy": "sjf"}, words=("--scheduling-policy", "sjf"), kind="bursts"
    ),
    "load × 1.5": Change(settings={"rate": "1.5"}, rate=1.5),
    "tuned": Change(settings={}, kind="documents", alone=("--max-num-batched-tokens", "2048"), share=0.5, tuned=True,
                    objectives=("ttft:300", "tpot:4")),
}  # fmt: skip


def trial(name: str, seconds: float, words: Sequence[str], folder: Path) -> None:
    """Record a load as it is, twice, and with a change, slice by slice."""
    change = CHANGES[name]
    before = [*BASE, *change.alone, *words]
    folder.mkdir()
    with server(folder / "most.qlog", before) as url:
        rate = change.share * load_rate(load(url, change.kind, float("inf"), 48))
    if change.tuned:
        record(change.kind, rate, max(_LEAST, int(rate * seconds)), before, folder / "first.qlog")
        change = _tuned(change, load_of_log(read_log(folder / "first.qlog")))
    after = [*before, *change.words]
    count, kind = max(_LEAST, int(rate * seconds) // SLICES), change.kind
    each = [
        Turns(folder / "again.qlog", before, kind, rate, count),
        Turns(folder / "changed.qlog", after, kind, rate * change.rate, count),
        Turns(folder / "was.qlog", before, kind, rate, count),
    ]
    if change.like:
        each.insert(0, Turns(folder / "like.qlog", after, kind, rate / 2, _LIKE_REQUESTS // SLICES, SLICES))
    record_in_turns(each)
    found = {"change": name, "words": change.words, "settings": change.settings, "objectives": change.objectives,
             "kind": change.kind, "rate": rate, "requests": SLICES * count}  # fmt: skip
    (folder / "trial.json").write_text(json.dumps(found))


def _tuned(change: Change, was: RecordedLoad) -> Change:
    """What a search finds best for a load."""
    first, *_ = tried = tune(was, parse_slo(change.objectives), _SIMULATIONS)
    best = max(tried, key=lambda one: one.score).settings
    settings = {name: value for name, value in best.items() if first.settings[name] != value}
    options = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
    return replace(change, settings=settings, words=tuple(itertools.chain(*options)))


def predicted(folder: Path) -> dict[str, Any]:
    """A trial, and by figure what was measured before the change, predicted for it, and measured with it."""
    found: dict[str, Any] = json.loads((folder / "trial.json").read_text())
    slo, like = parse_slo(found["objectives"]), folder / "like.qlog"
    other = load_of_log(read_log(like)) if like.exists() else None
    each = []
    for log in ("was", "again"):
        was = load_of_log(read_log(folder / f"{log}.qlog"))
        each.append({one.name: one for one in what_if(was, found["settings"], slo, like=other).figures})
    then = _measured(folder / "changed.qlog", slo).metrics()
    figures = {
        name: {
            "before": [one[name].measured for one in each],
            "predicted": [(one[name].then.value, one[name].then.low, one[name].then.high) for one in each],
            "measured": then[name].value,
        }
        for name in FIGURES
        if name in then and then[name].value is not None and all(name in one for one in each)
    }
    # Rates count the time between slices, which is not what it would be where requests come faster.
    if "rate" in found["settings"]:
        figures = {name: one for name, one in figures.items() if name not in _RATES}
    return found | {"figures": figures}


def others_of(log: Path) -> float:
    """Processors that other processes had while an engine ran steps, in the mean; its client and server are among
    them, which have about 0.3 for quire-mini. Much more is a machine that did something else."""
    shares, last = [], 0
    for row in read_log(log).rows:
        if isinstance(row, rows.Step) and row.own:
            at = row.at + row.updated
            if 0 < at - last < _READ_NS:
                shares.append(1e3 * row.others / (at - last))
            last = at
    return fmean(shares) if shares else 0.0


def _measured(log: Path, slo: SLO) -> Summary:
    """The figures of a load as a server has recorded it, or all of its replicas."""
    logs = [log] if log.exists() else [Path(log_beside(str(log), str(i))) for i in range(2)]
    records = [record for one in logs for record in load_of_log(read_log(one)).records]
    return summarize(records, slo)


def report(folder: Path) -> None:
    """The table of all trials in a folder: measured, and how far the prediction is from it."""
    names = ["ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90", "e2el_mean", "e2el_p90", "goodput"]
    print(
        f"| change | load, requests/s, requests | {' | '.join(names)} | median error | the load as it was, again |"
        f" processors of others |\n|---|---|{'---|' * len(names)}--:|--:|--:|"
    )
    inside, count = 0, 0
    for path in sorted(folder.glob("*/trial.json")):
        one = predicted(path.parent)
        cells, errors, drifts = [], [], []
        for name in names:
            if name not in one["figures"]:
                cells.append("–")
                continue
            figure = one["figures"][name]
            (first, second), real = figure["before"], figure["measured"]
            values, lows, highs = zip(*figure["predicted"], strict=True)
            error = fmean(values) / real - 1 if real else 0.0
            errors.append(abs(error))
            drifts.append(abs(second / first - 1) if first else 0.0)
            within = min(lows) <= real <= max(highs)
            inside, count = inside + within, count + 1
            cells.append(
                f"{fmean((first, second)):.3g} → {real:.3g}, {100 * error:+.0f} %{'' if within else ' !'}"
            )
        done = f"{one['change']} {' '.join(one['words'])}"
        place = f"{one['kind']}, {one['rate']:.1f}, {one['requests']}"
        others = max(others_of(log) for log in path.parent.glob("*.qlog") if log.stem != "most")
        print(
            f"| {done} | {place} | {' | '.join(cells)} | {median(errors):.0%} | {median(drifts):.0%} | {others:.1f} |"
        )
    print(f"\n{inside} of {count} measured values are within the error bars; `!` marks the others.")


def main() -> None:
    """Make trials, or print what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--report", action="store_true")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="model and options of the servers"
    )
    args = parser.parse_args()
    if args.report:
        report(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.changes:
        places = (args.folder / f"{name} #{number}" for number in itertools.count(1))
        trial(name, args.seconds, args.serve, next(place for place in places if not place.exists()))


if __name__ == "__main__":
    main()
