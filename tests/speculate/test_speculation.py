"""What Speculation counts of the steps that it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from quire.cache_kinds import FullGroup, StateGroup
from quire.config.schema import ResolvedConfig
from quire.config.speculative import SpeculativeConfig
from quire.speculate.build import max_draft_tokens
from quire.speculate.prediction import PredictionProposer
from quire.speculate.speculation import Speculation
from quire.types import (
    DRAFT,
    NewSeq,
    SamplingParams,
    ScheduledSeq,
    SchedulerOutput,
    StepOutput,
    TokenIds,
    UnsupportedModelError,
)

PREDICTION = list(range(10, 90))


class Steps:
    """Steps of one sequence whose answer is given; a step takes a second and a tenth of one for each token."""

    def __init__(self, prediction: list[int] | None, *, everyone: bool = False) -> None:
        proposer = PredictionProposer()
        self.speculation = Speculation(
            proposer, vocab=100, max_rows=4, most=64, depth=8, predicted=proposer.GRADES, everyone=everyone
        )
        self._new = [
            NewSeq(
                seq_id=0, token_ids=[1, 2], prompt_len=2, params=SamplingParams(), sample_index=0, seed=0, blocks=(),
                prediction=None if prediction is None else TokenIds(prediction),
            )
        ]  # fmt: skip
        self._drafts = 0
        self._text = [1, 2]
        self.place = 0

    def step(self, answer: list[int]) -> StepOutput:
        """Run the next step."""
        row = ScheduledSeq(0, 2 + self.place, [0] + [DRAFT] * self._drafts, (), 1 + self._drafts)
        out = SchedulerOutput(self.place, [row], self._new, [])
        self._new = []
        self.speculation.fill(out, lambda seq_id: self._text)
        drafts, tokens = row.token_ids[1:], answer[self.place :]
        right = 0
        while right < len(drafts) and drafts[right] == tokens[right]:
            right += 1
        result = StepOutput(
            [tokens[: right + 1]], [None], [None], seconds={"forward": 1 + 0.1 * len(row.token_ids)}
        )
        self.place += right + 1
        self.speculation.advance(out, result, sum(result.seconds.values()))
        self._text += result.token_ids[0]
        self._drafts = len(result.drafts.get(0, []))
        return result


def test_right_drafts_win_time() -> None:
    steps = Steps(PREDICTION)
    taken = 0
    while steps.place < 60:
        steps.step(PREDICTION)
        taken += 1
    counted = steps.speculation
    assert sum(counted.chosen) == counted.rows
    assert taken - 3 <= counted.rows < taken  # but for steps that show what one without drafts costs
    assert sum(count * rows for count, rows in enumerate(counted.chosen)) == counted.drafted
    assert sum(counted.accepted) == counted.drafted == steps.place - taken
    plain = 1.1 * steps.place
    ran = taken + 0.1 * (taken + counted.drafted)
    assert counted.seconds_won == pytest.approx(plain - ran, rel=0.05)


def test_wrong_drafts_lose_time() -> None:
    steps = Steps(PREDICTION)
    answer = PREDICTION[:2] + [5] * 40  # the first step shows what one without drafts costs
    while steps.place < len(answer) - 20:
        steps.step(answer)
    assert steps.speculation.drafted > 0 == sum(steps.speculation.accepted)
    assert steps.speculation.seconds_won < 0


def test_rows_say_whose_drafts_they_had() -> None:
    steps = Steps(PREDICTION)
    for _ in range(2):  # the second shows what a step without drafts costs
        assert steps.step(PREDICTION).drafted == {}
    result = steps.step(PREDICTION)
    drafts = result.drafted[0]
    assert drafts.predicted
    assert drafts.accepted == drafts.drafted == len(result.token_ids[0]) - 1 > 0
    assert result.seconds["drafts"] > 0


def test_a_model_with_states_has_no_drafts_and_no_method() -> None:
    groups = FullGroup((0,)), StateGroup((1,), 64)
    plain = cast(ResolvedConfig, SimpleNamespace(speculation=None))
    chosen = cast(ResolvedConfig, SimpleNamespace(speculation=SpeculativeConfig(method="ngram")))
    assert max_draft_tokens(plain, groups) == 0 < max_draft_tokens(plain, groups[:1])
    assert max_draft_tokens(chosen, groups[:1]) > 0
    with pytest.raises(UnsupportedModelError, match="ngram is not for a model with a state per sequence"):
        max_draft_tokens(chosen, groups)


def test_without_a_prediction_nothing_is_followed() -> None:
    steps = Steps(None)
    for _ in range(3):
        result = steps.step(PREDICTION)
        assert not result.drafts
        assert set(result.seconds) == {"forward"}
