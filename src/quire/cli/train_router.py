"""Train what tells easy requests from hard ones, for a router that sends the easy ones to a small model."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "labels", metavar="FILE",
        help="lines of JSON: a prompt or the messages of a chat, small: was the small model right, from 0 to 1, "
        "and large: the same of the large model (default: 1)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", required=True, help="what a rule of the router names")
    parser.add_argument(
        "--small-cost", type=float, default=0.1, metavar="C",
        help="what a request costs at the small model, where it costs 1 at the large one (default: 0.1)",
    )  # fmt: skip
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--quality", type=float, default=0.99, metavar="Q",
        help="part of the large model's quality that is to be kept: the threshold is where most go to the small model "
        "(default: 0.99)",
    )  # fmt: skip
    wanted.add_argument(
        "--small-share", type=float, metavar="P", help="share of requests that is to go to the small model"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the folds (default: 0)")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from quire.offline.difficulty_training import RoutingTable, read_labels, train_difficulty
    from quire.util.files import written_anew

    for name in ("small_cost", "quality", "small_share"):
        if (value := getattr(args, name)) is not None and not 0 <= value <= 1:
            raise ValueError(f"{name}: {value:g} is not in [0, 1]")

    def choose(table: RoutingTable) -> float:
        if args.small_share is not None:
            return table.for_small_share(args.small_share)
        return table.for_quality(args.quality)

    model, table = train_difficulty(read_labels(Path(args.labels)), choose, args.small_cost, args.seed)
    with written_anew(Path(args.out)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(model), indent=1))
    print("\n".join(table.lines()))
    share, quality = table.at(model.threshold)
    print(
        f"\nwrote {args.out}: from {model.threshold:.3f} on to the small model: {share:.0%} of requests, "
        f"quality {quality:.3f} of {table.large:.3f}, cost {table.cost(share):.3f}"
    )
    return 0
