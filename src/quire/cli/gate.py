"""Options of the gate, and running it: for `quire quantize`, `prune` and `eval`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quire.config.schema import EngineConfig
    from quire.engine.build.opening import Model
    from quire.offline.gate import GateOptions, GateReport


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quality")
    group.add_argument(
        "--eval", metavar="FILE", help="compare on this text (UTF-8, at most 4 MiB) instead of a built-in one"
    )
    group.add_argument(
        "--max-kl",
        type=float,
        default=0.1,
        metavar="NATS",
        help="stop above this mean KL divergence (default: 0.1)",
    )
    group.add_argument(
        "--eval-cmd",
        metavar="COMMAND",
        help="your own check: a shell command, run with the original and with the result as {model}; the last number "
        "that it prints is the score",
    )
    group.add_argument(
        "--eval-better",
        choices=("higher", "lower"),
        default="higher",
        help="direction of that score (default: higher)",
    )
    group.add_argument(
        "--eval-max-drop", type=float, default=0.02, metavar="SHARE",
        help="stop if that score is worse by more than this share (default: 0.02)",
    )  # fmt: skip
    group.add_argument(
        "--tokens", type=int, metavar="N", help="compare at most N tokens of each text (default: all)"
    )
    group.add_argument("--force", action="store_true", help="accept the result whatever the loss")


def gate_options(args: argparse.Namespace) -> GateOptions:
    """Raises ValueError naming the option."""
    from quire.offline.gate import GateOptions

    return GateOptions(
        eval_file=args.eval,
        max_kl=args.max_kl,
        eval_cmd=args.eval_cmd,
        max_drop=args.eval_max_drop,
        better=args.eval_better,
        force=args.force,
        tokens=args.tokens,
    )


def run_gate(
    original: Model,
    candidate: Model,
    asked: EngineConfig,
    options: GateOptions,
    *,
    quiet: bool,
    changed: EngineConfig | None = None,
) -> GateReport:
    """Measure with progress, print the table on standard error unless `quiet`; does not refuse, see `enforce`."""
    from quire.offline.gate import gate
    from quire.util.printable import printable
    from quire.util.progress import ByteProgress, CountProgress

    with (
        ByteProgress("loading weights", enabled=not quiet) as loading,
        CountProgress("comparing", "predictions", enabled=not quiet) as comparing,
    ):
        report = gate(
            original, candidate, asked, options,
            changed=changed, loading=loading, comparing=comparing,
        )  # fmt: skip
    if not quiet:
        print("\n".join(map(printable, report.lines())), file=sys.stderr)
    return report


def make_judge(name: str, asked: EngineConfig, args: argparse.Namespace) -> Callable[[Path], None] | None:
    """What `quantize` and `prune` call with a result: compares it with the model `name`, prints the table and raises
    GateError beyond a limit. None with --no-eval.

    Raises ValueError now for a text or a model that could not be compared after hours of work.
    """
    options = gate_options(args)
    if args.no_eval:
        return None
    from quire.engine.build.opening import open_model
    from quire.offline.eval_text import eval_texts
    from quire.offline.gate import enforce

    original = open_model(name)
    eval_texts(original, options.eval_file)

    def judge(result: Path) -> None:
        enforce(run_gate(original, open_model(result), asked, options, quiet=args.quiet), options)

    return judge
