"""The parser behind every command: hints for unknown options, the environment, and a model that stands anywhere."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from quire.cli.elsewhere import ALWAYS, PASSING, explain
from quire.config.env import OPTION_PREFIX, option_variables
from quire.config.shipped import shipped_models

_SWITCH = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}
_ALIKE = 0.7
# organisation/name, also with a choice of a GGUF file behind it
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+|/[\w./-]+\.gguf)?", re.ASCII)


class Several(argparse.Action):
    """One value or several: those of repeated options add up, and replace the default."""

    def __call__(
        self, _: argparse.ArgumentParser, found: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        before, given = getattr(found, self.dest, None), values if isinstance(values, list) else [values]
        setattr(found, self.dest, [*(() if before is None or before is self.default else before), *given])
        found.__dict__.setdefault("lists", []).append((flag, given))


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and names the nearest option for one that it does not know.

    With `environment`, the variable QUIRE_NAME is the default of the option --name; what was taken from there is in
    `environment` of what `parse_args` returns.
    """

    def __init__(self, *, environment: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._environment = environment

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        taken = self._defaults_of_environment() if self._environment else {}
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            known = [flag for action in self._actions if action.help != argparse.SUPPRESS
                     for flag in action.option_strings]  # fmt: skip
            flags = [word for word in rest if word.startswith("-")]  # values of unknown options are no news
            self.error("; ".join(_unknown(word, known) for word in flags or rest))
        self._find_model(found, words)
        if self._environment:
            found.environment = {
                name: value for name, value in taken.items() if getattr(found, name) is value
            }
        return found

    def error(self, message: str) -> Any:
        """End with status 2 and one line: the usage of a command with many options would hide it."""
        self.exit(2, f"{self.prog}: {message}\n({self.prog} --help lists the options)\n")

    def format_help(self) -> str:
        if self.usage is None:
            places = [a for a in self._get_positional_actions() if a.help != argparse.SUPPRESS]
            names = [(str(a.metavar or a.dest).upper(), a.nargs == "?") for a in places]
            words = [f"[{name}]" if optional else name for name, optional in names]
            self.usage = " ".join(["%(prog)s", *words, "[OPTION …]"])
        return super().format_help()

    def _get_option_tuples(self, _: str) -> list[Any]:
        return []  # -tp is not -t p: options of one letter are written apart from their value

    def variables(self) -> dict[str, argparse.Action]:
        """The environment variables that this parser reads, and the options that they stand for."""
        one_of = [group for group in self._mutually_exclusive_groups if group.required]
        asked = {id(action) for group in one_of for action in group._group_actions}
        return {
            OPTION_PREFIX + action.dest.upper(): action
            for action in self._actions
            if (
                (action.dest == "model" and action.nargs == "?")
                or any(flag.startswith("--") for flag in action.option_strings)
            )
            and action.help != argparse.SUPPRESS
            and action.dest not in {"help", "model_option"}
            and id(action) not in asked
        }

    def _defaults_of_environment(self) -> dict[str, Any]:
        known, taken = self.variables(), {}
        for name, text in option_variables().items():
            if name in known:
                action = known[name]
                action.default = taken[action.dest] = self._value(action, name, text)
        return taken

    def _value(self, action: argparse.Action, name: str, text: str) -> Any:
        """A variable's text as its option would take it."""
        if not text.strip():
            self.error(f"{name}: the variable is empty; unset it or give it a value")
        values = []
        for part in map(str.strip, text.split(",")) if isinstance(action, Several) else [text]:
            try:
                values.append(switch(part) if action.nargs == 0 else self._get_value(action, part))
                self._check_value(action, values[-1])
            except (argparse.ArgumentError, ValueError) as error:
                self.error(f"{name}: {getattr(error, 'message', error)}")
        return values if isinstance(action, Several) else values[0]

    def _find_model(self, found: argparse.Namespace, words: list[str]) -> None:
        """Take the model as an argument, as --model, or as the last of an option's values, where it cannot be one."""
        option = found.__dict__.pop("model_option", None)
        lists = found.__dict__.pop("lists", [])
        place = next((a for a in self._actions if a.dest == "model" and not a.option_strings), None)
        if place is None or place.nargs != "?":
            return
        asked = getattr(found, "model", place.default)
        if asked is not place.default and option not in {None, asked}:
            self.error(f"the model is named twice: {asked} and {option}")
        if option is not None:
            found.model = option
        if option is not None or asked is not place.default:
            return
        doubtful = [
            (flag, values) for flag, values in lists
            if any(_may_be_model(value) for value in values if f"{flag}={value}" not in words)
            and (len(values) > 1 or _is_model(values[0]))
        ]  # fmt: skip
        if len(doubtful) == 1:
            ((flag, values),) = doubtful
            if len(values) > 1 and _is_model(values[-1]) and not any(map(_may_be_model, values[:-1])):
                found.model = values[-1]
                getattr(found, self._option_string_actions[flag].dest).remove(values.pop())
                return
        if doubtful and place.default in {None, argparse.SUPPRESS}:
            flag = doubtful[0][0]
            self.error(  # values may be secret
                f"{flag}: a value looks like a model, and no model is named: write the model first ({self.prog} MODEL "
                f"{flag} …) or as --model MODEL, and a value that only looks like one as {flag}=VALUE"
            )


def switch(text: str) -> bool:
    """Whether a switch is on. Raises ValueError for a text that does not say so."""
    if text.lower() not in _SWITCH:
        raise ValueError(f"{text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text.lower()]


def _is_model(text: str) -> bool:
    """Whether this is surely meant as the model: one that ships with Quire, or is there."""
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return "/" in text and any(
            name == "config.json" or name.endswith(".gguf") for name in os.listdir(path)
        )
    return text in shipped_models() or (text.endswith(".gguf") and os.path.exists(path))


def _may_be_model(text: str) -> bool:
    path = text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf")
    return path or _REPOSITORY.fullmatch(text) is not None or _is_model(text)


def _unknown(word: str, known: list[str]) -> str:
    flag = word.partition("=")[0]
    told = explain(flag.removeprefix("--"))
    return f"{flag} {told}" if told else f"unrecognized argument: {word}{nearest(flag, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)" for the name most like `name`, "" when none is."""
    found = max(known, key=lambda other: _likeness(name, other), default="")
    return f" (did you mean {found}?)" if found and _likeness(name, found) >= _ALIKE else ""


def _likeness(name: str, other: str) -> float:
    """How like two names are, or a name and another one's beginning; 1 when they are equal."""
    name, other = name.lstrip("-"), other.lstrip("-")
    begins = difflib.SequenceMatcher(None, name, other[: len(name)]).ratio() if len(name) > 3 else 0.0
    return max(difflib.SequenceMatcher(None, name, other).ratio(), 0.9 * begins)


class _Passing(argparse.Action):
    """An option of another server, with a value that asks for what is done anyway."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        name = (flag or "").removeprefix("--")
        if self.nargs != 0 and value not in PASSING[name][0]:
            parser.error(f"{flag} {value}: {explain(name)}")


def add_passing_options(parser: argparse.ArgumentParser) -> None:
    """Options of other servers that ask for what Quire does anyway: they change nothing."""
    for name in (*ALWAYS, *PASSING):
        parser.add_argument(
            name if name.startswith("-") else f"--{name}",
            action=_Passing,
            nargs=0 if name in ALWAYS else None,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
