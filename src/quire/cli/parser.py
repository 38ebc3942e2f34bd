"""The parser behind every command: hints for unknown options, environment variables, and a model in any position."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from quire.config.elsewhere.foreign import ForeignOptionError
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
# organisation/name, optionally followed by the choice of a GGUF file
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+|/[\w./-]+\.gguf)?", re.ASCII)


class Several(argparse.Action):
    """One value or several. Repeated options add up; together they replace the default."""

    def __call__(
        self, _: argparse.ArgumentParser, found: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        before, given = getattr(found, self.dest, None), values if isinstance(values, list) else [values]
        setattr(found, self.dest, [*(() if before is None or before is self.default else before), *given])
        found.__dict__.setdefault("lists", []).append((flag, given))


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and suggests the nearest option for an unknown one.

    With `environment`, the variable QUIRE_NAME is the default of the option --name. The values taken from variables are
    in `environment` of the returned namespace.
    """

    def __init__(self, *, environment: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._environment = environment
        self.takes_foreign_options = False  # those of other servers

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        taken = self._defaults_of_environment() if self._environment else {}
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            known = [flag for action in self._actions if action.help != argparse.SUPPRESS
                     for flag in action.option_strings]  # fmt: skip
            flags = [
                word for word in rest if word.startswith("-")
            ]  # values of unknown options are not reported
            self.error("; ".join(_unknown(word, known) for word in flags or rest))
        self._find_model(found, words)
        if self._environment:
            found.environment = {
                name: value for name, value in taken.items() if getattr(found, name) is value
            }
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.takes_foreign_options:
            _add_foreign_options(self, sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        found.__dict__.pop("foreign", None)
        return found, rest

    def error(self, message: str) -> Any:
        """Exit with status 2 and one line, which the long usage would hide."""
        self.exit(2, f"{self.prog}: {message}\n({self.prog} --help lists the options)\n")

    def format_help(self) -> str:
        if self.usage is None:
            places = [a for a in self._get_positional_actions() if a.help != argparse.SUPPRESS]
            names = [(str(a.metavar or a.dest).upper(), a.nargs == "?") for a in places]
            words = [f"[{name}]" if optional else name for name, optional in names]
            self.usage = " ".join(["%(prog)s", *words, "[OPTION …]"])
        return super().format_help()

    def _get_option_tuples(self, _: str) -> list[Any]:
        return []  # -tp is not -t p: a one-letter option is separated from its value

    def variables(self) -> dict[str, argparse.Action]:
        """Return the environment variables of this parser and their options."""
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
        """Convert the text of a variable as its option would."""
        if not text.strip():
            self.error(f"{name}: the variable is empty; unset it or set a value")
        values = []
        for part in map(str.strip, text.split(",")) if isinstance(action, Several) else [text]:
            try:
                values.append(switch(part) if action.nargs == 0 else self._get_value(action, part))
                self._check_value(action, values[-1])
            except (argparse.ArgumentError, ValueError) as error:
                self.error(f"{name}: {getattr(error, 'message', error)}")
        return values if isinstance(action, Several) else values[0]

    def _find_model(self, found: argparse.Namespace, words: list[str]) -> None:
        """Find the model: an argument, --model, or the last value of an option that takes several."""
        option = found.__dict__.pop("model_option", None)
        lists = found.__dict__.pop("lists", [])
        place = next((a for a in self._actions if a.dest == "model" and not a.option_strings), None)
        if place is None or place.nargs != "?":
            return
        asked = getattr(found, "model", place.default)
        if asked is not place.default and option not in {None, asked}:
            self.error(f"the model is given twice: {asked} and {option}")
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
                f"{flag}: a value looks like a model, but no model is given: put the model first ({self.prog} MODEL "
                f"{flag} …), use --model MODEL, or write a value that is no model as {flag}=VALUE"
            )


def switch(text: str) -> bool:
    """Parse a switch. Raises ValueError for other words than those of a switch."""
    if text.lower() not in _SWITCH:
        raise ValueError(f"{text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text.lower()]


def _is_model(text: str) -> bool:
    """Whether this is certainly the model: bundled with Quire, or existing on disk."""
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
    from quire.config.elsewhere.lookup import explain

    flag = word.partition("=")[0]
    reason = explain(flag)
    if reason and not reason.startswith(f"is {flag} "):
        return f"{flag} {reason}"
    what = (
        f"{flag} is no option of this command, but of quire serve"
        if reason
        else f"unrecognized argument: {word}"
    )
    return what + nearest(flag, known)


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)" with the name most similar to `name`, "" if there is none."""
    found = max(known, key=lambda other: _likeness(name, other), default="")
    return f" (did you mean {found}?)" if found and _likeness(name, found) >= _ALIKE else ""


def _likeness(name: str, other: str) -> float:
    """Similarity of two names, or of a name and the start of the other; 1 if they are equal."""
    import difflib

    name, other = name.lstrip("-"), other.lstrip("-")
    begins = difflib.SequenceMatcher(None, name, other[: len(name)]).ratio() if len(name) > 3 else 0.0
    return max(difflib.SequenceMatcher(None, name, other).ratio(), 0.9 * begins)


class _Foreign(argparse.Action):
    """An option of another server: it sets the options of this command that have its effect."""

    def __call__(
        self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        from quire.config.elsewhere.lookup import translate

        given = value if isinstance(value, list) else [value]
        for one in given or [None]:
            shown = flag or "" if one is None else f"{flag} {one}"
            try:
                words = translate(flag or "", one)
            except ForeignOptionError as error:
                parser.error(f"{shown}: {error}")
            for option, text in words:
                self._set(parser, found, shown, option, text)

    def _set(
        self,
        parser: argparse.ArgumentParser,
        found: argparse.Namespace,
        shown: str,
        option: str,
        text: str | None,
    ) -> None:
        action = parser._option_string_actions.get(option)
        if action is None:
            parser.error(f"{shown}: is {option} of quire serve, which this command does not have")
        before = found.__dict__.setdefault("foreign", {}).setdefault(option, (shown, text))
        if before[1] != text and not isinstance(action, Several):
            parser.error(f"{shown}: contradicts {before[0]}; both are {option} here")
        try:
            value = text if text is None else parser._get_value(action, text)
            if text is not None:
                parser._check_value(action, value)
        except argparse.ArgumentError as error:
            parser.error(f"{shown}: is {option} here: {error.message}")
        action(parser, found, value, option)


_ARITIES = {"": 0, "1": None, "?": "?", "+": "+"}


def take_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take options of other servers."""
    if isinstance(parser, Parser):
        parser.takes_foreign_options = True


def _add_foreign_options(parser: argparse.ArgumentParser, words: Iterable[str]) -> None:
    """Add the options of other servers that are among `words`, except those with a name of this command's own."""
    own = parser._option_string_actions
    strange = {name for word in words if (name := word.partition("=")[0]).startswith("-") and name not in own}
    if not strange:
        return
    from quire.config.elsewhere.lookup import rows_of

    for name in sorted(strange):
        if rows := rows_of(name):
            parser.add_argument(
                name, action=_Foreign, nargs=_ARITIES[rows[0].arity], default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )  # fmt: skip
