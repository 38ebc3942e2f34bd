"""Find the scales of an fp8 KV cache, or the levels of a kvquant3 one, on a text, and write them to a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.options import add_engine_options, add_model_argument, engine_config, named_model

LENGTH = 512  # tokens that are run as one sequence, at most the model's context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="safetensors file for --kv-cache-scales")
    parser.add_argument(
        "--text", metavar="FILE", help="UTF-8 text, at most 4 MiB (default: a short built-in text)"
    )
    parser.add_argument("--quiet", "--no-progress", action="store_true", help="no progress bar")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.engine.build.opening import open_model
    from quire.loader.kv_codes import write_codes
    from quire.loader.kv_scales import write_scales
    from quire.offline.eval_text import text_of, tokenizer_of
    from quire.offline.kv_calibration import calibrate_codes, calibrate_scales
    from quire.util.progress import ByteProgress

    model, asked = open_model(named_model(args.model, quiet=args.quiet)), engine_config(args)
    tokens = tokenizer_of(model).encode(text_of(args.text))
    with ByteProgress("loading weights", enabled=not args.quiet) as loading:
        length = min(LENGTH, model.facts.spec.max_positions)
        if asked.formats.kv_cache_dtype == "kvquant3":
            codes = calibrate_codes(model, asked, tokens, length, loading)
            write_codes(Path(args.out), codes)
            print(
                f"wrote {args.out}: levels of {len(codes)} layers from {len(tokens)} tokens", file=sys.stderr
            )
            return 0
        scales = calibrate_scales(model, asked, tokens, length, loading)
    write_scales(Path(args.out), scales)
    every = [number for each in scales.values() for number in (*each.keys, *each.values)]
    print(
        f"wrote {args.out}: scales of {len(scales)} layers from {len(tokens)} tokens, {min(every):.3g} to "
        f"{max(every):.3g}",
        file=sys.stderr,
    )
    return 0
