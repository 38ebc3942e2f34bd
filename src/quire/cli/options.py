"""Command-line options made from the config dataclasses: one source for names, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cli.parser import Several, take_foreign_options
from quire.config.schema import OPTIONS, SUBJECTS, EngineConfig
from quire.parameters import Structure
from quire.types import PARAMETERS, SAMPLERS, CheckpointError, RequestError, SamplingParams
from quire.util.sizes import format_size, parse_size

# Options of one letter or two, as llama.cpp writes them.
_SHORT = {"max_model_len": "-c", "max_num_seqs": "-np", "threads": "-t"}
_NUMBER = re.compile(r"([+-]?\d+(?:_\d+)*)|(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", re.ASCII)


def add_model_argument(parser: argparse.ArgumentParser, *, default: Any = None) -> None:
    """The model, which may be left out; see `named_model`."""
    parser.add_argument(
        "model",
        nargs="?",
        default=default,
        help="checkpoint folder, GGUF file, or hub name like organisation/name (default: the one shipped)",
    )
    option: dict[str, Any] = {"dest": "model_option", "metavar": "MODEL", "default": argparse.SUPPRESS}
    parser.add_argument("-m", "--model", "-hf", **option, help="the model, as an option")
    parser.add_argument("--model-path", "--model-id", "--hf-repo", **option, help=argparse.SUPPRESS)


def named_model(model: str | None, *, quiet: bool = False) -> str:
    """The model that was named, or the shipped one, saying so unless `quiet`."""
    if model is not None:
        return model
    from quire.config.shipped import DEFAULT_MODEL

    if not quiet:
        print(f"quire: no model given; using the small demo model {DEFAULT_MODEL}", file=sys.stderr)
    return DEFAULT_MODEL


def add_engine_options(
    parser: argparse.ArgumentParser, *, seed: bool = True, prefix_caching: bool = True
) -> None:
    """An option for every field of EngineConfig; `seed` false where the sampling options offer it.

    `prefix_caching` is the default of --enable-prefix-caching.
    """
    skip = () if seed else ("seed",)
    add_config_options(parser, EngineConfig, skip=skip, enable_prefix_caching=prefix_caching)
    take_foreign_options(parser)


def add_config_options(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    skip: Sequence[str] = (),
    explicit_only: bool = False,
    **defaults: bool,
) -> None:
    """An option for every field of a config dataclass, by subject; `explicit_only` leaves out what was not given.

    `defaults` are of switches, in place of the schema's.
    """
    subjects, groups = subjects_of(config), {}
    for field in fields_of(config):
        subject = subjects[field.name]
        if subject not in groups:
            groups[subject] = parser.add_argument_group(subject)
        if field.name not in skip:
            _add_option(groups[subject], field, explicit_only=explicit_only, on=defaults.get(field.name))


def fields_of(config: type[Any]) -> Sequence[dataclasses.Field[Any]]:
    """The options of a config dataclass; those of an engine are in groups."""
    return list(OPTIONS.values()) if config is EngineConfig else dataclasses.fields(config)


def subjects_of(config: type[Any]) -> dict[str, str]:
    """What each field of a config dataclass is about: a word or two."""
    if config is EngineConfig:
        begins = SUBJECTS
    else:
        begins = importlib.import_module(config.__module__).SUBJECTS  # only what it serves has imported it
    found, subject = {}, ""
    for field in fields_of(config):
        found[field.name] = subject = begins.get(field.name, subject)
    return found


def _add_option(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], *, explicit_only: bool, on: bool | None
) -> None:
    """`on` is the default of a switch, in place of the field's."""
    flag, meta = option_name(field), field.metadata
    default = field.default if on is None else on
    shown = default_text(default, size=meta["size"])
    options: dict[str, Any] = {
        "default": argparse.SUPPRESS if explicit_only else default,
        "help": f"{meta['help']} (default: {shown})" if shown else meta["help"],
    }
    if isinstance(field.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        return
    if field.default == ():
        options |= {"action": Several, "nargs": "+"}
    flags = [flag, _SHORT[field.name]] if field.name in _SHORT else [flag]
    group.add_argument(
        *flags, type=value_type(field), choices=meta["choices"] or None,
        metavar=None if meta["choices"] else meta["metavar"], **options,
    )  # fmt: skip


def option_name(field: dataclasses.Field[Any]) -> str:
    """The option of a config field."""
    return "--" + field.name.replace("_", "-")


def default_text(default: Any, *, size: bool) -> str:
    """A default as people read it; "" for one that the help says in words."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if size:
        return format_size(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def value_type(field: dataclasses.Field[Any]) -> Any:
    """How the text of an option becomes a field's value."""
    if field.metadata["size"]:
        return size
    annotation = str(field.type)
    if "str" in annotation:
        names = field.metadata["aliases"]
        return lambda text: names.get(text, text)
    return _float if "float" in annotation else number


def number(text: str) -> int:
    """Argument type of a whole number; k, m, g and t stand for powers of 1000, K, M, G and T for those of 1024."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number like 8192, 8K (8 × 1024) or 8k (8 × 1000)"
        )
    if match[1]:
        return int(match[1])
    if match[2]:
        return round(float(match[2]) * float(f"1e{3 * 'kmgt'.index(match[3]) + 3}"))
    return int(match[4]) << (10 * "KMGT".index(match[5]) + 10)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that was asked for."""
    values = {name: getattr(args, name) for name in OPTIONS}
    values["seed"] = args.seed or 0  # None where --seed belongs to the sampling options
    return EngineConfig(**values)


def size(text: str) -> int:
    """Argument type of a byte size."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Without a value they are what the checkpoint recommends, or the default.
_SAMPLING = {name: known for name, known in PARAMETERS.items() if known.metavar}


# Options that may be repeated -> parameters.
_TEXT_LISTS = {"--bad-word": "bad_words", "--dry-sequence-breaker": "dry_sequence_breakers"}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options for the fields of SamplingParams."""
    group = parser.add_argument_group("sampling (defaults: what the checkpoint recommends)")
    group.add_argument(
        "--max-tokens", type=number, default=None, metavar="N",
        help=f"{PARAMETERS['max_tokens'].help} (default: the rest of the context)",
    )  # fmt: skip
    for name, known in _SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=known.kind, default=None, metavar=known.metavar, help=known.help)
    group.add_argument(
        "--stop", action=Several, default=[], metavar="TEXT", help="end at this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id",
        action=Several,
        type=int,
        default=[],
        metavar="ID",
        help="end at this token; may be repeated",
    )
    for option, name in _TEXT_LISTS.items():
        group.add_argument(
            option,
            action=Several,
            default=[],
            metavar="TEXT",
            help=f"{PARAMETERS[name].help}; may be repeated",
        )
    group.add_argument(
        "--samplers",
        default=None,
        metavar="A;B;…",
        help=f"{PARAMETERS['samplers'].help}: {';'.join(SAMPLERS)}",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the end-of-sequence token")
    group.add_argument("--keep-special-tokens", action="store_true", help="show special tokens in the text")
    _add_structure_options(parser)


# Options of `quire serve` that a chat has as well.
_ANSWERS = ("chat_template", "tool_call_parser", "reasoning_parser")


def add_chat_options(parser: argparse.ArgumentParser, *, variables: bool = True) -> None:
    """Options of how conversations are rendered, and answers read; without `variables`, none of a template's."""
    from quire.config.serving import ServingConfig

    group = parser.add_argument_group("chat template and formats of answers")
    for field in dataclasses.fields(ServingConfig):
        if field.name in _ANSWERS:
            _add_option(group, field, explicit_only=False, on=None)
    if not variables:
        return
    group.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="variables that the model's template reads",
    )
    group.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the variable enable_thinking of the template",
    )
    group.add_argument("--reasoning-effort", metavar="EFFORT", help="passed to templates that read it")


def answer_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LLM for the formats of answers."""
    return {name: getattr(args, name) for name in _ANSWERS}


def chat_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a conversation, as LLM.chat takes them."""
    thinking = {} if args.enable_thinking is None else {"enable_thinking": args.enable_thinking}
    return {
        "chat_template_kwargs": {**args.chat_template_kwargs, **thinking},
        "reasoning_effort": args.reasoning_effort,
    }


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    return value


def _add_structure_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what an answer must look like: one of them at most."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="answer in JSON of the schema in this file")
    group.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    group.add_argument("--regex", metavar="R", help="answer with a text that matches this regular expression")
    group.add_argument(
        "--choice",
        action=Several,
        default=[],
        metavar="TEXT",
        help="answer with this text, or with one of several; may be repeated",
    )
    group.add_argument(
        "--grammar", metavar="FILE", help="answer by the grammar in this file, in GBNF or Lark"
    )


def structure(args: argparse.Namespace) -> Structure | None:
    """What an answer must look like, before the model is loaded. Raises RequestError naming the option."""
    asked: dict[str, Any] = {
        "json": args.json_schema and text_of("json-schema", args.json_schema),
        "json_object": args.json_object or None,
        "regex": args.regex,
        "choice": args.choice or None,
        "grammar": args.grammar and text_of("grammar", args.grammar),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return None
    from quire.structured.ask import StructuredOutput

    return StructuredOutput(**given)


def text_of(option: str, path: str) -> str:
    """The text of a small file. Raises RequestError naming the option."""
    from quire.structured.ask import MAX_BYTES
    from quire.util.strict_json import read_small_file

    try:
        return read_small_file(Path(path), MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise RequestError(option, f"{path} is not UTF-8") from None
    except CheckpointError as error:
        raise RequestError(option, str(error)) from None


def sampling_params(
    args: argparse.Namespace, defaults: SamplingParams, structured: Structure | None = None
) -> SamplingParams:
    """The checkpoint's defaults with what was asked on the command line."""
    values: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    texts = {name: getattr(args, option[2:].replace("-", "_")) for option, name in _TEXT_LISTS.items()}
    values |= {name: tuple(given) for name, given in texts.items() if given}
    if args.samplers is not None:
        values["samplers"] = tuple(name for name in args.samplers.split(";") if name)
    return dataclasses.replace(
        defaults,
        **values,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        skip_special_tokens=not args.keep_special_tokens,
        structured=structured,
    )
