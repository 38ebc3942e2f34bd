"""The `quire serve` command that does what a command of another server does."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import field

from quire.cli.parser import Several
from quire.config.elsewhere.foreign import (
    LCPP,
    OLM,
    SGLANG,
    TGI,
    VLLM,
    ForeignOption,
    ForeignOptionError,
)
from quire.config.elsewhere.lookup import rows_of
from quire.records import dataclass

# How each server is started, and where it listens if nothing says so.
_COMMANDS = {
    "vllm serve": VLLM,
    "-m vllm.entrypoints.openai.api_server": VLLM,
    "-m sglang.launch_server": SGLANG,
    "sglang serve": SGLANG,
    "llama-server": LCPP,
    "text-generation-launcher": TGI,
    "ollama serve": OLM,
}
_ADDRESSES = {
    VLLM: ("0.0.0.0", "8000"), SGLANG: ("127.0.0.1", "30000"), LCPP: ("127.0.0.1", "8080"),
    TGI: ("0.0.0.0", "3000"), OLM: ("127.0.0.1", "11434"),
}  # fmt: skip
_OWN_ADDRESS = ("127.0.0.1", "8000")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_THEIRS = re.compile(r"(VLLM|SGLANG|SGL|LLAMA|OLLAMA|CUDA|HIP|ROCR|NCCL|GGML)_\w+")
_BEFORE = ("env", "sudo", "exec", "nohup")


@dataclass(slots=True)
class EquivalentCommand:
    """A command of Quire. `notes` say what is different without loss; `dropped` what is left out, and why; `lost` what
    is left out although other answers are given, or others are served, without it.
    """

    model: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    options: dict[str, list[str | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """The command, without the variables."""
        found = ["quire", "serve", self.model or "MODEL"]
        for option, values in self.options.items():
            found += [option, *(value for value in values if value is not None)]
        return found

    def __str__(self) -> str:
        return " ".join(
            [*(f"{k}={shlex.quote(v)}" for k, v in self.variables.items()), shlex.join(self.words())]
        )


def equivalent(
    command: str, parser: argparse.ArgumentParser, environment: Mapping[str, str]
) -> EquivalentCommand:
    """Translate a command line. `parser` is that of `quire serve`; `environment` has the variables of a server that
    takes its options from there, Ollama. Raises ValueError for a command of no known server.
    """
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        raise ValueError(f"from_command: {error}") from None
    variables, server, rest = _parted([word for word in words if word != "\n"])
    made = _Translation(server, parser)
    if server == OLM:
        variables = {n: v for n, v in environment.items() if n.startswith("OLLAMA_")} | variables
    made.take_variables(variables)
    made.take_options(rest)
    return made.finished()


def _parted(words: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """Variables, server, and the words after its name."""
    variables: dict[str, str] = {}
    while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
        word = words.pop(0)
        if match := _ASSIGNMENT.fullmatch(word):
            variables[match[1]] = match[2]
    for start, server in _COMMANDS.items():
        parts = start.split()
        begin = 1 if parts[0] == "-m" else 0  # behind the name of an interpreter
        found = words[begin : begin + len(parts)]
        if [found[0].rpartition("/")[2], *found[1:]] == parts if found else False:
            return variables, server, words[begin + len(parts) :]
    known = ", ".join(start.replace("-m ", "python -m ") for start in _COMMANDS)
    raise ValueError(f"from_command: starts with none of {known}")


class _Translation:
    """Translates the options of one server."""

    def __init__(self, server: str, parser: argparse.ArgumentParser) -> None:
        self._server = server
        self._own = parser._option_string_actions
        self._parser = parser
        self._made = EquivalentCommand()
        self._sources: dict[str, str] = {}  # option -> the foreign option that set it

    def take_variables(self, variables: Mapping[str, str]) -> None:
        """Translate variables: those of the server are options, others stay."""
        for name, value in variables.items():
            flag = "--" + name.removeprefix("LLAMA_ARG_").lower().replace("_", "-")
            if rows := rows_of(name, self._server):
                self._translate(name, rows[0], [value])
            elif (self._server == TGI or name.startswith("LLAMA_ARG_")) and self._knows(flag):
                self._take(flag, [value], name)
            elif name.startswith("LLAMA_ARG_"):
                self._made.lost.append(f"{name}: unknown here; name the option that it stands for")
            elif _THEIRS.fullmatch(name):
                self._made.dropped.append(f"{name}: a variable that only {self._server} reads")
            else:
                self._made.variables[name] = value

    def take_options(self, words: list[str]) -> None:
        """Translate the words behind the name of the server."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-") or word == "-":
                self._take_model(word)
                continue
            flag, equals, value = word.partition("=")
            if flag.startswith("--"):
                flag = "--" + flag[2:].replace("_", "-")
            elif flag.startswith("-O") and len(flag) > 2:
                flag, equals, value = "-O", "=", flag[2:]
            values = [value] if equals else self._values(flag, rest)
            self._take(flag, values, flag)

    def _values(self, flag: str, rest: list[str]) -> list[str]:
        """Take the values of an option from the words behind it."""
        arity = self._arity(flag)
        found: list[str] = []
        while rest and (arity in {"+", "unknown"} or len(found) < (arity in {"1", "?"})):
            if rest[0].startswith("-") and not _number(rest[0]) and arity != "1":
                break
            found.append(rest.pop(0))
        return found

    def _arity(self, flag: str) -> str:
        if rows := rows_of(flag, self._server):
            return rows[0].arity
        if flag not in self._own:
            return "unknown"
        nargs = self._own[flag].nargs
        return {0: "", None: "1"}.get(nargs, "+")  # type: ignore[arg-type]

    def _knows(self, flag: str) -> bool:
        return bool(rows_of(flag, self._server)) or flag in self._own

    def _take(self, flag: str, values: list[str], name: str) -> None:
        rows = rows_of(flag, self._server) or rows_of(flag.partition(".")[0], self._server)
        if rows:
            self._translate(name, rows[0], values)
        elif flag not in self._own or self._own[flag].dest == "help":
            self._made.lost.append(f"{name}: no option that is known here; see quire help serve")
        elif self._own[flag].dest == "model_option":
            self._take_model(*values)
        elif not self._arity(flag):
            self._set(name, flag, None)
        else:
            long = next(option for option in self._own[flag].option_strings if option.startswith("--"))
            for value in values:
                self._set(name, long, value)

    def _translate(self, name: str, row: ForeignOption, values: list[str]) -> None:
        for value in values or [""]:
            shown = f"{name} {value}".rstrip()
            try:
                words = row.translated(value)
            except ForeignOptionError as error:
                (self._made.lost if error.essential else self._made.dropped).append(f"{shown}: {error}")
                continue
            if not words and row.why:
                self._made.dropped.append(f"{shown}: {row.why}")
            for option, text in words:
                if option == "--model":
                    self._take_model(text or "")
                elif self._set(shown, option, text) and row.why:
                    self._made.notes.append(
                        f"{shown}: {option}{'' if text is None else ' ' + text}; {row.why}"
                    )

    def _set(self, name: str, option: str, text: str | None) -> bool:
        """Set an option of Quire; false if it cannot be."""
        action = self._own[option]
        try:
            if text is not None:
                self._parser._check_value(action, self._parser._get_value(action, text))
        except argparse.ArgumentError as error:
            shown = (
                f"{option} {text}" if name in {option, *action.option_strings} else f"{name}: {option} {text}"
            )
            self._made.lost.append(f"{shown}: {error.message}")
            return False
        before = self._made.options.setdefault(option, [])
        if isinstance(action, Several) or not before:
            before.append(text)
        elif before != [text]:
            self._made.lost.append(f"{name}: contradicts {self._sources[option]}; both are {option} here")
            return False
        self._sources.setdefault(option, name)
        return True

    def _take_model(self, *names: str) -> None:
        for name in names:
            if self._made.model and self._made.model != name:
                self._made.lost.append(f"{name}: not understood; the model is {self._made.model}")
            self._made.model = self._made.model or name

    def finished(self) -> EquivalentCommand:
        """The command, listening where the other server does."""
        made = self._made
        if not made.model and "--config" not in made.options:
            what = "loads the models that requests name" if self._server == OLM else "has a default model"
            made.lost.append(f"no model: {self._server} {what}; put one in place of MODEL")
        if "--uds" not in made.options:
            for option, own, theirs in zip(
                ("--host", "--port"), _OWN_ADDRESS, _ADDRESSES[self._server], strict=True
            ):
                if own != theirs:
                    made.options.setdefault(option, [theirs])
        return made


def _number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None
