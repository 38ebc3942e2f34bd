"""A draft model under a target: every bit as without it, its cache as the target's blocks, its cost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.speculating import FORMATS, LENGTH, VOCAB, bits, costs_without_a_clock, params, prompts
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.speculate.step_costs import PassCosts
from quire.types import CheckpointError


@pytest.fixture(autouse=True)
def _costs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a step costs a little, a pass of the draft almost nothing."""
    costs_without_a_clock(monkeypatch)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)


@pytest.mark.parametrize(
    ("form", "method"),  # the whole product is in tests/speculate/test_matrix.py
    [*((form, "draft_model") for form in FORMATS), ("bfloat16, sliding windows", "self")],
)
def test_every_bit_is_that_without(checkpoint: Folder, form: str, method: str) -> None:
    name, formats = FORMATS[form]
    common = {"max_model_len": LENGTH, "progress": False, **formats}
    with LLM(checkpoint(name), **common) as llm:
        expected = bits(llm.generate(prompts(), params()))
    chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": 6}
    if method == "draft_model":
        chosen["model"] = str(checkpoint("llama2" if name == "qwen3" else name))
    groups = 4 if "windows" in name else 1
    for step_tokens, seqs, more in [(256, 8, {}), (24, 3, {"num_kv_blocks": 14 * groups})]:
        with LLM(
            checkpoint(name), speculative_config=chosen, max_num_batched_tokens=step_tokens, max_num_seqs=seqs,
            **common, **more,
        ) as llm:  # fmt: skip
            assert bits(llm.generate(prompts(), params())) == expected
            records = llm.step_records()
            assert 0 < sum(r.accepted for r in records) < sum(r.drafted for r in records)
            assert llm._built.core.speculation is not None
            assert not llm._built.core.speculation.faults


@pytest.mark.parametrize(
    ("name", "blocks", "top_k"),
    [("qwen3", 12, 1), ("qwen3", 12, 4), ("qwen2-mixed-windows", 21, 4), ("deepseek2-lite", 12, 1)],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    checkpoint: Folder, name: str, blocks: int, top_k: int
) -> None:
    """Its cache is right after prefix hits, preemption, chunks and rejected drafts: each wrong number would show. In a
    tree, all first choices are right."""
    folder = checkpoint(name)
    common = {"max_model_len": 128, "progress": False, "dtype": "float32"}
    ways = [
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=2, top_k=20, top_p=0.9, max_tokens=50, ignore_eos=True),
    ]
    asked = [prompt for prompt in prompts()[3:6] for _ in ways]
    with LLM(folder, **common) as llm:
        expected = bits(llm.generate(asked, ways * 3))
    with LLM(
        folder, speculative_config={"model": str(folder), "quantization": "none", "top_k": top_k}, max_num_seqs=4,
        num_kv_blocks=blocks, max_num_batched_tokens=64, **common,
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time prefixes are found
            assert bits(llm.generate(asked, ways * 3)) == expected
        records = llm.step_records()
        drafted, accepted = (sum(getattr(r, name) for r in records) for name in ("drafted", "accepted"))
        assert accepted > 500
        assert drafted == accepted if top_k == 1 else drafted < 1.5 * accepted
        assert llm._built.core.speculation is not None
        assert llm._built.core.speculation._allotment._all[-1].mean > 0.97
        assert any(r.preempted for r in records)


def test_a_draft_with_another_vocabulary_is_refused(checkpoint: Folder, tmp_path: Path) -> None:
    other = tmp_path / "draft"
    shutil.copytree(checkpoint("qwen3"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    names = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[names[40]], vocabulary[names[41]] = 41, 40
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=r"its vocabulary is not that of the model: token 40 is '.', not '.'"
    ):
        LLM(checkpoint("qwen3"), draft_model=str(other), progress=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": "draft_model"},
            "speculative_config.model: draft_model: no model, which this method needs",
        ),
        ({"method": "ngram", "model": "x"}, "speculative_config.model: ngram: takes no model"),
        ({"method": "self", "layers": -1}, "speculative_config.layers: -1 is not an integer from 0"),
    ],
)
def test_a_bad_config_is_one_clear_error(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("unused", speculative_config=config)


def test_what_a_draft_takes_is_in_the_plan(checkpoint: Folder) -> None:
    common = {"max_model_len": LENGTH, "progress": False, "num_kv_blocks": 20}
    with LLM(checkpoint("qwen3"), **common) as llm:
        alone = llm._built.plan.parts
    same = {"model": str(checkpoint("qwen3")), "quantization": "none"}
    with LLM(checkpoint("qwen3"), speculative_config=same, **common) as llm:
        both, executors = llm._built.plan.parts, [llm._built.executor, llm._built.draft]
        held = [executor.memory() for executor in executors if executor is not None]
    assert both["weights"] == 2 * alone["weights"]
    assert both["kv"] == 2 * alone["kv"]
    assert both["activations"] > alone["activations"]
    for part in ("kv", "activations", "tables"):
        planned = both[part] + (both["branches"] if part == "kv" else 0)
        assert sum(each[part] for each in held) <= planned
    assert both["branches"] > alone["branches"] == 0


@pytest.mark.parametrize(
    ("target", "chosen", "dtype"),
    [
        ({}, {}, "i8"),
        ({}, {"quantization": "none"}, "f32"),
        ({"quantization": "int4"}, {}, "i4"),
        ({"quantization": "int4"}, {"quantization": "int8"}, "i8"),
    ],
)
def test_a_draft_in_floats_is_rounded(
    checkpoint: Folder, target: dict[str, Any], chosen: dict[str, Any], dtype: str
) -> None:
    """To int8, but for what else is asked for; a draft costs what is read of it. Answers are those without it."""
    common: dict[str, Any] = {"max_model_len": LENGTH, "progress": False, "dtype": "float32", **target}
    with LLM(checkpoint("qwen3"), **common) as llm:
        expected = bits(llm.generate(prompts()[:3], params()[:3]))
    config = {"model": str(checkpoint("llama2")), **chosen}
    with LLM(checkpoint("qwen3"), speculative_config=config, **common) as llm:
        assert llm._built.draft is not None
        weights = llm._built.draft.program.params
        assert {each.dtype for each in weights if "gate_up" in each.name} == {dtype}
        assert bits(llm.generate(prompts()[:3], params()[:3])) == expected


def test_logits_of_a_trimmed_vocabulary_are_widened_in_planned_memory(checkpoint: Folder) -> None:
    """A draft is drawn with the sampler of the target, which has a column for each of its tokens."""
    common: dict[str, Any] = {"max_model_len": LENGTH, "progress": False, "max_num_seqs": 4}
    chosen = {"method": "draft_model", "model": str(checkpoint("llama2"))}
    planned = []
    for trimmed in ({}, {"draft_vocab_size": 40}):
        with LLM(checkpoint("qwen3"), speculative_config=chosen | trimmed, **common) as llm:
            llm.generate(prompts()[:4], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
            planned.append(llm._built.plan.parts["drafts"])
            wide = llm._built.core.worker._wide
            assert (
                wide is None if not trimmed else 0 < wide.nbytes <= planned[1] - planned[0] == 4 * 4 * VOCAB
            )
