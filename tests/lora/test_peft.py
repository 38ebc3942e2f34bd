"""Adapters that PEFT writes, merged here, against PEFT's own logits. `make test-models`: PEFT is installed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import load_reference, random_tokens, reference_logits, save, tiny_model
from quire import LLM, SamplingParams
from quire.cli.main import main

pytestmark = pytest.mark.models
HERE = Path(__file__).parent
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every linear": ("llama2", {"target_modules": _ALL, "lora_alpha": 12}),
    "patterns": (
        "qwen3-biases-mha",
        {"target_modules": _ALL, "rank_pattern": {"layers.1.self_attn.q_proj": 2, ".*down_proj": 6, "k_proj": 3},
         "alpha_pattern": {"^model.layers.0.mlp.up_proj": 3, "q_proj": 5}},
    ),
    "rsLoRA": ("mistral-window", {"target_modules": _ALL, "use_rslora": True}),
    "DoRA": ("gemma2", {"target_modules": _ALL, "use_dora": True}),
    "some layers": ("olmo3", {"target_modules": ["o_proj"], "layers_to_transform": [1, 3]}),
    "fused": ("phi3-window", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "use_dora": True}),
    "fan_in_fan_out": ("granite", {"target_modules": ["q_proj"], "fan_in_fan_out": True}),
    "embedding": ("llama3.1", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding": ("qwen2-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("llama2", {"target_modules": ["lm_head"]}),
    "modules_to_save": ("llama2", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied modules_to_save": ("qwen3", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "latent attention": (
        "deepseek3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
    "experts": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "experts of other names": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "experts the other way": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "one tensor of experts": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS[1:]}),
    "router": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
}  # fmt: skip


@pytest.fixture(scope="session")
def peft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with PEFT and what it needs beside torch and transformers; QUIRE_PEFT names one that is there."""
    if os.environ.get("QUIRE_PEFT"):
        return Path(os.environ["QUIRE_PEFT"])
    folder = tmp_path_factory.mktemp("peft")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "peft", "accelerate", "psutil"], check=True)
    return folder


def written(case: str, peft_path: Path, folder: Path) -> tuple[Path, Path, list[int]]:
    """A base, PEFT's adapter for it, and the tokens of the logits that it left in its folder."""
    name, config = CASES[case]
    base, adapter = folder / "base", folder / "adapter"
    save(tiny_model(name), base, torch.float32)
    tokens = random_tokens(3)
    subprocess.run(
        [sys.executable, str(HERE / "peft_reference.py"), str(base), str(adapter)],
        input=json.dumps({"config": {"r": 4, "task_type": "CAUSAL_LM"} | config, "tokens": tokens}).encode(),
        env=os.environ | {"PYTHONPATH": str(peft_path), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    return base, adapter, tokens


def chosen_logprobs(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Of each token after the first, from the logits before it."""
    scores = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), -1).numpy()
    return scores[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("case", CASES)
def test_engine_and_merged_logits_equal_those_of_peft(case: str, peft_path: Path, tmp_path: Path) -> None:
    """Unmerged in the engine, over float32, int8 and int4; and merged by `convert`."""
    base, adapter, tokens = written(case, peft_path, tmp_path)
    out = tmp_path / "out"
    assert main(["convert", str(base), str(out), "--quiet", "--merge-adapter", str(adapter)]) == 0
    found = reference_logits(load_reference(out, torch.float32), tokens)
    expected = np.load(adapter / "logits.npy")
    plain = reference_logits(load_reference(base, torch.float32), tokens)
    assert np.abs(expected - plain).max() > 0.05
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    exact, alone = chosen_logprobs(expected, tokens), chosen_logprobs(plain, tokens)
    one = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for quantization in ("none", "int8", "int4"):
        with LLM(
            base, adapters={"one": adapter}, enable_lora=True, lora_target_modules=("all",), max_lora_rank=16,
            quantization=quantization, max_model_len=128, progress=False, memory="2GiB",
        ) as llm:  # fmt: skip
            errors = []
            for name, wanted in (("one", exact), ("", alone)):
                (output,) = llm.generate([tokens], one, adapter=name, use_tqdm=False)
                scores = [each[0].logprob for each in output.prompt_logprobs or () if each]
                errors.append(float(np.sqrt(np.mean((np.array(scores) - wanted) ** 2))))
        # B times the scale is rounded to bfloat16 in slots; wider logits have wider errors
        changed, wider = float(np.sqrt(np.mean((exact - alone) ** 2))), np.std(expected) / np.std(plain)
        assert errors[0] < 1.6 * errors[1] * max(1, wider) + 0.06 * changed, (quantization, errors, changed)
    if (
        adapter / "merged.npy"
    ).exists() and case != "tied embedding":  # PEFT's merge changes the tied head too
        np.testing.assert_allclose(found, np.load(adapter / "merged.npy"), rtol=0, atol=2e-4)
