"""Measure the effect of a long prompt on running streams, with and without chunked prefill.

With a model, the engine's scheduler and worker run it. Without one, steps cost --step-ms and --token-ms.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from quire.cli.benches.batching import Lab, add_machine_options, what_runs
from quire.cli.benches.common import add_result_options, count, finish
from quire.cli.options import add_engine_options

if TYPE_CHECKING:
    from quire.bench.results import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_machine_options(parser)
    add = parser.add_argument_group("workload").add_argument
    add("--streams", type=count, default=4, metavar="N", help="running streams (default: 4)")
    add(
        "--prompt-len",
        type=count,
        default=2048,
        metavar="N",
        help="tokens of the long prompt (default: 2048)",
    )
    add("--chunk", type=count, default=256, metavar="N", help="prompt tokens per step (default: 256)")
    add("--rounds", type=count, default=3, metavar="N", help="long prompts, one after another (default: 3)")
    add_result_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.bench.batching import Job, interference
    from quire.bench.recording import Recording

    recording = Recording("interference", args.words)
    chunks = -(-args.prompt_len // args.chunk)
    # Streams cover the whole run: steps before the prompt, even if it is noticed late, its chunks, and some steps
    # after it.
    streams = [Job(0.0, [20 + i] * 8, 128 + 2 * chunks) for i in range(args.streams)]
    prompt = Job(0.0, [10 + i % 240 for i in range(args.prompt_len)], 2)
    longest = max(len(job.prompt) + job.output_tokens for job in (*streams, prompt))
    budget = args.prompt_len + args.streams
    changes = {
        "max_num_seqs": args.streams + 1,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": False,
    }
    found: dict[str, list[Any]] = {"chunked": [], "whole": []}
    with Lab(args, longest, changes) as lab:
        chunked = dataclasses.replace(lab.config, max_num_batched_tokens=args.chunk + args.streams)
        configs = {"chunked": chunked, "whole": dataclasses.replace(lab.config, enable_chunked_prefill=False)}
        for number in range(args.rounds + 1):
            for name, config in configs.items():  # in turn, so that noise affects both
                due = _eighth_step(streams, config, lab.machine)
                late = dataclasses.replace(prompt, due=due)
                one = interference(streams, late, config, lab.machine())
                if number:  # the first run is cold
                    found[name].append(one)
    result = _result(recording, args, found)
    finish(args, result, lines(result))
    return 0


def _eighth_step(streams: Any, config: Any, machine: Any) -> float:
    """Return the time at which the streams alone have made their eighth token, when the prompt is sent. The fastest of
    three tries: a prompt that is sent too late overlaps no stream.
    """
    from quire.bench.batching import replay

    short = [dataclasses.replace(job, output_tokens=8) for job in streams]
    tries = [replay(short, config, machine()).records for _ in range(3)]
    return min(max(record.finished or 0.0 for record in records) for records in tries)


def _result(recording: Any, args: argparse.Namespace, found: dict[str, list[Any]]) -> Result:
    from quire.bench.batching_plots import stream_gaps
    from quire.bench.results import metric
    from quire.bench.statistics import percentile

    rows, metrics = [], {}
    for name, runs in found.items():
        for phase in ("before", "during"):
            gaps = sorted(gap * 1e3 for one in runs for gap in getattr(one, phase))
            if gaps:
                rows.append({"prefill": name, "gaps": phase, "count": len(gaps), "p50": percentile(gaps, 50),
                             "p99": percentile(gaps, 99), "max": gaps[-1]})  # fmt: skip
        metrics[f"{name}_gap_max"] = metric([1e3 * max(one.during) for one in runs], "ms", "lower")
        metrics[f"{name}_prompt_ttft"] = metric([1e3 * one.ttft for one in runs], "ms", "lower")
    result: Result = recording.result(
        settings={
            "model": what_runs(args),
            "streams": args.streams, "prompt_len": args.prompt_len, "chunk": args.chunk, "rounds": args.rounds,
        },
        metrics=metrics,
        definitions={
            "before": "token gaps of the running streams that ended before the long prompt was due",
            "during": "token gaps of the running streams that overlap the wait and prefill of the long prompt",
            "prompt_ttft": "time to first token of the long prompt",
        },
        tables={"gaps": rows, "stream_gaps": stream_gaps({name: runs[-1] for name, runs in found.items()})},
    )  # fmt: skip
    return result


def lines(result: Result) -> list[str]:
    """Format a result of `interference` as text."""
    from quire.bench.text import figure

    settings = result.settings
    text = [
        str(settings["model"]),
        f"  {settings['streams']} streams, a prompt of {settings['prompt_len']} tokens in chunks of "
        f"{settings['chunk']} or whole; token gaps of the streams in ms",
        "",
        f"  {'prefill':<10}{'gaps':<10}{'n':>7}{'p50':>10}{'p99':>10}{'max':>10}",
    ]
    for row in result.tables["gaps"]:
        figures = "".join(f"{figure(row[name]):>10}" for name in ("p50", "p99", "max"))
        text.append(f"  {row['prefill']:<10}{row['gaps']:<10}{row['count']:>7}{figures}")
    for name in ("chunked", "whole"):
        own = figure(result.metrics[f"{name}_prompt_ttft"].value)
        text += [f"  TTFT of the prompt, {name}: {own} ms"]
    return text
