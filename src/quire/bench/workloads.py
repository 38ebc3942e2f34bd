"""Workloads: lengths, shared prefixes, conversations, files of prompts, traces.

A workload is made before the run from its options and a seed, independently of the server: the same options give the
same work everywhere. Prompts are lists of pieces. Equal pieces become equal text (or token ids), so pieces that two
prompts share become prefix hits on the server.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from quire.bench.traces import TraceError, TraceRow, json_line, reading
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` tokens of text determined by `key`: a shorter piece with the same key is a prefix of a longer one."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `text` or `messages` is a literal prompt; else the prompt is made of `pieces`."""

    pieces: tuple[Piece, ...] = ()
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    output_tokens: int | None = None
    think: float = 0.0  # seconds after the previous answer

    @property
    def input_tokens(self) -> int | None:
        """Requested tokens, without the history of the conversation; None for a literal prompt."""
        return sum(piece.tokens for piece in self.pieces) if self.pieces else None


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one conversation, one after another; most have a single turn. `at`: its start in a trace."""

    turns: tuple[Turn, ...]
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in order, and their description."""

    sessions: list[Session]
    text: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def times(self) -> list[float] | None:
        """The arrival times of the trace; None if it has none."""
        times = [session.at for session in self.sessions if session.at is not None]
        return times if len(times) == len(self.sessions) else None

    def digest(self) -> str:
        """Identify the work: equal for equal sessions, whatever made them."""
        return hashlib.sha256(repr(self.sessions).encode()).hexdigest()[:16]


class Lengths:
    """Requested token counts: "512", "256-1024" (uniform), "normal:512:128", "lognormal:512:0.8" (median, sigma).

    Draws are integers of at least 1. Raises ValueError naming the text.
    """

    def __init__(self, text: str, name: str = "length") -> None:
        self.text = text
        kind, *numbers = text.split(":")
        try:
            if numbers:
                a, b = (float(number) for number in numbers)
            elif "-" in text:
                kind = "uniform"
                a, b = (float(number) for number in text.split("-"))
            else:
                kind, a, b = "fixed", float(text), 0.0
        except ValueError:
            raise ValueError(
                f"{name}: {text!r} does not have a form like 512, 256-1024, normal:512:128, lognormal:512:0.8"
            ) from None
        fine = kind in {"fixed", "uniform", "normal", "lognormal"} and math.isfinite(a) and math.isfinite(b)
        if not fine or a < 1 or b < 0 or (kind == "uniform" and b < a) or a > 1 << 24:
            raise ValueError(f"{name}: {text!r}: not a known distribution of lengths of at least 1")
        self._kind, self._a, self._b = kind, a, b

    def draw(self, rng: random.Random) -> int:
        """One length."""
        a, b = self._a, self._b
        match self._kind:
            case "uniform":
                return rng.randint(int(a), int(b))
            case "normal":
                return max(1, round(rng.gauss(a, b)))
            case "lognormal":
                return max(1, round(a * math.exp(rng.gauss(0.0, b))))
        return max(1, round(a))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Options of a synthetic workload.

    prefix_len      tokens of a prefix that requests of one family share (a system prompt); 0 for none
    families        number of such prefixes; requests take turns
    turns           requests per conversation; each contains all earlier turns and answers
    think           seconds between an answer and the next turn, exponentially distributed with this mean
    salt            a part of every key: other salts give other texts of the same lengths
    """

    requests: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    families: int = 1
    turns: int = 1
    think: float = 0.0
    seed: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("prefix_len", 0), ("families", 1), ("turns", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: {getattr(self, name)} is below {low}")
        if not 0 <= self.think < math.inf:
            raise ValueError(f"think: {self.think} is not a time")


def synthetic(shape: Shape) -> Workload:
    """Make requests with drawn lengths and shared prefixes. Sessions have `turns` requests; the last may have fewer."""
    rng = random.Random(f"lengths {shape.seed}")
    base = f"{shape.salt}/{shape.seed}"
    sessions: list[Session] = []
    made = 0
    while made < shape.requests:
        number = len(sessions)
        prefix = (
            (Piece(f"{base}/prefix {number % shape.families}", shape.prefix_len),) if shape.prefix_len else ()
        )
        turns = []
        for turn in range(min(shape.turns, shape.requests - made)):
            own = Piece(f"{base}/session {number} turn {turn}", shape.input_len.draw(rng))
            think = rng.expovariate(1 / shape.think) if turn and shape.think else 0.0
            pieces = (*prefix, own) if turn == 0 else (own,)
            turns.append(Turn(pieces, output_tokens=shape.output_len.draw(rng), think=think))
        made += len(turns)
        sessions.append(Session(tuple(turns)))
    words = f"{shape.input_len.text} tokens in, {shape.output_len.text} out"
    if shape.prefix_len:
        words += f", {shape.prefix_len} more as the prefix of a family, {shape.families} families"
    if shape.turns > 1:
        words += f", conversations of {shape.turns} turns"
    return Workload(sessions, words, {"seed": shape.seed, "salt": shape.salt})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Fits a trace to a machine: lengths times `length`, then cut to the bounds."""

    length: float = 1.0
    max_input: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            raise ValueError(f"length-scale: {self.length} is not above 0")
        for name in ("max_input", "max_output"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")


def from_trace(
    rows: Sequence[TraceRow], scaling: Scaling, name: str, *, seed: int = 0, salt: str = ""
) -> Workload:
    """Make the requests of a trace. Prompts share blocks exactly where the block hashes of the trace are equal.

    Blocks scale with the lengths, so the share of prefix hits does not change.
    """
    base = f"{salt}/{seed}"
    sessions, cut = [], 0
    for number, row in enumerate(rows):
        wanted = max(1, round(row.input_tokens * scaling.length))
        tokens = min(wanted, scaling.max_input or wanted)
        outputs = max(1, round(row.output_tokens * scaling.length))
        kept = min(outputs, scaling.max_output or outputs)
        cut += tokens < wanted or kept < outputs
        pieces = _blocks(row, tokens, scaling.length, base)
        left = tokens - sum(piece.tokens for piece in pieces)
        if left:
            pieces.append(Piece(f"{base}/request {number}", left))
        sessions.append(Session((Turn(tuple(pieces), output_tokens=kept),), row.at))
    words = f"{len(rows)} requests of {name}"
    if scaling.length != 1:
        words += f", lengths × {scaling.length:g}"
    if cut:
        words += f", {cut} cut to the bounds"
    facts = {"trace": name, "seed": seed, "salt": salt, "length_scale": scaling.length, "cut": cut}
    return Workload(sessions, words, facts)


def _blocks(row: TraceRow, tokens: int, scale: float, base: str) -> list[Piece]:
    pieces: list[Piece] = []
    done = 0
    for place, block in enumerate(row.blocks):
        # Round the ends, not the lengths: rounding every block would change the length of the prompt.
        end = min(tokens, round(min(row.input_tokens, (place + 1) * row.block_tokens) * scale))
        if end <= done:
            continue
        pieces.append(Piece(f"{base}/block {block}", end - done))
        done = end
    return pieces


def from_file(
    path: Path, *, output_len: Lengths | None = None, limit: int | None = None, seed: int = 0
) -> Workload:
    """Read the prompts of a file: one per line, or JSON lines with "prompt" or "messages" and optional "output_tokens"
    (or "max_tokens") and "timestamp" in seconds. Raises TraceError naming the line and field.
    """
    rng = random.Random(f"lengths {seed}")
    sessions: list[Session] = []
    with reading(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                turn, at = _file_turn(line, f"{path}: line {number}")
                if turn.output_tokens is None and output_len is not None:
                    turn = replace(turn, output_tokens=output_len.draw(rng))
                sessions.append(Session((turn,), at))
            if limit is not None and len(sessions) >= limit:
                break
    if not sessions:
        raise TraceError(f"{path}: no prompts")
    return Workload(sessions, f"{len(sessions)} prompts of {path.name}", {"file": path.name})


def _file_turn(line: str, where: str) -> tuple[Turn, float | None]:
    if not line.lstrip().startswith("{"):
        return Turn(text=line.rstrip("\r\n")), None
    row = json_line(line, where)
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise TraceError(f'{where}: needs either "prompt" or "messages"')
    if prompt is not None and not isinstance(prompt, str):
        raise TraceError(f"{where}: prompt: not a string")
    if messages is not None and not (
        isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise TraceError(f"{where}: messages: not a list of objects")
    tokens = row.get("output_tokens", row.get("max_tokens"))
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise TraceError(f"{where}: output_tokens: {tokens!r} is not a positive integer")
    at = row.get("timestamp")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf):
        raise TraceError(f"{where}: timestamp: {at!r} is not a time in seconds")
    return Turn(text=prompt or "", messages=tuple(messages or ()), output_tokens=tokens), at


# ---- from pieces to prompts

# Short and common words: one token each, with the space before it, in nearly every tokenizer.
_WORD_LIST = """
the of and to in is was for on that by with as at from his it an are be this which or had not but
were her all they she one have has been who their more two its other into first when time there only
some could new them man may then do also any like our work must make such much over year day life
way even back see after well down right house where part great state world just own still made long
good old each little between under last never place same another while three small number off always
next every found since both few water light home room side night point city head hand school power
line free keep white black land name
"""
_WORDS = _WORD_LIST.split()


@dataclass(slots=True)
class Speller:
    """Makes prompts from pieces: words, or token ids.

    `words_per_token` and `overhead` (tokens that the server adds to every prompt, like a chat template) come from
    `calibrate`. With `ids` set, prompts are token ids from that range instead.
    """

    words_per_token: float = 1.0
    overhead: float = 0.0
    ids: range | None = None
    _texts: dict[str, list[str]] = field(default_factory=dict)

    def calibrate(self, few: tuple[int, int], many: tuple[int, int]) -> None:
        """Learn from two prompts, each as (words, tokens that the server counted)."""
        words, tokens = many[0] - few[0], many[1] - few[1]
        if words > 0 and tokens > 0:
            self.words_per_token = words / tokens
            self.overhead = max(0.0, few[1] - few[0] / self.words_per_token)

    def words(self, key: str, count: int) -> str:
        """`count` words determined by `key`."""
        known = self._texts.get(key, [])
        if len(known) < count:
            # Always drawn from the start, so that a shorter text is a prefix of a longer one.
            rng = random.Random(key)
            known = [_WORDS[int(rng.random() * len(_WORDS))] for _ in range(count)]
            if len(self._texts) > 4096:  # pieces of one request are used once; don't keep them all
                self._texts.clear()
            self._texts[key] = known
        return " ".join(known[:count])

    def text(self, pieces: Sequence[Piece], *, first: bool = True) -> str:
        """The pieces as text of about as many tokens; `first` subtracts the tokens that the server adds."""
        texts: list[str] = []
        spare = self.overhead if first else 0.0
        for piece in reversed(pieces):  # the last piece is not shared; shared pieces keep their length
            cut = min(spare, piece.tokens - 1.0)
            spare -= cut
            texts.append(self.words(piece.key, max(1, round((piece.tokens - cut) * self.words_per_token))))
        return " ".join(reversed(texts))

    def token_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """The pieces as token ids, exactly as many as requested."""
        assert self.ids is not None
        found: list[int] = []
        for piece in pieces:
            rng = random.Random(piece.key)
            found += [self.ids[int(rng.random() * len(self.ids))] for _ in range(piece.tokens)]
        return found
