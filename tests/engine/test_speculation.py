"""Speculation changes how fast an answer comes, and no bit of it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from helpers.speculating import FORMATS, LENGTH, VOCAB, bits, costs_without_a_clock, edited, params, prompts
from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Offer, Room
from quire.types import RequestError


@pytest.fixture(autouse=True)
def _costs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts run depends on no clock here: every token costs a little."""
    costs_without_a_clock(monkeypatch)


@pytest.mark.parametrize("form", FORMATS)
def test_every_bit_is_that_without(checkpoint: Folder, form: str) -> None:
    name, formats = FORMATS[form]
    common = {"max_model_len": LENGTH, "progress": False, **formats}
    with LLM(checkpoint(name), **common) as llm:
        expected = bits(llm.generate(prompts(), params()))
    groups = 4 if "windows" in name else 1
    for step_tokens, seqs, more in [(256, 8, {}), (24, 3, {"num_kv_blocks": 14 * groups})]:
        with LLM(
            checkpoint(name), speculate="ngram", max_num_batched_tokens=step_tokens, max_num_seqs=seqs, **common,
            **more,
        ) as llm:  # fmt: skip
            assert bits(llm.generate(prompts(), params())) == expected
            records = llm.step_records()
            assert 20 < sum(r.accepted for r in records) < sum(r.drafted for r in records)


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_prediction_makes_an_answer_faster_and_no_other(checkpoint: Folder, speculate: str) -> None:
    common = {"max_model_len": LENGTH, "progress": False, "speculate": speculate}
    rng = random.Random(4)
    with LLM(checkpoint("qwen3"), **common) as llm:
        plain = llm.generate(prompts(), params())
        predicted = [edited(output.outputs[0].token_ids, rng) for output in plain]
        predicted[6] = [rng.randrange(3, VOCAB) for _ in range(40)]
        outputs = llm.generate(prompts(), params(), prediction=predicted)
        assert bits(outputs) == bits(plain)
        before = len(llm.step_records())
        llm.generate(prompts()[:1], params()[0], prediction=[plain[0].outputs[0].token_ids])
        assert len(llm.step_records()) - before < 30  # for 60 tokens
    for i, output in enumerate(outputs):
        used = output.usage
        assert used.accepted_prediction_tokens <= used.accepted_draft_tokens <= used.draft_tokens
        if i not in {6, 7}:  # the grammar of the last forces most tokens
            assert used.accepted_prediction_tokens > 8
            assert used.rejected_prediction_tokens > 0
        if speculate == "off":
            assert used.accepted_draft_tokens == used.accepted_prediction_tokens
            assert plain[i].usage.draft_tokens == 0


def test_samples_that_end_or_are_preempted_keep_their_place(checkpoint: Folder) -> None:
    common = {"max_model_len": LENGTH, "progress": False, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with LLM(checkpoint("qwen3"), num_kv_blocks=14, **common) as llm:
        plain = llm.generate(prompts()[:4], params()[:4])
        predicted = [output.outputs[0].token_ids for output in plain]
        outputs = llm.generate(prompts()[:4], params()[:4], prediction=predicted)
        assert bits(outputs) == bits(plain)
        assert sum(record.preempted for record in llm.step_records()) > 0
        assert outputs[0].usage.accepted_prediction_tokens > 30


def test_earlier_outputs_of_the_same_namespace_are_drafts(checkpoint: Folder) -> None:
    common = {"max_model_len": LENGTH, "progress": False}
    asked = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    config = {"method": "ngram", "recent_outputs": 1000}
    with LLM(checkpoint("qwen3"), speculative_config=config, **common) as llm:

        def generate(salt: str) -> RequestOutput:
            return llm.generate([[3, 4]], asked, cache_salt=salt)[0]

        first, again, other = generate("a"), generate("a"), generate("b")
        assert bits([first]) == bits([again]) == bits([other])
        assert first.usage.accepted_draft_tokens == other.usage.accepted_draft_tokens < 10
        assert again.usage.accepted_draft_tokens > 25


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([3, VOCAB], f"prediction: {VOCAB} is not a token id below the vocabulary size {VOCAB}"),
        ([3] * LENGTH, f"prediction: {LENGTH} tokens do not fit"),
        (["a", "b"], "prediction: got 2 for 1 prompts"),
        (3, "prediction: must be a string"),
    ],
)
def test_a_bad_prediction_is_named(checkpoint: Folder, prediction: Any, message: str) -> None:
    with (
        LLM(checkpoint("qwen3"), max_model_len=LENGTH, progress=False) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.generate([[3, 4]], prediction=prediction)


class WrongProposer(NgramProposer):
    """One that fails in some way."""

    way = ""

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        return {seq_id: Offer(most, 0) for seq_id in seq_ids}

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, list[int]]:
        if self.way == "raises":
            raise RuntimeError("no draft today")
        started = time.thread_time()
        while self.way == "slow" and time.thread_time() < started + 1.2 * NgramProposer.MOST_SECONDS:
            pass
        made = {seq_id: [3] * room.drafts for seq_id, room in rooms.items()}
        for seq_id, (count, _) in rooms.items():
            if self.way == "outside":
                made[seq_id][-1] = VOCAB
            elif self.way == "too many":
                made[seq_id] += [4] * (count + 100)
        return made


@pytest.mark.parametrize("way", ["raises", "outside", "too many", "slow", "always wrong"])
def test_a_proposer_that_fails_harms_no_request(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    common = {"max_model_len": LENGTH, "progress": False}
    with LLM(checkpoint("qwen3"), **common) as llm:
        expected = bits(llm.generate(prompts(), params()))
    monkeypatch.setattr(WrongProposer, "way", way)
    monkeypatch.setattr("quire.speculate.ngram.NgramProposer", WrongProposer)
    with LLM(checkpoint("qwen3"), speculate="ngram", **common) as llm:
        assert bits(llm.generate(prompts(), params())) == expected
        drafted = sum(record.drafted for record in llm.step_records())
        assert (drafted > 0) == (way == "always wrong")


def test_the_comparison_finds_drafts_that_are_accepted_wrongly(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: one that takes every draft for right is caught."""
    from quire.worker import worker

    def trusting(sampling: Any, drafts: list[int], sampled: Any, result: Any) -> list[int]:
        tokens = sampled.token_ids
        for k, draft in enumerate(drafts):
            if draft >= 0:
                tokens[k] = draft
        return right(sampling, drafts, sampled, result)

    common = {"max_model_len": LENGTH, "progress": False}
    with LLM(checkpoint("qwen3"), **common) as llm:
        expected = bits(llm.generate(prompts(), params()))
    right = worker.accept
    monkeypatch.setattr(worker, "accept", trusting)
    with LLM(checkpoint("qwen3"), speculate="ngram", **common) as llm:
        assert bits(llm.generate(prompts(), params())) != expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "oracle"}, "speculative_config.method: 'oracle' is not one of ngram"),
        ({"num_speculative_tokens": 3}, "speculative_config.method: is missing"),
        (
            {"method": "ngram", "num_speculative_tokens": -1},
            "num_speculative_tokens: -1 is not an integer from 1",
        ),
        ({"method": "ngram", "gamma": 4}, "speculative_config.gamma: is not a field"),
        ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 4}, "prompt_lookup_max: 4 is not"),
        ({"method": "ngram", "recent_outputs": -1}, "recent_outputs: -1 is not an integer from 0"),
        ("{", "speculative_config: not JSON"),
        ("[]", "speculative_config: not a JSON object"),
    ],
)
def test_a_bad_config_is_one_clear_error(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("unused", speculative_config=config)
