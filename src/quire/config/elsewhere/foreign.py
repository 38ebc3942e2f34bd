"""What an option of another server means here: options of Quire, nothing, or the reason why it cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from quire.records import dataclass
from quire.types import QuireError

VLLM, SGLANG, LCPP, TGI, OLM = "vLLM", "SGLang", "llama-server", "TGI", "Ollama"
# Options of Quire with their values; None for a switch.
Settings = list[tuple[str, str | None]]
_KV_BLOCK = 16  # tokens, the default of --block-size
_TRUE, _FALSE = ("", "true", "1"), ("false", "0")


class ForeignOptionError(QuireError):
    """An option of another server, or its value, has no counterpart. `essential`: without it, other answers are given
    or others are served; otherwise leaving it out costs speed, memory or convenience at most.
    """

    def __init__(self, message: str, *, essential: bool) -> None:
        super().__init__(message)
        self.essential = essential


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of other servers, by all its names there, or an environment variable.

    `done` are values that ask for what Quire does anyway. Others become `convert(to, value)` if there is a `to`; with
    `values`, only those, as these name them here. What is left is refused with the reason `why`. `arity` is the
    number of values: "" none, "1", "?" at most one, "+" one or more.
    """

    names: tuple[str, ...]
    servers: tuple[str, ...]
    to: str = ""
    values: Mapping[str, str] | None = None
    convert: Callable[[str, str], Settings] | None = None
    done: tuple[str, ...] = ()
    why: str = ""
    essential: bool = False
    arity: str = "1"

    def translated(self, value: str | None) -> Settings:
        """Options of Quire with the same effect. Raises ForeignOptionError."""
        text = value or ""
        if text in self.done or (self.done == _TRUE and text.lower() in _TRUE):
            return []
        if self.arity == "" and text.lower() in _FALSE:
            if self.done != _TRUE:
                return []  # a switch that is off
            raise ForeignOptionError(f"cannot be off: {self.why}", essential=self.essential)
        if not self.to:
            raise ForeignOptionError(self.explanation(), essential=self.essential)
        if self.values is not None:
            if text not in self.values:
                raise ForeignOptionError(self._other_value(text), essential=self.essential)
            text = self.values[text]
        try:
            return (self.convert or _same)(self.to, text)
        except ValueError as error:
            raise ForeignOptionError(f"{text!r}: {error}", essential=self.essential) from None

    def explanation(self) -> str:
        """What it means here, in words."""
        if self.to:
            return f"is {self.to} here" + (f"; {self.why}" if self.why else "")
        if self.done == _TRUE:
            return f"changes nothing here: {self.why}"
        if self.done:
            return f"takes only {' or '.join(self.done)} here: {self.why}"
        return f"is not supported: {self.why}"

    def _other_value(self, text: str) -> str:
        known = ", ".join(dict.fromkeys((*self.done, *(self.values or ()))))
        return f"{text!r} is not supported, only {known}" + (f": {self.why}" if self.why else "")


def _same(option: str, text: str) -> Settings:
    return [(option, text)]


# ---- conversions


def as_switch(option: str, text: str) -> Settings:
    """A switch: on without a value, and with one that means true."""
    if text.lower() not in _TRUE:
        raise ValueError("not true or false")
    return [(option, None)]


def embedding(option: str, _: str) -> Settings:
    """A switch for vectors."""
    return [(option, "embed")]


def reranking(option: str, _: str) -> Settings:
    """A switch for scores of pairs."""
    return [(option, "score")]


def in_blocks(option: str, text: str) -> Settings:
    """Tokens as KV blocks of the default size."""
    return [(option, str(-(-int(text) // _KV_BLOCK)))]


def in_gibibytes(option: str, text: str) -> Settings:
    """A number of GiB, as a size. Raises ValueError."""
    return [(option, f"{round(float(text) * 1024)}MiB")]


def listed(option: str, text: str) -> Settings:
    """Values that are separated by commas."""
    return [(option, part.strip()) for part in text.split(",") if part.strip()]


def from_json_list(option: str, text: str) -> Settings:
    """A JSON list of strings."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError("not a JSON list of strings")
    return [(option, item) for item in found]


def address(_: str, text: str) -> Settings:
    """HOST, :PORT, HOST:PORT or a URL of these."""
    place = text.partition("://")[2] or text
    place = place.rstrip("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]") or (place.count(":") > 1 and not place.startswith("[")):
        host, port = place, ""
    words: Settings = [("--host", host.strip("[]"))] if host else []
    return [*words, ("--port", port)] if port else words


def master(option: str, text: str) -> Settings:
    """HOST:PORT of where hosts meet, at that very port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not int(port):
        raise ValueError("not HOST:PORT")
    return [(option, host.strip("[]")), ("--master-port", str(int(port) - 1))]


def guessed_tokens(option: str, text: str) -> Settings:
    """A number of tokens guessed from n-grams."""
    return [(option, json.dumps({"method": "ngram", "num_speculative_tokens": int(text)}))]


def in_chunks(option: str, text: str) -> Settings:
    """Tokens of a chunk; -1 turns chunks off."""
    return [("--no-enable-chunked-prefill", None)] if text == "-1" else [(option, text)]


def spelled_out(option: str, text: str) -> Settings:
    """A template as its text; one that is built into another server has a name."""
    if "{" not in text:
        raise ValueError(
            "no templates have names here; the checkpoint has its own, or give a file or its text"
        )
    return [(option, text)]


def by_hand(option: str, text: str) -> Settings:  # noqa: ARG001
    """What other values say here."""
    raise ValueError(f"has no translation: set {option}")


def or_zero(option: str, text: str) -> Settings:
    """A number; 0 turns off what -1 turns off there."""
    return [(option, "0" if text == "-1" else text)]


# ---- rows


def called(names: str, servers: tuple[str, ...], to: str, **more: object) -> ForeignOption:
    """An option with another name, or other values, here."""
    return _row(names, servers, to=to, **more)


def switched(names: str, servers: tuple[str, ...], to: str, **more: object) -> ForeignOption:
    """A switch with another name here."""
    return _row(names, servers, to=to, arity="", convert=as_switch, **more)


def always(names: str, servers: tuple[str, ...], why: str, *, arity: str = "") -> ForeignOption:
    """A switch for what Quire does anyway: it changes nothing."""
    return _row(names, servers, done=_TRUE, why=why, arity=arity)


def only(names: str, servers: tuple[str, ...], values: str, why: str, **more: object) -> ForeignOption:
    """An option of which some values ask for what Quire does anyway, and others cannot be had."""
    return _row(names, servers, done=tuple(values.split()), why=why, **more)


def lacks(names: str, servers: tuple[str, ...], why: str, **more: object) -> ForeignOption:
    """An option that Quire lacks and can do without."""
    return _row(names, servers, why=why, **more)


def needs(names: str, servers: tuple[str, ...], why: str, **more: object) -> ForeignOption:
    """An option that Quire lacks, without which other answers are given or others are served."""
    return _row(names, servers, why=why, essential=True, **more)


def _row(names: str, servers: tuple[str, ...], **fields: object) -> ForeignOption:
    return ForeignOption(names=tuple(names.split()), servers=servers, **fields)  # type: ignore[arg-type]
