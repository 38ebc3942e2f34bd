"""Beam search: which sequences of a request go on, and when the search ends.

The definition is that of transformers' `generate(num_beams=width, do_sample=False)`:

1. Every running sequence is continued with its likeliest tokens; all continuations are ranked by the sum of their
   log-probabilities.
2. Of the `width` best continuations, those that end with a stop token, or at the largest length, are finished.
   The `width` best finished sequences of all steps are kept.
3. The `width` best of the other continuations go on.

It depends on nothing but the log-probabilities, so it finds the same sequences whatever else is running.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from quire.beams import Beams
from quire.logprobs import LogprobTable
from quire.records import dataclass
from quire.types import MAX_LOGPROBS, PARAMETERS, FinishReason, Request, RequestError, SamplingParams

MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0
# Parameters that say how long answers are, when they end and what is shown; the last two are of a draw, and there is
# none. What others ask for would not happen.
_TAKEN = {
    "n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "include_stop_str_in_output",
    "skip_special_tokens", "temperature", "seed",
}  # fmt: skip
_REFUSED = {name: known.default for name, known in PARAMETERS.items() if name not in _TAKEN}


def check_beams(request: Request) -> None:
    """Raise RequestError naming the field when the beam search of a request has a value out of range, or when the
    request asks for something that a beam search has not."""
    beams, params = request.beams, request.params
    assert beams is not None
    check_ranges(beams)
    if params.n > beams.width:
        raise RequestError("n", f"{params.n} answers are more than the {beams.width} beams (beam_width)")
    stops = len(stop_ids(request))
    if beams.width + stops > MAX_LOGPROBS:
        raise RequestError(
            "stop_token_ids",
            f"{stops} stop tokens and {beams.width} beams (beam_width) exceed the limit of {MAX_LOGPROBS} together",
        )
    for name, default in _REFUSED.items():
        value = getattr(params, name)
        value = tuple(value) if isinstance(value, list) else value
        if value not in (default, ()):
            raise RequestError(name, "not supported with a beam search")
    for field, given in (
        ("prediction", request.prediction),
        ("structured", request.grammar),
        ("negative_prompt", request.negative_prompt),
    ):
        if given:
            raise RequestError(field, "not supported with a beam search")


def check_ranges(beams: Beams) -> None:
    """Raise RequestError naming the field for a value out of range."""
    if not 1 <= beams.width <= MAX_BEAM_WIDTH:
        raise RequestError("beam_width", f"{beams.width} is not an integer in [1, {MAX_BEAM_WIDTH}]")
    if not abs(beams.length_penalty) <= MAX_LENGTH_PENALTY:
        limit = f"[-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        raise RequestError("length_penalty", f"{beams.length_penalty!r} is not a number in {limit}")
    if beams.early_stopping not in (True, False, "never"):
        raise RequestError("early_stopping", f"{beams.early_stopping!r} is not true, false or 'never'")


def stop_ids(request: Request) -> frozenset[int]:
    """The tokens that end a sequence of a request."""
    return frozenset(
        [*request.params.stop_token_ids, *(() if request.params.ignore_eos else request.eos_token_ids)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A running or finished sequence: its output, the log-probabilities of its tokens and their sum.

    `score` is that of a finished one; `last` is the position of its last token, with the likeliest tokens there.
    """

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    last: Position | None = None
    score: float = -math.inf
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """Log-probabilities at one position of a sequence, the chosen token's first; sequences share positions."""

    before: Position | None
    ids: tuple[int, ...]
    values: tuple[float, ...]
    rank: int


class BeamSearch:
    """The sequences of one request. `running` are those that go on, the best first, all of the same length, and
    `finished` the best of the others; the search has ended when none runs.

    `logprobs` is how many of the likeliest tokens are kept for each position, None for not even the chosen ones.
    """

    def __init__(self, beams: Beams, params: SamplingParams, stops: Collection[int], max_tokens: int) -> None:
        self._beams, self._stops = beams, stops
        self._max_tokens, self._min_tokens, self._logprobs = max_tokens, params.min_tokens, params.logprobs
        self.running = [Beam()]
        self.finished: list[Beam] = []

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens `advance` needs of each sequence: stop tokens may be among them."""
        return self._beams.width + len(self._stops)

    def advance(self, tables: Sequence[LogprobTable]) -> list[int]:
        """Continue the sequences; `tables[i]` has the likeliest next tokens of running[i], at its only position.

        Returns the number of the parent of each sequence that goes on: none at the end of the search.
        """
        width, length = self._beams.width, len(self.running[0].tokens) + 1
        last, going, parents = length == self._max_tokens, list[Beam](), list[int]()
        for place, (total, parent, rank, token) in enumerate(self._ranked(tables, length)):
            stops = token in self._stops
            if stops or last:
                if place < width:
                    score = total / math.pow(length, self._beams.length_penalty)
                    reason = FinishReason.STOP if stops else FinishReason.LENGTH
                    self.finished.append(self._next(tables, parent, rank, total, score, reason))
            elif len(going) < width:
                going.append(self._next(tables, parent, rank, total))
                parents.append(parent)
            elif place >= width:
                break
        self.finished.sort(key=lambda beam: -beam.score)  # of equal ones the earlier stays ahead
        del self.finished[width:]
        if going and self._is_settled(going[0].total, length):
            going, parents = [], []
        self.running = going
        return parents

    def _ranked(self, tables: Sequence[LogprobTable], length: int) -> list[tuple[float, int, int, int]]:
        """All continuations, the best first: sum of log-probabilities, parent, rank at the parent, token."""
        found = [
            (beam.total + value, parent, rank, token)
            for parent, (beam, table) in enumerate(zip(self.running, tables, strict=True))
            for rank, (token, value) in enumerate(zip(table.ids[1:], table.values[1:], strict=True), 1)
            if value > -math.inf and (length > self._min_tokens or token not in self._stops)
        ]
        found.sort(key=lambda one: -one[0])
        return found

    def _next(
        self, tables: Sequence[LogprobTable], parent: int, rank: int, total: float,
        score: float = -math.inf, reason: FinishReason | None = None,
    ) -> Beam:  # fmt: skip
        beam, ids, values = self.running[parent], tables[parent].ids, tables[parent].values
        last = None
        if self._logprobs is not None:
            likely = slice(1, 1 + self._logprobs)
            last = Position(beam.last, (ids[rank], *ids[likely]), (values[rank], *values[likely]), rank)
        return Beam((*beam.tokens, ids[rank]), total, last, score, reason)

    def _is_settled(self, best: float, length: int) -> bool:
        """Whether enough sequences have finished, and the best running one will not displace any."""
        beams = self._beams
        if len(self.finished) < beams.width:
            return False
        if beams.early_stopping is True:
            return True
        far = beams.early_stopping == "never" and beams.length_penalty > 0
        longest = self._max_tokens if far else length
        return best / math.pow(longest, beams.length_penalty) <= self.finished[-1].score


def logprobs_of(beam: Beam) -> LogprobTable | None:
    """The log-probabilities of a sequence, position by position; None where they were not kept."""
    if beam.last is None:
        return None
    table = LogprobTable()
    for position in reversed(list(_positions(beam.last))):
        table.add(position.ids, position.values, position.rank)
    return table


def _positions(last: Position) -> Iterator[Position]:
    at: Position | None = last
    while at is not None:
        yield at
        at = at.before
