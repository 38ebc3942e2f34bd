"""Random histories of prompts that one engine computes for another, on a virtual clock. Either engine dies at any step,
the store between them loses blocks, goes away and comes back, and tickets are lost, changed and mixed up. Every request
has the tokens that it has alone, none waits beyond its bounds, and no block is lost on either side."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup
from quire.core import coming_blocks, fetching, prefix_cache
from quire.core.block_pool import AuditError
from quire.core.coming_blocks import MOST_SECONDS, Arrivals
from quire.core.prefix_cache import PrefixCache
from quire.core.scheduler_config import SchedulerConfig
from quire.core.tier import Name, chain, root_digest, space_of
from quire.objectives import ServiceTerms
from quire.routing.tickets import blocks_of, prompt_mark, ticket_for
from quire.types import Request, SamplingParams, TokenIds

from .driver import Driver
from .host_tier import Cell, HostTier

KEY = b"a key that both sides have"
NAMING = coming_blocks, fetching, prefix_cache  # modules that name blocks
SIZE, LONGEST = 2, 0.25  # tokens of a block; seconds of a step at most


@dataclass
class Store:
    """Blocks between two engines."""

    contents: dict[Name, list[Cell]] = field(default_factory=dict)
    prefixes: dict[bytes, int] = field(default_factory=dict)  # what each digest has always stood for
    up: bool = True


class SharedTier(HostTier):
    """An engine's view of a store."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(SIZE, early=True, contents=store.contents, last_hash=store.prefixes)
        self.store, self.random = store, random.Random(seed)

    def published(self, name: Name, block: int, tenant: str) -> None:
        if name in self.findable:  # it is sent again
            self.unsaved[name] = block
        else:
            super().published(name, block, tenant)

    def keep(self, name: Name) -> bool:
        return self.store.up

    def holds(self, name: Name) -> bool:
        return self.store.up and name in self.store.contents

    def look(self) -> bool:
        return self.store.up


class Engine:
    """One that computes prompts, or one that answers; `dies` loses all that it has."""

    def __init__(self, config: SchedulerConfig, store: Store, seed: int, clock: Callable[[], float]) -> None:
        self.driver = Driver(config, tier=SharedTier(store, seed))
        caches = self.driver.scheduler.caches
        self.arrivals = Arrivals(self.driver.tier, caches, config, clock)  # type: ignore[arg-type]

    def step(self) -> None:
        driver, tier = self.driver, self.driver.tier
        if driver.scheduler.has_work() or driver.flights or (tier is not None and tier.unsaved):
            driver.step()

    def ends(self) -> None:
        """It runs out, and nothing is left of any request."""
        assert not self.arrivals._prompts
        self.driver.drain()


@dataclass
class Asked:
    """A request of a client: with the engine that computes its prompt, or on the way, or with the one that answers."""

    prompt: list[int]
    tenant: str
    first: Request | None = None  # at the engine that computes its prompt
    ticket: str | None = None
    until: float = 0.0  # it waits for a ticket
    coming: Request | None = None  # waits for blocks, since
    since: float = 0.0
    answer: Request | None = None

    @property
    def mark(self) -> bytes:
        return prompt_mark("driver", self.tenant, space_of("", ""), TokenIds(self.prompt).tobytes())


class History:
    """One life of two engines, from a seed; `seen` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.seen = random.Random(seed), 0.0, Counter[str]()
        rng = self.rng
        groups = rng.choice([(FullGroup((0,)),), (FullGroup((0,)), SlidingGroup((1,), 3))])
        self.config = SchedulerConfig(
            num_blocks=rng.choice((20, 40)), block_size=SIZE, max_num_seqs=3, max_num_batched_tokens=8,
            max_model_len=20, groups=groups,
        )  # fmt: skip
        self.store = Store()
        self.prefill, self.decode = self._engine(), self._engine()
        self.requests: list[Asked] = []

    def _engine(self) -> Engine:
        return Engine(self.config, self.store, self.rng.randrange(2**30), lambda: self.now)

    def play(self) -> Counter[str]:
        rng, left = self.rng, self.rng.randrange(1, 6)
        steps = 0
        while left or not all(self._has_ended(each) for each in self.requests):
            if left and rng.random() < 0.3:
                left -= 1
                prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randrange(1, 9)] + [
                    rng.randrange(3) for _ in range(rng.randrange(5))
                ]
                self._ask(Asked(prompt, rng.choice("ab")))
            if rng.random() < 0.08 and steps < 150:
                self._fails()
            self.now += rng.uniform(0.0, LONGEST)
            self.prefill.step()
            self.decode.step()
            for each in self.requests:
                self._go_on(each)
            steps += 1
            assert steps < 500, "it hangs"
        self.prefill.ends()
        self.decode.ends()
        self.seen["came"] += self.decode.arrivals.came
        self.seen["late"] += self.decode.arrivals.late
        return self.seen

    def _ask(self, asked: Asked) -> None:
        self.requests.append(asked)
        self.prefill.arrivals.send(self._request(asked, sent=True))
        asked.first = self.prefill.driver.add(asked.prompt, tenant=asked.tenant, max_tokens=1)
        asked.until = self.now + self.rng.choice((0.5, 5.0))

    def _request(self, asked: Asked, **terms: int) -> Request:
        return Request(
            request_id=f"{id(asked)}", prompt_token_ids=TokenIds(asked.prompt), params=SamplingParams(),
            tenant=asked.tenant, terms=ServiceTerms(**terms),  # type: ignore[arg-type]
        )  # fmt: skip

    def _has_ended(self, asked: Asked) -> bool:
        return asked.answer is not None and self._reason(self.decode, asked.answer)

    @staticmethod
    def _reason(engine: Engine, request: Request) -> bool:
        return engine.driver.samples[request.request_id, 0].reason is not None

    def _go_on(self, asked: Asked) -> None:
        """What the router does with a request, and the engine that answers."""
        if asked.answer is None and asked.coming is None:
            if asked.first is not None and self._reason(self.prefill, asked.first):
                blocks = (len(asked.prompt) - 1) // SIZE
                asked.ticket = self._sent(ticket_for(KEY, asked.mark, blocks)) if blocks else None
            elif asked.first is not None and self.now < asked.until:
                return
            blocks = blocks_of(KEY, asked.mark, asked.ticket) if asked.ticket is not None else None
            self.seen["ticket" if blocks else "none"] += 1
            asked.coming, asked.since = self._request(asked, coming=blocks or 0), self.now
        if asked.coming is not None:
            assert self.now - asked.since <= MOST_SECONDS + LONGEST, "it waits too long"
            if not self.decode.arrivals.awaits(asked.coming):
                self.decode.arrivals.forget(asked.coming.request_id)
                asked.coming = None
                asked.answer = self.decode.driver.add(asked.prompt, tenant=asked.tenant, max_tokens=4)

    def _sent(self, ticket: str) -> str | None:
        """What comes of a ticket on its way."""
        raw = bytearray(base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4)))
        match self.rng.choice(["right"] * 7 + ["lost", "changed", "another's"]):
            case "lost":
                return None
            case "changed":
                raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
                return base64.urlsafe_b64encode(raw).decode().rstrip("=")
            case "another's":
                return next((each.ticket for each in self.requests if each.ticket), ticket)
        return ticket

    def _fails(self) -> None:
        rng, store = self.rng, self.store
        what = rng.choice(("prefill", "decode", "down", "up", "up", "empty", "loses", "loses", "leaves"))
        self.seen[what] += 1
        match what:
            case "prefill":
                self.prefill = self._engine()
                for each in self.requests:
                    each.first = None
            case "decode":
                self.decode = self._engine()
                for each in self.requests:  # the router asks again
                    each.coming = each.answer = None
            case "down" | "up":
                store.up = what == "up"
            case "empty":
                store.contents.clear()
            case "loses" if store.contents:
                del store.contents[rng.choice([*store.contents])]
            case "leaves" if any(each.coming for each in self.requests):
                gone = next(each for each in self.requests if each.coming)
                self.decode.arrivals.forget(gone.coming.request_id)  # type: ignore[union-attr]
                self.requests.remove(gone)


def histories(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen.update(History(seed).play())
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
    return seen


def test_random_histories() -> None:
    seen = histories(range(200))
    assert (
        min(seen[name] for name in ("ticket", "came", "late", "prefill", "decode", "empty", "leaves")) > 0
    ), seen


@pytest.mark.chaos
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_histories(part: int) -> None:
    histories(range(5_000 * part, 5_000 * (part + 1)))


def wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE", "MOST_SECONDS"):
        patch.setattr(coming_blocks, name, 1e9)


def share_between_tenants(patch: pytest.MonkeyPatch) -> None:
    """The names of blocks do not say whose they are."""
    for module in NAMING:
        patch.setattr(module, "root_digest", lambda mark, _, space: root_digest(mark, "", space))


def name_by_the_last_block(patch: pytest.MonkeyPatch) -> None:
    for module in NAMING:
        patch.setattr(module, "chain", lambda _, key: chain(b"", key))


def keep_who_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "forget", lambda *_: None)


def hold_what_was_fetched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "release_all", lambda *_: None)


def believe_lost_blocks(patch: pytest.MonkeyPatch) -> None:
    """What did not come counts as if it had."""
    right = fetching.Fetches.end
    patch.setattr(fetching.Fetches, "end", lambda self, filled: right(self, dict.fromkeys(filled, True)))


@pytest.mark.parametrize(
    "break_it",
    [
        wait_for_ever,
        share_between_tenants,
        name_by_the_last_block,
        keep_who_waits,
        hold_what_was_fetched,
        believe_lost_blocks,
    ],
)
def test_what_is_broken_is_caught(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises((AssertionError, AuditError, KeyError)):
        histories(range(70, 2000))  # wait_for_ever shows at 71
