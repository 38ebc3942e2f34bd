"""A prediction is followed, and found again after every difference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.speculate.combined import Combined
from quire.speculate.ngram import NgramProposer
from quire.speculate.prediction import LONG, PredictionProposer
from quire.speculate.proposer import Proposer, Room
from quire.types import NewSeq, SamplingParams, TokenIds


def new(
    prediction: list[int] | None, output: list[int] | None = None, prompt: list[int] | None = None
) -> NewSeq:
    prompt = prompt or [1]
    return NewSeq(
        seq_id=0, token_ids=prompt + (output or []), prompt_len=len(prompt), params=SamplingParams(), sample_index=0,
        seed=0, blocks=(), prediction=None if prediction is None else TokenIds(prediction),
    )  # fmt: skip


def drafts(proposer: Proposer, most: int) -> list[int]:
    """What is proposed for the sequence."""
    offers = proposer.look([0], most)
    return proposer.propose({0: Room(offers[0].length, most)})[0] if offers else []


def rows(predicted: list[int], answer: list[int], most: int) -> tuple[int, int]:
    """The rows that an answer takes, and how many drafts were wrong."""
    proposer, known, count, wrong = PredictionProposer(), 1, 1, 0
    proposer.start(new(predicted, answer[:1]))
    while known < len(answer):
        made = drafts(proposer, most)
        right = 0
        while right < len(made) and known + right < len(answer) and made[right] == answer[known + right]:
            right += 1
        wrong += len(made) - right
        proposer.extend(0, answer[known : known + right + 1])
        known += right + 1
        count += 1
    return count, wrong


TEXT = list(range(100, 300))


def test_an_equal_answer_is_drafted_whole() -> None:
    assert rows(TEXT, TEXT, 16) == (1 + -(-199 // 17), 0)


@pytest.mark.parametrize(
    ("predicted", "more"),
    [
        ([*TEXT[:50], 7, *TEXT[51:]], 1),  # another token
        ([*TEXT[:50], 7, 8, 9, *TEXT[50:]], 3),  # tokens that the answer leaves out
        (TEXT[:50] + TEXT[53:], 4),  # tokens that only the answer has
        (TEXT[100:] + TEXT[:100], 4),  # parts in another order
        ([7, *TEXT[1:]], 1),
    ],
)
def test_a_difference_costs_a_few_rows(predicted: list[int], more: int) -> None:
    assert rows(predicted, TEXT, 16)[0] <= 1 + -(-199 // 17) + more


def test_of_equal_places_the_nearest_is_taken() -> None:
    line = [5, 6, 7]
    predicted = [token for at in range(60) for token in (*line, 1000 + at)]
    answer = [*predicted[:80], 9, *predicted[80:]]
    assert rows(predicted, answer, 16)[0] <= 1 + -(-len(answer) // 17) + 4


def test_random_edits_leave_most_of_a_text() -> None:
    rng = random.Random(1)
    words = [[rng.randrange(500) for _ in range(rng.randint(1, 4))] for _ in range(80)]
    answer = [token for _ in range(800) for token in rng.choice(words)][:2000]
    predicted = [rng.randrange(500) if rng.random() < 0.05 else token for token in answer]
    taken, _ = rows(predicted, answer, 16)
    assert len(answer) / taken > 6


def test_a_sequence_that_resumes_goes_on_at_its_place() -> None:
    proposer = PredictionProposer()
    proposer.start(new(TEXT, TEXT[:30]))
    assert drafts(proposer, 4) == TEXT[30:34]
    assert proposer.look([0], 4)[0].grade == 2


def test_grades_say_how_sure_a_draft_is() -> None:
    proposer = PredictionProposer()
    proposer.start(new(TEXT))
    seen = []
    for token in [*TEXT[:LONG], 7, *TEXT[LONG + 1 : LONG + 3]]:
        proposer.extend(0, [token])
        seen.append(proposer.look([0], 4)[0].grade)
    assert seen == [1] * (LONG - 2) + [2, 2] + [0] + [1, 1]
    proposer.extend(0, [8])
    proposer.extend(0, [9])
    assert proposer.look([0], 4) == {}


def test_samples_share_what_is_made_of_a_prediction() -> None:
    proposer, shared = PredictionProposer(), TokenIds(TEXT)
    for seq_id in range(3):
        proposer.start(replace(new(TEXT), seq_id=seq_id, prediction=shared, request_id="one"))
        proposer.extend(seq_id, [7, *TEXT[20:22]])
    offers = proposer.look(range(3), 2)
    assert proposer.propose(dict.fromkeys(offers, Room(2, 2))) == dict.fromkeys(range(3), TEXT[22:24])
    assert len(proposer._predictions) == 1
    for seq_id in range(3):
        proposer.stop(seq_id)
    assert not proposer._predictions


def test_no_prediction_and_one_that_is_used_up_offer_nothing() -> None:
    proposer = PredictionProposer()
    proposer.start(new(None))
    proposer.extend(0, [1, 2])
    assert proposer.look([0], 4) == {}
    proposer.stop(0)
    proposer.start(new(TEXT, TEXT))
    assert proposer.look([0], 4) == {}


def test_the_method_goes_on_where_the_prediction_has_nothing_sure() -> None:
    proposer = Combined(PredictionProposer(), NgramProposer(2, 32))
    proposer.start(new(TEXT, prompt=[50, 51, 52, 53, 54, 7]))
    proposer.extend(0, TEXT[:3])
    assert drafts(proposer, 2) == TEXT[3:5]
    proposer.extend(0, [50])
    assert drafts(proposer, 2) == TEXT[4:6]  # a guess, where there is nothing else
    proposer.extend(0, [51])
    offer = proposer.look([0], 2)[0]
    assert offer.grade == PredictionProposer.GRADES
    assert drafts(proposer, 2) == [52, 53]
    proposer.stop(0)
    assert proposer.look([], 2) == {}


@pytest.mark.parametrize("period", [[5], [5, 6, 7]])
def test_a_repeating_text_does_not_lead_back_to_the_same_difference(period: list[int]) -> None:
    answer = period * (600 // len(period))
    predicted = [900 + i if i % 20 == 19 else token for i, token in enumerate(answer)]
    taken, _ = rows(predicted, answer, 16)
    assert len(answer) / taken > 5
