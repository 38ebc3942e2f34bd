"""Every family and format over every plan, in processes: tokens and logprobs of one rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_async.running import ask, collect, run, running, until
from helpers.checkpoints import TINY_MODELS, tiny_model
from helpers.rank_nodes import environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, answers_of_replicas, make, wider
from helpers.tokenizers import save_whole
from quire.config.serving import ServingConfig
from quire.config.shipped import shipped_models
from quire.engine.api import EngineState, EngineUnavailableError
from quire.types import SamplingParams, UnsupportedModelError
from ranks.test_supervision import ranks_of

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-kv": {"kv_cache_dtype": "int8"},
}
PLANS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 3},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.mark.ranks
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_every_plan_answers_as_one_rank(wide: Wide, name: str, formats: str) -> None:
    try:
        with make(wide(name), **FORMATS[formats]) as llm:
            alone = answers(llm)
    except UnsupportedModelError:  # an int8 cache of latents
        return
    ran = 0
    for plan in PLANS:
        with suppress(UnsupportedModelError):  # too few heads or panels
            with make(wide(name), **FORMATS[formats], **plan) as llm:
                assert answers(llm) == alone, plan
            ran += 1
    assert ran >= 2


@pytest.mark.ranks
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_four_ranks_answer_as_one(tmp_path: Path, name: str, formats: str) -> None:
    """Four ranks of a stage, and two replicas of two ranks that share whole experts, of models with four panels.

    Of five and six experts ranks hold one or two."""
    model = wider(tiny_model(name))
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    more = {"hidden_size": 256} | {width: 200 for width in widths if width in model.overrides}
    if model.config_class == "Phi3Config":  # whose rope has a factor for each pair of a head's columns
        more["num_attention_heads"] = 16
    folder = save_whole(replace(model, overrides=model.overrides | more), tmp_path / "model")
    try:
        with make(folder, **FORMATS[formats]) as llm:
            alone = answers(llm)
    except UnsupportedModelError:  # an int8 cache of latents
        return
    four = FORMATS[formats] | {"tensor_parallel_size": 4}
    with suppress(UnsupportedModelError), make(folder, **four) as llm:  # too few heads
        assert answers(llm) == alone
    replicas = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert answers_of_replicas(folder, **FORMATS[formats], **replicas) == alone


@pytest.mark.ranks
@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_every_family_over_hosts(wide: Wide, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a stage, stages, and stages of ranks, each on two hosts."""
    with make(wide(name), dtype="bfloat16") as llm:
        alone = answers(llm)
    ran = 0
    for plan in (PLANS[0], PLANS[2], PLANS[3], PLANS[4]):
        address, options = fresh_address(), {"dtype": "bfloat16", **plan}
        for variable, value in environment(address, 2).items():
            monkeypatch.setenv(variable, value)
        with suppress(UnsupportedModelError):  # too few heads or panels
            with following(wide(name), address, 2, COMMON | options), make(wide(name), **options) as llm:
                assert answers(llm) == alone, plan
            ran += 1
    assert ran >= 2


@pytest.mark.ranks
def test_every_factorisation_of_four_processes(tmp_path: Path) -> None:
    """Tensor, pipeline and data parallelism, with columns of all experts and with whole experts."""
    model = wider(tiny_model("gpt-oss"))  # of four layers and four experts
    folder = save_whole(replace(model, overrides=model.overrides | {"hidden_size": 256}), tmp_path / "model")
    with make(folder) as llm:
        alone = answers(llm)
    for tensor, stages in itertools.product((1, 2, 4), repeat=2):
        if tensor * stages > 4:
            continue
        plan = {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "data_parallel_size": 4 // (tensor * stages),
        }
        for whole in {False, stages < 4}:  # over the ranks of a stage in all replicas
            found = answers_of_replicas(folder, **plan, enable_expert_parallel=whole)
            assert found == alone, (plan, whole)


@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_end_at_random_steps(seed: int) -> None:
    """Under load: its requests end with errors that can be retried, and the same request then has the same answer."""
    chance = random.Random(seed)
    plan = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1 + seed % 2}
    greedy, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 2000))

    async def work() -> None:
        folder = shipped_models()["quire-mini"]
        serving = ServingConfig(engine_restarts=10)
        async with running(folder, in_process=False, serving=serving, num_kv_blocks=1024, **plan) as engine:
            expected = await collect(engine.generate(ask("first", params=greedy)))
            for life in range(3):
                asked = [
                    asyncio.ensure_future(
                        collect(engine.generate(ask(f"{life}-{i}", (50 + life, 60 + i), long)))
                    )
                    for i in range(4)
                ]
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                old = ranks_of(engine)
                os.kill(chance.choice(old), chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV]))
                found = await asyncio.gather(*asked, return_exceptions=True)
                assert all(isinstance(each, EngineUnavailableError) for each in found)
                await until(lambda: engine.state is EngineState.READY)
                assert await collect(engine.generate(ask(f"{life}-again", params=greedy))) == expected

    run(work())
