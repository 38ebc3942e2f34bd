"""Trees of what a draft finds likely, in a running engine: what siblings add, and that they change no bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import drafts
from helpers.checkpoints import VOCAB
from helpers.speculating import bits, costs_without_a_clock, tree_rows
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.executor.base import I32, Guesses, Outputs
from quire.speculate.step_costs import PassCosts
from quire.types import Request, TokenIds
from quire.worker.trees import StepBranches
from quire.worker.worker import Worker

PROMPT, LENGTH = [5, 6, 7], 100
ASKED = SamplingParams(temperature=0.8, seed=3, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
COMMON: dict[str, Any] = {"max_model_len": 160, "progress": False, "dtype": "float32", "max_num_seqs": 2}


@pytest.fixture(autouse=True)
def _costs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a step costs a little, a pass of the draft almost nothing."""
    costs_without_a_clock(monkeypatch, 0.01)
    monkeypatch.setattr("quire.speculate.step_costs._FIRST_SLOPE", 0.01)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)


@pytest.fixture(params=["draft_model", "self", "eagle", "eagle3", "medusa"])
def config(request: pytest.FixtureRequest, checkpoint: Folder, tmp_path: Path) -> dict[str, Any]:
    method = request.param
    chosen = {"method": method, "num_speculative_tokens": 14}
    if method == "draft_model":
        chosen["model"] = str(checkpoint("smollm3"))
    elif method != "self":
        writers = {"eagle": drafts.write_eagle, "eagle3": drafts.write_eagle3, "medusa": drafts.write_medusa}
        chosen["model"] = str(writers[method](tmp_path / "draft"))
    return chosen


def scripted(monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Drafts name the right token of a text first or second, by chance."""
    rng = random.Random(1)

    def guess(
        self: Worker, outputs: Outputs, lines: I32, positions: I32, ids: I32 | None = None, count: int = 1
    ) -> Guesses:
        tokens, sure = np.full((len(lines), count), -1, np.int32), np.zeros((len(lines), count), np.float32)
        for row, position in enumerate(positions.tolist()):
            right = text[position] if position < len(text) else 3
            both = [right, (right + 1) % VOCAB]
            rng.shuffle(both)
            tokens[row, :2], sure[row, :2] = both[:count], [0.5, 0.45][:count]
        return Guesses(tokens, sure)

    monkeypatch.setattr(Worker, "guess", guess)


def test_siblings_are_accepted(
    checkpoint: Folder, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the second choice is right as often as the first, trees take fewer steps than chains."""
    folder, trees = checkpoint("smollm3"), tree_rows(monkeypatch)
    with LLM(folder, **COMMON) as llm:
        expected = bits(plain := llm.generate([PROMPT], ASKED))
    scripted(monkeypatch, PROMPT + plain[0].outputs[0].token_ids)
    steps = {}
    for top_k in (1, 2):
        with LLM(folder, speculative_config=config | {"top_k": top_k}, **COMMON) as llm:
            [answer] = llm.generate([PROMPT], ASKED)
            assert bits([answer]) == expected
            records = llm.step_records()
            steps[top_k] = len(records)
            assert sum(r.drafted for r in records) == answer.usage.draft_tokens
            assert sum(r.accepted for r in records) == answer.usage.accepted_draft_tokens
            assert steps[top_k] + answer.usage.accepted_draft_tokens == LENGTH
            assert bool(trees) == (top_k > 1)
    assert all(record.accepted for record in records if record.drafted > 1)
    assert steps[2] < 0.9 * steps[1]
    assert sum(row.drafts for row in trees) > 2 * len(trees)


def test_a_branch_that_is_not_copied_is_found(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: keys and values of an accepted sibling that stay where they were change the answer."""
    folder = checkpoint("smollm3")
    chosen = {"model": str(folder), "top_k": 2}
    with LLM(folder, **COMMON) as llm:
        expected = bits(plain := llm.generate([PROMPT], ASKED))
    scripted(monkeypatch, PROMPT + plain[0].outputs[0].token_ids)
    monkeypatch.setattr(StepBranches, "accepted", lambda self, ends: ([], []))
    with LLM(folder, speculative_config=chosen, **COMMON) as llm:
        assert bits(llm.generate([PROMPT], ASKED)) != expected


def test_an_answer_that_is_cancelled_in_a_tree_leaves_nothing(
    checkpoint: Folder, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trees = checkpoint("smollm3"), tree_rows(monkeypatch)
    with LLM(folder, **COMMON) as llm:
        plain = llm.generate([PROMPT], ASKED)
    scripted(monkeypatch, PROMPT + plain[0].outputs[0].token_ids)
    with LLM(folder, speculative_config=config | {"top_k": 2}, **COMMON) as llm:
        core = llm._built.core
        for name in ("a", "b"):
            core.add(Request(request_id=name, prompt_token_ids=TokenIds(PROMPT), params=ASKED, stepwise=True))
        while core.has_work():
            before = len(trees)
            out = core.scheduler.schedule()
            result = core._execute(out, time.perf_counter())
            if len(trees) > max(before, 4):
                break
            core.scheduler.update(out, result)
            core.scheduler.audit()
        assert core.has_work()
        core.abort("a")  # in the step of its tree
        core.scheduler.update(out, result)
        core.abort("b")
        while core.has_work():
            core.step()
            core.scheduler.audit()
        core.step()
        core.scheduler.audit()
        assert not core.scheduler.blocks_used
        assert core.speculation is not None
        assert not core.speculation._following


def test_top_k_has_limits(checkpoint: Folder) -> None:
    for wrong in (0, 17, True, "4"):
        with pytest.raises(ValueError, match=r"speculative_config.top_k: .* is not an integer from 1 to 16"):
            LLM("unused", speculative_config={"method": "self", "top_k": wrong})


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_drafts_that_are_judged_otherwise_are_chains(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    folder, trees = checkpoint("smollm3"), tree_rows(monkeypatch)
    chosen = {"model": str(folder), "acceptance": acceptance}
    with LLM(folder, speculative_config=chosen, **COMMON) as llm:
        llm.generate([PROMPT], ASKED)
        assert sum(record.accepted for record in llm.step_records()) > 10
        assert llm._built.plan.parts["branches"] == 0
    assert not trees
