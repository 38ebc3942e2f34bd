"""Log-probabilities of tokens, as samplers report them and answers carry them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from quire import records


@records.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position: natural-log probability under the raw logits, and rank from 1."""

    token_id: int
    logprob: float
    rank: int


# The chosen token first, then the N most likely in falling order (the chosen one may appear again).
PositionLogprobs = list[TokenLogprob]


class LogprobTable(Sequence[PositionLogprobs]):
    """Logprobs of several positions in 12 bytes per candidate and 12 per position; entries are created when read.

    `ids` and `values` hold the candidates of all positions, `ends` the end of each position, `ranks` the rank of the
    chosen token of each position; the likely ones after it have the ranks 1, 2, …
    """

    __slots__ = ("ends", "ids", "ranks", "values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ids: bytes = b"", values: bytes = b"", ranks: bytes = b"", ends: bytes = b"") -> None:
        """Empty, or of the bytes of its arrays. Raises ValueError for incomplete numbers."""
        self.ids, self.values = array("i", ids), array("d", values)
        self.ends, self.ranks = array("q", ends), array("i", ranks)

    @classmethod
    def of(cls, positions: Iterable[PositionLogprobs]) -> LogprobTable:
        """The same positions as a table."""
        if isinstance(positions, LogprobTable):
            return positions
        table = cls()
        for position in positions:
            ids, values = [token.token_id for token in position], [token.logprob for token in position]
            table.add(ids, values, position[0].rank)
        return table

    def add(self, ids: Iterable[int], values: Iterable[float], rank: int) -> None:
        """Append a position: the chosen token and the likely ones, and the rank of the chosen one."""
        self.ids.extend(ids)
        self.values.extend(values)
        self.ranks.append(rank)
        self.ends.append(len(self.ids))

    def extend(self, other: LogprobTable) -> None:
        """Append the positions of another table."""
        before = len(self.ids)
        self.ids += other.ids
        self.values += other.values
        self.ranks += other.ranks
        self.ends += array("q", [before + end for end in other.ends]) if before else other.ends

    def chosen(self) -> Iterator[float]:
        """The log-probability of the chosen token of each position."""
        if len(self.values) == len(self.ends):
            return iter(self.values)
        return (self.values[self.ends[place - 1] if place else 0] for place in range(len(self.ends)))

    def mean(self) -> float:
        """Mean log-probability of the chosen tokens of all positions."""
        return sum(self.chosen()) / len(self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> LogprobTable: ...
    def __getitem__(self, at: int | slice) -> PositionLogprobs | LogprobTable:
        if isinstance(at, slice):
            return self._part(*at.indices(len(self)))
        place = at + len(self) if at < 0 else at
        begin, end = self.ends[place - 1] if place else 0, self.ends[place]
        ids, values = self.ids[begin:end], self.values[begin:end]
        likely = map(TokenLogprob, ids[1:], values[1:], range(1, end - begin))
        return [TokenLogprob(ids[0], values[0], self.ranks[place]), *likely]

    def _part(self, start: int, stop: int, step: int) -> LogprobTable:
        if step != 1:
            raise ValueError("a LogprobTable can be sliced only without steps")
        part, stop = LogprobTable(), max(start, stop)
        begin, end = (self.ends[i - 1] if i else 0 for i in (start, stop))
        part.ids, part.values, part.ranks = (
            self.ids[begin:end],
            self.values[begin:end],
            self.ranks[start:stop],
        )
        part.ends = array("q", [place - begin for place in self.ends[start:stop]])
        return part

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobTable):
            mine = (self.ids, self.values, self.ends, self.ranks)
            return mine == (other.ids, other.values, other.ends, other.ranks)
        return list(self) == other

    def __repr__(self) -> str:
        return repr(list(self))
