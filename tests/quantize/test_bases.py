"""Adapters and speculation over a checkpoint that `quire quantize` made, with rounded caches: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.adapters import Q, pair, peft_folder
from helpers.memory import memory_for
from helpers.server import served_folder
from quire import LLM, SamplingParams
from quire.config.schema import EngineConfig
from quire.offline.quantize.quantize_model import quantize
from quire.offline.quantize.recipe import Recipe
from quire.outputs import RequestOutput

ONE = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
# 70 tokens and more: KIVI has rounded the first of them.
PROMPTS = [[1, 2, 3, 4, 5] * 15, list(range(3, 80)), [7, 8] * 40]
CACHES = [
    pytest.param("int4"), pytest.param("kivi2"),
    *(pytest.param(kind, marks=pytest.mark.quantize) for kind in ("int8", "fp8_e4m3", "fp8_e5m2", "kivi4", "auto")),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = served_folder(tmp_path_factory.mktemp("base") / "model")
    out = folder.parent / "small"
    recipe = Recipe(method="rtn", group_size=32)
    quantize(str(folder), out, recipe, EngineConfig().replace(threads=1))
    return out


def bits(output: RequestOutput) -> tuple[list[int], list[float]]:
    [answer] = output.outputs
    return list(answer.token_ids), [each.logprob for step in answer.logprobs or [] for each in step]


@pytest.mark.parametrize("cache", CACHES)
def test_adapters_and_speculation(cache: str, base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "adapter", pair(Q), lora_alpha=24)
    found = []
    for method in ("off", "ngram"):
        with LLM(
            base, adapters={"one": adapter}, enable_lora=True, kv_cache_dtype=cache, speculate=method, block_size=32,
            progress=False, memory=memory_for(2**29), threads=1, max_model_len=192, max_num_seqs=4,
        ) as llm:  # fmt: skip
            together = [bits(each) for each in llm.generate(PROMPTS, ONE, adapter="one")]
            hit = [bits(llm.generate(prompt, ONE, adapter="one")[0]) for prompt in PROMPTS]
            plain = bits(llm.generate(PROMPTS[0], ONE)[0])
        assert together == hit  # alone, and from the prefix cache
        assert together[0] != plain
        found.append([*together, plain])
    assert found[0] == found[1]
