"""Measure speculative decoding: acceptance by position, tokens per step, costs, and the speed-up by load.

The engine runs in this process, beside one of the same model without a method. Each number of streams runs with each
kind of drafts, and on that one, in turns, and all outputs are compared. A method is a name (ngram), a JSON object as
for --speculative-config, or known:RATE: recorded outputs, proposed again with that chance of each draft to be right.
With --draft-model such drafts cost what that model costs: so its size can be chosen before it is trained.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_report_option, add_result_options, count, finish, shown, write_page
from quire.cli.benches.kernels import counts
from quire.cli.options import add_engine_options, engine_config
from quire.config.shipped import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire.bench.results import Result
    from quire.config.schema import EngineConfig

KNOWN = "known:"
STREAMS = "1,2,4,8,16,32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL,
        help="checkpoint folder, hub name, or shape:NAME for random weights (default: the bundled model)",
    )  # fmt: skip
    add = parser.add_argument_group("measurements").add_argument
    add(
        "--methods", nargs="+", default=["ngram"], metavar="METHOD",
        help="method names, JSON objects, known:RATE (default: ngram)",
    )  # fmt: skip
    add("--streams", type=counts, default=counts(STREAMS), metavar="N,…", help=f"(default: {STREAMS})")
    add("--pairs", type=count, default=15, metavar="N",
        help="runs of each kind for each number of streams (default: 15)")  # fmt: skip
    add("--output-len", type=count, default=96, metavar="N", help="tokens to generate (default: 96)")
    add("--input-len", type=count, default=32, metavar="N",
        help="tokens per prompt, without --prompts (default: 32)")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE",
        help="prompts, one per line, or JSON lines as for serve (default: random tokens)")  # fmt: skip
    add("--most-rows", type=count, default=17, metavar="N",
        help="step costs up to so many tokens (default: 17)")  # fmt: skip
    add_result_options(parser)
    add_report_option(parser)
    add_engine_options(parser, prefix_caching=False)


def run(args: argparse.Namespace) -> int:
    from quire.bench import speculation_bench as bench
    from quire.bench.engine_run import BenchEngine, settings
    from quire.bench.recording import Recording

    asked = bench.SpeculationAsked(args.streams, args.pairs, args.output_len, args.most_rows - 1)
    recording = Recording("speculation", args.words)
    tables: dict[str, list[dict[str, Any]]] = {}
    chosen: dict[str, Any] = {}
    with BenchEngine(args.model, _without(_base(args)), progress=not args.json) as plain:
        prompts = bench.read_prompts(plain, args.prompts, args.input_len, max(args.streams))
        for config, methods in _configs(args):
            with BenchEngine(args.model, config, progress=not args.json) as engine:
                found = bench.measure(engine, plain, methods, asked, prompts)
                chosen = settings(asked, engine)
            found["row_costs"] = tables.get("row_costs") or found["row_costs"]
            tables = {
                name: tables.get(name, []) + rows if name != "row_costs" else rows
                for name, rows in found.items()
            }
    result = recording.result(
        settings={"model": shown(args.model), **chosen},
        metrics=bench.metrics(tables),
        definitions={name: words for name, (_, _, words) in bench.FIGURES.items()},
        tables=tables,
    )
    write_page(args, result)
    finish(args, result, lines(result))
    return 0


def _configs(args: argparse.Namespace) -> Iterator[tuple[EngineConfig, dict[str, float | None]]]:
    """An engine for each method, and one for all drafts of a known acceptance."""
    base = _base(args)
    known: dict[str, float | None] = {name: _rate(name) for name in args.methods if name.startswith(KNOWN)}
    if known:
        yield base if base.speculation.chosen() else base.replace(speculate="ngram"), known
    names = Counter(map(_name, dict.fromkeys(args.methods)))
    for method in dict.fromkeys(args.methods):
        if method == "draft_model" and base.speculation.draft_model:
            yield base, {method: None}
        elif method not in known:
            given = method if method.lstrip().startswith("{") else json.dumps({"method": method})
            name = _name(method)
            yield (
                _without(base).replace(speculative_config=given),
                {method if names[name] > 1 else name: None},
            )


def _base(args: argparse.Namespace) -> EngineConfig:
    base = engine_config(args)
    return base.replace(max_num_seqs=base.limits.max_num_seqs or max(args.streams))


def _without(config: EngineConfig) -> EngineConfig:
    """The same engine without a method."""
    return config.replace(speculate="off", draft_model=None, speculative_config=None)


def _name(method: str) -> str:
    """The method that a JSON object names; else what was given."""
    try:
        return str(json.loads(method)["method"])
    except (ValueError, KeyError, TypeError):
        return method


def _rate(method: str) -> float:
    try:
        rate = float(method.removeprefix(KNOWN))
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ValueError(f"methods: {method!r} does not have a form like known:0.8")
    return rate


def lines(result: Result) -> list[str]:
    """Format a result as text."""
    from quire.bench.text import aligned, figure

    settings, tables = result.settings, result.tables
    columns = {
        "method": "method", "streams": "streams", "off": "off tok/s", "rate": "on tok/s", "speedup": "speed-up",
        "speedup_low": "95 % from", "speedup_high": "to", "tau": "tokens/step", "drafts": "drafts/step",
        "acceptance": "acceptance", "draft_cost": "draft cost",
    }  # fmt: skip
    rows = [
        [str(row["method"]), *(figure(row[name]) for name in list(columns)[1:])]
        for row in tables["speculation"]
    ]
    costs = tables["row_costs"]
    return [
        f"{settings['architecture']}, {settings['weights']} weights, {settings['kv']} KV: {settings['output_len']} "
        f"tokens out, {settings['pairs']} pairs; outputs are equal",
        "",
        *(f"  {line}" for line in aligned([list(columns.values()), *rows])),
        "",
        "  step cost by tokens: " + " ".join(f"{row['tokens']}: {row['ratio']:.2f}" for row in costs),
        *(f"  {line}" for line in _positions(tables["positions"])),
    ]


def _positions(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The chance of a draft by position, of the fewest streams of each method."""
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and row["tried"]]
        least = min((row["streams"] for row in own), default=0)
        rates = " ".join(f"{row['position']}: {row['rate']:.2f}" for row in own if row["streams"] == least)
        if rates:
            yield f"acceptance by position, {method}: {rates}"
