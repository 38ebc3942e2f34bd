"""Train a draft of a model for speculative decoding on a text: EAGLE layers, Medusa heads, or a small model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.options import add_model_argument, named_model
from quire.types import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--text", metavar="FILE", action="append", required=True,
        help="UTF-8 text to train on, best what the model wrote itself; it may have control tokens. Can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FOLDER", required=True, help="where the checkpoint of the draft is written"
    )
    add = parser.add_argument
    add(
        "--method",
        default="eagle3",
        metavar="METHOD",
        help="eagle3, eagle, medusa or draft_model (default: eagle3)",
    )
    add("--steps", type=int, default=1000, metavar="N", help="(default: 1000)")
    add("--batch-size", type=int, default=8, metavar="N", help="texts of a step (default: 8)")
    add("--length", type=int, default=128, metavar="N", help="tokens of a text (default: 128)")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="(default: 0.001)")
    add("--heads", type=int, default=3, metavar="N", help="heads of Medusa (default: 3)")
    add("--layers", type=int, default=2, metavar="N", help="layers of a small model (default: 2)")
    add("--hidden-size", type=int, default=128, metavar="N", help="width of a small model (default: 128)")
    add("--intermediate-size", type=int, default=0, metavar="N",
        help="width of the MLPs of an EAGLE layer or a small model (default: the model's; 2.5 * its own)")  # fmt: skip
    add("--draft-vocab-size", type=int, default=0, metavar="N",
        help="EAGLE-3: guess only so many tokens, the most frequent ones of the text (default: all)")  # fmt: skip
    add("--threads", type=int, default=0, metavar="N", help="(default: all cores)")
    add("--seed", type=int, default=0, metavar="N", help="(default: 0)")


def run(args: argparse.Namespace) -> int:
    try:
        from quire.train.training import TrainingOptions, train_draft
    except ModuleNotFoundError as error:
        raise CheckpointError("train-draft needs torch: pip install 'quire-llm[train]'") from error
    options = TrainingOptions(
        method=args.method, steps=args.steps, batch_size=args.batch_size, length=args.length,
        learning_rate=args.learning_rate, heads=args.heads, layers=args.layers, hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size, draft_vocab_size=args.draft_vocab_size, seed=args.seed,
        threads=args.threads,
    )  # fmt: skip
    name, out = named_model(args.model), Path(args.out)
    train_draft(name, map(Path, args.text), out, options, lambda line: print(line, file=sys.stderr))
    print(f"wrote {args.out}", file=sys.stderr)
    return 0
