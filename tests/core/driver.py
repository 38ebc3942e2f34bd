"""Drives a scheduler with the paged worker and checks every promise after every step."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from quire.cache_kinds import StateGroup
from quire.core.cached_prefix import BlockNode
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import BlockTable, Sequence, Status
from quire.objectives import ServiceTerms
from quire.types import (
    NO_BLOCK,
    SOFT_DIGEST_BYTES,
    FinishReason,
    Request,
    SamplingParams,
    SchedulerOutput,
    SeqEvent,
    SoftSpan,
    StepOutput,
    TokenIds,
)

from .host_tier import HostTier
from .paged_worker import PagedWorker, first_hash, generate_alone, prefix_hashes


def digest_of(name: str) -> bytes:
    """Of an image of that name."""
    return name.encode().ljust(SOFT_DIGEST_BYTES)


def seen_in(key: bytes, size: int) -> list[object]:
    """What a model computes of a block with that key."""
    mark = struct.calcsize("<qq") + SOFT_DIGEST_BYTES
    marks = [key[at : at + mark] for at in range(4 * size, len(key), mark)]
    found: list[object] = list(array("i", key[: 4 * size]))
    for start, length, digest in ((*struct.unpack("<qq", mark[:16]), mark[16:]) for mark in marks):
        for place in range(max(0, start), min(size, start + length)):
            found[place] = zlib.crc32(digest), place - start
    return found


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class Driver:
    """Every request gets a seed of its own, by which the worker knows its namespace."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        burst: int = 1,
        failing: frozenset[int] = frozenset(),
        tier: HostTier | None = None,
        kind: type[Scheduler] = Scheduler,
        late: float = 0.0,
    ) -> None:
        self.config = config
        self.tier = tier
        self.scheduler = kind(config, tier=tier)
        caches = self.scheduler._blocks.caches
        caches.now, caches.clock = 0.0, lambda: float(self.steps)  # a second a step
        self.requests: list[Request] = []
        self.samples: dict[tuple[str, int], Sample] = {}
        self.worker = PagedWorker(
            config, self.requests.__getitem__, tier, burst, lambda new: new.seed in failing, late
        )
        self.failing = failing
        self.steps = 0
        self.flights: deque[tuple[SchedulerOutput, StepOutput]] = deque()
        self.wasted: Counter[Sequence] = Counter()
        self.filling: set[int] = set()  # blocks, as far as the scheduler has heard
        self.reached: dict[BlockTable, int] = {}  # position up to which a running sequence was to compute

    def add(
        self,
        prompt: list[int],
        *,
        priority: int = 0,
        namespace: str = "",
        tenant: str = "",
        eos: tuple[int, ...] = (),
        stepwise: bool = True,
        soft: Iterable[tuple[int, int, str]] = (),
        negative: Sequence_[int] = (),
        service_class: int = 0,
        **params: object,
    ) -> Request:
        index = len(self.requests)
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            params=SamplingParams(seed=index, guidance_scale=2 if negative else 1, **params),  # type: ignore[arg-type]
            arrival=float(index),
            priority=priority,
            namespace=namespace,
            terms=ServiceTerms(service_class=service_class),
            tenant=tenant,
            eos_token_ids=eos,
            stepwise=stepwise or bool(negative),
            negative_prompt=TokenIds(negative) if negative else None,
            soft_tokens=tuple(SoftSpan(start, length, digest_of(name)) for start, length, name in soft),
        )
        self.scheduler.add(request)
        self.requests.append(request)
        for sample in range(request.params.n):
            self.samples[request.request_id, sample] = Sample()
        self.scheduler.audit()
        return request

    def abort(self, index: int) -> None:
        self.take(self.scheduler.abort(f"r{index}"))
        self.scheduler.audit()

    def finish(self, index: int, sample: int) -> None:
        event = self.scheduler.finish(f"r{index}", sample, FinishReason.STOP)
        self.take([event] if event else [])
        self.scheduler.audit()

    def step(self) -> int:
        """Start a step, and complete steps until one less than the maximum is in flight."""
        rows = self.start()
        while len(self.flights) >= self.config.steps_in_flight:
            self.settle()
        return rows

    def start(self) -> int:
        """Schedule and run a step; how many rows it had. The oldest in flight is given back first to make room."""
        scheduler = self.scheduler
        if len(self.flights) == self.config.steps_in_flight:
            self.settle()
        had_work = scheduler.has_work()
        out = scheduler.schedule()
        scheduler.audit()
        self.filling.update(move.block for move in out.moves if move.fill)
        self.check_filling()
        self.check_waste(out)
        if out.scheduled:
            self.check_counts(out)
        else:
            assert scheduler._flights or self.filling or not had_work
        self.flights.append((out, self.worker.run(out)))
        self.steps += 1
        return len(out.scheduled)

    def settle(self) -> None:
        """Give back the oldest step in flight."""
        scheduler = self.scheduler
        out, result = self.flights.popleft()
        seqs = scheduler._flights[0].seqs if out.scheduled else []
        ended = [seq for seq in seqs if seq.status is not Status.RUNNING]
        before = scheduler.wasted_rows
        self.filling.difference_update(result.filled)
        self.take(scheduler.update(out, result))
        self.check_filling()
        assert scheduler.wasted_rows == before + len(ended)
        self.wasted.update(seq for seq in ended if seq.status is Status.ENDED)
        assert max(self.wasted.values(), default=0) <= self.config.steps_in_flight
        scheduler.audit()

    def check_filling(self) -> None:
        """Blocks being filled are held, and cannot be found."""
        pool = self.scheduler._blocks.pool
        for block in self.filling:
            assert pool._references[block] == 1
            assert not pool._published[block]

    def check_waste(self, out: SchedulerOutput) -> None:
        """Paging wastes less than a block a sequence: none is taken before a step computes up to it.

        One of a pair may have a block for its last known token, which it computes in one step with its partner.
        """
        scheduler = self.scheduler
        seqs = scheduler._flights[-1].seqs if out.scheduled else []
        ends = {
            seq.table: row.start + len(row.token_ids) for row, seq in zip(out.scheduled, seqs, strict=True)
        }
        before = self.reached
        self.reached = {}
        for seq in scheduler._running:
            table = seq.table
            reached = max(seq.computed, before.get(table, 0), ends.get(table, 0))
            self.reached[table] = reached
            needed = reached if seq.partner is None else max(reached, len(seq.tokens))
            assert table.capacity - needed < self.config.block_size, "a block is taken too early"

    def check_counts(self, out: SchedulerOutput) -> None:
        scheduler = self.scheduler
        counts = scheduler.step_counts
        assert counts.prefill_tokens + counts.decode_tokens == out.num_tokens
        rows = list(zip(out.scheduled, scheduler._flights[-1].seqs, strict=True))
        drafts = sum(row.drafts for row in out.scheduled)
        assert drafts <= self.config.max_draft_tokens
        assert counts.decode_tokens == drafts + sum(
            len(row.token_ids) - row.drafts == 1 and row.start >= seq.prompt_len for row, seq in rows
        )
        ends = [
            row.start + len(row.token_ids) - (row.drafts - row.depth if row.depth else 0) for row, _ in rows
        ]
        assert all(row.depth <= row.drafts for row, _ in rows)
        assert all(end < seq.limit for end, (_, seq) in zip(ends, rows, strict=True))
        assert counts.context_tokens == sum(ends)

    def drain(self) -> None:
        self.run_out()
        self.check_end()

    def run_out(self, most_steps: int = 20_000) -> None:
        while self.scheduler.has_work():
            self.step()
            assert self.steps < most_steps
        while self.flights:
            self.settle()

    def take(self, events: list[SeqEvent]) -> None:
        for event in events:
            sample = self.samples[event.request_id, event.sample_index]
            assert sample.reason is None, "an event after the final one"
            assert len(event.logprobs or event.new_token_ids) == len(event.new_token_ids)
            sample.tokens.extend(event.new_token_ids)
            sample.prompt_logprobs.extend(entry[0].token_id for entry in event.prompt_logprobs or ())
            sample.reason = event.finish_reason
            sample.stop_token_id = event.stop_token_id
            sample.cached_tokens = event.cached_tokens

    def check_end(self) -> None:
        """Nothing runs: every sample ended once, with the tokens it gives alone, and no block is lost."""
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.blocks_used == 0
        if not self.config.enable_prefix_caching:
            assert scheduler.blocks_cached == 0
        for request in self.requests:
            for index in range(request.params.n):
                self.check_sample(request, index)
        self.check_cache()
        out = scheduler.schedule()
        assert not out.scheduled
        self.worker.run(out)
        assert not self.worker.slots, "a worker slot was never released"
        scheduler.clear_prefix_cache()
        assert scheduler.blocks_cached == 0
        scheduler.audit()

    def cached(self) -> dict[tuple[str, tuple[bytes, ...]], BlockNode]:
        """Every node of the prefix caches, by its domain and the keys of all blocks of its prefix."""
        found: dict[tuple[str, tuple[bytes, ...]], BlockNode] = {}
        for tenant, cache in self.scheduler._blocks.caches._caches.items():
            for name, root in cache._tree._top.children.items():
                prefixes: dict[BlockNode, tuple[bytes, ...]] = {root: ()}
                for node in cache._tree.nodes():
                    if node.parent in prefixes:
                        prefix = prefixes[node] = (*prefixes[node.parent], node.key)
                        found[repr((tenant, name.decode().removeprefix("shared:"))), prefix] = node
        return found

    def check_cache(self) -> None:
        """What can be found is what the executor holds."""
        size = self.config.block_size
        for (where, prefix), node in self.cached().items():
            tokens = [token for key in prefix for token in seen_in(key, size)]
            hashes = prefix_hashes(tokens, first_hash(where))
            for group, block in enumerate(node.value):
                of_states = isinstance(self.config.groups[group], StateGroup)
                for place in range(size if block != NO_BLOCK else 0):
                    last = hashes[-1 if of_states else len(tokens) - size + place]
                    assert self.worker.cells[block, place] == (group, last), f"block {block} is another's"
        if self.tier is not None:
            nodes = [node for _, node in self.cached().items()]
            found = {(node.digest, g): 1 for node in nodes for g, b in enumerate(node.value) if b != NO_BLOCK}
            assert found == self.tier.findable, "what the tier has heard is not what can be found"

    def check_sample(self, request: Request, index: int) -> None:
        sample = self.samples[request.request_id, index]
        assert sample.reason is not None
        tokens, reason, stop = generate_alone(request, index, self.config.length_limit(request))
        if (request.params.seed or 0) in self.failing and sample.reason is FinishReason.ERROR:
            assert not sample.tokens
            return
        if (sample.tokens, sample.reason) == (tokens, reason):
            assert sample.stop_token_id == stop
            if request.params.prompt_logprobs is not None and index == 0:
                first = max(1, request.params.prompt_logprobs_start)
                assert sample.prompt_logprobs == list(request.prompt_token_ids)[first:]
        else:  # cut short from outside, after a prefix of the same tokens
            assert sample.reason in {FinishReason.ABORT, FinishReason.STOP}
            assert sample.tokens == tokens[: len(sample.tokens)]
            assert sample.stop_token_id is None
