"""What speculation asks of its proposer where there is little to be had."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

import pytest

from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Offer, Proposer, Room
from quire.speculate.speculation import Speculation
from quire.speculate.step_costs import PassCosts
from quire.types import DRAFT, NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput, StepOutput, TokenIds

PROMPT = list(range(100, 140))
STEP = 1e-6  # seconds: a look takes many such steps


class Guesser:
    """Always guesses wrong, and notes what it is told and asked."""

    GRADES = 1
    MOST_SECONDS = inf

    def __init__(self) -> None:
        self.passes: PassCosts | None = PassCosts(64, 0.5)
        self.texts: dict[int, list[int]] = {}
        self.ended: dict[int, list[int]] = {}
        self.looks = 0

    def start(self, new: NewSeq) -> None:
        self.texts[new.seq_id] = list(new.token_ids)

    def stop(self, seq_id: int) -> None:
        if seq_id in self.texts:
            self.ended[seq_id] = self.texts.pop(seq_id)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        self.texts[seq_id] += tokens

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        self.looks += 1
        return {seq_id: Offer(most, 0) for seq_id in seq_ids}

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, list[int]]:
        return {seq_id: [0] * room.drafts for seq_id, room in rooms.items()}


class FeatureGuesser(Guesser):
    """One that takes what a step leaves."""

    shown = 0
    KEPT = 32

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        self.shown += 1


class CountingLookup(NgramProposer):
    """Prompt lookup that counts how often it is asked."""

    looks = 0

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        CountingLookup.looks += 1
        return super().look(seq_ids, most)


class Running:
    """Sequences whose texts are given; tokens of a step cost a tenth of `seconds` each."""

    def __init__(self, proposer: Proposer, texts: list[list[int]]) -> None:
        self.speculation = Speculation(proposer, vocab=2000, max_rows=8, most=64, depth=8)
        self.texts, self.made = texts, [0] * len(texts)
        self._new = [
            NewSeq(i, list(PROMPT), len(PROMPT), SamplingParams(), 0, 0, ()) for i in range(len(texts))
        ]
        self._drafts = [0] * len(texts)
        self._known_texts = [list(PROMPT) for _ in texts]
        self.gone: list[int] = []

    def step(self, seconds: float = STEP) -> list[int]:
        """Run a step; how many drafts each row had."""
        rows = [
            ScheduledSeq(i, len(PROMPT) + made - 1, [0] + [DRAFT] * drafts, (), 1 + drafts)
            for i, (made, drafts) in enumerate(zip(self.made, self._drafts, strict=True))
            if i not in self.gone
        ]
        out = SchedulerOutput(0, rows, self._new, [i for i in self.gone if i in self._known()])
        self._new = []
        idles = self.speculation.idles(out, sum(row.drafts for row in rows))
        if not idles:
            self.speculation.fill(out, self._known_texts.__getitem__)
        tokens = []
        for row in rows:
            text, made = self.texts[row.seq_id], self.made[row.seq_id]
            right = 0
            while right < row.drafts and row.token_ids[1 + right] == text[made + right]:
                right += 1
            tokens.append(text[made : made + right + 1])
            self.made[row.seq_id] += right + 1
        result = StepOutput(tokens, [None] * len(rows), [None] * len(rows))
        if not idles:
            self.speculation.advance(out, result, seconds * (1 + 0.1 * out.num_tokens))
        for row, added in zip(rows, tokens, strict=True):
            self._known_texts[row.seq_id] += added
        for i, row in enumerate(rows):
            self._drafts[row.seq_id] = len(result.drafts.get(i, ()))
        return [row.drafts for row in rows]

    def _known(self) -> Collection[int]:
        return self.speculation._following


def random_text(seed: int, length: int = 5000) -> list[int]:
    return [random.Random(seed * length + n).randrange(1, 2000) for n in range(length)]


def test_a_proposer_without_luck_is_hardly_asked_and_misses_no_token() -> None:
    proposer = Guesser()
    running = Running(proposer, [random_text(0), random_text(1)])
    for _ in range(2000):
        running.step()
    assert proposer.looks < 100
    running.gone = [1]
    while proposer.looks < 100 and len(proposer.texts[0]) < len(PROMPT) + running.made[0]:
        running.step()
    assert proposer.texts[0] == PROMPT + running.texts[0][: running.made[0]]
    assert proposer.ended[1] == PROMPT + running.texts[1][: running.made[1]]


def test_short_steps_need_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them are looked at in any way, whatever the method, and none where nobody is followed."""
    seen = list[int]()
    advance = Speculation.advance

    def counted(self: Speculation, out: SchedulerOutput, result: StepOutput, seconds: float) -> None:
        seen.append(out.step)
        advance(self, out, result, seconds)

    monkeypatch.setattr(Speculation, "advance", counted)
    for proposer in (Guesser(), NgramProposer(3, 32)):
        running = Running(proposer, [random_text(0), random_text(1)])
        for _ in range(500):
            running.step()
        seen.clear()
        for _ in range(1000):
            running.step()
        assert len(seen) < 100
    running.gone = [0, 1]
    seen.clear()
    for _ in range(100):
        running.step()
    assert len(seen) == 1


def test_steps_that_take_long_are_all_looked_at() -> None:
    proposer = Guesser()
    running = Running(proposer, [random_text(0)])
    for _ in range(100):
        running.step(seconds=1.0)
    assert proposer.looks == 100


def test_a_match_that_begins_is_run_in_the_next_step() -> None:
    """The proposer is asked only where there is one."""
    start = random_text(2, 400)
    running = Running(CountingLookup(3, 32), [start + start])
    while running.made[0] < len(start):
        running.step(seconds=1.0)
    assert CountingLookup.looks == 0
    while not sum(running.step(seconds=1.0)):
        assert running.made[0] < len(start) + 8  # three tokens are a match; a step without drafts may be due
    while running.made[0] < len(start) + 300:
        running.step(seconds=1.0)
    assert running.speculation.accepted[0] > 20


def test_a_sequence_that_met_a_rest_goes_on_without_features() -> None:
    """They are gone when it ends. Sequences that start later are followed."""
    proposer = FeatureGuesser()
    proposer.KEPT = 1000  # looks are never so far that they would be given up before
    running = Running(proposer, [random_text(0)])
    costs = running.speculation._allotment.costs
    for tokens in range(1, 20):
        for _ in range(3):
            costs.observe(tokens, STEP)  # drafts seem free, and are not
    while not running.speculation._rests.resting:
        running.step()
    assert not running.speculation._following
    shown = proposer.shown
    for _ in range(2000):
        running.step()
    assert proposer.shown == shown
    running._new = [NewSeq(0, [*PROMPT], len(PROMPT), SamplingParams(), 0, 0, ())]
    running.step()
    assert proposer.shown > shown


def test_features_of_short_steps_are_given_up_where_the_next_look_is_far() -> None:
    """Nothing is shown meanwhile, and a sequence that starts before the look is not followed; a later one is."""
    proposer = FeatureGuesser()
    running = Running(proposer, [random_text(0)])
    for _ in range(40):
        running.step()
    assert not running.speculation._following
    shown = proposer.shown
    running._new = [NewSeq(0, [*PROMPT], len(PROMPT), SamplingParams(), 0, 0, ())]
    for _ in range(40):
        running.step()
    assert proposer.shown == shown
    for _ in range(1000):
        running.step()
    running._new = [NewSeq(0, [*PROMPT], len(PROMPT), SamplingParams(), 0, 0, ())]
    running.step()
    assert proposer.shown > shown


@pytest.mark.parametrize(("taking", "quiet"), [(0.0, False), (0.5, True)])
def test_a_look_pays_for_the_features_that_were_taken_for_it(
    taking: float, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only they move: half a step of taking is paid by a hundred steps without."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        thread_time = perf_counter

    clock = Clock()

    class Slow(FeatureGuesser):
        def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
            clock.now += taking

    monkeypatch.setattr("quire.speculate.speculation.time", clock)
    running = Running(Slow(), [random_text(0)])
    for _ in range(40):
        running.step(seconds=1.0)
    assert (running.speculation._rests.quiet() > 50) == quiet


def test_a_prediction_keeps_features() -> None:
    """Its request is looked at again, and the method may go on where the prediction ends."""
    running = Running(FeatureGuesser(), [random_text(0)])
    running._new[0].prediction = TokenIds([1, 2, 3])
    for _ in range(40):
        running.step()
    assert running.speculation._following


def test_heads_are_shown_the_step_before_a_look() -> None:
    """They need no other, so their sequences stay, and short steps pass by."""

    class Heads(FeatureGuesser):
        KEPT = 0

    proposer = Heads()
    running = Running(proposer, [random_text(0)])
    for _ in range(2000):
        running.step()
    assert running.speculation._following
    assert 2 < proposer.shown < 100
    assert 0 <= proposer.shown - proposer.looks <= 1 + running.speculation.rows


def test_nobody_is_asked_while_no_drafts_are_allowed() -> None:
    proposer = Guesser()
    running = Running(proposer, [random_text(0)])
    running.speculation.longest = 0
    for _ in range(100):
        running.step(seconds=1.0)
    assert proposer.looks == 0
    running.speculation.longest = 8
    while not proposer.looks:
        running.step(seconds=1.0)
