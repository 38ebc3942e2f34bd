"""Requests whose prompts other engines compute: sending the blocks, and waiting for them.

    WAITING FOR BLOCKS ── all are in a tier, or nothing comes any more ──▶ the scheduler, which fetches what is there

Whatever does not come is computed, to the same bits. So all that may go wrong on the way costs PATIENCE, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from quire.core.cached_prefix import TOKEN_BYTES
from quire.core.capacity import first_live_block
from quire.core.prefix_cache import PrefixCaches
from quire.core.scheduler_config import SchedulerConfig
from quire.core.soft_tokens import NO_MARKS, block_keys
from quire.core.tier import Name, Tier, chain, root_digest, space_of
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
    """Blocks of a prompt in order, of which the first `there` have come."""

    names: list[Name]
    began: float
    moved: float  # when the last one came
    there: int = field(default=0)
    ended: bool = False


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
            prompt = self._prompts[request.request_id] = _Prompt(self._missing(request), now, now)
        if prompt.ended:
            return False
        while prompt.there < len(prompt.names) and self._tier.holds(prompt.names[prompt.there]):
            prompt.there, prompt.moved = prompt.there + 1, now
        complete = prompt.there == len(prompt.names)
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

    def _missing(self, request: Request) -> list[Name]:
        """The blocks that the end of the prompt needs and that are not cached here."""
        usable = min(request.terms.coming * self._size, len(request.prompt_token_ids) - 1)
        key, space = self._key(request, usable), space_of(request.adapter, request.namespace)
        nodes = self._caches.path(request.tenant, key, space, NO_MARKS)
        digest, names = root_digest(self._tier.fingerprint, request.tenant, space), list[Name]()
        keys = block_keys(key, self._size * TOKEN_BYTES, NO_MARKS)
        firsts = [
            first_live_block(len(keys) * self._size, group.window, self._size) for group in self._groups
        ]
        for index, block_key in enumerate(keys):
            digest = chain(digest, block_key)
            for group, first in enumerate(firsts):
                cached = index < len(nodes) and nodes[index].value[group] != NO_BLOCK
                if index >= first and not cached:
                    names.append((digest, group))
        return names
