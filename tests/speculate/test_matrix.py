"""Every method, beside predictions, under every kind of cache, load and parameter: no bit of an answer is changed.

`make test-speculation` runs the whole product; the tests of `make test` are a sample of it.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import drafts
from helpers.checkpoints import load_reference
from helpers.low_rank import random_adapter
from helpers.speculating import bits, costs_without_a_clock, edited, params, prompts
from helpers.tokenizers import save_whole
from quire import LLM, SamplingParams, StructuredOutput
from quire.config.speculative import WITH_BRANCHES
from quire.engine.core import EngineCore
from quire.spec import read_model
from quire.speculate.step_costs import PassCosts
from quire.types import SeqEvent

pytestmark = pytest.mark.speculation

LENGTH = 128
Method = Callable[
    [Callable[[str], Path], str], Mapping[str, Any]
]  # from checkpoints and the name of the target


def over_features(write: Callable[..., Path], method: str, **config: Any) -> Method:
    """A draft with random weights, in the layout that its method publishes."""

    def chosen(checkpoint: Callable[[str], Path], target: str) -> Mapping[str, Any]:
        del target  # all tiny models have the same width and vocabulary
        return {"method": method, "model": str(write(checkpoint("llama2") / method, **config))}

    return chosen


TWO_LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}
METHODS: dict[str, Method] = {
    "predictions": lambda checkpoint, target: {},
    "ngram": lambda checkpoint, target: {"method": "ngram"},
    "ngram, recent outputs": lambda checkpoint, target: {"method": "ngram", "recent_outputs": 512},
    "self": lambda checkpoint, target: {"method": "self"},
    "lookahead": lambda checkpoint, target: {"method": "lookahead", "num_speculative_tokens": 16},
    "another model": lambda checkpoint, target: {"model": str(checkpoint("llama2"))},
    "the same model": lambda checkpoint, target: {"model": str(checkpoint(target))},
    "eagle": over_features(drafts.write_eagle, "eagle"),
    "eagle3": over_features(drafts.write_eagle3, "eagle3", **TWO_LAYERS),
    "medusa": over_features(drafts.write_medusa, "medusa"),
    "mtp": lambda checkpoint, target: {"method": "mtp"},
}
WITH_MTP = "latent"  # the model whose checkpoint has layers for it
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {  # and the blocks that make sequences wait and resume
    "full": ("qwen3", {"dtype": "float32"}, 14),
    "windows": ("qwen2-mixed-windows", {"dtype": "bfloat16"}, 28),
    "windows alone": ("mistral-window", {"dtype": "float32"}, 14),
    "int8": ("qwen3", {"quantization": "int8", "kv_cache_dtype": "int8"}, 14),
    "int4": ("llama3.1", {"quantization": "int4"}, 14),
    "latent": ("deepseek3", {"dtype": "float32"}, 14),
    "experts, sinks": ("gpt-oss", {"dtype": "bfloat16"}, 28),
    "caps": ("gemma2", {"dtype": "float32"}, 28),
}
LOADS: dict[str, dict[str, Any]] = {
    "room": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
    "chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 24, "threads": 1},
    "few blocks": {"max_num_seqs": 6, "max_num_batched_tokens": 64},
    "no cache": {"max_num_seqs": 4, "enable_prefix_caching": False},
}
DEPTHS, WIDTHS = (1, 5, 16), (1, 2, 4, 8)
ADAPTED = ("full", "int4", "latent", "experts, sinks")
SLOPES = (0.04, 1e-4)  # of the cost of a step, for each token; the second makes large trees


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by name."""
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_whole(name, tmp_path_factory.mktemp(name))
            if name == MODELS[WITH_MTP][0]:
                add_mtp(made[name])
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds blocks is added up after every step."""
    step = EngineCore.step

    def audited(self: EngineCore) -> list[SeqEvent]:
        events = step(self)
        self.scheduler.audit()
        return events

    monkeypatch.setattr(EngineCore, "step", audited)


def add_mtp(folder: Path) -> None:
    """A layer for multi-token prediction, which the model without the method does not read."""
    reference = load_reference(folder, torch.float32)
    drafts.write_mtp(folder, reference, folder, 1)


def pairs(models: Iterable[str]) -> list[tuple[str, str]]:
    """Each method with each model that it is for."""
    return [(method, m) for m in models for method in METHODS if method != "mtp" or m == WITH_MTP]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], list[Any]]:
    """The answers of a model without speculation."""
    made: dict[str, list[Any]] = {}

    def get(model: str) -> list[Any]:
        if model not in made:
            name, formats, _ = MODELS[model]
            with LLM(checkpoint(name), max_model_len=LENGTH, progress=False, **formats) as llm:
                made[model] = bits(llm.generate(*asked()))
        return made[model]

    return get


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters, each twice: the second time prefixes are in the cache."""
    texts = [prompt[: LENGTH - 62] for prompt in prompts()]
    return texts * 2, params() * 2


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("method", "model"), pairs(MODELS))
def test_every_bit_is_that_without(
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    model: str,
    load: str,
) -> None:
    name, formats, blocks = MODELS[model]
    rng = random.Random(f"{method} {model} {load}")
    slope = rng.choice(SLOPES)
    costs_without_a_clock(monkeypatch, slope)
    monkeypatch.setattr("quire.speculate.step_costs._FIRST_SLOPE", slope)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)
    chosen = METHODS[method](checkpoint, name)
    chosen = (
        {"num_speculative_tokens": rng.choice(DEPTHS), "top_k": (top_k := rng.choice(WIDTHS)), **chosen}
        if chosen
        else None
    )
    if chosen and chosen.get("method", "draft_model") in WITH_BRANCHES and top_k > 1:
        chosen["tree_width"] = rng.choice((1, 2, 5))
    answers = [samples[0][0] for samples, _ in expected(model)]
    predicted = [edited(tokens, rng) if i % 2 else [] for i, tokens in enumerate(answers)]
    more = {"num_kv_blocks": blocks} if load == "few blocks" else {}
    with LLM(
        checkpoint(name), speculative_config=chosen, max_model_len=LENGTH, progress=False, **formats, **LOADS[load],
        **more,
    ) as llm:  # fmt: skip
        assert bits(llm.generate(*asked(), prediction=predicted)) == expected(model)
        core = llm._built.core
        assert core.speculation is not None
        assert not core.speculation.faults
        assert core.speculation.drafted > 0
        assert not core.scheduler.blocks_used
    assert threading.active_count() < 20


def product() -> tuple[list[list[int]], list[SamplingParams], list[str]]:
    """Each grammar × samples × log-probabilities × temperature × adapter, and all other parameters with one of
    the adapters."""
    texts, others = asked()
    given = [
        SamplingParams(
            max_tokens=24,
            temperature=temperature,
            seed=3,
            n=samples,
            logprobs=logprobs,
            ignore_eos=not grammar,
            structured=StructuredOutput(regex=grammar) if grammar else None,
        )
        for grammar, samples, logprobs, temperature in itertools.product(
            ("", "(ab|cd|e){30}"), (1, 3), (None, 0, 2), (0.0, 0.7)
        )
        for _ in ADAPTERS
    ]
    names = [*itertools.islice(itertools.cycle(ADAPTERS), len(given) + len(others))]
    return [*itertools.islice(itertools.cycle(texts), len(given)), *texts], given + others, names


ADAPTERS = ("every", "dora", "")


@pytest.mark.parametrize(("method", "model"), pairs(ADAPTED))
def test_every_bit_with_adapters_is_that_without_speculation(
    checkpoint: Callable[[str], Path],
    adapted: Callable[[str], tuple[dict[str, Any], list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    model: str,
) -> None:
    """Adapters of low rank, DoRA or none × grammar or none × one sample or three × log-probabilities × temperatures."""
    common, plain = adapted(model)
    texts, given, names = product()
    costs_without_a_clock(monkeypatch, SLOPES[0])
    monkeypatch.setattr("quire.speculate.step_costs._FIRST_SLOPE", SLOPES[0])
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)
    name = MODELS[model][0]
    chosen = METHODS[method](checkpoint, name) or None
    rng = random.Random(f"{method} {model}")
    predicted = [edited(samples[0][0], rng) if i % 2 else [] for i, (samples, _) in enumerate(plain)]
    more = {"max_num_seqs": 8, "max_num_batched_tokens": 48}
    with LLM(checkpoint(name), speculative_config=chosen, **common, **more) as llm:
        assert bits(llm.generate(texts, given, prediction=predicted, adapter=names)) == plain
        core = llm._built.core
        assert core.speculation is not None
        assert not core.speculation.faults
        assert core.speculation.drafted > 0


@pytest.fixture(scope="module")
def adapted(checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[dict[str, Any], list[Any]]]:
    """The options of a model with adapters, and the answers without speculation."""
    made: dict[str, tuple[dict[str, Any], list[Any]]] = {}

    def get(model: str) -> tuple[dict[str, Any], list[Any]]:
        if model not in made:
            name, formats, _ = MODELS[model]
            spec = read_model(checkpoint(name)).spec
            adapters = {
                "every": random_adapter(spec, 1, 4, every=True, scale=1.0),
                "dora": random_adapter(spec, 2, 6, dora=True, scale=1.0),
            }
            common: dict[str, Any] = {
                "adapters": adapters, "enable_lora": True, "max_lora_rank": 6, "lora_target_modules": ("all",),
                "max_model_len": LENGTH, "progress": False, **formats,
            }  # fmt: skip
            texts, given, names = product()
            with LLM(checkpoint(name), **common) as llm:
                made[model] = common, bits(llm.generate(texts, given, adapter=names))
        return made[model]

    return get
