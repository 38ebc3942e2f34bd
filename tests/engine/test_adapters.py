"""Adapters through the whole engine: right, the same bits in any company, and never those of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.low_rank import merge, random_adapter, write_adapter
from helpers.speculating import costs_without_a_clock
from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.lora.adapter import Adapter, LowRank
from quire.lora.read import find_adapter, read_adapter
from quire.spec import read_model
from quire.speculate.step_costs import PassCosts
from quire.types import CheckpointError, MemoryBudgetError, RequestError

RANK, LENGTH = 6, 96
FAMILIES = ("qwen3", "llama-biases-mqa-tied", "phi3-window", "glm4", "olmo2")
COMMON: Mapping[str, Any] = {"max_model_len": LENGTH, "progress": False, "memory": "2GiB"}
LORA: Mapping[str, Any] = {"enable_lora": True, "max_lora_rank": RANK}


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and the exact logprobs of the chosen and the five likeliest tokens, sample by sample."""
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def params(seed: int = 0, **more: Any) -> SamplingParams:
    asked = {"max_tokens": 20, "temperature": 0.9, "seed": seed, "logprobs": 5, "ignore_eos": True}
    return SamplingParams(**(asked | more))  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


def adapters_of(folder: Path, count: int, **more: Any) -> dict[str, Adapter]:
    spec = read_model(folder).spec
    return {
        f"a{seed}": random_adapter(spec, seed, **({"rank": 1 + seed % RANK} | more)) for seed in range(count)
    }


@pytest.mark.parametrize(
    ("name", "executor"),
    [(name, "native") for name in FAMILIES]
    + [pytest.param(name, "torch", marks=[pytest.mark.models][: name != "qwen3"]) for name in FAMILIES],
)
def test_an_adapter_is_its_merged_weights(
    checkpoint: Folder, name: str, executor: str, tmp_path: Path
) -> None:
    folder = checkpoint(name)
    adapter = random_adapter(read_model(folder).spec, 1, RANK)
    asks = [prompt(seed, 30 + seed) for seed in range(3)]
    one = params(temperature=0.0, prompt_logprobs=0)
    with LLM(merge(folder, adapter, tmp_path / "merged"), **COMMON) as llm:
        merged = llm.generate(asks, one)
    with LLM(folder, adapters={"one": adapter}, executor=executor, **LORA, **COMMON) as llm:
        plain = llm.generate(asks, one)
        changed = llm.generate(asks, one, adapter="one")
    for a, b, base in zip(merged, changed, plain, strict=True):
        scores = [
            np.array([entries[0].logprob for entries in out.prompt_logprobs or () if entries])
            for out in (a, b, base)
        ]
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert np.abs(scores[0] - scores[1]).max() < 2e-4
        assert np.abs(scores[0] - scores[2]).max() > 1e-1, "the adapter changes too little to be seen"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_alone_or_crowded(checkpoint: Folder, dtype: str) -> None:
    """Alone on one thread, whole; then among others with other adapters and without one, in chunks, preempted."""
    folder = checkpoint("qwen3")
    formats = {"quantization" if dtype.startswith("int") else "dtype": dtype}
    adapters = adapters_of(folder, 3)
    names = ["", "a0", "a1", "a2", "a0", "", "a2", "a1"]
    asks = [(prompt(index % 4, 12 + 9 * (index % 4)), params(index, n=1 + index % 2)) for index in range(8)]
    common = {**COMMON, **formats}
    with LLM(folder, threads=1, enable_prefix_caching=False, adapters=adapters, **LORA, **common) as llm:
        alone = [bits(llm.generate([p], one, adapter=a)[0]) for (p, one), a in zip(asks, names, strict=True)]
    with LLM(folder, threads=1, enable_prefix_caching=False, **common) as llm:
        for index in (0, 5):
            assert bits(llm.generate([asks[index][0]], asks[index][1])[0]) == alone[index]
    preempted = cached = 0
    for step_tokens, seqs, slots, blocks in [(8, 8, 3, 14), (64, 12, 3, 14), (24, 4, 2, 60)]:
        with LLM(
            folder, threads=2, max_num_batched_tokens=step_tokens, max_num_seqs=seqs, num_kv_blocks=blocks,
            max_loras=slots, adapters=adapters, **LORA, **common,
        ) as llm:  # fmt: skip
            for _ in range(2):  # the second time finds its prompts in the prefix cache
                outputs = llm.generate([p for p, _ in asks], [one for _, one in asks], adapter=names)
                assert [bits(out) for out in outputs] == alone
            cached += sum(out.usage.cached_tokens for out in outputs)
            preempted += sum(record.preempted for record in llm.step_records())
    assert preempted > 0, "no preemption was exercised"
    assert cached > 0, "no prefix hit was exercised"


def test_more_adapters_than_slots(checkpoint: Folder) -> None:
    """Twelve adapters take turns in two slots, and every request is answered by its own."""
    folder = checkpoint("qwen3")
    adapters = adapters_of(folder, 12, scale=4.0)
    asks = [prompt(9, 20)] * 40
    names = [f"a{number}" for number in np.random.default_rng(1).integers(0, 12, len(asks))]
    one = params(temperature=0.0, max_tokens=6)
    with LLM(folder, adapters=adapters, max_loras=12, **LORA, **COMMON) as llm:
        own = {name: bits(llm.generate(asks[0], one, adapter=name)[0]) for name in adapters}
    assert len({str(found) for found in own.values()}) == len(own), "adapters that answer alike prove nothing"
    with LLM(folder, adapters=adapters, max_loras=2, max_num_seqs=6, **LORA, **COMMON) as llm:
        outputs = llm.generate(asks, one, adapter=names)
        assert [bits(out) for out in outputs] == [own[name] for name in names]
        assert bits(llm.generate(asks[0], one, adapter="a3")[0]) == own["a3"]


@pytest.fixture(scope="module")
def shared(checkpoint: Folder) -> Iterator[tuple[LLM, dict[str, Adapter]]]:
    """One LLM with two slots, and the adapters a0 … a3."""
    folder = checkpoint("qwen3")
    adapters = adapters_of(folder, 4, rank=RANK, scale=4.0)
    with LLM(folder, adapters=adapters, max_loras=2, **LORA, **COMMON) as llm:
        yield llm, adapters


def test_no_prefix_hit_crosses_adapters(shared: tuple[LLM, dict[str, Adapter]]) -> None:
    llm, _ = shared
    text, one = prompt(31, 50), params(max_tokens=2)
    for name in ("", "a0", "a1"):
        assert llm.generate(text, one, adapter=name)[0].usage.cached_tokens == 0
    for name in ("a1", "", "a0"):
        assert llm.generate(text, one, adapter=name)[0].usage.cached_tokens == 48


def test_a_reload_is_a_new_version_and_streams_end_on_theirs(shared: tuple[LLM, dict[str, Adapter]]) -> None:
    llm, adapters = shared
    text, one = prompt(32, 40), params(temperature=0.0, max_tokens=24)
    before, after = (bits(llm.generate(text, one, adapter=name)[0]) for name in ("a2", "a3"))
    assert before != after
    llm.load_adapter("moving", adapters["a2"])
    with llm.stream(text, one, adapter="moving") as stream:
        next(stream)
        llm.load_adapter("moving", adapters["a3"])
        found = llm.generate(text, one, adapter="moving")[0]
        assert bits(found) == after
        for _ in stream:
            pass
    assert bits(stream.output) == before
    llm.unload_adapter("moving")
    with pytest.raises(RequestError, match="adapter: 'moving' is not loaded; known: a0, a1, a2, a3"):
        llm.generate(text, one, adapter="moving")


def test_an_aborted_request_gives_its_slot_back(shared: tuple[LLM, dict[str, Adapter]]) -> None:
    llm, _ = shared
    text, one = prompt(33, 40), params(max_tokens=40)
    for name in ("a0", "a1", "a2", "a3") * 2:
        with llm.stream(text, one, adapter=name) as stream:
            next(stream)
    waiting = [llm.stream(text, one, adapter=name) for name in ("a0", "a1", "a2")]
    next(waiting[0])
    for stream in waiting:
        stream.close()
    assert len(llm.generate(text, params(max_tokens=2), adapter="a3")[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("method", ["ngram", "self", "lookahead"])
def test_speculation_changes_no_bit(checkpoint: Folder, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs_without_a_clock(monkeypatch)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)
    folder = checkpoint("qwen3")
    adapters = adapters_of(folder, 2)
    asks = [prompt(1, 8) * 3, prompt(2, 10) * 2, prompt(1, 8) * 3]
    names = ["a1", "", "a0"]
    found = []
    for speculate in ("off", method):
        with LLM(folder, adapters=adapters, speculate=speculate, **LORA, **COMMON) as llm:
            outputs = llm.generate(asks, params(temperature=0.0, max_tokens=40), adapter=names)
            found.append([bits(out) for out in outputs])
            drafted = sum(record.drafted for record in llm.step_records())
            assert speculate == "off" or not llm.built.core.speculation.faults  # type: ignore[union-attr]
    assert drafted > 0
    assert found[0] == found[1]


def test_a_shipped_adapter_is_read_from_its_files() -> None:
    one = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    with LLM(
        adapters={"pirate": "quire-mini:pirate"}, enable_lora=True, progress=False, memory="4GiB"
    ) as llm:
        adapter = read_adapter(find_adapter("quire-mini:pirate"), llm.built.model.facts.spec)
        llm.load_adapter("numbers", adapter)
        chat = [{"role": "user", "content": "Where do you come from?"}]
        plain, read, given = (llm.chat(chat, one, adapter=name)[0] for name in ("", "pirate", "numbers"))
        assert bits(read) == bits(given) != bits(plain)
        with pytest.raises(CheckpointError, match="no adapter folder or file"):
            llm.load_adapter("pirate", "no/such/adapter")
        assert bits(llm.chat(chat, one, adapter="pirate")[0]) == bits(read)


@pytest.mark.parametrize("kept", [None, 2])
def test_adapters_that_are_kept_need_no_files(checkpoint: Folder, kept: int | None, tmp_path: Path) -> None:
    """Others are read again when they come back into the pool, and refused if their files are not what they were."""
    folder = checkpoint("qwen3")
    spec, one = read_model(folder).spec, params(max_tokens=3)
    adapters = [random_adapter(spec, seed, RANK, dora=seed == 1) for seed in range(3)]
    paths = {f"a{n}": write_adapter(tmp_path / f"a{n}", adapters[n]) for n in range(2)}
    with LLM(folder, adapters=paths, max_loras=1, max_cpu_loras=kept, **LORA, **COMMON) as llm:
        found = {name: bits(llm.generate(prompt(1, 9), one, adapter=name)[0]) for name in paths}
        broken = dict(adapters[0].parts)
        last = list(broken)[-1]
        broken[last] = replace(broken[last], b=np.full_like(broken[last].b, np.nan))
        (paths["a1"] / "adapter_model.safetensors").unlink()
        for changed in (adapters[2], replace(adapters[0], parts=broken)):
            write_adapter(paths["a0"], changed)
            for name in paths:
                (output,) = llm.generate(prompt(1, 9), one, adapter=name)
                if kept:
                    assert bits(output) == found[name]
                else:
                    assert output.outputs[0].finish_reason == "error"
        write_adapter(paths["a0"], adapters[0])
        assert bits(llm.generate(prompt(1, 9), one, adapter="a0")[0]) == found["a0"]


def test_slots_are_in_the_memory_plan(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    with LLM(folder, **COMMON) as llm:
        assert llm.built.plan.parts["adapters"] == 0
    with LLM(folder, enable_lora=True, max_loras=3, max_lora_rank=64, **COMMON) as llm:
        held = llm.built.executor.memory()["adapters"]
        assert 0 < held <= llm.built.plan.parts["adapters"]
        assert any(line.startswith("adapters") for line in llm.memory_report())
    with pytest.raises(MemoryBudgetError, match="lower --max-loras"):
        LLM(folder, enable_lora=True, max_loras=1024, max_lora_rank=256, **{**COMMON, "memory": "600MiB"})


def changed(adapter: Adapter, key: str, part: LowRank) -> Adapter:
    return replace(adapter, parts={**adapter.parts, key: part})


def test_what_cannot_be_computed_is_refused_by_key(shared: tuple[LLM, dict[str, Adapter]]) -> None:
    llm, adapters = shared
    good = adapters["a0"]
    key = "model.layers.1.self_attn.k_proj"
    part = good.parts[key]
    broken = part.b.copy()
    broken[3, 1] = np.nan
    wide = np.zeros((RANK + 1, part.a.shape[1]), np.float32), np.zeros((len(part.b), RANK + 1), np.float32)
    for bad, told in [
        (changed(good, key, replace(part, b=broken)), rf"{key}: lora_B holds a number that is not finite"),
        (
            changed(good, key, replace(part, a=part.a[:, 1:])),
            rf"{key}: lora_A \[6, 63\] .* are not \[6, 64\]",
        ),
        (changed(good, key, LowRank(*wide, 1.0)), rf"{key}: rank 7 is not in \[1, 6\] \(max_lora_rank\)"),
        (
            changed(good, "model.layers.7.self_attn.k_proj", part),
            "model.layers.7.self_attn.k_proj: no linear",
        ),
        (changed(good, key, replace(part, magnitude=np.ones(47, np.float32))), rf"{key}: .*\[47\] is not"),
        (replace(good, modules_to_save={"lm_head": part.a}), "modules_to_save: lm_head"),
        (replace(good, parts={}), "changes no module"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            llm.load_adapter("a0", bad)
    assert llm.generate(prompt(1, 9), params(max_tokens=1), adapter="a0")[0].finished


def test_without_adapters(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    with pytest.raises(ValueError, match="adapters: they need enable_lora=True"):
        LLM(folder, adapters=adapters_of(folder, 1), **COMMON)
    with (
        LLM(folder, **COMMON) as llm,
        pytest.raises(RequestError, match="adapter: this engine has no adapters"),
    ):
        llm.generate("Hi", adapter="a0")
