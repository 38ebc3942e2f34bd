"""Adapters of more than plain linears: DoRA, embeddings, heads, experts, latent attention, whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.adapters import gguf_adapter
from helpers.low_rank import merge, random_adapter, random_matrix, write_adapter
from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.config.schema import DEFAULT_LORA_RANK
from quire.config.shipped import DEFAULT_MODEL, shipped_adapters
from quire.engine.build.opening import find_model
from quire.lora.adapter import F32, Adapter
from quire.lora.read import room_of
from quire.offline.convert import convert
from quire.spec import read_model
from quire.types import CheckpointError, MemoryBudgetError, RequestError

RANK = 6
COMMON: Mapping[str, Any] = {"max_model_len": 96, "progress": False, "memory": "2GiB"}
LORA: Mapping[str, Any] = {
    "enable_lora": True, "max_lora_rank": RANK, "max_loras": 3, "lora_target_modules": ("all",),
}  # fmt: skip
# One of each group of families: tied and untied, biases, fused, experts of three layouts, latent attention.
FAMILIES = ["qwen3", "llama-biases-mqa-tied", "phi3-window", "gemma2", "qwen3-moe", "gpt-oss", "deepseek3"]
KINDS = ["low rank", "DoRA", "whole"]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


def bits(output: RequestOutput) -> list[Any]:
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def adapter_of(folder: Path, kind: str, seed: int = 1) -> Adapter:
    """An adapter of a kind that changes all it can."""
    spec = read_model(folder).spec
    if kind == "DoRA":
        return random_adapter(spec, seed, RANK, dora=True)
    if kind == "low rank":
        return random_adapter(spec, seed, RANK, every=True, scale=1.0)
    random, low = np.random.default_rng(seed), random_adapter(spec, seed, RANK, only=("q_proj", "o_proj"))
    tables = [name.removesuffix(".weight") for name in (spec.names.embed, spec.names.head)]
    whole = {module: random_matrix(random, spec.vocab, spec.dim) for module in tables}
    return replace(low, modules_to_save=whole, digest=f"{seed:064x}")


def scores(output: RequestOutput) -> F32:
    return np.array([each[0].logprob for each in output.prompt_logprobs or () if each], np.float32)


def answers(llm: LLM, adapter: str = "") -> list[RequestOutput]:
    one = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    return llm.generate([prompt(seed, 40 + seed) for seed in range(3)], one, adapter=adapter)


# Every family with one kind, every kind with qwen3 and two families more; the rest is behind the marker.
MERGED = [
    pytest.param(name, kind, marks=[] if name == "qwen3" or f % 3 == k else pytest.mark.models)
    for f, name in enumerate(FAMILIES)
    for k, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "kind"), MERGED)
def test_it_is_its_merged_weights(checkpoint: Folder, name: str, kind: str, tmp_path: Path) -> None:
    """From its files, in float32: the adapter's numbers are such that bfloat16 holds."""
    folder = checkpoint(name)
    adapter = adapter_of(folder, kind)
    with LLM(merge(folder, adapter, tmp_path / "merged"), **COMMON) as llm:
        merged = [scores(one) for one in answers(llm)]
    with LLM(folder, adapters={"one": tmp_path / "merged-adapter"}, **LORA, **COMMON) as llm:
        changed, plain = ([scores(one) for one in answers(llm, adapter)] for adapter in ("one", ""))
    for a, b, base in zip(merged, changed, plain, strict=True):
        assert np.abs(a - b).max() < 5e-4
        assert np.sqrt(np.mean((a - b) ** 2)) < 1e-4
        assert np.sqrt(np.mean((a - base) ** 2)) > 0.2, "the adapter changes too little to be seen"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3", "int8"),
        ("qwen3-moe", "int4"),
        ("deepseek3", "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.models)
            for case in (("qwen3", "int4"), ("qwen3-moe", "int8"), ("deepseek3", "int4"))
        ),
    ],
)
def test_over_quantized_weights_it_adds_no_error(
    checkpoint: Folder, name: str, quantization: str, tmp_path: Path
) -> None:
    """The distance to the merged float32 model is that of the quantized base to its own."""
    folder = checkpoint(name)
    adapters = {kind: adapter_of(folder, kind) for kind in KINDS}
    exact = {}
    for kind, adapter in adapters.items():
        with LLM(merge(folder, adapter, tmp_path / kind.replace(" ", "-")), **COMMON) as llm:
            exact[kind] = np.concatenate([scores(one) for one in answers(llm)])
    with LLM(folder, **COMMON) as llm:
        exact[""] = np.concatenate([scores(one) for one in answers(llm)])
    with LLM(folder, adapters=adapters, quantization=quantization, **LORA, **COMMON) as llm:
        found = {name: np.concatenate([scores(one) for one in answers(llm, name)]) for name in exact}
    errors = {name: float(np.sqrt(np.mean((found[name] - exact[name]) ** 2))) for name in exact}
    assert max(errors.values()) < 1.6 * errors[""] + 0.02, errors


def test_alone_or_crowded(checkpoint: Folder) -> None:
    """All kinds beside each other and rows without one: bits of each alone, and of an engine without adapters."""
    folder = checkpoint("qwen3-moe")
    adapters = {kind: adapter_of(folder, kind, seed) for seed, kind in enumerate(KINDS)}
    names = [*KINDS, "", *KINDS, ""]
    asks = [prompt(seed, 20 + 3 * seed) for seed in range(len(names))]
    one = SamplingParams(
        max_tokens=12, temperature=0.8, seed=3, logprobs=4, prompt_logprobs=1, ignore_eos=True, n=2
    )
    alone = []
    with LLM(folder, adapters=adapters, threads=1, dtype="bfloat16", **LORA, **COMMON) as llm:
        for ask, name in zip(asks, names, strict=True):
            alone.append(bits(llm.generate(ask, one, adapter=name)[0]))
    with LLM(folder, dtype="bfloat16", **COMMON) as llm:
        plain = [bits(out) for out in llm.generate(asks, one)]
    assert [plain[i] for i in (3, 7)] == [alone[i] for i in (3, 7)]
    assert all(plain[i] != alone[i] for i in range(8) if i not in (3, 7))
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "num_kv_blocks": 40, "threads": 3}
    with LLM(folder, adapters=adapters, dtype="bfloat16", **limits, **LORA, **COMMON) as llm:
        assert [bits(out) for out in llm.generate(asks, one, adapter=names)] == alone


def test_whole_matrices_are_in_the_memory_plan(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec = read_model(folder).spec
    planned = []
    for targets in ((), ("modules_to_save",)):
        room = {**LORA, "lora_target_modules": targets}
        with LLM(folder, dtype="float32", **room, **COMMON) as llm:
            planned.append(llm.built.plan.parts["adapters"])
            assert llm.built.executor.memory()["adapters"] <= planned[-1]
    assert planned[1] - planned[0] >= 3 * 2 * 4 * spec.vocab * spec.dim
    with pytest.raises(MemoryBudgetError, match="lower --max-loras"):
        LLM(folder, **{**LORA, "max_loras": 1024}, **{**COMMON, "memory": "500MiB"})


def test_what_has_no_room_is_refused_by_key(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("deepseek3")
    spec = read_model(folder).spec
    whole, low = adapter_of(folder, "whole"), adapter_of(folder, "low rank")
    only = {
        name: random_adapter(spec, 1, RANK, every=True, only=(name,)) for name in ("embed_tokens", "lm_head")
    }
    expert = replace(low, parts={key: part for key, part in low.parts.items() if ".experts." in key})
    kv_b = random_adapter(spec, 1, RANK, only=("kv_b_proj",))
    key, part = next(iter(kv_b.parts.items()))
    dora = replace(kv_b, parts={key: replace(part, magnitude=np.ones(len(part.b), np.float32))})
    q_a = random_adapter(spec, 1, RANK, only=("layers.0.self_attn.q_a_proj",))
    [(module, low_q)] = q_a.parts.items()
    zero = replace(
        q_a,
        parts={module: replace(low_q, scale=0.0, magnitude=np.full(len(low_q.b), np.inf, np.float32))},
    )
    room = {**LORA, "lora_target_modules": ("q_proj",)}
    with LLM(folder, **room, **COMMON) as llm:
        for adapter, told in [
            (whole, r"modules_to_save: .*: there is no room .*--lora-target-modules modules_to_save"),
            (
                only["embed_tokens"],
                "embed_tokens: there is no room for it: use --lora-target-modules embed_tokens",
            ),
            (only["lm_head"], "lm_head: there is no room for it: use --lora-target-modules lm_head"),
            (expert, "experts.*: there is no room for it: use --lora-target-modules experts"),
            (dora, "kv_b_proj: DoRA of this module is not supported"),
            (zero, "lora_magnitude_vector holds a number that is not finite"),
        ]:
            with pytest.raises(CheckpointError, match=told):
                llm.load_adapter("no", adapter)
            with pytest.raises(RequestError, match="not loaded"):
                llm.generate(prompt(1, 5), adapter="no")
    with pytest.raises(ValueError, match="lora_target_modules: 'nothing' is not one of embed_tokens"):
        LLM(folder, **{**LORA, "lora_target_modules": ("q_proj", "nothing")}, **COMMON)
    with LLM(folder, load_format="random", **LORA, **COMMON) as llm:
        given = write_adapter(tmp_path / "dora", adapter_of(folder, "DoRA"))
        with pytest.raises(CheckpointError, match="DoRA of weights that were not read from a checkpoint"):
            llm.load_adapter("no", given)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_gguf_adapters(checkpoint: Folder, name: str, tmp_path: Path) -> None:
    """Over a GGUF base and over the folder that it was made of: the bits of the same adapter as PEFT writes it."""
    folder, one = checkpoint(name), SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
    spec = read_model(folder).spec
    adapter = random_adapter(spec, 5, RANK, only=("q_proj", "o_proj", "embed_tokens", "lm_head"), every=True)
    files = {"PEFT": write_adapter(tmp_path / "peft", adapter), "GGUF": tmp_path / "adapter.gguf"}
    names = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output"}
    tensors = {}
    for module, part in adapter.parts.items():
        layer, short = module.split(".")[2:3], ".".join(module.split(".")[-2:])
        stored = f"blk.{layer[0]}.{names[short]}" if short in names else ""
        stored = stored or ("token_embd" if module.endswith("embed_tokens") else "output")
        a, b = (part.a, part.b) if stored != "token_embd" else (part.b, part.a.T)
        tensors[f"{stored}.weight.lora_a"], tensors[f"{stored}.weight.lora_b"] = map(
            np.ascontiguousarray, (a, b)
        )
    architecture = {"qwen3": "qwen3", "qwen3-moe": "qwen3moe"}[name]
    gguf_adapter(files["GGUF"], tensors, general__architecture=architecture, adapter__lora__alpha=2.0 * RANK)
    found = []
    convert(str(folder), tmp_path / "base.gguf")
    for base in (folder, tmp_path / "base.gguf"):
        with LLM(base, adapters=files, **LORA, **COMMON) as llm:
            found += [bits(llm.generate(prompt(2, 20), one, adapter=kind)[0]) for kind in files]
    assert found == [found[0]] * 4


def test_a_slot_of_a_whole_adapter_is_empty_for_the_next(checkpoint: Folder) -> None:
    """One slot, in turns: nothing of embedding and head is left."""
    folder = checkpoint("qwen3")
    adapters = {kind: adapter_of(folder, kind) for kind in KINDS}
    one = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
    with LLM(folder, adapters=adapters, **LORA, **COMMON) as llm:
        own = {name: bits(llm.generate(prompt(2, 20), one, adapter=name)[0]) for name in KINDS}
    with LLM(folder, adapters=adapters, **{**LORA, "max_loras": 1}, **COMMON) as llm:
        for name in ("whole", "low rank", "whole", "DoRA", "low rank"):
            assert bits(llm.generate(prompt(2, 20), one, adapter=name)[0]) == own[name]


def test_there_is_room_for_the_adapters_that_an_engine_begins_with(
    checkpoint: Folder, tmp_path: Path
) -> None:
    """Their ranks and modules, where no option says more; a larger one later is refused with both numbers."""
    folder = checkpoint("qwen3")
    spec = read_model(folder).spec
    first = write_adapter(
        tmp_path / "first", random_adapter(spec, 1, 20, only=("q_proj", "lm_head"), every=True)
    )
    numbers = random_adapter(spec, 2, 18, only=("embed_tokens",), every=True)
    larger = write_adapter(tmp_path / "larger", random_adapter(spec, 3, 21, only=("q_proj",)))
    with LLM(folder, adapters={"first": first, "numbers": numbers}, enable_lora=True, **COMMON) as llm:
        for name in ("first", "numbers"):
            assert llm.generate(prompt(1, 5), SamplingParams(max_tokens=2), adapter=name)[0].finished
        with pytest.raises(CheckpointError, match=r"rank 21 is not in \[1, 20\]"):
            llm.load_adapter("larger", larger)
    with pytest.raises(CheckpointError, match=r"rank 20 is not in \[1, 8\]"):
        LLM(folder, adapters={"first": first}, enable_lora=True, max_lora_rank=8, **COMMON)
    with pytest.raises(
        CheckpointError, match="lm_head: there is no room for it: use --lora-target-modules lm_head"
    ):
        LLM(
            folder,
            adapters={"first": first},
            enable_lora=True,
            lora_target_modules=("embed_tokens",),
            **COMMON,
        )


def test_shipped_adapters_fit_the_defaults() -> None:
    """So that nobody reads them before a server starts."""
    rank, targets = room_of(shipped_adapters(), read_model(find_model(DEFAULT_MODEL)).spec)
    assert rank <= DEFAULT_LORA_RANK
    assert not targets


def test_many_small_adapters_stay_where_few_large_ones_fit(checkpoint: Folder) -> None:
    """The pool's bytes decide, not the number: none of them is read twice."""
    folder = checkpoint("qwen3")
    spec = read_model(folder).spec
    small = {f"a{seed}": random_adapter(spec, seed, 1, only=("q_proj",)) for seed in range(12)}
    with LLM(folder, adapters=small, enable_lora=True, max_loras=2, lora_memory="2MiB", **COMMON) as llm:
        for _ in range(2):
            for name in small:
                llm.generate(prompt(1, 5), SamplingParams(max_tokens=2), adapter=name)
        service = llm.built.core.adapters
        assert service is not None
        assert set(service.loads.values()) == {1}
        assert not service.evictions
        used, size = service.pool_bytes
        assert 0 < used <= size
    with pytest.raises(
        MemoryBudgetError, match=r"lora_memory: 64\.00 KiB holds no adapter of max_lora_rank 64, which takes"
    ):
        LLM(folder, enable_lora=True, max_lora_rank=64, lora_memory="64KiB", **COMMON)
