"""Requests whose prompts other engines compute: sending the blocks, and waiting for them.

    WAITING FOR BLOCKS ── all are in a tier, or nothing comes any more ──▶ the scheduler, which fetches what is there

Whatever does not come is computed, to the same bits. So all that may go wrong on the way costs PATIENCE, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from quire.core.cached_prefix import TOKEN_BYTES
from quire.core.capacity import first_live_block
from quire.core.prefix_cache import PrefixCaches
from quire.core.scheduler_config import SchedulerConfig
from quire.core.soft_tokens import NO_MARKS, block_keys
from quire.core.tier import DIGEST_BYTES, Name, Tier, chain, root_digest, space_of
from quire.records import dataclass
from quire.types import NO_BLOCK, Request

PATIENCE = 1.0  # seconds without a further block
MOST_SECONDS = 5.0  # for all blocks of a prompt: an engine that runs nothing for 10 counts as stalled


class SharedTier(Tier, Protocol):
    """A tier into which other engines write."""

    def look(self) -> bool:
        """See what they have written; whether that can be seen at all now."""


@dataclass(slots=True)
class _Prompt:
    """Blocks that a prompt needs, `first` to the end of `digests`, of which those before `at` have come: counted over
    all groups of each block in turn. A group needs none before the block that `firsts` has for it."""

    digests: bytes
    firsts: list[int]
    at: int
    began: float
    moved: float  # when the last one came
    ended: bool = False

    def next(self) -> Name | None:
        """The first block that has not come, None at the end."""
        groups = len(self.firsts)
        while (index := self.at // groups) < len(self.digests) // DIGEST_BYTES:
            if index >= self.firsts[self.at % groups]:
                start = index * DIGEST_BYTES
                return self.digests[start : start + DIGEST_BYTES], self.at % groups
            self.at += 1
        return None


class Arrivals:
    """The prompts that come from other engines, and those that go to them. `seconds` were waited in all."""

    def __init__(
        self,
        tier: SharedTier,
        caches: PrefixCaches,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._caches, self._clock = tier, caches, clock
        self._groups, self._size = config.groups, config.block_size
        self._prompts: dict[str, _Prompt] = {}
        self.came = self.late = 0
        self.seconds = 0.0

    def send(self, request: Request) -> None:
        """Have the tier save what the cache has of a prompt already; what will be computed is saved as always."""
        key = self._key(request, len(request.prompt_token_ids))
        space = space_of(request.adapter, request.namespace)
        for node in self._caches.path(request.tenant, key, space, NO_MARKS):
            for group, block in enumerate(node.value):
                if block != NO_BLOCK:
                    self._tier.published((node.digest, group), block, request.tenant)

    def awaits(self, request: Request) -> bool:
        """Whether a request should wait. Asked again and again; no is final, until `forget`."""
        if not request.terms.coming:
            return False
        now = self._clock()
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = self._missing(request, now)
        if prompt.ended:
            return False
        while (name := prompt.next()) is not None and self._tier.holds(name):
            prompt.at, prompt.moved = prompt.at + 1, now
        complete = name is None
        patient = now - prompt.moved < PATIENCE and now - prompt.began < MOST_SECONDS
        if not complete and patient and self._tier.look():
            return True
        prompt.ended = True
        self.came += complete
        self.late += not complete
        self.seconds += now - prompt.began
        return False

    def forget(self, request_id: str) -> None:
        """A request is in the scheduler, or gone."""
        self._prompts.pop(request_id, None)

    def _key(self, request: Request, tokens: int) -> bytes:
        return request.prompt_token_ids.tobytes()[: tokens // self._size * self._size * TOKEN_BYTES]

    def _missing(self, request: Request, now: float) -> _Prompt:
        """The blocks that the end of the prompt needs, after those that are cached here."""
        usable = min(request.terms.coming * self._size, len(request.prompt_token_ids) - 1)
        key, space = self._key(request, usable), space_of(request.adapter, request.namespace)
        keys = block_keys(key, self._size * TOKEN_BYTES, NO_MARKS)
        firsts = [
            first_live_block(len(keys) * self._size, group.window, self._size) for group in self._groups
        ]
        digest, digests = root_digest(self._tier.fingerprint, request.tenant, space), []
        for block_key in keys:
            digest = chain(digest, block_key)
            digests.append(digest)
        cached = 0
        for index, node in enumerate(self._caches.path(request.tenant, key, space, NO_MARKS)):
            if any(node.value[g] == NO_BLOCK for g, first in enumerate(firsts) if index >= first):
                break
            cached = index + 1
        return _Prompt(b"".join(digests), firsts, cached * len(firsts), now, now)
