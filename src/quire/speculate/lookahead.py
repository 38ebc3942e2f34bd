"""Lookahead decoding: guesses at several places ahead become better step by step, and are tried later.

Y. Fu, P. Bailis, I. Stoica, H. Zhang, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (2024).
There is no model that drafts. A step runs one tree of drafts for a sequence:

    t ─ a ─ b         t is the last known token; a window of three columns, t a b, guesses at the next places
    │   │   └ 2b      each column goes on by what was drawn for it in steps before (n-grams of three tokens: one more)
    │   └ 2a
    ├ 2t
    └ x ─ y           guesses that began with t in the pool of n-grams

What is likeliest behind 2t, 2a, 2b makes n-grams t 2t ., a 2a ., b 2b . for the pool; then 2t, 2a, 2b are the window
of the next step (Jacobi iteration). Every n-gram of the text is in the pool too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from quire.config.speculative import SpeculativeConfig
from quire.records import dataclass
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.types import NewSeq

MOST_GRAMS = 1024  # in the pool of a sequence
GRAM_BYTES = 384  # of one of the longest, with its place in the pool; 271 measured

Gram = tuple[int, ...]


class _Pool:
    """N-grams by their first token, the latest last; up to `guesses` of each, and those used least recently go."""

    def __init__(self, guesses: int) -> None:
        self._guesses, self._size = guesses, 0
        self._grams: dict[int, list[Gram]] = {}

    def add(self, first: int, rest: Gram) -> None:
        grams = self._grams.pop(first, [])
        self._size -= len(grams)
        if rest in grams:
            grams.remove(rest)
        grams.append(rest)
        del grams[: -self._guesses]
        self._grams[first] = grams
        self._size += len(grams)
        while self._size > MOST_GRAMS:
            self._size -= len(self._grams.pop(next(iter(self._grams))))

    def behind(self, first: int) -> list[Gram]:
        """The latest first."""
        return self._grams.get(first, [])[::-1]


@dataclass(slots=True)
class _Text:
    """A sequence: its last tokens, and its window. `columns` has for each column what it goes on by, and before that,
    but in the first, its guess. `run` are the drafts of the tree that was proposed last at which columns end.
    """

    last: list[int]
    columns: list[list[int]]
    pool: _Pool
    chance: random.Random
    drafts: int = 0
    run: tuple[int, ...] = ()


class LookaheadProposer:
    """`drawn` has, by sequence, what is likeliest at every position of the tree in the last step."""

    GRADES = 1
    MOST_SECONDS = 0.05
    passes: PassCosts | None = None

    def __init__(self, chosen: SpeculativeConfig, drawn: Mapping[int, Sequence[int]]) -> None:
        self._window, self._ngram, self._guesses = (
            chosen.lookahead_window, chosen.lookahead_ngram, chosen.lookahead_guesses,
        )  # fmt: skip
        self._drafts, self._drawn = chosen.lookahead_drafts, drawn
        self._texts: dict[int, _Text] = {}

    @staticmethod
    def memory_bound(sequences: int) -> int:
        """The most bytes held for so many sequences."""
        return sequences * MOST_GRAMS * GRAM_BYTES

    def start(self, new: NewSeq) -> None:
        known = new.token_ids[-MOST_GRAMS:]
        text = _Text([], [], _Pool(self._guesses), random.Random(len(new.token_ids)))
        text.columns = [
            [text.chance.choice(known) for _ in range(self._ngram - 1)] for _ in range(self._window)
        ]
        self._texts[new.seq_id] = text
        self._append(text, known)

    def stop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts[seq_id]
        drawn = self._drawn.get(seq_id, ())
        if text.run and len(drawn) == 1 + text.drafts:  # all of the tree was run
            self._advance(text, [drawn[draft] for draft in text.run], len(tokens))
        text.run = ()
        self._append(text, tokens)

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        deepest = max(self._window + self._ngram - 3, self._ngram - 1)
        offer = Offer(min(most, self._drafts), 0, depth=deepest)
        return dict.fromkeys(seq_ids, offer)

    def propose(self, rooms: Mapping[int, Room]) -> Mapping[int, list[int] | DraftTree]:
        return {seq_id: self._tree(self._texts[seq_id], room.drafts) for seq_id, room in rooms.items()}

    def _tree(self, text: _Text, count: int) -> DraftTree:
        """Guesses first: they are what a smaller tree keeps."""
        tokens: list[int] = []
        parents: list[int] = []
        numbers: dict[tuple[int, int], int] = {}

        def grow(at: int, path: Sequence[int]) -> int:
            for token in path:
                if (found := numbers.get((at, token))) is None:
                    tokens.append(token)
                    parents.append(at)
                    found = numbers[at, token] = len(tokens)
                at = found
            return at

        for guess in text.pool.behind(text.last[-1]):
            grow(0, guess)
        trunk, ends = 0, []
        for number, column in enumerate(text.columns):
            trunk = grow(trunk, column[:1]) if number else 0
            ends.append(grow(trunk, column[1:]))
        text.run, text.drafts = tuple(ends), len(tokens)
        if len(tokens) > count:
            text.run = ()
        return DraftTree(tokens[:count], tuple(parents[:count]))

    def _advance(self, text: _Text, drawn: list[int], passed: int) -> None:
        """The next window: each column is one token further. Those that the text has passed give way to new ones."""
        for number, (column, token) in enumerate(zip(text.columns, drawn, strict=True)):
            gram = (*column, token) if number else (text.last[-1], *column[1:], token)
            text.pool.add(gram[0], gram[1:])
            column.append(token)
            del column[0]
        del text.columns[: passed - 1]
        while len(text.columns) < self._window:
            text.columns.append([text.chance.choice(drawn) for _ in range(self._ngram - 1)])

    def _append(self, text: _Text, tokens: list[int]) -> None:
        last = text.last + tokens
        for end in range(max(self._ngram, len(text.last) + 1), len(last) + 1):
            gram = tuple(last[end - self._ngram : end])
            text.pool.add(gram[0], gram[1:])
        text.last = last[-self._ngram + 1 :]
