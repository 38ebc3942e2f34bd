"""The file that every benchmark writes: figures, their definitions, and the machine.

    {"format": "quire-bench", "version": 1, "kind": "latency", "started": …, "seconds": …,
     "command": [words without absolute paths], "environment": {…}, "limits": {…}, "noise": {…},
     "settings": {…}, "metrics": {name: {"value", "unit", "better", "samples"}},
     "definitions": {name: words}, "tables": {name: [rows]}, "notes": [words]}

`metrics` are compared between files, so each has a unit and a better direction. `tables` contain rows of plain values
for reports and plots. A reader accepts unknown fields and refuses a later version.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.types import QuireError

FORMAT, VERSION = "quire-bench", 1
MAX_FILE_BYTES = 512 << 20
Better = Literal["higher", "lower", "neither"]


class ResultError(QuireError):
    """A result file cannot be read; the message names the file and the error."""


class Spread(msgspec.Struct, frozen=True):
    """Samples of one quantity: median, extremes, and how many."""

    median: float
    low: float
    high: float
    count: int


class Metric(msgspec.Struct, frozen=True):
    """One figure. `value` is None if undefined; `samples` are the rounds behind the median."""

    value: float | None
    unit: str
    better: Better = "neither"
    samples: list[float] = []


class Environment(msgspec.Struct, frozen=True):
    """The machine. Sizes in bytes; `caches` of one core by name ("L1d", "L2", "L3")."""

    quire: str
    python: str
    system: str
    cpu: str
    cores: int
    usable_cores: int
    virtual: bool
    memory: int
    caches: dict[str, int]
    isas: list[str]
    packages: dict[str, str]


class MachineLimits(msgspec.Struct, frozen=True):
    """Limits of the machine during the run: bytes/s read from memory, and operations/s by number format.

    A multiply and an add are two operations. Measured by all `threads` together with the kernels of `isa`.
    """

    isa: str
    threads: int
    bandwidth: Spread
    compute: dict[str, Spread]


class Noise(msgspec.Struct, frozen=True):
    """CPUs used by other processes and the hypervisor during the run, on average over `seconds`."""

    others: float
    stolen: float
    seconds: float


class Result(msgspec.Struct, kw_only=True):
    """One run of one benchmark; see the module docstring."""

    format: str = FORMAT
    version: int = VERSION
    kind: str
    started: str
    seconds: float
    command: list[str]
    environment: Environment
    limits: MachineLimits | None = None
    noise: Noise | None = None
    settings: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    definitions: dict[str, str] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []


def spread(samples: Sequence[float]) -> Spread:
    """Median and extremes of at least one sample."""
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def metric(samples: Sequence[float], unit: str, better: Better = "neither") -> Metric:
    """A metric whose value is the median of its samples; None without samples."""
    value = statistics.median(samples) if samples else None
    return Metric(value, unit, better, [float(s) for s in samples])


def plain_command(words: Sequence[str]) -> list[str]:
    """Reduce absolute paths of a command line to their last part, for publishing."""
    return [plain_word(word) for word in words]


def plain_word(word: str) -> str:
    """Remove the folders of an absolute path from a word, for publishing; some servers name models by path."""
    option, equals, value = word.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={plain_word(value)}"
    return Path(word).name or word if os.path.isabs(word) else word


def to_json(result: Result) -> str:
    """One JSON object on one line."""
    return msgspec.json.encode(result).decode()


def save(result: Result, path: Path) -> None:
    """Write a result file atomically."""
    write_text(path, json.dumps(msgspec.to_builtins(result), indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def load(path: Path) -> Result:
    """Read a result file. Raises ResultError naming the file and the field."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ResultError(f"{path}: {path.stat().st_size} bytes, more than the limit of {MAX_FILE_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except msgspec.DecodeError as error:
        raise ResultError(f"{path}: not a result of quire bench: {error}") from None
    if head.format != FORMAT:
        raise ResultError(f"{path}: format: {head.format!r} is not {FORMAT!r}")
    if head.version > VERSION:
        raise ResultError(f"{path}: version: {head.version} is newer than this Quire supports ({VERSION})")
    try:
        return msgspec.json.decode(raw, type=Result)
    except msgspec.DecodeError as error:
        raise ResultError(f"{path}: {error}") from None


class _Head(msgspec.Struct):
    format: str
    version: int
