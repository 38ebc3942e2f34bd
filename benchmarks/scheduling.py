"""Scheduling on a virtual clock: the real scheduler, cost model, controller and admission on published traces.

    python -m benchmarks.scheduling goodput --traces ../shared/data/traces [--requests 600]
    python -m benchmarks.scheduling ttft --traces ../shared/data/traces
    python -m benchmarks.scheduling policies --traces ../shared/data/traces
    python -m benchmarks.scheduling fairness
    python -m benchmarks.scheduling knee --traces ../shared/data/traces
    python -m benchmarks.scheduling deadlines --traces ../shared/data/traces
    python -m benchmarks.scheduling modes --svg benchmarks/results

A step takes what a formula says (COSTS: a small model on two cores), with 3 % of noise; the cost model learns it while
requests run. The arrivals of a trace are the same for every policy; a load of 2 has them in half the time. Tokens of a
trace are divided by SCALE so that one prompt is a few steps, as on the machine that the costs are of. Prints tables in
Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.bench.goodput import PRESETS, Goodput, goodput
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.statistics import percentile
from quire.bench.svg import Plot, Series
from quire.bench.timeline import request_metrics
from quire.bench.traces import TraceRow, read_trace
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import SLO, ServiceClass

COSTS = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 2e-3, 3e-4, 2e-4)
# trace: file or folder, divisor of its tokens, requests per second at load 1
TRACES = {
    "Azure conversation": ("azure_llm_2023_conv.csv", 4, 4.0),
    "Azure code": ("azure_llm_2023_code.csv", 8, 2.0),
    "Mooncake conversation": ("mooncake_conversation_trace.jsonl", 16, 1.5),
    "Mooncake synthetic": ("mooncake_synthetic_trace.jsonl", 16, 1.5),
    "ServeGen": ("servegen_deepseek_r1", 4, 1.5),
}
KNEE_LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
BEYOND = (1.0, 1.25, 1.5, 2.0)
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
LIMITS = SchedulerConfig(num_blocks=6000, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=16384)


def arrivals(rows: Sequence[TraceRow], scale: int, rate: float, *, known: bool = True) -> list[Arrival]:
    """The requests of a trace at a mean rate. Prompts with equal leading blocks have equal tokens there."""
    span = rows[-1].at or 1.0
    factor = len(rows) / span / rate
    return [
        Arrival(
            (row.at or 0.0) * factor, _prompt(i, row, scale), max(1, row.output_tokens // scale), known=known
        )
        for i, row in enumerate(rows)
    ]


def _prompt(index: int, row: TraceRow, scale: int) -> list[int]:
    length, made = min(16_000, max(1, row.input_tokens // scale)), []
    for block in row.blocks:
        made += random.Random(block).choices(range(30_000), k=max(1, row.block_tokens // scale))
    made += random.Random(f"{index} own").choices(range(30_000), k=max(0, length - len(made)))
    return made[:length]


def judged(run: SimulatedRun, slo: SLO) -> Goodput:
    metrics = [None if one.failed else request_metrics(one) for one in run.records]
    return goodput(metrics, slo, max(one.scheduled for one in run.records))


def errors(run: SimulatedRun) -> tuple[list[float], list[float]]:
    """|predicted / real - 1| of the TTFT of admitted requests, in order; and of those before whose first token no other
    was admitted."""
    found, alone = [], []
    admitted = [run.records[index] for index in run.predicted]
    for index, predicted in run.predicted.items():
        record = run.records[index]
        found.append(abs(predicted / (record.times[0] - record.scheduled) - 1))
        mine = (record.scheduled, index)
        if not any(mine < (one.scheduled, one.index) <= (record.times[0], -1) for one in admitted):
            alone.append(found[-1])
    return sorted(found), sorted(alone)


def traces(folder: Path, count: int, scale: int = 0) -> Iterator[tuple[str, list[TraceRow], int, float]]:
    """Name, requests, divisor of tokens and rate at load 1 of each trace; with a `scale` that divisor for all, at rates
    that offer as many tokens a second."""
    for name, (file, usual, rate) in TRACES.items():
        yield name, read_trace(folder / file, limit=count), scale or usual, rate * (scale or usual) / usual


def compare_goodput(folder: Path, count: int, preset: str) -> None:
    slo = PRESETS[preset][0]
    service = [ServiceClass(preset, slo)]
    print(
        f"Preset {preset}: {slo}. Goodput in requests a second; in brackets the share of requests that met the level.\n"
    )
    print(
        "| trace | load | offered | first come | held | ratio | refused | late of admitted |"
        " TTFT error p50, p90 | p90 if none came later |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        for load in LOADS:
            asked = arrivals(rows, scale, rate * load)
            plain = judged(SimulatedServer(LIMITS, COSTS, service).run(asked), slo)
            config = replace(LIMITS, policy="edf")
            run = SimulatedServer(config, COSTS, service, admits=True, controls=True).run(asked)
            held, (wrong, alone) = judged(run, slo), errors(run)
            late = (held.total - held.failed - held.passed) / max(1, held.total - held.failed)
            cells = [
                name, f"{load:g}", f"{len(asked) / asked[-1].at:.2f}", f"{plain.rate:.2f} ({plain.share:.0%})",
                f"{held.rate:.2f} ({held.share:.0%})", f"{held.rate / plain.rate:.2f}" if plain.rate else "–",
                f"{held.failed / held.total:.0%}", f"{late:.1%}",
                f"{percentile(wrong, 50):.0%}, {percentile(wrong, 90):.0%}",
                f"{percentile(alone, 90):.0%}" if alone else "–",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


def compare_predictions(folder: Path, count: int, preset: str) -> None:
    """Errors of the predicted TTFT where output lengths are known, and where they are predicted as well."""
    service = [ServiceClass(preset, PRESETS[preset][0])]
    print(
        "| trace | load | lengths known: p50, p90 | if none came later | lengths predicted | if none came later |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        for load in (1.0, 3.0):
            cells = [name, f"{load:g}"]
            for known in (True, False):
                asked = arrivals(rows, scale, rate * load, known=known)
                server = SimulatedServer(
                    replace(LIMITS, policy="edf"), COSTS, service, admits=True, controls=True
                )
                cells += [
                    f"{percentile(found, 50):.0%}, {percentile(found, 90):.0%}" if found else "–"
                    for found in errors(server.run(asked))
                ]
            print(f"| {' | '.join(cells)} |", flush=True)


def shown_ratio(held: float, plain: float) -> str:
    return f"{held / plain:.2f}" if plain else "–"


def served(asked: Sequence[Arrival], slo: SLO, name: str, *, held: bool) -> Goodput:
    service = [ServiceClass(name, slo)]
    config = replace(LIMITS, policy="edf") if held else LIMITS
    return judged(SimulatedServer(config, COSTS, service, admits=held, controls=held).run(asked), slo)


def keepable(rows: Sequence[TraceRow], asked: Sequence[Arrival], scale: int, slo: SLO) -> float:
    """The share of requests whose TTFT would be kept on a machine that is theirs alone, with all that earlier prompts
    have computed in its cache. No scheduler keeps the level of more, whatever it knows of the future."""
    seen, kept = set[int](), 0
    for row, one in zip(rows, asked, strict=True):
        known = next((i for i, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        seen.update(row.blocks)
        at, length, took = known * max(1, row.block_tokens // scale), len(one.prompt), 0.0
        at = min(at, length - 1)
        while at < length:
            tokens = min(LIMITS.max_num_batched_tokens, length - at)
            took += COSTS[0] + COSTS[2] * tokens + COSTS[4] * tokens * (at + tokens / 2)
            at += tokens
        kept += slo.ttft is None or took * 1e3 <= slo.ttft
    return kept / len(asked)


def compare_at_knees(folder: Path, count: int, preset: str, one_scale: int = 0) -> None:
    """The knee of a trace is the load up to which first come, first served keeps the level of 90 % of requests; a trace
    of which it keeps fewer at every load has its knee where its goodput is highest."""
    slo, table = PRESETS[preset][0], dict[float, list[float]]()
    print(f"Preset {preset}: {slo}.\n")
    beyond = " | ".join(f"{at:g} × knee" for at in BEYOND)
    print(f"| trace | knee, requests/s | kept there | can be kept by any | largest ratio there | {beyond} |")
    print("|---|--:|--:|--:|--:|" + "--:|" * len(BEYOND))
    for name, rows, scale, rate in traces(folder, count, one_scale):
        plain = {
            load: served(arrivals(rows, scale, rate * load), slo, preset, held=False) for load in KNEE_LOADS
        }
        kept = [load for load, found in plain.items() if found.share >= 0.9]
        knee = max(kept) if kept else max(plain, key=lambda load: plain[load].rate)
        cells = []
        for at in BEYOND:
            asked = arrivals(rows, scale, rate * knee * at)
            first, held = (served(asked, slo, preset, held=which) for which in (False, True))
            table.setdefault(at, []).append(held.rate / first.rate if first.rate else float("inf"))
            cells.append(f"{first.rate:.2f} → {held.rate:.2f} ({shown_ratio(held.rate, first.rate)})")
        share = plain[knee].share
        most = keepable(rows, arrivals(rows, scale, rate * knee), scale, slo)
        cells = [f"{rate * knee:.2f}", f"{share:.0%}", f"{most:.0%}", shown_ratio(most, share), *cells]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    medians = [f"{statistics.median(table[at]):.2f}" for at in BEYOND]
    print(f"| **median of the ratios** | | | | | {' | '.join(medians)} |")


def compare_deadlines(folder: Path, count: int) -> None:
    """Each request has to end within 2 s and four times what it takes alone."""
    print("| trace | load | admitted | deadlines missed, queue only | missed, predicted |")
    print("|---|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        for load in (1.0, 2.0, 4.0):
            asked = [with_deadline(one) for one in arrivals(rows, scale, rate * load)]
            found = []
            for admits in (False, True):
                run = SimulatedServer(replace(LIMITS, policy="edf"), COSTS, admits=admits).run(asked)
                there = [one for one in run.records if not one.failed]
                late = sum(
                    (one.finished or 0.0) - one.scheduled > (asked[one.index].deadline or 0.0)
                    for one in there
                )
                found.append((len(there) / len(asked), late / max(1, len(there))))
            print(
                f"| {name} | {load:g} | {found[1][0]:.0%} | {found[0][1]:.1%} | {found[1][1]:.1%} |",
                flush=True,
            )


def with_deadline(one: Arrival) -> Arrival:
    prompt = len(one.prompt)
    alone = COSTS[0] * (prompt / 512 + 1 + one.output) + COSTS[2] * prompt + COSTS[1] * one.output
    return replace(one, deadline=2 + 4 * alone)


def shared_prefixes(count: int, rate: float) -> list[Arrival]:
    """Questions after one of 40 texts of 800 tokens: five times as much as the cache of the table below holds."""
    rng, at, made = random.Random(7), 0.0, []
    texts = [rng.choices(range(30_000), k=800) for _ in range(40)]
    for _ in range(count):
        at += rng.expovariate(rate)
        made.append(Arrival(at, rng.choice(texts) + rng.choices(range(30_000), k=40), rng.randint(10, 60)))
    return made


def compare_policies(folder: Path, count: int) -> None:
    print(
        "| workload | policy | mean latency, s | p99, s | mean TTFT, s | tokens/s | prompt tokens from the cache |"
        " error of lengths | preemptions |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        if name in {"Azure conversation", "Mooncake conversation"}:
            for policy, known in (
                ("fcfs", True),
                ("sjf", True),
                ("sjf", False),
                ("lpm", True),
                ("edf", True),
            ):
                print_policy(name, policy, arrivals(rows, scale, rate * 2, known=known), 1500, known=known)
    for policy in ("fcfs", "sjf", "lpm"):
        print_policy("40 shared texts", policy, shared_prefixes(count, 12.0), 400)


def print_policy(
    name: str, policy: str, asked: Sequence[Arrival], blocks: int, *, known: bool = True
) -> None:
    config = replace(LIMITS, policy=policy, num_blocks=blocks)
    run = SimulatedServer(config, COSTS, [ServiceClass("chat", PRESETS["chat"][0])]).run(asked)
    took = sorted(request_metrics(one).e2e for one in run.records)
    first = statistics.fmean(request_metrics(one).ttft or 0.0 for one in run.records)
    tokens = sum(len(one.prompt) + one.output for one in asked)
    pace = tokens / max(one.finished or 0.0 for one in run.records)  # of prompts and answers
    label = policy if policy != "sjf" else f"sjf, lengths {'known' if known else 'predicted'}"
    print(
        f"| {name} | {label} | {statistics.fmean(took):.2f} | {percentile(took, 99):.2f} | {first:.2f} |"
        f" {pace:,.0f} | {run.hit_share:.1%} | {'–' if known else f'{run.length_error:.0%}'} | {run.preemptions} |",
        flush=True,
    )


def account_of(name: str, rate: float, seed: int, seconds: float = 120.0) -> list[Arrival]:
    """Poisson arrivals of an account with a system prompt of its own."""
    rng, at, made = random.Random(f"{name} {seed}"), 0.0, []
    system = rng.choices(range(9999), k=64)
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt = system + rng.choices(range(9999), k=rng.randint(50, 300))
        made.append(Arrival(at, prompt, rng.randint(10, 40), account=name))
    return made


def jain(shares: Sequence[float]) -> float:
    """Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984): 1 for equal shares, 1/n for one alone."""
    return sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))


def compare_fairness() -> None:
    """A flooder against two others: first with more demand than their thirds, so that all compete; then with less,
    against the same alone on a machine of their share, on which a step takes three times as long."""
    config = replace(LIMITS, max_num_seqs=24, num_blocks=2000)
    print("| policy | tokens of the flooder, of a, of b | Jain's index |")
    print("|---|---|--:|")
    rivals = [*account_of("a", 9.0, 0, 60), *account_of("b", 9.0, 1, 60), *account_of("flood", 40.0, 2, 60)]
    for policy in ("fcfs", "fair"):
        run = SimulatedServer(replace(config, policy=policy), COSTS).run(rivals)
        tokens = dict.fromkeys(("flood", "a", "b"), 0.0)
        for record, one in zip(run.records, rivals, strict=True):
            if record.times and record.times[0] < 60:
                made = sum(at < 60 for at in record.times)
                tokens[one.account] += len(one.prompt) + 2 * made
        whole = sum(tokens.values())
        shares = ", ".join(f"{count / whole:.0%}" for count in tokens.values())
        print(f"| {policy} | {shares} | {jain(list(tokens.values())):.3f} |", flush=True)
    print("\n| policy | accounts | TTFT p50, s | TTFT p99, s | prompt tokens from the cache |")
    print("|---|---|--:|--:|--:|")
    polite = [*account_of("a", 0.7, 0), *account_of("b", 0.7, 1)]
    third = [3 * cost for cost in COSTS]
    flooded = [*polite, *account_of("flood", 20.0, 2)]
    for policy, asked, costs, who in (
        ("fair", polite, COSTS, "two, alone"), ("fair", polite, third, "two, alone on a third of the machine"),
        ("fcfs", flooded, COSTS, "the same two beside a flood"),
        ("fair", flooded, COSTS, "the same two beside a flood"),
    ):  # fmt: skip
        run = SimulatedServer(replace(config, policy=policy), costs).run(asked)
        first = sorted(request_metrics(one).ttft or 0.0 for one in run.records[: len(polite)])
        found = sum(run.cached.get(i, 0) for i in range(len(polite))) / sum(len(one.prompt) for one in polite)
        print(
            f"| {policy} | {who} | {percentile(first, 50):.2f} | {percentile(first, 99):.2f} | {found:.0%} |",
            flush=True,
        )


def compare_modes(folder: Path) -> None:
    """Static, dynamic and continuous batching of answers whose lengths are skewed: most short, some long."""
    rng, at, asked = random.Random(3), 0.0, []
    for _ in range(160):
        at += rng.expovariate(4.0)
        asked.append(
            Arrival(
                at,
                rng.choices(range(9999), k=rng.randint(20, 200)),
                min(400, int(rng.paretovariate(1.1) * 12)),
            )
        )
    config, tables = replace(LIMITS, max_num_seqs=8), {}
    print("| batching | tokens/s | places in use | mean latency, s | p99, s | mean TTFT, s |")
    print("|---|--:|--:|--:|--:|--:|")
    for mode, wait in (("static", 1.0), ("dynamic", 0.05), ("continuous", None)):
        used: list[tuple[float, float]] = []
        server = SimulatedServer(config, COSTS, batch_wait=wait)
        run = server.run(asked, lambda s, used=used: used.append((s.now, s.scheduler.num_running)))  # type: ignore[misc]
        took = sorted(request_metrics(one).e2e for one in run.records)
        first = statistics.fmean(request_metrics(one).ttft or 0.0 for one in run.records)
        end = max(one.finished or 0.0 for one in run.records)
        busy = statistics.fmean(n for _, n in used) / 8
        print(
            f"| {mode} | {sum(one.output for one in asked) / end:.0f} | {busy:.0%} | {statistics.fmean(took):.2f} |"
            f" {percentile(took, 99):.2f} | {first:.2f} |",
            flush=True,
        )
        tables[mode] = used, took
    write_modes(folder, tables)


def write_modes(folder: Path, tables: dict[str, tuple[list[tuple[float, float]], list[float]]]) -> None:
    """The places in use over time, and the share of requests that ended within a time, as pictures."""
    last = max(used[-1][0] for used, _ in tables.values())
    places = Plot("Places of the batch in use", "seconds", "sequences", (0.0, last), (0.0, 8.0))
    longest = max(took[-1] for _, took in tables.values())
    ended = Plot("Requests that ended within a time", "seconds", "share", (0.0, longest), (0.0, 1.0))
    for kind, (mode, (used, took)) in zip(("c1", "c2", "c3"), tables.items(), strict=True):
        thin = used[:: max(1, len(used) // 150)]
        places.line(Series(mode, thin, kind, dots=False))
        points = [(at, (i + 1) / len(took)) for i, at in enumerate(took)]
        ended.line(Series(mode, points, kind, dots=False))
    for name, plot in (("places", places), ("latencies", ended)):
        (folder / f"scheduling_modes_{name}.svg").write_text(plot.standalone())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=("goodput", "ttft", "knee", "policies", "fairness", "deadlines", "modes")
    )
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--requests", type=int, default=600, help="requests of each trace")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="chat")
    parser.add_argument("--scale", type=int, default=0, help="knee: one divisor of tokens for all traces")
    parser.add_argument("--svg", type=Path, default=Path("benchmarks/results"), help="folder of pictures")
    asked = parser.parse_args()
    if asked.what == "goodput":
        compare_goodput(asked.traces, asked.requests, asked.preset)
    elif asked.what == "ttft":
        compare_predictions(asked.traces, asked.requests, asked.preset)
    elif asked.what == "knee":
        compare_at_knees(asked.traces, asked.requests, asked.preset, asked.scale)
    elif asked.what == "deadlines":
        compare_deadlines(asked.traces, asked.requests)
    elif asked.what == "modes":
        compare_modes(asked.svg)
    elif asked.what == "policies":
        compare_policies(asked.traces, asked.requests)
    else:
        compare_fairness()


if __name__ == "__main__":
    main()
