"""Options of the benchmarks that run an engine in this process."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_result_options, count, finish, shown
from quire.cli.options import add_engine_options
from quire.config.shipped import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from quire.bench.results import Result
    from quire.config.schema import EngineConfig


def add_workload_options(parser: argparse.ArgumentParser, *, iterations: int, warmup: int) -> None:
    """Add the model, lengths and repetitions, with vLLM's names."""
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL,
        help="checkpoint folder, hub name, or shape:NAME for random weights (default: the bundled model)",
    )  # fmt: skip
    parser.add_argument(
        "--input-len", type=count, default=128, metavar="N", help="tokens per prompt (default: 128)"
    )
    parser.add_argument(
        "--output-len", type=count, default=128, metavar="N", help="tokens to generate (default: 128)"
    )
    parser.add_argument("--num-iters", type=count, default=iterations, metavar="N",
                        help=f"measured iterations (default: {iterations})")  # fmt: skip
    parser.add_argument("--num-iters-warmup", "--warmup", type=natural, default=warmup, metavar="N",
                        help=f"unmeasured iterations before (default: {warmup})")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="measure every op of every step")
    parser.add_argument("--disable-detokenize", action="store_true", help="do not convert tokens to text")
    add_result_options(parser)
    # Prompts have no common prefixes, so caching would only make every iteration use new memory.
    add_engine_options(parser, prefix_caching=False)


def natural(text: str) -> int:
    """Argument type: an integer of at least zero."""
    return 0 if text.strip() == "0" else count(text)


def engine_config(args: argparse.Namespace, longest: int) -> EngineConfig:
    """Return the engine config; the default context is the longest sequence of the run."""
    from quire.cli.options import engine_config as asked

    config = asked(args)
    return (
        config if config.limits.max_model_len is not None else config.replace(max_model_len=max(2, longest))
    )


def run_in_engine(
    args: argparse.Namespace,
    bench: ModuleType,
    config: EngineConfig,
    asked: Any,
    text: Callable[[Result], list[str]],
) -> int:
    """Measure with bench.measure(engine, probe, asked), save and print the result; `text` is its readable form."""
    from quire.bench import profile
    from quire.bench.bounds import beaten
    from quire.bench.engine_run import BenchEngine, settings
    from quire.bench.limits import LimitsProbe
    from quire.bench.recording import Recording

    recording = Recording(args.bench, args.words)
    with BenchEngine(
        args.model,
        config,
        tokenizer=not args.disable_detokenize,
        progress=not args.json,
        profile=args.profile,
    ) as engine:
        probe = LimitsProbe(engine.built.config.isa, engine.built.config.threads)
        metrics, tables = bench.measure(engine, probe, asked)
        chosen = settings(asked, engine)
    definitions = {name: words for name, (_, _, words) in bench.FIGURES.items()}
    result = recording.result(
        limits=probe.limits(),
        settings={"model": shown(args.model), **chosen},
        metrics=metrics,
        definitions=definitions | (profile.DEFINITIONS if args.profile else {}),
        tables=tables,
        notes=beaten(
            share for row in tables["iterations"] for name, share in row.items() if name.endswith("share")
        ),
    )
    lines = text(result) + [f"note: {note}" for note in result.notes]
    finish(args, result, lines + profile.lines(tables.get("profile", [])))
    return 0
