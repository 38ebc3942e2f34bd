"""What a scheduler holds and shows of it, and how its settings change while it runs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from quire.core.block_pool import AuditError
from quire.core.cached_prefix import PrefixCacheStats
from quire.core.capacity import peak_blocks
from quire.core.cost_model import StepFeatures
from quire.core.fetching import Fetches
from quire.core.live_requests import Requests
from quire.core.policy import Policies
from quire.core.prefix_cache import PrefixCaches
from quire.core.resumed import Resumed
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, Status
from quire.core.sequence_blocks import SequenceBlocks
from quire.core.service_estimates import ServiceEstimates, TokenCosts
from quire.core.step_plan import (
    Blocked,
    Flight,
    StepCounts,
)
from quire.core.streams import StepLimits
from quire.core.tier import Tier
from quire.core.usage_books import UsageBooks
from quire.core.waiting_queues import Counters, make_queue
from quire.types import (
    ScheduledSeq,
)

_by_rank = attrgetter("rank")

_SEEN = 256  # sequences that wait


class SchedulerState:
    """Sequences, the blocks they hold, and their order. `rng` draws the seed of requests without one, `costs` is what
    tokens cost, for policies that go by it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rng: random.Random | None = None,
        tier: Tier | None = None,
        costs: TokenCosts | None = None,
    ) -> None:
        if tier is not None and not config.enable_prefix_caching:
            raise ValueError("tier: needs prefix caching, which is off")
        self.config = config
        self.caps = StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_draft_tokens)
        self.limits = replace(self.caps)  # a controller sets it, up to the caps
        self.usage = UsageBooks()
        self.step_counts = StepCounts()
        self.step_features: StepFeatures = ()  # of the last step, for the cost model
        self.step_drafts = 0  # of the last step
        self.num_preemptions = 0
        self.turns = True  # steps may share the sequences, if they take turns
        self.wasted_rows = 0  # rows whose sequence ended or was preempted while they ran
        self._rng, self._blocks = rng or random.Random(), SequenceBlocks(config, tier)
        self.part = self._blocks.part  # a replay has what the log says
        self.pool = self._blocks.pool  # to look at, and for what watches its top
        caches = self._blocks.caches
        self.policies = config.policies()
        self._by_arrival = self.policies.by_arrival
        self.estimates, self.counters = ServiceEstimates(costs), Counters()
        fetches = None if tier is None else Fetches(caches, config, tier, self.estimates.costs)
        self._fetches = self.fetches = fetches
        queue = make_queue(self.policies, self.estimates, self.counters, caches, config.block_size)
        self._requests = Requests(config, queue, self.policies, self.estimates)
        self._running: list[Sequence] = []  # by rank, so the last one is preempted first
        self._resumed = Resumed(self._blocks)
        self._waiting = self._requests.waiting
        self._gone: list[int] = []
        self._step = 0
        self._flights: deque[Flight] = deque()  # steps with rows, oldest first
        self._blocked: Blocked | None = None
        # Shared by every row that needs no block: readers never change a row.
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in config.groups)
        self._none_ahead: dict[Sequence, ScheduledSeq] = {}
        self._none_passed: Collection[int] = ()
        self._had_turn: Collection[int] = ()  # ids of sequences in the last step that shared
        self._next_floors: dict[str, int] | None = None  # that wait for a request to end
        self._drafts_wait = False  # of some sequence, or in rows in flight
        self._all_decode = False  # no running sequence has tokens of its prompt left to compute

    @property
    def running(self) -> Seq[Sequence]:
        """The running sequences by rank: to look at, not to change."""
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not running: queued, preempted, or waiting for a sibling's prompt or for blocks."""
        return self._requests.num_waiting + self._num_fetching

    def behind_longer(self) -> int:
        """How many waiting sequences, of up to _SEEN, have a shorter prompt than one that the last step computed."""
        longest = max((seq.prompt_len for seq in self._running if seq.computed <= seq.prompt_len), default=0)
        return sum(seq.prompt_len < longest for seq in islice(self._waiting, _SEEN)) if longest else 0

    @property
    def blocks_used(self) -> int:
        """Blocks held by running sequences, and blocks being filled."""
        return self._blocks.pool.num_held

    @property
    def blocks_cached(self) -> int:
        """Unheld blocks that a prefix can still hit."""
        return self._blocks.pool.num_cached

    @property
    def kv_waste_tokens(self) -> int:
        """Token slots in the blocks of running sequences that are still empty: the remaining waste of paging."""
        return sum([seq.table.capacity - seq.computed for seq in self._running])

    @property
    def prefix_stats(self) -> PrefixCacheStats:
        return self._blocks.caches.stats

    def has_work(self) -> bool:
        """True while a sequence runs or waits, or a block is being filled."""
        return bool(self._running or self._waiting or self._fetches)

    @property
    def caches(self) -> PrefixCaches:
        """The prefix caches, for books about them."""
        return self._blocks.caches

    @property
    def newest(self) -> Flight | None:
        """The rows of the step that was scheduled last, before it is passed to `update`; None if it has none."""
        return self._flights[-1] if self._flights else None

    @property
    def shares(self) -> bool:
        """Whether a step leaves some sequences to the next one, which may be scheduled before its end. The halves of a
        pair sample together, and drafts are made between two steps, so with these each step has all."""
        if not self.config.takes_turns:
            return False
        return self.turns and not (self._requests.num_guided or self._drafts_wait)

    def set_caps(self, caps: StepLimits) -> None:
        """What a step may have at most, from the next one on; running sequences beyond it go on. Raises ValueError
        naming the option that is beyond what the engine was started with, or too small."""
        config, pair = self.config, 2 if self._requests.num_guided else 1
        for name, value, least, most in (
            ("max_num_seqs", caps.sequences, pair, config.max_num_seqs),
            ("max_num_batched_tokens", caps.tokens, pair, config.max_num_batched_tokens),
            ("max_draft_tokens", caps.drafts, 0, config.max_draft_tokens),
        ):
            if not least <= value <= most:
                raise ValueError(
                    f"{name}: {value} is not in [{least}, {most}], which the engine was started with"
                )
        if not config.enable_chunked_prefill and caps.tokens < config.max_num_batched_tokens:
            raise ValueError(
                "max_num_batched_tokens: cannot be lowered without chunked prefill: prompts run whole"
            )
        self.caps, self.limits = caps, replace(caps)

    def set_policies(self, policies: Policies) -> None:
        """Other orders, for what waits and what runs, from the next step on."""
        waiting = list(self._waiting)
        self.policies, self._by_arrival = policies, policies.by_arrival
        self._blocks.caches.queues = ()
        queue = make_queue(
            policies, self.estimates, self.counters, self._blocks.caches, self.config.block_size
        )
        for seq in self._requests.sequences():
            seq.rank = policies.rank(seq, self.estimates)
            self.counters.open(seq, shares=policies.of(seq.state.request).shares)
            if seq.account is not None and seq.status is Status.RUNNING:
                seq.rank = (seq.rank[0], seq.account.served, *seq.rank[2:])
        for seq in self._requests.sequences():
            if seq.follows and seq.partner is not None:
                seq.rank = (*seq.partner.rank, 0.0)
        self._running.sort(key=_by_rank)
        self._requests.use(queue, policies)
        self._waiting, self._blocked = queue, None
        for seq in waiting:
            if policies.of(seq.state.request).order == "sjf":
                self.estimates.arrived(seq.state.request)
            queue.push(seq)
        self.config = replace(
            self.config,
            policy=policies.usual.text,
            class_policies=tuple(policy.text for policy in policies.by_class),
            overtake=policies.usual.overtake,
        )

    @property
    def asked_floors(self) -> Mapping[str, int]:
        """The floors that were set last, also while they wait for a request to end."""
        return self.config.floors if self._next_floors is None else self._next_floors

    def set_floors(self, floors: Mapping[str, int]) -> None:
        """Blocks by tenant that no other takes from it, from now on; while an admitted request could not run to its end
        beside them, as soon as that has ended. Raises ValueError if they are more than the pool has.
        """
        if sum(floors.values()) > self.config.num_blocks:
            raise ValueError(
                f"cache_share: {sum(floors.values())} blocks are more than {self.config.num_blocks}"
            )
        self._next_floors = dict(floors)
        self._raise_floors()

    def _raise_floors(self) -> None:
        floors = self._next_floors
        if floors is None:
            return
        left = self.config.num_blocks - sum(floors.values())
        groups, size = self.config.groups, self.config.block_size
        for seq in self._requests.sequences():
            needs = sum(peak_blocks(groups, each.limit - 1, 1, size) for each in (seq, seq.partner) if each)
            if needs > left + floors.get(seq.state.tenant, 0):
                return
        self._next_floors, self._blocked = None, None
        self.config = replace(self.config, floors=floors)
        self._blocks.caches.set_floors(floors)

    def clear_prefix_cache(self) -> None:
        """Remove every cached block that no running sequence holds."""
        self._blocks.caches.clear()

    def audit(self) -> None:
        """Check queues, block tables, cache and pool against each other; raises AuditError. O(everything)."""
        self._requests.audit(self._running, self._num_fetching)
        if len(self._running) > self.config.max_num_seqs:
            raise AuditError(f"{len(self._running)} sequences run, over max_num_seqs")
        if self._running != sorted(self._running, key=_by_rank):
            raise AuditError("the running sequences are out of order")
        self._blocks.audit(self._running, () if self._fetches is None else self._fetches.holders())

    @property
    def _num_fetching(self) -> int:
        return 0 if self._fetches is None else self._fetches.num_sequences
