"""What accounts and their tags have used: tokens, seconds of steps, and blocks of the KV cache over time.

The time of a step is split by what the cost model says of its rows, so the lines add up to all time of steps whatever
the model's error. A block counts from when it is taken until it is free again: while it is held, for the sequences of
its cache in proportion to their tables, so a shared block is counted once; while it is cached, for the tenant of its
cache. Blocks are taken stock of when a step begins, and before a report: so also when the last step has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.core.sequence import Sequence
from quire.core.usage_line import UsageLine
from quire.objectives import ServiceTerms
from quire.types import ScheduledSeq

MAX_LINES = 4096  # then new tags are counted without the tag: every report has all lines


class UsageBooks:
    """The lines of one scheduler. With one line, a step costs nothing; with more, O(rows)."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str], UsageLine] = {}
        self._weights: dict[UsageLine, float] = {}  # of the step that runs
        self._blocks: dict[UsageLine, float] = {}  # since `_since`
        self._since = 0.0

    @property
    def only(self) -> UsageLine | None:
        """The line of all requests; None with several, or with none yet."""
        return next(iter(self.lines.values())) if len(self.lines) == 1 else None

    def line(self, terms: ServiceTerms) -> UsageLine:
        """The line of a request."""
        return self._line(terms.account, terms.tag)

    def _line(self, account: str, tag: str) -> UsageLine:
        found = self.lines.get((account, tag))
        if found is None and tag and len(self.lines) >= MAX_LINES:
            return self._line(account, "")
        if found is None:
            found = self.lines[account, tag] = UsageLine(account, tag)
        return found

    def weigh(self, rows: Seq[ScheduledSeq], seqs: Seq[Sequence], each: Seq[float]) -> None:
        """A step begins with these rows. `each` are weights of the cost model, in the order of cost_model.FEATURES."""
        weights: dict[UsageLine, float] = {}
        self._weights = weights
        if (only := self.only) is not None:
            weights[only] = 1.0
            return
        step, decode, prompt, context, work, adapters, grammars, drafted = each
        every = step / max(1, len(rows)) + 1e-12
        for row, seq in zip(rows, seqs, strict=True):
            start, drafts, request = row.start, row.drafts, seq.state.request
            tokens = len(row.token_ids) - drafts
            if tokens == 1 and start >= seq.prompt_len:
                cost = decode + context * (start + 1)
            else:
                cost = tokens * (prompt + work * (start + tokens / 2))
            cost += every + drafts * drafted
            if request.adapter:
                cost += adapters
            if request.grammar is not None:
                cost += grammars
            line = seq.state.line
            if line is not None:
                weights[line] = weights.get(line, 0.0) + cost

    def ran(self, seconds: float) -> None:
        """The step that was weighed took so long."""
        total = sum(self._weights.values())
        for line, weight in self._weights.items():
            line.seconds += seconds * weight / total

    def hold(self, caches: PrefixCaches, running: Iterable[Sequence], now: float) -> None:
        """Charge the blocks in use since the last call; from `now` on they are those of `caches`."""
        self.advance(now)
        if (only := self.only) is not None:
            blocks = caches.pool.num_blocks - caches.pool.num_free
            self._blocks = {only: blocks} if blocks else {}
            return
        tables: dict[PrefixCache, dict[UsageLine, int]] = {}
        for seq in running:
            if seq.cache is not None and seq.state.line is not None:
                of = tables.setdefault(seq.cache, {})
                of[seq.state.line] = of.get(seq.state.line, 0) + seq.table.capacity
        found: dict[UsageLine, float] = {}
        for cache in caches.all:
            held, lines = cache.num_blocks - cache.num_cached, tables.get(cache, {})
            total, rest = sum(lines.values()), cache.num_blocks
            if total:
                rest = cache.num_cached
                for line, size in lines.items():
                    found[line] = found.get(line, 0.0) + held * size / total
            if rest:
                owner = self._line(cache.tenant, "")
                found[owner] = found.get(owner, 0.0) + rest
        self._blocks = found

    def advance(self, now: float) -> None:
        """Charge the blocks in use up to `now`."""
        passed, self._since = now - self._since, now
        for line, blocks in self._blocks.items():
            line.block_seconds += blocks * passed
