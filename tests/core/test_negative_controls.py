"""Would the trials notice? Each control breaks one thing on purpose; the same checks must then fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod

import pytest

from quire.cache_kinds import FullGroup, Move, SlidingGroup, StateGroup
from quire.core import fetching, prefix_cache, scheduler, sequence_blocks, step_plan
from quire.core import live_requests as requests
from quire.core import tier as tier_module
from quire.core.block_pool import AuditError, BlockPool
from quire.core.cached_prefix import Hit
from quire.core.fetching import Fetches
from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.core.radix import RadixTree
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, Status
from quire.core.sequence_blocks import SequenceBlocks
from quire.core.soft_tokens import Marks
from quire.core.step_plan import StepPlan
from quire.types import ScheduledSeq, SchedulerOutput, SeqEvent, StepOutput

from .driver import Driver
from .host_tier import HostTier
from .test_scheduler_trials import compare_flights, crowded_life

CONFIG = SchedulerConfig(
    num_blocks=22,
    block_size=2,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_model_len=40,
    groups=(FullGroup((0,)), SlidingGroup((1,), 5)),
)


def live(config: SchedulerConfig = CONFIG, tier: HostTier | None = None) -> Driver:
    """A fixed life with shared prefixes, siblings, namespaces, tenants, aborts and pressure."""
    rng = random.Random(3)
    driver = Driver(config, tier=tier)
    for index in range(14):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(3, 8)] + [rng.randint(0, 3) for _ in range(4)]
        params = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 2])}
        where = {"namespace": rng.choice(["", "a"]), "tenant": "t" if index % 4 == 3 else ""}
        driver.add(prompt, **where, priority=index % 3, stepwise=index % 3 == 1, **params)
        for _ in range(rng.randint(0, 2)):
            driver.step()
        if index % 5 == 4:
            driver.start()
            driver.abort(index - 1)
    driver.drain()
    driver.add([1, 2, 3, 4], max_tokens=3)
    driver.step()
    driver.add([1, 2, 3, 4], max_tokens=3)  # whole blocks, all of them known
    driver.drain()
    return driver


TWO_STEPS = replace(CONFIG, steps_in_flight=2, policy="priority", max_draft_tokens=3)
DRAFTS = replace(CONFIG, max_draft_tokens=8, max_num_batched_tokens=10)
STATES = replace(CONFIG, groups=(FullGroup((0,)), StateGroup((1,), 64)))


def test_unbroken_it_passes() -> None:
    driver = live()
    assert driver.scheduler.num_preemptions
    assert driver.scheduler.prefix_stats.hit_tokens
    worker = live(DRAFTS).worker
    assert worker.accepted_drafts > 20
    assert worker.accepted_branches
    driver = live(STATES)
    assert driver.scheduler.num_preemptions
    assert driver.scheduler.prefix_stats.hit_tokens
    driver = live(TWO_STEPS)
    assert driver.scheduler.num_preemptions
    assert driver.scheduler.wasted_rows > 2
    assert driver.worker.accepted_drafts > 2
    for config in (CONFIG, TWO_STEPS):
        tier = HostTier(config.block_size)
        live(config, tier)
        assert tier.came > 20
        assert tier.lost


def leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", lambda self, blocks: [])


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "hold", lambda self, blocks: None)


def hand_out_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "take", lambda self, count: self._free[-count:] if count else [])


def forget_namespaces(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match
    acquire = PrefixCache.acquire
    patch.setattr(
        PrefixCache, "match", lambda self, key, most, name, marks: match(self, key, most, "all", marks)
    )
    patch.setattr(PrefixCache, "acquire", lambda self, hit, name="": acquire(self, hit, "all"))


def forget_tenants(patch: pytest.MonkeyPatch) -> None:
    of = PrefixCaches.of
    patch.setattr(PrefixCaches, "of", lambda self, tenant="": of(self, ""))


def never_count_who_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "exit", lambda self: None)


def lose_count_of_the_cached(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache.acquire

    def acquire(self: PrefixCache, hit: Hit, name: str = "") -> object:
        before = self.num_cached
        node = right(self, hit, name)
        self.num_cached = before
        return node

    patch.setattr(PrefixCache, "acquire", acquire)


def forget_the_window(patch: pytest.MonkeyPatch) -> None:
    """Hits count where a sliding group has lost its blocks."""
    patch.setattr(prefix_cache, "usable_depth", lambda path, *_: len(path))


def free_one_block_too_early(patch: pytest.MonkeyPatch) -> None:
    right = sequence_blocks.first_live_block
    patch.setattr(
        sequence_blocks,
        "first_live_block",
        lambda computed, window, size: right(computed, window - size, size) if window else 0,
    )
    patch.setattr(prefix_cache, "first_live_block", sequence_blocks.first_live_block)


def let_go_of_the_state_at_the_end_of_a_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateGroup, "window", 1)


def run_drafts_over_states(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft stays in the state."""
    patch.setattr(SchedulerConfig, "__post_init__", lambda self: None)
    patch.setattr(Driver, "__init__", partialmethod(with_drafts, Driver.__init__))


def with_drafts(
    self: Driver, right: Callable[..., None], config: SchedulerConfig, **others: HostTier | None
) -> None:
    right(self, replace(config, max_draft_tokens=8), **others)


@pytest.mark.parametrize(
    "break_it", [forget_the_window, let_go_of_the_state_at_the_end_of_a_block, run_drafts_over_states]
)
def test_broken_states_are_caught(break_it: Callable[[pytest.MonkeyPatch], None]) -> None:
    check(break_it, STATES)


def key_by_last_block_only(patch: pytest.MonkeyPatch) -> None:
    """Blocks found by their own tokens, not by their whole prefix."""

    def match(self: RadixTree[object], key: bytes, namespace: str, marks: Marks) -> list[object]:
        known = {node.key: node for node in self.nodes()}
        path = []
        for start in range(0, len(key) - self.block_bytes + 1, self.block_bytes):
            node = known.get(key[start : start + self.block_bytes])
            if node is None:
                break
            path.append(node)
        return path

    patch.setattr(RadixTree, "match", match)


def never_unlock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, node: None)


def evict_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "lock", lambda self, node: None)
    patch.setattr(RadixTree, "unlock", lambda self, node: self.touch(node))


def forget_twins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_promote_twin", lambda self, block: None)


def publish_before_computed(patch: pytest.MonkeyPatch) -> None:
    right = sequence_blocks.SequenceBlocks.publish_and_release

    def settle(self: sequence_blocks.SequenceBlocks, seq: Sequence) -> None:
        seq.computed += 1
        right(self, seq)
        seq.computed -= 1

    patch.setattr(sequence_blocks.SequenceBlocks, "publish_and_release", settle)


def hit_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "usable_prefix", lambda self: len(self.tokens))


def lose_a_hit_block(patch: pytest.MonkeyPatch) -> None:
    live_blocks = Hit.live
    patch.setattr(Hit, "live", lambda self: live_blocks(self)[1:])


def take_blocks_too_early(patch: pytest.MonkeyPatch) -> None:
    grow = SequenceBlocks.grow
    patch.setattr(
        SequenceBlocks,
        "grow",
        lambda self, seq, end: grow(self, seq, self.reachable_end(seq, self.room(seq))),
    )


def never_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_sweep", lambda self: None)


def lose_the_blocks_of_drafts(patch: pytest.MonkeyPatch) -> None:
    def add_drafts(step: StepPlan, blocks: SequenceBlocks, most: int) -> tuple[int, int]:
        before = [row.new_blocks for row in step.rows]
        added = step_plan.add_drafts(step, blocks, most)
        for row, own in zip(step.rows, before, strict=True):
            row.new_blocks = own
        return added

    patch.setattr(scheduler, "add_drafts", add_drafts)


def draft_past_the_budget(patch: pytest.MonkeyPatch) -> None:
    def add_drafts(step: StepPlan, blocks: SequenceBlocks, most: int) -> tuple[int, int]:
        step.budget += 8
        return step_plan.add_drafts(step, blocks, most)

    patch.setattr(scheduler, "add_drafts", add_drafts)


def draft_past_the_end(patch: pytest.MonkeyPatch) -> None:
    def add_drafts(step: StepPlan, blocks: SequenceBlocks, most: int) -> tuple[int, int]:
        for seq in step.seqs:
            seq.limit += 1
        added = step_plan.add_drafts(step, blocks, most)
        for seq in step.seqs:
            seq.limit -= 1
        return added

    patch.setattr(scheduler, "add_drafts", add_drafts)


def count_rejected_drafts_as_computed(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.update

    def update(self: Scheduler, out: SchedulerOutput, result: StepOutput) -> list[SeqEvent]:
        seqs = self._flights[0].seqs if out.scheduled else []
        events = right(self, out, result)
        for seq, row in zip(seqs, out.scheduled, strict=True):
            if row.drafts and seq.status is Status.RUNNING:
                seq.computed = row.start + len(row.token_ids)
        return events

    patch.setattr(Scheduler, "update", update)


@pytest.mark.parametrize(
    "break_it",
    [
        lose_the_blocks_of_drafts,
        draft_past_the_budget,
        draft_past_the_end,
        count_rejected_drafts_as_computed,
    ],
)
def test_broken_drafts_are_caught(break_it: Callable[[pytest.MonkeyPatch], None]) -> None:
    check(break_it, DRAFTS)


def forget_the_step_that_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "after", lambda row, seq, **_: (seq.computed, len(seq.tokens)))


def never_sit_out(patch: pytest.MonkeyPatch) -> None:
    right = scheduler.after

    def after(row: ScheduledSeq, seq: Sequence, *, takes_turns: bool) -> tuple[int, int]:
        if row.sample:
            return end(row), end(row) + 1
        return right(row, seq, takes_turns=takes_turns)

    patch.setattr(scheduler, "after", after)


def end(row: ScheduledSeq) -> int:
    return row.start + len(row.token_ids)


def start_again_too_soon(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._admit_waiting

    def admit(self: Scheduler, step: StepPlan) -> None:
        step.ahead = self._none_ahead
        right(self, step)

    patch.setattr(Scheduler, "_admit_waiting", admit)


def lose_count_of_wasted_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "wasted_rows", property(lambda self: 0, lambda self, value: None), raising=False)


@pytest.mark.parametrize(
    "break_it",
    [
        forget_the_step_that_runs,
        never_sit_out,
        lose_count_of_wasted_rows,
    ],
)
def test_broken_steps_in_flight_are_caught(break_it: Callable[[pytest.MonkeyPatch], None]) -> None:
    check(break_it, TWO_STEPS)


@pytest.mark.parametrize(("broken", "known"), [("hold_back", 0), ("follow", 0), ("preempt", 51)])
def test_broken_pairs_are_caught(broken: str, known: int) -> None:
    """In a life in which halves of pairs are apart. One such is known: others are tried where it has become another."""
    for seed in (known, *range(200)):
        with pytest.MonkeyPatch.context() as patch:
            if broken == "preempt":
                patch.setattr(Scheduler, "_preempt", Scheduler._preempt_one)
            else:
                patch.setattr(scheduler, broken, lambda *_: None)
            try:
                crowded_life(seed, kind=Scheduler)
            except (AssertionError, AuditError, ValueError, KeyError):
                break
    else:
        pytest.fail("no life notices")
    crowded_life(seed, kind=Scheduler)


def test_a_sequence_that_starts_again_while_its_row_runs_is_caught() -> None:
    """In a life in which a more urgent request makes one give way for blocks, and that one finds room again at once."""
    flights = {"steps_in_flight": 2, "policy": "priority", "kind": Scheduler}
    for seed in range(200):
        with pytest.MonkeyPatch.context() as patch:
            start_again_too_soon(patch)
            try:
                crowded_life(seed, **flights)
            except AssertionError:
                break
    else:
        pytest.fail("no life notices")
    crowded_life(seed, **flights)


def publish_late(patch: pytest.MonkeyPatch) -> None:
    """Blocks that fill up while a step runs are not published before the next one ends."""
    right = Scheduler._reach_wake

    def reach_wake(self: Scheduler, seq: Sequence) -> None:
        if not self._flights:
            right(self, seq)

    patch.setattr(Scheduler, "_reach_wake", reach_wake)


def test_two_steps_in_flight_that_leave_other_blocks_are_caught() -> None:
    for seed in range(3):
        compare_flights(seed)
    with pytest.MonkeyPatch.context() as patch:
        publish_late(patch)
        with pytest.raises((AssertionError, AuditError)):
            _ = [compare_flights(seed) for seed in range(3)]


def let_go_of_blocks_being_filled(patch: pytest.MonkeyPatch) -> None:
    right = Fetches.begin

    def begin(self: Fetches, seq: Sequence, hit: Hit, room: int, running: int) -> bool:
        begun = right(self, seq, hit, room, running)
        if begun:
            fetch = list(self)[-1]
            fetch.cache.release(list(fetch.filling))
        return begun

    patch.setattr(Fetches, "begin", begin)


def find_blocks_being_filled(patch: pytest.MonkeyPatch) -> None:
    """They are published at once, though held until their moves end."""
    right = Fetches.begin

    def begin(self: Fetches, seq: Sequence, hit: Hit, room: int, running: int) -> bool:
        begun = right(self, seq, hit, room, running)
        if begun:
            fetch = list(self)[-1]
            node = fetch.node
            assert node is not None
            for index in range(len(fetch.path), len(fetch.columns)):
                node = fetch.cache.publish(node, fetch.keys[index], fetch.columns[index])
            fetch.node, fetch.path = node, [*fetch.path] + [node] * (len(fetch.columns) - len(fetch.path))
        return begun

    patch.setattr(Fetches, "begin", begin)


def believe_that_all_came(patch: pytest.MonkeyPatch) -> None:
    right = Fetches.end
    patch.setattr(Fetches, "end", lambda self, filled: right(self, dict.fromkeys(filled, True)))


def chain_without_the_prefix(patch: pytest.MonkeyPatch) -> None:
    for module in (prefix_cache, fetching):
        patch.setattr(module, "chain", lambda parent, key: tier_module.chain(b"", key))


def chain_without_the_tenant(patch: pytest.MonkeyPatch) -> None:
    for module in (prefix_cache, fetching):
        patch.setattr(
            module, "root_digest", lambda seed, tenant, name: tier_module.root_digest(seed, "", name)
        )


def copy_out_a_step_late(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.schedule
    late: list[Move] = []

    def schedule(self: Scheduler) -> SchedulerOutput:
        out = right(self)
        now = [*late, *(move for move in out.moves if move.fill)]
        late[:] = [move for move in out.moves if not move.fill]
        out.moves = now
        return out

    patch.setattr(Scheduler, "schedule", schedule)


def never_tell_what_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache._unpublish

    def withdraw(self: PrefixCache, block: int, *, offer: bool = False) -> None:
        kept, self._caches.tier = self._caches.tier, None
        right(self, block, offer=offer)
        self._caches.tier = kept

    patch.setattr(PrefixCache, "_unpublish", withdraw)


def images(config: SchedulerConfig, tier: HostTier | None = None) -> list[int]:
    """Prompts of the same ids with one image, another, and the first again; how much of each was found."""
    driver = Driver(replace(config, soft_tokens=True), tier=tier)
    for image in "xyxy":
        driver.add([1, 2, 9, 9, 9, 9, 9, 3, 4], soft=[(2, 5, image)], max_tokens=3)
        driver.run_out()
    driver.drain()
    return [sample.cached_tokens for sample in driver.samples.values()]


def forget_what_soft_tokens_stand_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "block_marks", lambda spans, size: {})


def mark_by_placeholders(patch: pytest.MonkeyPatch) -> None:
    """Where and how long images are, not what they show."""
    right = requests.block_marks
    patch.setattr(
        requests, "block_marks",
        lambda spans, size: right([replace(span, digest=bytes(32)) for span in spans], size),
    )  # fmt: skip


def test_images_are_shared_where_they_are_the_same() -> None:
    assert images(CONFIG) == [0, 2, 8, 8]  # before the image, and all of it
    assert images(STATES) == [0, 2, 8, 8]
    assert images(CONFIG, HostTier(2)) == [0, 2, 8, 8]


@pytest.mark.parametrize("break_it", [forget_what_soft_tokens_stand_for, mark_by_placeholders])
def test_images_that_share_blocks_are_caught(break_it: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        with pytest.raises(AssertionError):
            images(CONFIG)


@pytest.mark.parametrize("config", [CONFIG, TWO_STEPS], ids=["one", "two"])
@pytest.mark.parametrize(
    "break_it",
    [
        let_go_of_blocks_being_filled,
        find_blocks_being_filled,
        believe_that_all_came,
        chain_without_the_prefix,
        chain_without_the_tenant,
        copy_out_a_step_late,
        never_tell_what_is_withdrawn,
    ],
)
def test_broken_moves_are_caught(
    break_it: Callable[[pytest.MonkeyPatch], None], config: SchedulerConfig
) -> None:
    check(break_it, config, HostTier(config.block_size))


@pytest.mark.parametrize(
    "break_it",
    [
        leak,
        hold_nothing,
        hand_out_twice,
        forget_namespaces,
        forget_tenants,
        never_count_who_ends,
        lose_count_of_the_cached,
        forget_the_window,
        free_one_block_too_early,
        key_by_last_block_only,
        never_unlock,
        evict_what_is_held,
        forget_twins,
        publish_before_computed,
        hit_the_last_token,
        lose_a_hit_block,
        take_blocks_too_early,
        never_sweep,
    ],
)
def test_broken_it_is_caught(break_it: Callable[[pytest.MonkeyPatch], None]) -> None:
    check(break_it, CONFIG)


def check(
    break_it: Callable[[pytest.MonkeyPatch], None], config: SchedulerConfig, tier: HostTier | None = None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        with pytest.raises((AssertionError, AuditError, ValueError, KeyError, IndexError)):
            live(config, tier)
