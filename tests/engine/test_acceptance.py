"""Drafts that are judged other than by the sample: the distribution of the target, and what is said of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from helpers.speculating import LENGTH, bits, params, prompts
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.executor.base import Judging
from quire.speculate.allotment import Allotment
from quire.speculate.proposer import Room
from quire.worker.worker import Worker

COMMON: dict[str, Any] = {"max_model_len": LENGTH, "progress": False, "dtype": "float32"}
TOKENS, SAMPLES, ROUNDS = (10, 11, 12), 128, 3


@pytest.fixture(autouse=True)
def _two_drafts_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts run depends on no clock here."""
    monkeypatch.setattr(
        Allotment,
        "share",
        lambda self, rows, offers: {
            seq_id: Room(min(2, offer.length), min(2, offer.length)) for seq_id, offer in offers.items()
        },
    )


def drafting(checkpoint: Folder, acceptance: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(checkpoint("llama2")), "acceptance": acceptance}


def texts(llm: LLM, first_seed: int, prediction: list[list[int]] | None = None) -> Counter[tuple[int, ...]]:
    """How often each answer of three tokens came, at a temperature where all do."""
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(first_seed, first_seed + ROUNDS):
        asked = SamplingParams(
            max_tokens=3, n=SAMPLES, seed=seed, temperature=0.5, allowed_token_ids=TOKENS, ignore_eos=True
        )
        (output,) = llm.generate([prompts()[6]], asked, prediction=prediction)
        found.update(tuple(sample.token_ids) for sample in output.outputs)
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: Folder) -> Counter[tuple[int, ...]]:
    """Answers without speculation."""
    with LLM(checkpoint("qwen3"), max_num_seqs=32, **COMMON) as llm:
        return texts(llm, 0)


def same(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """P-value of the hypothesis that two equally large samples have one distribution, by chi-square."""
    cells = [(one[text], other[text]) for text in one.keys() | other.keys()]
    common = [cell for cell in cells if sum(cell) >= 16]
    common.append(tuple(map(sum, zip(*(cell for cell in cells if sum(cell) < 16), strict=True))) or (0, 0))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in common if a + b)
    freedom = torch.tensor((len(common) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_rejection_keeps_the_distribution(
    checkpoint: Folder, expected: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = drafting(checkpoint, "rejection")
    with LLM(checkpoint("qwen3"), speculative_config=judged, max_num_seqs=32, **COMMON) as llm:
        assert same(texts(llm, 2000), expected) > 1e-3
        records = llm.step_records()
        assert 50 < sum(r.accepted for r in records) < sum(r.drafted for r in records)
        assert llm._built.core.speculation is not None
        assert not llm._built.core.speculation.faults
        # Negative control: nearly every draft is accepted.
        worker = llm._built.core.worker
        assert isinstance(worker, Worker)
        monkeypatch.setattr(worker, "_judging", Judging("typical", 1e-6))
        assert same(texts(llm, 3000), expected) < 1e-6


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_rejection_keeps_the_distribution_with_a_prediction(
    checkpoint: Folder, expected: Counter[tuple[int, ...]], method: str
) -> None:
    """Tokens of a prediction were drawn from nothing: they count as certain, and are accepted as often as they are
    likely. A method's drafts behind them are judged by what they were drawn from."""
    judged = {"method": "ngram", "acceptance": "rejection"}
    if method == "draft_model":
        judged = drafting(checkpoint, "rejection")
    with LLM(checkpoint("qwen3"), speculative_config=judged, max_num_seqs=32, **COMMON) as llm:
        assert same(texts(llm, 4000, [[*TOKENS, *TOKENS]]), expected) > 1e-3
        (output,) = llm.generate(
            [prompts()[6]], SamplingParams(n=32, max_tokens=3, allowed_token_ids=TOKENS, ignore_eos=True),
            prediction=[[*TOKENS, *TOKENS]],
        )  # fmt: skip
        used = output.usage
        assert used.accepted_prediction_tokens > 0 < used.rejected_prediction_tokens
        assert llm._built.core.speculation is not None
        assert not llm._built.core.speculation.faults


@pytest.mark.parametrize(("method", "acceptance"), [("ngram", "typical"), ("draft_model", "rejection")])
def test_greedy_answers_are_those_without(checkpoint: Folder, method: str, acceptance: str) -> None:
    greedy = [(prompt, way) for prompt, way in zip(prompts(), params(), strict=True) if way.temperature == 0]
    asked, ways = [prompt for prompt, _ in greedy], [way for _, way in greedy]
    with LLM(checkpoint("qwen3"), **COMMON) as llm:
        expected = bits(llm.generate(asked, ways))
    how: dict[str, Any] = {"speculate": "ngram", "speculation_acceptance": acceptance}
    if method == "draft_model":
        how = {"speculative_config": drafting(checkpoint, acceptance)}
    with LLM(checkpoint("qwen3"), **how, **COMMON) as llm:
        assert bits(llm.generate(asked, ways)) == expected
        assert sum(record.accepted for record in llm.step_records()) > 0


def test_what_rejection_keeps_is_in_the_plan(checkpoint: Folder) -> None:
    plans = []
    for acceptance in ("same", "rejection"):
        with LLM(checkpoint("qwen3"), speculative_config=drafting(checkpoint, acceptance), **COMMON) as llm:
            plans.append(llm._built.plan.parts["drafts"])
            vocab = llm._built.program.vocab
    assert plans[1] - plans[0] == 64 * vocab * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation_acceptance": "rejection"}, "speculation_acceptance: rejection needs a method"),
        ({"speculate": "ngram", "speculation_acceptance": "lossy"}, "speculation_acceptance: 'lossy' is not one"),
        (
            {
                "speculative_config": {"method": "ngram", "acceptance": "typical"},
                "speculation_acceptance": "rejection",
            },
            "speculation_acceptance: rejection is not typical of speculative_config",
        ),
        (
            {"speculative_config": {"method": "ngram", "acceptance": "any"}},
            "speculative_config.acceptance: 'any' is not one of same, rejection, typical",
        ),
        (
            {"speculative_config": {"method": "ngram", "epsilon": 0}},
            "speculative_config.epsilon: 0 is not a number above 0 and up to 1",
        ),
    ],
)  # fmt: skip
def test_a_bad_option_is_one_clear_error(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("unused", **options)
