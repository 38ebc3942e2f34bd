"""Make a smaller or sparser checkpoint of a model, and say what was lost.

Single weights become zero (--pattern 2:4 decodes faster in bfloat16 on AVX-512; else no speed-up here: Quire multiplies
zeros like other numbers):

magnitude    the smallest weights of each linear; needs no text
wanda        the weights that add least over a text (arXiv 2306.11695)
sparsegpt    the same, and the other weights make up for them (arXiv 2301.00774)

Whole structures go (--structure): the checkpoint is smaller and faster, here and in other engines:

heads        attention heads, with their keys and values where whole groups go
channels     channels of the feed-forwards
layers       the layers that change their input least
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.gate import add_gate_arguments, make_judge
from quire.cli.options import add_model_argument, named_model
from quire.cli.quantize import add_calibration_arguments, add_run_arguments

_METHODS, _STRUCTURES = ("magnitude", "wanda", "sparsegpt"), ("heads", "channels", "layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_argument(parser)
    add = parser.add_argument
    add("--out", metavar="FOLDER", required=True,
        help="the new folder; an interrupted run continues from FOLDER.unfinished")  # fmt: skip
    add("--sparsity", type=float, default=0.5, metavar="SHARE", help="the share that goes (default: 0.5)")
    add("--method", choices=_METHODS, help="which weights become zero (default: sparsegpt)")
    add(
        "--pattern",
        metavar="N:M",
        default="",
        help="N of every M neighbouring inputs of an output stay, such as 2:4",
    )
    add("--structure", choices=_STRUCTURES, help="take these out whole, instead of single weights")
    add("--damping", type=float, default=0.01, metavar="X",
        help="share of the mean diagonal that is added to the Hessian (default: 0.01)")  # fmt: skip
    add_calibration_arguments(parser)
    add_run_arguments(parser)
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from quire.config.schema import EngineConfig
    from quire.offline.prune.prune_run import prune_structure
    from quire.offline.quantize.quantize_model import quantize
    from quire.offline.quantize.recipe import Recipe
    from quire.program.formats import FOURS
    from quire.util.printable import printable
    from quire.util.progress import CountProgress

    if args.structure and (args.method or args.pattern):
        raise ValueError("structure: takes whole parts out; --method and --pattern are for single weights")
    name, out = named_model(args.model, quiet=args.quiet), Path(args.out)
    asked = EngineConfig().replace(memory=args.memory, threads=args.threads)
    recipe = Recipe(
        method="structured" if args.structure else args.method or "sparsegpt", structure=args.structure or "",
        sparsity=args.sparsity, pattern=args.pattern, damping=args.damping, samples=args.calibration_samples,
        length=args.calibration_length, seed=args.seed,
    )  # fmt: skip
    prune, judge = prune_structure if args.structure else quantize, make_judge(name, asked, args)
    with CountProgress("pruning", "windows", enabled=not args.quiet) as progress:
        result = prune(name, out, recipe, asked, calibration=args.calibration, progress=progress, judge=judge)
    speed = SPEED_UP if args.pattern in FOURS else NO_SPEED_UP
    lines = [*result.lines, *([] if args.structure else [speed])]
    if not args.quiet:
        print("\n".join([*map(printable, lines), f"wrote {args.out}"]), file=sys.stderr)
    return 0


SPEED_UP = (
    "in bfloat16 with AVX-512 these linears take 1.125 bytes a weight and decode faster; elsewhere there is no "
    "speed-up here: zeros take as long and as many bytes as other weights"
)
NO_SPEED_UP = (
    "no speed-up here: zeros take as long and as many bytes as other weights; --structure makes models faster"
)
