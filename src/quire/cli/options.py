"""Command-line options made from the config dataclasses: one source for names, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from quire.config.schema import SIZES, EngineConfig
from quire.types import SamplingParams
from quire.util.sizes import format_size, parse_size


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and names the nearest option for one that it does not know."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [flag for action in self._actions for flag in action.option_strings]
            flags = [word for word in rest if word.startswith("-")]  # values of unknown options are no news
            self.error("; ".join(_unknown(word, known) for word in flags or rest))
        return found


def _unknown(word: str, known: list[str]) -> str:
    name = word.partition("=")[0]
    return f"unrecognized argument: {word}{nearest(name, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)" for the name most like `name`, "" when none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def add_model_argument(parser: argparse.ArgumentParser, *, default: Any = None) -> None:
    """The model, which may be left out; see `named_model`."""
    parser.add_argument(
        "model",
        nargs="?",
        default=default,
        help="checkpoint folder, GGUF file, or hub name like organisation/name (default: the one shipped)",
    )


def named_model(model: str | None) -> str:
    """The model that was named, or the shipped one, saying so."""
    if model is not None:
        return model
    from quire.config.shipped import DEFAULT_MODEL

    print(
        f"quire: no model named, so {DEFAULT_MODEL} it is: small, ships with Quire, knows next to nothing",
        file=sys.stderr,
    )
    return DEFAULT_MODEL


def add_engine_options(
    parser: argparse.ArgumentParser, *, seed: bool = True, prefix_caching: bool = True
) -> None:
    """An option for every field of EngineConfig; `seed` false where the sampling options offer it.

    `prefix_caching` is the default of --enable-prefix-caching.
    """
    skip = () if seed else ("seed",)
    add_config_options(parser, EngineConfig, "engine", skip=skip, enable_prefix_caching=prefix_caching)


def add_config_options(
    parser: argparse.ArgumentParser,
    schema: type[Any],
    title: str,
    *,
    skip: Sequence[str] = (),
    explicit_only: bool = False,
    **defaults: bool,
) -> None:
    """An option for every field of a config dataclass; `explicit_only` leaves out what was not given.

    `defaults` are of switches, in place of the schema's.
    """
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(schema):
        if field.name in skip:
            continue
        flag, meta = "--" + field.name.replace("_", "-"), field.metadata
        default = argparse.SUPPRESS if explicit_only else field.default
        if isinstance(field.default, bool):
            on = defaults.get(field.name, field.default)
            text = f"{meta['help']} (default: {'on' if on else 'off'})"
            group.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=default if explicit_only else on,
                help=text,
            )
            continue
        unset = field.default is None or field.default == ()
        value: Any = field.default
        shown = format_size(value) if field.name in SIZES and not unset else value
        text = meta["help"] if unset else f"{meta['help']} (default: {shown})"
        several: dict[str, Any] = {"action": "extend", "nargs": "+"} if field.default == () else {}
        group.add_argument(
            flag, type=value_type(field), default=default, help=text, choices=meta["choices"] or None,
            metavar=None if meta["choices"] else meta["metavar"], **several,
        )  # fmt: skip


def value_type(field: dataclasses.Field[Any]) -> Any:
    """How the text of an option becomes a field's value."""
    if field.name in SIZES:
        return size
    annotation = str(field.type)
    return str if "str" in annotation else float if "float" in annotation else int


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
