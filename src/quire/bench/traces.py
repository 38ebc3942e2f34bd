"""Published traces of arrivals, lengths and shared prefixes, read from a file that the user names.

    Azure      TIMESTAMP,ContextTokens,GeneratedTokens        Splitwise, ISCA 2024
    Mooncake   {"timestamp" ms, "input_length", "output_length", "hash_ids"} a line; equal leading ids share a
               prefix of 512 tokens each                       Mooncake, FAST 2025
    BurstGPT   Timestamp (s),[Session ID,][Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type;
               failed requests have no response               BurstGPT, KDD 2025
    ServeGen   a folder of chunk-N-trace.csv (start, rate, CV, family, two parameters per window) and
               chunk-N-dataset.json (histograms of token counts); requests are drawn from them
                                                               ServeGen, arXiv 2505.09999
    Alibaba    Mooncake's fields, and chat_id; timestamps in seconds, ids of 16 tokens      Bailian, ATC 2025
    lengths    arrival_time_ns,input_toks,output_toks  or  num_prefill_tokens,num_decode_tokens,…

The first line determines the kind. Of other JSON lines with Mooncake's fields it does not tell the unit of times and
the tokens of an id: both are options of the timed trace of `vllm bench serve`, and the `form` of read_trace. Files are
untrusted: sizes, counts and numbers are checked as they are read.
"""

from __future__ import annotations

import csv
import datetime
import heapq
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.records import dataclass
from quire.types import QuireError

MAX_TRACE_BYTES = 1 << 30
MAX_TOKENS = 1 << 24  # per request; more means a broken file
MAX_HASHES = 1 << 16


class TraceError(QuireError):
    """A trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `at` is seconds from its first one; None if the trace has no times.

    `blocks` are ids of the leading blocks of the prompt, of `block_tokens` tokens: equal ids mean equal tokens.
    """

    at: float | None
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _TimedTrace:
    """JSON lines with Mooncake's fields: tokens of a prompt that one of `hash_ids` stands for, and the seconds of the
    unit of `timestamp`. The defaults are those of vLLM, and of Alibaba's traces."""

    block_tokens: int = 16
    second: float = 1.0


_MOONCAKE = _TimedTrace(512, 1e-3)
_TIMED_TRACE = re.compile(r"timed-trace(?::(\d{1,6})(?::(\d{1,9}(?:\.\d{1,9})?))?)?", re.ASCII)


def _timed_trace(form: str) -> _TimedTrace:
    match = _TIMED_TRACE.fullmatch(form)
    made = _TimedTrace(int(match[1] or 16), float(match[2] or 1)) if match else _TimedTrace(0)
    if not (made.block_tokens and made.second):
        raise ValueError(f"trace-format: {form!r} is not timed-trace[:TOKENS[:SECONDS]] with numbers above 0")
    return made


def read_trace(
    path: Path, *, limit: int | None = None, start: float = 0.0, seed: int = 0, form: str | None = None
) -> list[TraceRow]:
    """Read at most `limit` requests of a trace that arrive at or after `start` seconds, in order of arrival.

    `seed` is for ServeGen, whose requests are drawn. `form`: "timed-trace", "timed-trace:TOKENS" or
    "timed-trace:TOKENS:SECONDS". Raises TraceError, ValueError for another form.
    """
    rows: list[TraceRow] = []
    timed = None if form is None else _timed_trace(form)
    if path.is_dir() and timed is None:
        rows = _servegen(path, limit, start, seed)
    else:
        for row in _rows(path, timed):
            if row.at is not None and row.at < start:
                continue
            rows.append(row)
            if limit is not None and len(rows) >= limit:
                break
    if not rows:
        raise TraceError(f"{path}: no request{f' from second {start:g} on' if start else ''}")
    if rows[0].at is not None:
        rows.sort(key=lambda row: row.at or 0.0)
        first = rows[0].at or 0.0
        rows = [replace(row, at=(row.at or 0.0) - first) for row in rows]
    return rows


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of a file, and of what is in it, become a TraceError that names it."""
    try:
        size = path.stat().st_size
        if size > MAX_TRACE_BYTES:
            raise TraceError(f"{path}: {size} bytes, the limit is {MAX_TRACE_BYTES}")
        yield
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not UTF-8 text") from None
    except csv.Error as error:
        raise TraceError(f"{path}: {error}") from None


def json_line(text: str, where: str) -> dict[str, Any]:
    """A JSON object. Raises TraceError saying where it is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError(f"{where}: not JSON") from None
    if not isinstance(found, dict):
        raise TraceError(f"{where}: not an object")
    return found


def _rows(path: Path, form: _TimedTrace | None) -> Iterator[TraceRow]:
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        head = file.readline(1 << 20)
        if form is not None or head.lstrip().startswith("{"):
            file.seek(0)
            yield from _timed(path, file, form)
            return
        columns = [word.strip() for word in head.strip().split(",")]
        reader = next((make for names, make in _CSV.items() if set(names) <= set(columns)), None)
        if reader is None:
            known = "; ".join(", ".join(names) for names in _CSV)
            raise TraceError(f"{path}: line 1: unknown columns; known traces have {known}, or JSON lines")
        for number, row in enumerate(csv.DictReader(file, columns), 2):
            yield reader(row, f"{path}: line {number}")


def _azure(row: dict[str, str], where: str) -> TraceRow:
    text = row["TIMESTAMP"] or ""
    try:  # seven digits after the point, and fromisoformat takes six
        moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
    except ValueError:
        raise TraceError(f"{where}: TIMESTAMP: {text[:40]!r} is not a time") from None
    at = moment.replace(tzinfo=datetime.UTC).timestamp()
    return TraceRow(at, _tokens(row, "ContextTokens", where), _tokens(row, "GeneratedTokens", where))


def _arrivals(row: dict[str, str], where: str) -> TraceRow:
    at = _number(row, "arrival_time_ns", where) / 1e9
    return TraceRow(at, _tokens(row, "input_toks", where), _tokens(row, "output_toks", where))


def _burstgpt(row: dict[str, str], where: str) -> TraceRow:
    at = _number(row, "Timestamp", where)
    return TraceRow(at, _tokens(row, "Request tokens", where), _tokens(row, "Response tokens", where))


def _lengths(row: dict[str, str], where: str) -> TraceRow:
    return TraceRow(None, _tokens(row, "num_prefill_tokens", where), _tokens(row, "num_decode_tokens", where))


_CSV: dict[tuple[str, ...], Callable[[dict[str, str], str], TraceRow]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("arrival_time_ns", "input_toks", "output_toks"): _arrivals,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
    ("num_prefill_tokens", "num_decode_tokens"): _lengths,
}


def _timed(path: Path, file: Iterator[str], form: _TimedTrace | None) -> Iterator[TraceRow]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row = json_line(line, where)
        form = form or (_TimedTrace() if "chat_id" in row else _MOONCAKE)
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or len(blocks) > MAX_HASHES:
            raise TraceError(f"{where}: hash_ids: not a list of at most {MAX_HASHES} ids")
        if not all(type(block) is int for block in blocks):
            raise TraceError(f"{where}: hash_ids: not integers")
        at = _number(row, "timestamp", where) * form.second
        lengths = _tokens(row, "input_length", where), _tokens(row, "output_length", where)
        yield TraceRow(at, *lengths, tuple(blocks), form.block_tokens)


def _number(row: dict[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"{where}: {name}: {str(row.get(name))[:40]!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"{where}: {name}: {value} is not a time or count")
    return value


def _tokens(row: dict[str, str], name: str, where: str) -> int:
    value = _number(row, name, where)
    if value != int(value) or value > MAX_TOKENS:
        raise TraceError(f"{where}: {name}: {value:g} is not a number of tokens up to {MAX_TOKENS}")
    return int(value)


# ---- ServeGen: clients with a rate, a family of gaps and histograms of lengths for every ten minutes


@dataclass(frozen=True, slots=True)
class _Window:
    start: float
    end: float
    rate: float
    family: str
    shape: float
    scale: float


def _servegen(folder: Path, limit: int | None, start: float, seed: int) -> list[TraceRow]:
    """Requests of all clients of a folder from `start` on: `limit` of them, or those of one day."""
    clients = sorted(
        folder.glob("chunk-*-trace.csv"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0)
    )
    if not clients:
        raise TraceError(f"{folder}: no chunk-N-trace.csv in this folder")
    streams = [_client(path, start, random.Random(f"{seed} {i}")) for i, path in enumerate(clients)]
    return list(itertools.islice(heapq.merge(*streams, key=lambda row: row.at or 0.0), limit))


def _client(path: Path, start: float, rng: random.Random) -> Iterator[TraceRow]:
    """Requests of one client from `start` on, in order."""
    lengths = _histograms(path.with_name(path.name.replace("-trace.csv", "-dataset.json")))
    for window in _windows(path):
        if window.end <= start or window.rate <= 0:
            continue
        at = max(window.start, start)
        while True:
            at += _gap(window, rng)
            if at >= window.end:
                break
            inputs, outputs = lengths(at)
            if inputs and outputs:
                yield TraceRow(at, _draw(inputs, rng), _draw(outputs, rng))


def _windows(path: Path) -> list[_Window]:
    found: list[tuple[float, float, str, float, float]] = []
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split(",")
        where = f"{path}: line {number}"
        if len(words) != 6:
            raise TraceError(f"{where}: {len(words)} columns, not 6")
        row = dict(zip(("start", "rate", "cv", "family", "shape", "scale"), words, strict=True))
        rate = _number(row, "rate", where)
        if rate > 0 and row["family"] not in {"Gamma", "Weibull"}:
            raise TraceError(f"{where}: family: {row['family'][:40]!r} is not Gamma or Weibull")
        shape, scale = _number(row, "shape", where), _number(row, "scale", where)
        if rate > 0 and not (shape > 0 and scale > 0):
            raise TraceError(f"{where}: shape and scale must be above 0 where the rate is")
        found.append((_number(row, "start", where), rate, row["family"], shape, scale))
    if not found:
        raise TraceError(f"{path}: empty")
    step = found[1][0] - found[0][0] if len(found) > 1 else 600.0
    ends = [one[0] for one in found[1:]] + [found[-1][0] + step]
    return [_Window(one[0], end, *one[1:]) for one, end in zip(found, ends, strict=True)]


def _gap(window: _Window, rng: random.Random) -> float:
    if window.family == "Gamma":
        return rng.gammavariate(window.shape, window.scale)
    return rng.weibullvariate(window.scale, window.shape)


CountHistogram = tuple[list[int], list[float]]  # token counts, and the cumulative sums of their weights


def _histograms(path: Path) -> Callable[[float], tuple[CountHistogram | None, CountHistogram | None]]:
    """Return a function from a time to the histograms of input and output lengths of its window."""
    with reading(path):
        data = json_line(path.read_text(encoding="utf-8"), str(path))
    windows: list[tuple[float, CountHistogram | None, CountHistogram | None]] = []
    for key, value in data.items():
        where = f"{path}: {key}"
        if not isinstance(value, dict):
            raise TraceError(f"{where}: not an object")
        start = _number({"start": key}, "start", where)
        inputs = _histogram(value.get("input_tokens"), f"{where}: input_tokens")
        windows.append((start, inputs, _histogram(value.get("output_tokens"), f"{where}: output_tokens")))
    windows.sort(key=lambda window: window[0])

    def at(time: float) -> tuple[CountHistogram | None, CountHistogram | None]:
        inside = [window for window in windows if window[0] <= time and window[1] and window[2]]
        full = inside or [window for window in windows if window[1] and window[2]]
        found = inside[-1] if inside else full[0] if full else (0.0, None, None)
        return found[1], found[2]

    return at


def _histogram(text: object, where: str) -> CountHistogram | None:
    """Parse "{45: 0.0097, 46: 0.0117}"; None if empty."""
    if not isinstance(text, str):
        raise TraceError(f"{where}: not a string")
    counts, weights = [], []
    for pair in text.strip().removeprefix("{").removesuffix("}").split(","):
        if not pair.strip():
            continue
        key, _, weight = pair.partition(":")
        counts.append(_tokens({"tokens": key}, "tokens", where))
        weights.append(_number({"weight": weight}, "weight", where))
    sums = list(itertools.accumulate(weights))
    return (counts, sums) if sums and sums[-1] > 0 else None


def _draw(histogram: CountHistogram, rng: random.Random) -> int:
    counts, sums = histogram
    return max(1, rng.choices(counts, cum_weights=sums)[0])
