"""Trees of what a draft finds likely, in a running engine: what siblings add, and that they change no bit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
from quire.speculate.draft_branches import DraftBranches
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.draft_passes import DraftPasses, PassRow
from quire.speculate.proposer import Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.tree_growth import DraftPlace
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


@pytest.fixture(params=[1, 4])
def tree_width(request: pytest.FixtureRequest, config: dict[str, Any]) -> int:
    if config["method"] == "medusa" and request.param > 1:
        pytest.skip("heads give every combination")
    width: int = request.param
    return width


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
    checkpoint: Folder, config: dict[str, Any], tree_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the second choice is right as often as the first, trees take fewer steps than chains."""
    folder, trees = checkpoint("smollm3"), tree_rows(monkeypatch)
    with LLM(folder, **COMMON) as llm:
        expected = bits(plain := llm.generate([PROMPT], ASKED))
    scripted(monkeypatch, PROMPT + plain[0].outputs[0].token_ids)
    steps = {}
    for top_k in (1, 2):
        chosen = {"top_k": top_k} | ({"tree_width": tree_width} if top_k > 1 else {})
        with LLM(folder, speculative_config=config | chosen, **COMMON) as llm:
            [answer] = llm.generate([PROMPT], ASKED)
            assert bits([answer]) == expected
            records = llm.step_records()
            steps[top_k] = len(records)
            assert sum(r.drafted for r in records) == answer.usage.draft_tokens
            assert sum(r.accepted for r in records) == answer.usage.accepted_draft_tokens
            assert steps[top_k] + answer.usage.accepted_draft_tokens == LENGTH
            assert bool(trees) == (top_k > 1)
    assert all(record.accepted for record in records if record.drafted > 1)
    assert steps[2] < (0.9 if tree_width == 1 else 0.6) * steps[1]
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
    checkpoint: Folder, config: dict[str, Any], tree_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trees = checkpoint("smollm3"), tree_rows(monkeypatch)
    with LLM(folder, **COMMON) as llm:
        plain = llm.generate([PROMPT], ASKED)
    scripted(monkeypatch, PROMPT + plain[0].outputs[0].token_ids)
    with LLM(folder, speculative_config=config | {"top_k": 2, "tree_width": tree_width}, **COMMON) as llm:
        core = llm._built.core
        for name in ("a", "b"):
            core.add(Request(request_id=name, prompt_token_ids=TokenIds(PROMPT), params=ASKED, stepwise=True))
        while core.has_work():
            before = len(trees)
            step = core._plan()
            out, result = step.out, core._execute(step, None, core.clock())
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


class SaidBehind:
    """What a draft model says of the next token, its logits, by the text and the drafts that it goes on from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
        self.known: dict[tuple[int, ...], bytes] = {}  # of texts without drafts
        self.behind: dict[tuple[int, ...], bytes] = {}  # with a draft that is not the first of its place
        kept: list[tuple[DraftPlace, bytes]] = []
        run, propose = DraftPasses.run, DraftModelProposer.propose

        def guessed(self: Worker, outputs: Outputs, *given: Any, **more: Any) -> Guesses:
            logits.extend(row.tobytes() for row in outputs["logits"])
            return guess(self, outputs, *given, **more)

        def passed(passes: DraftPasses, pieces: Sequence[PassRow]) -> list[DraftPlace]:
            places = run(passes, pieces)
            kept.extend(zip(places, logits, strict=True))
            logits.clear()
            return places

        def proposed(proposer: DraftModelProposer, rooms: Mapping[int, Room]) -> Any:
            made = propose(proposer, rooms)
            for seq_id in made:
                found = proposer._texts[seq_id]
                if found.tree is not None:
                    self._walk(found.tree.root, tuple(found.tokens), {id(p): said for p, said in kept}, True)
                    self.known[tuple(found.tokens)] = next(s for p, s in kept if p is found.tree.root)
            kept.clear()
            return made

        logits: list[bytes] = []
        scripted(monkeypatch, text)
        guess = Worker.guess
        monkeypatch.setattr(Worker, "guess", guessed)
        monkeypatch.setattr(DraftPasses, "run", passed)
        monkeypatch.setattr(DraftModelProposer, "propose", proposed)

    def _walk(self, place: DraftPlace, text: tuple[int, ...], said: Mapping[int, bytes], first: bool) -> None:
        if not first:
            self.behind[text] = said[id(place)]
        for rank, (token, below) in enumerate(zip(place.token_ids, place.below, strict=True)):
            if below is not None:
                self._walk(below, (*text, token), said, first and not rank)


@pytest.mark.parametrize("copied", [True, False], ids=["", "control"])
@pytest.mark.parametrize("method", ["draft_model", "self"])
def test_what_a_draft_says_behind_a_branch_is_what_it_says_of_that_text(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, method: str, copied: bool
) -> None:
    """To the last bit, over the blocks of several groups. Without what branches go on from it is not."""
    folder = checkpoint("qwen2-mixed-windows")
    with LLM(folder, **COMMON) as llm:
        [plain] = llm.generate([PROMPT], ASKED)
    said = SaidBehind(monkeypatch, PROMPT + list(plain.outputs[0].token_ids))
    chosen = {"method": method, "top_k": 2, **({"layers": 2} if method == "self" else {"model": str(folder)})}
    if not copied:
        monkeypatch.setattr(DraftBranches, "copy", lambda self: None)
    for sizes in ({"num_speculative_tokens": 20, "tree_width": 4}, {"num_speculative_tokens": 1}):
        with LLM(folder, speculative_config=chosen | sizes, **COMMON) as llm:
            assert bits(llm.generate([PROMPT], ASKED)) == bits([plain])
            llm._built.core.scheduler.audit()
    both = said.known.keys() & said.behind.keys()
    assert len(both) > 10
    assert all(said.known[text] == said.behind[text] for text in both) == copied


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"method": "self", "tree_width": 0}, "0 is not an integer from 1 to 16"),
        ({"method": "self", "tree_width": 17}, "17 is not an integer from 1 to 16"),
        ({"method": "self", "tree_width": True}, "True is not an integer from 1 to 16"),
        ({"method": "self", "tree_width": 2, "top_k": 1}, "2 is only there for top_k above 1"),
        ({"method": "self", "tree_width": 2, "acceptance": "typical"}, "2 is only there for acceptance 'same'"),
        ({"method": "ngram", "tree_width": 2}, "2 is only there for draft_model, self, .*, not for ngram"),
        ({"method": "medusa", "model": "x", "tree_width": 2}, "2 is only there for .*, not for medusa"),
    ],
)  # fmt: skip
def test_tree_width_has_limits(chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"speculative_config.tree_width: {problem}"):
        LLM("unused", speculative_config=chosen)


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
