"""Convert a model between safetensors and GGUF, to another number format, or with adapters merged into it."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from quire.types import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint folder, GGUF file, or a hub name such as organisation/name")
    parser.add_argument("out", help="output: a new file that ends in .gguf, or a new folder")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16", "q8_0"),
        default="auto",
        help="format of the weights; auto: unchanged, but bfloat16 if they are quantized (default: auto)",
    )
    parser.add_argument(
        "--merge-adapter",
        action="append",
        default=[],
        metavar="PATH[=SCALE]",
        help="add an adapter to the weights, SCALE times (default: 1): a PEFT folder, a GGUF adapter, or a shipped one "
        "such as quire-mini:pirate; repeatable",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")


def run(args: argparse.Namespace) -> int:
    from quire.offline.convert import convert
    from quire.util.printable import printable
    from quire.util.progress import ByteProgress

    adapters = [_scaled(text) for text in args.merge_adapter]
    if args.quiet:
        convert(args.model, Path(args.out), args.dtype, adapters=adapters)
        return 0
    with ByteProgress("converting") as progress:
        lines = convert(args.model, Path(args.out), args.dtype, progress, adapters)
    print("\n".join([*map(printable, lines), f"wrote {args.out}"]), file=sys.stderr)
    return 0


def _scaled(text: str) -> tuple[str, float]:
    """PATH or PATH=SCALE; a path that exists may have the sign itself."""
    path, sign, number = text.rpartition("=")
    if not sign or Path(text).exists():
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not path or not math.isfinite(scale):
        raise CheckpointError(f"--merge-adapter {text}: {number} is not a finite number")
    return path, scale
