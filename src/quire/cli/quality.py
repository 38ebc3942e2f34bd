"""`quire inspect --quality`: what rounding the weights costs, measured on a text."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig
    from quire.engine.opening import Model

MAX_TEXT_BYTES = 4 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quality",
        action="store_true",
        help="load the weights and measure what int8 and int4 (or the one that --quantization names) change in the "
        "predictions over a text",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="text of --quality, UTF-8, at most 4 MiB (default: a short one of its own)",
    )


def report(model: Model, asked: EngineConfig, args: argparse.Namespace) -> dict[str, Any] | None:
    """The measurement as plain JSON values; None when it was not asked for.

    Raises ValueError for a text that cannot be used, MemoryBudgetError when two copies of the weights do not fit.
    """
    if not args.quality:
        if args.text is not None:
            raise ValueError("text: is only used with --quality")
        return None
    from quire.engine.quality import measure
    from quire.util.progress import ByteProgress, CountProgress

    if model.tokenizer is None:
        raise ValueError(f"quality: {model.folder} has no tokenizer, so a text cannot be scored")
    tokens = model.tokenizer.encode(_text(args.text))
    shown = not args.quiet
    with (
        ByteProgress("loading weights", enabled=shown) as loading,
        CountProgress("comparing", "predictions", enabled=shown) as comparing,
    ):
        quality = measure(model, asked, tokens, loading=loading, comparing=comparing)
    return {"text": args.text or "built in", **dataclasses.asdict(quality)}


def lines(found: dict[str, Any]) -> list[str]:
    """The measurement as people read it."""
    name = f"{found['reference']} (as it is)"
    rows = [
        f"quality: {found['formats'][0]['tokens']} predictions of the text ({found['text']})",
        f"  {'weights':<28} {'size':>11} {'KL mean':>9} {'KL max':>8} {'same top-1':>10} {'perplexity':>10}",
        f"  {name:<28} {format_size(found['weight_bytes']):>11} {'':>9} {'':>8} {'':>10} {found['perplexity']:>10.3f}",
    ]
    for form in found["formats"]:
        name = form["quantization"]
        name += f", groups of {form['group_size']}" if form["quantization"] == "int4" else ""
        name += f", head {form['head'] or found['reference']}" if form["quantization"] == "int4" else ""
        rows.append(
            f"  {name:<28} {format_size(form['weight_bytes']):>11} {form['kl_mean']:>9.5f} {form['kl_max']:>8.3f} "
            f"{form['top1_agreement']:>10.1%} {form['perplexity']:>10.3f}"
        )
    return rows


def _text(path: str | None) -> str:
    if path is None:
        from quire.engine.quality_text import TEXT

        return TEXT
    try:
        size = Path(path).stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"text: {path} has {size} bytes; at most {MAX_TEXT_BYTES} are read")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8: {error}") from error
