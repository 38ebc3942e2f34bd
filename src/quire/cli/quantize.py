"""Make a quantized checkpoint of a model, layer by layer, and say what was lost.

rtn          rounding to nearest; needs no text
gptq         each column makes up for the error of those before it (arXiv 2210.17323)
awq          columns that activations make important are scaled up first (arXiv 2306.00978)
awq-gptq     both: columns are scaled as by awq, then rounded as by gptq
smoothquant  8-bit weights and activations, outliers moved into the weights (arXiv 2211.10438)
fp8          E4M3 weights, one scale per output, with dynamic or static activations
gguf         a GGUF file, with an importance matrix: Q4_0, Q5_0, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.gate import add_gate_arguments, make_judge
from quire.cli.options import add_model_argument, named_model
from quire.util.sizes import parse_size

_METHODS = ("rtn", "gptq", "awq", "awq-gptq", "smoothquant", "fp8", "gguf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_argument(parser)
    add = parser.add_argument
    add(
        "--out",
        metavar="FOLDER",
        required=True,
        help="the new folder, or file.gguf; an interrupted run continues from OUT.unfinished",
    )
    add("--method", choices=_METHODS, default="gptq", help="(default: gptq)")
    add(
        "--bits",
        type=int,
        metavar="N",
        help="rtn, gptq, awq, awq-gptq: 8, 4, 3 or 2 bits per weight; gguf: also 5 or 6 (default: 4)",
    )
    add(
        "--group-size", type=int, metavar="N",
        help="rtn, gptq, awq, awq-gptq: input features that share a scale; 0 for one scale per output (default: 128, "
        "or the largest below that fits the model)",
    )  # fmt: skip
    add(
        "--symmetric", action=argparse.BooleanOptionalAction, default=None,
        help="rtn, gptq, awq, awq-gptq: without zero points (default: on, off for both awq)",
    )  # fmt: skip
    add(
        "--desc-act", action=argparse.BooleanOptionalAction, default=True,
        help="gptq, awq-gptq: the columns of largest activations first, with static groups in storage order "
        "(default: on)",
    )  # fmt: skip
    add("--damping", type=float, default=0.01, metavar="X",
        help="gptq, awq-gptq: share of the mean diagonal that is added to the Hessian (default: 0.01)")  # fmt: skip
    add("--alpha", type=float, default=0.5, metavar="X",
        help="smoothquant: how much of the outliers moves into the weights, 0 to 1 (default: 0.5)")  # fmt: skip
    add("--activations", choices=("dynamic", "static"), default="dynamic",
        help="fp8: scales of activations, per token or by the calibration text (default: dynamic)")  # fmt: skip
    add(
        "--gguf-type",
        metavar="TYPE",
        default="",
        help="gguf: type of the linears (default: Q4_K, or what --bits says)",
    )
    add("--target-bits", type=float, default=0.0, metavar="X",
        help="rtn, gptq, awq, awq-gptq, gguf: mean bits of a weight; each linear gets bits by its measured "
        "error")  # fmt: skip
    add_calibration_arguments(parser)
    add_run_arguments(parser)
    add_gate_arguments(parser)


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """The text on which the inputs of linears are seen."""
    text = parser.add_argument_group("calibration")
    text.add_argument("--calibration", metavar="FILE", default="builtin",
        help="a text like those that the model will see, UTF-8 (default: builtin, 77 kB of all sorts)")  # fmt: skip
    text.add_argument("--calibration-samples", type=int, default=128, metavar="N",
        help="windows taken of it (default: 128)")  # fmt: skip
    text.add_argument("--calibration-length", type=int, default=512, metavar="N",
        help="tokens of a window (default: 512)")  # fmt: skip
    text.add_argument("--seed", type=int, default=0, metavar="N", help="draws the windows (default: 0)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Memory, threads, and what is said."""
    add = parser.add_argument
    add(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="hard bound, like 4GiB (default: 80%% of the available memory)",
    )
    add("--threads", "-t", type=int, metavar="N", help="(default: all cores)")
    add("--no-eval", action="store_true", help="do not compare the result with the original")
    add("--quiet", action="store_true", help="no progress and no notes")


def run(args: argparse.Namespace) -> int:
    from quire.config.schema import EngineConfig
    from quire.offline.quantize.quantize_model import quantize
    from quire.offline.quantize.recipe import Recipe
    from quire.util.printable import printable
    from quire.util.progress import CountProgress

    name = named_model(args.model, quiet=args.quiet)
    recipe = Recipe(
        method=args.method, bits=args.bits or (8 if args.method in {"smoothquant", "fp8"} else 4),
        group_size=args.group_size, symmetric=args.symmetric, desc_act=args.desc_act,
        damping=args.damping, alpha=args.alpha, activations=args.activations, gguf_type=args.gguf_type,
        target_bits=args.target_bits, samples=args.calibration_samples, length=args.calibration_length, seed=args.seed,
    )  # fmt: skip
    asked = EngineConfig().replace(memory=args.memory, threads=args.threads)
    judge = make_judge(name, asked, args)
    with CountProgress("quantizing", "windows", enabled=not args.quiet) as progress:
        result = quantize(
            name, Path(args.out), recipe, asked, calibration=args.calibration, progress=progress, judge=judge
        )
    if not args.quiet:
        print("\n".join([*map(printable, result.lines), f"wrote {args.out}"]), file=sys.stderr)
    return 0
