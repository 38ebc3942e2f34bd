"""`quire inspect --quality`: the loss from rounding weights, keys and values, measured on texts."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig
    from quire.engine.build.opening import Model

BUILT_IN = "built in"  # the name of that text in offline.eval_text, which commands import late


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quality",
        action="store_true",
        help="load the weights and measure how int8 and int4 weights and an int8 KV cache (or the values of "
        "--quantization and --kv-cache-dtype) change the predictions on the model's own text and a short built-in "
        "text",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="text for --quality instead of these, UTF-8, at most 4 MiB"
    )


def report(model: Model, asked: EngineConfig, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure and return plain JSON values; None if it was not requested.

    Raises ValueError for an unusable text, MemoryBudgetError if the weights do not fit.
    """
    if not args.quality:
        if args.text is not None:
            raise ValueError("text: needs --quality")
        return None
    from quire.offline.eval_text import eval_texts
    from quire.offline.quality import measure
    from quire.util.progress import ByteProgress, CountProgress

    texts, prompts = eval_texts(model, args.text)
    shown = not args.quiet
    with (
        ByteProgress("loading weights", enabled=shown) as loading,
        CountProgress("comparing", "predictions", enabled=shown) as comparing,
    ):
        quality = measure(model, asked, texts, prompts, loading=loading, comparing=comparing)
    return {"vocabulary": model.facts.spec.vocab, **dataclasses.asdict(quality)}


def lines(found: dict[str, Any]) -> list[str]:
    """Format the measurement as text."""
    size = format_size(found["weight_bytes"])
    rows = [f"quality: compared with {found['reference']} weights ({size}) and a {found['kv']} KV cache"]
    for at, text in enumerate(found["texts"]):
        rows.append(
            f"  text: {text['name']}, {text['tokens']} predictions, perplexity {text['perplexity']:.3f}"
        )
        if not text["known"]:
            rows.append(
                f"    warning: for a vocabulary of {found['vocabulary']} tokens, this perplexity shows that the model "
                "does not know such text, so these figures do not rank formats; pass text that it knows with --text"
            )
            if text["name"] == BUILT_IN:
                continue
        rows.append(
            f"    {'format':<40} {'weights':>11} {'KL mean':>9} {'± error':>9} {'KL p99':>8} {'KL max':>8} "
            f"{'same top-1':>10} {'perplexity':>10}"
        )
        rows += [_row(form, form["texts"][at], found) for form in found["formats"]]
    return rows


def _row(form: dict[str, Any], text: dict[str, Any], found: dict[str, Any]) -> str:
    parts = []
    if form["quantization"] != "none":
        head = form["head"] or found["reference"]
        parts = [f"{form['quantization']} in groups of {form['group_size']}, head {head}"]
    if form["kv"] != found["kv"] or not parts:
        parts.append(f"KV cache {form['kv']}")
    perplexity = "-" if text["perplexity"] is None else f"{text['perplexity']:.3f}"
    return (
        f"    {', '.join(parts):<40} {format_size(form['weight_bytes']):>11} {text['kl_mean']:>9.5f} "
        f"{text['kl_error']:>9.5f} {text['kl_p99']:>8.3f} {text['kl_max']:>8.3f} "
        f"{text['top1_agreement']:>10.1%} {perplexity:>10}"
    )
