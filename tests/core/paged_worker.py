"""A worker without a model, over a real paged memory.

A cell of the memory remembers *which* token prefix was written into it, for which cache group. A row writes
its cells, then every cell its queries would read must hold the right prefix: wrong sharing, a block freed
too early and a stale block all show. The next token is a hash of the whole prefix, so it is right only if
the prefix is.

All cells of a block of states remember one prefix, the last that was written. A row first looks for the prefix before
its first token, as it changes states in place.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cache_kinds import StateGroup
from quire.core.scheduler_config import SchedulerConfig
from quire.logprobs import LogprobTable, TokenLogprob
from quire.types import (
    DRAFT,
    NEXT_TOKEN,
    FinishReason,
    NewSeq,
    Request,
    ScheduledSeq,
    SchedulerOutput,
    SoftSpan,
    StepOutput,
)

from .host_tier import HostTier

VOCAB = 11  # small, so that stop ids are hit


def domain(request: Request) -> str:
    """The namespace of a request's prefixes, which no other request shares."""
    return repr((request.tenant, request.namespace))


def seen(tokens: Sequence[int], spans: Sequence[SoftSpan]) -> list[object]:
    """What a model computes: where tokens are soft, what they stand for in place of their placeholders."""
    found: list[object] = list(tokens)
    for span in spans:
        for position in range(span.start, min(span.end, len(found))):
            found[position] = (
                zlib.crc32(span.digest),
                position - span.start,
            )  # hash() of bytes differs by process
    return found


def prefix_hashes(tokens: Sequence[object], last: int) -> list[int]:
    """Of every prefix of `tokens` after what `last` is the hash of."""
    hashes = []
    for token in tokens:
        last = hash((last, token))
        hashes.append(last)
    return hashes


def first_hash(namespace: str) -> int:
    return zlib.crc32(namespace.encode())


def next_token(last_hash: int, seed: int, sample_index: int) -> int:
    return hash((last_hash, seed, sample_index)) % VOCAB


def generate_alone(request: Request, index: int, limit: int) -> tuple[list[int], FinishReason, int | None]:
    """What sample `index` gives with nothing else running and no cache: the specification, in ten lines."""
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    tokens = list(request.prompt_token_ids)
    last = prefix_hashes(seen(tokens, request.soft_tokens), first_hash(domain(request)))[-1]
    while True:
        token = next_token(last, (params.seed or 0) % 2**64, index)
        made = len(tokens) - len(request.prompt_token_ids)
        tokens.append(token)
        last = hash((last, token))
        if token in stops and made >= params.min_tokens:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP, token
        if len(tokens) >= limit:
            return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH, None


@dataclass
class Slot:
    new: NewSeq
    namespace: str
    tokens: list[int]
    tables: list[list[int]]
    computed: int
    hashes: list[int] = field(default_factory=list)
    broken: bool = False  # it has failed
    guessed: list[int] = field(default_factory=list)  # hashes of the drafts that its row runs

    def __post_init__(self) -> None:
        self.extend([])

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        last = self.hashes[-1] if self.hashes else first_hash(self.namespace)
        self.hashes += prefix_hashes(seen(self.tokens, self.new.soft_tokens)[len(self.hashes) :], last)


class PagedWorker:
    """Runs steps. `request_of(seed)` is a sequence's request, `burst` tokens are made a sampling row past its
    drafts, `fails(new)` says whose logits go bad, a share `late` of the rows samples nothing. With
    `config.max_draft_tokens` it proposes drafts, some of them wrong."""

    def __init__(
        self,
        config: SchedulerConfig,
        request_of: Callable[[int], Request],
        tier: HostTier | None = None,
        burst: int = 1,
        fails: Callable[[NewSeq], bool] = lambda new: False,
        late: float = 0.0,
    ) -> None:
        self.config = config
        self.request_of = request_of
        self.tier = tier
        self.burst = burst
        self.fails = fails
        self.late = 0.0 if any(isinstance(group, StateGroup) for group in config.groups) else late
        self.late_rows = 0
        self.slots: dict[int, Slot] = {}
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.computed_tokens = self.copied_tokens = 0
        self.accepted_drafts = 0
        self.accepted_branches = 0  # of trees, along other paths than the first drafts
        self.random = random.Random(config.max_draft_tokens)

    def run(self, out: SchedulerOutput) -> StepOutput:
        for seq_id in out.gone:
            del self.slots[seq_id]
        size, starts = self.config.block_size, {row.seq_id: row.start for row in out.scheduled}
        for new in out.new:
            assert new.seq_id not in self.slots
            tables = [list(blocks) for blocks in new.blocks]
            namespace = domain(self.request_of(new.seed))
            start = len(tables[0]) * size
            if self.config.copy_partial and start < starts.get(new.seq_id, start) < start + size:
                self.copied_tokens += starts[new.seq_id] - start
                start = starts[new.seq_id]
            self.slots[new.seq_id] = Slot(new, namespace, list(new.token_ids), tables, start)
        assert len({row.seq_id for row in out.scheduled}) == len(out.scheduled) <= self.config.max_num_seqs
        assert out.num_tokens <= self.config.max_num_batched_tokens
        filled = {} if self.tier is None else self.tier.move(self.cells, out.moves)
        for source, target in out.copies:
            assert source != target
            for place in range(size):
                self.cells[target, place] = self.cells.get((source, place), (-1, 0))
        for row in out.scheduled:
            if row.depth:
                self.plant(row)
            self.write(row)
        for row in out.scheduled:
            self.read(row)
        result = StepOutput([], [], [], filled=filled)
        made: dict[int, tuple[list[int], bool]] = {}  # by leader: its tokens, and whether it was late
        for i, row in enumerate(out.scheduled):
            slot = self.slots[row.seq_id]
            leader = slot.new.leader
            if leader is None or not row.sample:
                assert row.sample or leader is None or leader not in made
                self.sample(i, row, result)
                made |= {row.seq_id: (result.token_ids[i], i in result.late)} if row.sample else {}
                continue
            tokens, late = made.pop(leader)  # it samples in the same step, before
            result.token_ids.append(tokens[:1])
            result.logprobs.append(None)
            result.prompt_logprobs.append(None)
            slot.extend(tokens)
            if late:
                result.late.add(i)
                slot.computed -= 1
            elif not tokens:
                result.failed[i] = FinishReason.ERROR
        guided = {slot.new.leader for slot in self.slots.values()}
        assert not guided.intersection(made), "a leader has sampled without its follower"
        return result

    def write(self, row: ScheduledSeq) -> None:
        slot, size = self.slots[row.seq_id], self.config.block_size
        end = row.start + len(row.token_ids)
        known = end - row.drafts
        drafts = row.token_ids[known - row.start :]
        assert len(drafts) == row.drafts < len(row.token_ids)
        tree, drafts = row.parents is not None, drafts if row.parents is None else []
        assert row.start == slot.computed
        if row.token_ids == [NEXT_TOKEN]:
            assert self.config.steps_in_flight > 1
            if slot.broken:  # the row is wasted
                slot.extend([0])
        else:
            assert row.token_ids[: known - row.start] == slot.tokens[row.start : known]
        assert row.sample == (known == len(slot.tokens)) >= (row.drafts > 0)
        assert len(row.new_blocks) == len(slot.tables) == len(self.config.groups)
        slot.guessed = prefix_hashes(drafts, slot.hashes[known - 1])
        hashes = slot.hashes[:known] + slot.guessed
        for group, (table, ids) in enumerate(zip(slot.tables, row.new_blocks, strict=True)):
            assert all(0 <= block < self.config.num_blocks for block in ids)
            table.extend(ids)
            if isinstance(self.config.groups[group], StateGroup):
                self.write_states(group, table, row.start, hashes)
                continue
            for p in range(row.start, len(hashes)):
                assert self.tier is None or table[p // size] not in self.tier.filling
                self.cells[table[p // size], p % size] = (group, hashes[p])
            for p in range(known, known + row.depth if tree else known):  # some path or other
                self.cells[table[p // size], p % size] = (group, 0)
        slot.computed = known
        self.computed_tokens += len(row.token_ids)

    def write_states(self, group: int, table: list[int], start: int, hashes: list[int]) -> None:
        size = self.config.block_size
        before = self.cells.get((table[(start - 1) // size], size - 1)) if start else None
        assert not start or before == (group, hashes[start - 1]), f"group {group}: wrong state before {start}"
        for p in range(start, len(hashes)):
            assert self.tier is None or table[p // size] not in self.tier.filling
            self.cells.update({(table[p // size], place): (group, hashes[p]) for place in range(size)})

    def read(self, row: ScheduledSeq) -> None:
        slot, size = self.slots[row.seq_id], self.config.block_size
        hashes = slot.hashes[: slot.computed] + slot.guessed
        for g, group in enumerate(self.config.groups):
            if isinstance(group, StateGroup):
                last = len(hashes) - 1
                assert self.cells.get((slot.tables[g][last // size], 0)) == (g, hashes[last]), "wrong state"
                continue
            first = max(0, row.start - group.window + 1) if group.window else 0
            for p in range(first, len(hashes)):
                cell = self.cells.get((slot.tables[g][p // size], p % size))
                assert cell == (g, hashes[p]), f"sequence {row.seq_id}, group {g}: wrong KV at {p}"

    def sample(self, index: int, row: ScheduledSeq, result: StepOutput) -> None:
        slot = self.slots[row.seq_id]
        wanted = None
        if row.prompt_logprobs:
            last = slot.new.prompt_len - 1
            start = max(row.start, last - slot.new.params.scored_tokens(last + 1))
            wanted = _certain(slot.tokens[start + 1 : min(slot.computed, last) + 1])
        made: list[int] = []
        if row.sample and self.fails(slot.new):
            result.failed[index] = FinishReason.ERROR
            slot.broken = True
        elif row.sample and self.late and self.alone(slot) and self.random.random() < self.late:
            result.late.add(index)
            slot.computed -= 1
            self.late_rows += 1
        elif row.sample:
            made = self.accept(slot, row)
            if self.config.max_draft_tokens and self.alone(slot):
                result.drafts[index] = self.propose(slot)
                if self.random.random() < 0.5:  # a tree, made when its row is about to run
                    result.drafts[index] = [DRAFT] * self.random.randint(1, 9)
                    result.depths[index] = self.random.randint(1, 5)
        result.token_ids.append(made)
        result.logprobs.append(_certain(made) if made else None)
        result.prompt_logprobs.append(wanted)

    def accept(self, slot: Slot, row: ScheduledSeq) -> list[int]:
        """The drafts that are right and the token after them; `burst` tokens after them when all are right."""
        if row.parents is not None:
            return self.accept_path(slot, row)
        drafts = row.token_ids[len(row.token_ids) - row.drafts :]
        right = 0
        burst = self.burst if self.alone(slot) else 1
        made = self.continuation(slot, len(drafts) + burst)
        while right < len(drafts) and made[right] == drafts[right]:
            right += 1
        if right < len(drafts):
            del made[right + 1 :]
        slot.extend(made)
        slot.computed += right
        self.accepted_drafts += right
        return made

    def accept_path(self, slot: Slot, row: ScheduledSeq) -> list[int]:
        """The right path of a tree, in whose place it comes to lie, and `burst` tokens behind it."""
        path = row.path(self.continuation(slot, row.depth))
        made = self.continuation(slot, len(path) + (self.burst if self.alone(slot) else 1))
        known = len(slot.tokens)
        slot.extend(made)
        slot.computed += len(path)
        for group, table in enumerate(slot.tables):
            for p in range(known, slot.computed):
                self.cells[table[p // self.config.block_size], p % self.config.block_size] = (
                    group,
                    slot.hashes[p],
                )
        self.accepted_drafts += len(path)
        self.accepted_branches += path != list(range(1, len(path) + 1))
        return made

    def plant(self, row: ScheduledSeq) -> None:
        """A tree of as many drafts as there is room for, or fewer, with some right path in it."""
        slot, rng = self.slots[row.seq_id], self.random
        right = self.continuation(slot, row.depth)
        depths = [0]
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(rng.randint(0, row.drafts)):
            parent = rng.randint(0, len(tokens))
            depth = depths[parent]
            if depth < row.depth:
                token = right[depth] if rng.random() < 0.6 else rng.randrange(VOCAB)
                tokens.append(token)
                parents.append(parent)
                depths.append(depth + 1)
        row.token_ids[len(row.token_ids) - row.drafts :] = tokens
        row.logits, row.parents = 1 + len(tokens), tuple(parents) if tokens else None

    def alone(self, slot: Slot) -> bool:
        """True when its sequence is in one step at a time."""
        return self.config.steps_in_flight == 1 or self.request_of(slot.new.seed).stepwise  # pairs are

    def propose(self, slot: Slot) -> list[int]:
        """Up to five tokens, each of them the right one in three of four cases."""
        tokens = self.continuation(slot, self.random.randint(0, 5))
        return [token if self.random.random() < 0.75 else self.random.randrange(VOCAB) for token in tokens]

    @staticmethod
    def continuation(slot: Slot, count: int) -> list[int]:
        made: list[int] = []
        last = slot.hashes[-1]
        for _ in range(count):
            made.append(next_token(last, slot.new.seed, slot.new.sample_index))
            last = hash((last, made[-1]))
        return made


def _certain(tokens: Sequence[int]) -> LogprobTable:
    return LogprobTable.of([TokenLogprob(token, 0.0, 1)] for token in tokens)
