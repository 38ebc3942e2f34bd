"""Convert a model between safetensors and GGUF, or to another number format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint folder, GGUF file, or a hub name such as organisation/name")
    parser.add_argument("out", help="output: a new file that ends in .gguf, or a new folder")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16", "q8_0"),
        default="auto",
        help="format of the weights; auto: unchanged, but bfloat16 if they are quantized (default: auto)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")


def run(args: argparse.Namespace) -> int:
    from quire.offline.convert import convert
    from quire.util.printable import printable
    from quire.util.progress import ByteProgress

    if args.quiet:
        convert(args.model, Path(args.out), args.dtype)
        return 0
    with ByteProgress("converting") as progress:
        lines = convert(args.model, Path(args.out), args.dtype, progress)
    print("\n".join([*map(printable, lines), f"wrote {args.out}"]), file=sys.stderr)
    return 0
