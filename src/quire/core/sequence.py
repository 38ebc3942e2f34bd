"""A sample being generated, and its block table. Mutable; only the scheduling half touches it."""

from __future__ import annotations

import enum
import sys
from collections import deque
from struct import pack

from quire.core.cached_prefix import BlockNode
from quire.core.prefix_cache import PrefixCache
from quire.core.soft_tokens import NO_MARKS, Marks
from quire.core.usage_line import UsageLine
from quire.types import FinishReason, Request

Rank = tuple[float, ...]
NEVER = sys.maxsize


class Status(enum.Enum):
    """The state of a sequence. A preempted one is WAITING again, and so is one whose blocks were fetched."""

    HELD_BACK = enum.auto()  # until its sibling has computed the common prompt
    WAITING = enum.auto()
    FETCHING = enum.auto()  # blocks of its prefix are being copied in
    RUNNING = enum.auto()
    ENDED = enum.auto()


class BlockTable:
    """The block ids of a sequence per cache group, oldest first: entry i holds tokens i*size … i*size+size-1.

    Append-only: entries of a sliding group below `first_live[group]` have been released and keep their old values.
    All groups have the same number of entries.
    """

    __slots__ = ("blocks", "capacity", "first_live")

    def __init__(self, num_groups: int) -> None:
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.first_live = [0] * num_groups
        self.capacity = 0  # tokens that fit in the entries

    def live(self) -> list[int]:
        """Every block the sequence holds, in all groups."""
        return [
            block
            for blocks, first in zip(self.blocks, self.first_live, strict=True)
            for block in (blocks[first:] if first else blocks)
        ]


class Account:
    """What an API key has been served under a fair policy; see core.waiting_queues.Counters."""

    __slots__ = ("served",)

    def __init__(self, served: float) -> None:
        self.served = served


class RequestState:
    """The common state of the samples of one request."""

    __slots__ = (
        "cached_tokens",
        "held_back",
        "line",
        "live",
        "marks",
        "namespace",
        "request",
        "sequences",
        "share_limit",
        "started",
        "tenant",
    )

    def __init__(self, request: Request, tenant: str, namespace: str | None, share_limit: int) -> None:
        self.request = request
        self.tenant = tenant  # the tenant that its sequences take blocks for
        self.namespace = namespace  # where its blocks are published; None: nowhere
        self.share_limit = share_limit  # leading blocks of a sequence that may be published
        self.marks: Marks = NO_MARKS  # of blocks of its prompt
        self.sequences: list[Sequence] = []
        self.held_back: deque[Sequence] = deque()
        self.live = 0  # sequences not yet ended
        self.cached_tokens = 0  # prompt tokens found in the cache when first scheduled
        self.started = False
        self.line: UsageLine | None = None  # what it uses is counted there, once it has started


class Sequence:
    """One sample: `tokens` known so far (prompt and output), of which the first `computed` are in the cache.

    `limit` is the length at which it ends. `wake` is the value of `computed` at which its blocks need attention
    again: in between, a step only touches `tokens` and `computed`.
    """

    __slots__ = (
        "account",
        "cache",
        "computed",
        "depth",
        "drafts",
        "fetched",
        "follows",
        "limit",
        "min_length",
        "node",
        "on_worker",
        "partner",
        "preemptions",
        "price",
        "prompt_len",
        "prompt_logprobs_left",
        "published",
        "rank",
        "reached",
        "request_id",
        "sample_index",
        "seed",
        "seq_id",
        "state",
        "status",
        "stop_ids",
        "surprise",
        "table",
        "tokens",
        "unsent",
        "wake",
    )

    def __init__(self, seq_id: int, sample_index: int, state: RequestState, *, limit: int, seed: int) -> None:
        request, params = state.request, state.request.params
        self.request_id = request.request_id
        self.seq_id = seq_id
        self.sample_index = sample_index
        self.state = state
        self.limit = limit
        self.seed = seed
        self.rank: Rank = ()
        self.status = Status.WAITING
        self.tokens = [*request.prompt_token_ids, *(request.given[sample_index] if request.given else ())]
        self.prompt_len = len(request.prompt_token_ids)
        self.min_length = self.prompt_len + params.min_tokens
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(request.eos_token_ids)
        self.stop_ids = frozenset(stops)
        # The first sample computes the prompt for all of them, so only this one reports the logprobs of the prompt.
        self.prompt_logprobs_left = 0 if sample_index else params.scored_tokens(self.prompt_len)
        self.computed = 0
        self.fetched = False  # the tier was asked since the sequence last ran
        self.drafts: list[int] = []  # guesses at the tokens after the known ones
        self.depth = 0  # of the tree that they will be; 0: a chain
        self.table = BlockTable(0)
        self.cache: PrefixCache | None = None  # that of its tenant, while it runs
        self.node: BlockNode | None = None  # its locked node in the prefix cache, at depth `published`
        self.published = 0  # leading blocks known to the prefix cache
        self.wake = NEVER
        self.on_worker = False
        self.preemptions = 0
        self.reached = 0  # the most of it that was computed when it was preempted
        self.account: Account | None = None  # that it is charged to, once it was queued under a fair policy
        self.price = 0.0  # of a token of its output there
        self.surprise: float | None = None  # mirostat's mu, which outlives a preemption
        self.partner: Sequence | None = None  # the other one of its pair; see core.guided_pairs
        self.follows = False  # it is the one that takes the tokens of the other
        self.unsent: tuple[list[int], ...] | None = None  # blocks that the worker has not heard of

    def key(self, start: int = 0, stop: int | None = None) -> bytes:
        """Tokens start … stop-1 as a prefix-cache key, without the marks of their blocks."""
        part = self.tokens[start:stop]
        return pack(f"{len(part)}i", *part)  # takes half as long as an array made of them

    @property
    def prompt_logprobs_from(self) -> int:
        """The first position whose prompt logprobs have not been delivered."""
        return self.prompt_len - 1 - self.prompt_logprobs_left

    def usable_prefix(self) -> int:
        """The most leading tokens that may come from the cache: at least one token must be computed, and every position
        whose prompt logprobs are still owed needs its logits."""
        return self.prompt_logprobs_from if self.prompt_logprobs_left else len(self.tokens) - 1

    def append(
        self, accepted: list[int], *, complete: bool = False
    ) -> tuple[int, FinishReason | None, int | None]:
        """Add tokens until one of them ends the sequence. `complete`: nothing may follow the last one.

        Returns how many were kept, why it ended (None if it did not), and the stop token if one ended it.
        """
        tokens, before = self.tokens, len(self.tokens)
        for token in accepted:
            tokens.append(token)
            length = len(tokens)
            if token in self.stop_ids and length > self.min_length:
                return length - before, FinishReason.STOP, token
            if length >= self.limit and not (complete and length - before == len(accepted)):
                return length - before, FinishReason.LENGTH, None
        if not complete:
            return len(accepted), None, None
        early = len(tokens) < self.min_length
        return len(accepted), FinishReason.GRAMMAR_DEAD_END if early else FinishReason.STOP, None
