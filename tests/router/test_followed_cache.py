"""Caches followed from outside: snapshots and events are the cache, whatever is lost; without numbers they are not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup
from quire.core.cache_changes import CacheChanges
from quire.core.cache_misses import MissWatch
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.cache_log import FOLLOWER_BYTES, CacheLog, Follower, block_hash
from quire.router.cache_follower import EventLines, take_event
from quire.routing.followed_cache import FollowedCache
from quire.routing.prefix_index import PIECE_BYTES, prompt_digests
from quire.routing.reported_prefixes import ReportedPrefixes
from quire.types import Request, SamplingParams, StepOutput, TokenIds

SIZE = 4
GROUPS = {"full": (FullGroup((0,)),), "mixed": (FullGroup((0,)), SlidingGroup((1,), 8))}


class Life:
    """A scheduler with few blocks, whose requests come, end and are aborted at random, and its log."""

    def __init__(self, seed: int, groups: str = "full") -> None:
        self.rng = random.Random(seed)
        config: dict[str, Any] = {
            "num_blocks": 48,
            "block_size": SIZE,
            "max_num_seqs": 4,
            "max_model_len": 64,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=24, groups=GROUPS[groups], **config), self.rng
        )
        MissWatch(self.scheduler.caches, SIZE)
        self.changes = CacheChanges(self.scheduler.caches, SIZE)
        self.log = CacheLog()
        self.log.block_size = SIZE
        self.log.began(b"")
        self.requests = 0

    def step(self) -> None:
        """Some requests more, and a step."""
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.4:
            prompt = [rng.randrange(3)] * rng.randrange(1, 24) + [
                rng.randrange(3) for _ in range(rng.randrange(1, 12))
            ]
            params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True)
            salt = rng.choice(["", "", "salt"])
            scheduler.add(
                Request(
                    request_id=f"r{self.requests}", prompt_token_ids=TokenIds(prompt), params=params,
                    tenant=rng.choice("ab"), namespace=salt, adapter=rng.choice(["", "", "1234"]),
                )
            )  # fmt: skip
            self.requests += 1
        if rng.random() < 0.05:
            scheduler.abort(f"r{rng.randrange(self.requests + 1)}")
        if rng.random() < 0.02:
            scheduler.clear_prefix_cache()
        out = scheduler.schedule()
        rows = len(out.scheduled)
        tokens = [[rng.randrange(3)] if row.sample else [] for row in out.scheduled]
        scheduler.update(out, StepOutput(tokens, [None] * rows, [None] * rows))
        if found := self.changes.take():
            self.log.changed(found)

    def published(self) -> set[int]:
        """The blocks that the scheduler's caches know."""
        caches = self.scheduler.caches.all
        return {block_hash(node.digest) for cache in caches for node in cache._tree.nodes()}


class Tap(Follower):
    """A follower whose events are taken at once."""

    def __init__(self, log: CacheLog) -> None:
        super().__init__(log)
        self.events: list[bytes] = []
        log._followers.add(self)

    def put(self, event: bytes) -> None:
        self.events.append(event)

    def take(self) -> list[bytes]:
        found, self.events = self.events, []
        return found


@pytest.mark.parametrize("groups", GROUPS)
def test_a_snapshot_and_all_events_are_what_is_published(groups: str) -> None:
    life, reports, lines = Life(1, groups), ReportedPrefixes(100), EventLines()
    tap = Tap(life.log)
    for _ in range(20):
        life.step()
    tap.take()
    pending = [*life.log.snapshot()]
    most = 0
    for _ in range(1500):
        for kind, data in lines.feed(b"".join(pending)):
            assert take_event(reports, "one", kind, data)
        expected = life.published()
        assert expected == set(life.log.blocks) == set(reports.cache("one").blocks)
        assert all(before in expected or not before for before in life.log.blocks.values())
        most = max(most, len(expected))
        life.step()
        pending = [*tap.take(), life.log.pulse()]
    assert most > 20
    assert life.log.number > 500


class Unnumbered(FollowedCache):
    """One that takes batches whatever their numbers."""

    def batch(self, number: int, changes: Any) -> bool:
        self.number = number - 1
        return super().batch(number, changes)

    def check(self, number: int) -> bool:
        return self.current


def arriving(events: list[bytes], rng: random.Random) -> list[bytes]:
    """What comes of events, and in which order."""
    found: list[bytes] = []
    for event in events:
        drawn = rng.random()
        if drawn >= 0.1:
            found.insert(len(found) - (drawn < 0.15), event)
            found += [event] * (drawn >= 0.95)
    return found


def lossy(seed: int, kind: type[FollowedCache]) -> tuple[int, int, int]:
    """A life of which each event is lost with 10 %, comes twice with 5 %, and before the last one with 5 %: how often
    the follower said that it knows all and was wrong, for how many steps in a row it did not know all, and how often it
    asked for a snapshot."""
    life, reports, lost = Life(seed), ReportedPrefixes(100), random.Random(seed)
    tap, cache = Tap(life.log), kind()
    reports._caches["one"] = cache
    wrong = longest = behind = asked = 0
    resync = True
    for _ in range(1500):
        life.step()
        events = tap.take()
        if resync:
            events, resync, asked = [*life.log.snapshot()], False, asked + 1
        for event in arriving([*events, life.log.pulse()], lost):
            ((name, data),) = EventLines().feed(event)
            right = take_event(reports, "one", name, data)
            resync = resync or not right
            if name == "number" and right:
                wrong += set(cache.blocks) != life.published()
        behind = behind + 1 if not cache.current or set(cache.blocks) != life.published() else 0
        longest = max(longest, behind)
    return wrong, longest, asked


@pytest.mark.parametrize("seed", range(4))
def test_lost_events_are_noticed_and_made_up_for(seed: int) -> None:
    """A follower never believes that it knows all when it does not, and soon knows all again."""
    wrong, longest, asked = lossy(seed, FollowedCache)
    assert wrong == 0
    assert longest <= 12
    assert asked > 50
    wrong, _, asked = lossy(seed, Unnumbered)  # the negative control
    assert wrong > 100
    assert asked == 1


def test_snapshots_come_in_parts_and_a_lost_part_is_noticed() -> None:
    log = CacheLog()
    log.began(b"")
    log.blocks = {n: n - 1 for n in range(1, 5000)}
    parts = [*log.snapshot()]
    assert len(parts) == 5
    for gone in range(6):
        reports, lines = ReportedPrefixes(10), EventLines()
        for number, part in enumerate(parts):
            for kind, data in lines.feed(part) if number != gone else ():
                take_event(reports, "one", kind, data)
        cache = reports.cache("one")
        assert cache.current == (gone == 5)
        assert cache.check(log.number) == (gone == 5)
    assert cache.blocks == log.blocks


def test_a_follower_that_does_not_read_begins_again() -> None:
    log = CacheLog()
    log.began(b"")
    follower = log.follow()
    follower._behind = False
    follower.put(b"x" * FOLLOWER_BYTES)
    assert follower._bytes == FOLLOWER_BYTES
    follower.put(b"x")
    assert follower._behind
    assert (follower._bytes, len(follower._waiting)) == (0, 0)


def test_pieces_of_text_stand_for_blocks() -> None:
    """Pieces that two prompts share stand for blocks that both have; evicted ones count no longer."""
    reports = ReportedPrefixes(1000)
    for server in ("one", "two"):
        cache = reports.cache(server)
        cache.current, cache.space, cache.block_size = True, "space", 16
    head = b"s" * 8 * PIECE_BYTES
    texts = [head + letter * 8 * PIECE_BYTES for letter in (b"a", b"b")]
    digests = [prompt_digests(b"", [text]) for text in texts]
    chains = [[1, 2, 3, 4, 5, 6, 7, 8, *(10 * n + last for n in range(1, 9))] for last in (1, 2)]
    one = reports.cache("one")
    for chain in chains:
        one.blocks |= dict(zip(chain, [0, *chain], strict=False))
    for number, chain in enumerate(chains):
        reports.sent("one", f"r{number}", digests[number], len(texts[number]))
        assert reports.coming("one", digests[0]) == (16 if number == 0 else 8)
        assert reports.tokens("one", digests[number]) == (0 if number == 0 else 8 * 16)
        reports.computed("one", f"r{number}", chain[-1], 16, 16 * 16)
        assert reports.coming("one", digests[number]) == 0
        assert reports.tokens("one", digests[number]) == 16 * 16
    assert reports.tokens("two", digests[0]) == 0
    reports.cache("two").blocks = dict.fromkeys(chains[0][:6], 0)
    assert reports.tokens("two", digests[0]) == reports.tokens("two", digests[1]) == 6 * 16
    for gone in chains[0][12:]:
        del one.blocks[gone]
    assert reports.tokens("one", digests[0]) == 12 * 16
    assert reports.tokens("one", digests[1]) == 16 * 16
    one.lose()
    assert reports.tokens("one", digests[1]) == 0


def test_what_is_remembered_is_bounded() -> None:
    reports = ReportedPrefixes(50)
    cache = reports.cache("one")
    cache.current, cache.space, cache.block_size = True, "space", 16
    cache.blocks = dict(zip(range(1, 401), range(400), strict=True))
    for number in range(6000):
        digests = prompt_digests(str(number).encode(), [b"x" * 40 * PIECE_BYTES])
        reports.sent("one", str(number), digests, 40 * PIECE_BYTES)
        if number < 20:
            reports.computed("one", str(number), 40, 40, 640)
    assert len(reports._known["space"]) == 50
    assert len(reports._sent) == 2
    assert reports._pieces == sum(reports._coming["one"].values()) == 40 * 2
    for number in range(6000):
        reports.sent("one", str(number), [b"one piece"], PIECE_BYTES)
    assert len(reports._sent) == 100
    reports.forget("one")
    reports.sent("one", "last", [b"one piece"], PIECE_BYTES)
    assert "one" not in reports._coming, "nothing is known of it"
