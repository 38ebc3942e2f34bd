"""Blocks that move to a tier and back: which sequences wait, which do not, and which blocks are held meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.tier import Name, chain, root_digest
from quire.types import FinishReason, Request, SamplingParams, SchedulerOutput, SeqEvent, StepOutput


class Kept:
    """A tier that keeps whatever it is offered."""

    fingerprint = b"weights"
    seconds = 0.0

    def __init__(self) -> None:
        self.names: set[Name] = set()

    def published(self, name: Name, block: int, tenant: str) -> None:
        pass

    def moved(self, name: Name, block: int) -> None:
        pass

    def saves(self, *, idle: bool) -> list[tuple[Name, int]]:
        return []

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        self.names |= {name} if offered else set()
        return offered

    def holds(self, name: Name) -> bool:
        return name in self.names

    def copy_seconds(self, name: Name) -> float:
        return self.seconds

    work_seconds = copy_seconds


def make(tier: Kept, **changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "num_blocks": 6, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": 24
    }  # fmt: skip
    return Scheduler(SchedulerConfig(**(values | changes)), tier=tier)


def ask(name: str, prompt: list[int], max_tokens: int = 2) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=float(len(name)))


def update(
    scheduler: Scheduler, out: SchedulerOutput, filled: dict[int, bool] | None = None
) -> list[SeqEvent]:
    rows = len(out.scheduled)
    tokens = [[7] if row.sample else [] for row in out.scheduled]
    result = StepOutput(tokens, [None] * rows, [None] * rows, filled=filled or {})
    events = scheduler.update(out, result)
    scheduler.audit()
    return events


def step(scheduler: Scheduler, filled: dict[int, bool] | None = None) -> SchedulerOutput:
    out = scheduler.schedule()
    scheduler.audit()
    update(scheduler, out, filled)
    return out


PROMPT = list(range(1, 14))  # three whole blocks and one token


def evicted(**changes: Any) -> Scheduler:
    """A scheduler whose tier keeps the three blocks of PROMPT, in a pool that others have filled since."""
    scheduler = make(Kept(), **changes)
    scheduler.add(ask("a", PROMPT, max_tokens=1))
    step(scheduler)
    scheduler.add(ask("b", [9] * 22, max_tokens=1))
    out = step(scheduler)
    assert [move.fill for move in out.moves] == [False] * 3 * len(scheduler.config.groups)
    assert {move.block for move in out.moves} <= {b for blocks in out.scheduled[0].new_blocks for b in blocks}
    assert len({move.digest for move in out.moves}) == 3
    return scheduler


def test_a_sequence_waits_for_its_blocks_and_others_do_not_wait_for_it() -> None:
    scheduler = evicted()
    scheduler.add(ask("aa", PROMPT))
    scheduler.add(ask("bbb", [5], max_tokens=9))
    out = scheduler.schedule()
    fills = [move.block for move in out.moves if move.fill]
    assert len(fills) == 3
    assert [new.request_id for new in out.new] == ["bbb"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    update(scheduler, out)
    before = scheduler.blocks_cached
    step(scheduler, {fills[0]: True, fills[2]: True})
    assert (scheduler.num_waiting, scheduler.blocks_cached) == (1, before)
    step(scheduler, {fills[1]: True})
    assert (scheduler.num_waiting, scheduler.blocks_cached) == (1, before + 3)
    out = step(scheduler)
    [new] = out.new
    assert (new.request_id, new.blocks[0]) == ("aa", fills)
    assert [(row.start, row.token_ids) for row in out.scheduled if row.seq_id == new.seq_id] == [(12, [13])]
    assert scheduler.prefix_stats.hit_tokens == 12


def test_lost_blocks_are_computed_and_not_fetched_again() -> None:
    scheduler = evicted()
    scheduler.add(ask("aa", PROMPT))
    out = scheduler.schedule()
    assert not out.scheduled  # all there is waits for moves
    assert scheduler.has_work()
    fills = [move.block for move in out.moves if move.fill]
    update(scheduler, out, {fills[0]: True, fills[1]: False, fills[2]: True})
    out = step(scheduler)
    assert not [move for move in out.moves if move.fill]
    assert out.scheduled[0].start == 4
    assert out.new[0].blocks == ([fills[0]],)


def test_blocks_of_an_aborted_fetch_are_held_until_nothing_writes_to_them() -> None:
    scheduler = evicted()
    scheduler.add(ask("aa", PROMPT))
    out = scheduler.schedule()
    fills = [move.block for move in out.moves if move.fill]
    [event] = scheduler.abort("aa")
    assert event.finish_reason is FinishReason.ABORT
    assert (scheduler.blocks_used, scheduler.num_waiting) == (3, 0)
    assert scheduler.has_work()
    update(scheduler, out, dict.fromkeys(fills[:2], True))
    assert scheduler.blocks_used == 3
    step(scheduler, {fills[2]: True})
    assert (scheduler.blocks_used, scheduler.has_work()) == (0, False)
    scheduler.add(ask("aaa", PROMPT))
    assert step(scheduler).scheduled[0].start == 12  # they came all the same


def test_a_sliding_group_fetches_the_blocks_of_its_window() -> None:
    groups = (FullGroup((0,)), SlidingGroup((1,), 5))
    scheduler = evicted(groups=groups, num_blocks=12, max_num_batched_tokens=64)
    scheduler.add(ask("aa", PROMPT))
    fills = [(move.group, move.block) for move in scheduler.schedule().moves if move.fill]
    assert [group for group, _ in fills] == [0, 0, 0, 1]


def test_a_block_of_no_move_is_refused_and_changes_nothing() -> None:
    scheduler = make(Kept())
    scheduler.add(ask("a", PROMPT))
    out = scheduler.schedule()
    with pytest.raises(ValueError, match="block 2 is not being filled"):
        update(scheduler, out, {2: True})
    assert update(scheduler, out)


def test_a_digest_is_of_everything_before_it() -> None:
    root = root_digest(b"weights", "tenant", "salt")
    others = [("other", "tenant", "salt"), ("weights", "tenants", "alt"), ("weights", "", "salt")]
    digests = {root_digest(seed.encode(), tenant, salt) for seed, tenant, salt in others}
    assert len(digests | {root}) == 4
    assert chain(chain(root, b"1"), b"2") != chain(chain(root, b"2"), b"2")
    assert root.hex() == "300d7a13868552e95e4820b62b784164"  # in every process


def roomy() -> Scheduler:
    """A scheduler with room for several, whose tier keeps the blocks of PROMPT."""
    tier: Any = evicted().caches.tier
    return make(tier, num_blocks=24)


def test_a_second_sequence_joins_a_fetch() -> None:
    """Nothing is read twice; both have what came, and what a fetch lost is fetched again by the second alone."""
    scheduler = evicted()
    scheduler.add(ask("aa", PROMPT))
    scheduler.add(ask("aaa", [*PROMPT, 14]))
    out = scheduler.schedule()
    fills = [move.block for move in out.moves if move.fill]
    assert len(fills) == 3
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    update(scheduler, out, dict.fromkeys(fills[:2], True))
    assert scheduler.num_waiting == 2
    assert not step(scheduler, {fills[2]: True}).moves
    out = step(scheduler)
    assert [new.blocks[0] for new in out.new] == [fills, fills]
    assert [row.start for row in out.scheduled] == [12, 12]
    assert scheduler.prefix_stats.hit_tokens == 24


def test_what_a_joined_fetch_lost_is_fetched_again() -> None:
    scheduler = roomy()
    for name in ("aa", "aaa"):
        scheduler.add(ask(name, PROMPT))
    out = scheduler.schedule()
    fills = [move.block for move in out.moves if move.fill]
    update(scheduler, out, {fills[0]: True, fills[1]: False, fills[2]: True})
    out = scheduler.schedule()
    [new] = out.new
    assert new.request_id == "aa"
    assert out.scheduled[0].start == 4, "it has fetched once"
    again = [move.block for move in out.moves if move.fill]
    assert len(again) == 2, "the second has only joined"
    update(scheduler, out, dict.fromkeys(again, True))
    out = step(scheduler)
    assert [new.request_id for new in out.new] == ["aaa"]


@pytest.mark.parametrize("gone", ["aa", "aaa"])
def test_of_two_that_wait_for_a_fetch_either_may_be_aborted(gone: str) -> None:
    scheduler = evicted()
    for name in ("aa", "aaa"):
        scheduler.add(ask(name, PROMPT))
    out = scheduler.schedule()
    fills = [move.block for move in out.moves if move.fill]
    scheduler.abort(gone)
    scheduler.audit()
    assert scheduler.num_waiting == 1
    update(scheduler, out, dict.fromkeys(fills, True))
    out = step(scheduler)
    assert [new.request_id for new in out.new] == [{"aa": "aaa", "aaa": "aa"}[gone]]
    assert out.scheduled[0].start == 12


@pytest.mark.parametrize(("share", "copied"), [(0.9, True), (1.1, False)])
def test_blocks_are_copied_where_that_takes_less_than_computing_them(share: float, copied: bool) -> None:
    """By the cost model of steps: three blocks, each of which takes a little more or less than a third of the time."""
    scheduler = roomy()
    tier: Any = scheduler.caches.tier
    tier.seconds = share * scheduler.estimates.costs.prompt_seconds(12) / 3
    scheduler.add(ask("aa", PROMPT))
    out = scheduler.schedule()
    assert sum(move.fill for move in out.moves) == 3 * copied
    assert [row.start for row in out.scheduled] == ([] if copied else [0])


@pytest.mark.parametrize("length", [0.005, 0.02])
@pytest.mark.parametrize(("share", "copied"), [(0.9, True), (1.1, False)])
def test_beside_a_sequence_all_wait_as_little_as_can_be(length: float, share: float, copied: bool) -> None:
    """A copy takes a tenth of a step, of which it may have 2 %: a block a step is reckoned with. Computed, the prompt
    holds up another sequence, too."""
    scheduler = roomy()
    tier: Any = scheduler.caches.tier
    scheduler.add(ask("a", [90, 91, 92, 93], max_tokens=9))
    step(scheduler)
    costs: Any = scheduler.estimates.costs
    tier.seconds, costs.token_seconds = length / 10, lambda: length
    costs.prompt_seconds = lambda tokens: tokens / 12 * 3 * length / (2 * share)
    scheduler.add(ask("aa", PROMPT))
    out = scheduler.schedule()
    assert sum(move.fill for move in out.moves) == 3 * copied


def test_nobody_joins_a_fetch_that_takes_longer_than_to_compute() -> None:
    scheduler = roomy()
    tier: Any = scheduler.caches.tier
    scheduler.add(ask("aa", PROMPT))
    out = scheduler.schedule()
    assert sum(move.fill for move in out.moves) == 3
    tier.seconds = 1e9
    scheduler.add(ask("aaa", PROMPT))
    update(scheduler, out)
    out = scheduler.schedule()
    assert [new.request_id for new in out.new] == ["aaa"]
    assert out.scheduled[0].start == 0
