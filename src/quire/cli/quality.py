"""`quire inspect --quality`: the loss from rounding weights, keys and values, measured on texts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.types import CheckpointError, RequestError
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig
    from quire.engine.build.opening import Model
    from quire.text.tokenizer import Tokenizer

MAX_TEXT_BYTES = 4 * 2**20
BUILT_IN = "built in"
_OPENING_WORDS = 8


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

    Raises ValueError for an unusable text, MemoryBudgetError if two copies of the weights do not fit.
    """
    if not args.quality:
        if args.text is not None:
            raise ValueError("text: needs --quality")
        return None
    from quire.offline.quality import measure
    from quire.util.progress import ByteProgress, CountProgress

    if model.tokenizer is None:
        raise ValueError(f"quality: {model.folder} has no tokenizer, so a text cannot be scored")
    texts: dict[str, Sequence[int]] = {args.text or BUILT_IN: model.tokenizer.encode(text_of(args.text))}
    prompts = [] if args.text else _prompts(model.tokenizer)
    shown = not args.quiet
    with (
        ByteProgress("loading weights", enabled=shown) as loading,
        CountProgress("comparing", "predictions", enabled=shown) as comparing,
    ):
        quality = measure(model, asked, texts, prompts, loading=loading, comparing=comparing)
    return {"vocabulary": model.facts.spec.vocab, **dataclasses.asdict(quality)}


def _prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts for the model: questions if its chat template accepts them, else openings of texts."""
    from quire.offline.texts import QUESTIONS, TEXT
    from quire.text.chat_renderer import ChatAsk, ChatRenderer

    try:
        chat = ChatRenderer(tokenizer)
        return [chat.encode(ChatAsk(messages=[{"role": "user", "content": each}])) for each in QUESTIONS]
    except (CheckpointError, RequestError):
        openings = (" ".join(part.split()[:_OPENING_WORDS]) for part in TEXT.split("\n\n"))
        return [tokenizer.encode(opening) for opening in openings if opening]


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
            f"    {'format':<40} {'weights':>11} {'KL mean':>9} {'± error':>9} {'KL max':>8} {'same top-1':>10} "
            f"{'perplexity':>10}"
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
        f"{text['kl_error']:>9.5f} {text['kl_max']:>8.3f} {text['top1_agreement']:>10.1%} {perplexity:>10}"
    )


def text_of(path: str | None) -> str:
    """The text of a file, or the one that is built in. Raises ValueError naming the file."""
    if path is None:
        from quire.offline.texts import TEXT

        return TEXT
    try:
        size = Path(path).stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"text: {path} has {size} bytes, more than the limit of {MAX_TEXT_BYTES}")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8: {error}") from error
