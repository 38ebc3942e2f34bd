"""Command-line options made from the config dataclasses: one source for names, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from quire.config.schema import EngineConfig
from quire.types import SamplingParams
from quire.util.sizes import parse_size


def add_engine_options(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """An option for every field of EngineConfig; `seed` false where the sampling options offer it."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineConfig):
        if field.name == "seed" and not seed:
            continue
        flag = "--" + field.name.replace("_", "-")
        meta = field.metadata
        if isinstance(field.default, bool):
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=field.default, help=meta["help"]
            )
            continue
        kind: Any = str if meta["choices"] or isinstance(field.default, str) else int
        if field.name == "memory":
            kind = size
        text = meta["help"] if field.default is None else f"{meta['help']} (default: {field.default})"
        group.add_argument(
            flag, type=kind, default=field.default, help=text, choices=meta["choices"] or None,
            metavar=None if meta["choices"] else meta["metavar"],
        )  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that was asked for."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)}
    values["seed"] = args.seed or 0  # None where --seed belongs to the sampling options
    return EngineConfig(**values)


def size(text: str) -> int:
    """Argument type of a byte size."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# option, type, metavar, help; None as value means the checkpoint's recommendation or the default
_SAMPLING = (
    ("temperature", float, "T", "0 is greedy"),
    ("top_k", int, "K", "sample from the K most likely tokens; 0 is off"),
    ("top_p", float, "P", "sample from the smallest set with probability P"),
    ("min_p", float, "P", "drop tokens below P times the most likely one"),
    ("repetition_penalty", float, "R", "divide the logits of tokens already seen; 1 is off"),
    ("frequency_penalty", float, "F", "subtract F for each time a token was generated"),
    ("presence_penalty", float, "F", "subtract F from every token generated before"),
    ("min_tokens", int, "N", "do not end before N tokens"),
    ("n", int, "N", "samples of the prompt"),
    ("seed", int, "N", "seed of the sampling; equal seeds give equal text"),
    ("logprobs", int, "N", "report the N most likely tokens at every position"),
    ("prompt_logprobs", int, "N", "the same for the prompt"),
)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Options for the fields of SamplingParams."""
    group = parser.add_argument_group("sampling (defaults: what the checkpoint recommends)")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"tokens to generate at most (default: {max_tokens})",
    )  # fmt: skip
    for name, kind, metavar, text in _SAMPLING:
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=None, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end at this token; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the end-of-sequence token")
    group.add_argument("--keep-special-tokens", action="store_true", help="show special tokens in the text")


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The checkpoint's defaults with what was asked on the command line."""
    asked: dict[str, Any] = {name: getattr(args, name) for name, *_ in _SAMPLING}
    values = {name: value for name, value in asked.items() if value is not None}
    return dataclasses.replace(
        defaults,
        **values,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        skip_special_tokens=not args.keep_special_tokens,
    )
